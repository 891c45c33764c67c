//! Gate of one process in virtual time: the wait queue, the lane's egress, and at most one limiter call in flight.
//!
//! The rules and constants are those of `limiter::gate`. The limiter's own state machine decides on grants. All clocks
//! agree here, so nothing compares them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Duration;

use super::egress::SimulatedEgress;
use super::event::JobIndex;
use super::limiter_call::{AccountSubjects, ReleasedPermit, releases, subjects, unused};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{
    BATCH_MAX, LimiterCall, LimiterReply, PERMITS_MAX, PermitRequest, RebuildData, RefusalReason, SkippedRequest,
    SlotInstant,
};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::{RELEASE_DELAY, RETRY_AHEAD, RETRY_PAUSE_MIN};

/// Position in the wait queue: higher priority first, then in the order of joining.
type WaiterKey = (u8, u64);

/// A request for a permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedRequest {
    pub job: JobIndex,
    pub cost: u16,
    pub priority: u8,
    pub account: Option<u32>,
    pub wait_until_us: u64,
    /// A wait up to this is accepted even beyond `wait_until_us`, until `egress_until_us`.
    pub accepted_wait_us: u64,
    pub egress_until_us: u64,
}

impl SimulatedRequest {
    fn accepts(&self, until_us: u64, stalled_since_us: u64, now_us: u64) -> bool {
        let is_in_time = now_us < self.egress_until_us;
        until_us <= self.wait_until_us || (is_in_time && until_us <= stalled_since_us + self.accepted_wait_us)
    }
}

#[derive(Debug)]
struct SimulatedWaiter {
    request: SimulatedRequest,
    deferred_until_us: Option<u64>,
}

/// A granted permit.
#[derive(Clone, Debug)]
pub(super) struct SimulatedPermit {
    pub start_us: u64,
    pub use_before_us: u64,
    pub call: u64,
    pub origins: Rc<[SlotInstant]>,
}

/// Decision on one request.
#[derive(Debug)]
pub(super) enum GateDecision {
    Granted(JobIndex, SimulatedPermit),
    Refused {
        job: JobIndex,
        wait_us: u64,
        of_its_own: bool,
    },
    /// The cost is above what any window can admit.
    Oversized(JobIndex),
}

/// Block of the wait queue, and the first waiter if the block is its wait.
#[derive(Clone, Copy, Debug)]
struct SimulatedBlock {
    until_us: u64,
    first: Option<WaiterKey>,
}

#[derive(Debug)]
struct SimulatedCall {
    call: LimiterCall,
    departed_us: u64,
    /// Waiters of each request.
    keys: Vec<Vec<WaiterKey>>,
    reply: Option<LimiterReply>,
}

#[derive(Debug)]
pub(super) struct SimulatedGate {
    incarnation: u64,
    pub calls: u64,
    joined: u64,
    pub egress: SimulatedEgress,
    queue: BTreeMap<WaiterKey, SimulatedWaiter>,
    keys: HashMap<JobIndex, WaiterKey>,
    ready: BTreeSet<WaiterKey>,
    /// Sorted by the instant at which they may be requested again.
    deferred: BTreeSet<(u64, WaiterKey)>,
    by_deadline: BTreeSet<(u64, WaiterKey)>,
    released: Vec<ReleasedPermit>,
    release_at_us: Option<u64>,
    queue_block: Option<SimulatedBlock>,
    /// Since when blocks have followed each other, without a permit or a reply without a refusal in between.
    stalled_since_us: Option<u64>,
    ask_at_us: u64,
    replied_at_us: u64,
    pending_call: Option<SimulatedCall>,
    /// Since when the limiter has been known to be cold.
    cold_since_us: Option<u64>,
    /// The ledger's report about a past without uses.
    rebuild: Option<RebuildData>,
    /// Instant for which the next wake-up is scheduled.
    pub woken_at_us: Option<u64>,
}

impl SimulatedGate {
    pub fn new(incarnation: u64, egress: SimulatedEgress, now_us: u64) -> Self {
        Self {
            incarnation,
            egress,
            keys: HashMap::new(),
            calls: 0,
            joined: 0,
            queue: BTreeMap::new(),
            ready: BTreeSet::new(),
            deferred: BTreeSet::new(),
            by_deadline: BTreeSet::new(),
            released: Vec::new(),
            release_at_us: None,
            queue_block: None,
            stalled_since_us: None,
            ask_at_us: now_us,
            replied_at_us: now_us,
            pending_call: None,
            cold_since_us: None,
            rebuild: None,
            woken_at_us: None,
        }
    }

