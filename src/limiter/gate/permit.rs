//! A permit's life: granted, then either begun and answered, or given back.
//!
//! Refuses a late start: between the end of its send budget and its lease's deadline a permit is worth nothing. A permit
//! that is dropped before it began goes back to the limiter; one that is dropped while in flight stays taken until its
//! deadline, because nobody knows what the provider saw.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Message;
use super::hands::Hand;
use super::line::Of;

/// One granted start.
#[derive(Debug)]
pub struct Permit {
    /// Not before.
    pub start_at: Instant,
    /// Not after.
    pub use_before: Instant,
    /// The slots are held for this request's answer until here, and no longer.
    answer_before: Instant,
    slots: Option<Slots>,
    hand: Option<Hand>,
}

/// The permit's time has passed; its slots have gone back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late;

/// Slots taken by one permit, with what is needed to settle them.
#[derive(Debug)]
pub(super) struct Slots {
    pub call: u64,
    pub cost: u32,
    pub of: Of,
    /// Per limit name, the instant to restore; the same for all permits of a run.
    pub origins: Arc<[(String, u64)]>,
    pub gate: mpsc::WeakUnboundedSender<Message>,
}

/// A permit whose request may be on the wire.
#[derive(Debug)]
#[must_use = "an answer that is not reported keeps its slot until the deadline"]
pub struct InFlight {
    /// After this the provider must not be waited for: the slots may go to others a window later.
    pub answer_before: Instant,
    slots: Slots,
}

#[derive(Debug)]
pub(super) struct Settled {
    pub call: u64,
    pub cost: u32,
    pub of: Of,
    pub fate: SettledFate,
}

#[derive(Debug)]
pub(super) enum SettledFate {
    Answered { at: Instant },
    NotSent { origins: Arc<[(String, u64)]> },
}

impl Permit {
    pub(super) fn new(
        (start_at, use_before, answer_before): (Instant, Instant, Instant),
        slots: Slots,
        hand: Option<Hand>,
    ) -> Self {
        Self { start_at, use_before, answer_before, slots: Some(slots), hand }
    }

    /// Its request is written down: the next one in line may have a permit. One that is begun without this is taken to
    /// have been written down then.
    pub fn written_down(&mut self) {
        let comes = self.hand.take().is_some_and(|hand| hand.written(None));
        self.tell_of_room(comes);
    }

    fn tell_of_room(&self, comes: bool) {
        if comes && let Some(gate) = self.slots.as_ref().and_then(|slots| slots.gate.upgrade()) {
            // A gate that is gone asks for nothing more.
            let _ = gate.send(Message::Room);
        }
    }

    /// Begins the one request that this permit is for.
    ///
    /// # Errors
    /// [`Late`] outside of the permit's time; the slots go back.
    pub fn begin(mut self) -> Result<InFlight, Late> {
        let now = Instant::now();
        let comes = self.hand.take().is_some_and(|hand| hand.written(Some(self.start_at)));
        self.tell_of_room(comes);
        if now < self.start_at || now > self.use_before {
            return Err(Late);
        }
        let answer_before = self.answer_before;
        self.slots.take().map(|slots| InFlight { answer_before, slots }).ok_or(Late)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let comes = self.hand.take().is_some_and(Hand::dropped);
        self.tell_of_room(comes);
        if let Some(slots) = self.slots.take() {
            slots.not_sent();
        }
    }
}

impl InFlight {
    /// The answer was read at this instant: its slots are free a window later.
    pub fn answered(self, at: Instant) {
        let Slots { call, cost, of, gate, .. } = self.slots;
        tell(&gate, Settled { call, cost, of, fate: SettledFate::Answered { at } });
    }

    /// Surely no byte left: the slots are as they were.
    pub fn not_sent(self) {
        self.slots.not_sent();
    }

    /// Nobody knows what the provider saw: the slots stay taken until the deadline.
    pub fn unknown(self) {}
}

impl Slots {
    fn not_sent(self) {
        let fate = SettledFate::NotSent { origins: self.origins };
        tell(&self.gate, Settled { call: self.call, cost: self.cost, of: self.of, fate });
    }
}

/// A gate that is gone settles nothing: its leases run out.
fn tell(gate: &mpsc::WeakUnboundedSender<Message>, settled: Settled) {
    if let Some(gate) = gate.upgrade() {
        let _ = gate.send(Message::Settled(settled));
    }
}
