//! The core of a lane's dispatcher: whether the lane is limited, and when how many jobs are claimed from its backlog.
//!
//! It reads no clock and does no I/O. The worker drives it with the ledger, and the simulation with the same order in
//! memory ([`crate::domain::fair_order`]). A driver asks for the next step, does it, and tells the result.
//!
//! It knows the flows of the lane that have jobs in the backlog, as far as this process has seen them. New jobs of such a
//! flow are recorded in the backlog, behind the earlier ones. The ledger has all flows, and this memory is bounded: a new
//! job of a flow that is missing here asks for a permit like any other.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

use super::claimed_ahead::{AHEAD_MIN, AheadBounds, ClaimedAhead};
use super::cost_waits::CostBound;
use super::permit_waits::PermitWaits;
use crate::domain::fair_order::FairClaim;
use crate::domain::job::{Flow, FlowClass};
use crate::domain::provider::JobOrder;
use crate::limiter::gate::GateView;

/// Time between two looks at the flows, while some are known. Other processes block and unblock them, too.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The same, while the lane has no backlog.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// A look takes at most this part of the time, however many flows there are.
const LOOK_TIME_DIVISOR: u32 = 20;
/// Least time after a claim that found nothing more, or that another process prevented. And least time between claims of
/// urgent jobs.
const CLAIM_PAUSE: Duration = Duration::from_millis(10);
/// Least time between two claims for few jobs, of which none is more urgent than those that are claimed.
const SMALL_CLAIM_PAUSE: Duration = Duration::from_millis(50);
/// Time between two checks of a full lane for jobs that have come to wait for their own accounts alone.
const FULL_CHECK: Duration = Duration::from_millis(100);
/// Longest time between two looks at a lane that must not send, and from a failed step to the next one.
pub const PAUSED_INTERVAL: Duration = Duration::from_secs(1);
/// Time after the end of a wait for a worker slot in which slots are expected to be short.
const SLOTS_SHORT: Duration = Duration::from_secs(60);
/// Most jobs of one claim.
const CLAIM_MAX: u32 = 100;
/// Jobs of a flow in a row.
const QUANTUM: u32 = 4;

/// What the driver does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DispatchStep<A> {
    /// Ends all blocks of the lane's flows.
    EndBlocks,
    /// Reads the lane's flows, and tells them with [`DispatchCore::looked`].
    Look,
    /// Claims, and tells the result with [`DispatchCore::claimed`] or [`DispatchCore::lane_was_busy`].
    Claim(FairClaim<A>),
    /// Asks again then, or when a method has returned that the driver is to be woken.
    Wait(Instant),
}

/// What the lane allows at this moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneFacts {
    pub bounds: AheadBounds,
    /// Until when the lane sends no charge; `None`: it may.
    pub paused_until: Option<Instant>,
    /// Meanwhile it sends look-ups.
    pub sends_lookups: bool,
    /// A worker slot and a turn by the egress rate are free.
    pub can_start: bool,
    pub order: JobOrder,
    /// Too few slots are free for costlier jobs; `None`: for none.
    pub cost_bound: Option<CostBound>,
}

/// The state of one lane's dispatcher in one process. `A` names accounts, and `J` jobs.
#[derive(Debug)]
pub(crate) struct DispatchCore<A, J> {
    /// The waits of the lane's charges for their permits.
    pub waits: PermitWaits<J>,
    flows: KnownFlows<A>,
    ahead: ClaimedAhead<A>,
    /// The last claim of all classes got as many jobs as it asked for: more may wait.
    has_more: bool,
    ends_blocks: bool,
    look_at: Instant,
    /// When it claimed last.
    claimed_at: Instant,
    /// A block ends.
    wake_at: Option<Instant>,
    /// Nothing is claimed before.
    not_before: Option<Instant>,
    /// Nothing is claimed before, unless a worker slot is free.
    no_slot_until: Option<Instant>,
    /// Until then few jobs are claimed ahead: most of more would return without a slot.
    slots_short_until: Option<Instant>,
    /// Nothing at all is done before: a step has failed.
    retry_at: Option<Instant>,
    /// A flow that is not blocked may have jobs.
    is_claimable: bool,
}

