//! Whose trouble it is when a provider refuses requests: that of one account or payment, or that of the whole lane.
//!
//! A wrong credential of one merchant, or a merchant's unusable payments, must not stop the payments of the others. Nor
//! must one payment without an account, whose address or body the provider does not take. A lane whose own set-up is wrong
//! must stop, and it shows by others being refused, too. So a refusal is judged by account first: the account pauses. A
//! payment without an account waits alone. The lane pauses if several of them are refused and none passes, or if one is
//! refused again and none has passed since. After its pause an account sends one request at a time, as a test, until one
//! passes. After the lane's pause, payments that were not refused before are its test.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::disposition::{MISCONFIGURED_PAUSE, REFUSED_YIELD};
use super::job::JobId;
use super::outcome::{Outcome, Refusal};

/// Accounts, or payments without one, that are refused, without a request that passes in between, until it is the lane's
/// trouble.
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
    /// It refused address, method or credential, or the request cannot be built.
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
            Outcome::LocalFault(fault) if fault.is_of_setup() => Some(Self::Misconfigured),
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
    /// The payment's: it has no account, and waits alone.
    Payment,
    Lane,
}

/// Whose request it was.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    pub account: Option<&'a str>,
    pub job: &'a JobId,
}

/// The accounts of one lane that are in trouble. For refusals, a payment without an account is one of its own.
#[derive(Debug, Default)]
pub struct AccountFaults {
    accounts: HashMap<String, AccountFault>,
    /// Accounts and payments without one that were refused since a request last passed.
    refused: BTreeSet<String>,
    /// Payments that were refused since then.
    refused_jobs: HashSet<JobId>,
    /// When the first of them was.
    refused_since: Duration,
    /// Rejected payments in a row, of each account one.
    rejections: u32,
    rejected: BTreeSet<String>,
    /// The lane was paused, and no request has passed since.
    is_lane_refused: bool,
    /// Until then, payments that were refused leave the test of the lane to others.
    yields_until: Duration,
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
    /// Payments of it that were refused, which leave the test to others.
    refused_jobs: HashSet<JobId>,
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
    pub fn record(&mut self, of: Requester<'_>, sign: SetupSign, began: Duration, now: Duration) -> Option<FaultScope> {
        let account = of.account;
        match sign {
            SetupSign::Passed => {
                self.record_passed(account, began);
                None
            }
            SetupSign::Misconfigured => {
                if self.refused_jobs.len() < ACCOUNTS_MAX {
                    self.refused_jobs.insert(of.job.clone());
                }
                let scope = match account {
                    Some(account) => self.refuse(account, sign, began, now),
                    None => self.refuse_payment(of.job, began, now),
                };
                if let Some(fault) = account.and_then(|account| self.accounts.get_mut(account)) {
                    fault.refused_jobs.insert(of.job.clone());
                }
                Some(scope)
            }
            SetupSign::Rejected => self.record_rejected(account, began, now),
        }
    }

    /// Until when a payment that was refused leaves the test of its account or lane to others; `None`: it may be sent.
    pub fn yields_until(&self, of: Requester<'_>, now: Duration) -> Option<Duration> {
        let of_lane = (self.is_lane_refused && self.refused_jobs.contains(of.job)).then_some(self.yields_until);
        let fault = of.account.and_then(|account| self.accounts.get(account));
        let fault = fault.filter(|fault| fault.refused_jobs.contains(of.job));
        of_lane.max(fault.map(|fault| fault.until + REFUSED_YIELD)).filter(|until| now < *until)
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
            self.refused_jobs.clear();
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
            return Some(self.refuse_lane(now));
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
        if self.is_refusal_of_lane(account, began) {
            return self.refuse_lane(now);
        }
        // Too many accounts are in trouble to pause another one alone.
        let Some(fault) = self.fault_of(account, sign) else { return self.refuse_lane(now) };
        let pause = ACCOUNT_PAUSE.saturating_mul(1 << fault.pauses.min(16)).min(ACCOUNT_PAUSE_MAX);
        let (pauses, until) = (fault.pauses + 1, now + pause);
        let refused_jobs = std::mem::take(&mut fault.refused_jobs);
        *fault = AccountFault { sign, pauses, paused_at: now, until, rejections: 0, test: None, refused_jobs };
        FaultScope::Account { until: now + pause }
    }

    fn refuse_payment(&mut self, job: &JobId, began: Duration, now: Duration) -> FaultScope {
        // No account has a space.
        let is_lanes = self.is_refusal_of_lane(&format!(" {job}"), began);
        if is_lanes { self.refuse_lane(now) } else { FaultScope::Payment }
    }

    /// Counts the refusal of an account or a payment. Returns whether it is the lane's trouble.
    fn is_refusal_of_lane(&mut self, name: &str, began: Duration) -> bool {
        if self.refused.is_empty() {
            self.refused_since = began;
        }
        let is_further = self.refused.insert(name.to_owned());
        self.is_lane_refused || !is_further || self.refused.len() >= REFUSED_ACCOUNTS_MAX
    }

    fn refuse_lane(&mut self, now: Duration) -> FaultScope {
        self.is_lane_refused = true;
        self.yields_until = now + MISCONFIGURED_PAUSE + REFUSED_YIELD;
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
        let (pauses, rejections, refused_jobs) = (0, 0, HashSet::new());
        let new = AccountFault { sign, pauses, paused_at, until, rejections, test: None, refused_jobs };
        Some(self.accounts.entry(account.to_owned()).or_insert(new))
    }
}

#[cfg(test)]
mod tests;
