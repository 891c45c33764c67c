//! Decision table of a look-up: what follows from its result, given the job's history.
//!
//! It never charges, and ends a job only in `succeeded`, `declined` or `review`, because the payment may have been
//! charged. A result that leaves the outcome open is asked again, at growing intervals, until `give_up_after_s`. A
//! result that says nothing about the payment (a limit, a lock, credentials, no connection) is bounded by `max_age_s`
//! too.
//!
//! See `docs/decisions/0034-look-ups-of-unknown-outcomes.md`.

use std::time::Duration;

use super::{
    AttemptHistory, LOCAL_FAULT_PAUSE, MISCONFIGURED_PAUSE, PauseRequest, Resend, Transition, key_is_remembered,
    named_pause, named_wait, review, throttle_backoff,
};
use crate::domain::backoff::{LookupPolicy, RetryPolicy};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{FinalState, LookupResult};
use crate::domain::wait_reason::{Wait, WaitReason};

/// Decision after a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupDisposition {
    pub transition: Transition,
    pub pause: Option<PauseRequest>,
    /// The frozen request may be sent once more.
    pub grants_resend: bool,
}

/// Decides what follows from a look-up's result. `fraction` is a random number in 0..1.
pub fn after_lookup(
    finding: &LookupResult,
    history: &AttemptHistory,
    policy: &RetryPolicy,
    fraction: f64,
) -> LookupDisposition {
    // The row no longer has a look-up: the provider is not asked again.
    let no_lookup = LookupPolicy { give_up_after: Duration::ZERO, resend_if_not_found: false };
    let context = LookupContext { history, policy, lookup: policy.lookup.unwrap_or(no_lookup), fraction };
    match finding {
        LookupResult::Accepted { reference } => {
            finalize(FinalState::Succeeded, "accepted, as the look-up reports", reference.clone())
        }
        LookupResult::PartlyAccepted(charge) => {
            let transition = Transition::SucceedInPart(charge.clone());
            LookupDisposition { transition, pause: None, grants_resend: false }
        }
        LookupResult::Declined { reason } => finalize(FinalState::Declined, reason, None),
        LookupResult::Differs { reason } => finalize(FinalState::Review, reason, None),
        LookupResult::InProgress { retry_after } => {
            context.repeat_until_bound(WaitReason::InProgress.into(), context.named_wait(*retry_after))
        }
        LookupResult::NotFound if context.may_resend() => {
            let next = next_lookup(policy.backoff.delay(1, fraction), WaitReason::Resend.into());
            LookupDisposition { grants_resend: true, ..next }
        }
        LookupResult::NotFound => {
            context.repeat_until_bound(lookup_wait("the provider does not know this payment"), None)
        }
        LookupResult::Unclear { reason } => context.repeat_until_bound(lookup_wait(reason), None),
        LookupResult::Unknown { cause, retry_after } => {
            let named_wait = context.named_wait(*retry_after);
            let reason = format!("look-up failed: {}", cause.describe());
            let pause = named_wait.map(|wait| named_pause(wait, reason.clone()));
            LookupDisposition { pause, ..context.repeat_until_bound(lookup_wait(reason), named_wait) }
        }
        LookupResult::Throttled { retry_after } => {
            let wait = named_wait(*retry_after, || throttle_backoff(history, policy));
            LookupDisposition {
                pause: Some(PauseRequest::Quota { wait }),
                ..context.defer(wait, WaitReason::Throttled.into())
            }
        }
        LookupResult::Busy { retry_after } => {
            let wait = named_wait(*retry_after, || context.backoff());
            context.defer(wait, WaitReason::ObjectBusy.into())
        }
        LookupResult::Misconfigured { status } => {
            let cause = format!("provider answered a look-up with {status}: check the credentials in headers");
            // A refused address for look-ups says nothing about charges, so other jobs do not wait.
            context.defer(MISCONFIGURED_PAUSE, Wait::with_detail(WaitReason::Misconfigured, cause))
        }
        LookupResult::NotSent { cause } => context.defer(context.backoff(), lookup_wait(cause)),
        // As a refusal of the address: it says nothing about charges.
        LookupResult::LocalFault(fault @ LocalFault::ClientCertificate) => {
            context.defer(MISCONFIGURED_PAUSE, fault.wait())
        }
        LookupResult::LocalFault(fault) => {
            let deferred = context.defer(context.backoff(), fault.wait());
            LookupDisposition {
                pause: Some(PauseRequest::Claims { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() }),
                ..deferred
            }
        }
    }
}

