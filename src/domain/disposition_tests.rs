//! Tests of the decision tables, row by row, and of the two rules that hold in every row on random histories.

use super::super::outcome::Refusal;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn policy(retention: Option<Duration>) -> RetryPolicy {
    RetryPolicy {
        max_attempts: 3,
        max_age: Duration::from_secs(3_600),
        backoff: BackoffPolicy { base: SECOND, max: Duration::from_secs(60) },
        idempotency_retention: retention,
        lookup: None,
    }
}

/// The same policy with a look-up.
pub(super) fn with_lookup(retention: Option<Duration>) -> RetryPolicy {
    let lookup = LookupPolicy { give_up_after: Duration::from_secs(600), resend_if_not_found: false };
    RetryPolicy { lookup: Some(lookup), ..policy(retention) }
}

pub(super) fn history(attempts: u32, unknown: bool) -> AttemptHistory {
    AttemptHistory {
        attempts,
        requests: attempts,
        lookups: 0,
        resend: Resend::Never,
        unknown,
        age: SECOND,
        first_sent_age: unknown.then_some(SECOND),
        unknown_age: unknown.then_some(SECOND),
        throttle_generation: 1,
        lost_holders: 0,
        probe: false,
    }
}

pub(super) fn final_state(next: &Transition) -> Option<FinalState> {
    match next {
        Transition::Finalize { state, .. } => Some(*state),
        Transition::Retry { .. } => None,
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
        (&Outcome::InProgress, day, 0, true, None, true, false),
        (&Outcome::InProgress, day, 2, true, Some(FinalState::Review), true, false),
    ];
    for (outcome, retention, attempts, unknown, state, counts, pauses) in table {
        let got = after_outcome(outcome, &history(attempts, unknown), &policy(retention), 0.5);
        assert_eq!(final_state(&got.transition), state, "{outcome:?} after {attempts}");
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
                    assert!(!matches!(final_state(&next), Some(FinalState::Dead | FinalState::Expired)), "{next:?}");
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
        assert_eq!((final_state(&got.transition), got.counts_attempt), (None, false), "{outcome:?}");
    }
    let got =
        after_outcome(&Outcome::InProgress, &AttemptHistory { probe: true, ..history(0, true) }, &policy(day), 0.5);
    assert!(got.counts_attempt, "that is an answer");
    let probe = AttemptHistory { probe: true, ..history(0, false) };
    let got = after_outcome(&unknown, &probe, &policy(None), 0.5);
    assert_eq!(final_state(&got.transition), Some(FinalState::Review), "a resend may charge twice");
    let got = after_outcome(&unknown, &probe, &with_lookup(None), 0.5);
    assert_eq!((final_state(&got.transition), got.counts_attempt), (None, false), "unless there is a look-up");
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
                PreSend::Transition(next) => final_state(&next).map_or("again", FinalState::name),
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
    assert!(matches!(step, PreSend::Transition(next) if final_state(&next).is_some()));
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
        (&Outcome::InProgress, day, history(2, true), SECOND),
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
        assert_eq!(final_state(&without.transition), Some(FinalState::Review), "{outcome:?}");
    }
    // There is no look-up for a request that was certainly never sent.
    let dead = after_outcome(&not_sent, &history(2, false), &with_lookup(day), 1.0);
    assert_eq!(final_state(&dead.transition), Some(FinalState::Dead));
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

