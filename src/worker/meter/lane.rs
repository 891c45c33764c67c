//! The counters of one lane: waits for permits, requests and their lateness, responses, and how jobs ended.
//!
//! It only counts; other modules decide what counts as refused or late. Jobs and requests in progress are counted by
//! guards, so that none stays counted when a job ends early.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::buckets::{Buckets, ms};
use super::decisions::{DecisionKind, DecisionLog, LaneDecision};
use super::labelled_counter::LabelledCounter;
use crate::domain::job::{InvalidReason, JobField};
use crate::domain::outcome::FinalState;

/// Bounds of the waits for a permit, in milliseconds.
pub(super) const WAITS_MS: [u64; 16] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000];
const WAITS_US: [u64; 16] = ms(WAITS_MS);
/// Bounds of requests and of the hold of their permits, in microseconds.
const REQUESTS_US: [u64; 13] = ms([5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000]);
/// Bounds of the lateness of starts, in microseconds; 600 µs and 3 ms are the limits that starts are tested against.
const LATENESS_US: [u64; 14] =
    [100, 200, 500, 600, 1_000, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 1_000_000];
/// Bounds from the recording of a job to its end, in microseconds: from a tenth of a second to a week.
const JOBS_US: [u64; 14] = ms([
    100,
    500,
    1_000,
    5_000,
    15_000,
    60_000,
    300_000,
    900_000,
    3_600_000,
    14_400_000,
    43_200_000,
    86_400_000,
    259_200_000,
    604_800_000,
]);

/// Classes of responses: the status class, no response at all, or not sent.
const STATUS_CLASSES: [&str; 7] = ["1xx", "2xx", "3xx", "4xx", "5xx", "none", "unsent"];

/// Why a permit was refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusalLabels {
    /// A code of a closed list; `limit` for a limit.
    pub reason: &'static str,
    /// The name of the limit.
    pub limit: Option<String>,
}

/// Why a permit was released unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnReason {
    /// Its request was recorded too late.
    DeadlineMissed,
    /// Its request could not be recorded.
    LedgerUnavailable,
    /// Its job was taken over by another worker.
    TakenOver,
    /// Its job was not to be sent any more.
    NotNeeded,
    /// Another job tests whether the provider is up again.
    Probing,
}

impl ReturnReason {
    pub const ALL: [Self; 5] =
        [Self::DeadlineMissed, Self::LedgerUnavailable, Self::TakenOver, Self::NotNeeded, Self::Probing];

    /// Label for metrics; stable.
    pub fn code(self) -> &'static str {
        match self {
            Self::DeadlineMissed => "late",
            Self::LedgerUnavailable => "ledger_unavailable",
            Self::TakenOver => "taken_over",
            Self::NotNeeded => "not_needed",
            Self::Probing => "probing",
        }
    }
}

/// The counters of one lane; shared by all of its jobs.
#[derive(Debug)]
pub struct LaneMeter {
    pub(super) sent: AtomicU64,
    pub(super) throttled: AtomicU64,
    pub(super) granted: AtomicU64,
    pub(super) returned: LabelledCounter<&'static str>,
    pub(super) redelivered: AtomicU64,
    pub(super) uncounted: LabelledCounter<JobField>,
    pub(super) in_flight: Arc<AtomicU64>,
    pub(super) active: Arc<AtomicU64>,
    pub(super) waiting: Arc<AtomicU64>,
    pub(super) answers: LabelledCounter<&'static str>,
    pub(super) outcomes: LabelledCounter<&'static str>,
    pub(super) refused: LabelledCounter<RefusalLabels>,
    pub(super) requeues: LabelledCounter<&'static str>,
    pub(super) rejected: LabelledCounter<&'static str>,
    pub(super) permit_waits: Buckets,
    pub(super) lateness: Buckets,
    pub(super) lateness_ahead: Buckets,
    pub(super) holds: Buckets,
    pub(super) requests: Buckets,
    pub(super) jobs: Buckets,
    pub(super) decisions: DecisionLog,
}

/// Counts one thing in progress until it is dropped.
#[derive(Debug)]
#[must_use = "it is counted for as long as this lives"]
pub struct GaugeGuard(Arc<AtomicU64>);

