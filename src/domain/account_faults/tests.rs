//! Tests of whose trouble a refusal is: of an account, a payment or the lane, and when it ends.

use proptest::prelude::*;

use super::*;

const LANE: Option<FaultScope> = Some(FaultScope::Lane);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn account_until(until_s: u64) -> Option<FaultScope> {
    Some(FaultScope::Account { until: seconds(until_s) })
}

/// Requests that take no time: each begins and is answered in its second.
fn judge(faults: &mut AccountFaults, account: &str, sign: SetupSign, now_s: u64) -> Option<FaultScope> {
    record(faults, Some(account), sign, [seconds(now_s); 2])
}

fn record(
    faults: &mut AccountFaults,
    account: Option<&str>,
    sign: SetupSign,
    [began, now]: [Duration; 2],
) -> Option<FaultScope> {
    faults.record(Requester { account, job: &job("any") }, sign, began, now)
}

fn yields(faults: &AccountFaults, account: Option<&str>, id: &str, now: Duration) -> Option<Duration> {
    faults.yields_until(Requester { account, job: &job(id) }, now)
}

fn job(id: &str) -> JobId {
    JobId::new(id).unwrap()
}

/// The same of a payment without an account.
fn judge_payment(faults: &mut AccountFaults, id: &str, sign: SetupSign, now_s: u64) -> Option<FaultScope> {
    faults.record(Requester { account: None, job: &job(id) }, sign, seconds(now_s), seconds(now_s))
}

#[test]
fn one_refused_account_pauses_alone_and_for_longer() {
    let mut faults = AccountFaults::default();
    let mut now_s = 100;
    for pause_s in [30, 60, 120, 240, 480, 900, 900] {
        let verdict = judge(&mut faults, "mallory", SetupSign::Misconfigured, now_s);
        assert_eq!(verdict, account_until(now_s + pause_s));
        assert_eq!(
            faults.pause_of("mallory", seconds(now_s + pause_s - 1)),
            Some((seconds(now_s + pause_s), SetupSign::Misconfigured))
        );
        assert_eq!(faults.pause_of("mallory", seconds(now_s + pause_s)), None);
        assert_eq!(faults.pause_of("other", seconds(now_s)), None);
        judge(&mut faults, "other", SetupSign::Passed, now_s + 1);
        now_s += pause_s;
    }
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Passed, now_s), None);
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Misconfigured, now_s), account_until(now_s + 30));
}

#[test]
fn requests_under_way_are_one_refusal() {
    let mut faults = AccountFaults::default();
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Misconfigured, 10), account_until(40));
    for answered_s in 11..20 {
        let late = record(&mut faults, Some("mallory"), SetupSign::Misconfigured, [seconds(9), seconds(answered_s)]);
        assert_eq!(late, account_until(40));
    }
    // Recorded before the pause, for a start soon after it. No request of another account has passed.
    let soon = seconds(10) + Duration::from_millis(250);
    assert_eq!(record(&mut faults, Some("mallory"), SetupSign::Misconfigured, [soon, seconds(11)]), account_until(40));
    let rejected = [(); 10].map(|()| record(&mut faults, Some("mallory"), SetupSign::Rejected, [soon, seconds(11)]));
    assert_eq!(rejected, [None; 10]);
}

#[test]
fn unconfirmed_refusal_is_no_pass() {
    let sign = |refusal| SetupSign::from_outcome(&Outcome::Unconfirmed { refusal, status: 0 });
    assert_eq!(sign(Refusal::Misconfigured { status: 403 }), Some(SetupSign::Misconfigured));
    assert_eq!(sign(Refusal::Throttled { retry_after: None }), None);
    assert_eq!(sign(Refusal::Busy { retry_after: None }), None);
}

