//! Whether a provider is down: the circuit breaker of one lane, as a state machine over the outcomes of its requests.
//!
//! Refuses to judge a provider by one payment: what a job may have caused itself counts once per job. Refuses to guess
//! when it is well again: after a wait one real job at a time is sent, until several in a row have been answered.

use std::collections::VecDeque;
use std::time::Duration;

use super::backoff::BackoffPolicy;
use super::job::JobId;
use super::outcome::{Outcome, UnknownCause};

/// So many failures in a row open it.
pub const CONSECUTIVE_FAILURES_MAX: u32 = 5;
/// So many requests are looked back at, …
pub const SAMPLE_WINDOW: usize = 20;
/// … of which so many failures open it, though others came between.
pub const WINDOW_FAILURES_MAX: usize = 10;
/// So many answered jobs in a row close it.
pub const PROBES_TO_CLOSE: u32 = 3;
/// How long nothing is sent before the first probe, and at most before a later one.
pub const OPEN_BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_secs(5), max: Duration::from_secs(60) };

/// What one outcome says of the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthSample {
    /// It answered, whatever it said of the payment.
    Reachable,
    /// No payment can have caused this.
    Down,
    /// It fails, or it fails for this payment.
    DownOrJobFault,
}

impl HealthSample {
    /// `None`: the outcome says nothing of the provider.
    #[must_use]
    pub fn from_outcome(outcome: &Outcome) -> Option<Self> {
        Some(match outcome {
            Outcome::Accepted { .. }
            | Outcome::Declined { .. }
            | Outcome::Rejected { .. }
            | Outcome::Throttled { .. }
            | Outcome::Busy { .. }
            | Outcome::Misconfigured { .. }
            | Outcome::Unconfirmed { .. }
            | Outcome::InProgress => Self::Reachable,
            Outcome::NotSent { .. } => Self::Down,
            Outcome::LocalFault(_) => return None,
            Outcome::Unknown { cause, .. } => match cause {
                UnknownCause::Timeout
                | UnknownCause::ConnectionLost
                | UnknownCause::WorkerLost
                | UnknownCause::ServerError(502..=504) => Self::Down,
                UnknownCause::ServerError(_) | UnknownCause::UnreadableResponse(_) | UnknownCause::NotEchoed(_) => {
                    Self::DownOrJobFault
                }
            },
        })
    }
}

/// What follows for the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerTransition {
    /// Nothing is sent for so long; then one job at a time.
    Opens { open_for: Duration },
    /// It goes on as usual.
    Closes,
}

/// The state; closed in its default. Instants are durations since any one origin.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    /// Whether each of the last requests failed, oldest first.
    recent: VecDeque<bool>,
    consecutive_failures: u32,
    /// Whose failures are among those in a row.
    failing_jobs: Vec<JobId>,
    opened: Option<OpenState>,
}

#[derive(Clone, Copy, Debug)]
struct OpenState {
    /// Requests that began earlier say nothing of now.
    probe_from: Duration,
    /// In a row.
    consecutive_openings: u32,
    answered_probes: u32,
}

