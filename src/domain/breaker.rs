//! Circuit breaker of one lane: decides from the outcomes of requests whether the provider is down.
//!
//! One payment alone cannot open it: a failure that the job may have caused counts once per job. After a wait, one real
//! job at a time probes the provider. The breaker closes after several answered probes in a row. See
//! `docs/decisions/0035-circuit-breaker-per-lane.md`.

use std::collections::VecDeque;
use std::time::Duration;

use super::backoff::BackoffPolicy;
use super::job::JobId;
use super::outcome::{Outcome, UnknownCause};

/// Failures in a row that open the breaker.
pub const CONSECUTIVE_FAILURES_MAX: u32 = 5;
/// Number of recent requests that are looked at, …
pub const SAMPLE_WINDOW: usize = 20;
/// … and the failures among them that open the breaker, in a row or not.
pub const WINDOW_FAILURES_MAX: usize = 10;
/// Answered probes in a row that close the breaker.
pub const PROBES_TO_CLOSE: u32 = 3;
/// Time that the breaker is open before the first probe, and at most before a later one.
pub const OPEN_BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_secs(5), max: Duration::from_secs(60) };

/// Health of the provider by one outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthSample {
    /// The provider answered, whatever it said about the payment.
    Reachable,
    /// The provider failed, and no payment can have caused this.
    Down,
    /// The provider failed, in general or for this payment only.
    DownOrJobFault,
}

impl HealthSample {
    /// `None`: the outcome says nothing about the provider.
    pub fn from_outcome(outcome: &Outcome) -> Option<Self> {
        Some(match outcome {
            Outcome::Accepted { .. }
            | Outcome::PartlyAccepted(_)
            | Outcome::Differs { .. }
            | Outcome::Declined { .. }
            | Outcome::Rejected { .. }
            | Outcome::Throttled { .. }
            | Outcome::Busy { .. }
            | Outcome::Misconfigured { .. }
            | Outcome::Unconfirmed { .. }
            | Outcome::InProgress { .. } => Self::Reachable,
            Outcome::NotSent { .. } => Self::Down,
            Outcome::LocalFault(_) => return None,
            Outcome::Unknown { cause, .. } => match cause {
                UnknownCause::Timeout
                | UnknownCause::ConnectionLost
                | UnknownCause::WorkerLost
                | UnknownCause::ServerError(502..=504) => Self::Down,
                UnknownCause::ServerError(_)
                | UnknownCause::UnreadableResponse(_)
                | UnknownCause::ResponseTooLarge(_)
                | UnknownCause::NotEchoed(_)
                | UnknownCause::OtherResponse(_) => Self::DownOrJobFault,
            },
        })
    }
}

/// Change of the breaker that the lane must follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerTransition {
    /// Nothing is sent for `open_for`; then one job at a time.
    Opens { open_for: Duration },
    /// The lane sends as usual.
    Closes,
}

/// State of one breaker; closed by default. Instants are durations since any one origin.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    /// Whether each of the last requests failed, oldest first.
    recent: VecDeque<bool>,
    consecutive_failures: u32,
    /// Jobs whose failures are among those in a row.
    failing_jobs: Vec<JobId>,
    opened: Option<OpenState>,
}

#[derive(Clone, Copy, Debug)]
struct OpenState {
    /// Outcomes of requests that began earlier are ignored.
    probe_from: Duration,
    /// Times that the breaker opened without closing in between.
    consecutive_openings: u32,
    answered_probes: u32,
}

impl Breaker {
    /// True from the opening until the breaker closes: at most one job at a time is sent.
    pub fn is_open(&self) -> bool {
        self.opened.is_some()
    }

    /// Allows probes from `now` on: a change may have fixed the provider.
    pub fn probe_from(&mut self, now: Duration) {
        if let Some(opened) = &mut self.opened {
            opened.probe_from = opened.probe_from.min(now);
        }
    }

