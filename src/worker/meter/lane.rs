//! The counters of one lane: waits for permits, requests and their lateness, responses, and how jobs ended.
//!
//! It only counts; other modules decide what counts as refused or late. Jobs and requests in progress are counted by
//! guards, so that none stays counted when a job ends early.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::decisions::{DecisionKind, DecisionLog, LaneDecision};
use super::{Counters, Families, Labels, UnsignedGauge, WAITS_MS, start_lateness};
use crate::domain::job::{InvalidReason, JobField};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::domain::time::micros_down;
use crate::fleet::report::{HeldRequests, LaneReport, WaitHistogram};

/// Classes of responses: the status class, no response at all, or not sent.
const STATUS_CLASSES: [&str; 7] = ["1xx", "2xx", "3xx", "4xx", "5xx", "none", "unsent"];

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
    families: Arc<Families>,
    /// The provider.
    labels: Labels,
    /// The series of [`Self::show_all`], from the first delivery on.
    shown: OnceLock<ShownSeries>,
    sent: AtomicU64,
    /// The counts of [`WAITS_MS`] for the overview: a [`Histogram`] shows its own to a scrape alone.
    waits: [AtomicU64; WAITS_MS.len() + 1],
    /// Ended holds, and the sum of them in microseconds.
    held: [AtomicU64; 2],
    lateness_ahead: Histogram,
    /// The series of [`Self::requeues`] that were counted in.
    delays: Mutex<HashMap<&'static str, Counter>>,
    decisions: DecisionLog,
}

/// Series that each payment counts in: they are not looked up by their labels each time.
#[derive(Debug)]
struct ShownSeries {
    /// In the order of [`FinalState::ALL`].
    finished: [Counter; FinalState::ALL.len()],
    /// In the order of [`STATUS_CLASSES`].
    responses: [Counter; STATUS_CLASSES.len()],
    job_duration_seconds: Histogram,
    permit_wait_seconds: Histogram,
    provider_request_duration_seconds: Histogram,
    hold_seconds: Histogram,
    start_lateness_seconds: Histogram,
}

/// Counts one thing in progress until it is dropped.
#[derive(Debug)]
#[must_use = "it is counted for as long as this lives"]
pub struct GaugeGuard(UnsignedGauge);

