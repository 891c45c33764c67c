//! Tests of the decision table of look-ups: each result, row by row, and the bounds on repeats.

use super::super::{HONOURED_WAIT_MAX, review_unless_lookup};
use super::*;
use crate::domain::backoff::BackoffPolicy;
use crate::domain::local_fault::LocalFault;
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
        resend: Resend::Never,
        unknown: true,
        age: secs(first_sent_s),
        first_sent_age: Some(secs(first_sent_s)),
        unknown_age: Some(secs(first_sent_s)),
        throttle_generation: 1,
        lost_holders: 0,
        probe: false,
    }
}

const UNKNOWN: LookupResult = LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after: None };

/// The final state, or the wait in seconds.
fn outcome(disposition: &LookupDisposition) -> Result<FinalState, u64> {
    match &disposition.transition {
        Transition::Finalize { state, .. } => Ok(*state),
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
    let differs = LookupResult::Differs { reason: "1 EUR, not 2 EUR".to_owned() };
    let table = [
        (LookupResult::Accepted { reference: None }, Ok(FinalState::Succeeded), Ok(FinalState::Succeeded)),
        (declined, Ok(FinalState::Declined), Ok(FinalState::Declined)),
        (differs, Ok(FinalState::Review), Ok(FinalState::Review)),
        (LookupResult::InProgress, Err(4), Ok(FinalState::Review)),
        (LookupResult::NotFound, Err(4), Ok(FinalState::Review)),
        (unclear, Err(4), Ok(FinalState::Review)),
        (UNKNOWN, Err(4), Ok(FinalState::Review)),
        // These say nothing about the payment.
        (LookupResult::Throttled { retry_after: Some(secs(7)) }, Err(7), Err(7)),
        (LookupResult::Busy { retry_after: None }, Err(4), Err(4)),
        (LookupResult::Misconfigured { status: 401 }, Err(30), Err(30)),
        (LookupResult::NotSent { cause: "refused".to_owned() }, Err(4), Err(4)),
        (LookupResult::LocalFault(LocalFault::ProcessDescriptors), Err(4), Err(4)),
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
    let pairs = [
        |retry_after| LookupResult::Throttled { retry_after },
        |retry_after| LookupResult::Busy { retry_after },
        |retry_after| LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after },
    ];
    for finding in pairs {
        assert_eq!(get(&finding(Some(Duration::ZERO))), get(&finding(None)), "{:?}", finding(None));
    }
}

#[test]
fn throttled_lookup_pauses_others_misconfigured_does_not() {
    let pause = |finding: &LookupResult| after_lookup(finding, &asked(1, 0), &policy(false), 0.5).pause;
    let throttled = LookupResult::Throttled { retry_after: Some(secs(9_999)) };
    assert_eq!(pause(&throttled), Some(PauseRequest::Quota { wait: HONOURED_WAIT_MAX }));
    let fault = LocalFault::ProcessDescriptors;
    let intake = PauseRequest::Intake { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() };
    assert_eq!(pause(&LookupResult::LocalFault(fault)), Some(intake), "the next request would fail too");
    let misconfigured = [401, 403, 407].map(|status| LookupResult::Misconfigured { status });
    for finding in misconfigured.into_iter().chain([
        LookupResult::NotFound,
        UNKNOWN,
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
    for finding in [LookupResult::NotFound, LookupResult::InProgress, UNKNOWN] {
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
    assert_eq!(outcome(&after_lookup(&LookupResult::InProgress, &asked(1, 1), &policy, 0.5)), Ok(FinalState::Review));
}
