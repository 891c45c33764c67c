//! The one decision table: what follows from an outcome, given what the job has been through.
//!
//! Refuses effects: it returns values, `worker::execute` carries them out. `docs/architecture.md` shows the same table.
//! Two rules stand above all rows: a job with any attempt of unknown outcome never becomes `dead` or `expired`, and a
//! provider that does not deduplicate is never sent the same payment twice unless the first surely never left.

use std::time::Duration;

use super::backoff::BackoffPolicy;
use super::outcome::{FinalState, Outcome, UnknownCause};

/// Longest wait that an answer may impose on one job or lane; beyond it we ask again.
pub const NAMED_WAIT_MAX: Duration = Duration::from_secs(15 * 60);
/// How long a lane rests after an answer that says our set-up is wrong, before it tries one more job.
pub const MISCONFIGURED_PAUSE: Duration = Duration::from_secs(30);

/// What a job has been through, before the outcome at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct History {
    /// Attempts that counted so far.
    pub attempts: u32,
    /// All requests so far, whether they counted or not: what never counts must still wait longer each time.
    pub requests: u32,
    /// Whether any earlier attempt may have charged.
    pub unknown: bool,
    /// Since the ledger first saw the job.
    pub age: Duration,
    /// Since the first byte that may have left; `None` when nothing was ever sent.
    pub first_sent_age: Option<Duration>,
    /// The provider was found down, and this request was to find out whether it still is: its failure counts nothing.
    pub probe: bool,
}

/// What the provider row says about trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub max_attempts: u32,
    pub max_age: Duration,
    pub backoff: BackoffPolicy,
    /// How long the provider remembers an idempotency key; `None`: it does not deduplicate.
    pub idempotency_retention: Option<Duration>,
}

/// What happens to the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Settle {
        state: FinalState,
        reason: String,
        reference: Option<String>,
    },
    /// Try again after the wait. `unknown` keeps the job's state `unknown` instead of `waiting`.
    Again {
        after: Duration,
        unknown: bool,
        reason: String,
    },
}