impl GaugeGuard {
    fn increment(gauge: &Arc<AtomicU64>) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(gauge))
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for LaneMeter {
    fn default() -> Self {
        Self {
            sent: AtomicU64::default(),
            throttled: AtomicU64::default(),
            granted: AtomicU64::default(),
            returned: LabelledCounter::with_labels(ReturnReason::ALL.map(ReturnReason::code)),
            redelivered: AtomicU64::default(),
            uncounted: LabelledCounter::with_labels(JobField::ALL),
            in_flight: Arc::default(),
            active: Arc::default(),
            waiting: Arc::default(),
            answers: LabelledCounter::with_labels(STATUS_CLASSES),
            outcomes: LabelledCounter::with_labels(FinalState::ALL.map(FinalState::name)),
            refused: LabelledCounter::with_labels([]),
            requeues: LabelledCounter::with_labels([]),
            rejected: LabelledCounter::with_labels(InvalidReason::ALL.map(InvalidReason::code)),
            permit_waits: Buckets::new(&WAITS_US),
            lateness: Buckets::new(&LATENESS_US),
            lateness_ahead: Buckets::new(&LATENESS_US),
            holds: Buckets::new(&REQUESTS_US),
            requests: Buckets::new(&REQUESTS_US),
            jobs: Buckets::new(&JOBS_US),
            decisions: DecisionLog::default(),
        }
    }
}

impl LaneMeter {
    /// Counts a delivery; its job is active until the guard drops.
    pub fn delivery_started(&self, redelivered: bool) -> GaugeGuard {
        if redelivered {
            self.redelivered.fetch_add(1, Ordering::Relaxed);
        }
        GaugeGuard::increment(&self.active)
    }

    /// Counts a job that waits for a permit until the guard drops.
    pub fn permit_wait_started(&self) -> GaugeGuard {
        GaugeGuard::increment(&self.waiting)
    }

    /// Counts a granted permit that may be used this long after it was requested.
    pub fn record_grant(&self, wait: Duration) {
        self.granted.fetch_add(1, Ordering::Relaxed);
        self.permit_waits.observe(wait);
        let (kind, reason) = (DecisionKind::Granted, "all limits had free slots".to_owned());
        self.decisions.record(LaneDecision { kind, merge_key: String::new(), reason, permits: 1 });
    }

    /// Counts a refused permit; `words` give the reason and the wait.
    pub fn record_refusal(&self, refused: RefusalLabels, words: String) {
        let merge_key = refused.limit.clone().unwrap_or_else(|| refused.reason.to_owned());
        self.refused.increment(refused);
        self.decisions.record(LaneDecision { kind: DecisionKind::Refused, merge_key, reason: words, permits: 1 });
    }

    /// Counts a permit that was released unused.
    pub fn record_return(&self, why: ReturnReason) {
        self.returned.increment(why.code());
    }

    /// Counts a job that is sent for the first time without a field that its provider's limits or rules use.
    pub fn record_missing_field(&self, lacks: JobField) {
        self.uncounted.increment(lacks);
    }

    /// Counts a request that begins this long after its permit's start, which may have lain `ahead` when the permit was
    /// granted; in flight until the guard drops.
    pub fn request_started(&self, lateness: Duration, ahead: bool) -> GaugeGuard {
        self.sent.fetch_add(1, Ordering::Relaxed);
        self.lateness.observe(lateness);
        if ahead {
            self.lateness_ahead.observe(lateness);
        }
        GaugeGuard::increment(&self.in_flight)
    }

    /// Counts the end of a request; `status` if there was a response, `left` if any of it may have been sent.
    pub fn record_response(&self, status: Option<u16>, left: bool, took: Duration) {
        let class = match status {
            Some(status @ 100..600) => STATUS_CLASSES.get(usize::from(status / 100) - 1).copied().unwrap_or("none"),
            Some(_) => "none",
            None if left => "none",
            None => "unsent",
        };
        self.answers.increment(class);
        self.requests.observe(took);
    }

    /// Records the hold of a permit: from its start until the response was read, or until no response is awaited.
    pub fn record_hold(&self, held: Duration) {
        self.holds.observe(held);
    }