impl Breaker {
    /// Whether one job at a time is sent: from the opening until it closes.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.opened.is_some()
    }

    /// Ends the rest: something changed that may have mended it.
    pub fn probe_from(&mut self, now: Duration) {
        if let Some(opened) = &mut self.opened {
            opened.probe_from = opened.probe_from.min(now);
        }
    }

    /// Takes an outcome in. `fraction` is a random number in 0..1, for the spread of several processes' probes.
    pub fn observe(
        &mut self,
        job: &JobId,
        sign: HealthSample,
        (began, now): (Duration, Duration),
        fraction: f64,
    ) -> Option<BreakerTransition> {
        match self.opened {
            Some(opened) if began < opened.probe_from => None,
            Some(opened) => self.observe_probe(opened, sign, now, fraction),
            None => self.observe_while_closed(job, sign, now, fraction),
        }
    }

    fn observe_probe(
        &mut self,
        opened: OpenState,
        sign: HealthSample,
        now: Duration,
        fraction: f64,
    ) -> Option<BreakerTransition> {
        if sign != HealthSample::Reachable {
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
        sign: HealthSample,
        now: Duration,
        fraction: f64,
    ) -> Option<BreakerTransition> {
        if sign == HealthSample::DownOrJobFault && self.failing_jobs.contains(job) {
            return None;
        }
        let failed = sign != HealthSample::Reachable;
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
        let of_look_back = self.recent.iter().filter(|failed| **failed).count();
        let opens = self.consecutive_failures >= CONSECUTIVE_FAILURES_MAX || of_look_back >= WINDOW_FAILURES_MAX;
        (failed && opens).then(|| self.open(1, now, fraction))
    }

    fn open(&mut self, times: u32, now: Duration, fraction: f64) -> BreakerTransition {
        let rest = OPEN_BACKOFF.delay(times, fraction);
        *self = Self {
            opened: Some(OpenState { probe_from: now + rest, consecutive_openings: times, answered_probes: 0 }),
            ..Self::default()
        };
        BreakerTransition::Opens { open_for: rest }
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

    fn at(seconds: u64) -> (Duration, Duration) {
        (Duration::from_secs(seconds), Duration::from_secs(seconds))
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::default();
        let changes = (0..CONSECUTIVE_FAILURES_MAX)
            .filter_map(|number| breaker.observe(&job(number), HealthSample::Down, at(0), 1.0));
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
        for (outcome, sign) in table {
            assert_eq!(HealthSample::from_outcome(&outcome), Some(sign), "{outcome:?}");
        }
        assert_eq!(HealthSample::from_outcome(&Outcome::LocalFault(LocalFault::ProcessDescriptors)), None);
    }

    #[test]
    fn one_failing_job_does_not_open_it() {
        let mut breaker = Breaker::default();
        for _ in 0..100 {
            assert_eq!(breaker.observe(&job(1), HealthSample::DownOrJobFault, at(0), 0.5), None);
        }
        let others = (2..=CONSECUTIVE_FAILURES_MAX)
            .filter_map(|number| breaker.observe(&job(number), HealthSample::DownOrJobFault, at(0), 0.5));
        assert_eq!(others.count(), 1, "different jobs do");
    }

    #[test]
    fn half_of_the_last_requests_failing_opens_it() {
        let mut breaker = Breaker::default();
        let signs = [HealthSample::Reachable, HealthSample::Down].into_iter().cycle();
        let opens = signs.enumerate().position(|(number, sign)| {
            breaker.observe(&job(u32::try_from(number).unwrap()), sign, at(0), 0.5).is_some()
        });
        assert_eq!(opens, Some(2 * WINDOW_FAILURES_MAX - 1));
    }

    #[test]
    fn requests_in_flight_at_opening_are_ignored() {
        let mut breaker = opened();
        for sign in [HealthSample::Reachable, HealthSample::Down] {
            for number in 0..10 {
                let straggler = (Duration::from_secs(4), Duration::from_secs(9));
                assert_eq!(breaker.observe(&job(number), sign, straggler, 1.0), None);
            }
        }
        assert!(breaker.is_open());
    }

    #[test]
    fn probes_close_it_or_reopen_it_longer() {
        let mut breaker = opened();
        assert_eq!(breaker.observe(&job(1), HealthSample::Reachable, at(5), 1.0), None);
        let longer = BreakerTransition::Opens { open_for: Duration::from_secs(10) };
        assert_eq!(breaker.observe(&job(2), HealthSample::DownOrJobFault, at(6), 1.0), Some(longer));
        let changes: Vec<_> =
            (0..3).map(|number| breaker.observe(&job(number), HealthSample::Reachable, at(16), 1.0)).collect();
        assert_eq!(changes, [None, None, Some(BreakerTransition::Closes)]);
        assert!(!breaker.is_open());
        assert_eq!(breaker.observe(&job(9), HealthSample::Down, at(17), 1.0), None, "it has forgotten");
    }

    #[test]
    fn probing_can_start_early() {
        let mut breaker = opened();
        breaker.probe_from(Duration::from_secs(2));
        let changes: Vec<_> =
            (0..3).map(|number| breaker.observe(&job(number), HealthSample::Reachable, at(2), 1.0)).collect();
        assert_eq!(changes.last(), Some(&Some(BreakerTransition::Closes)));
    }

    proptest! {
        /// Whatever the order: it rests between 2.5 s and a minute, and closes only after answers in a row.
        #[test]
        fn breaker_closes_only_after_successful_probes(
            steps in prop::collection::vec((0..3_u8, 0..6_u32, 0..30_u64), 1..200),
        ) {
            let (mut breaker, mut now, mut answered) = (Breaker::default(), 0, 0);
            for (sign, number, later) in steps {
                now += later;
                let sign = [HealthSample::Reachable, HealthSample::Down, HealthSample::DownOrJobFault][usize::from(sign)];
                let was_open = breaker.is_open();
                answered = if was_open && sign == HealthSample::Reachable { answered + 1 } else { 0 };
                match breaker.observe(&job(number), sign, at(now), 0.5) {
                    Some(BreakerTransition::Closes) => prop_assert!(was_open && answered >= PROBES_TO_CLOSE),
                    Some(BreakerTransition::Opens { open_for }) => {
                        prop_assert!(sign != HealthSample::Reachable);
                        prop_assert!(open_for >= OPEN_BACKOFF.base / 2 && open_for <= OPEN_BACKOFF.max);
                    }
                    None => prop_assert_eq!(was_open, breaker.is_open()),
                }
            }
        }
    }
}