struct LookupContext<'a> {
    history: &'a AttemptHistory,
    policy: &'a RetryPolicy,
    lookup: LookupPolicy,
    fraction: f64,
}

impl LookupContext<'_> {
    fn unknown_age(&self) -> Duration {
        self.history.unknown_age.unwrap_or_default()
    }

    /// Grows with each look-up.
    fn backoff(&self) -> Duration {
        self.policy.backoff.delay(self.history.lookups.saturating_add(1), self.fraction)
    }

    /// The wait that the provider names, if it names one.
    fn named_wait(&self, retry_after: Option<Duration>) -> Option<Duration> {
        retry_after.map(|wait| named_wait(Some(wait), || self.backoff()))
    }

    /// One resend is allowed: only after the provider has not found the payment for `give_up_after`, and only while it
    /// certainly remembers the idempotency key.
    fn may_resend(&self) -> bool {
        self.lookup.resend_if_not_found
            && self.policy.idempotency_retention.is_some_and(|retention| key_is_remembered(self.history, retention))
            && self.history.resend == Resend::Never
            && self.history.age <= self.policy.max_age
            && self.unknown_age() >= self.lookup.give_up_after
    }

    /// Asks again; the last time exactly when the bound is reached.
    fn repeat_until_bound(&self, reason: Wait, named_wait: Option<Duration>) -> LookupDisposition {
        let left = self.lookup.give_up_after.saturating_sub(self.unknown_age());
        if left.is_zero() {
            return lookups_exhausted(&reason, "give_up_after_s");
        }
        next_lookup(self.backoff().min(left).max(named_wait.unwrap_or_default()), reason)
    }

    fn defer(&self, wait: Duration, reason: Wait) -> LookupDisposition {
        let too_old = self.history.age.saturating_add(wait) > self.policy.max_age;
        if too_old && self.unknown_age().saturating_add(wait) > self.lookup.give_up_after {
            return lookups_exhausted(&reason, "max_age_s");
        }
        next_lookup(wait, reason)
    }
}

/// The wait of a job whose outcome is asked for again.
fn lookup_wait(finding: impl Into<String>) -> Wait {
    Wait::with_detail(WaitReason::Lookup, finding)
}

fn next_lookup(after: Duration, reason: Wait) -> LookupDisposition {
    let next = Transition::Retry { after, unknown: true, reason };
    LookupDisposition { transition: next, pause: None, grants_resend: false }
}

fn lookups_exhausted(reason: &Wait, bound: &str) -> LookupDisposition {
    let next = review(&format!("{reason}; asked until {bound}"));
    LookupDisposition { transition: next, pause: None, grants_resend: false }
}

fn finalize(state: FinalState, reason: &str, reference: Option<String>) -> LookupDisposition {
    let next = Transition::Finalize { state, reason: reason.to_owned(), reference };
    LookupDisposition { transition: next, pause: None, grants_resend: false }
}

#[cfg(test)]
mod tests {
    use super::super::{HONOURED_WAIT_MAX, review_unless_lookup};
    use super::*;
    use crate::domain::backoff::BackoffPolicy;
    use crate::domain::outcome::PartialCharge;
    use crate::domain::outcome::UnknownCause;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn policy(resend_if_not_found: bool) -> RetryPolicy {
        RetryPolicy {
            max_attempts: 3,
            max_age: secs(1_000),
            backoff: BackoffPolicy { base: secs(1), max: secs(60) },
            idempotency_retention: Some(secs(1_300)),
            lookup: Some(LookupPolicy { give_up_after: secs(600), resend_if_not_found }),
        }
    }

    fn asked(first_sent_s: u64, lookups: u32) -> AttemptHistory {
        AttemptHistory {
            attempts: 3,
            requests: 3,
            lookups,
            unknown: true,
            age: secs(first_sent_s),
            first_sent_age: Some(secs(first_sent_s)),
            unknown_age: Some(secs(first_sent_s)),
            ..AttemptHistory::default()
        }
    }