impl<A: Clone + Eq + Hash, J: Eq + Hash> DispatchCore<A, J> {
    pub fn new(now: Instant) -> Self {
        Self {
            waits: PermitWaits::default(),
            flows: KnownFlows::default(),
            ahead: ClaimedAhead::default(),
            has_more: false,
            ends_blocks: false,
            look_at: now,
            claimed_at: now,
            wake_at: None,
            not_before: None,
            no_slot_until: None,
            slots_short_until: None,
            retry_at: None,
            is_claimable: false,
        }
    }

    /// Whether jobs of this flow wait, as far as this process knows.
    pub fn knows(&self, flow: &Flow<A>) -> bool {
        self.flows.contains(flow)
    }

    /// Whether no flow has jobs, as far as this process knows.
    pub fn is_idle(&self) -> bool {
        self.flows.is_empty()
    }

    /// Whether a limit of the provider or the worker slots hold the lane back, so that new jobs wait in the ledger.
    /// `startable_soon`: jobs that its limits let it start soon. `by_slots`: as [`PermitWaits::are_long`] has it.
    pub fn is_limited(
        &self,
        now: Instant,
        startable_soon: impl FnOnce() -> u32,
        gate: &GateView,
        by_slots: impl Fn() -> bool,
    ) -> bool {
        self.has_more || self.waits.are_long(now, startable_soon, gate, by_slots)
    }

    /// A new job has entered the backlog. Returns whether the driver is to be woken.
    pub fn record_new(&mut self, flow: &Flow<A>, now: Instant) -> bool {
        let is_free = self.flows.record_new(flow, now);
        self.is_claimable |= is_free;
        is_free
    }

    /// Another process may have recorded jobs. Returns whether the driver is to be woken: while flows are known, looks come
    /// soon enough.
    pub fn record_news(&mut self, now: Instant) -> bool {
        let is_idle = self.is_idle();
        if is_idle {
            self.look_at = now;
        }
        is_idle
    }

    /// A job has returned, and its flow may be blocked until then. The driver is to be woken.
    pub fn record_return(&mut self, flow: Flow<A>, blocked_until: Option<Instant>, now: Instant) {
        self.flows.record_return(flow, blocked_until, now);
        match blocked_until {
            Some(until) => self.wake_by(until),
            None => self.is_claimable = true,
        }
    }

    /// A job may be claimed that could not be before. The driver is to be woken.
    pub fn allow_claim(&mut self) {
        self.is_claimable = true;
    }

    /// All blocks are to end: the lane's row has changed, which may have fixed their cause. The driver is to be woken.
    pub fn end_blocks(&mut self) {
        self.ends_blocks = true;
    }

    /// Claims nothing before this instant: the lane cannot send.
    pub fn hold_until(&mut self, until: Instant) {
        self.not_before = self.not_before.max(Some(until));
    }

    /// A job got no worker slot in time: claims nothing before this instant, unless a slot becomes free.
    pub fn await_slot(&mut self, until: Instant) {
        self.no_slot_until = Some(until);
        self.slots_short_until = until.checked_add(SLOTS_SHORT);
    }

    /// A worker slot is free. Returns whether the driver is to be woken.
    pub fn slot_is_free(&mut self) -> bool {
        self.no_slot_until.take().is_some()
    }

    /// A claimed job waits for its permit no longer. Returns whether the driver is to be woken.
    pub fn release_ahead(&mut self, flow: &Flow<A>) -> bool {
        let has_room = self.ahead.remove(flow);
        self.is_claimable |= has_room;
        has_room
    }

