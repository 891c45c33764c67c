//! Worker process in virtual time: its prefetch, its pauses, its gate, and the dispatcher of its lane.
//!
//! The rules are those of `worker::lane`; gate and dispatcher are those of production. The simulation advances the time.

use super::driver::{GateDriver, VirtualClock};
use super::world::JobIndex;
use crate::domain::deadline_misses::MissStreak;
use crate::domain::provider::{JobOrder, Provider};
use crate::domain::time::micros_up;
use crate::worker::backlog::claimed_ahead::{AheadBounds, startable_soon};
use crate::worker::backlog::core::{DispatchCore, DispatchStep, LaneFacts};
use crate::worker::lane::{RESUME_AHEAD, prefetch};

#[derive(Debug)]
pub(super) struct SimulatedProcess {
    pub gate: GateDriver,
    pub dispatcher: DispatchCore<u32, JobIndex>,
    pub free_prefetch: u16,
    pub deadline_misses: MissStreak,
    clock: VirtualClock,
    bounds: AheadBounds,
    startable_soon: u32,
    order: JobOrder,
    /// Takes no jobs before this instant.
    paused_until_us: u64,
    /// A limit pauses the lane until then.
    limited_until_us: u64,
    /// Instant of the dispatcher's next scheduled step.
    next_step_us: Option<u64>,
}

impl SimulatedProcess {
    pub fn new(clock: VirtualClock, provider: &Provider, gate: GateDriver, now_us: u64) -> Self {
        Self {
            gate,
            dispatcher: DispatchCore::new(clock.instant(now_us)),
            free_prefetch: prefetch(provider),
            deadline_misses: MissStreak::default(),
            clock,
            bounds: AheadBounds::of(provider, prefetch(provider)),
            startable_soon: startable_soon(provider),
            order: provider.order,
            paused_until_us: 0,
            limited_until_us: 0,
            next_step_us: None,
        }
    }

    pub fn accepts_jobs(&self, now_us: u64) -> bool {
        self.free_prefetch > 0 && self.paused_until_us <= now_us
    }

    /// Whether new jobs wait in the backlog, in blocking mode.
    pub fn is_limited(&self, now_us: u64) -> bool {
        let is_blocked = || self.gate.is_blocked_by_limit();
        self.limited_until_us > now_us
            || self.dispatcher.is_limited(self.clock.instant(now_us), || self.startable_soon, is_blocked)
    }

    /// A limit pauses the lane.
    pub fn pause_for_limit(&mut self, until_us: u64) {
        self.limited_until_us = self.limited_until_us.max(until_us);
    }

    pub fn next_dispatch_step(&mut self, now_us: u64) -> DispatchStep<u32> {
        let limited_until_us = self.limited_until_us.saturating_sub(micros_up(RESUME_AHEAD));
        let paused_until_us = limited_until_us.max(self.paused_until_us);
        let paused_until = (paused_until_us > now_us).then(|| self.clock.instant(paused_until_us));
        let facts = LaneFacts { bounds: self.bounds, paused_until, order: self.order };
        self.dispatcher.next_step(self.clock.instant(now_us), || facts)
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