    pub fn release(&mut self, now_us: u64, spec: &QuotaSpec, released: ReleasedPermit) {
        let is_urgent = spec.releases_are_urgent();
        let at_us = if is_urgent { now_us } else { now_us + micros_up(RELEASE_DELAY) };
        let freed = |(_, key): &&(u64, WaiterKey)| {
            let account = self.queue.get(key).and_then(|waiter| waiter.request.account);
            is_urgent && account.is_some() && account == released.account
        };
        let resumed: Vec<(u64, WaiterKey)> = self.deferred.iter().filter(freed).copied().collect();
        resumed.into_iter().for_each(|(until_us, key)| self.resume(until_us, key));
        self.release_at_us = Some(self.release_at_us.map_or(at_us, |known_us| known_us.min(at_us)));
        self.released.push(released);
    }

    fn resume(&mut self, until_us: u64, key: WaiterKey) {
        self.deferred.remove(&(until_us, key));
        self.ready.insert(key);
        if let Some(waiter) = self.queue.get_mut(&key) {
            waiter.deferred_until_us = None;
        }
    }

    pub fn join(
        &mut self,
        now_us: u64,
        request: SimulatedRequest,
        subjects: Option<&AccountSubjects>,
        cost_max: u32,
        decisions: &mut Vec<GateDecision>,
    ) {
        let cost_max = subjects.map_or(cost_max, |subjects| subjects.cost_max);
        // A quota that is closed now may open again, so the job waits.
        if cost_max > 0 && u32::from(request.cost) > cost_max {
            return decisions.push(GateDecision::Oversized(request.job));
        }
        self.joined += 1;
        let key = (u8::MAX - request.priority, self.joined);
        let earlier_us = self.longest_earlier_deferral(key, request.account);
        self.queue.insert(key, SimulatedWaiter { request, deferred_until_us: None });
        self.keys.insert(request.job, key);
        self.egress.set_waiting(now_us, self.queue.len());
        self.ready.insert(key);
        self.by_deadline.insert((request.wait_until_us, key));
        if let Some(until_us) = earlier_us {
            self.defer(now_us, key, until_us, decisions);
        } else if self.queue_block.is_some_and(|block| block.first.is_some_and(|first| key < first)) {
            self.queue_block = None;
            self.ask_at_us = now_us.max(self.replied_at_us + micros_up(RETRY_PAUSE_MIN));
        }
        self.expire_waiters(now_us, decisions);
    }

    /// Whether the job waits for the lane's egress.
    pub fn waits_for_egress(&self, now_us: u64, job: JobIndex) -> bool {
        self.keys.contains_key(&job) && self.egress.next_at(now_us) != Some(now_us)
    }

    /// Removes a job that waits no longer.
    pub fn abandon(&mut self, now_us: u64, job: JobIndex) {
        if let Some(key) = self.keys.get(&job).copied() {
            self.leave(now_us, key);
        }
    }

    /// Instant of the next call; `None`: none is due before another event.
    pub fn next_call_at(&self, now_us: u64) -> Option<u64> {
        if self.pending_call.is_some() {
            return None;
        }
        let ready_us =
            if self.ready.is_empty() { self.deferred.first().map(|(until_us, _)| *until_us) } else { Some(0) };
        let leaves_us = self.egress.next_at(now_us);
        let request_us =
            ready_us.zip(leaves_us).map(|(ready_us, leaves_us)| ready_us.max(leaves_us).max(self.ask_at_us));
        [request_us, self.release_at_us].into_iter().flatten().min()
    }

    /// Packs the next call.
    pub fn depart(&mut self, now_us: u64, account_subjects: &[Option<AccountSubjects>]) {
        self.calls += 1;
        while let Some((until_us, key)) = self.deferred.first().copied().filter(|(until_us, _)| *until_us <= now_us) {
            self.resume(until_us, key);
        }
        let rest = self.released.split_off(self.released.len().min(BATCH_MAX));
        let released = std::mem::replace(&mut self.released, rest);
        self.release_at_us = (!self.released.is_empty()).then_some(now_us);
        let (requests, keys) = self.head(now_us, account_subjects);
        let call = LimiterCall {
            incarnation: self.incarnation,
            number: self.calls,
            requests,
            releases: releases(&released, now_us, account_subjects),
            pause: None,
            rebuild: self.rebuild.take(),
            seeds: None,
            invalidate_epoch: None,
            run_id: "simulated".to_owned(),
        };
        self.pending_call = Some(SimulatedCall { call, departed_us: now_us, keys, reply: None });
    }

    /// The call reaches the limiter; `answer` makes its reply.
    pub fn reach(&mut self, answer: impl FnOnce(&LimiterCall) -> LimiterReply) {
        if let Some(pending) = &mut self.pending_call {
            pending.reply = Some(answer(&pending.call));
        }
    }

