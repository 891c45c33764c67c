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
pub const IN_A_ROW_MAX: u32 = 5;
/// So many requests are looked back at, …
pub const LOOK_BACK: usize = 20;
/// … of which so many failures open it, though others came between.
pub const OF_LOOK_BACK_MAX: usize = 10;
/// So many answered jobs in a row close it.
pub const PROBES_TO_CLOSE: u32 = 3;
/// How long nothing is sent before the first probe, and at most before a later one.
pub const REST: BackoffPolicy = BackoffPolicy { base: Duration::from_secs(5), max: Duration::from_secs(60) };

/// What one outcome says of the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// It answered, whatever it said of the payment.
    Alive,
    /// No payment can have caused this.
    Down,
    /// It fails, or it fails for this payment.
    DownOrTheJob,
}

impl Sign {
    /// `None`: the outcome says nothing of the provider.
    #[must_use]
    pub fn of(outcome: &Outcome) -> Option<Self> {
        Some(match outcome {
            Outcome::Accepted { .. }
            | Outcome::Declined { .. }
            | Outcome::Rejected { .. }
            | Outcome::Throttled { .. }
            | Outcome::Busy { .. }
            | Outcome::Misconfigured { .. }
            | Outcome::InProgress => Self::Alive,
            Outcome::NotSent { .. } => Self::Down,
            Outcome::LocalFault(_) => return None,
            Outcome::Unknown { cause, .. } => match cause {
                UnknownCause::Timeout
                | UnknownCause::ConnectionLost
                | UnknownCause::WorkerLost
                | UnknownCause::ServerError(502..=504) => Self::Down,
                UnknownCause::ServerError(_) | UnknownCause::UnreadableAnswer(_) | UnknownCause::NotEchoed(_) => {
                    Self::DownOrTheJob
                }
            },
        })
    }
}

/// What follows for the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing is sent for so long; then one job at a time.
    Opens { rest: Duration },
    /// It goes on as usual.
    Closes,
}

/// The state; closed in its default. Instants are durations since any one origin.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    /// Whether each of the last requests failed, oldest first.
    recent: VecDeque<bool>,
    in_a_row: u32,
    /// Whose failures are among those in a row.
    failing: Vec<JobId>,
    opened: Option<Opened>,
}

