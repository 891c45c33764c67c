//! A permit's life: granted, then either begun and answered, or given back.
//!
//! Refuses a late start: between the end of its send budget and its lease's deadline a permit is worth nothing. A permit
//! that is dropped before it began goes back to the limiter; one that is dropped while in flight stays taken until its
//! deadline, because nobody knows what the provider saw.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::GateMessage;
use super::unpersisted::WindowSlot;
use super::wait_queue::CountingScope;

/// One granted start.
#[derive(Debug)]
pub struct Permit {
    /// Not before.
    pub start_at: Instant,
    /// Not after.
    pub use_before: Instant,
    /// The slots are held for this request's answer until here, and no longer.
    answer_before: Instant,
    slots: Option<PermitSlots>,
    window_slot: Option<WindowSlot>,
}

/// The permit's time has passed; its slots have gone back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitExpired;

/// Slots taken by one permit, with what is needed to settle them.
#[derive(Debug)]
pub(super) struct PermitSlots {
    pub call: u64,
    pub cost: u32,
    pub scope: CountingScope,
    /// Per limit name, the instant to restore; the same for all permits of a run.
    pub origins: Arc<[(String, u64)]>,
    pub gate: mpsc::WeakUnboundedSender<GateMessage>,
}

/// A permit whose request may be on the wire.
#[derive(Debug)]
#[must_use = "an answer that is not reported keeps its slot until the deadline"]
pub struct InFlightPermit {
    /// After this the provider must not be waited for: the slots may go to others a window later.
    pub answer_before: Instant,
    slots: PermitSlots,
}

#[derive(Debug)]
pub(super) struct PendingRelease {
    pub call: u64,
    pub cost: u32,
    pub scope: CountingScope,
    pub kind: PendingReleaseKind,
}

#[derive(Debug)]
pub(super) enum PendingReleaseKind {
    Used { at: Instant },
    Unused { origins: Arc<[(String, u64)]> },
}

impl Permit {
    pub(super) fn new(
        (start_at, use_before, answer_before): (Instant, Instant, Instant),
        slots: PermitSlots,
        window_slot: Option<WindowSlot>,
    ) -> Self {
        Self { start_at, use_before, answer_before, slots: Some(slots), window_slot }
    }

    /// Its request is written down: the next one in line may have a permit. One that is begun without this is taken to
    /// have been written down then.
    pub fn mark_persisted(&mut self) {
        let comes = self.window_slot.take().is_some_and(|hand| hand.persisted(None));
        self.notify_slot_freed(comes);
    }

    fn notify_slot_freed(&self, comes: bool) {
        if comes && let Some(gate) = self.slots.as_ref().and_then(|slots| slots.gate.upgrade()) {
            // A gate that is gone asks for nothing more.
            let _ = gate.send(GateMessage::SlotFreed);
        }
    }

    /// Begins the one request that this permit is for.
    ///
    /// # Errors
    /// [`Late`] outside of the permit's time; the slots go back.
    pub fn begin(mut self) -> Result<InFlightPermit, PermitExpired> {
        let now = Instant::now();
        let comes = self.window_slot.take().is_some_and(|hand| hand.persisted(Some(self.start_at)));
        self.notify_slot_freed(comes);
        if now < self.start_at || now > self.use_before {
            return Err(PermitExpired);
        }
        let answer_before = self.answer_before;
        self.slots.take().map(|slots| InFlightPermit { answer_before, slots }).ok_or(PermitExpired)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let comes = self.window_slot.take().is_some_and(WindowSlot::discarded);
        self.notify_slot_freed(comes);
        if let Some(slots) = self.slots.take() {
            slots.release_unused();
        }
    }
}

impl InFlightPermit {
    /// The answer was read at this instant: its slots are free a window later.
    pub fn release_used(self, at: Instant) {
        let PermitSlots { call, cost, scope: of, gate, .. } = self.slots;
        send_release(&gate, PendingRelease { call, cost, scope: of, kind: PendingReleaseKind::Used { at } });
    }

    /// Surely no byte left: the slots are as they were.
    pub fn release_unused(self) {
        self.slots.release_unused();
    }

    /// Nobody knows what the provider saw: the slots stay taken until the deadline.
    pub fn release_unknown(self) {}
}

impl PermitSlots {
    fn release_unused(self) {
        let fate = PendingReleaseKind::Unused { origins: self.origins };
        send_release(&self.gate, PendingRelease { call: self.call, cost: self.cost, scope: self.scope, kind: fate });
    }
}

/// A gate that is gone settles nothing: its leases run out.
fn send_release(gate: &mpsc::WeakUnboundedSender<GateMessage>, settled: PendingRelease) {
    if let Some(gate) = gate.upgrade() {
        let _ = gate.send(GateMessage::Release(settled));
    }
}
