//! Tests of the decision table, row by row, and of what keeps a job from being sent, whatever its history.

use super::*;
use crate::domain::backoff::{BackoffPolicy, LookupPolicy};
use crate::domain::outcome::Refusal;

mod histories;

const SECOND: Duration = Duration::from_secs(1);

fn policy(retention: Option<Duration>) -> RetryPolicy {
    RetryPolicy {
        max_attempts: 3,
        max_age: Duration::from_secs(3_600),
        backoff: BackoffPolicy { base: SECOND, max: Duration::from_secs(60) },
        idempotency_retention: retention,
        lookup: None,
    }
}

/// The same policy with a look-up.
fn with_lookup(retention: Option<Duration>) -> RetryPolicy {
    let lookup = LookupPolicy { give_up_after: Duration::from_secs(600), resend_if_not_found: false };
    RetryPolicy { lookup: Some(lookup), ..policy(retention) }
}

fn history(attempts: u32, unknown: bool) -> AttemptHistory {
    AttemptHistory {
        attempts,
        requests: attempts,
        unknown,
        age: SECOND,
        first_sent_age: unknown.then_some(SECOND),
        unknown_age: unknown.then_some(SECOND),
        ..AttemptHistory::default()
    }
}

/// 30 s, and twice as long each time, at most 15 minutes; the same if it cannot be built or its connection is refused.
#[test]
fn refused_payment_waits_longer_and_goes_to_review_alone() {
    let unbuildable = Outcome::LocalFault(LocalFault::Unbuildable("no file".to_owned()));
    let certificate = Outcome::LocalFault(LocalFault::ClientCertificate);
    for outcome in [Outcome::Misconfigured { status: 404 }, unbuildable, certificate] {
        let after = |all: u32, alone: u32, unknown: bool| {
            let history = AttemptHistory { refusals: Refusals { all, alone }, ..history(1, unknown) };
            after_outcome(&outcome, &history, &policy(None), 0.5)
        };
        for (all, wait_s) in [(0, 30), (1, 30), (2, 60), (3, 120), (5, 480), (6, 900), (100, 900)] {
            let decided = after(all, 2, false);
            let Transition::Retry { after: wait, unknown: false, .. } = decided.transition else {
                panic!("{decided:?}")
            };
            assert_eq!((wait, decided.counts_attempt), (Duration::from_secs(wait_s), false));
            assert!(matches!(decided.pause, Some(PauseRequest::Lane { wait: MISCONFIGURED_PAUSE, .. })));
        }
        for (unknown, charged) in [(false, "confirmed not charged"), (true, "the outcome is unknown")] {
            let decided = after(9, REFUSED_ALONE_MAX, unknown);
            let Transition::Finalize { state, reason, .. } = decided.transition else { panic!("{decided:?}") };
            assert_eq!((state, decided.pause), (FinalState::Review, None));
            assert!(reason.starts_with("refused_alone: refused 3 times") && reason.contains(charged), "{reason}");
        }
    }
}

#[test]
fn outcomes_follow_the_disposition_table() {
    let day = Some(Duration::from_secs(86_400));
    let unknown = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
    let unavailable =
        Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(Duration::from_secs(9)) };
    let throttled = Outcome::Throttled { retry_after: Some(SECOND) };
    let busy = Outcome::Busy { retry_after: Some(SECOND) };
    let not_sent = Outcome::NotSent { cause: "refused".to_owned() };
    let local_fault = Outcome::LocalFault(LocalFault::ProcessDescriptors);
    let rejected = Outcome::Rejected { reason: "422".to_owned() };
    let declined = Outcome::Declined { reason: "402".to_owned() };
    let accepted = Outcome::Accepted { reference: None };
    let misconfigured = Outcome::Misconfigured { status: 401 };
    type Row<'a> = (&'a Outcome, Option<Duration>, u32, bool, Option<FinalState>, bool, bool);
    // outcome, retention, attempts so far, unknown so far → final state (None: retry), counts, pauses others
    let table: [Row<'_>; 18] = [
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
        (&local_fault, None, 2, false, None, false, true),
        (&local_fault, None, 2, true, None, false, true),
        (&unknown, day, 0, false, None, true, false),
        (&unknown, day, 2, false, Some(FinalState::Review), true, false),
        (&unknown, None, 0, false, Some(FinalState::Review), true, false),
        (&unavailable, day, 0, false, None, true, true),
        (&Outcome::InProgress { retry_after: None }, day, 0, true, None, true, false),
        (&Outcome::InProgress { retry_after: None }, day, 2, true, Some(FinalState::Review), true, false),
    ];
    for (outcome, retention, attempts, unknown, state, counts, pauses) in table {
        let got = after_outcome(outcome, &history(attempts, unknown), &policy(retention), 0.5);
        assert_eq!(got.transition.final_state(), state, "{outcome:?} after {attempts}");
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
                Outcome::InProgress { retry_after: None },
                Outcome::Unknown { cause: UnknownCause::ConnectionLost, retry_after: None },
                Outcome::NotSent { cause: String::new() },
                Outcome::LocalFault(LocalFault::Threads),
                Outcome::Unconfirmed { refusal: Refusal::Busy { retry_after: None }, status: 423 },
            ];
            for policy in [policy(retention), with_lookup(retention)] {
                let step = match before_request(&history, &policy, Some(SendObstacle::Expired)) {
                    PreSend::Transition(next) => Some(next),
                    PreSend::Charge | PreSend::LookUp => None,
                };
                let nexts = outcomes.iter().map(|outcome| after_outcome(outcome, &history, &policy, 0.0).transition);
                for next in nexts.chain(step) {
                    assert!(!matches!(next.final_state(), Some(FinalState::Dead | FinalState::Expired)), "{next:?}");
                }
            }
        }
    }
}