#[test]
fn refused_accounts_without_a_pass_pause_the_lane() {
    let mut faults = AccountFaults::default();
    for (nth, account) in ["a", "b", "c", "d"].into_iter().enumerate() {
        let now_s = 10 + nth as u64;
        assert_eq!(judge(&mut faults, account, SetupSign::Misconfigured, now_s), account_until(now_s + 30));
    }
    assert_eq!(judge(&mut faults, "e", SetupSign::Misconfigured, 20), LANE);
    // Until a request passes, each further refusal is the lane's.
    assert_eq!(judge(&mut faults, "f", SetupSign::Misconfigured, 60), LANE);
    judge(&mut faults, "f", SetupSign::Passed, 100);
    assert_eq!(judge(&mut faults, "g", SetupSign::Misconfigured, 101), account_until(131));
}

#[test]
fn account_refused_again_without_a_pass_pauses_the_lane() {
    let mut faults = AccountFaults::default();
    assert_eq!(judge(&mut faults, "only", SetupSign::Misconfigured, 10), account_until(40));
    assert_eq!(judge(&mut faults, "only", SetupSign::Misconfigured, 40), LANE);
    // An answer to a request from before the refusal says nothing about the set-up since.
    let mut faults = AccountFaults::default();
    judge(&mut faults, "mallory", SetupSign::Misconfigured, 10);
    record(&mut faults, Some("other"), SetupSign::Passed, [seconds(9), seconds(12)]);
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Misconfigured, 40), LANE);
}

const PAYMENT: Option<FaultScope> = Some(FaultScope::Payment);

#[test]
fn payment_without_account_is_refused_alone() {
    let mut faults = AccountFaults::default();
    // Others pass in between, so it may be refused as often as it is sent.
    for now_s in [10, 50, 120, 250] {
        assert_eq!(judge_payment(&mut faults, "bad", SetupSign::Misconfigured, now_s), PAYMENT);
        assert_eq!(yields(&faults, None, "bad", seconds(now_s)), None);
        judge_payment(&mut faults, "good", SetupSign::Passed, now_s + 1);
    }
    assert_eq!(judge_payment(&mut faults, "bad", SetupSign::Misconfigured, 500), PAYMENT);
    // Nothing has passed since.
    assert_eq!(judge_payment(&mut faults, "bad", SetupSign::Misconfigured, 600), LANE);
    let rejected = [(); 5].map(|()| judge_payment(&mut faults, "bad", SetupSign::Rejected, 601));
    assert_eq!(rejected, [None, None, None, None, LANE]);
}

/// After the lane's pause another payment is its test. If there is none, the refused ones are.
#[test]
fn refused_payments_leave_the_test_of_the_lane_to_others() {
    let mut faults = AccountFaults::default();
    let verdicts = ["a", "b", "c", "d", "e"].map(|id| judge_payment(&mut faults, id, SetupSign::Misconfigured, 10));
    assert_eq!(verdicts, [PAYMENT, PAYMENT, PAYMENT, PAYMENT, LANE]);
    let end = seconds(10) + MISCONFIGURED_PAUSE + REFUSED_YIELD;
    assert_eq!(yields(&faults, None, "a", end.saturating_sub(seconds(1))), Some(end));
    assert_eq!([yields(&faults, None, "a", end), yields(&faults, None, "f", seconds(41))], [None, None]);
    judge_payment(&mut faults, "f", SetupSign::Passed, 41);
    assert_eq!(yields(&faults, None, "a", seconds(42)), None);
    // And after an account's pause, another payment of it.
    let mut faults = AccountFaults::default();
    let shop = Requester { account: Some("shop"), job: &job("bad") };
    faults.record(shop, SetupSign::Misconfigured, seconds(10), seconds(10));
    assert_eq!(yields(&faults, Some("shop"), "bad", seconds(41)), Some(seconds(40) + REFUSED_YIELD));
    assert_eq!(yields(&faults, Some("shop"), "other", seconds(41)), None);
    assert_eq!(yields(&faults, Some("shop"), "bad", seconds(40) + REFUSED_YIELD), None);
}