/// What happens to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Every lane of the quota, in the whole cluster.
    Quota { wait: Duration },
    /// This process's lane.
    Lane { wait: Duration, cause: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disposition {
    pub next: Next,
    pub counts_attempt: bool,
    pub pause: Option<Pause>,
}

/// Decides what follows from one request's outcome. `fraction` is a random number in 0..1.
#[must_use]
pub fn after_outcome(outcome: &Outcome, history: &History, policy: &RetryPolicy, fraction: f64) -> Disposition {
    match outcome {
        Outcome::Accepted { reference } => settle(FinalState::Succeeded, "accepted", reference.clone()),
        Outcome::Declined { reason } => settle(FinalState::Declined, reason, None),
        Outcome::Rejected { reason } => settle(FinalState::Review, reason, None),
        Outcome::Throttled { retry_after } => {
            let wait = retry_after.unwrap_or(policy.backoff.base).min(NAMED_WAIT_MAX);
            let next = again(wait, history.unknown, "throttled by the provider", history, policy);
            Disposition { next, counts_attempt: false, pause: Some(Pause::Quota { wait }) }
        }
        Outcome::Busy { retry_after } => {
            let step = policy.backoff.delay(history.requests.saturating_add(1), fraction);
            // A wait of zero names none.
            let wait = retry_after.filter(|wait| !wait.is_zero()).unwrap_or(step).min(NAMED_WAIT_MAX);
            let next = again(wait, history.unknown, "the provider is busy with this payment's object", history, policy);
            Disposition { next, counts_attempt: false, pause: None }
        }
        Outcome::Misconfigured { status } => {
            let cause = format!("provider answered {status}: check url, credentials and method");
            let next = again(MISCONFIGURED_PAUSE, history.unknown, &cause, history, policy);
            Disposition { next, counts_attempt: false, pause: Some(Pause::Lane { wait: MISCONFIGURED_PAUSE, cause }) }
        }
        Outcome::NotSent { cause } => counted(history, policy, fraction, history.unknown, cause, None),
        Outcome::InProgress => {
            // An answer, so no failed probe.
            let history = History { probe: false, ..*history };
            counted(&history, policy, fraction, true, "the provider is still working on this payment", None)
        }
        Outcome::Unknown { cause, retry_after } => {
            after_unknown(*cause, retry_after.map(|wait| wait.min(NAMED_WAIT_MAX)), history, policy, fraction)
        }
    }
}

/// Decides whether a job whose outcome is unknown may be sent once more, at the moment of sending: `None` says yes.
#[must_use]
pub fn before_resend(history: &History, policy: &RetryPolicy) -> Option<Next> {
    let first_sent_age = history.first_sent_age.filter(|_| history.unknown)?;
    match policy.idempotency_retention {
        None => Some(review("the outcome is unknown and the provider does not deduplicate")),
        Some(retention) if first_sent_age >= retention / 2 => {
            Some(review("the outcome is unknown and the provider may have forgotten the idempotency key"))
        }
        Some(_) => None,
    }
}

/// Decides whether a job may still be worked on at all: `None` says yes.
#[must_use]
pub fn before_start(history: &History, policy: &RetryPolicy, expired: bool) -> Option<Next> {
    if expired && !history.unknown {
        let reason = "expires_at has passed".to_owned();
        return Some(Next::Settle { state: FinalState::Expired, reason, reference: None });
    }
    (history.age > policy.max_age).then(|| give_up(history.unknown, "older than max_age_s"))
}

fn after_unknown(
    cause: UnknownCause,
    named_wait: Option<Duration>,
    history: &History,
    policy: &RetryPolicy,
    fraction: f64,
) -> Disposition {
    let reason = cause.describe();
    if policy.idempotency_retention.is_none() {
        let mut disposition = settle(FinalState::Review, &reason, None);
        disposition.counts_attempt = true;
        disposition.pause = named_wait.map(|wait| Pause::Lane { wait, cause: reason });
        return disposition;
    }
    counted(history, policy, fraction, true, &reason, named_wait)
}

fn counted(
    history: &History,
    policy: &RetryPolicy,
    fraction: f64,
    unknown: bool,
    reason: &str,
    named_wait: Option<Duration>,
) -> Disposition {
    let failed = history.attempts.saturating_add(1);
    let pause = named_wait.map(|wait| Pause::Lane { wait, cause: reason.to_owned() });
    if history.probe {
        let after = policy.backoff.delay(failed, fraction).max(named_wait.unwrap_or_default());
        return Disposition { next: again(after, unknown, reason, history, policy), counts_attempt: false, pause };
    }
    if failed >= policy.max_attempts {
        let next = give_up(unknown, &format!("{reason}; {failed} attempts made"));
        return Disposition { next, counts_attempt: true, pause };
    }
    let after = policy.backoff.delay(failed, fraction).max(named_wait.unwrap_or_default());
    Disposition { next: again(after, unknown, reason, history, policy), counts_attempt: true, pause }
}

fn again(after: Duration, unknown: bool, reason: &str, history: &History, policy: &RetryPolicy) -> Next {
    if history.age.saturating_add(after) > policy.max_age {
        return give_up(unknown, &format!("{reason}; the next attempt would come after max_age_s"));
    }
    Next::Again { after, unknown, reason: reason.to_owned() }
}

fn give_up(unknown: bool, reason: &str) -> Next {
    let state = if unknown { FinalState::Review } else { FinalState::Dead };
    Next::Settle { state, reason: reason.to_owned(), reference: None }
}

fn review(reason: &str) -> Next {
    Next::Settle { state: FinalState::Review, reason: reason.to_owned(), reference: None }
}

fn settle(state: FinalState, reason: &str, reference: Option<String>) -> Disposition {
    let next = Next::Settle { state, reason: reason.to_owned(), reference };
    Disposition { next, counts_attempt: true, pause: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn policy(retention: Option<Duration>) -> RetryPolicy {
        RetryPolicy {
            max_attempts: 3,
            max_age: Duration::from_secs(3_600),
            backoff: BackoffPolicy { base: SECOND, max: Duration::from_secs(60) },
            idempotency_retention: retention,
        }
    }

    fn history(attempts: u32, unknown: bool) -> History {
        History {
            attempts,
            requests: attempts,
            unknown,
            age: SECOND,
            first_sent_age: unknown.then_some(SECOND),
            probe: false,
        }
    }

    fn settled(next: &Next) -> Option<FinalState> {
        match next {
            Next::Settle { state, .. } => Some(*state),
            Next::Again { .. } => None,
        }
    }

    #[test]
    fn each_outcome_leads_where_the_table_says() {
        let day = Some(Duration::from_secs(86_400));
        let unknown = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
        let unavailable =
            Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(Duration::from_secs(9)) };
        let throttled = Outcome::Throttled { retry_after: Some(SECOND) };
        let busy = Outcome::Busy { retry_after: Some(SECOND) };
        let not_sent = Outcome::NotSent { cause: "refused".to_owned() };
        let rejected = Outcome::Rejected { reason: "422".to_owned() };
        let declined = Outcome::Declined { reason: "402".to_owned() };
        let accepted = Outcome::Accepted { reference: None };
        let misconfigured = Outcome::Misconfigured { status: 401 };
        type Row<'a> = (&'a Outcome, Option<Duration>, u32, bool, Option<FinalState>, bool, bool);
        // outcome, retention, attempts so far, unknown so far → final state (None: again), counts, pauses somebody
        let table: [Row<'_>; 16] = [
            (&accepted, None, 0, false, Some(FinalState::Succeeded), true, false),
            (&declined, None, 0, false, Some(FinalState::Declined), true, false),
            (&rejected, day, 0, false, Some(FinalState::Review), true, false),
            (&throttled, None, 2, false, None, false, true),
            (&busy, None, 2, false, None, false, false),
            (&busy, None, 2, true, None, false, false),
            (&misconfigured, None, 2, false, None, false, true),
            (&not_sent, None, 0, false, None, true, false),
            (&not_sent, None, 2, false, Some(FinalState::Dead), true, false),
            (&not_sent, day, 2, true, Some(FinalState::Review), true, false),
            (&unknown, day, 0, false, None, true, false),
            (&unknown, day, 2, false, Some(FinalState::Review), true, false),
            (&unknown, None, 0, false, Some(FinalState::Review), true, false),
            (&unavailable, day, 0, false, None, true, true),
            (&Outcome::InProgress, day, 0, true, None, true, false),
            (&Outcome::InProgress, day, 2, true, Some(FinalState::Review), true, false),
        ];
        for (outcome, retention, attempts, unknown, state, counts, pauses) in table {
            let got = after_outcome(outcome, &history(attempts, unknown), &policy(retention), 0.5);
            assert_eq!(settled(&got.next), state, "{outcome:?} after {attempts}");
            assert_eq!((got.counts_attempt, got.pause.is_some()), (counts, pauses), "{outcome:?}");
        }
    }

    #[test]
    fn an_unknown_job_is_never_dead_or_expired() {
        for retention in [None, Some(SECOND), Some(Duration::from_secs(86_400))] {
            for attempts in 0..5 {
                let mut history = history(attempts, true);
                history.age = Duration::from_secs(7_200);
                let outcomes = [
                    Outcome::Throttled { retry_after: None },
                    Outcome::Busy { retry_after: None },
                    Outcome::Misconfigured { status: 403 },
                    Outcome::InProgress,
                    Outcome::Unknown { cause: UnknownCause::ConnectionLost, retry_after: None },
                    Outcome::NotSent { cause: String::new() },
                ];
                let nexts = outcomes
                    .iter()
                    .map(|outcome| after_outcome(outcome, &history, &policy(retention), 0.0).next)
                    .chain(before_start(&history, &policy(retention), true));
                for next in nexts {
                    assert!(!matches!(settled(&next), Some(FinalState::Dead | FinalState::Expired)), "{next:?}");
                }
            }
        }
    }

    /// However often the provider fails while it is known to be down, the job it is tried with loses nothing by it.
    #[test]
    fn a_failed_probe_counts_no_attempt() {
        let day = Some(Duration::from_secs(86_400));
        let not_sent = Outcome::NotSent { cause: "refused".to_owned() };
        let unknown = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
        for outcome in [&not_sent, &unknown] {
            let probe = History { probe: true, ..history(2, false) };
            let got = after_outcome(outcome, &probe, &policy(day), 0.5);
            assert_eq!((settled(&got.next), got.counts_attempt), (None, false), "{outcome:?}");
        }
        let got = after_outcome(&Outcome::InProgress, &History { probe: true, ..history(0, true) }, &policy(day), 0.5);
        assert!(got.counts_attempt, "that is an answer");
        let probe = History { probe: true, ..history(0, false) };
        let got = after_outcome(&unknown, &probe, &policy(None), 0.5);
        assert_eq!(settled(&got.next), Some(FinalState::Review), "nobody remembers, so nobody may ask again");
    }

    #[test]
    fn a_resend_needs_a_provider_that_surely_remembers() {
        let sent = |age| History { first_sent_age: Some(age), ..history(1, true) };
        let retention = Some(Duration::from_secs(100));
        assert_eq!(before_resend(&sent(Duration::from_secs(49)), &policy(retention)), None);
        for (age, retention) in [(50, retention), (1, None)] {
            let next = before_resend(&sent(Duration::from_secs(age)), &policy(retention));
            assert_eq!(next.as_ref().and_then(settled), Some(FinalState::Review));
        }
        let never_unknown = History { unknown: false, ..sent(Duration::from_secs(99)) };
        assert_eq!(before_resend(&never_unknown, &policy(None)), None);
    }

    #[test]
    fn a_named_wait_is_kept_and_capped() {
        let day = Some(Duration::from_secs(86_400));
        let long = Outcome::Throttled { retry_after: Some(Duration::from_secs(40 * 60)) };
        let got = after_outcome(&long, &history(0, false), &policy(day), 0.0);
        assert_eq!(got.pause, Some(Pause::Quota { wait: NAMED_WAIT_MAX }));
        let busy =
            Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(Duration::from_secs(30)) };
        match after_outcome(&busy, &history(0, false), &policy(day), 0.0).next {
            Next::Again { after, unknown, .. } => assert_eq!((after, unknown), (Duration::from_secs(30), true)),
            other => panic!("{other:?}"),
        }
    }

    /// The wait that the provider names for one object, or a longer one each time though nothing counts.
    #[test]
    fn a_busy_job_keeps_its_named_wait_or_backs_off() {
        let day = Some(Duration::from_secs(86_400));
        let wait = |retry_after, requests| {
            let history = History { requests, ..history(0, false) };
            match after_outcome(&Outcome::Busy { retry_after }, &history, &policy(day), 1.0).next {
                Next::Again { after, unknown: false, .. } => after.as_secs(),
                other => panic!("{other:?}"),
            }
        };
        let table = [
            (Some(7), 0, 7),
            (Some(7), 5, 7),
            (Some(40 * 60), 0, NAMED_WAIT_MAX.as_secs()),
            (Some(0), 0, 1),
            (None, 0, 1),
            (None, 3, 8),
            (None, 30, 60),
        ];
        for (named_s, requests, after_s) in table {
            assert_eq!(wait(named_s.map(Duration::from_secs), requests), after_s, "{named_s:?} after {requests}");
        }
    }
}
