//! The worker slot of one job, returned to its lane when it is dropped, and the lane's egress on the process's clock.
//!
//! The rules are in [`super::egress`], which reads no clock.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::GateMessage;
use super::egress::{EgressRequest, EgressRule, LaneEgress};

/// The right of one job to be processed: one of `workers`. It ends when it is dropped.
#[derive(Debug)]
pub struct WorkerSlot {
    lane: Arc<LaneEgress>,
    rule: EgressRule,
    is_refunded: bool,
    gate: mpsc::WeakUnboundedSender<GateMessage>,
}

impl LaneEgress {
    pub fn new(workers: u32, jobs_per_second: f64) -> Arc<Self> {
        Self::starting_at(workers, jobs_per_second, Instant::now())
    }

    /// Applies a changed row; the caller wakes the gate.
    pub fn configure(&self, workers: u32, jobs_per_second: f64) {
        self.configure_at(workers, jobs_per_second, Instant::now());
    }
}

impl WorkerSlot {
    /// The slot that the gate has taken with a permit.
    pub(super) fn new(egress: EgressRequest, gate: mpsc::WeakUnboundedSender<GateMessage>) -> Self {
        Self { lane: egress.lane, rule: egress.rule, is_refunded: false, gate }
    }

    /// Refunds the egress rate: the job makes no request, so the next one need not wait for it.
    pub fn refund(&mut self) {
        self.is_refunded = self.rule == EgressRule::Paced;
    }
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        if self.lane.vacate(self.is_refunded, Instant::now())
            && let Some(gate) = self.gate.upgrade()
        {
            // A gate that has ended grants nothing more.
            let _ = gate.send(GateMessage::SlotFreed);
        }
    }
}
