//! Counters of one scope: all calls of a quota, or those of one account or reference, with the permits in flight.
//!
//! A lease holds the slots of one call's permits until its own deadline and is never renewed. So a crashed, frozen or
//! buggy worker costs throughput, never safety. A permit without a response by then counts as answered then, and each
//! limit's window runs from there. A release without a lease is ignored.

use std::collections::{BTreeMap, HashMap};

use super::counter::{Availability, Counter};
use super::coverage::UncountedUses;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::{
    CallKind, CostByKind, Incarnation, PastUse, PermitRelease, ReleaseKind, Subject, UsageHistory,
};
use crate::domain::quota_spec::CounterSpec;
use crate::domain::time::{micros_down, micros_up};

/// Permits of one call that have not been released.
#[derive(Clone, Copy, Debug, Default)]
struct OutstandingCall {
    deadline_us: u64,
    outstanding: InFlightCost,
}

/// Uses in flight, by kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InFlightCost {
    pub charges: u64,
    pub lookups: u64,
}

impl InFlightCost {
    pub fn counted_by(&self, applies_to: AppliesTo) -> u64 {
        match applies_to {
            AppliesTo::All => self.charges + self.lookups,
            AppliesTo::Charge => self.charges,
            AppliesTo::Lookup => self.lookups,
        }
    }

    pub fn of_kind_mut(&mut self, kind: CallKind) -> &mut u64 {
        match kind {
            CallKind::Charge => &mut self.charges,
            CallKind::Lookup => &mut self.lookups,
        }
    }

    fn total(self) -> u64 {
        self.charges + self.lookups
    }

    fn less(self, other: Self) -> Self {
        Self {
            charges: self.charges.saturating_sub(other.charges),
            lookups: self.lookups.saturating_sub(other.lookups),
        }
    }
}

/// Usage from the ledger, by the limiter's clock.
#[derive(Clone, Debug)]
pub(super) struct LedgerUsage {
    pub as_of_us: u64,
    pub within_us: u64,
    /// Oldest first.
    pub ended: Vec<(u64, CostByKind)>,
    pub in_flight: InFlightCost,
}

impl LedgerUsage {
    /// Usage from a history that was read before now.
    pub fn from_history(now_us: u64, history: &UsageHistory) -> Self {
        let UsageHistory { as_of, within, ended, in_flight: open } = history;
        Self { as_of_us: as_of.0, within_us: micros_up(*within), ..Self::from_uses(now_us, ended, *open) }
    }

    /// Usage from ended uses and uses in flight. Their ages are rounded down, which is safe.
    pub fn from_uses(now_us: u64, ended: &[PastUse], open: CostByKind) -> Self {
        let instant = |past: &PastUse| (now_us.saturating_sub(micros_down(past.age)), past.cost);
        let mut ended: Vec<(u64, CostByKind)> = ended.iter().map(instant).collect();
        ended.sort_unstable();
        let in_flight = InFlightCost { charges: u64::from(open.charges), lookups: u64::from(open.lookups) };
        Self { as_of_us: 0, within_us: 0, ended, in_flight }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    /// In the order of the spec that was adopted last.
    pub per_limit: Vec<Counter>,
    pub in_flight: InFlightCost,
    pub oldest_deadline_us: u64,
    outstanding_calls: BTreeMap<(Incarnation, u64), OutstandingCall>,
    /// For a subject: when it was counted last, and until when that may matter.
    pub counted_us: u64,
    pub kept_until_us: u64,
}

impl Counters {
    /// New counters. `unknown` returns the uses that a new counter has not counted, for a window.
    pub fn new(specs: Vec<CounterSpec>, now_us: u64, unknown: impl Fn(u64) -> UncountedUses) -> Self {
        let counter = |spec: CounterSpec| {
            let unknown = unknown(spec.window_us);
            Counter::new(spec, unknown)
        };
        Self { per_limit: specs.into_iter().map(counter).collect(), counted_us: now_us, ..Self::default() }
    }

    /// Changes to the limits of a spec. A new limit or a longer window does not know its past.
    pub fn apply_spec(&mut self, specs: Vec<CounterSpec>, now_us: u64, unknown: UncountedUses) {
        let mut known = std::mem::take(&mut self.per_limit);
        for spec in specs {
            let counter = match known.iter().position(|counter| counter.spec.name == spec.name) {
                Some(position) => known.swap_remove(position).apply_spec(spec, now_us, unknown),
                None => Counter::new(spec, unknown),
            };
            self.per_limit.push(counter);
        }
    }

    /// Seeds the counters that need a history; false: none does. Uses in flight are over by `open_until_us`.
    pub fn seed(&mut self, now_us: u64, past: &LedgerUsage, open_until_us: u64) -> bool {
        let seeded: Vec<bool> =
            self.per_limit.iter_mut().map(|counter| counter.seed(now_us, past, open_until_us)).collect();
        seeded.contains(&true)
    }

    /// Releases permits. Unknown calls and permits that were released before are ignored.
    pub fn release(&mut self, now_us: u64, incarnation: Incarnation, release: &PermitRelease, is_provider: bool) {
        let key = (incarnation, release.call);
        let Some(lease) = self.outstanding_calls.get_mut(&key) else { return };
        let outstanding = lease.outstanding.of_kind_mut(release.kind);
        let cost = u64::from(release.cost).min(*outstanding);
        *outstanding -= cost;
        if lease.outstanding.total() == 0 {
            self.outstanding_calls.remove(&key);
        }
        let in_flight = self.in_flight.of_kind_mut(release.kind);
        *in_flight = in_flight.saturating_sub(cost);
        if cost == 0 {
            return;
        }
        for (index, counter) in self.per_limit.iter_mut().enumerate() {
            if !counter.spec.is_held() || !counter.spec.applies(release.kind) {
                continue;
            }
            match &release.release_kind {
                // The age is rounded down, so the slot is free later: safe.
                ReleaseKind::Used { age } => counter.log_use(now_us.saturating_sub(micros_down(*age)), cost),
                // A subject's slots are never booked: the ones acquired were over.
                ReleaseKind::Unused { origins } if is_provider => {
                    counter.restore(now_us, origins.get(index).copied().unwrap_or(0), cost);
                }
                ReleaseKind::Unused { .. } => {}
            }
        }
    }