#[test]
fn rejected_payments_of_one_account_pause_it() {
    let mut faults = AccountFaults::default();
    let reject = |faults: &mut AccountFaults, now_s| judge(faults, "mallory", SetupSign::Rejected, now_s);
    assert_eq!(
        [10, 11, 12, 13, 14].map(|now_s| reject(&mut faults, now_s)),
        [None, None, None, None, account_until(44)]
    );
    judge(&mut faults, "other", SetupSign::Passed, 15);
    assert_eq!(
        [50, 51, 52, 53, 54].map(|now_s| reject(&mut faults, now_s)),
        [None, None, None, None, account_until(114)]
    );
    // One payment that passes ends the row.
    judge(&mut faults, "mallory", SetupSign::Passed, 120);
    assert_eq!([121, 122, 123, 124].map(|now_s| reject(&mut faults, now_s)), [None; 4]);
}

#[test]
fn one_request_at_a_time_tests_an_account_after_its_pause() {
    let [first, second] = ["first", "second"].map(|id| JobId::new(id).unwrap());
    let test_ends = |now_s| Some((seconds(now_s) + TEST_MAX, SetupSign::Misconfigured));
    let mut faults = AccountFaults::default();
    assert_eq!(faults.admit("mallory", &first, seconds(9)), None);
    judge(&mut faults, "mallory", SetupSign::Misconfigured, 10);
    assert_eq!(faults.admit("mallory", &first, seconds(39)), Some((seconds(40), SetupSign::Misconfigured)));
    // The first job after the pause is the test, also when it asks again; the others wait for its response.
    assert_eq!(faults.admit("mallory", &first, seconds(40)), None);
    assert_eq!(faults.admit("mallory", &second, seconds(40)), test_ends(40));
    assert_eq!(faults.pause_of("mallory", seconds(41)), test_ends(40));
    assert_eq!(faults.admit("mallory", &first, seconds(41)), None);
    // No response: another one is sent, and the first one waits.
    assert_eq!(faults.admit("mallory", &second, seconds(42)), None);
    assert_eq!(faults.admit("mallory", &first, seconds(42)), test_ends(42));
    // It passes, so all are sent.
    judge(&mut faults, "mallory", SetupSign::Passed, 43);
    assert_eq!([&first, &second].map(|job| faults.admit("mallory", job, seconds(43))), [None, None]);
}

/// Nothing passed since the pause, so it is the lane's trouble. The lane's pause replaces the test.
#[test]
fn refused_test_ends() {
    let jobs = ["first", "second"].map(|id| JobId::new(id).unwrap());
    let mut faults = AccountFaults::default();
    judge(&mut faults, "mallory", SetupSign::Misconfigured, 10);
    assert_eq!(faults.admit("mallory", &jobs[0], seconds(40)), None);
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Misconfigured, 40), LANE);
    assert_eq!(faults.pause_of("mallory", seconds(40)), None);
    assert_eq!(faults.admit("mallory", &jobs[1], seconds(40)), None);
}

#[test]
fn rejected_test_is_followed_by_the_next_one() {
    let jobs: Vec<JobId> = (0..6).map(|id| JobId::new(id.to_string()).unwrap()).collect();
    let mut faults = AccountFaults::default();
    for now_s in 10..15 {
        judge(&mut faults, "mallory", SetupSign::Rejected, now_s);
    }
    for (now_s, pair) in (44..48).zip(jobs.windows(2)) {
        assert_eq!(faults.admit("mallory", &pair[0], seconds(now_s)), None);
        assert!(faults.admit("mallory", &pair[1], seconds(now_s)).is_some());
        assert_eq!(judge(&mut faults, "mallory", SetupSign::Rejected, now_s), None);
    }
    assert_eq!(faults.admit("mallory", &jobs[4], seconds(48)), None);
    // Another account's payment passed meanwhile, so it is the account's trouble.
    judge(&mut faults, "other", SetupSign::Passed, 48);
    assert_eq!(judge(&mut faults, "mallory", SetupSign::Rejected, 48), account_until(108));
    assert_eq!(faults.admit("mallory", &jobs[5], seconds(107)), Some((seconds(108), SetupSign::Rejected)));
}

