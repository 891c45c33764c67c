//! The gate of one process in virtual time: the line, and at most one call to the limiter in flight.
//!
//! The rules are those of `limiter::gate`, with its constants. Refuses to grant: the limiter's own state machine does.
//! Clocks agree here, so that comparing them costs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::event::JobIndex;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{
    BATCH_MAX, CallKind, CostByKind, LimiterCall, LimiterReply, PERMITS_MAX, PermitRelease, PermitRequest, RebuildData,
    RefusalReason, ReleaseKind, SkippedRequest, SlotInstant, Subject,
};
use crate::domain::permit_release::{self, EndedPermit};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::{RELEASE_DELAY, RETRY_AHEAD, RETRY_PAUSE_MIN};

/// What one account's calls are counted by: the subjects, and the largest cost that they can ever admit.
#[derive(Clone, Debug)]
pub(super) struct AccountSubjects {
    pub subjects: Vec<Subject>,
    pub cost_max: u32,
}

/// Place in line: higher priority first, then first come.
type WaiterKey = (u8, u64);

/// Somebody who wants a permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedRequest {
    pub job: JobIndex,
    pub cost: u16,
    pub priority: u8,
    pub account: Option<u32>,
    pub wait_until_us: u64,
}

#[derive(Debug)]
struct SimulatedWaiter {
    wish: SimulatedRequest,
    deferred_until_us: Option<u64>,
}

/// A permit, as it was granted.
#[derive(Clone, Debug)]
pub(super) struct SimulatedPermit {
    pub start_us: u64,
    pub use_before_us: u64,
    pub call: u64,
    pub origins: Rc<[SlotInstant]>,
}

/// What a wish came to.
#[derive(Debug)]
pub(super) enum GateDecision {
    Granted(JobIndex, SimulatedPermit),
    Refused {
        job: JobIndex,
        wait_us: u64,
        of_its_own: bool,
    },
    /// No window can ever admit its cost.
    Oversized(JobIndex),
}

/// Why the line stands, and whose wait it is.
#[derive(Clone, Copy, Debug)]
struct SimulatedBlock {
    until_us: u64,
    first: Option<WaiterKey>,
}

/// What a permit came to.
#[derive(Debug)]
pub(super) struct ReleasedPermit {
    pub call: u64,
    pub cost: u16,
    pub account: Option<u32>,
    pub release: SimulatedRelease,
}

#[derive(Debug)]
pub(super) enum SimulatedRelease {
    Answered { at_us: u64 },
    NotSent { origins: Rc<[SlotInstant]> },
}

#[derive(Debug)]
struct SimulatedCall {
    call: LimiterCall,
    departed_us: u64,
    /// The places of each want.
    places: Vec<Vec<WaiterKey>>,
    reply: Option<LimiterReply>,
}

#[derive(Debug)]
pub(super) struct SimulatedGate {
    incarnation: u64,
    pub calls: u64,
    come: u64,
    line: BTreeMap<WaiterKey, SimulatedWaiter>,
    ready: BTreeSet<WaiterKey>,
    /// By the instant at which they may be asked for again.
    deferred: BTreeSet<(u64, WaiterKey)>,
    by_deadline: BTreeSet<(u64, WaiterKey)>,
    settled: Vec<ReleasedPermit>,
    settle_at_us: Option<u64>,
    queue_block: Option<SimulatedBlock>,
    ask_at_us: u64,
    replied_at_us: u64,
    outgoing: Option<SimulatedCall>,
    /// Since when the limiter has been known to have no memory.
    cold_since_us: Option<u64>,
    /// What the ledger knows of a past that there was not.
    rebuild: Option<RebuildData>,
    /// For when its next wake-up is on the agenda.
    pub woken_at_us: Option<u64>,
}

impl SimulatedGate {
    pub fn new(incarnation: u64, now_us: u64) -> Self {
        Self {
            incarnation,
            calls: 0,
            come: 0,
            line: BTreeMap::new(),
            ready: BTreeSet::new(),
            deferred: BTreeSet::new(),
            by_deadline: BTreeSet::new(),
            settled: Vec::new(),
            settle_at_us: None,
            queue_block: None,
            ask_at_us: now_us,
            replied_at_us: now_us,
            outgoing: None,
            cold_since_us: None,
            rebuild: None,
            woken_at_us: None,
        }
    }

    pub fn release(&mut self, now_us: u64, settled: ReleasedPermit) {
        self.settled.push(settled);
        self.settle_at_us.get_or_insert(now_us + micros_up(RELEASE_DELAY));
    }

