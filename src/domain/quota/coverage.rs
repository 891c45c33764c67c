//! Coverage of a quota's state, which uses it has not counted; and the usage that it shows of its limits.
//!
//! Not counted are uses before the state began, uses while no limit counted accounts or references, and uses of a row
//! that joined the quota. Idle accounts and references are kept only for the windows of their own limits, so longer
//! windows are not covered. Uncounted uses are not taken for none: the limiter reads the ledger, or waits. See
//! `docs/decisions/0012-history-of-uncounted-usage.md`.
//!
//! Reading the usage changes nothing: what is used, when the next permit may start, and when all of a limit is free
//! again. Calls in flight count as answered now; a call whose deadline has passed stays in flight until the next call to
//! the limiter. The limits are those of the last call, whose settings may be older than the caller's.

use super::counter::Counter;
use super::counters::Counters;
use super::{Quota, QuotaState};
use crate::domain::limit::Scope;
use crate::domain::limit_usage::LimitUsage;
use crate::domain::permit_protocol::Subject;
use crate::domain::provider::{BOOKING_HORIZON, ProviderName};
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};
use crate::domain::time::{Micros, micros_up};

/// Uses granted before an instant and not counted; the default: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UncountedUses {
    pub since_us: u64,
    /// Instant at which the last of them may begin to count.
    pub until_us: u64,
}

impl UncountedUses {
    fn later_of(self, other: Self) -> Self {
        Self { since_us: self.since_us.max(other.since_us), until_us: self.until_us.max(other.until_us) }
    }

    fn later_by(self, us: u64) -> Self {
        Self { since_us: self.since_us + us, until_us: self.until_us + us }
    }
}

/// Coverage of the accounts, or of the references, while a limit counts them.
#[derive(Clone, Copy, Debug)]
struct SubjectCoverage {
    /// The longest window of their limits. A subject that is idle for longer is dropped.
    longest_window_us: u64,
    /// A subject without counters has no uses that count in windows up to this length.
    within_us: u64,
    /// Uncounted uses for longer windows.
    longer: UncountedUses,
    /// Uses from before they were counted, which no counter has.
    uncounted: UncountedUses,
}

impl SubjectCoverage {
    fn new(longest_us: u64, uncounted: UncountedUses) -> Option<Self> {
        let longer = UncountedUses::default();
        (longest_us > 0).then_some(Self { longest_window_us: longest_us, within_us: longest_us, longer, uncounted })
    }

    /// Changes to other limits. While no limit counts the subjects, nothing is kept of their uses.
    fn adopted(known: Option<Self>, longest_us: u64, change: UncountedUses, now_us: u64) -> Option<Self> {
        let Some(mut known) = known.filter(|_| longest_us > 0) else { return Self::new(longest_us, change) };
        if longest_us > known.longest_window_us {
            let waited_for = known.longer.until_us + known.longest_window_us > now_us;
            known.within_us =
                if waited_for { known.within_us.min(known.longest_window_us) } else { known.longest_window_us };
            known.longer = change;
        }
        known.longest_window_us = longest_us;
        Some(known)
    }
}

#[derive(Clone, Debug)]
pub(super) struct UsageCoverage {
    accounts: Option<SubjectCoverage>,
    references: Option<SubjectCoverage>,
    send_budget_us: u64,
    /// Until then a permit may begin that was granted under a longer send budget.
    longer_budget_until_us: u64,
    members: Vec<ProviderName>,
    /// Uncounted uses of the rows that joined last.
    joined: UncountedUses,
}

impl UsageCoverage {
    /// Coverage of a new state: nothing is counted yet.
    pub fn at_state_start(spec: &QuotaSpec, now_us: u64) -> Self {
        let lost = UncountedUses { since_us: now_us, until_us: now_us + spec.lag_us() };
        Self {
            accounts: SubjectCoverage::new(spec.longest_window_of_us(Scope::Account), lost),
            references: SubjectCoverage::new(spec.longest_window_of_us(Scope::Reference), lost),
            send_budget_us: micros_up(spec.send_budget),
            longer_budget_until_us: 0,
            members: spec.members.clone(),
            joined: UncountedUses::default(),
        }
    }

    /// The ledger has no use from before the state began. It was not read for limits that came later.
    pub fn mark_never_used(&mut self, born_us: u64) {
        for subjects in [&mut self.accounts, &mut self.references].into_iter().flatten() {
            if subjects.uncounted.since_us <= born_us {
                subjects.uncounted = UncountedUses::default();
            }
        }
    }

    /// Changes to a spec.
    pub fn apply_spec(&mut self, spec: &QuotaSpec, now_us: u64) {
        let send_budget_us = micros_up(spec.send_budget);
        if send_budget_us < self.send_budget_us {
            let until_us = now_us + micros_up(BOOKING_HORIZON) + self.send_budget_us;
            self.longer_budget_until_us = self.longer_budget_until_us.max(until_us);
        }
        self.send_budget_us = send_budget_us;
        let change = self.uncounted_before(spec, now_us);
        let adopted = |known, scope| SubjectCoverage::adopted(known, spec.longest_window_of_us(scope), change, now_us);
        self.accounts = adopted(self.accounts, Scope::Account);
        self.references = adopted(self.references, Scope::Reference);
        if spec.members.iter().any(|member| !self.members.contains(member)) {
            // It is counted elsewhere until all workers have noticed.
            self.joined = change.later_by(micros_up(spec.handover));
        }
        if self.members != spec.members {
            self.members.clone_from(&spec.members);
        }
    }