#[test]
fn rejected_payments_of_several_accounts_pause_the_lane() {
    let mut faults = AccountFaults::default();
    let verdicts = ["a", "b", "c", "d", "e"].map(|account| judge(&mut faults, account, SetupSign::Rejected, 10));
    assert_eq!(verdicts, [None, None, None, None, LANE]);
}

proptest! {
    /// While another account's requests pass between, one account in trouble never pauses the lane; and its pause never
    /// ends earlier than it was announced.
    #[test]
    fn lane_goes_on_while_others_pass(signs in prop::collection::vec(prop::bool::ANY, 1..200)) {
        let mut faults = AccountFaults::default();
        let mut announced = Duration::ZERO;
        for (nth, is_rejected) in signs.into_iter().enumerate() {
            let now_s = 2 * nth as u64 + 1;
            let sign = if is_rejected { SetupSign::Rejected } else { SetupSign::Misconfigured };
            match judge(&mut faults, "mallory", sign, now_s) {
                Some(scope @ (FaultScope::Lane | FaultScope::Payment)) => prop_assert!(false, "{scope:?} at {now_s}"),
                Some(FaultScope::Account { until }) => announced = announced.max(until),
                None => {}
            }
            prop_assert!(faults.pause_of("mallory", seconds(now_s)).is_none_or(|(until, _)| until == announced));
            judge(&mut faults, "other", SetupSign::Passed, now_s + 1);
        }
    }

    /// While others pass between, payments without an account that are refused never pause the lane, however many.
    #[test]
    fn lane_goes_on_while_some_payments_are_refused(refused in prop::collection::vec(0_u8..4, 1..200)) {
        let mut faults = AccountFaults::default();
        for (now_s, id) in (1_u64..).step_by(2).zip(refused) {
            let verdict = judge_payment(&mut faults, &id.to_string(), SetupSign::Misconfigured, now_s);
            prop_assert_eq!(verdict, PAYMENT);
            judge_payment(&mut faults, "good", SetupSign::Passed, now_s + 1);
        }
    }

    /// A wrong key refuses every payment: the lane pauses soon, whether they have accounts or none.
    #[test]
    fn wrong_key_pauses_a_lane_without_accounts(ids in prop::collection::vec(0_u8..50, 40)) {
        let mut faults = AccountFaults::default();
        let judge = |(nth, id): (u64, &u8)| {
            judge_payment(&mut faults, &id.to_string(), SetupSign::Misconfigured, nth * 1_000)
        };
        let verdicts: Vec<_> = (1_u64..).zip(&ids).map(judge).collect();
        let first = verdicts.iter().position(|verdict| *verdict == LANE);
        prop_assert!(first.is_some_and(|first| first < REFUSED_ACCOUNTS_MAX), "{verdicts:?}");
        prop_assert!(verdicts[first.unwrap_or_default()..].iter().all(|verdict| *verdict == LANE));
    }

    /// Without a request that passes, a lane pauses after a bounded number of refusals, whatever their accounts.
    #[test]
    fn wrong_set_up_of_a_lane_is_found(accounts in prop::collection::vec(0_u8..50, 40)) {
        let mut faults = AccountFaults::default();
        let verdicts: Vec<_> = accounts
            .iter()
            .zip(1_u64..)
            .map(|(account, nth)| judge(&mut faults, &account.to_string(), SetupSign::Misconfigured, nth * 1_000))
            .collect();
        let first = verdicts.iter().position(|verdict| *verdict == LANE);
        prop_assert!(first.is_some_and(|first| first < REFUSED_ACCOUNTS_MAX), "{verdicts:?}");
        prop_assert!(verdicts[first.unwrap_or_default()..].iter().all(|verdict| *verdict == LANE));
    }
}
