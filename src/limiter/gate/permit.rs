//! A permit's life cycle: it is granted, then either begun and released with the response, or released unused.
//!
//! A permit cannot begin after the end of its send budget. If it is dropped before it begins, its slots return to the
//! limiter. If it is dropped in flight, its slots are held until the deadline, because the outcome is unknown. The worker
//! slot that comes with it returns to its lane when it is dropped.
//! See `docs/decisions/0007-hold-slots-until-the-response.md`.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::GateMessage;
use super::core::GrantedPermit;
use super::egress::{EgressRequest, EgressRule, LaneEgress};
use super::pending_call::GrantedSlots;
use super::unpersisted::WindowSlot;

/// The right to begin one request.
#[derive(Debug)]
pub struct Permit {
    /// Earliest start.
    pub start_at: Instant,
    /// Latest start.
    pub use_before: Instant,
    /// A limit of the job's account has made it wait. Such a wait says nothing of other jobs.
    pub waited_for_account: bool,
    /// The slots are held for the response at most until then.
    pub answer_before: Instant,
    slots: Option<GrantedSlots>,
    window_slot: Option<WindowSlot>,
    worker_slot: Option<WorkerSlot>,
    gate: GateSender,
}

/// The permit's time has passed; its slots are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitExpired;

/// A permit whose request may be in flight.
#[derive(Debug)]
#[must_use = "a response that is not reported keeps its slot until the deadline"]
pub struct InFlightPermit {
    /// The request must end by then: a window later its slots may be granted again.
    pub answer_before: Instant,
    slots: GrantedSlots,
    gate: GateSender,
}

/// The right of one job to be processed: one of `workers`. It ends when it is dropped.
#[derive(Debug)]
pub struct WorkerSlot {
    lane: Arc<LaneEgress>,
    rule: EgressRule,
    is_refunded: bool,
    gate: GateSender,
}

/// Messages to the gate. One that has ended grants nothing more and releases nothing: the leases expire.
#[derive(Clone, Debug)]
struct GateSender(mpsc::WeakUnboundedSender<GateMessage>);

impl GateSender {
    fn send(&self, message: GateMessage) {
        if let Some(gate) = self.0.upgrade() {
            let _ = gate.send(message);
        }
    }
}

impl Permit {
    /// The permit that the gate's core has granted, for a job of this process.
    pub(super) fn new(granted: GrantedPermit, gate: &mpsc::WeakUnboundedSender<GateMessage>) -> Self {
        let GrantedPermit { start_at, use_before, answer_before, waited_for_account, .. } = granted;
        let gate = GateSender(gate.clone());
        Self {
            start_at,
            use_before,
            waited_for_account,
            answer_before,
            slots: Some(granted.slots),
            window_slot: Some(granted.window_slot),
            worker_slot: granted.egress.map(|egress| WorkerSlot::new(egress, gate.clone())),
            gate,
        }
    }

    /// The worker slot that came with the permit; its job keeps it until it is finished.
    pub fn take_worker_slot(&mut self) -> Option<WorkerSlot> {
        self.worker_slot.take()
    }

    /// The permit's request is persisted, so the next job in the queue may get a permit. A permit that begins without
    /// this counts as persisted then.
    pub fn mark_persisted(&mut self) {
        self.free_window_slot(|slot| slot.persisted(None, Instant::now()));
    }

    fn free_window_slot(&mut self, frees: impl FnOnce(WindowSlot) -> bool) {
        if self.window_slot.take().is_some_and(frees) {
            self.gate.send(GateMessage::SlotFreed);
        }
    }

    /// Begins the one request that this permit is for.
    ///
    /// # Errors
    /// [`PermitExpired`] outside of the permit's time; the slots are released.
    pub fn begin(mut self) -> Result<InFlightPermit, PermitExpired> {
        let (now, start_at) = (Instant::now(), self.start_at);
        self.free_window_slot(|slot| slot.persisted(Some(start_at), now));
        if now < start_at || now > self.use_before {
            return Err(PermitExpired);
        }
        let slots = self.slots.take().ok_or(PermitExpired)?;
        Ok(InFlightPermit { answer_before: self.answer_before, slots, gate: self.gate.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.free_window_slot(|slot| slot.discarded(Instant::now()));
        if let Some(worker_slot) = &mut self.worker_slot {
            worker_slot.refund();
        }
        if let Some(slots) = self.slots.take() {
            self.gate.send(GateMessage::Release(slots.unused()));
        }
    }
}

impl InFlightPermit {
    /// The response was read at this instant: the slots are free a window later.
    pub fn release_used(self, at: Instant) {
        self.gate.send(GateMessage::Release(self.slots.used(at)));
    }

    /// No byte was sent: the slots are restored as they were.
    pub fn release_unused(self) {
        self.gate.send(GateMessage::Release(self.slots.unused()));
    }

    /// What the provider received is unknown: the slots are held until the deadline.
    pub fn release_unknown(self) {}
}

impl WorkerSlot {
    /// The slot that the gate has taken with a permit.
    fn new(egress: EgressRequest, gate: GateSender) -> Self {
        Self { lane: egress.lane, rule: egress.rule, is_refunded: false, gate }
    }

    /// Refunds the egress rate: the job makes no request, so the next one need not wait for it.
    pub fn refund(&mut self) {
        self.is_refunded = self.rule == EgressRule::Paced;
    }
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        if self.lane.vacate(self.is_refunded, Instant::now()) {
            self.gate.send(GateMessage::SlotFreed);
        }
    }
}

impl LaneEgress {
    /// An egress of this process, on its clock.
    pub fn new(workers: u32, jobs_per_second: f64) -> Arc<Self> {
        Self::starting_at(workers, jobs_per_second, Instant::now())
    }
}
