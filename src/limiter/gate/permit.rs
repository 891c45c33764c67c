//! A permit's life cycle: it is granted, then either begun and released with the response, or released unused.
//!
//! A permit cannot begin after the end of its send budget. If it is dropped before it begins, its slots return to the
//! limiter. If it is dropped in flight, its slots are held until the deadline, because the outcome is unknown.
//! See `docs/decisions/0007-hold-slots-until-the-response.md`.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::GateMessage;
use super::core::GrantedPermit;
use super::release::{PendingRelease, PendingReleaseKind};
use super::unpersisted::WindowSlot;
use super::wait_queue::CountingScope;
use super::worker_slot::WorkerSlot;

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
    answer_before: Instant,
    slots: Option<PermitSlots>,
    window_slot: Option<WindowSlot>,
    worker_slot: Option<WorkerSlot>,
}

/// The permit's time has passed; its slots are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitExpired;

/// Slots of one permit, with what is needed to release them.
#[derive(Debug)]
struct PermitSlots {
    call: u64,
    cost: u32,
    scope: CountingScope,
    /// Per limit name, the instant to restore; the same for all permits of a run.
    origins: Arc<[(String, u64)]>,
    gate: mpsc::WeakUnboundedSender<GateMessage>,
}

/// A permit whose request may be in flight.
#[derive(Debug)]
#[must_use = "a response that is not reported keeps its slot until the deadline"]
pub struct InFlightPermit {
    /// The request must end by then: a window later its slots may be granted again.
    pub answer_before: Instant,
    slots: PermitSlots,
}

impl Permit {
    /// The permit that the gate's core has granted, for a job of this process.
    pub(super) fn new(granted: GrantedPermit, gate: &mpsc::WeakUnboundedSender<GateMessage>) -> Self {
        let GrantedPermit { start_at, use_before, answer_before, waited_for_account, .. } = granted;
        let GrantedPermit { call, cost, scope, origins, window_slot, egress, .. } = granted;
        let worker_slot = egress.map(|egress| WorkerSlot::new(egress, gate.clone()));
        let slots = Some(PermitSlots { call, cost, scope, origins, gate: gate.clone() });
        Self {
            start_at,
            use_before,
            waited_for_account,
            answer_before,
            slots,
            window_slot: Some(window_slot),
            worker_slot,
        }
    }

    /// The worker slot that came with the permit; its job keeps it until it is finished.
    pub fn take_worker_slot(&mut self) -> Option<WorkerSlot> {
        self.worker_slot.take()
    }

    /// The permit's request is persisted, so the next job in the queue may get a permit. A permit that begins without
    /// this counts as persisted then.
    pub fn mark_persisted(&mut self) {
        let has_room = self.window_slot.take().is_some_and(|slot| slot.persisted(None, Instant::now()));
        self.notify_slot_freed(has_room);
    }

    fn notify_slot_freed(&self, has_room: bool) {
        if has_room && let Some(gate) = self.slots.as_ref().and_then(|slots| slots.gate.upgrade()) {
            // A gate that has ended asks for nothing more.
            let _ = gate.send(GateMessage::SlotFreed);
        }
    }

    /// Begins the one request that this permit is for.
    ///
    /// # Errors
    /// [`PermitExpired`] outside of the permit's time; the slots are released.
    pub fn begin(mut self) -> Result<InFlightPermit, PermitExpired> {
        let now = Instant::now();
        let has_room = self.window_slot.take().is_some_and(|slot| slot.persisted(Some(self.start_at), now));
        self.notify_slot_freed(has_room);
        if now < self.start_at || now > self.use_before {
            return Err(PermitExpired);
        }
        let answer_before = self.answer_before;
        self.slots.take().map(|slots| InFlightPermit { answer_before, slots }).ok_or(PermitExpired)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let has_room = self.window_slot.take().is_some_and(|slot| slot.discarded(Instant::now()));
        self.notify_slot_freed(has_room);
        if let Some(worker_slot) = &mut self.worker_slot {
            worker_slot.refund();
        }
        if let Some(slots) = self.slots.take() {
            slots.release_unused();
        }
    }
}

impl InFlightPermit {
    /// The response was read at this instant: the slots are free a window later.
    pub fn release_used(self, at: Instant) {
        let PermitSlots { call, cost, scope, gate, .. } = self.slots;
        send_release(&gate, PendingRelease { call, cost, scope, kind: PendingReleaseKind::Used { at } });
    }

    /// No byte was sent: the slots are restored as they were.
    pub fn release_unused(self) {
        self.slots.release_unused();
    }

    /// What the provider received is unknown: the slots are held until the deadline.
    pub fn release_unknown(self) {}
}

impl PermitSlots {
    fn release_unused(self) {
        let kind = PendingReleaseKind::Unused { origins: self.origins };
        send_release(&self.gate, PendingRelease { call: self.call, cost: self.cost, scope: self.scope, kind });
    }
}

/// Sends a release to the gate. After the gate has ended nothing is released, and the leases expire.
fn send_release(gate: &mpsc::WeakUnboundedSender<GateMessage>, release: PendingRelease) {
    if let Some(gate) = gate.upgrade() {
        let _ = gate.send(GateMessage::Release(release));
    }
}
