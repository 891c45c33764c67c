//! The table of findings, row by row.

use super::super::{NAMED_WAIT_MAX, ask_or_review};
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
        lookup: Some(AskPolicy { give_up_after: secs(600), resend_if_not_found }),
    }
}

fn asked(first_sent_s: u64, lookups: u32) -> History {
    History {
        attempts: 3,
        requests: 3,
        lookups,
        resend: Resend::Never,
        unknown: true,
        age: secs(first_sent_s),
        first_sent_age: Some(secs(first_sent_s)),
        unknown_age: Some(secs(first_sent_s)),
        refusal_round: 1,
        lost_holders: 0,
        probe: false,
    }
}

const UNKNOWN: Finding = Finding::Unknown { cause: UnknownCause::Timeout, retry_after: None };

/// Final state, or the wait in seconds.
fn outcome(judged: &Judgement) -> Result<FinalState, u64> {
    match &judged.next {
        Next::Settle { state, .. } => Ok(*state),
        Next::Again { after, unknown, .. } => {
            assert!(unknown, "a job that is asked about stays unknown");
            Err(after.as_secs())
        }
    }
}

#[test]
fn what_decides_ends_the_job_and_what_does_not_is_asked_again() {
    let unclear = Finding::Unclear { reason: "no state at /state".to_owned() };
    let declined = Finding::Declined { reason: "declined".to_owned() };
    let differs = Finding::Differs { reason: "1 EUR, not 2 EUR".to_owned() };
    let table = [
        (Finding::Accepted { reference: None }, Ok(FinalState::Succeeded), Ok(FinalState::Succeeded)),
        (declined, Ok(FinalState::Declined), Ok(FinalState::Declined)),
        (differs, Ok(FinalState::Review), Ok(FinalState::Review)),
        (Finding::InProgress, Err(4), Ok(FinalState::Review)),
        (Finding::NotFound, Err(4), Ok(FinalState::Review)),
        (unclear, Err(4), Ok(FinalState::Review)),
        (UNKNOWN, Err(4), Ok(FinalState::Review)),
        // These say nothing about the payment.
        (Finding::Throttled { retry_after: Some(secs(7)) }, Err(7), Err(7)),
        (Finding::Busy { retry_after: None }, Err(4), Err(4)),
        (Finding::Misconfigured { status: 401 }, Err(30), Err(30)),
        (Finding::NotSent { cause: "refused".to_owned() }, Err(4), Err(4)),
        (Finding::LocalFault(LocalFault::ProcessDescriptors), Err(4), Err(4)),
    ];
    for (finding, before, at_the_bound) in table {
        for (first_sent_s, wanted) in [(10, before), (600, at_the_bound)] {
            let judged = after_finding(&finding, &asked(first_sent_s, 2), &policy(false), 1.0);
            assert_eq!(outcome(&judged), wanted, "{finding:?} after {first_sent_s} s");
            assert!(!judged.grants_resend, "{finding:?}");
        }
    }
}

#[test]
fn waits_grow_and_the_last_question_is_asked_at_the_bound() {
    let wait = |first_sent_s, lookups| {
        outcome(&after_finding(&Finding::NotFound, &asked(first_sent_s, lookups), &policy(false), 1.0))
    };
    let waits: Vec<_> = [(1, 0), (2, 1), (4, 2), (100, 9), (595, 9), (599, 9)].map(|(age, n)| wait(age, n)).into();
    assert_eq!(waits, [Err(1), Err(2), Err(4), Err(60), Err(5), Err(1)]);
    assert_eq!(wait(600, 9), Ok(FinalState::Review));
    // A named wait is kept, though it leads beyond the bound.
    let named = Finding::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(secs(40)) };
    let judged = after_finding(&named, &asked(595, 9), &policy(false), 1.0);
    assert_eq!(outcome(&judged), Err(40));
    assert!(matches!(judged.pause, Some(Pause::Lane { wait, .. }) if wait == secs(40)));
}

#[test]
fn a_named_wait_of_zero_names_none() {
    let get = |finding: &Finding| after_finding(finding, &asked(1, 0), &policy(false), 1.0);
    let pairs = [
        |retry_after| Finding::Throttled { retry_after },
        |retry_after| Finding::Busy { retry_after },
        |retry_after| Finding::Unknown { cause: UnknownCause::ServerError(503), retry_after },
    ];
    for finding in pairs {
        assert_eq!(get(&finding(Some(Duration::ZERO))), get(&finding(None)), "{:?}", finding(None));
    }
}

