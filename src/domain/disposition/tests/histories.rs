//! Random histories: a provider with random responses, the ledger's records of them, and the two rules that hold in every
//! row of both tables.

use proptest::prelude::*;

use super::super::lookup::after_lookup;
use super::*;
use crate::domain::outcome::{LookupResult, PartialCharge};

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
        1 => Just(Outcome::PartlyAccepted(PartialCharge { reference: None, amount: 1 })),
        1 => Just(Outcome::Differs { reason: String::new(), reference: None }),
        4 => wait().prop_map(|retry_after| Outcome::Throttled { retry_after }),
        4 => wait().prop_map(|retry_after| Outcome::Busy { retry_after }),
        4 => Just(Outcome::Misconfigured { status: 401 }),
        4 => Just(Outcome::InProgress { retry_after: None }),
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
        1 => Just(LookupResult::PartlyAccepted(PartialCharge { reference: None, amount: 1 })),
        6 => Just(LookupResult::InProgress { retry_after: None }),
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
            let next = match before_request(&job, &policy, SendObstacle::of(refused, expired, None)) {
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
                Transition::SucceedInPart(_) => {
                    end = Some(FinalState::Succeeded);
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