    pub fn join(
        &mut self,
        now_us: u64,
        wish: SimulatedRequest,
        of: Option<&AccountSubjects>,
        cost_max: u32,
        verdicts: &mut Vec<GateDecision>,
    ) {
        let cost_max = of.map_or(cost_max, |of| of.cost_max);
        // A quota that is closed for now is waited for.
        if cost_max > 0 && u32::from(wish.cost) > cost_max {
            return verdicts.push(GateDecision::Oversized(wish.job));
        }
        self.come += 1;
        let place = (u8::MAX - wish.priority, self.come);
        let elder_us = self.longest_earlier_deferral(place, wish.account);
        self.line.insert(place, SimulatedWaiter { wish, deferred_until_us: None });
        self.ready.insert(place);
        self.by_deadline.insert((wish.wait_until_us, place));
        if let Some(until_us) = elder_us {
            self.defer(now_us, place, until_us, verdicts);
        } else if self.queue_block.is_some_and(|standing| standing.first.is_some_and(|first| place < first)) {
            self.queue_block = None;
            self.ask_at_us = now_us.max(self.replied_at_us + micros_up(RETRY_PAUSE_MIN));
        }
        self.expire_waiters(now_us, verdicts);
    }

    /// When the next call is worth making; `None`: not before something happens.
    pub fn next_call_at(&self) -> Option<u64> {
        if self.outgoing.is_some() {
            return None;
        }
        let ready_us =
            if self.ready.is_empty() { self.deferred.first().map(|(until_us, _)| *until_us) } else { Some(0) };
        let wants = ready_us.map(|ready_us| ready_us.max(self.ask_at_us));
        [wants, self.settle_at_us].into_iter().flatten().min()
    }

    /// Packs the next call.
    pub fn depart(&mut self, now_us: u64, of_account: &[Option<AccountSubjects>]) {
        self.calls += 1;
        while let Some((until_us, place)) = self.deferred.first().copied().filter(|(until_us, _)| *until_us <= now_us) {
            self.deferred.remove(&(until_us, place));
            self.ready.insert(place);
            if let Some(waiter) = self.line.get_mut(&place) {
                waiter.deferred_until_us = None;
            }
        }
        let rest = self.settled.split_off(self.settled.len().min(BATCH_MAX));
        let settled = std::mem::replace(&mut self.settled, rest);
        self.settle_at_us = (!self.settled.is_empty()).then_some(now_us);
        let (wants, places) = self.head(of_account);
        let call = LimiterCall {
            incarnation: self.incarnation,
            number: self.calls,
            requests: wants,
            releases: releases(&settled, now_us, of_account),
            pause: None,
            rebuild: self.rebuild.take(),
            seeds: None,
            invalidate_epoch: None,
            run_id: "simulated".to_owned(),
        };
        self.outgoing = Some(SimulatedCall { call, departed_us: now_us, places, reply: None });
    }

