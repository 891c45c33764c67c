//! Fixed window: a counter for the current window and one for the next, for a provider that counts per minute of its
//! clock.
//!
//! A start is booked no further ahead than the next window.

use super::counter::Availability;

#[derive(Clone, Debug, Default)]
pub(super) struct FixedWindowCounter {
    index: u64,
    count: u64,
    next: u64,
}

/// The window of an instant, and its beginning.
fn window_of(instant_us: u64, offset_us: u64, window_us: u64) -> (u64, u64) {
    let index = (instant_us - offset_us) / window_us;
    (index, index * window_us + offset_us)
}

impl FixedWindowCounter {
    /// Drops windows that are over.
    pub fn roll(&mut self, now_us: u64, offset_us: u64, window_us: u64) {
        let (index, _) = window_of(now_us, offset_us, window_us);
        if index == self.index {
            return;
        }
        self.count = if index == self.index + 1 { self.next } else { 0 };
        self.next = 0;
        self.index = index;
    }

    /// The counters at an instant.
    pub fn rolled(&self, now_us: u64, offset_us: u64, window_us: u64) -> Self {
        let mut rolled = self.clone();
        rolled.roll(now_us, offset_us, window_us);
        rolled
    }

    /// The earliest window with capacity. [`Availability::permits`] is 0 for one that is too far ahead to be booked.
    pub fn find(&self, cost: u64, from_us: u64, offset_us: u64, window_us: u64, max: u32) -> Option<Availability> {
        let max = u64::from(max);
        if cost > max {
            return None;
        }
        let mut start_us = from_us;
        loop {
            let (index, begin_us) = window_of(start_us, offset_us, window_us);
            let free = match index.saturating_sub(self.index) {
                0 => max.saturating_sub(self.count) / cost,
                1 => max.saturating_sub(self.next) / cost,
                _ => return Some(Availability { start_us, origin_ms: 0, permits: 0 }),
            };
            if free > 0 {
                return Some(Availability { start_us, origin_ms: 0, permits: free });
            }
            start_us = begin_us + window_us;
        }
    }

    pub fn consume(&mut self, cost: u64, start_us: u64, offset_us: u64, window_us: u64) {
        if window_of(start_us, offset_us, window_us).0 == self.index {
            self.count += cost;
        } else {
            self.next += cost;
        }
    }

    /// Counts a past request, if it falls into this window.
    pub fn replay(&mut self, instant_us: u64, cost: u64, offset_us: u64, window_us: u64) {
        if window_of(instant_us, offset_us, window_us).0 >= self.index {
            self.count += cost;
        }
    }

    pub fn counted(&self, now_us: u64, offset_us: u64, window_us: u64) -> u64 {
        match window_of(now_us, offset_us, window_us).0.saturating_sub(self.index) {
            0 => self.count,
            1 => self.next,
            _ => 0,
        }
    }

    /// Permits that can certainly start now, and the time until all of the limit is free again.
    pub fn remaining_and_reset(&self, now_us: u64, offset_us: u64, window_us: u64, max: u32) -> (u64, u64) {
        let (_, begin_us) = window_of(now_us, offset_us, window_us);
        let windows = if self.next > 0 { 2 } else { u64::from(self.count > 0) };
        let reset_us = (begin_us + windows * window_us).saturating_sub(now_us);
        (u64::from(max).saturating_sub(self.count), reset_us)
    }
}