/// A failed probe costs the job no attempt, however often the provider fails while its breaker is open.
#[test]
fn a_failed_probe_counts_no_attempt() {
    let day = Some(Duration::from_secs(86_400));
    let not_sent = Outcome::NotSent { cause: "refused".to_owned() };
    let unknown = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
    for outcome in [&not_sent, &unknown] {
        let probe = AttemptHistory { probe: true, ..history(2, false) };
        let got = after_outcome(outcome, &probe, &policy(day), 0.5);
        assert_eq!((got.transition.final_state(), got.counts_attempt), (None, false), "{outcome:?}");
    }
    let got = after_outcome(
        &Outcome::InProgress { retry_after: None },
        &AttemptHistory { probe: true, ..history(0, true) },
        &policy(day),
        0.5,
    );
    assert!(got.counts_attempt, "that is an answer");
    let probe = AttemptHistory { probe: true, ..history(0, false) };
    let got = after_outcome(&unknown, &probe, &policy(None), 0.5);
    assert_eq!(got.transition.final_state(), Some(FinalState::Review), "a resend may charge twice");
    let got = after_outcome(&unknown, &probe, &with_lookup(None), 0.5);
    assert_eq!((got.transition.final_state(), got.counts_attempt), (None, false), "unless there is a look-up");
}

/// Order of what is done with a job of unknown outcome: same key, look-up, review.
#[test]
fn unknown_job_follows_the_retry_order() {
    const CHARGE: &str = "charge";
    const LOOK_UP: &str = "look up";
    const REVIEW: &str = "review";
    let secs = Duration::from_secs;
    let (retention, none) = (Some(secs(100)), None);
    // retention, age of the first request, attempts of 3, age, resend → without and with a look-up
    type Row = (Option<Duration>, u64, u32, u64, Resend, &'static str, &'static str);
    let table: [Row; 11] = [
        (retention, 49, 1, 49, Resend::Never, CHARGE, CHARGE),
        (retention, 50, 1, 50, Resend::Never, REVIEW, LOOK_UP),
        (retention, 1, 3, 1, Resend::Never, REVIEW, LOOK_UP),
        (retention, 49, 2, 3_600, Resend::Never, CHARGE, CHARGE),
        (retention, 49, 2, 3_601, Resend::Never, REVIEW, LOOK_UP),
        (retention, 49, 3, 49, Resend::Granted, CHARGE, CHARGE),
        (retention, 50, 3, 50, Resend::Granted, REVIEW, LOOK_UP),
        (retention, 49, 3, 3_601, Resend::Granted, REVIEW, LOOK_UP),
        (retention, 49, 3, 49, Resend::Used, REVIEW, LOOK_UP),
        (none, 1, 1, 1, Resend::Never, REVIEW, LOOK_UP),
        (none, 1, 1, 1, Resend::Granted, REVIEW, LOOK_UP),
    ];
    for (retention, sent_s, attempts, age_s, resend, without, with) in table {
        let first_sent_age = Some(secs(sent_s));
        let history = AttemptHistory { first_sent_age, resend, age: secs(age_s), ..history(attempts, true) };
        for (policy, wanted) in [(policy(retention), without), (with_lookup(retention), with)] {
            let got = match before_request(&history, &policy, Some(SendObstacle::Expired)) {
                PreSend::Charge => CHARGE,
                PreSend::LookUp => LOOK_UP,
                PreSend::Transition(next) => next.final_state().map_or("again", FinalState::name),
            };
            assert_eq!(got, wanted, "{history:?} {policy:?}");
        }
    }
    let known = AttemptHistory { first_sent_age: Some(secs(99)), ..history(9, false) };
    assert_eq!(before_request(&known, &policy(None), None), PreSend::Charge);
    // Look-ups that never end are not started for ever.
    let long_ago = Some(secs(3_601));
    let endless = AttemptHistory {
        age: secs(3_601),
        first_sent_age: long_ago,
        unknown_age: long_ago,
        lookups: 5,
        ..history(3, true)
    };
    let step = before_request(&endless, &with_lookup(None), None);
    assert!(matches!(step, PreSend::Transition(next) if next.final_state().is_some()));
}