#[test]
fn a_limit_holds_others_back_and_wrong_credentials_for_lookups_do_not() {
    let pause = |finding: &Finding| after_finding(finding, &asked(1, 0), &policy(false), 0.5).pause;
    let throttled = Finding::Throttled { retry_after: Some(secs(9_999)) };
    assert_eq!(pause(&throttled), Some(Pause::Quota { wait: NAMED_WAIT_MAX }));
    let fault = LocalFault::ProcessDescriptors;
    let intake = Pause::Intake { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() };
    assert_eq!(pause(&Finding::LocalFault(fault)), Some(intake), "the next one would fare no better");
    let misconfigured = [401, 403, 407].map(|status| Finding::Misconfigured { status });
    for finding in
        misconfigured.into_iter().chain([Finding::NotFound, UNKNOWN, Finding::Busy { retry_after: Some(secs(5)) }])
    {
        assert_eq!(pause(&finding), None, "{finding:?}");
    }
}

/// What says nothing is bounded by the later of the two bounds, so that a morning with a wrong key loses no payment.
#[test]
fn what_says_nothing_is_asked_until_max_age() {
    let wait = |age_s, first_sent_s, give_up_s| {
        let history = History { age: secs(age_s), ..asked(first_sent_s, 0) };
        let mut policy = policy(false);
        policy.lookup = Some(AskPolicy { give_up_after: secs(give_up_s), resend_if_not_found: false });
        outcome(&after_finding(&Finding::Misconfigured { status: 401 }, &history, &policy, 0.5))
    };
    assert_eq!(wait(970, 970, 600), Err(30));
    assert_eq!(wait(971, 971, 600), Ok(FinalState::Review));
    assert_eq!(wait(971, 571, 601), Err(30));
}

#[test]
fn one_more_request_is_granted_once_and_only_where_the_row_says_so() {
    let granted = |history: &History, policy: &RetryPolicy| {
        let judged = after_finding(&Finding::NotFound, history, policy, 1.0);
        assert_eq!(judged.grants_resend, outcome(&judged) == Err(1), "{judged:?}");
        judged.grants_resend
    };
    assert!(granted(&asked(600, 9), &policy(true)));
    assert!(!granted(&asked(590, 9), &policy(true)), "it may still appear");
    assert!(!granted(&asked(600, 9), &policy(false)));
    for resend in [Resend::Granted, Resend::Used] {
        assert!(!granted(&History { resend, ..asked(600, 9) }, &policy(true)), "{resend:?}");
    }
    assert!(!granted(&History { age: secs(1_001), ..asked(600, 9) }, &policy(true)), "too old to charge");
    for retention in [None, Some(secs(1_200))] {
        let policy = RetryPolicy { idempotency_retention: retention, ..policy(true) };
        assert!(!granted(&asked(600, 9), &policy), "the key may be forgotten: {retention:?}");
    }
}

/// What was charged a moment ago may not be found yet, however long ago the first request was.
#[test]
fn the_bound_counts_from_the_last_charge_of_unknown_outcome() {
    let late = |unknown_s| History { unknown_age: Some(secs(unknown_s)), ..asked(640, 2) };
    for finding in [Finding::NotFound, Finding::InProgress, UNKNOWN] {
        for (unknown_s, wanted) in [(0, Err(4)), (10, Err(4)), (598, Err(2))] {
            let judged = after_finding(&finding, &late(unknown_s), &policy(true), 1.0);
            assert_eq!((outcome(&judged), judged.grants_resend), (wanted, false), "{finding:?} after {unknown_s} s");
        }
    }
    assert!(after_finding(&Finding::NotFound, &late(600), &policy(true), 1.0).grants_resend);
    let old = |unknown_s| History { age: secs(1_001), first_sent_age: Some(secs(1_001)), ..late(unknown_s) };
    let busy = Finding::Busy { retry_after: Some(secs(5)) };
    assert_eq!(outcome(&after_finding(&busy, &old(590), &policy(false), 1.0)), Err(5));
    assert_eq!(outcome(&after_finding(&busy, &old(596), &policy(false), 1.0)), Ok(FinalState::Review));
    assert_eq!(ask_or_review(&old(600), &policy(false), "x"), None);
    assert!(ask_or_review(&old(601), &policy(false), "x").is_some());
}

#[test]
fn without_a_lookup_any_more_nothing_is_asked_again() {
    let policy = RetryPolicy { lookup: None, ..policy(true) };
    assert_eq!(outcome(&after_finding(&Finding::InProgress, &asked(1, 1), &policy, 0.5)), Ok(FinalState::Review));
}
