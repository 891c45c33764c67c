//! Worker process in virtual time: its prefetch, its pauses and its gate.
//!
//! The rules are those of `worker::lane`. The simulation advances the time.

use super::dispatch::Dispatcher;
use super::driver::GateDriver;
use crate::domain::deadline_misses::MissStreak;
use crate::domain::provider::Provider;
use crate::domain::time::micros_up;
use crate::worker::lane::{RESUME_AHEAD, prefetch};

#[derive(Debug)]
pub(super) struct SimulatedProcess {
    pub gate: GateDriver,
    pub dispatcher: Dispatcher,
    pub free_prefetch: u16,
    /// Takes no jobs before this instant.
    paused_until_us: u64,
    pub deadline_misses: MissStreak,
}

impl SimulatedProcess {
    pub fn new(provider: &Provider, gate: GateDriver) -> Self {
        let dispatcher = Dispatcher::new(provider);
        Self {
            gate,
            dispatcher,
            free_prefetch: prefetch(provider),
            paused_until_us: 0,
            deadline_misses: MissStreak::default(),
        }
    }

    pub fn accepts_jobs(&self, now_us: u64) -> bool {
        self.free_prefetch > 0 && self.paused_until_us <= now_us
    }

    pub fn paused_until_us(&self) -> u64 {
        self.paused_until_us
    }

    /// Takes no jobs until shortly before this wait is over. Returns the end of the pause, if it is later than before.
    pub fn pause_intake(&mut self, now_us: u64, wait_us: u64) -> Option<u64> {
        let until_us = (now_us + wait_us).saturating_sub(micros_up(RESUME_AHEAD));
        let is_later = until_us > self.paused_until_us && until_us > now_us;
        self.paused_until_us = self.paused_until_us.max(until_us);
        is_later.then_some(until_us)
    }
}