/// If nothing may be sent again, a provider with a look-up is asked soon.
#[test]
fn exhausted_unknown_jobs_are_looked_up() {
    let day = Some(Duration::from_secs(86_400));
    let unknown = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
    let named = Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(9 * SECOND) };
    let not_sent = Outcome::NotSent { cause: "refused".to_owned() };
    let old = AttemptHistory { age: Duration::from_secs(3_600), ..history(1, true) };
    let table = [
        (&unknown, None, history(0, false), SECOND),
        (&named, None, history(0, false), 9 * SECOND),
        (&unknown, day, history(2, true), SECOND),
        (&Outcome::InProgress { retry_after: None }, day, history(2, true), SECOND),
        (&not_sent, day, history(2, true), SECOND),
        (&unknown, day, old, 2 * SECOND),
        (&Outcome::Throttled { retry_after: Some(SECOND) }, day, old, SECOND),
    ];
    for (outcome, retention, history, wait) in table {
        match after_outcome(outcome, &history, &with_lookup(retention), 1.0).transition {
            Transition::Retry { after, unknown: true, .. } => assert_eq!(after, wait, "{outcome:?}"),
            other => panic!("{outcome:?}: {other:?}"),
        }
        let without = after_outcome(outcome, &history, &policy(retention), 1.0);
        assert_eq!(without.transition.final_state(), Some(FinalState::Review), "{outcome:?}");
    }
    // There is no look-up for a request that was certainly never sent.
    let dead = after_outcome(&not_sent, &history(2, false), &with_lookup(day), 1.0);
    assert_eq!(dead.transition.final_state(), Some(FinalState::Dead));
}

#[test]
fn retry_after_is_respected_and_capped() {
    let day = Some(Duration::from_secs(86_400));
    let long = Outcome::Throttled { retry_after: Some(Duration::from_secs(40 * 60)) };
    let got = after_outcome(&long, &history(0, false), &policy(day), 0.0);
    assert_eq!(got.pause, Some(PauseRequest::Quota { wait: HONOURED_WAIT_MAX }));
    let busy = Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(Duration::from_secs(30)) };
    match after_outcome(&busy, &history(0, false), &policy(day), 0.0).transition {
        Transition::Retry { after, unknown, .. } => assert_eq!((after, unknown), (Duration::from_secs(30), true)),
        other => panic!("{other:?}"),
    }
}

/// A wait that has ended or cannot be read is the row's backoff, and a second at least.
#[test]
fn unusable_wait_is_the_backoff() {
    let day = Some(Duration::from_secs(86_400));
    let outcomes = [
        |retry_after| Outcome::Throttled { retry_after },
        |retry_after| Outcome::Busy { retry_after },
        |retry_after| Outcome::InProgress { retry_after },
        |retry_after| Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after },
    ];
    for (base_ms, waits) in [(100, SECOND), (3_000, 3 * SECOND)] {
        let backoff = BackoffPolicy { base: Duration::from_millis(base_ms), max: Duration::from_secs(60) };
        let policy = RetryPolicy { backoff, ..policy(day) };
        for outcome in outcomes {
            let wait = |retry_after| match after_outcome(&outcome(retry_after), &history(0, false), &policy, 1.0) {
                Disposition { transition: Transition::Retry { after, .. }, pause, .. } => (after, pause),
                other => panic!("{other:?}"),
            };
            let named = wait(Some(Duration::ZERO));
            assert_eq!(named.0, waits, "{:?}", outcome(None));
            assert_eq!(wait(None).0, backoff.base, "{:?}", outcome(None));
            match named.1 {
                Some(PauseRequest::Quota { wait } | PauseRequest::Lane { wait, .. }) => assert_eq!(wait, waits),
                pause => assert_eq!(pause, None),
            }
        }
    }
}

#[test]
fn payment_in_progress_waits_as_named() {
    let day = Some(Duration::from_secs(86_400));
    let outcome = Outcome::InProgress { retry_after: Some(Duration::from_secs(30)) };
    for policy in [policy(day), with_lookup(day), with_lookup(None)] {
        let got = after_outcome(&outcome, &history(0, false), &policy, 0.0);
        assert!(
            matches!(got.transition, Transition::Retry { after, unknown: true, .. } if after.as_secs() == 30),
            "{got:?}"
        );
        assert_eq!(got.pause, None, "no other payment waits");
    }
}