    /// Uses that a new limit has not counted; for a subject, since it was counted last.
    pub fn uncounted_before(&self, spec: &QuotaSpec, now_us: u64) -> UncountedUses {
        let since_us = now_us.max(self.longer_budget_until_us.saturating_sub(spec.start_delay_max_us()));
        UncountedUses { since_us, until_us: now_us + spec.count_delay_max_us() }
    }

    fn subjects(&self, scope: Scope) -> Option<SubjectCoverage> {
        match scope {
            Scope::Provider => None,
            Scope::Account => self.accounts,
            Scope::Reference => self.references,
        }
    }

    /// Longest time that a use of a subject may count.
    pub fn longest_window_us(&self, scope: Scope) -> u64 {
        self.subjects(scope).map_or(0, |subjects| subjects.longest_window_us)
    }

    /// Uses that a new counter of a subject has not counted, for a window.
    pub fn uncounted_of_new(&self, scope: Scope, window_us: u64) -> UncountedUses {
        let Some(subjects) = self.subjects(scope) else { return self.joined };
        let longer = if window_us > subjects.within_us { subjects.longer } else { UncountedUses::default() };
        subjects.uncounted.later_of(longer).later_of(self.joined)
    }

    /// Uses that a counter has missed since it was counted at an instant: of rows that joined since, and of the time in
    /// which no limit counted its scope.
    pub fn uncounted_since(&self, scope: Scope, counted_us: u64) -> UncountedUses {
        let later =
            |unknown: UncountedUses| if counted_us < unknown.since_us { unknown } else { UncountedUses::default() };
        let uncounted = self.subjects(scope).map_or_else(UncountedUses::default, |subjects| subjects.uncounted);
        later(uncounted).later_of(later(self.joined))
    }
}

/// Instants of one reading.
#[derive(Clone, Copy)]
struct UsageView {
    now_us: u64,
    /// No permit starts before this: the state is cold, or a provider named a wait.
    grants_from_us: u64,
}

impl Quota {
    /// Usage of the provider's limits at `clock`, and of one subject's.
    pub fn usage(&self, clock: Micros, spec: &QuotaSpec, subject: Option<&Subject>) -> Vec<LimitUsage> {
        let state = self.state.as_ref();
        let now_us = state.map_or(clock.0, |state| clock.0.max(state.last_us));
        let grants_from_us = state.map_or(now_us + spec.cold_start_us(), |state| state.grants_from_us(spec, now_us));
        let view = UsageView { now_us, grants_from_us };
        let new_limit =
            state.map_or_else(UncountedUses::default, |state| state.coverage.uncounted_before(spec, now_us));
        let provider =
            state.map(|state| (&state.provider, state.coverage.uncounted_since(Scope::Provider, state.last_us)));
        let provider_limits = spec.provider_limits().into_iter().zip(spec.provider_counters());
        let provider_limits =
            provider_limits.map(|(index, counter)| view.limit_usage(index, &counter, provider, new_limit));
        let own = state.and_then(|state| state.subjects.get(&subject?.key)).filter(|own| own.kept_until_us > now_us);
        let own_limits = subject.into_iter().flat_map(|subject| {
            let scope = spec.scope_of(subject);
            let own = own.and_then(|own| Some((own, state?.coverage.uncounted_since(scope, own.counted_us))));
            let indices = subject.limits.iter().map(|limit| limit.index);
            indices.zip(spec.subject_counters(subject)).map(move |(index, counter)| {
                let new_subject = state.filter(|_| own.is_none());
                let unknown =
                    new_subject.map_or(new_limit, |state| state.coverage.uncounted_of_new(scope, counter.window_us));
                view.limit_usage(index, &counter, own, unknown)
            })
        });
        provider_limits.chain(own_limits).filter(|usage| usage.index < spec.limits.len()).collect()
    }
}

impl QuotaState {
    fn grants_from_us(&self, spec: &QuotaSpec, now_us: u64) -> u64 {
        let paused_until_us = if self.resumed_at == spec.resumed_at { self.paused_until_us } else { 0 };
        now_us.max(self.cold_until_us).max(paused_until_us)
    }
}

impl UsageView {
    /// `counters` come with the uses that they have not counted. `unknown`: the uses that a counter which does not
    /// exist yet has not counted.
    fn limit_usage(
        self,
        index: usize,
        spec: &CounterSpec,
        counters: Option<(&Counters, UncountedUses)>,
        unknown: UncountedUses,
    ) -> LimitUsage {
        let Self { now_us, grants_from_us } = self;
        let of_limit = |counter: &&Counter| counter.spec.name == spec.name;
        let known =
            counters.and_then(|(counters, missed)| Some((counters, counters.per_limit.iter().find(of_limit)?, missed)));
        let Some((counters, counter, missed)) = known else {
            return LimitUsage::unused(index, grants_from_us.max(blocked_until_us(spec, unknown)) - now_us);
        };
        let leased = counters.in_flight.counted_by(counter.spec.applies_to);
        let from_us = grants_from_us.max(blocked_until_us(&counter.spec, missed));
        let retry_us = counter.next_start_us(now_us, from_us, leased) - now_us;
        let (_, reset_us) = counter.remaining_and_reset(now_us, leased);
        LimitUsage {
            index,
            used: counter.counted(now_us, leased),
            would_have_refused: counter.would_have_refused,
            would_have_waited: counter.would_have_waited,
            retry_us,
            reset_us: reset_us.max(retry_us),
            still_used: counter.still_used(now_us, leased),
        }
    }
}

/// Until when a limit is blocked for uncounted uses; 0: it is not.
fn blocked_until_us(spec: &CounterSpec, unknown: UncountedUses) -> u64 {
    if unknown.until_us > 0 && !spec.shadow { unknown.until_us + spec.window_us } else { 0 }
}
