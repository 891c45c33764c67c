//! Worker process in virtual time: its prefetch, its pauses, its gate, and the dispatcher of its lane.
//!
//! The rules are those of `worker::lane`; dispatcher and gate's core ([`crate::limiter::gate::core`]) are those of
//! production. The simulation advances the time, and carries the core's calls to the limiter's state machine and back,
//! as `limiter::gate::dispatcher` does in a worker. The ledger of a simulation knows no earlier uses.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_comparison::AttestationCheck;
use crate::domain::permit_protocol::{CostByKind, LimiterCall, LimiterReply, RebuildData};
use crate::domain::persist_window::MissStreak;
use crate::domain::provider::{BOOKING_HORIZON, JobOrder, Provider};
use crate::domain::quota::Quota;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::core::{Decision, GateCore, RebuildStep, StoreFacts, Ticket};
use crate::limiter::gate::{BlockReason, GateRefusal, GateView, LaneEgress, PendingCall, PendingRelease, PermitWaiter};
use crate::worker::backlog::claimed_ahead::{AheadBounds, startable_soon};
use crate::worker::backlog::core::{DispatchCore, DispatchStep, LaneFacts};
use crate::worker::backlog::cost_waits::{CostWait, CostWaits};
use crate::worker::intake_bound::IntakeBound;
use crate::worker::job::acquire::cost_wait;
use crate::worker::lane::{RESUME_AHEAD, prefetch};

/// Index of a job among the arrivals.
pub type JobIndex = usize;

/// Index of a worker process.
pub type ProcessIndex = usize;

/// Run id of the simulated store.
const RUN_ID: &str = "simulated";
/// Calls of a gate before its first request.
const WARM_UP_CALLS: u32 = 2;

/// The virtual clock of a run: microseconds on the limiter's clock, and the same instants as the gate's core counts them.
/// The core computes with differences of instants alone, so any instant can be the origin.
#[derive(Clone, Copy, Debug)]
pub struct VirtualClock {
    start_us: u64,
    origin: Instant,
}

impl VirtualClock {
    pub fn new(start_us: u64) -> Self {
        Self { start_us, origin: Instant::now() }
    }

    pub fn instant(&self, at_us: u64) -> Instant {
        self.origin + Duration::from_micros(at_us.saturating_sub(self.start_us))
    }

    /// The first whole microsecond at or after this instant.
    pub fn micros(&self, at: Instant) -> u64 {
        self.start_us + micros_up(at.saturating_duration_since(self.origin))
    }
}

impl Ticket for JobIndex {
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// What the core is told after its call in flight, as a worker's gate reads its inbox then.
#[derive(Debug)]
enum Message {
    Join(PermitWaiter<JobIndex>),
    Release(PendingRelease),
}

#[derive(Debug)]
struct CallInFlight {
    outgoing: PendingCall,
    reply: Option<LimiterReply>,
}

#[derive(Debug)]
pub struct GateDriver {
    clock: VirtualClock,
    core: GateCore<JobIndex>,
    egress: Arc<LaneEgress>,
    inbox: Vec<Message>,
    call_in_flight: Option<CallInFlight>,
    /// Instants of the scheduled wake-ups, the earliest last.
    wakes_us: Vec<u64>,
    pub calls: u64,
}

impl GateDriver {
    pub fn new(clock: VirtualClock, incarnation: u64, spec: &Arc<QuotaSpec>, provider: &Provider, now_us: u64) -> Self {
        let now = clock.instant(now_us);
        Self {
            clock,
            core: GateCore::new(incarnation, Arc::clone(spec), now),
            egress: LaneEgress::starting_at(provider.workers, provider.egress_per_second(), now),
            inbox: Vec::new(),
            call_in_flight: None,
            wakes_us: Vec::new(),
            calls: 0,
        }
    }

    pub fn egress(&self) -> &Arc<LaneEgress> {
        &self.egress
    }

    /// Makes the calls of a process that started before the run, in no time.
    pub fn warm_up(&mut self, quota: &mut Quota, now_us: u64) {
        for _ in 0..WARM_UP_CALLS {
            let outgoing = self.core.prepare_call(RUN_ID, self.clock.instant(now_us));
            let reply = quota.call(Micros(now_us), &outgoing.spec, &outgoing.call);
            self.receive_reply(outgoing, &reply, now_us);
        }
    }

