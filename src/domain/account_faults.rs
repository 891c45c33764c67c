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
            Outcome::Accepted { .. } | Outcome::Declined { .. } | Outcome::Busy { .. } | Outcome::InProgress => {
                Some(Self::Passed)
            }
            // Most likely it answers this request. If not, an account waits in vain, and the lane goes on.
            Outcome::Misconfigured { .. } | Outcome::Unconfirmed { refusal: Refusal::Misconfigured { .. }, .. } => {
                Some(Self::Misconfigured)
            }
            Outcome::Rejected { .. } => Some(Self::Rejected),
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
#[path = "account_faults_tests.rs"]
mod tests;