    /// The next step. `facts` are read only if a claim is due.
    pub fn next_step(&mut self, now: Instant, facts: impl FnOnce() -> LaneFacts) -> DispatchStep<A> {
        if let Some(at) = self.retry_at.filter(|at| *at > now) {
            return DispatchStep::Wait(at);
        }
        if std::mem::take(&mut self.ends_blocks) {
            self.look_at = now;
            return DispatchStep::EndBlocks;
        }
        if self.look_at <= now {
            self.look_at = now + REFRESH_INTERVAL;
            return DispatchStep::Look;
        }
        if !self.is_claimable && self.wake_at.is_none_or(|wake_at| wake_at > now) {
            return DispatchStep::Wait(self.wake_at.map_or(self.look_at, |wake_at| wake_at.min(self.look_at)));
        }
        let LaneFacts { mut bounds, paused_until, sends_lookups, can_start, order, cost_bound } = facts();
        let no_slot_until = self.no_slot_until.filter(|_| !can_start);
        let paused_until = paused_until.filter(|at| *at > now);
        let first_class = self.flows.first_class(now);
        let lookups_only = paused_until.is_some() && sends_lookups && first_class == Some(FlowClass::UNKNOWN);
        let held_until = self.not_before.max(no_slot_until).max(paused_until.filter(|_| !lookups_only));
        if let Some(at) = held_until.filter(|at| *at > now) {
            return DispatchStep::Wait(at.min(now + PAUSED_INTERVAL));
        }
        if self.slots_short_until.is_some_and(|until| until > now) {
            bounds.all = bounds.all.min((bounds.all / 4).max(AHEAD_MIN));
        }
        let mut room = self.ahead.room_within(bounds, first_class);
        if lookups_only {
            room.class_max = FlowClass::UNKNOWN;
        }
        if room.jobs == 0 {
            // A claimed job may come to wait for its own account alone, without a word from the gate.
            let check_at = if bounds.grow() { now + FULL_CHECK } else { self.look_at };
            return DispatchStep::Wait(check_at.min(self.look_at));
        }
        let small_claim_at = self.claimed_at + if room.is_urgent { CLAIM_PAUSE } else { SMALL_CLAIM_PAUSE };
        if !room.is_worth_a_claim && small_claim_at > now {
            return DispatchStep::Wait(small_claim_at.min(self.look_at));
        }
        self.claimed_at = now;
        // What happens during the claim sets them again.
        self.wake_at = [cost_bound.map(|bound| bound.until), paused_until].into_iter().flatten().min();
        self.is_claimable = false;
        DispatchStep::Claim(FairClaim {
            at_most: room.jobs.min(CLAIM_MAX),
            quantum: QUANTUM,
            flow_max: bounds.of_one_flow,
            except: room.full_flows,
            class_max: room.class_max,
            cost_below: cost_bound.map(|bound| bound.below),
            order,
        })
    }

    /// A look that began at `began` has found these flows with jobs.
    pub fn looked(&mut self, began: Instant, flows: Vec<SeenFlow<A>>, now: Instant) {
        let blocked_for = flows.iter().filter_map(|seen| seen.blocked_for);
        if let Some(at) = blocked_for.min().and_then(|left| began.checked_add(left)) {
            self.wake_by(at);
        }
        self.is_claimable |= flows.iter().any(|seen| seen.blocked_for.is_none_or(|left| left.is_zero()));
        self.flows.refresh(began, flows);
        let interval = if self.flows.is_empty() { IDLE_INTERVAL } else { REFRESH_INTERVAL };
        self.look_at = now + interval.max(now.saturating_duration_since(began) * LOOK_TIME_DIVISOR);
    }

    /// A claim has taken jobs of these flows, which now wait for their permits. The next block ends at `wake_at`.
    pub fn claimed(
        &mut self,
        claim: &FairClaim<A>,
        flows: impl ExactSizeIterator<Item = Flow<A>>,
        wake_at: Option<Instant>,
        now: Instant,
    ) {
        let (is_empty, is_bounded) = (flows.len() == 0, claim.cost_below.is_some());
        let has_more = u32::try_from(flows.len()).is_ok_and(|jobs| jobs == claim.at_most);
        let mut of_flow = HashMap::<Flow<A>, u32>::new();
        for flow in flows {
            *of_flow.entry(flow.clone()).or_default() += 1;
            self.ahead.add(flow);
        }
        if !has_more && !is_bounded && claim.order == JobOrder::None {
            self.flows.forget_drained(claim, &of_flow, self.claimed_at, now);
        }
        if claim.class_max == FlowClass::LAST {
            self.has_more = has_more;
        }
        wake_at.into_iter().for_each(|at| self.wake_by(at));
        self.is_claimable |= has_more;
        // Costly jobs that are left out have had their parts of it.
        self.is_claimable |= is_bounded && !is_empty;
        if !has_more {
            // One that finds no cheap job has read the costly ones of all flows.
            let took = now.saturating_duration_since(self.claimed_at);
            let read = if is_bounded && is_empty { took * LOOK_TIME_DIVISOR } else { Duration::ZERO };
            self.hold_until(now + read.max(CLAIM_PAUSE));
        }
    }

    /// Another process claimed from the lane at that moment. `random` is 0 to 1, so that two do not meet again.
    pub fn lane_was_busy(&mut self, random: f64, now: Instant) {
        self.is_claimable = true;
        self.hold_until(now + CLAIM_PAUSE.mul_f64(0.5 + random));
    }