    /// Counts a throttled response to a request that the limits allowed.
    pub fn record_throttle(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a finished job and the time since it was recorded.
    pub fn record_finished(&self, outcome: &'static str, after: Duration) {
        self.outcomes.increment(outcome);
        self.jobs.observe(after);
    }

    /// Counts a job that was delayed or requeued.
    pub fn record_requeue(&self, reason: &'static str) {
        self.requeues.increment(reason);
    }

    /// Counts and records the delay of a job.
    pub fn record_delay(&self, reason: &'static str, words: &str) {
        self.requeues.increment(reason);
        let (merge_key, reason) = (reason.to_owned(), words.to_owned());
        self.decisions.record(LaneDecision { kind: DecisionKind::Delayed, merge_key, reason, permits: 0 });
    }

    /// Counts a message that can never be a job.
    pub fn record_rejected(&self, reason: &'static str) {
        self.rejected.increment(reason);
    }

    pub fn record_decision(&self, decision: LaneDecision) {
        self.decisions.record(decision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_of<K: PartialEq + Copy>(counts: &[(K, u64)], label: K) -> u64 {
        counts.iter().find(|(known, _)| *known == label).map_or(0, |(_, count)| *count)
    }

    #[test]
    fn gauges_count_until_their_guard_drops() {
        let meter = LaneMeter::default();
        let taken = [meter.delivery_started(false), meter.delivery_started(true)];
        let waiting = meter.permit_wait_started();
        let sent = meter.request_started(Duration::from_micros(300), true);
        let figures = meter.figures();
        assert_eq!((figures.active, figures.in_flight, figures.sent_total), (2, 1, 1));
        assert_eq!((meter.counts().waiting, meter.counts().redelivered), (1, 1));
        drop((taken, waiting, sent));
        let figures = meter.figures();
        assert_eq!((figures.active, figures.in_flight, figures.sent_total, meter.counts().waiting), (0, 0, 1, 0));
    }

    /// A counter that first appears with its first event shows Prometheus no increase.
    #[test]
    fn rejection_counters_start_at_zero() {
        let meter = LaneMeter::default();
        let rejected = meter.counts().rejected;
        assert_eq!((rejected.len(), rejected.iter().map(|(_, count)| count).sum::<u64>()), (15, 0), "{rejected:?}");
        meter.record_rejected(InvalidReason::BadAmount.code());
        assert_eq!((count_of(&meter.counts().rejected, "bad_amount"), meter.counts().rejected.len()), (1, 15));
    }

    #[test]
    fn responses_are_counted_by_status_class() {
        let meter = LaneMeter::default();
        let took = Duration::from_millis(3);
        for status in [Some(200), Some(201), Some(429), Some(503), Some(799), None] {
            meter.record_response(status, true, took);
        }
        meter.record_response(None, false, took);
        let answers = meter.counts().answers;
        let found = ["2xx", "3xx", "4xx", "5xx", "none", "unsent"].map(|class| count_of(&answers, class));
        assert_eq!(found, [2, 0, 1, 1, 2, 1]);
        assert_eq!(meter.counts().requests.counts[0], 7);
    }

    #[test]
    fn refusal_is_counted_by_limit_and_logged() {
        let meter = LaneMeter::default();
        let by = |limit: &str| RefusalLabels { reason: "limit", limit: Some(limit.to_owned()) };
        meter.record_refusal(by("per-second"), "refused by per-second (5/1s), free in 0.8 s".to_owned());
        meter.record_refusal(by("per-second"), "refused by per-second (5/1s), free in 0.7 s".to_owned());
        meter.record_refusal(RefusalLabels { reason: "cold", limit: None }, "cold".to_owned());
        assert_eq!(meter.counts().refused.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1, 2]);
        let decisions = meter.figures().decisions;
        assert_eq!(decisions.len(), 2);
        assert_eq!((decisions[1].permits, decisions[1].reason.ends_with("0.7 s")), (2, true));
        let waits = meter.figures().permit_waits;
        assert_eq!(waits.counts.len(), waits.bounds_ms.len() + 1);
    }
}