impl GaugeGuard {
    fn increment(gauge: UnsignedGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl LaneMeter {
    pub(super) fn new(provider: &ProviderName, families: Arc<Families>) -> Self {
        let lane = Self {
            families,
            labels: vec![("provider", provider.to_string())],
            shown: OnceLock::new(),
            sent: AtomicU64::default(),
            waits: std::array::from_fn(|_| AtomicU64::default()),
            held: <[AtomicU64; 2]>::default(),
            lateness_ahead: start_lateness(),
            delays: Mutex::default(),
            decisions: DecisionLog::default(),
        };
        let Families { permits_granted, provider_throttled, redelivered, .. } = lane.families.as_ref();
        [permits_granted, provider_throttled, redelivered].into_iter().for_each(|counter| drop(lane.own(counter)));
        let Families { active_jobs, gate_waiting_jobs, in_flight_requests, unwritten_outcomes, .. } =
            lane.families.as_ref();
        [active_jobs, gate_waiting_jobs, in_flight_requests, unwritten_outcomes]
            .into_iter()
            .for_each(|gauge| drop(lane.own(gauge)));
        JobField::ALL.into_iter().for_each(|field| drop(lane.without(field)));
        lane
    }

    /// Shows what has a series for each reason, class or bound: nine tenths of a scrape, and most lanes are idle.
    ///
    /// All counters begin at zero before the first job has an effect, so that most scrapes see their first increase.
    fn show_all(&self) -> &ShownSeries {
        self.shown.get_or_init(|| {
            ReturnReason::ALL.into_iter().for_each(|why| drop(self.returned(why)));
            InvalidReason::ALL.into_iter().for_each(|reason| drop(self.rejected(reason.code())));
            let families = self.families.as_ref();
            ShownSeries {
                finished: FinalState::ALL.map(|state| self.finished(state.name())),
                responses: STATUS_CLASSES
                    .map(|class| self.labelled(&families.provider_requests, "status_class", class)),
                job_duration_seconds: self.own(&families.job_duration_seconds),
                permit_wait_seconds: self.own(&families.permit_wait_seconds),
                provider_request_duration_seconds: self.own(&families.provider_request_duration_seconds),
                hold_seconds: self.own(&families.hold_seconds),
                start_lateness_seconds: self.own(&families.start_lateness_seconds),
            }
        })
    }

    fn own<M: Clone>(&self, family: &Family<Labels, M>) -> M {
        family.get_or_create_owned(&self.labels)
    }

    fn labelled(&self, family: &Counters, label: &'static str, value: &str) -> Counter {
        let labels = self.labels.iter().cloned().chain([(label, value.to_owned())]).collect();
        family.get_or_create_owned(&labels)
    }

    /// Jobs sent without a field that their provider's limits or rules use.
    pub fn without(&self, field: JobField) -> Counter {
        self.own(match field {
            JobField::Account => &self.families.jobs_without_account,
            JobField::Reference => &self.families.jobs_without_reference,
        })
    }

    /// Permits that were released unused.
    pub fn returned(&self, why: ReturnReason) -> Counter {
        self.labelled(&self.families.permit_returned, "reason", why.code())
    }

    /// Jobs with this final state.
    pub fn finished(&self, outcome: &str) -> Counter {
        self.labelled(&self.families.jobs, "outcome", outcome)
    }

    /// Jobs that were delayed or requeued.
    pub fn requeues(&self, reason: &str) -> Counter {
        self.labelled(&self.families.requeues, "reason", reason)
    }

    fn rejected(&self, reason: &str) -> Counter {
        self.labelled(&self.families.rejected_messages, "reason", reason)
    }

    /// Lateness of all starts, and of those that lay ahead when their permit was granted; the others begin as soon as
    /// they are recorded.
    pub fn lateness(&self) -> [Histogram; 2] {
        [self.own(&self.families.start_lateness_seconds), self.lateness_ahead.clone()]
    }

    /// Requests that await their responses.
    pub fn in_flight(&self) -> u64 {
        self.own(&self.families.in_flight_requests).get()
    }

    /// The counted part of the lane's report, with at most 50 decisions.
    pub fn figures(&self) -> LaneReport {
        let counts = self.waits.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let [count, total_us] = self.held.each_ref().map(|sum| sum.load(Ordering::Relaxed));
        LaneReport {
            sent_total: self.sent.load(Ordering::Relaxed),
            in_flight: self.in_flight(),
            active: self.own(&self.families.active_jobs).get(),
            held: HeldRequests { count, total_us },
            waits: WaitHistogram { bounds_ms: WAITS_MS.to_vec(), counts },
            decisions: self.decisions.read(),
            ..LaneReport::default()
        }
    }

    /// Counts a delivery; its job is active until the guard drops.
    pub fn delivery_started(&self, redelivered: bool) -> GaugeGuard {
        self.show_all();
        if redelivered {
            self.own(&self.families.redelivered).inc();
        }
        GaugeGuard::increment(self.own(&self.families.active_jobs))
    }

    /// Counts an outcome that the ledger has not accepted until the guard drops.
    pub fn outcome_unwritten(&self) -> GaugeGuard {
        GaugeGuard::increment(self.own(&self.families.unwritten_outcomes))
    }

    /// Counts a job that waits for a permit until the guard drops.
    pub fn permit_wait_started(&self) -> GaugeGuard {
        GaugeGuard::increment(self.own(&self.families.gate_waiting_jobs))
    }

    /// Counts a granted permit that may be used this long after it was requested.
    pub fn record_grant(&self, wait: Duration) {
        self.own(&self.families.permits_granted).inc();
        self.show_all().permit_wait_seconds.observe(wait.as_secs_f64());
        let bucket = WAITS_MS.partition_point(|bound| Duration::from_millis(*bound) < wait);
        if let Some(count) = self.waits.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let reason = Cow::Borrowed("all limits had free slots");
        let granted = LaneDecision { kind: DecisionKind::Granted, merge_key: Cow::Borrowed(""), reason, permits: 1 };
        self.decisions.record(granted);
    }

    /// Counts a refused permit. `reason` is a code of a closed list, `limit` for a limit, which is named then; `words`
    /// give the reason and the wait.
    pub fn record_refusal(&self, reason: &'static str, limit: Option<&str>, words: String) {
        let mut labels = self.labels.clone();
        labels.extend([("reason", reason.to_owned()), ("limit", limit.unwrap_or_default().to_owned())]);
        self.families.permits_refused.get_or_create(&labels).inc();
        let merge_key = limit.unwrap_or(reason).to_owned().into();
        let kind = DecisionKind::Refused;
        self.decisions.record(LaneDecision { kind, merge_key, reason: words.into(), permits: 1 });
    }

    /// Counts a permit that was released unused.
    pub fn record_return(&self, why: ReturnReason) {
        self.returned(why).inc();
    }

    /// Counts a request that begins this long after its permit's start, which may have lain `ahead` when the permit was
    /// granted; in flight until the guard drops.
    pub fn request_started(&self, lateness: Duration, ahead: bool) -> GaugeGuard {
        self.sent.fetch_add(1, Ordering::Relaxed);
        // The whole is counted before the part, so that the part is never larger.
        self.show_all().start_lateness_seconds.observe(lateness.as_secs_f64());
        if ahead {
            self.lateness_ahead.observe(lateness.as_secs_f64());
        }
        GaugeGuard::increment(self.own(&self.families.in_flight_requests))
    }

    /// Counts the end of a request; `status` if there was a response, `left` if any of it may have been sent.
    pub fn record_response(&self, status: Option<u16>, left: bool, took: Duration) {
        let shown = self.show_all();
        let [hundreds @ .., no_response, unsent] = &shown.responses;
        let class = match status {
            Some(status @ 100..600) => hundreds.get(usize::from(status / 100) - 1).unwrap_or(no_response),
            Some(_) => no_response,
            None if left => no_response,
            None => unsent,
        };
        class.inc();
        shown.provider_request_duration_seconds.observe(took.as_secs_f64());
    }

    /// Records the hold of a permit: from its start until the response was read, or until no response is awaited.
    pub fn record_hold(&self, held: Duration) {
        self.show_all().hold_seconds.observe(held.as_secs_f64());
        let [count, total_us] = &self.held;
        count.fetch_add(1, Ordering::Relaxed);
        total_us.fetch_add(micros_down(held), Ordering::Relaxed);
    }

    /// Counts a throttled response to a request that the limits allowed.
    pub fn record_throttle(&self) {
        self.own(&self.families.provider_throttled).inc();
    }

    /// Counts a finished job and the time since it was recorded.
    pub fn record_finished(&self, state: FinalState, after: Duration) {
        let shown = self.show_all();
        if let Some((_, finished)) = FinalState::ALL.into_iter().zip(&shown.finished).find(|(of, _)| *of == state) {
            finished.inc();
        }
        shown.job_duration_seconds.observe(after.as_secs_f64());
    }

    /// Counts a job that was delayed or requeued.
    pub fn record_requeue(&self, reason: &'static str) {
        self.delays.lock().entry(reason).or_insert_with(|| self.requeues(reason)).inc();
    }

    /// Counts and records the delay of a job.
    pub fn record_delay(&self, reason: &'static str, words: impl Into<Cow<'static, str>>) {
        self.record_requeue(reason);
        let merge_key = Cow::Borrowed(reason);
        let kind = DecisionKind::Delayed;
        self.decisions.record(LaneDecision { kind, merge_key, reason: words.into(), permits: 0 });
    }

    /// Counts a message that can never be a job.
    pub fn record_rejected(&self, reason: &'static str) {
        self.rejected(reason).inc();
    }

    pub fn record_decision(&self, decision: LaneDecision) {
        self.decisions.record(decision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::meter::Meter;

    /// A meter with its one lane.
    fn lane() -> (Meter, Arc<LaneMeter>) {
        let meter = Meter::default();
        let lane = meter.lane(&ProviderName::new("acme").unwrap());
        (meter, lane)
    }

    /// Samples of a scrape whose names begin so, sorted.
    fn samples(meter: &Meter, name: &str) -> Vec<String> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, meter.registry()).unwrap();
        let mut samples: Vec<_> = text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect();
        samples.sort();
        samples
    }

    #[test]
    fn gauges_count_until_their_guard_drops() {
        let (meter, lane) = lane();
        let taken = [lane.delivery_started(false), lane.delivery_started(true)];
        let waiting = lane.permit_wait_started();
        let sent = lane.request_started(Duration::from_micros(300), true);
        let figures = lane.figures();
        assert_eq!((figures.active, figures.in_flight, figures.sent_total), (2, 1, 1));
        let waits = |jobs| [format!("sluicegate_gate_waiting_jobs{{provider=\"acme\"}} {jobs}")];
        assert_eq!(samples(&meter, "sluicegate_gate_waiting_jobs"), waits(1));
        assert_eq!(samples(&meter, "sluicegate_redelivered"), ["sluicegate_redelivered_total{provider=\"acme\"} 1"]);
        drop((taken, waiting, sent));
        let figures = lane.figures();
        assert_eq!((figures.active, figures.in_flight, figures.sent_total), (0, 0, 1));
        assert_eq!(samples(&meter, "sluicegate_gate_waiting_jobs"), waits(0));
    }

    /// A counter that first appears with its first event shows Prometheus no increase.
    #[test]
    fn counters_start_at_zero_with_the_first_job() {
        let (meter, lane) = lane();
        let shown = || samples(&meter, "sluicegate_").len();
        assert!(shown() < 20, "{}", shown());
        drop(lane.delivery_started(false));
        let rejected = || samples(&meter, "sluicegate_rejected_messages_total");
        assert_eq!((rejected().len(), rejected().iter().filter(|line| line.ends_with("} 0")).count()), (17, 17));
        lane.record_rejected(InvalidReason::BadAmount.code());
        assert_eq!((rejected().len(), rejected().iter().filter(|line| line.ends_with("} 0")).count()), (17, 16));
        for (name, count) in
            [("jobs_total", 6), ("permit_returned", 5), ("provider_requests", 7), ("hold_seconds_c", 1)]
        {
            assert_eq!(samples(&meter, &format!("sluicegate_{name}")).len(), count, "{name}");
        }
    }

    #[test]
    fn responses_are_counted_by_status_class() {
        let (meter, lane) = lane();
        let took = Duration::from_millis(5);
        for status in [Some(200), Some(201), Some(429), Some(503), Some(799), None] {
            lane.record_response(status, true, took);
        }
        lane.record_response(None, false, took);
        let [_, found @ ..] = lane.show_all().responses.each_ref().map(Counter::get);
        assert_eq!(found, [2, 0, 1, 1, 2, 1]);
        let within = "sluicegate_provider_request_duration_seconds_bucket{le=\"0.005\",";
        assert_eq!(samples(&meter, within), [format!("{within}provider=\"acme\"}} 7")]);
    }

    #[test]
    fn refusal_is_counted_by_limit_and_logged() {
        let (meter, lane) = lane();
        for wait in ["0.8", "0.7"] {
            let words = format!("refused by per-second (5/1s), free in {wait} s");
            lane.record_refusal("limit", Some("per-second"), words);
        }
        lane.record_refusal("cold", None, "cold".to_owned());
        let of = |labels| format!("sluicegate_permits_refused_total{{provider=\"acme\",{labels}");
        let expected = [of("reason=\"cold\",limit=\"\"} 1"), of("reason=\"limit\",limit=\"per-second\"} 2")];
        assert_eq!(samples(&meter, "sluicegate_permits_refused"), expected);
        let decisions = lane.figures().decisions;
        assert_eq!(decisions.len(), 2);
        assert_eq!((decisions[1].permits, decisions[1].reason.ends_with("0.7 s")), (2, true));
    }

    #[test]
    fn wait_counts_at_its_first_bound() {
        let (meter, lane) = lane();
        for us in [0, 1_000, 1_001, 300_000_000, 300_000_001] {
            lane.record_grant(Duration::from_micros(us));
        }
        let waits = lane.figures().waits;
        assert_eq!((&waits.counts[..3], &waits.counts[14..]), ([2, 1, 0].as_slice(), [0, 1, 1].as_slice()));
        assert_eq!(waits.counts.len(), waits.bounds_ms.len() + 1);
        for (le, count) in [("0.001", 2), ("0.002", 3), ("300.0", 4), ("+Inf", 5)] {
            let sample = format!("sluicegate_permit_wait_seconds_bucket{{le=\"{le}\",provider=\"acme\"}} {count}");
            assert_eq!(samples(&meter, &sample).len(), 1, "{sample}");
        }
    }
}
