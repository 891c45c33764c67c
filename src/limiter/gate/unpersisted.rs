//! Permits that somebody has in hands and has not written down yet: no more at once than can be written down in time.
//!
//! Refuses to know the ledger: it hears from each permit how long that took ([`WritePace`]). The gate asks for as many as
//! there is room for, and the rest of the line waits without a refusal.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::persist_window::{AimdWindow, PersistSample};

/// Asking for less than this part of the window would cost a call for every permit.
const FREE_PART_MIN: u32 = 4;

#[derive(Debug)]
pub(super) struct PersistWindow(Mutex<WindowState>);

#[derive(Debug)]
struct WindowState {
    aimd: AimdWindow,
    unpersisted: u32,
    /// The gate waits for room.
    gate_waits: bool,
}

/// One permit in hands, until it is written down or dropped.
#[derive(Debug)]
pub(super) struct WindowSlot {
    window: Arc<PersistWindow>,
    granted_at: Instant,
    budget: Duration,
    unpersisted: u32,
    epoch: u64,
}

impl PersistWindow {
    pub fn new(budget: Duration) -> Arc<Self> {
        Arc::new(Self(Mutex::new(WindowState { aimd: AimdWindow::new(budget), unpersisted: 0, gate_waits: false })))
    }

    /// How many permits are worth asking for now. When none are, [`Hand::written`] says when some will be.
    pub fn free_slots(&self) -> u32 {
        let mut state = self.lock();
        let room = state.free_slots();
        state.gate_waits = room == 0;
        room
    }

    /// One more, granted now, that can be used within this time.
    pub fn occupy(self: &Arc<Self>, granted_at: Instant, budget: Duration) -> WindowSlot {
        let mut state = self.lock();
        state.unpersisted += 1;
        WindowSlot {
            window: Arc::clone(self),
            granted_at,
            budget,
            unpersisted: state.unpersisted,
            epoch: state.aimd.epoch(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        // Whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WindowState {
    fn free_slots(&self) -> u32 {
        let window = self.aimd.window();
        let free = window.saturating_sub(self.unpersisted);
        if free >= window.div_ceil(FREE_PART_MIN) { free } else { 0 }
    }

    /// Whether this makes the room that the gate waits for.
    fn free_one(&mut self) -> bool {
        self.unpersisted = self.unpersisted.saturating_sub(1);
        let comes = self.gate_waits && self.free_slots() > 0;
        self.gate_waits &= !comes;
        comes
    }
}

impl WindowSlot {
    /// It is written down; `true`: the gate waits to hear of the room that this makes. One that is begun without having
    /// been written down before counts from its start.
    pub fn persisted(self, start_at: Option<Instant>) -> bool {
        let from = start_at.map_or(self.granted_at, |start_at| start_at.max(self.granted_at));
        let took = Instant::now().saturating_duration_since(from);
        self.free(Some(took))
    }

    /// It is not used. Kept for longer than it could be, it was not written down in time either.
    pub fn discarded(self) -> bool {
        let took = self.granted_at.elapsed();
        let late = took > self.budget;
        self.free(late.then_some(took))
    }

    fn free(self, took: Option<Duration>) -> bool {
        let mut state = self.window.lock();
        if let Some(took) = took {
            let Self { budget, unpersisted: in_hands, epoch: cuts, .. } = self;
            state.aimd.record(PersistSample { took, budget, unpersisted: in_hands, epoch: cuts });
        }
        state.free_one()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(64);

    #[tokio::test(start_paused = true)]
    async fn gate_is_notified_once_and_only_while_waiting() {
        let hands = PersistWindow::new(BUDGET);
        assert_eq!(hands.free_slots(), 16);
        let mut taken: Vec<WindowSlot> = (0..16).map(|_| hands.occupy(Instant::now(), BUDGET)).collect();
        let first = taken.pop().unwrap();
        assert!(!first.discarded(), "nobody waits");
        assert_eq!(hands.free_slots(), 0, "one of sixteen is not worth a call");
        let mut heard = Vec::new();
        for hand in taken.drain(..6) {
            heard.push(hand.discarded());
        }
        assert_eq!(heard, [false, false, true, false, false, false], "{heard:?}");
        assert_eq!(hands.free_slots(), 7);
        for hand in taken {
            hand.discarded();
        }
        assert_eq!(hands.free_slots(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn late_permits_shrink_the_window_used_or_not() {
        let hands = PersistWindow::new(BUDGET);
        let (one, other) = (hands.occupy(Instant::now(), BUDGET), hands.occupy(Instant::now(), BUDGET));
        tokio::time::sleep(BUDGET * 2).await;
        one.persisted(None);
        assert_eq!(hands.free_slots(), 7);
        other.discarded();
        assert_eq!(hands.free_slots(), 8);
        let late = hands.occupy(Instant::now(), BUDGET);
        tokio::time::sleep(BUDGET * 2).await;
        late.discarded();
        assert_eq!(hands.free_slots(), 4);
        // A start that was booked ahead is no delay.
        let ahead = hands.occupy(Instant::now(), BUDGET);
        let start_at = Instant::now() + 3 * BUDGET;
        tokio::time::sleep(3 * BUDGET).await;
        ahead.persisted(Some(start_at));
        assert_eq!(hands.free_slots(), 4);
    }
}