    /// Takes in the outcome of a request that began at `began`. `fraction` is a random number in 0..1 that spreads the probes of several processes.
    pub fn observe(
        &mut self,
        job: &JobId,
        sample: HealthSample,
        began: Duration,
        now: Duration,
        fraction: f64,
    ) -> Option<BreakerTransition> {
        match self.opened {
            Some(opened) if began < opened.probe_from => None,
            Some(opened) => self.observe_probe(opened, sample, now, fraction),
            None => self.observe_while_closed(job, sample, now, fraction),
        }
    }

    fn observe_probe(
        &mut self,
        opened: OpenState,
        sample: HealthSample,
        now: Duration,
        fraction: f64,
    ) -> Option<BreakerTransition> {
        if sample != HealthSample::Reachable {
            return Some(self.open(opened.consecutive_openings + 1, now, fraction));
        }
        if opened.answered_probes + 1 < PROBES_TO_CLOSE {
            self.opened = Some(OpenState { answered_probes: opened.answered_probes + 1, ..opened });
            return None;
        }
        *self = Self::default();
        Some(BreakerTransition::Closes)
    }

    fn observe_while_closed(
        &mut self,
        job: &JobId,
        sample: HealthSample,
        now: Duration,
        fraction: f64,
    ) -> Option<BreakerTransition> {
        if sample == HealthSample::DownOrJobFault && self.failing_jobs.contains(job) {
            return None;
        }
        let failed = sample != HealthSample::Reachable;
        if failed {
            self.consecutive_failures += 1;
            self.failing_jobs.push(job.clone());
        } else {
            self.consecutive_failures = 0;
            self.failing_jobs.clear();
        }
        self.recent.push_back(failed);
        if self.recent.len() > SAMPLE_WINDOW {
            self.recent.pop_front();
        }
        let recent_failures = self.recent.iter().filter(|failed| **failed).count();
        let opens = self.consecutive_failures >= CONSECUTIVE_FAILURES_MAX || recent_failures >= WINDOW_FAILURES_MAX;
        (failed && opens).then(|| self.open(1, now, fraction))
    }

