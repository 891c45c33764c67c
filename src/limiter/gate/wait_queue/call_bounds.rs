//! What bounds the waiters of one call: the lanes that let them leave, and costlier waiters that hold others back.
//!
//! A quota may serve several lanes. A lane without a free worker slot, or whose egress rate allows none now, holds up
//! no other lane.
//!
//! The limiter skips a request that has too few slots, and would grant these to the cheaper requests behind it. So the
//! slots of an account would never gather for a costly job. Therefore a waiter is left out of a call that requests a
//! costlier one of its account or reference before it. It holds back the later ones, so that their order stays.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::PermitWaiter;
use crate::limiter::gate::egress::{EgressRequest, EgressRule, FreeEgress, LaneEgress};

/// The number of waiters of each lane.
#[derive(Debug, Default)]
pub(super) struct LaneWaiters {
    /// A quota has few lanes, so they are searched.
    lanes: Vec<LaneCount>,
    /// Waiters that need no worker slot.
    without_lane: usize,
}

#[derive(Debug)]
struct LaneCount {
    lane: Arc<LaneEgress>,
    paced: usize,
    exempt: usize,
}

/// What the lanes of the waiters let out now.
#[derive(Debug)]
pub(super) struct LaneCapacity {
    now: Instant,
    lanes: Vec<FreeLane>,
    has_without_lane: bool,
}

#[derive(Debug)]
struct FreeLane {
    lane: Arc<LaneEgress>,
    free: FreeEgress,
    has_exempt: bool,
}

impl LaneCount {
    /// Changes the number of waiters of a rule.
    fn change(&mut self, rule: EgressRule, by: isize, now: Instant) {
        match rule {
            EgressRule::Paced => {
                self.paced = self.paced.saturating_add_signed(by);
                self.lane.set_paced(now, self.paced);
            }
            EgressRule::Exempt => self.exempt = self.exempt.saturating_add_signed(by),
        }
    }
}

impl LaneWaiters {
    pub fn add(&mut self, egress: Option<&EgressRequest>, now: Instant) {
        let Some(egress) = egress else {
            self.without_lane += 1;
            return;
        };
        let index = self.lanes.iter().position(|count| Arc::ptr_eq(&count.lane, &egress.lane));
        let index = index.unwrap_or_else(|| {
            self.lanes.push(LaneCount { lane: Arc::clone(&egress.lane), paced: 0, exempt: 0 });
            self.lanes.len() - 1
        });
        self.lanes[index].change(egress.rule, 1, now);
    }

    pub fn remove(&mut self, egress: Option<&EgressRequest>, now: Instant) {
        let Some(egress) = egress else {
            self.without_lane = self.without_lane.saturating_sub(1);
            return;
        };
        if let Some(index) = self.lanes.iter().position(|count| Arc::ptr_eq(&count.lane, &egress.lane)) {
            self.lanes[index].change(egress.rule, -1, now);
            if self.lanes[index].paced + self.lanes[index].exempt == 0 {
                self.lanes.swap_remove(index);
            }
        }
    }

    /// What the lanes let out at this instant.
    pub fn capacity(&self, now: Instant) -> LaneCapacity {
        let free = |count: &LaneCount| {
            let (lane, free) = (Arc::clone(&count.lane), count.lane.free(now));
            FreeLane { lane, free, has_exempt: count.exempt > 0 }
        };
        let lanes = self.lanes.iter().map(free).collect();
        LaneCapacity { now, lanes, has_without_lane: self.without_lane > 0 }
    }

    /// Earliest instant at which any waiter may leave, as far as the lanes decide; `None`: when a worker slot is
    /// released.
    pub fn earliest(&self, capacity: &LaneCapacity) -> Option<Instant> {
        let without_lane = (self.without_lane > 0).then_some(capacity.now);
        // The capacity was made from these lanes.
        let by_lane = self.lanes.iter().zip(&capacity.lanes).flat_map(|(count, lane)| {
            let rules = [(EgressRule::Paced, count.paced), (EgressRule::Exempt, count.exempt)];
            let present = rules.into_iter().filter(|(_, waiters)| *waiters > 0);
            present.filter_map(|(rule, _)| lane.free.next_at(rule, capacity.now))
        });
        by_lane.chain(without_lane).min()
    }
}

impl LaneCapacity {
    fn lane(&self, egress: &EgressRequest) -> Option<&FreeLane> {
        self.lanes.iter().find(|lane| Arc::ptr_eq(&lane.lane, &egress.lane))
    }

    /// When the lane lets this waiter leave; `None`: when a worker slot is released.
    pub fn next_at(&self, egress: Option<&EgressRequest>) -> Option<Instant> {
        let Some(egress) = egress else { return Some(self.now) };
        self.lane(egress)?.free.next_at(egress.rule, self.now)
    }

    /// Whether the lane lets this waiter leave now.
    pub fn has_room_for(&self, egress: Option<&EgressRequest>) -> bool {
        egress.is_none_or(|egress| self.lane(egress).is_some_and(|lane| lane.free.may_leave(egress.rule)))
    }

    /// Takes one job of the lane's capacity; `false`: it may not leave now.
    pub fn take(&mut self, egress: Option<&EgressRequest>) -> bool {
        let Some(egress) = egress else { return true };
        let lane = self.lanes.iter_mut().find(|lane| Arc::ptr_eq(&lane.lane, &egress.lane));
        lane.is_some_and(|lane| lane.free.take(egress.rule))
    }

    /// Whether no further waiter may leave now.
    pub fn is_used_up(&self) -> bool {
        !self.has_without_lane && self.lanes.iter().all(|lane| lane.free.is_used_up(lane.has_exempt))
    }
}

/// A limit of one account or reference: the key of the subject, and the index of the limit in the spec.
type CounterKey<'a> = (&'a str, usize);

/// The requests of one call, as far as they hold others back.
#[derive(Debug, Default)]
pub(super) struct HeldBack<'a> {
    counters: HashMap<CounterKey<'a>, Requested>,
    waiters: usize,
}

/// The requests of one call that a limit counts.
#[derive(Clone, Copy, Debug, Default)]
struct Requested {
    largest_cost: u32,
    /// A waiter that it counts is left out.
    is_closed: bool,
}

impl<'a> HeldBack<'a> {
    /// Whether the next waiter may be in the call; `false`: it is left out.
    pub fn admits<T>(&mut self, waiter: &'a PermitWaiter<T>) -> bool {
        // Nothing is cheaper than a cost of 1.
        if waiter.cost <= 1 && self.counters.is_empty() {
            return true;
        }
        let counted = &waiter.counted;
        let keys = || {
            let enforced = counted.enforced.iter();
            enforced.filter_map(|counter| Some((counted.subjects.get(counter.subject)?.key.as_str(), counter.limit)))
        };
        let holds_back = |requested: &Requested| requested.is_closed || waiter.cost < requested.largest_cost;
        let is_left_out = keys().any(|key| self.counters.get(&key).is_some_and(holds_back));
        for key in keys() {
            let requested = self.counters.entry(key).or_default();
            requested.largest_cost = requested.largest_cost.max(waiter.cost);
            requested.is_closed |= is_left_out;
        }
        self.waiters += usize::from(is_left_out);
        !is_left_out
    }

    /// The number of waiters that were left out.
    pub fn len(&self) -> usize {
        self.waiters
    }
}
