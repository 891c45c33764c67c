//! Tests of what keeps a job from being sent, whatever its history: a rule that refuses its account, and lost workers.

use super::tests::{final_state, history, policy, with_lookup};
use super::*;

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
    assert_eq!(final_state(&next), Some(FinalState::Review));
    assert_eq!(SendObstacle::of(true, true), refused, "it is declined, though it has expired");
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
                PreSend::Transition(next) => assert_eq!((final_state(&next), review), (Some(FinalState::Review), true)),
                other => assert_eq!((other, review), (PreSend::Charge, false)),
            }
        }
    }
}
