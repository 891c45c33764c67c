//! The line before the gate: who waits, in which order, and who has waited long enough.
//!
//! Refuses to overtake: a want that cannot be granted holds those behind it, so that a costly job is not starved.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{GateRefusal, Grant, RefusedBy};
use crate::domain::decision::BATCH_MAX;

/// Somebody who wants a permit.
#[derive(Debug)]
pub(super) struct Waiter {
    pub cost: u32,
    pub priority: u8,
    /// Will not wait in hand beyond this.
    pub wait_until: Instant,
    pub reply: oneshot::Sender<Grant>,
}

/// Place in line: higher priority first, then first come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    priority_reversed: u8,
    arrival: u64,
}

#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: BTreeMap<Place, Waiter>,
    arrivals: u64,
}

impl Line {
    pub fn join(&mut self, waiter: Waiter) {
        self.arrivals += 1;
        let place = Place { priority_reversed: u8::MAX - waiter.priority, arrival: self.arrivals };
        self.waiters.insert(place, waiter);
    }

    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Forgets those who have gone away.
    pub fn sweep(&mut self) {
        self.waiters.retain(|_, waiter| !waiter.reply.is_closed());
    }

    /// The first in line, for one call.
    pub fn head(&self) -> Vec<(Place, u32)> {
        self.waiters.iter().take(BATCH_MAX).map(|(place, waiter)| (*place, waiter.cost)).collect()
    }

    pub fn leave(&mut self, place: Place) -> Option<Waiter> {
        self.waiters.remove(&place)
    }

    /// When the next of them will have waited long enough.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiters.values().map(|waiter| waiter.wait_until).min()
    }

    /// Refuses everybody who would have to wait beyond their time for something that comes at `until`.
    pub fn refuse_waiting_for(&mut self, until: Instant, now: Instant, by: &RefusedBy, exact: bool) {
        let retry_after = until.saturating_duration_since(now).max(Duration::from_millis(1));
        let refused = self.waiters.extract_if(.., |_, waiter| waiter.wait_until < until);
        for (_, waiter) in refused {
            let refusal = GateRefusal { retry_after, exact, by: by.clone() };
            // Whoever has gone away needs no answer.
            let _ = waiter.reply.send(Grant::Refused(refusal));
        }
    }

    /// Refuses those whose cost no window can ever admit.
    pub fn refuse_costly(&mut self, cost_max: u32) {
        let refused = self.waiters.extract_if(.., |_, waiter| waiter.cost > cost_max);
        for (_, waiter) in refused {
            let refusal = GateRefusal { retry_after: Duration::ZERO, exact: true, by: RefusedBy::TooCostly };
            let _ = waiter.reply.send(Grant::Refused(refusal));
        }
    }
}
