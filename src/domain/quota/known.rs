//! Which uses a state has not counted: those before it began, before a limit counted accounts or references at all, beyond the
//! window for which idle ones are kept, and those of a row that joined the quota.
//!
//! Refuses to take what was not counted for unused: the ledger is asked, or it is waited for.

use crate::domain::limit::Scope;
use crate::domain::provider::{BOOKING_HORIZON, ProviderName};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::micros_up;

/// Uses that were granted before an instant and not counted; the default: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unknown {
    pub since_us: u64,
    /// When the last of them may begin to count.
    pub until_us: u64,
}

impl Unknown {
    fn later_of(self, other: Self) -> Self {
        Self { since_us: self.since_us.max(other.since_us), until_us: self.until_us.max(other.until_us) }
    }

    fn later_by(self, us: u64) -> Self {
        Self { since_us: self.since_us + us, until_us: self.until_us + us }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The longest window of all limits.
    longest_us: u64,
    /// Subjects without a tally have no uses that windows up to so long still count.
    within_us: u64,
    /// For longer ones.
    longer: Unknown,
    /// `None`: no limit counts them.
    accounts: Option<Unknown>,
    references: Option<Unknown>,
    send_budget_us: u64,
    /// Until then a permit may begin that was granted under a longer send budget.
    hands_until_us: u64,
    members: Vec<ProviderName>,
    /// Of the rows that joined last.
    joined: Unknown,
}

impl Known {
    /// Of a state that begins: nothing.
    pub fn born(spec: &QuotaSpec, now_us: u64) -> Self {
        let lost = Unknown { since_us: now_us, until_us: now_us + spec.lag_us() };
        Self {
            longest_us: spec.longest_us(),
            within_us: spec.longest_us(),
            longer: Unknown::default(),
            accounts: spec.counts(Scope::Account).then_some(lost),
            references: spec.counts(Scope::Reference).then_some(lost),
            send_budget_us: micros_up(spec.send_budget),
            hands_until_us: 0,
            members: spec.members.clone(),
            joined: Unknown::default(),
        }
    }

    /// The ledger remembers no use at all.
    pub fn never_used(&mut self) {
        for scope in [&mut self.accounts, &mut self.references].into_iter().flatten() {
            *scope = Unknown::default();
        }
    }

    /// Takes over a spec.
    pub fn adopt(&mut self, spec: &QuotaSpec, now_us: u64) {
        let send_budget_us = micros_up(spec.send_budget);
        if send_budget_us < self.send_budget_us {
            let until_us = now_us + micros_up(BOOKING_HORIZON) + self.send_budget_us;
            self.hands_until_us = self.hands_until_us.max(until_us);
        }
        self.send_budget_us = send_budget_us;
        let change = self.before(spec, now_us);
        if spec.longest_us() > self.longest_us {
            let waited_for = self.longer.until_us + self.longest_us > now_us;
            self.within_us = if waited_for { self.within_us.min(self.longest_us) } else { self.longest_us };
            self.longer = change;
        }
        self.longest_us = spec.longest_us();
        let counted = |known: Option<Unknown>, scope| spec.counts(scope).then(|| known.unwrap_or(change));
        self.accounts = counted(self.accounts, Scope::Account);
        self.references = counted(self.references, Scope::Reference);
        if spec.members.iter().any(|member| !self.members.contains(member)) {
            // Until all workers have noticed, it is counted elsewhere.
            self.joined = change.later_by(micros_up(spec.handover));
        }
        if self.members != spec.members {
            self.members.clone_from(&spec.members);
        }
    }

    /// What a counter has not counted that counts from now on; or, of a subject, since it was counted last.
    pub fn before(&self, spec: &QuotaSpec, now_us: u64) -> Unknown {
        let since_us = now_us.max(self.hands_until_us.saturating_sub(spec.in_hands_us()));
        Unknown { since_us, until_us: now_us + spec.before_us() }
    }

    /// What a new counter of a subject has not counted, for a window.
    pub fn of_new(&self, scope: Scope, window_us: u64) -> Unknown {
        let of_scope = match scope {
            Scope::Provider => Unknown::default(),
            Scope::Account => self.accounts.unwrap_or_default(),
            Scope::Reference => self.references.unwrap_or_default(),
        };
        let longer = if window_us > self.within_us { self.longer } else { Unknown::default() };
        of_scope.later_of(longer).later_of(self.joined)
    }

    /// What a counter has not counted of rows that joined, if it was counted last before.
    pub fn joined_after(&self, counted_us: u64) -> Option<Unknown> {
        (counted_us < self.joined.since_us).then_some(self.joined)
    }
}
