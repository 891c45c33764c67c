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
    AttemptHistory, LOCAL_FAULT_PAUSE, LookupPolicy, MISCONFIGURED_PAUSE, PauseRequest, Resend, RetryPolicy,
    Transition, honoured_wait, key_is_remembered, named_pause, review, throttle_backoff,
};
use crate::domain::lookup::LookupResult;
use crate::domain::outcome::FinalState;
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
        LookupResult::Declined { reason } => finalize(FinalState::Declined, reason, None),
        LookupResult::Differs { reason } => finalize(FinalState::Review, reason, None),
        LookupResult::InProgress => context.repeat_until_bound(WaitReason::InProgress.into(), None),
        LookupResult::NotFound if context.may_resend() => LookupDisposition {
            transition: Transition::Retry {
                after: policy.backoff.delay(1, fraction),
                unknown: true,
                reason: WaitReason::Resend.into(),
            },
            pause: None,
            grants_resend: true,
        },
        LookupResult::NotFound => {
            context.repeat_until_bound(lookup_wait("the provider does not know this payment"), None)
        }
        LookupResult::Unclear { reason } => context.repeat_until_bound(lookup_wait(reason), None),
        LookupResult::Unknown { cause, retry_after } => {
            let named_wait = honoured_wait(*retry_after);
            let reason = format!("look-up failed: {}", cause.describe());
            let pause = named_wait.map(|wait| named_pause(wait, reason.clone()));
            LookupDisposition { pause, ..context.repeat_until_bound(lookup_wait(reason), named_wait) }
        }
        LookupResult::Throttled { retry_after } => {
            let wait = honoured_wait(*retry_after).unwrap_or_else(|| throttle_backoff(history, policy));
            LookupDisposition {
                pause: Some(PauseRequest::Quota { wait }),
                ..context.defer(wait, WaitReason::Throttled.into())
            }
        }
        LookupResult::Busy { retry_after } => {
            let wait = honoured_wait(*retry_after).unwrap_or(context.backoff());
            context.defer(wait, WaitReason::ObjectBusy.into())
        }
        LookupResult::Misconfigured { status } => {
            let cause = format!("provider answered a look-up with {status}: check the credentials in headers");
            // A refused address for look-ups says nothing about charges, so other jobs do not wait.
            context.defer(MISCONFIGURED_PAUSE, Wait::with_detail(WaitReason::Misconfigured, cause))
        }
        LookupResult::NotSent { cause } => context.defer(context.backoff(), lookup_wait(cause)),
        LookupResult::LocalFault(fault) => {
            let deferred = context.defer(context.backoff(), fault.wait());
            LookupDisposition {
                pause: Some(PauseRequest::Intake { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() }),
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
#[path = "lookup_tests.rs"]
mod tests;