    pub fn join(&mut self, waiter: PermitWaiter<JobIndex>) {
        self.inbox.push(Message::Join(waiter));
    }

    pub fn release(&mut self, release: PendingRelease) {
        self.inbox.push(Message::Release(release));
    }

    /// Reads the inbox and ends the waits that are over, unless a call is in flight. Returns the decisions.
    pub fn advance(&mut self, now_us: u64) -> Vec<Decision<JobIndex>> {
        if self.call_in_flight.is_none() {
            let now = self.clock.instant(now_us);
            for message in self.inbox.drain(..) {
                match message {
                    Message::Join(waiter) => self.core.join(waiter, now),
                    Message::Release(release) => self.core.release(release, now),
                }
            }
            self.core.advance(now);
        }
        self.core.take_decisions()
    }

    /// Sends the call that is due now, if one is.
    pub fn depart(&mut self, now_us: u64) -> bool {
        let now = self.clock.instant(now_us);
        let departs = self.call_in_flight.is_none() && self.core.next_call_at(now) <= now;
        if departs {
            self.calls += 1;
            self.call_in_flight = Some(CallInFlight { outgoing: self.core.prepare_call(RUN_ID, now), reply: None });
        }
        departs
    }

    /// The call reaches the limiter; `answer` makes its reply.
    pub fn reach(&mut self, answer: impl FnOnce(&LimiterCall) -> LimiterReply) {
        if let Some(call) = &mut self.call_in_flight {
            call.reply = Some(answer(&call.outgoing.call));
        }
    }

    /// The reply has arrived.
    pub fn replied(&mut self, now_us: u64) {
        if let Some(CallInFlight { outgoing, reply: Some(reply) }) = self.call_in_flight.take() {
            self.receive_reply(outgoing, &reply, now_us);
        }
    }

    fn receive_reply(&mut self, outgoing: PendingCall, reply: &LimiterReply, now_us: u64) {
        let facts = StoreFacts {
            exceeds_share: &|_, _| false,
            attestation: &|_| AttestationCheck::Valid { since: Micros(0), undetected_step: Duration::ZERO },
        };
        let now = self.clock.instant(now_us);
        let effects = self.core.receive_reply(outgoing, reply, &facts, now);
        if let Some(query) = effects.cold {
            let step = RebuildStep::Loaded { data: no_uses(query.state_epoch), at: now };
            self.core.resolve_cold(query, step, now);
        }
        if let Some(request) = effects.history {
            // A ledger that answers makes no error.
            let _ = self.core.receive_history(Ok(request.answer_without_uses()), now);
        }
    }

    pub fn view(&self) -> GateView {
        self.core.view()
    }

    /// The instant of a wake-up that is to be scheduled; `None`: one is scheduled that is early enough.
    pub fn next_wake(&mut self, now_us: u64) -> Option<u64> {
        if self.call_in_flight.is_some() {
            return None;
        }
        let now = self.clock.instant(now_us);
        let next = self.core.next_call_at(now);
        let wake = self.core.next_deadline(now).map_or(next, |deadline| deadline.min(next));
        let wake_us = self.clock.micros(wake).max(now_us);
        if self.wakes_us.last().is_some_and(|earliest_us| *earliest_us <= wake_us) {
            return None;
        }
        self.wakes_us.push(wake_us);
        Some(wake_us)
    }

    /// A wake-up has come.
    pub fn woken(&mut self, now_us: u64) {
        while self.wakes_us.pop_if(|wake_us| *wake_us <= now_us).is_some() {}
    }
}

/// The ledger's report about a past without uses.
fn no_uses(state_epoch: Micros) -> RebuildData {
    RebuildData { state_epoch, ended: Vec::new(), in_flight: CostByKind::default() }
}

/// First call, which tells the limiter that nothing was used before.
pub fn first_call(now_us: u64) -> LimiterCall {
    LimiterCall {
        incarnation: u64::from(u32::MAX),
        number: 1,
        rebuild: Some(no_uses(Micros(now_us))),
        look_ahead: BOOKING_HORIZON,
        run_id: RUN_ID.to_owned(),
        ..LimiterCall::default()
    }
}

#[derive(Debug)]
pub struct SimulatedProcess {
    pub gate: GateDriver,
    pub dispatcher: DispatchCore<u32, JobIndex>,
    prefetch: u16,
    intake: IntakeBound,
    /// Messages that it holds.
    held: u16,
    pub deadline_misses: MissStreak,
    clock: VirtualClock,
    provider: Provider,
    startable_soon: u32,
    order: JobOrder,
    /// Takes no jobs before this instant.
    paused_until_us: u64,
    /// Claims no jobs before this instant, and records new ones.
    claims_paused_until_us: u64,
    cost_waits: CostWaits,
    /// Instant of the dispatcher's next scheduled step.
    next_step_us: Option<u64>,
}

impl SimulatedProcess {
    pub fn new(clock: VirtualClock, provider: &Provider, gate: GateDriver, now_us: u64) -> Self {
        Self {
            gate,
            dispatcher: DispatchCore::new(clock.instant(now_us)),
            prefetch: prefetch(provider),
            intake: IntakeBound::starting_at(clock.instant(now_us)),
            held: 0,
            deadline_misses: MissStreak::default(),
            clock,
            provider: provider.clone(),
            startable_soon: startable_soon(provider),
            order: provider.order,
            paused_until_us: 0,
            claims_paused_until_us: 0,
            cost_waits: CostWaits::default(),
            next_step_us: None,
        }
    }

