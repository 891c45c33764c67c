//! The window of permits that are granted but not persisted yet: no more than the ledger can persist in time.
//!
//! Each permit reports how long its write took ([`AimdWindow`]). The gate asks for as many permits as there are free
//! slots; the other jobs wait in the queue without a refusal.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::domain::persist_window::{AimdWindow, BookingAhead, PersistSample};

/// The gate asks only when at least one part in so many of the window is free; else each permit would cost a call.
const FREE_PART_MIN: u32 = 4;

#[derive(Debug)]
pub(super) struct PersistWindow(Mutex<WindowState>);

#[derive(Debug)]
struct WindowState {
    aimd: AimdWindow,
    ahead: BookingAhead,
    unpersisted: u32,
    /// The gate waits for free slots.
    gate_waits: bool,
}

/// One granted permit, until it is persisted or dropped.
#[derive(Debug)]
pub(crate) struct WindowSlot {
    window: Arc<PersistWindow>,
    granted_at: Instant,
    budget: Duration,
    unpersisted: u32,
    epoch: u64,
}

impl PersistWindow {
    pub fn new(budget: Duration) -> Arc<Self> {
        Arc::new(Self(Mutex::new(WindowState {
            aimd: AimdWindow::new(budget),
            ahead: BookingAhead::default(),
            unpersisted: 0,
            gate_waits: false,
        })))
    }

    /// Number of permits to ask for now. If it is 0, [`WindowSlot::persisted`] and [`WindowSlot::discarded`] say when
    /// the gate should ask again.
    pub fn free_slots(&self) -> u32 {
        let mut state = self.0.lock();
        let free = state.free_slots();
        state.gate_waits = free == 0;
        free
    }

    /// How far ahead starts are booked.
    pub fn ahead(&self) -> BookingAhead {
        self.0.lock().ahead
    }

    /// Records how long a call to the limiter took.
    pub fn record_call(&self, took: Duration) {
        self.0.lock().ahead.record_call(took);
    }

    /// Adds a permit that was granted now and can be used within `budget`.
    pub fn occupy(self: &Arc<Self>, granted_at: Instant, budget: Duration) -> WindowSlot {
        let mut state = self.0.lock();
        state.unpersisted += 1;
        WindowSlot {
            window: Arc::clone(self),
            granted_at,
            budget,
            unpersisted: state.unpersisted,
            epoch: state.aimd.epoch(),
        }
    }
}

impl WindowState {
    fn free_slots(&self) -> u32 {
        let window = self.aimd.window();
        let free = window.saturating_sub(self.unpersisted);
        if free >= window.div_ceil(FREE_PART_MIN) { free } else { 0 }
    }

    /// Frees one slot; `true` if the gate waited for it.
    fn free_one(&mut self) -> bool {
        self.unpersisted = self.unpersisted.saturating_sub(1);
        let is_awaited = self.gate_waits && self.free_slots() > 0;
        self.gate_waits &= !is_awaited;
        is_awaited
    }
}

impl WindowSlot {
    /// The permit's request is persisted; `true`: the gate waits for the freed slot. If the permit begins before it is
    /// persisted, the time counts from its start.
    pub fn persisted(self, start_at: Option<Instant>, now: Instant) -> bool {
        let from = start_at.map_or(self.granted_at, |start_at| start_at.max(self.granted_at));
        let took = now.saturating_duration_since(from);
        self.window.0.lock().ahead.record_write(now.saturating_duration_since(self.granted_at));
        self.free(Some(took))
    }

    /// The permit is not used; `true`: the gate waits for the freed slot. If it was kept beyond its budget, it counts
    /// as not persisted in time.
    pub fn discarded(self, now: Instant) -> bool {
        let took = now.saturating_duration_since(self.granted_at);
        let late = took > self.budget;
        self.free(late.then_some(took))
    }

    fn free(self, took: Option<Duration>) -> bool {
        let mut state = self.window.0.lock();
        if let Some(took) = took {
            let Self { budget, unpersisted, epoch, .. } = self;
            state.aimd.record(PersistSample { took, budget, unpersisted, epoch });
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
        let window = PersistWindow::new(BUDGET);
        assert_eq!(window.free_slots(), 16);
        let mut taken: Vec<WindowSlot> = (0..16).map(|_| window.occupy(Instant::now(), BUDGET)).collect();
        let first = taken.pop().unwrap();
        assert!(!first.discarded(Instant::now()), "the gate does not wait");
        assert_eq!(window.free_slots(), 0, "one of sixteen is not worth a call");
        let mut notified = Vec::new();
        for slot in taken.drain(..6) {
            notified.push(slot.discarded(Instant::now()));
        }
        assert_eq!(notified, [false, false, true, false, false, false], "{notified:?}");
        assert_eq!(window.free_slots(), 7);
        for slot in taken {
            slot.discarded(Instant::now());
        }
        assert_eq!(window.free_slots(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn late_permits_shrink_the_window_used_or_not() {
        let window = PersistWindow::new(BUDGET);
        let (first, second) = (window.occupy(Instant::now(), BUDGET), window.occupy(Instant::now(), BUDGET));
        tokio::time::sleep(BUDGET * 2).await;
        first.persisted(None, Instant::now());
        assert_eq!(window.free_slots(), 7);
        second.discarded(Instant::now());
        assert_eq!(window.free_slots(), 8);
        let late = window.occupy(Instant::now(), BUDGET);
        tokio::time::sleep(BUDGET * 2).await;
        late.discarded(Instant::now());
        assert_eq!(window.free_slots(), 4);
        // A start that was booked ahead is no delay.
        let ahead = window.occupy(Instant::now(), BUDGET);
        let start_at = Instant::now() + 3 * BUDGET;
        tokio::time::sleep(3 * BUDGET).await;
        ahead.persisted(Some(start_at), Instant::now());
        assert_eq!(window.free_slots(), 4);
    }
}
