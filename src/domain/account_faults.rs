//! Whose trouble it is when a provider refuses requests: that of one account, or that of the whole lane.
//!
//! A wrong credential of one merchant, or a merchant's unusable payments, must not stop the payments of the others. A
//! lane whose own set-up is wrong must stop, and it shows by other accounts being refused, too. So a refusal is judged by
//! account first: the account pauses. The lane pauses if several accounts are refused and none passes, or if one is
//! refused again and none has passed since. After its pause an account sends one request at a time, as a test, until one
//! passes.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::job::JobId;
use super::outcome::{Outcome, Refusal};

/// Accounts that are refused, without a request that passes in between, until it is the lane's trouble.
pub const REFUSED_ACCOUNTS_MAX: usize = 5;
/// Consecutive rejected payments that pause an account, or those of so many accounts a lane: so many mean a wrong
/// set-up, not wrong payments.
pub const CONSECUTIVE_REJECTIONS_MAX: u32 = 5;
/// First pause of an account. It doubles with each further refusal.
pub const ACCOUNT_PAUSE: Duration = Duration::from_secs(30);
const ACCOUNT_PAUSE_MAX: Duration = Duration::from_secs(15 * 60);
/// Time for which requests of an account still begin after its pause: they were recorded before it, and permits are
/// granted ahead of their start.
pub const UNDER_WAY: Duration = Duration::from_millis(500);
/// Time for which the other requests of an account wait for the response to its test. After it another one is sent.
pub const TEST_MAX: Duration = Duration::from_secs(2);
/// Most accounts in trouble that are remembered.
const ACCOUNTS_MAX: usize = 10_000;

/// What a response says about the set-up of its account and lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupSign {
    /// The provider accepted the request as such.
    Passed,
    /// It refused address, method or credential.
    Misconfigured,
    /// It rejected the payment as invalid.
    Rejected,
}

impl SetupSign {
    /// `None`: the outcome says nothing about the set-up.
    pub fn from_outcome(outcome: &Outcome) -> Option<Self> {
        match outcome {
            Outcome::Accepted { .. }
            | Outcome::PartlyAccepted(_)
            | Outcome::Declined { .. }
            | Outcome::Busy { .. }
            | Outcome::InProgress { .. } => Some(Self::Passed),
            // Most likely it answers this request. If not, an account waits in vain, and the lane goes on.
            Outcome::Misconfigured { .. } | Outcome::Unconfirmed { refusal: Refusal::Misconfigured { .. }, .. } => {
                Some(Self::Misconfigured)
            }
            // Several sums in a row that differ are a fault of the row: each of them charges a wrong one.
            Outcome::Rejected { .. } | Outcome::Differs { .. } => Some(Self::Rejected),
            // A provider may throttle before it looks at the credential.
            Outcome::Throttled { .. }
            | Outcome::NotSent { .. }
            | Outcome::LocalFault(_)
            | Outcome::Unknown { .. }
            | Outcome::Unconfirmed { .. } => None,
        }
    }
}

/// Whose trouble a refusal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultScope {
    /// The account's: its jobs wait until then. Instants are durations since any one origin.
    Account {
        until: Duration,
    },
    Lane,
}

/// The accounts of one lane that are in trouble. Jobs without an account are the lane's.
#[derive(Debug, Default)]
pub struct AccountFaults {
    accounts: HashMap<String, AccountFault>,
    /// Accounts that were refused since a request last passed.
    refused: BTreeSet<String>,
    /// When the first of them was.
    refused_since: Duration,
    /// Rejected payments in a row, of each account one.
    rejections: u32,
    rejected: BTreeSet<String>,
    /// The lane was paused, and no request has passed since.
    is_lane_refused: bool,
}

#[derive(Clone, Debug)]
struct AccountFault {
    sign: SetupSign,
    /// Pauses in a row.
    pauses: u32,
    paused_at: Duration,
    until: Duration,
    /// Rejected payments in a row since then.
    rejections: u32,
    /// The request that was sent last as a test, since the pause has ended.
    test: Option<AccountTest>,
}

#[derive(Clone, Debug)]
struct AccountTest {
    job: JobId,
    until: Duration,
}

impl AccountFault {
    /// Whether a request that began then was under way when the account was paused.
    fn was_under_way(&self, began: Duration) -> bool {
        self.pauses > 0 && began < self.paused_at + UNDER_WAY
    }
}

impl AccountFaults {
    /// Records a response to a request that began then. Returns whose trouble it is, if it pauses any.
    pub fn record(
        &mut self,
        account: Option<&str>,
        sign: SetupSign,
        began: Duration,
        now: Duration,
    ) -> Option<FaultScope> {
        match sign {
            SetupSign::Passed => {
                self.record_passed(account, began);
                None
            }
            SetupSign::Misconfigured => {
                let Some(account) = account else { return Some(self.refuse_lane()) };
                Some(self.refuse(account, sign, began, now))
            }
            SetupSign::Rejected => self.record_rejected(account, began, now),
        }
    }

    /// Until when the account's jobs wait, for its pause or its test, and for which sign.
    pub fn pause_of(&self, account: &str, now: Duration) -> Option<(Duration, SetupSign)> {
        let fault = self.accounts.get(account).filter(|fault| fault.pauses > 0)?;
        let until = fault.test.as_ref().map_or(fault.until, |test| test.until);
        (until > now).then_some((until, fault.sign))
    }