    /// Ends leases past their deadline: the provider has counted their calls by then.
    pub fn expire(&mut self, now_us: u64) {
        self.per_limit.iter_mut().for_each(|counter| counter.expire(now_us));
        if self.in_flight.total() == 0 {
            self.oldest_deadline_us = 0;
        }
        if self.in_flight.total() == 0 || now_us < self.oldest_deadline_us {
            return;
        }
        let mut expired = Vec::new();
        self.outstanding_calls.retain(|_, lease| {
            let live = lease.deadline_us > now_us;
            if !live {
                expired.push(*lease);
            }
            live
        });
        // Sorted like the log.
        expired.sort_unstable_by_key(|lease| lease.deadline_us);
        for OutstandingCall { deadline_us, outstanding } in expired {
            self.in_flight = self.in_flight.less(outstanding);
            for counter in self.per_limit.iter_mut().filter(|counter| counter.spec.is_held()) {
                let uses = outstanding.counted_by(counter.spec.applies_to);
                if uses > 0 {
                    counter.log_unanswered(now_us, deadline_us, uses);
                }
            }
        }
        self.oldest_deadline_us = self.outstanding_calls.values().map(|lease| lease.deadline_us).min().unwrap_or(0);
    }

    /// Called before the first request of a call.
    pub fn begin_batch(&mut self, now_us: u64, jitter_us: u64) {
        let in_flight = self.in_flight;
        let open = |counter: &mut Counter| {
            counter.begin_batch(now_us, in_flight.counted_by(counter.spec.applies_to), jitter_us)
        };
        self.per_limit.iter_mut().for_each(open);
    }

    /// Holds the slots of granted permits until their responses or the deadline.
    pub fn hold_slots(&mut self, caller: (Incarnation, u64), granted: InFlightCost, deadline_us: u64) {
        if granted.total() == 0 || !self.per_limit.iter().any(|counter| counter.spec.is_held()) {
            return;
        }
        self.outstanding_calls.insert(caller, OutstandingCall { deadline_us, outstanding: granted });
        self.in_flight.charges += granted.charges;
        self.in_flight.lookups += granted.lookups;
        let oldest_us = self.oldest_deadline_us;
        self.oldest_deadline_us = if oldest_us == 0 { deadline_us } else { oldest_us.min(deadline_us) };
    }
}

/// Slots of a concurrency limit that no request in flight holds; below zero after the limit was lowered. Valid during a
/// call only.
///
/// A use that has ended counts for nothing, so there is no log: a released slot is free at once. Two requests that use
/// the same slot do not overlap at the provider, because the second one starts after the response to the first one, or
/// after its lease.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeSlots(i64);

impl FreeSlots {
    pub fn of(max: u32, in_flight: u64) -> Self {
        Self(i64::from(max) - in_flight.cast_signed())
    }

    /// Called before the first request of a call.
    pub fn begin_batch(&mut self, max: u32, in_flight: u64) {
        *self = Self::of(max, in_flight);
    }

    /// Finds `cost` slots; `None` if a request in flight has to end before.
    pub fn find(&self, cost: u64, from_us: u64) -> Option<Availability> {
        let permits = self.0.max(0).cast_unsigned() / cost.max(1);
        (permits > 0).then_some(Availability { start_us: from_us, origin_ms: 0, permits })
    }

    pub fn consume(&mut self, cost: u64) {
        self.0 -= cost.cast_signed();
    }
}

/// Counters of a subject, with what this call acquires.
pub(super) struct SubjectCounters {
    pub key: String,
    pub scope: Scope,
    pub counters: Counters,
    /// Spec indices of its counters.
    pub indices: Vec<usize>,
    /// Whether it existed before this call.
    pub existed: bool,
    pub granted: InFlightCost,
    pub latest_us: u64,
}

/// The subjects of one call, each once. They are found by key, without a search: a call may name thousands, each for one
/// request or release.
#[derive(Default)]
pub(super) struct CallSubjects<'a> {
    pub list: Vec<SubjectCounters>,
    positions: HashMap<&'a str, usize>,
}

impl<'a> CallSubjects<'a> {
    pub fn contains(&self, subject: &Subject) -> bool {
        self.positions.contains_key(subject.key.as_str())
    }

    /// Adds a subject that is not in the list.
    pub fn push(&mut self, subject: &'a Subject, counters: SubjectCounters) {
        self.positions.insert(&subject.key, self.list.len());
        self.list.push(counters);
    }

    /// Positions in the list of those subjects that are in it, in their order.
    pub fn positions(&self, subjects: &[Subject]) -> Vec<usize> {
        subjects.iter().filter_map(|subject| self.positions.get(subject.key.as_str()).copied()).collect()
    }
}

/// The subjects at these positions, each once, in the order of the list.
pub(super) fn select_subjects<'a>(
    list: &'a mut [SubjectCounters],
    positions: &[usize],
) -> impl Iterator<Item = &'a mut SubjectCounters> + use<'a> {
    let mut positions = positions.to_vec();
    positions.sort_unstable();
    positions.dedup();
    let (mut rest, mut passed) = (list.iter_mut(), 0);
    positions.into_iter().filter_map(move |position| {
        let subject = rest.nth(position - passed);
        passed = position + 1;
        subject
    })
}