#[test]
fn zero_retry_after_of_outcome_is_ignored() {
    let day = Some(Duration::from_secs(86_400));
    let get = |outcome: &Outcome| after_outcome(outcome, &history(0, false), &policy(day), 1.0);
    let pairs = [
        |retry_after| Outcome::Throttled { retry_after },
        |retry_after| Outcome::Busy { retry_after },
        |retry_after| Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after },
    ];
    for outcome in pairs {
        assert_eq!(get(&outcome(Some(Duration::ZERO))), get(&outcome(None)), "{:?}", outcome(None));
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

/// A provider with random responses, and the ledger's records of them.
mod histories {
    use proptest::prelude::*;

    use super::super::lookup::after_lookup;
    use super::*;
    use crate::domain::lookup::LookupResult;

    fn outcome() -> impl Strategy<Value = Outcome> {
        let wait = || prop_oneof![Just(None), (0..2_000_u64).prop_map(|s| Some(Duration::from_secs(s)))];
        let cause = prop_oneof![
            Just(UnknownCause::Timeout),
            Just(UnknownCause::ServerError(500)),
            Just(UnknownCause::UnreadableResponse(200)),
            Just(UnknownCause::WorkerLost),
        ];
        prop_oneof![
            1 => Just(Outcome::Accepted { reference: None }),
            1 => Just(Outcome::Declined { reason: String::new() }),
            1 => Just(Outcome::Rejected { reason: String::new() }),
            4 => wait().prop_map(|retry_after| Outcome::Throttled { retry_after }),
            4 => wait().prop_map(|retry_after| Outcome::Busy { retry_after }),
            4 => Just(Outcome::Misconfigured { status: 401 }),
            4 => Just(Outcome::InProgress),
            8 => (cause, wait()).prop_map(|(cause, retry_after)| Outcome::Unknown { cause, retry_after }),
            4 => Just(Outcome::NotSent { cause: String::new() }),
            4 => Just(Outcome::LocalFault(LocalFault::ProcessDescriptors)),
            4 => Just(Outcome::Unconfirmed { refusal: Refusal::Misconfigured { status: 401 }, status: 401 }),
        ]
    }

    fn finding() -> impl Strategy<Value = LookupResult> {
        let wait = || prop_oneof![Just(None), (0..2_000_u64).prop_map(|s| Some(Duration::from_secs(s)))];
        prop_oneof![
            1 => Just(LookupResult::Accepted { reference: None }),
            1 => Just(LookupResult::Declined { reason: String::new() }),
            1 => Just(LookupResult::Differs { reason: String::new() }),
            6 => Just(LookupResult::InProgress),
            8 => Just(LookupResult::NotFound),
            4 => Just(LookupResult::Unclear { reason: String::new() }),
            6 => wait().prop_map(|retry_after| LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after }),
            4 => wait().prop_map(|retry_after| LookupResult::Throttled { retry_after }),
            4 => wait().prop_map(|retry_after| LookupResult::Busy { retry_after }),
            4 => Just(LookupResult::Misconfigured { status: 401 }),
            4 => Just(LookupResult::NotSent { cause: String::new() }),
            4 => Just(LookupResult::LocalFault(LocalFault::ProcessDescriptors)),
        ]
    }

    fn any_policy() -> impl Strategy<Value = RetryPolicy> {
        let retention = prop_oneof![Just(None), (1..100_000_u64).prop_map(|s| Some(Duration::from_secs(s)))];
        let lookup = prop_oneof![
            Just(None),
            (1..10_000_u64, any::<bool>()).prop_map(|(give_up_s, resend_if_not_found)| Some(LookupPolicy {
                give_up_after: Duration::from_secs(give_up_s),
                resend_if_not_found,
            })),
        ];
        (retention, lookup, 1..6_u32, 1..20_000_u64).prop_map(|(retention, lookup, max_attempts, max_age_s)| {
            let max_age = Duration::from_secs(max_age_s);
            RetryPolicy { max_attempts, max_age, lookup, ..policy(retention) }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_history_charges_twice_or_forgets_a_charge(
            policy in any_policy(),
            outcomes in proptest::collection::vec(outcome(), 40),
            findings in proptest::collection::vec(finding(), 400),
            delays_s in proptest::collection::vec(0..500_u64, 440),
            probes in proptest::collection::vec(proptest::bool::weighted(0.2), 440),
            (refused, expired) in any::<(bool, bool)>(),
        ) {
            let (mut outcomes, mut findings) = (outcomes.into_iter(), findings.into_iter());
            let mut job = AttemptHistory { age: Duration::ZERO, ..history(0, false) };
            let mut resends_used = 0;
            let mut end = None;
            // Every wait is followed by a random delay; a job ends within all of them.
            for (delay_s, probe) in delays_s.into_iter().zip(probes) {
                job.probe = probe;
                let next = match before_request(&job, &policy, SendObstacle::of(refused, expired)) {
                    PreSend::Transition(next) => next,
                    PreSend::Charge => {
                        prop_assert!(!refused, "a refused account is charged");
                        if job.unknown {
                            let retention = policy.idempotency_retention;
                            prop_assert!(retention.is_some(), "sent again to a provider that does not deduplicate");
                            let age = job.first_sent_age.unwrap_or_default();
                            prop_assert!(retention.is_some_and(|retention| age < retention / 2), "it may be forgotten");
                        }
                        let Some(outcome) = outcomes.next() else { break };
                        let may_have_charged = outcome.may_have_charged();
                        if may_have_charged {
                            job.first_sent_age.get_or_insert_default();
                        }
                        let after = after_outcome(&outcome, &job, &policy, 0.5);
                        job.requests += 1;
                        job.attempts += u32::from(after.counts_attempt);
                        if may_have_charged {
                            job.unknown = true;
                            job.unknown_age = Some(Duration::ZERO);
                            if job.resend == Resend::Granted {
                                job.resend = Resend::Used;
                                resends_used += 1;
                                prop_assert_eq!(resends_used, 1);
                            }
                        }
                        after.transition
                    }
                    PreSend::LookUp => {
                        prop_assert!(job.unknown && policy.lookup.is_some());
                        let Some(finding) = findings.next() else { break };
                        let after = after_lookup(&finding, &job, &policy, 0.5);
                        job.lookups += 1;
                        if after.grants_resend {
                            prop_assert_eq!((job.resend, finding), (Resend::Never, LookupResult::NotFound));
                            let give_up_after = policy.lookup.map(|lookup| lookup.give_up_after);
                            prop_assert!(job.unknown_age >= give_up_after, "it may still appear");
                            job.resend = Resend::Granted;
                        }
                        after.transition
                    }
                };
                match next {
                    Transition::Finalize { state, .. } => {
                        let forgotten = job.unknown && matches!(state, FinalState::Dead | FinalState::Expired);
                        prop_assert!(!forgotten, "{:?} after an unknown outcome", state);
                        end = Some(state);
                        break;
                    }
                    Transition::Retry { after, unknown, .. } => {
                        prop_assert!(unknown || !job.unknown, "an unknown outcome was forgotten");
                        let passed = after + Duration::from_secs(delay_s);
                        job.age += passed;
                        job.first_sent_age = job.first_sent_age.map(|age| age + passed);
                        job.unknown_age = job.unknown_age.map(|age| age + passed);
                    }
                }
            }
            prop_assert!(end.is_some() || outcomes.next().is_none(), "the job never ends: {:?}", job);
        }
    }
}