/// A 429 without a wait doubles the wait with each generation. It holds for the whole quota, so it is exact.
#[test]
fn throttle_backoff_grows_with_each_generation() {
    let wait = |retry_after, generation, fraction| {
        let history = AttemptHistory { throttle_generation: generation, ..history(0, false) };
        let got = after_outcome(&Outcome::Throttled { retry_after }, &history, &policy(None), fraction);
        let Some(PauseRequest::Quota { wait }) = got.pause else { panic!("{got:?}") };
        assert!(matches!(got.transition, Transition::Retry { after, .. } if after == wait), "{got:?}");
        wait
    };
    let BackoffPolicy { base, max } = policy(None).backoff;
    let waits: Vec<Duration> = (1..=3).map(|generation| wait(None, generation, 0.0)).collect();
    assert_eq!(waits, [base, base * 2, base * 4]);
    assert_eq!(wait(None, u32::MAX, 0.3), max);
    assert_eq!(wait(Some(SECOND * 7), 9, 0.3), SECOND * 7, "a wait that is named");
}

/// The wait that the provider names for one object, or one that grows each time though no attempt counts.
#[test]
fn busy_job_uses_retry_after_or_backoff() {
    let day = Some(Duration::from_secs(86_400));
    let wait = |retry_after, requests| {
        let history = AttemptHistory { requests, ..history(0, false) };
        match after_outcome(&Outcome::Busy { retry_after }, &history, &policy(day), 1.0).transition {
            Transition::Retry { after, unknown: false, .. } => after.as_secs(),
            other => panic!("{other:?}"),
        }
    };
    let table = [
        (Some(7), 0, 7),
        (Some(7), 5, 7),
        (Some(40 * 60), 0, HONOURED_WAIT_MAX.as_secs()),
        (Some(0), 0, 1),
        (None, 0, 1),
        (None, 3, 8),
        (None, 30, 60),
    ];
    for (named_s, requests, after_s) in table {
        assert_eq!(wait(named_s.map(Duration::from_secs), requests), after_s, "{named_s:?} after {requests}");
    }
}

/// A refused account is never charged: a job is declined, or its unknown outcome asked for.
#[test]
fn refused_account_is_declined_or_looked_up() {
    let day = Some(Duration::from_secs(86_400));
    let refused = Some(SendObstacle::AccountRefused);
    let old = AttemptHistory { age: Duration::from_secs(7_200), ..history(2, false) };
    for history in [history(0, false), history(3, false), old] {
        let next = before_request(&history, &policy(day), refused);
        let PreSend::Transition(Transition::Finalize { state, reason, .. }) = next else { panic!("{next:?}") };
        assert_eq!((state, reason.as_str()), (FinalState::Declined, "account_refused"));
    }
    let granted = AttemptHistory { resend: Resend::Granted, ..history(1, true) };
    for history in [history(1, true), granted] {
        assert_eq!(before_request(&history, &with_lookup(day), refused), PreSend::LookUp, "{history:?}");
        let next = before_request(&history, &policy(day), refused);
        let PreSend::Transition(Transition::Finalize { state, reason, .. }) = next else { panic!("{next:?}") };
        assert_eq!((state, reason.contains("a rule refuses its account")), (FinalState::Review, true), "{reason}");
    }
    let lost = AttemptHistory { lost_holders: LOST_HOLDERS_MAX, ..history(1, false) };
    let PreSend::Transition(next) = before_request(&lost, &policy(day), refused) else { panic!() };
    assert_eq!(next.final_state(), Some(FinalState::Review));
    assert_eq!(
        SendObstacle::of(true, true, Some(UnsupportedSum::Currency)),
        refused,
        "it is declined, though it has expired"
    );
}

/// Even if it may be sent: one more claim may crash the next worker.
#[test]
fn job_that_kills_workers_goes_to_review() {
    for unknown in [false, true] {
        for (lost_holders, review) in [(LOST_HOLDERS_MAX - 1, false), (LOST_HOLDERS_MAX, true), (u32::MAX, true)] {
            let history = AttemptHistory { lost_holders, ..history(1, unknown) };
            let step = before_request(
                &history,
                &with_lookup(Some(Duration::from_secs(100))),
                review.then_some(SendObstacle::Expired),
            );
            match step {
                PreSend::Transition(next) => assert_eq!((next.final_state(), review), (Some(FinalState::Review), true)),
                other => assert_eq!((other, review), (PreSend::Charge, false)),
            }
        }
    }
}