    /// A step has failed; it is repeated after a pause.
    pub fn failed(&mut self, step: &DispatchStep<A>, now: Instant) {
        match step {
            DispatchStep::EndBlocks => self.ends_blocks = true,
            DispatchStep::Look => self.look_at = now,
            DispatchStep::Claim(_) => self.is_claimable = true,
            DispatchStep::Wait(_) => {}
        }
        self.retry_at = Some(now + PAUSED_INTERVAL);
    }

    fn wake_by(&mut self, at: Instant) {
        self.wake_at = [self.wake_at, Some(at)].into_iter().flatten().min();
    }
}

/// Most flows that are known here: the memory of a few hundred jobs.
pub const KNOWN_FLOWS_MAX: u32 = 1_000;

/// A flow with jobs in the backlog, as the ledger had it at one instant.
#[derive(Clone, Debug)]
pub struct SeenFlow<A> {
    pub flow: Flow<A>,
    /// Time until its block ends; `None`: it has no block.
    pub blocked_for: Option<Duration>,
}

#[derive(Debug)]
pub struct KnownFlows<A>(HashMap<Flow<A>, KnownFlow>);

#[derive(Clone, Copy, Debug)]
struct KnownFlow {
    /// When a job last entered it, or when the ledger was last read.
    seen_at: Instant,
    blocked_until: Option<Instant>,
}

impl KnownFlow {
    fn is_free(&self, now: Instant) -> bool {
        self.blocked_until.is_none_or(|until| until <= now)
    }
}

impl<A> Default for KnownFlows<A> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<A: Clone + Eq + Hash> KnownFlows<A> {
    /// Whether jobs of this flow wait; for how long it is blocked does not matter.
    pub fn contains(&self, flow: &Flow<A>) -> bool {
        self.0.contains_key(flow)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that a job has entered the flow. Returns whether a dispatcher may claim it now.
    pub fn record_new(&mut self, flow: &Flow<A>, now: Instant) -> bool {
        match self.0.get_mut(flow) {
            Some(known) => {
                known.seen_at = now;
                known.is_free(now)
            }
            None => {
                if self.0.len() < KNOWN_FLOWS_MAX as usize {
                    self.0.insert(flow.clone(), KnownFlow { seen_at: now, blocked_until: None });
                }
                true
            }
        }
    }

    /// The most urgent class of the flows that are not blocked.
    pub fn first_class(&self, now: Instant) -> Option<FlowClass> {
        self.0.iter().filter(|(_, known)| known.is_free(now)).map(|(flow, _)| flow.class).min()
    }

    /// Records that a job has returned to the flow, which is blocked until then.
    pub fn record_return(&mut self, flow: Flow<A>, blocked_until: Option<Instant>, now: Instant) {
        if self.0.len() >= KNOWN_FLOWS_MAX as usize && !self.0.contains_key(&flow) {
            return;
        }
        let blocked_until = blocked_until.max(self.0.get(&flow).and_then(|known| known.blocked_until));
        self.0.insert(flow, KnownFlow { seen_at: now, blocked_until });
    }

    /// Forgets the flows of which a claim that began at `began` has left no job: new jobs of these wait for none.
    pub fn forget_drained(
        &mut self,
        claim: &FairClaim<A>,
        claimed: &HashMap<Flow<A>, u32>,
        began: Instant,
        now: Instant,
    ) {
        let may_have_more = |flow: &Flow<A>| {
            flow.class > claim.class_max
                || claim.except.contains(flow)
                || claimed.get(flow).is_some_and(|jobs| *jobs >= claim.flow_max)
        };
        self.0.retain(|flow, known| !known.is_free(now) || known.seen_at >= began || may_have_more(flow));
    }

    /// Replaces what was known before `read_at` by the flows that the ledger had then.
    pub fn refresh(&mut self, read_at: Instant, flows: Vec<SeenFlow<A>>) {
        self.0.retain(|_, known| known.seen_at >= read_at);
        for SeenFlow { flow, blocked_for } in flows {
            let blocked_until = blocked_for.and_then(|left| read_at.checked_add(left));
            self.0.entry(flow).or_insert(KnownFlow { seen_at: read_at, blocked_until });
        }
    }
}

#[cfg(test)]
mod claim_tests;
#[cfg(test)]
mod tests;
