//! Permits that somebody has in hands and has not written down yet: no more at once than can be written down in time.
//!
//! Refuses to know the ledger: it hears from each permit how long that took ([`WritePace`]). The gate asks for as many as
//! there is room for, and the rest of the line waits without a refusal.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::write_pace::{WritePace, WrittenDown};

/// Asking for less than this part of the window would cost a call for every permit.
const WORTH_ASKING: u32 = 4;

#[derive(Debug)]
pub(super) struct Hands(Mutex<State>);

#[derive(Debug)]
struct State {
    pace: WritePace,
    held: u32,
    /// The gate waits for room.
    awaited: bool,
}

/// One permit in hands, until it is written down or dropped.
#[derive(Debug)]
pub(super) struct Hand {
    hands: Arc<Hands>,
    granted_at: Instant,
    budget: Duration,
    in_hands: u32,
    cuts: u64,
}

impl Hands {
    pub fn new(budget: Duration) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { pace: WritePace::new(budget), held: 0, awaited: false })))
    }

    /// How many permits are worth asking for now. When none are, [`Hand::written`] says when some will be.
    pub fn room(&self) -> u32 {
        let mut state = self.lock();
        let room = state.room();
        state.awaited = room == 0;
        room
    }

    /// One more, granted now, that can be used within this time.
    pub fn take(self: &Arc<Self>, granted_at: Instant, budget: Duration) -> Hand {
        let mut state = self.lock();
        state.held += 1;
        Hand { hands: Arc::clone(self), granted_at, budget, in_hands: state.held, cuts: state.pace.cuts() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn room(&self) -> u32 {
        let window = self.pace.window();
        let free = window.saturating_sub(self.held);
        if free >= window.div_ceil(WORTH_ASKING) { free } else { 0 }
    }

    /// Whether this makes the room that the gate waits for.
    fn leave(&mut self) -> bool {
        self.held = self.held.saturating_sub(1);
        let comes = self.awaited && self.room() > 0;
        self.awaited &= !comes;
        comes
    }
}

impl Hand {
    /// It is written down; `true`: the gate waits to hear of the room that this makes. One that is begun without having
    /// been written down before counts from its start.
    pub fn written(self, start_at: Option<Instant>) -> bool {
        let from = start_at.map_or(self.granted_at, |start_at| start_at.max(self.granted_at));
        let took = Instant::now().saturating_duration_since(from);
        self.leave(Some(took))
    }

    /// It is not used. Kept for longer than it could be, it was not written down in time either.
    pub fn dropped(self) -> bool {
        let took = self.granted_at.elapsed();
        let late = took > self.budget;
        self.leave(late.then_some(took))
    }

    fn leave(self, took: Option<Duration>) -> bool {
        let mut state = self.hands.lock();
        if let Some(took) = took {
            let Self { budget, in_hands, cuts, .. } = self;
            state.pace.written(WrittenDown { took, budget, in_hands, cuts });
        }
        state.leave()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(64);

    #[tokio::test(start_paused = true)]
    async fn the_gate_hears_of_room_once_and_only_when_it_waits() {
        let hands = Hands::new(BUDGET);
        assert_eq!(hands.room(), 16);
        let mut taken: Vec<Hand> = (0..16).map(|_| hands.take(Instant::now(), BUDGET)).collect();
        let first = taken.pop().unwrap();
        assert!(!first.dropped(), "nobody waits");
        assert_eq!(hands.room(), 0, "one of sixteen is not worth a call");
        let mut heard = Vec::new();
        for hand in taken.drain(..6) {
            heard.push(hand.dropped());
        }
        assert_eq!(heard, [false, false, true, false, false, false], "{heard:?}");
        assert_eq!(hands.room(), 7);
        for hand in taken {
            hand.dropped();
        }
        assert_eq!(hands.room(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn late_ones_shrink_the_window_whether_they_are_used_or_not() {
        let hands = Hands::new(BUDGET);
        let (one, other) = (hands.take(Instant::now(), BUDGET), hands.take(Instant::now(), BUDGET));
        tokio::time::sleep(BUDGET * 2).await;
        one.written(None);
        assert_eq!(hands.room(), 7);
        other.dropped();
        assert_eq!(hands.room(), 8);
        let late = hands.take(Instant::now(), BUDGET);
        tokio::time::sleep(BUDGET * 2).await;
        late.dropped();
        assert_eq!(hands.room(), 4);
        // A start that was booked ahead is no delay.
        let ahead = hands.take(Instant::now(), BUDGET);
        let start_at = Instant::now() + 3 * BUDGET;
        tokio::time::sleep(3 * BUDGET).await;
        ahead.written(Some(start_at));
        assert_eq!(hands.room(), 4);
    }
}