    fn open(&mut self, times: u32, now: Duration, fraction: f64) -> BreakerTransition {
        let open_for = OPEN_BACKOFF.delay(times, fraction);
        *self = Self {
            opened: Some(OpenState { probe_from: now + open_for, consecutive_openings: times, answered_probes: 0 }),
            ..Self::default()
        };
        BreakerTransition::Opens { open_for }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::local_fault::LocalFault;

    fn job(number: u32) -> JobId {
        JobId::new(format!("job-{number}")).unwrap()
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::default();
        let changes = (0..CONSECUTIVE_FAILURES_MAX)
            .filter_map(|number| breaker.observe(&job(number), HealthSample::Down, at(0), at(0), 1.0));
        assert_eq!(changes.collect::<Vec<_>>(), [BreakerTransition::Opens { open_for: Duration::from_secs(5) }]);
        breaker
    }

    #[test]
    fn outcomes_map_to_health_samples() {
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let table = [
            (Outcome::Accepted { reference: None }, HealthSample::Reachable),
            (Outcome::Declined { reason: String::new() }, HealthSample::Reachable),
            (Outcome::Rejected { reason: String::new() }, HealthSample::Reachable),
            (Outcome::Throttled { retry_after: None }, HealthSample::Reachable),
            (Outcome::Misconfigured { status: 401 }, HealthSample::Reachable),
            (Outcome::NotSent { cause: String::new() }, HealthSample::Down),
            (unknown(UnknownCause::Timeout), HealthSample::Down),
            (unknown(UnknownCause::ConnectionLost), HealthSample::Down),
            (unknown(UnknownCause::ServerError(502)), HealthSample::Down),
            (unknown(UnknownCause::ServerError(503)), HealthSample::Down),
            (unknown(UnknownCause::ServerError(500)), HealthSample::DownOrJobFault),
            (unknown(UnknownCause::UnreadableResponse(200)), HealthSample::DownOrJobFault),
        ];
        for (outcome, sample) in table {
            assert_eq!(HealthSample::from_outcome(&outcome), Some(sample), "{outcome:?}");
        }
        assert_eq!(HealthSample::from_outcome(&Outcome::LocalFault(LocalFault::ProcessDescriptors)), None);
    }

    #[test]
    fn one_failing_job_does_not_open_it() {
        let mut breaker = Breaker::default();
        for _ in 0..100 {
            assert_eq!(breaker.observe(&job(1), HealthSample::DownOrJobFault, at(0), at(0), 0.5), None);
        }
        let others = (2..=CONSECUTIVE_FAILURES_MAX)
            .filter_map(|number| breaker.observe(&job(number), HealthSample::DownOrJobFault, at(0), at(0), 0.5));
        assert_eq!(others.count(), 1, "different jobs do");
    }

    #[test]
    fn half_of_the_last_requests_failing_opens_it() {
        let mut breaker = Breaker::default();
        let samples = [HealthSample::Reachable, HealthSample::Down].into_iter().cycle();
        let opens = samples.enumerate().position(|(number, sample)| {
            breaker.observe(&job(u32::try_from(number).unwrap()), sample, at(0), at(0), 0.5).is_some()
        });
        assert_eq!(opens, Some(2 * WINDOW_FAILURES_MAX - 1));
    }

    #[test]
    fn requests_in_flight_at_opening_are_ignored() {
        let mut breaker = opened();
        for sample in [HealthSample::Reachable, HealthSample::Down] {
            for number in 0..10 {
                assert_eq!(breaker.observe(&job(number), sample, at(4), at(9), 1.0), None, "a straggler");
            }
        }
        assert!(breaker.is_open());
    }

    #[test]
    fn probes_close_it_or_reopen_it_longer() {
        let mut breaker = opened();
        assert_eq!(breaker.observe(&job(1), HealthSample::Reachable, at(5), at(5), 1.0), None);
        let longer = BreakerTransition::Opens { open_for: Duration::from_secs(10) };
        assert_eq!(breaker.observe(&job(2), HealthSample::DownOrJobFault, at(6), at(6), 1.0), Some(longer));
        let changes: Vec<_> =
            (0..3).map(|number| breaker.observe(&job(number), HealthSample::Reachable, at(16), at(16), 1.0)).collect();
        assert_eq!(changes, [None, None, Some(BreakerTransition::Closes)]);
        assert!(!breaker.is_open());
        assert_eq!(
            breaker.observe(&job(9), HealthSample::Down, at(17), at(17), 1.0),
            None,
            "a closed breaker starts with no failures"
        );
    }

    #[test]
    fn probing_can_start_early() {
        let mut breaker = opened();
        breaker.probe_from(Duration::from_secs(2));
        let changes: Vec<_> =
            (0..3).map(|number| breaker.observe(&job(number), HealthSample::Reachable, at(2), at(2), 1.0)).collect();
        assert_eq!(changes.last(), Some(&Some(BreakerTransition::Closes)));
    }

    proptest! {
        /// In any order of samples: it stays open for 2.5 s to a minute, and closes only after answers in a row.
        #[test]
        fn breaker_closes_only_after_successful_probes(
            steps in prop::collection::vec((0..3_u8, 0..6_u32, 0..30_u64), 1..200),
        ) {
            let (mut breaker, mut now, mut answered) = (Breaker::default(), 0, 0);
            for (sample, number, later) in steps {
                now += later;
                let samples = [HealthSample::Reachable, HealthSample::Down, HealthSample::DownOrJobFault];
                let sample = samples[usize::from(sample)];
                let was_open = breaker.is_open();
                answered = if was_open && sample == HealthSample::Reachable { answered + 1 } else { 0 };
                match breaker.observe(&job(number), sample, at(now), at(now), 0.5) {
                    Some(BreakerTransition::Closes) => prop_assert!(was_open && answered >= PROBES_TO_CLOSE),
                    Some(BreakerTransition::Opens { open_for }) => {
                        prop_assert!(sample != HealthSample::Reachable);
                        prop_assert!(open_for >= OPEN_BACKOFF.base / 2 && open_for <= OPEN_BACKOFF.max);
                    }
                    None => prop_assert_eq!(was_open, breaker.is_open()),
                }
            }
        }
    }
}
