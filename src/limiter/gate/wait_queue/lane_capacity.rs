//! The capacity of the lanes whose jobs wait in one queue: how many of them may leave now, and when the next one may.
//!
//! A quota may serve several lanes. A lane without a free worker slot, or whose egress rate allows none now, holds up
//! no other lane.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use crate::limiter::gate::egress::{EgressRequest, EgressRule, FreeEgress, LaneEgress};

/// Identity of a lane: the address of its egress.
type LaneKey = usize;

/// The number of waiters of each lane.
#[derive(Debug, Default)]
pub(super) struct LaneWaiters {
    by_lane: HashMap<LaneKey, LaneCount>,
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
    by_lane: HashMap<LaneKey, FreeLane>,
    has_without_lane: bool,
}

#[derive(Debug)]
struct FreeLane {
    free: FreeEgress,
    has_exempt: bool,
}

fn lane_key(egress: &EgressRequest) -> LaneKey {
    Arc::as_ptr(&egress.lane).addr()
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
        let new = || LaneCount { lane: Arc::clone(&egress.lane), paced: 0, exempt: 0 };
        self.by_lane.entry(lane_key(egress)).or_insert_with(new).change(egress.rule, 1, now);
    }

    pub fn remove(&mut self, egress: Option<&EgressRequest>, now: Instant) {
        let Some(egress) = egress else {
            self.without_lane = self.without_lane.saturating_sub(1);
            return;
        };
        if let Some(count) = self.by_lane.get_mut(&lane_key(egress)) {
            count.change(egress.rule, -1, now);
            if count.paced + count.exempt == 0 {
                self.by_lane.remove(&lane_key(egress));
            }
        }
    }

    /// What the lanes let out at this instant.
    pub fn capacity(&self, now: Instant) -> LaneCapacity {
        let free = |count: &LaneCount| FreeLane { free: count.lane.free(now), has_exempt: count.exempt > 0 };
        let by_lane = self.by_lane.iter().map(|(key, count)| (*key, free(count))).collect();
        LaneCapacity { now, by_lane, has_without_lane: self.without_lane > 0 }
    }

    /// Earliest instant at which any waiter may leave, as far as the lanes decide; `None`: when a worker slot is
    /// released.
    pub fn earliest(&self, capacity: &LaneCapacity) -> Option<Instant> {
        let without_lane = (self.without_lane > 0).then_some(capacity.now);
        let by_lane = self.by_lane.iter().flat_map(|(key, count)| {
            let free = capacity.by_lane.get(key).map(|lane| &lane.free);
            let rules = [(EgressRule::Paced, count.paced), (EgressRule::Exempt, count.exempt)];
            let present = rules.into_iter().filter(|(_, waiters)| *waiters > 0);
            present.filter_map(move |(rule, _)| free?.next_at(rule, capacity.now))
        });
        by_lane.chain(without_lane).min()
    }
}

impl LaneCapacity {
    /// When the lane lets this waiter leave; `None`: when a worker slot is released.
    pub fn next_at(&self, egress: Option<&EgressRequest>) -> Option<Instant> {
        let Some(egress) = egress else { return Some(self.now) };
        self.by_lane.get(&lane_key(egress))?.free.next_at(egress.rule, self.now)
    }

    /// Takes one job of the lane's capacity; `false`: it may not leave now.
    pub fn take(&mut self, egress: Option<&EgressRequest>) -> bool {
        let Some(egress) = egress else { return true };
        self.by_lane.get_mut(&lane_key(egress)).is_some_and(|lane| lane.free.take(egress.rule))
    }

    /// Whether no further waiter may leave now.
    pub fn is_used_up(&self) -> bool {
        !self.has_without_lane && self.by_lane.values().all(|lane| lane.free.is_used_up(lane.has_exempt))
    }
}
