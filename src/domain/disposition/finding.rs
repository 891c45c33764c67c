//! What follows from one look-up, given what the job has been through.
//!
//! Refuses to charge and refuses to end in anything but `succeeded`, `declined` or `review`: whoever is asked about may
//! have been charged. What an answer leaves open is asked again, longer apart each time, until `give_up_after_s`; what
//! says nothing about the payment (a limit, a lock, credentials, no connection) is bounded by `max_age_s` too.

use std::time::Duration;

use super::{
    AskPolicy, History, LOCAL_FAULT_PAUSE, MISCONFIGURED_PAUSE, Next, Pause, Resend, RetryPolicy, named, nameless,
    review, surely_remembered,
};
use crate::domain::explain::parked::THROTTLED;
use crate::domain::lookup::Finding;
use crate::domain::outcome::FinalState;

/// What follows from a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    pub next: Next,
    pub pause: Option<Pause>,
    /// The frozen request may be sent once more.
    pub grants_resend: bool,
}

/// Decides what follows from what a look-up found. `fraction` is a random number in 0..1.
#[must_use]
pub fn after_finding(finding: &Finding, history: &History, policy: &RetryPolicy, fraction: f64) -> Judgement {
    // A row whose look-up was taken away since: nothing is asked any more.
    let nothing = AskPolicy { give_up_after: Duration::ZERO, resend_if_not_found: false };
    let asking = Asking { history, policy, ask: policy.lookup.unwrap_or(nothing), fraction };
    match finding {
        Finding::Accepted { reference } => {
            settle(FinalState::Succeeded, "accepted, as the provider says when asked", reference.clone())
        }
        Finding::Declined { reason } => settle(FinalState::Declined, reason, None),
        Finding::Differs { reason } => settle(FinalState::Review, reason, None),
        Finding::InProgress => asking.again("the provider is still working on this payment", None),
        Finding::NotFound if asking.may_resend() => Judgement {
            next: Next::Again {
                after: policy.backoff.delay(1, fraction),
                unknown: true,
                reason: "the provider does not know this payment: it is sent once more".to_owned(),
            },
            pause: None,
            grants_resend: true,
        },
        Finding::NotFound => asking.again("the provider does not know this payment", None),
        Finding::Unclear { reason } => asking.again(reason, None),
        Finding::Unknown { cause, retry_after } => {
            let named_wait = named(*retry_after);
            let reason = format!("asked for an unknown outcome: {}", cause.describe());
            let pause = named_wait.map(|wait| Pause::Lane { wait, cause: reason.clone() });
            Judgement { pause, ..asking.again(&reason, named_wait) }
        }
        Finding::Throttled { retry_after } => {
            let wait = named(*retry_after).unwrap_or_else(|| nameless(history, policy));
            Judgement { pause: Some(Pause::Quota { wait }), ..asking.put_off(wait, THROTTLED) }
        }
        Finding::Busy { retry_after } => {
            let wait = named(*retry_after).unwrap_or(asking.step());
            asking.put_off(wait, "the provider is busy with this payment's object")
        }
        Finding::Misconfigured { status } => {
            let cause = format!("provider answered a look-up with {status}: check the credentials in headers");
            // An address for look-ups that is refused says nothing of charges: nobody else waits.
            asking.put_off(MISCONFIGURED_PAUSE, &cause)
        }
        Finding::NotSent { cause } => asking.put_off(asking.step(), cause),
        Finding::LocalFault(fault) => {
            let put_off = asking.put_off(asking.step(), &fault.to_string());
            Judgement { pause: Some(Pause::Intake { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() }), ..put_off }
        }
    }
}

struct Asking<'a> {
    history: &'a History,
    policy: &'a RetryPolicy,
    ask: AskPolicy,
    fraction: f64,
}

impl Asking<'_> {
    fn unknown_age(&self) -> Duration {
        self.history.unknown_age.unwrap_or_default()
    }

    /// Longer with each look-up.
    fn step(&self) -> Duration {
        self.policy.backoff.delay(self.history.lookups.saturating_add(1), self.fraction)
    }

    /// Once, only after the provider has not known the payment for as long as its not knowing may be an error, and only
    /// while it surely remembers the key.
    fn may_resend(&self) -> bool {
        self.ask.resend_if_not_found
            && self.policy.idempotency_retention.is_some_and(|retention| surely_remembered(self.history, retention))
            && self.history.resend == Resend::Never
            && self.history.age <= self.policy.max_age
            && self.unknown_age() >= self.ask.give_up_after
    }

    /// The last time exactly when the bound is reached.
    fn again(&self, reason: &str, named_wait: Option<Duration>) -> Judgement {
        let left = self.ask.give_up_after.saturating_sub(self.unknown_age());
        if left.is_zero() {
            return given_up(reason, "give_up_after_s");
        }
        next_ask(self.step().min(left).max(named_wait.unwrap_or_default()), reason)
    }

    fn put_off(&self, wait: Duration, reason: &str) -> Judgement {
        let too_old = self.history.age.saturating_add(wait) > self.policy.max_age;
        if too_old && self.unknown_age().saturating_add(wait) > self.ask.give_up_after {
            return given_up(reason, "max_age_s");
        }
        next_ask(wait, reason)
    }
}

fn next_ask(after: Duration, reason: &str) -> Judgement {
    let next = Next::Again { after, unknown: true, reason: reason.to_owned() };
    Judgement { next, pause: None, grants_resend: false }
}

fn given_up(reason: &str, bound: &str) -> Judgement {
    let next = review(&format!("{reason}; asked until {bound}"));
    Judgement { next, pause: None, grants_resend: false }
}

fn settle(state: FinalState, reason: &str, reference: Option<String>) -> Judgement {
    let next = Next::Settle { state, reason: reason.to_owned(), reference };
    Judgement { next, pause: None, grants_resend: false }
}

#[cfg(test)]
#[path = "finding_tests.rs"]
mod tests;