#[derive(Clone, Copy, Debug)]
struct Opened {
    /// Requests that began earlier say nothing of now.
    until: Duration,
    /// In a row.
    times: u32,
    answered: u32,
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
            opened.until = opened.until.min(now);
        }
    }

    /// Takes an outcome in. `fraction` is a random number in 0..1, for the spread of several processes' probes.
    pub fn observe(
        &mut self,
        job: &JobId,
        sign: Sign,
        (began, now): (Duration, Duration),
        fraction: f64,
    ) -> Option<Change> {
        match self.opened {
            Some(opened) if began < opened.until => None,
            Some(opened) => self.probed(opened, sign, now, fraction),
            None => self.counted(job, sign, now, fraction),
        }
    }

    fn probed(&mut self, opened: Opened, sign: Sign, now: Duration, fraction: f64) -> Option<Change> {
        if sign != Sign::Alive {
            return Some(self.open(opened.times + 1, now, fraction));
        }
        if opened.answered + 1 < PROBES_TO_CLOSE {
            self.opened = Some(Opened { answered: opened.answered + 1, ..opened });
            return None;
        }
        *self = Self::default();
        Some(Change::Closes)
    }

    fn counted(&mut self, job: &JobId, sign: Sign, now: Duration, fraction: f64) -> Option<Change> {
        if sign == Sign::DownOrTheJob && self.failing.contains(job) {
            return None;
        }
        let failed = sign != Sign::Alive;
        if failed {
            self.in_a_row += 1;
            self.failing.push(job.clone());
        } else {
            self.in_a_row = 0;
            self.failing.clear();
        }
        self.recent.push_back(failed);
        if self.recent.len() > LOOK_BACK {
            self.recent.pop_front();
        }
        let of_look_back = self.recent.iter().filter(|failed| **failed).count();
        let opens = self.in_a_row >= IN_A_ROW_MAX || of_look_back >= OF_LOOK_BACK_MAX;
        (failed && opens).then(|| self.open(1, now, fraction))
    }

    fn open(&mut self, times: u32, now: Duration, fraction: f64) -> Change {
        let rest = REST.delay(times, fraction);
        *self = Self { opened: Some(Opened { until: now + rest, times, answered: 0 }), ..Self::default() };
        Change::Opens { rest }
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
        let changes = (0..IN_A_ROW_MAX).filter_map(|number| breaker.observe(&job(number), Sign::Down, at(0), 1.0));
        assert_eq!(changes.collect::<Vec<_>>(), [Change::Opens { rest: Duration::from_secs(5) }]);
        breaker
    }

    #[test]
    fn what_a_payment_cannot_cause_is_a_sign_of_its_own() {
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let table = [
            (Outcome::Accepted { reference: None }, Sign::Alive),
            (Outcome::Declined { reason: String::new() }, Sign::Alive),
            (Outcome::Rejected { reason: String::new() }, Sign::Alive),
            (Outcome::Throttled { retry_after: None }, Sign::Alive),
            (Outcome::Misconfigured { status: 401 }, Sign::Alive),
            (Outcome::NotSent { cause: String::new() }, Sign::Down),
            (unknown(UnknownCause::Timeout), Sign::Down),
            (unknown(UnknownCause::ConnectionLost), Sign::Down),
            (unknown(UnknownCause::ServerError(502)), Sign::Down),
            (unknown(UnknownCause::ServerError(503)), Sign::Down),
            (unknown(UnknownCause::ServerError(500)), Sign::DownOrTheJob),
            (unknown(UnknownCause::UnreadableAnswer(200)), Sign::DownOrTheJob),
        ];
        for (outcome, sign) in table {
            assert_eq!(Sign::of(&outcome), Some(sign), "{outcome:?}");
        }
        assert_eq!(Sign::of(&Outcome::LocalFault(LocalFault::ProcessDescriptors)), None);
    }

    #[test]
    fn one_job_that_fails_for_ever_opens_nothing() {
        let mut breaker = Breaker::default();
        for _ in 0..100 {
            assert_eq!(breaker.observe(&job(1), Sign::DownOrTheJob, at(0), 0.5), None);
        }
        let others =
            (2..=IN_A_ROW_MAX).filter_map(|number| breaker.observe(&job(number), Sign::DownOrTheJob, at(0), 0.5));
        assert_eq!(others.count(), 1, "different jobs do");
    }

    #[test]
    fn half_of_the_last_requests_open_it_though_some_are_answered() {
        let mut breaker = Breaker::default();
        let signs = [Sign::Alive, Sign::Down].into_iter().cycle();
        let opens = signs.enumerate().position(|(number, sign)| {
            breaker.observe(&job(u32::try_from(number).unwrap()), sign, at(0), 0.5).is_some()
        });
        assert_eq!(opens, Some(2 * OF_LOOK_BACK_MAX - 1));
    }

    #[test]
    fn what_was_on_the_wire_when_it_opened_changes_nothing() {
        let mut breaker = opened();
        for sign in [Sign::Alive, Sign::Down] {
            for number in 0..10 {
                let straggler = (Duration::from_secs(4), Duration::from_secs(9));
                assert_eq!(breaker.observe(&job(number), sign, straggler, 1.0), None);
            }
        }
        assert!(breaker.is_open());
    }

    #[test]
    fn answered_probes_close_it_and_a_failed_one_opens_it_for_longer() {
        let mut breaker = opened();
        assert_eq!(breaker.observe(&job(1), Sign::Alive, at(5), 1.0), None);
        let longer = Change::Opens { rest: Duration::from_secs(10) };
        assert_eq!(breaker.observe(&job(2), Sign::DownOrTheJob, at(6), 1.0), Some(longer));
        let changes: Vec<_> = (0..3).map(|number| breaker.observe(&job(number), Sign::Alive, at(16), 1.0)).collect();
        assert_eq!(changes, [None, None, Some(Change::Closes)]);
        assert!(!breaker.is_open());
        assert_eq!(breaker.observe(&job(9), Sign::Down, at(17), 1.0), None, "it has forgotten");
    }

    #[test]
    fn a_rest_can_be_cut_short() {
        let mut breaker = opened();
        breaker.probe_from(Duration::from_secs(2));
        let changes: Vec<_> = (0..3).map(|number| breaker.observe(&job(number), Sign::Alive, at(2), 1.0)).collect();
        assert_eq!(changes.last(), Some(&Some(Change::Closes)));
    }

    proptest! {
        /// Whatever the order: it rests between 2.5 s and a minute, and closes only after answers in a row.
        #[test]
        fn it_never_closes_without_answered_probes(
            steps in prop::collection::vec((0..3_u8, 0..6_u32, 0..30_u64), 1..200),
        ) {
            let (mut breaker, mut now, mut answered) = (Breaker::default(), 0, 0);
            for (sign, number, later) in steps {
                now += later;
                let sign = [Sign::Alive, Sign::Down, Sign::DownOrTheJob][usize::from(sign)];
                let was_open = breaker.is_open();
                answered = if was_open && sign == Sign::Alive { answered + 1 } else { 0 };
                match breaker.observe(&job(number), sign, at(now), 0.5) {
                    Some(Change::Closes) => prop_assert!(was_open && answered >= PROBES_TO_CLOSE),
                    Some(Change::Opens { rest }) => {
                        prop_assert!(sign != Sign::Alive);
                        prop_assert!(rest >= REST.base / 2 && rest <= REST.max);
                    }
                    None => prop_assert_eq!(was_open, breaker.is_open()),
                }
            }
        }
    }
}