    /// The call as it reaches the limiter; `answer` makes its reply.
    pub fn reach(&mut self, answer: impl FnOnce(&LimiterCall) -> LimiterReply) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.reply = Some(answer(&outgoing.call));
        }
    }

    /// The reply has arrived.
    pub fn replied(&mut self, now_us: u64, spec: &QuotaSpec, verdicts: &mut Vec<GateDecision>) {
        let Some(SimulatedCall { call, departed_us, places, reply: Some(reply) }) = self.outgoing.take() else {
            return;
        };
        self.queue_block = None;
        (self.ask_at_us, self.replied_at_us) = (now_us, now_us);
        let mut places: Vec<_> = places.into_iter().map(IntoIterator::into_iter).collect();
        let budget = spec.use_within();
        for run in &reply.grants {
            let granted = SimulatedPermit {
                start_us: now_us + run.wait_us,
                use_before_us: departed_us + run.wait_us + micros_up(budget),
                call: call.number,
                origins: run.origins.as_slice().into(),
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            for place in places.get_mut(run.request_index).into_iter().flatten().take(permits) {
                if let Some(waiter) = self.leave(place) {
                    verdicts.push(GateDecision::Granted(waiter.wish.job, granted.clone()));
                }
            }
        }
        for passed in &reply.skipped {
            if let Some(places) = places.get_mut(passed.request_index) {
                self.skip(now_us, spec, passed, places, verdicts);
            }
        }
        if let Some(refused) = reply.refused.filter(|refused| refused.reason == RefusalReason::Cold) {
            self.block_cold(now_us, spec, refused.wait_us, reply.state_epoch);
        } else if let Some(refused) = reply.refused {
            let limited = matches!(refused.reason, RefusalReason::Limit { .. });
            let first = self.ready.first().copied().filter(|_| limited);
            if !self.evict_oversized(now_us, refused.wait_us, first, verdicts) {
                self.block(now_us, refused.wait_us, refused.exact, first);
            }
        }
        self.expire_waiters(now_us, verdicts);
    }

    fn block(&mut self, now_us: u64, wait_us: u64, exact: bool, first: Option<WaiterKey>) {
        let until_us = now_us + wait_us;
        // Only an exact start can be booked.
        let ahead = if exact { RETRY_AHEAD } else { Duration::ZERO };
        self.ask_at_us = until_us.saturating_sub(micros_up(ahead)).max(now_us + micros_up(RETRY_PAUSE_MIN));
        self.queue_block = Some(SimulatedBlock { until_us, first });
    }

    /// Whether the first wants more than somebody behind it, more than there is, and will not wait for it: it goes, with all who
    /// want as much and are no more patient, and those behind are asked for at once.
    fn evict_oversized(
        &mut self,
        now_us: u64,
        wait_us: u64,
        first: Option<WaiterKey>,
        verdicts: &mut Vec<GateDecision>,
    ) -> bool {
        let until_us = now_us + wait_us;
        let first = first.and_then(|first| self.line.get(&first)).map(|waiter| waiter.wish);
        let Some(SimulatedRequest { cost, .. }) = first.filter(|it| it.cost > 1 && it.wait_until_us < until_us) else {
            return false;
        };
        if !self.line.values().any(|other| other.wish.cost < cost && other.deferred_until_us.is_none()) {
            return false;
        }
        let impatient = self.by_deadline.iter().take_while(|(patience_us, _)| *patience_us < until_us);
        let as_much = |place: &WaiterKey| self.line.get(place).is_some_and(|waiter| waiter.wish.cost >= cost);
        let places: Vec<WaiterKey> = impatient.map(|(_, place)| *place).filter(as_much).collect();
        for place in places {
            verdicts.extend(self.leave(place).map(|waiter| refused(waiter.wish.job, wait_us, true)));
        }
        self.ask_at_us = now_us + micros_up(RETRY_PAUSE_MIN);
        true
    }

    /// Until no permit of a lost state can be in hands any more; then the ledger is asked.
    fn block_cold(&mut self, now_us: u64, spec: &QuotaSpec, wait_us: u64, born: Micros) {
        let since_us = *self.cold_since_us.get_or_insert(now_us);
        let asked_us = since_us + micros_up(BOOKING_HORIZON + spec.send_budget);
        if now_us >= asked_us {
            self.rebuild = Some(unused(born));
        }
        self.block(now_us, wait_us.min(asked_us.saturating_sub(now_us)), false, None);
    }

    fn skip(
        &mut self,
        now_us: u64,
        spec: &QuotaSpec,
        passed: &SkippedRequest,
        mut places: impl Iterator<Item = WaiterKey>,
        verdicts: &mut Vec<GateDecision>,
    ) {
        match spec.limits.get(passed.limit) {
            Some(limit) if limit.scope != Scope::Provider => {
                let until_us = now_us + passed.wait_us.max(micros_up(RETRY_PAUSE_MIN));
                places.for_each(|place| self.defer(now_us, place, until_us, verdicts));
            }
            // All calls here are charges: a limit on charges alone holds the line like one on everything.
            _ if self.queue_block.is_none() => self.block(now_us, passed.wait_us, passed.exact, places.next()),
            _ => {}
        }
    }

    /// Not asked for before those of its account who came earlier; refused if that takes too long.
    fn defer(&mut self, now_us: u64, place: WaiterKey, until_us: u64, verdicts: &mut Vec<GateDecision>) {
        let Some(SimulatedRequest { account, wait_until_us, .. }) = self.line.get(&place).map(|waiter| waiter.wish)
        else {
            return;
        };
        let until_us = until_us.max(self.longest_earlier_deferral(place, account).unwrap_or(0));
        if wait_until_us < until_us {
            if let Some(waiter) = self.leave(place) {
                verdicts.push(refused(waiter.wish.job, until_us - now_us, true));
            }
            return;
        }
        self.ready.remove(&place);
        self.deferred.insert((until_us, place));
        if let Some(waiter) = self.line.get_mut(&place) {
            waiter.deferred_until_us = Some(until_us);
        }
    }

    fn longest_earlier_deferral(&self, place: WaiterKey, account: Option<u32>) -> Option<u64> {
        let elder = |(_, other): &&(u64, WaiterKey)| {
            *other < place && self.line.get(other).is_some_and(|it| it.wish.account == account)
        };
        account.and_then(|_| self.deferred.iter().rev().find(elder)).map(|(until_us, _)| *until_us)
    }

    fn leave(&mut self, place: WaiterKey) -> Option<SimulatedWaiter> {
        let waiter = self.line.remove(&place)?;
        self.ready.remove(&place);
        self.by_deadline.remove(&(waiter.wish.wait_until_us, place));
        if let Some(until_us) = waiter.deferred_until_us {
            self.deferred.remove(&(until_us, place));
        }
        Some(waiter)
    }

    /// Sends away whoever will not wait as long as the line stands.
    fn expire_waiters(&mut self, now_us: u64, verdicts: &mut Vec<GateDecision>) {
        self.queue_block.take_if(|standing| standing.until_us <= now_us);
        let Some(SimulatedBlock { until_us, .. }) = self.queue_block else { return };
        while let Some((_, place)) =
            self.by_deadline.first().copied().filter(|(patience_us, _)| *patience_us < until_us)
        {
            let Some(waiter) = self.leave(place) else { break };
            verdicts.push(refused(waiter.wish.job, until_us - now_us, false));
        }
    }

    /// The first in line, neighbours who want the same together.
    fn head(&self, of_account: &[Option<AccountSubjects>]) -> (Vec<PermitRequest>, Vec<Vec<WaiterKey>>) {
        let (mut wants, mut places): (Vec<PermitRequest>, Vec<Vec<WaiterKey>>) = (Vec::new(), Vec::new());
        let mut last = None;
        for place in self.ready.iter().take(BATCH_MAX) {
            let Some(SimulatedWaiter { wish, .. }) = self.line.get(place) else { continue };
            match (wants.last_mut(), places.last_mut()) {
                (Some(want), Some(places)) if last == Some((wish.account, wish.cost)) && want.permits < PERMITS_MAX => {
                    want.permits += 1;
                    places.push(*place);
                }
                _ => {
                    let subjects = subjects(wish.account, of_account);
                    wants.push(PermitRequest { subjects, ..PermitRequest::charges(1, u32::from(wish.cost)) });
                    places.push(vec![*place]);
                }
            }
            last = Some((wish.account, wish.cost));
        }
        (wants, places)
    }
}