    /// The reply has arrived.
    pub fn replied(&mut self, now_us: u64, spec: &QuotaSpec, decisions: &mut Vec<GateDecision>) {
        let Some(SimulatedCall { call, departed_us, keys, reply: Some(reply) }) = self.pending_call.take() else {
            return;
        };
        self.queue_block = None;
        (self.ask_at_us, self.replied_at_us) = (now_us, now_us);
        let mut keys: Vec<_> = keys.into_iter().map(IntoIterator::into_iter).collect();
        let budget = spec.use_within();
        for grant in &reply.grants {
            let granted = SimulatedPermit {
                start_us: now_us + grant.wait_us,
                use_before_us: departed_us + grant.wait_us + micros_up(budget),
                call: call.number,
                origins: grant.origins.as_slice().into(),
            };
            let permits = usize::try_from(grant.permits).unwrap_or(usize::MAX);
            for key in keys.get_mut(grant.request_index).into_iter().flatten().take(permits) {
                if let Some(waiter) = self.leave(now_us, key) {
                    self.egress.take(now_us);
                    self.stalled_since_us = None;
                    decisions.push(GateDecision::Granted(waiter.request.job, granted.clone()));
                }
            }
        }
        for skipped in &reply.skipped {
            if let Some(keys) = keys.get_mut(skipped.request_index) {
                self.skip(now_us, spec, skipped, keys, decisions);
            }
        }
        if let Some(refused) = reply.refused.filter(|refused| refused.reason == RefusalReason::Cold) {
            self.block_cold(now_us, spec, refused.wait_us, reply.state_epoch);
        } else if let Some(refused) = reply.refused {
            let limited = matches!(refused.reason, RefusalReason::Limit { .. });
            let can_leave = self.egress.next_at(now_us) == Some(now_us);
            let first = self.ready.first().copied().filter(|_| limited && can_leave);
            if !self.evict_oversized(now_us, refused.wait_us, first, decisions) {
                self.block(now_us, refused.wait_us, refused.exact, first);
            }
        } else if self.queue_block.is_none() {
            self.stalled_since_us = None;
        }
        self.expire_waiters(now_us, decisions);
    }

    fn block(&mut self, now_us: u64, wait_us: u64, exact: bool, first: Option<WaiterKey>) {
        let until_us = now_us + wait_us;
        // Only an exact start can be booked.
        let ahead = if exact { RETRY_AHEAD } else { Duration::ZERO };
        self.ask_at_us = until_us.saturating_sub(micros_up(ahead)).max(now_us + micros_up(RETRY_PAUSE_MIN));
        self.queue_block = Some(SimulatedBlock { until_us, first });
    }

    /// Evicts the first waiter if its cost exceeds the free slots, others behind it cost less, and it will not wait
    /// long enough. All waiters of at least its cost and no more patience go with it. The others are requested at once.
    /// Returns whether any went.
    fn evict_oversized(
        &mut self,
        now_us: u64,
        wait_us: u64,
        first: Option<WaiterKey>,
        decisions: &mut Vec<GateDecision>,
    ) -> bool {
        let until_us = now_us + wait_us;
        let first = first.and_then(|first| self.queue.get(&first)).map(|waiter| waiter.request);
        let Some(SimulatedRequest { cost, .. }) =
            first.filter(|request| request.cost > 1 && !request.accepts(until_us, now_us, now_us))
        else {
            return false;
        };
        if !self.queue.values().any(|other| other.request.cost < cost && other.deferred_until_us.is_none()) {
            return false;
        }
        let impatient = self.by_deadline.iter().take_while(|(patience_us, _)| *patience_us < until_us);
        let as_much = |key: &WaiterKey| {
            let request = self.queue.get(key).map(|waiter| waiter.request);
            request.is_some_and(|request| request.cost >= cost && !request.accepts(until_us, now_us, now_us))
        };
        let keys: Vec<WaiterKey> = impatient.map(|(_, key)| *key).filter(as_much).collect();
        for key in keys {
            decisions.extend(self.leave(now_us, key).map(|waiter| refused(waiter.request.job, wait_us, true)));
        }
        self.ask_at_us = now_us + micros_up(RETRY_PAUSE_MIN);
        true
    }

    /// Blocks until no permit of a lost state can be used any more; then the ledger is read.
    fn block_cold(&mut self, now_us: u64, spec: &QuotaSpec, wait_us: u64, state_epoch: Micros) {
        let since_us = *self.cold_since_us.get_or_insert(now_us);
        let asked_us = since_us + micros_up(BOOKING_HORIZON + spec.send_budget);
        if now_us >= asked_us {
            self.rebuild = Some(unused(state_epoch));
        }
        self.block(now_us, wait_us.min(asked_us.saturating_sub(now_us)), false, None);
    }