    pub fn accepts_jobs(&mut self, now_us: u64) -> bool {
        let places = self.intake.places(self.prefetch, self.clock.instant(now_us));
        self.held < places && self.paused_until_us <= now_us
    }

    /// Takes a message from the queue.
    pub fn take_message(&mut self) {
        self.held += 1;
    }

    /// A message that it held is acknowledged.
    pub fn end_message(&mut self) {
        self.held -= 1;
        self.intake.record_end();
    }

    /// Whether new jobs of this cost wait in the backlog.
    pub fn is_limited(&self, now_us: u64, cost: u32) -> bool {
        let now = self.clock.instant(now_us);
        self.claims_paused_until_us > now_us
            || self.cost_waits.of(cost, now).is_some()
            || self.dispatcher.is_limited(now, || self.startable_soon, &self.gate.view(), || true)
    }

    /// A limit has too few free slots for jobs of this cost.
    pub fn record_cost_wait(&mut self, now_us: u64, cost: u32, refusal: &GateRefusal) {
        let BlockReason::Limit(limit) = &refusal.reason else { return };
        let (now, limit) = (self.clock.instant(now_us), limit.clone());
        self.cost_waits.record(CostWait { cost, limit, until: now + cost_wait(refusal) }, now);
    }

    /// Claims no jobs before this instant.
    pub fn pause_claims(&mut self, until_us: u64) {
        self.claims_paused_until_us = self.claims_paused_until_us.max(until_us);
    }

    pub fn next_dispatch_step(&mut self, now_us: u64) -> DispatchStep<u32> {
        let claims_paused_until_us = self.claims_paused_until_us.saturating_sub(micros_up(RESUME_AHEAD));
        let paused_until_us = claims_paused_until_us.max(self.paused_until_us);
        let paused_until = (paused_until_us > now_us).then(|| self.clock.instant(paused_until_us));
        let release_waiters = self.gate.egress().release_waiters();
        let facts = || LaneFacts {
            bounds: AheadBounds::of(&self.provider, self.prefetch, release_waiters),
            paused_until,
            sends_lookups: false,
            can_start: self.gate.egress().can_start(self.clock.instant(now_us)),
            order: self.order,
            cost_bound: self.cost_waits.bound(self.clock.instant(now_us)),
        };
        self.dispatcher.next_step(self.clock.instant(now_us), facts)
    }

    /// Takes no jobs until shortly before this wait is over. Returns the end of the pause, if it is later than before.
    pub fn pause_intake(&mut self, now_us: u64, wait_us: u64) -> Option<u64> {
        let until_us = (now_us + wait_us).saturating_sub(micros_up(RESUME_AHEAD));
        let is_later = until_us > self.paused_until_us && until_us > now_us;
        self.paused_until_us = self.paused_until_us.max(until_us);
        is_later.then_some(until_us)
    }

    /// Whether a step of the dispatcher at this instant is to be scheduled: none is that early.
    pub fn schedules_step(&mut self, at_us: u64) -> bool {
        let is_earlier = self.next_step_us.is_none_or(|known_us| at_us < known_us);
        if is_earlier {
            self.next_step_us = Some(at_us);
        }
        is_earlier
    }

    /// A scheduled step is due.
    pub fn step_is_due(&mut self, now_us: u64) {
        self.next_step_us.take_if(|known_us| *known_us <= now_us);
    }
}