/// A first call, by which a limiter knows that nothing was used before.
pub(super) fn warm_up_call(now_us: u64) -> LimiterCall {
    LimiterCall {
        incarnation: u64::from(u32::MAX),
        number: 1,
        requests: Vec::new(),
        releases: Vec::new(),
        pause: None,
        rebuild: Some(unused(Micros(now_us))),
        seeds: None,
        invalidate_epoch: None,
        run_id: "simulated".to_owned(),
    }
}

fn unused(born: Micros) -> RebuildData {
    RebuildData { state_epoch: born, ended: Vec::new(), in_flight: CostByKind::default() }
}

fn refused(job: JobIndex, wait_us: u64, of_its_own: bool) -> GateDecision {
    GateDecision::Refused { job, wait_us: wait_us.max(1_000), of_its_own }
}

fn subjects(account: Option<u32>, of_account: &[Option<AccountSubjects>]) -> Vec<Subject> {
    let index = account.and_then(|account| usize::try_from(account).ok());
    index.and_then(|index| of_account.get(index)?.as_ref()).map_or_else(Vec::new, |of| of.subjects.clone())
}

fn releases(settled: &[ReleasedPermit], now_us: u64, of_account: &[Option<AccountSubjects>]) -> Vec<PermitRelease> {
    let ended = settled.iter().map(|one| {
        let fate = match &one.release {
            SimulatedRelease::Answered { at_us } => {
                ReleaseKind::Used { age: Duration::from_micros(now_us.saturating_sub(*at_us)) }
            }
            SimulatedRelease::NotSent { origins } => ReleaseKind::Unused { origins: origins.to_vec() },
        };
        EndedPermit { call: one.call, holder: one.account, cost: u32::from(one.cost), release_kind: fate }
    });
    permit_release::group_releases(ended, |account| (CallKind::Charge, subjects(*account, of_account)))
}