    /// Admits a request of the account, or returns as [`Self::pause_of`]. The first one after a pause is its test.
    pub fn admit(&mut self, account: &str, job: &JobId, now: Duration) -> Option<(Duration, SetupSign)> {
        let pause = self.pause_of(account, now);
        let fault = self.accounts.get_mut(account).filter(|fault| fault.pauses > 0)?;
        if fault.test.as_ref().is_some_and(|test| test.job == *job) {
            return None;
        }
        if pause.is_none() {
            fault.test = Some(AccountTest { job: job.clone(), until: now + TEST_MAX });
        }
        pause
    }

    fn record_passed(&mut self, account: Option<&str>, began: Duration) {
        self.rejections = 0;
        self.rejected.clear();
        // A request that was under way when the first was refused says nothing about the set-up since.
        if began >= self.refused_since {
            self.refused.clear();
            self.is_lane_refused = false;
        }
        if let Some(account) = account
            && self.accounts.get(account).is_some_and(|fault| began >= fault.paused_at)
        {
            self.accounts.remove(account);
        }
    }

    fn record_rejected(&mut self, account: Option<&str>, began: Duration, now: Duration) -> Option<FaultScope> {
        let is_further = account.is_none_or(|account| self.rejected.insert(account.to_owned()));
        self.rejections += u32::from(is_further);
        if self.rejections >= CONSECUTIVE_REJECTIONS_MAX {
            return Some(self.refuse_lane());
        }
        let account = account?;
        let fault = self.fault_of(account, SetupSign::Rejected)?;
        if fault.was_under_way(began) {
            return None;
        }
        fault.test = None;
        fault.rejections += 1;
        if fault.rejections < CONSECUTIVE_REJECTIONS_MAX {
            return None;
        }
        fault.rejections = 0;
        Some(self.refuse(account, SetupSign::Rejected, began, now))
    }

    fn refuse(&mut self, account: &str, sign: SetupSign, began: Duration, now: Duration) -> FaultScope {
        if let Some(fault) = self.accounts.get(account)
            && fault.was_under_way(began)
        {
            return FaultScope::Account { until: fault.until };
        }
        if let Some(fault) = self.accounts.get_mut(account) {
            fault.test = None;
        }
        if self.refused.is_empty() {
            self.refused_since = began;
        }
        let is_further = self.refused.insert(account.to_owned());
        if self.is_lane_refused || !is_further || self.refused.len() >= REFUSED_ACCOUNTS_MAX {
            return self.refuse_lane();
        }
        // Too many accounts are in trouble to pause another one alone.
        let Some(fault) = self.fault_of(account, sign) else { return self.refuse_lane() };
        let pause = ACCOUNT_PAUSE.saturating_mul(1 << fault.pauses.min(16)).min(ACCOUNT_PAUSE_MAX);
        let (pauses, until) = (fault.pauses + 1, now + pause);
        *fault = AccountFault { sign, pauses, paused_at: now, until, rejections: 0, test: None };
        FaultScope::Account { until: now + pause }
    }

    fn refuse_lane(&mut self) -> FaultScope {
        self.is_lane_refused = true;
        self.refused.clear();
        self.rejected.clear();
        self.rejections = 0;
        FaultScope::Lane
    }

    /// The account's fault, and a new one if it has none. `None`: too many accounts are in trouble to remember another.
    fn fault_of(&mut self, account: &str, sign: SetupSign) -> Option<&mut AccountFault> {
        if self.accounts.len() >= ACCOUNTS_MAX && !self.accounts.contains_key(account) {
            return None;
        }
        let (paused_at, until) = (Duration::ZERO, Duration::ZERO);
        let new = AccountFault { sign, pauses: 0, paused_at, until, rejections: 0, test: None };
        Some(self.accounts.entry(account.to_owned()).or_insert(new))
    }
}

#[cfg(test)]
mod tests {
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
        faults.record(Some(account), sign, seconds(now_s), seconds(now_s))
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
            let late = faults.record(Some("mallory"), SetupSign::Misconfigured, seconds(9), seconds(answered_s));
            assert_eq!(late, account_until(40));
        }
        // Recorded before the pause, for a start soon after it. No request of another account has passed.
        let soon = seconds(10) + Duration::from_millis(250);
        assert_eq!(faults.record(Some("mallory"), SetupSign::Misconfigured, soon, seconds(11)), account_until(40));
        let rejected = [(); 10].map(|()| faults.record(Some("mallory"), SetupSign::Rejected, soon, seconds(11)));
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
        faults.record(Some("other"), SetupSign::Passed, seconds(9), seconds(12));
        assert_eq!(judge(&mut faults, "mallory", SetupSign::Misconfigured, 40), LANE);
    }

    #[test]
    fn jobs_without_account_are_the_lanes() {
        let mut faults = AccountFaults::default();
        assert_eq!(faults.record(None, SetupSign::Misconfigured, seconds(1), seconds(1)), LANE);
        let rejected = [(); 5].map(|()| faults.record(None, SetupSign::Rejected, seconds(2), seconds(2)));
        assert_eq!(rejected, [None, None, None, None, LANE]);
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
                    Some(FaultScope::Lane) => prop_assert!(false, "the lane pauses at {now_s}"),
                    Some(FaultScope::Account { until }) => announced = announced.max(until),
                    None => {}
                }
                prop_assert!(faults.pause_of("mallory", seconds(now_s)).is_none_or(|(until, _)| until == announced));
                judge(&mut faults, "other", SetupSign::Passed, now_s + 1);
            }
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
}