    fn skip(
        &mut self,
        now_us: u64,
        spec: &QuotaSpec,
        skipped: &SkippedRequest,
        mut keys: impl Iterator<Item = WaiterKey>,
        decisions: &mut Vec<GateDecision>,
    ) {
        match spec.limits.get(skipped.limit) {
            Some(limit) if limit.scope != Scope::Provider => {
                let until_us = now_us + skipped.wait_us.max(micros_up(RETRY_PAUSE_MIN));
                keys.for_each(|key| self.defer(now_us, key, until_us, decisions));
            }
            // All calls here are charges, so a limit on charges alone blocks the queue like one on everything.
            _ if self.queue_block.is_none() => self.block(now_us, skipped.wait_us, skipped.exact, keys.next()),
            _ => {}
        }
    }

    /// Defers a waiter: it is not requested before earlier waiters of its account, and is refused if that takes too
    /// long.
    fn defer(&mut self, now_us: u64, key: WaiterKey, until_us: u64, decisions: &mut Vec<GateDecision>) {
        let Some(request) = self.queue.get(&key).map(|waiter| waiter.request) else { return };
        let until_us = until_us.max(self.longest_earlier_deferral(key, request.account).unwrap_or(0));
        if !request.accepts(until_us, now_us, now_us) {
            if let Some(waiter) = self.leave(now_us, key) {
                decisions.push(refused(waiter.request.job, until_us - now_us, true));
            }
            return;
        }
        self.ready.remove(&key);
        self.deferred.insert((until_us, key));
        if let Some(waiter) = self.queue.get_mut(&key) {
            waiter.deferred_until_us = Some(until_us);
        }
    }

    fn longest_earlier_deferral(&self, key: WaiterKey, account: Option<u32>) -> Option<u64> {
        let earlier = |(_, other): &&(u64, WaiterKey)| {
            *other < key && self.queue.get(other).is_some_and(|waiter| waiter.request.account == account)
        };
        account.and_then(|_| self.deferred.iter().rev().find(earlier)).map(|(until_us, _)| *until_us)
    }

    fn leave(&mut self, now_us: u64, key: WaiterKey) -> Option<SimulatedWaiter> {
        let waiter = self.queue.remove(&key)?;
        self.keys.remove(&waiter.request.job);
        self.egress.set_waiting(now_us, self.queue.len());
        self.ready.remove(&key);
        self.by_deadline.remove(&(waiter.request.wait_until_us, key));
        if let Some(until_us) = waiter.deferred_until_us {
            self.deferred.remove(&(until_us, key));
        }
        Some(waiter)
    }

    /// Refuses waiters that will not wait until the block ends.
    fn expire_waiters(&mut self, now_us: u64, decisions: &mut Vec<GateDecision>) {
        self.queue_block.take_if(|block| block.until_us <= now_us);
        let Some(SimulatedBlock { until_us, .. }) = self.queue_block else { return };
        let stalled_since_us = *self.stalled_since_us.get_or_insert(now_us);
        let impatient = self.by_deadline.iter().take_while(|(patience_us, _)| *patience_us < until_us);
        let accepts = |key: &WaiterKey| {
            self.queue.get(key).is_none_or(|waiter| waiter.request.accepts(until_us, stalled_since_us, now_us))
        };
        let keys: Vec<WaiterKey> = impatient.map(|(_, key)| *key).filter(|key| !accepts(key)).collect();
        for key in keys {
            decisions
                .extend(self.leave(now_us, key).map(|waiter| refused(waiter.request.job, until_us - now_us, false)));
        }
    }

    /// The first requests of the wait queue that may leave the lane; equal neighbours form one request.
    fn head(
        &self,
        now_us: u64,
        account_subjects: &[Option<AccountSubjects>],
    ) -> (Vec<PermitRequest>, Vec<Vec<WaiterKey>>) {
        let (mut requests, mut keys): (Vec<PermitRequest>, Vec<Vec<WaiterKey>>) = (Vec::new(), Vec::new());
        let mut last = None;
        for key in self.ready.iter().take(BATCH_MAX.min(self.egress.ready(now_us))) {
            let Some(SimulatedWaiter { request, .. }) = self.queue.get(key) else { continue };
            match (requests.last_mut(), keys.last_mut()) {
                (Some(group), Some(keys))
                    if last == Some((request.account, request.cost)) && group.permits < PERMITS_MAX =>
                {
                    group.permits += 1;
                    keys.push(*key);
                }
                _ => {
                    let subjects = subjects(request.account, account_subjects);
                    requests.push(PermitRequest { subjects, ..PermitRequest::charges(1, u32::from(request.cost)) });
                    keys.push(vec![*key]);
                }
            }
            last = Some((request.account, request.cost));
        }
        (requests, keys)
    }
}

fn refused(job: JobIndex, wait_us: u64, of_its_own: bool) -> GateDecision {
    GateDecision::Refused { job, wait_us: wait_us.max(1_000), of_its_own }
}