    const UNKNOWN: LookupResult = LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after: None };

    /// The final state, or the wait in seconds.
    fn outcome(disposition: &LookupDisposition) -> Result<FinalState, u64> {
        match &disposition.transition {
            Transition::Finalize { state, .. } => Ok(*state),
            Transition::SucceedInPart(_) => Ok(FinalState::Succeeded),
            Transition::Retry { after, unknown, .. } => {
                assert!(unknown, "a job that is asked about stays unknown");
                Err(after.as_secs())
            }
        }
    }

    #[test]
    fn undecided_lookups_are_repeated() {
        let unclear = LookupResult::Unclear { reason: "no state at /state".to_owned() };
        let declined = LookupResult::Declined { reason: "declined".to_owned() };
        let part = LookupResult::PartlyAccepted(PartialCharge { reference: None, amount: 1 });
        let differs = LookupResult::Differs { reason: "1 EUR, not 2 EUR".to_owned() };
        let table = [
            (LookupResult::Accepted { reference: None }, Ok(FinalState::Succeeded), Ok(FinalState::Succeeded)),
            (part, Ok(FinalState::Succeeded), Ok(FinalState::Succeeded)),
            (declined, Ok(FinalState::Declined), Ok(FinalState::Declined)),
            (differs, Ok(FinalState::Review), Ok(FinalState::Review)),
            (LookupResult::InProgress { retry_after: None }, Err(4), Ok(FinalState::Review)),
            (LookupResult::NotFound, Err(4), Ok(FinalState::Review)),
            (unclear, Err(4), Ok(FinalState::Review)),
            (UNKNOWN, Err(4), Ok(FinalState::Review)),
            // These say nothing about the payment.
            (LookupResult::Throttled { retry_after: Some(secs(7)) }, Err(7), Err(7)),
            (LookupResult::Busy { retry_after: None }, Err(4), Err(4)),
            (LookupResult::Misconfigured { status: 401 }, Err(30), Err(30)),
            (LookupResult::NotSent { cause: "refused".to_owned() }, Err(4), Err(4)),
            (LookupResult::LocalFault(LocalFault::ProcessDescriptors), Err(4), Err(4)),
            (LookupResult::LocalFault(LocalFault::ClientCertificate), Err(30), Err(30)),
        ];
        for (finding, before, at_the_bound) in table {
            for (first_sent_s, wanted) in [(10, before), (600, at_the_bound)] {
                let disposition = after_lookup(&finding, &asked(first_sent_s, 2), &policy(false), 1.0);
                assert_eq!(outcome(&disposition), wanted, "{finding:?} after {first_sent_s} s");
                assert!(!disposition.grants_resend, "{finding:?}");
            }
        }
    }

    #[test]
    fn lookup_waits_grow_up_to_the_bound() {
        let wait = |first_sent_s, lookups| {
            outcome(&after_lookup(&LookupResult::NotFound, &asked(first_sent_s, lookups), &policy(false), 1.0))
        };
        let waits: Vec<_> = [(1, 0), (2, 1), (4, 2), (100, 9), (595, 9), (599, 9)].map(|(age, n)| wait(age, n)).into();
        assert_eq!(waits, [Err(1), Err(2), Err(4), Err(60), Err(5), Err(1)]);
        assert_eq!(wait(600, 9), Ok(FinalState::Review));
        // A named wait is followed, even beyond the bound.
        let named = LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(secs(40)) };
        let disposition = after_lookup(&named, &asked(595, 9), &policy(false), 1.0);
        assert_eq!(outcome(&disposition), Err(40));
        assert!(matches!(disposition.pause, Some(PauseRequest::Lane { wait, .. }) if wait == secs(40)));
    }

    #[test]
    fn zero_retry_after_of_finding_is_ignored() {
        let get = |finding: &LookupResult| after_lookup(finding, &asked(1, 0), &policy(false), 1.0);
        let pairs =
            [|retry_after| LookupResult::Throttled { retry_after }, |retry_after| LookupResult::Busy { retry_after }];
        for finding in pairs {
            assert_eq!(get(&finding(Some(Duration::ZERO))), get(&finding(None)), "{:?}", finding(None));
        }
        // A 503 that names a wait, however it is written, asks the lane to wait.
        let unavailable = LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(secs(0)) };
        let disposition = get(&unavailable);
        assert_eq!(outcome(&disposition), Err(1));
        assert!(matches!(disposition.pause, Some(PauseRequest::Lane { wait, .. }) if wait == secs(1)));
    }

    #[test]
    fn throttled_lookup_pauses_others_misconfigured_does_not() {
        let pause = |finding: &LookupResult| after_lookup(finding, &asked(1, 0), &policy(false), 0.5).pause;
        let throttled = LookupResult::Throttled { retry_after: Some(secs(9_999)) };
        assert_eq!(pause(&throttled), Some(PauseRequest::Quota { wait: HONOURED_WAIT_MAX }));
        let fault = LocalFault::ProcessDescriptors;
        let claims = PauseRequest::Claims { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() };
        assert_eq!(pause(&LookupResult::LocalFault(fault)), Some(claims), "the next request would fail too");
        let misconfigured = [401, 403, 407].map(|status| LookupResult::Misconfigured { status });
        for finding in misconfigured.into_iter().chain([
            LookupResult::NotFound,
            UNKNOWN,
            LookupResult::LocalFault(LocalFault::ClientCertificate),
            LookupResult::Busy { retry_after: Some(secs(5)) },
        ]) {
            assert_eq!(pause(&finding), None, "{finding:?}");
        }
    }

    /// A result that says nothing is bounded by the later of the two bounds: a morning with a wrong key loses no payment.
    #[test]
    fn inconclusive_lookup_repeats_until_max_age() {
        let wait = |age_s, first_sent_s, give_up_s| {
            let history = AttemptHistory { age: secs(age_s), ..asked(first_sent_s, 0) };
            let mut policy = policy(false);
            policy.lookup = Some(LookupPolicy { give_up_after: secs(give_up_s), resend_if_not_found: false });
            outcome(&after_lookup(&LookupResult::Misconfigured { status: 401 }, &history, &policy, 0.5))
        };
        assert_eq!(wait(970, 970, 600), Err(30));
        assert_eq!(wait(971, 971, 600), Ok(FinalState::Review));
        assert_eq!(wait(971, 571, 601), Err(30));
    }

    #[test]
    fn resend_is_granted_once_where_configured() {
        let granted = |history: &AttemptHistory, policy: &RetryPolicy| {
            let disposition = after_lookup(&LookupResult::NotFound, history, policy, 1.0);
            assert_eq!(disposition.grants_resend, outcome(&disposition) == Err(1), "{disposition:?}");
            disposition.grants_resend
        };
        assert!(granted(&asked(600, 9), &policy(true)));
        assert!(!granted(&asked(590, 9), &policy(true)), "it may still appear");
        assert!(!granted(&asked(600, 9), &policy(false)));
        for resend in [Resend::Granted, Resend::Used] {
            assert!(!granted(&AttemptHistory { resend, ..asked(600, 9) }, &policy(true)), "{resend:?}");
        }
        assert!(!granted(&AttemptHistory { age: secs(1_001), ..asked(600, 9) }, &policy(true)), "too old to charge");
        for retention in [None, Some(secs(1_200))] {
            let policy = RetryPolicy { idempotency_retention: retention, ..policy(true) };
            assert!(!granted(&asked(600, 9), &policy), "the key may be forgotten: {retention:?}");
        }
    }

    /// A charge of a moment ago may not be found yet, however long ago the first request was.
    #[test]
    fn lookup_bound_starts_at_last_unknown_charge() {
        let late = |unknown_s| AttemptHistory { unknown_age: Some(secs(unknown_s)), ..asked(640, 2) };
        for finding in [LookupResult::NotFound, LookupResult::InProgress { retry_after: None }, UNKNOWN] {
            for (unknown_s, wanted) in [(0, Err(4)), (10, Err(4)), (598, Err(2))] {
                let disposition = after_lookup(&finding, &late(unknown_s), &policy(true), 1.0);
                assert_eq!(
                    (outcome(&disposition), disposition.grants_resend),
                    (wanted, false),
                    "{finding:?} after {unknown_s} s"
                );
            }
        }
        assert!(after_lookup(&LookupResult::NotFound, &late(600), &policy(true), 1.0).grants_resend);
        let old = |unknown_s| AttemptHistory { age: secs(1_001), first_sent_age: Some(secs(1_001)), ..late(unknown_s) };
        let busy = LookupResult::Busy { retry_after: Some(secs(5)) };
        assert_eq!(outcome(&after_lookup(&busy, &old(590), &policy(false), 1.0)), Err(5));
        assert_eq!(outcome(&after_lookup(&busy, &old(596), &policy(false), 1.0)), Ok(FinalState::Review));
        assert_eq!(review_unless_lookup(&old(600), &policy(false), "x"), None);
        assert!(review_unless_lookup(&old(601), &policy(false), "x").is_some());
    }

    #[test]
    fn removed_lookup_sends_unknown_job_to_review() {
        let policy = RetryPolicy { lookup: None, ..policy(true) };
        assert_eq!(
            outcome(&after_lookup(&LookupResult::InProgress { retry_after: None }, &asked(1, 1), &policy, 0.5)),
            Ok(FinalState::Review)
        );
    }
}
