//! Counters of uses, one for each kind of limit: a log, a fixed window, and a bucket.
//!
//! A log counts each use from its instant for one window. The sliding log holds a slot from the grant to the response
//! and logs the response's instant. All other logs log the start.
//!
//! Think of L slots. A held slot may be used again only W after the response of the call that had it. So two calls on
//! one slot are counted at least W apart at the provider, whatever the latency. L + 1 calls counted within less than W
//! would need two on one slot. The price by Little's law: rate ≤ L / (W + E\[hold\]). See
//! `docs/decisions/0007-hold-slots-until-the-response.md`. In doubt a slot is not free: doubt costs throughput, never
//! safety.
//!
//! A fixed window is a counter for the current window and one for the next, for a provider that counts per minute of
//! its clock. A start is booked no further ahead than the next window.
//!
//! A bucket serves token bucket, GCRA and pacing: one theoretical arrival time with different capacities. Each use
//! moves the instant at which the bucket is empty forward by one interval. There is capacity while that instant is at
//! most the capacity ahead (ITU-T I.371, the virtual scheduling algorithm). An interval is whole parts of a
//! microsecond, rounded up, so nothing is a fraction.

use std::collections::VecDeque;

use super::counter::Availability;
use crate::domain::permit_protocol::SlotInstant;
use crate::domain::quota_spec::{DEBT_PARTS, INTERVAL_PARTS};

/// Distance from the head within which a returned slot is put in order. Further in, it counts as used now.
const RESTORE_DEPTH: usize = 16;

/// Uses whose window begins at the same instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LogEntry {
    ms: u64,
    count: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct UseLog {
    /// Oldest first.
    entries: VecDeque<LogEntry>,
    /// Sum of the entries' counts.
    pub logged: u64,
    tail_ms: u64,
    /// Uses beyond a lowered limit left the log for a booked start; all of them are over by this instant. A slot that
    /// was never used must not start before.
    excess_until_us: u64,
    /// Slots that are neither logged nor in flight. Below zero, that many uses must end before one more may start.
    /// Valid during a call only.
    unused: i64,
    /// Uses beyond a lowered limit leave the log in this call.
    excess: bool,
}

impl UseLog {
    pub fn push(&mut self, ms: u64, granule_ms: u64, count: u64) {
        let ms = (ms.div_ceil(granule_ms) * granule_ms).max(self.tail_ms);
        self.tail_ms = ms;
        self.logged += count;
        match self.entries.back_mut() {
            Some(tail) if tail.ms == ms => tail.count += count,
            _ => self.entries.push_back(LogEntry { ms, count }),
        }
    }

    /// Removes all uses. Uses that a booked start took out still block the slots that were never used.
    pub fn clear(&mut self) {
        *self = Self { excess_until_us: self.excess_until_us, ..Self::default() };
    }

    /// Returns slots with the instant that they had.
    pub fn restore(&mut self, now_us: u64, ms: SlotInstant, granule_ms: u64, count: u64) {
        let index = self.entries.iter().take(RESTORE_DEPTH + 1).take_while(|entry| entry.ms < ms).count();
        if index > RESTORE_DEPTH {
            return self.push(now_us.div_ceil(1_000), granule_ms, count);
        }
        self.logged += count;
        self.tail_ms = self.tail_ms.max(ms);
        match self.entries.get_mut(index) {
            Some(entry) if entry.ms == ms => entry.count += count,
            _ => self.entries.insert(index, LogEntry { ms, count }),
        }
    }

    /// Called before the first request of a call.
    pub fn begin_batch(&mut self, max: u32, in_flight: u64) {
        self.unused = self.unused_slots(max, in_flight);
        self.excess = false;
    }

    fn unused_slots(&self, max: u32, in_flight: u64) -> i64 {
        i64::from(max) - self.logged.cast_signed() - in_flight.cast_signed()
    }

    /// Finds `cost` slots; `None` if all others are in flight.
    pub fn find(&self, cost: u64, from_us: u64, window_us: u64) -> Option<Availability> {
        self.find_with_unused(self.unused, cost, from_us, window_us)
    }

    /// The next slot, outside of a call.
    pub fn next_slot(&self, from_us: u64, window_us: u64, max: u32, in_flight: u64) -> Option<Availability> {
        self.find_with_unused(self.unused_slots(max, in_flight), 1, from_us, window_us)
    }

    fn find_with_unused(&self, unused: i64, cost: u64, from_us: u64, window_us: u64) -> Option<Availability> {
        let from_us = if unused > 0 { from_us.max(self.excess_until_us) } else { from_us };
        let missing = slots_to_reuse(unused, cost);
        if missing == 0 {
            return Some(Availability { start_us: from_us, origin_ms: 0, permits: unused.cast_unsigned() / cost });
        }
        let mut before = 0;
        for entry in &self.entries {
            if before + entry.count >= missing {
                // Entries are in order, so the last of those needed ends last.
                let alone = before == 0 && missing == cost;
                return Some(Availability {
                    start_us: from_us.max(entry.ms * 1_000 + window_us),
                    origin_ms: entry.ms,
                    permits: if alone { entry.count / cost } else { 1 },
                });
            }
            before += entry.count;
        }
        None
    }

    pub fn consume(&mut self, cost: u64) {
        let missing = slots_to_reuse(self.unused, cost);
        self.excess |= self.unused < 0;
        self.unused = (self.unused - cost.cast_signed()).max(0);
        self.forget_oldest(missing);
    }

    /// Called after the last request of a call; `latest_us` is its latest start.
    pub fn end_batch(&mut self, latest_us: u64) {
        if self.excess {
            self.excess_until_us = self.excess_until_us.max(latest_us);
        }
    }

    /// Uses that count at an instant.
    pub fn counted(&self, now_us: u64, window_us: u64) -> u64 {
        self.entries.iter().filter(|entry| entry.ms * 1_000 + window_us > now_us).map(|entry| entry.count).sum()
    }

    /// Instant after which no use begins to count.
    pub fn tail_ms(&self) -> u64 {
        self.tail_ms
    }

    /// Permits that can certainly start now, and the time until all of the limit is free again.
    pub fn remaining_and_reset(&self, now_us: u64, window_us: u64, max: u32, in_flight: u64) -> (u64, u64) {
        let over_us = self.tail_ms * 1_000 + window_us;
        let over = self.logged == 0 || over_us <= now_us;
        let counted = if over { in_flight } else { in_flight + self.logged };
        let reset_us = if over { 0 } else { over_us - now_us };
        let reset_us = if in_flight > 0 { reset_us.max(window_us) } else { reset_us };
        (u64::from(max).saturating_sub(counted), reset_us)
    }

    fn forget_oldest(&mut self, mut uses: u64) {
        while uses > 0 {
            let Some(head) = self.entries.front_mut() else { break };
            let dropped = head.count.min(uses);
            head.count -= dropped;
            self.logged -= dropped;
            uses -= dropped;
            if head.count == 0 {
                self.entries.pop_front();
            }
        }
    }
}

/// Used slots that must end before a cost fits, in addition to the unused ones.
fn slots_to_reuse(unused: i64, cost: u64) -> u64 {
    (cost.cast_signed() - unused).max(0).cast_unsigned()
}

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

/// Latest time after a use at which a bucket is empty: some four years, half of what the wait of a reply can hold.
pub(super) const AHEAD_MAX_US: u64 = 1 << 47;

/// Buckets are ordered by the instant at which they are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bucket {
    /// Instant at which the bucket is empty: whole microseconds, and parts of one.
    empty_us: u64,
    empty_part: u64,
}

impl Bucket {
    /// The earliest instant at which `cost` fits. With debt, any cost fits where a part of the
    /// bucket is free.
    pub fn find(&self, cost: u64, from_us: u64, interval: u64, max: u32, debt: bool) -> Option<Availability> {
        // With debt, a part of the bucket must be free.
        let needed = if debt { u64::from(max.div_ceil(DEBT_PARTS)) } else { cost };
        if needed > u64::from(max) {
            return None;
        }
        let tolerance = (u64::from(max) - needed) * interval;
        let full = self.empty_us * INTERVAL_PARTS + self.empty_part;
        let start_us = from_us.max(full.saturating_sub(tolerance).div_ceil(INTERVAL_PARTS));
        let room = u64::from(max) * interval - self.backlog(start_us);
        let permits = room / (cost * interval);
        let permits = if debt { permits.max(1) } else { permits };
        Some(Availability { start_us, origin_ms: 0, permits })
    }

    /// Counts a use; returns whether all of it could be counted.
    pub fn consume(&mut self, cost: u64, start_us: u64, interval: u64) -> bool {
        if start_us > self.empty_us || (start_us == self.empty_us && self.empty_part == 0) {
            (self.empty_us, self.empty_part) = (start_us, 0);
        }
        let part = self.empty_part + cost * (interval % INTERVAL_PARTS);
        let whole_us = cost.saturating_mul(interval / INTERVAL_PARTS).saturating_add(part / INTERVAL_PARTS);
        let (empty_us, latest_us) = (self.empty_us.saturating_add(whole_us), start_us + AHEAD_MAX_US);
        let fits = empty_us <= latest_us;
        (self.empty_us, self.empty_part) = if fits { (empty_us, part % INTERVAL_PARTS) } else { (latest_us, 0) };
        fits
    }

    /// Counts a past use from a history; `most` is the bucket's capacity. Without this bound, uses under another
    /// interval or of another limit would pile up for hours. Returns whether all that it holds could be counted.
    pub fn replay(&mut self, cost: u64, instant_us: u64, interval: u64, most: u64) -> bool {
        let (before, mut full) = (*self, Self::default());
        let counted = self.consume(cost, instant_us, interval);
        let can_be_full = full.consume(most, instant_us, interval);
        if *self <= full {
            return counted;
        }
        *self = full.max(before);
        can_be_full
    }

    /// Converts the usage to a new interval; it keeps its size in permits. That may be more than the capacity: starts
    /// are booked ahead, and the capacity may have been lowered. Returns whether all of it could be counted.
    pub fn rescale(&mut self, now_us: u64, old: u64, new: u64) -> bool {
        let uses = self.counted(now_us, old);
        (self.empty_us, self.empty_part) = (now_us, 0);
        self.consume(uses, now_us, new)
    }

    /// Permits that have not drained at an instant, rounded up.
    pub fn counted(&self, now_us: u64, interval: u64) -> u64 {
        self.backlog(now_us).div_ceil(interval.max(1))
    }

    /// Permits that may start now, and the time until the bucket is empty.
    pub fn remaining_and_reset(&self, now_us: u64, interval: u64, max: u32) -> (u64, u64) {
        let backlog = self.backlog(now_us);
        let room = (u64::from(max) * interval).saturating_sub(backlog);
        (room / interval.max(1), backlog.div_ceil(INTERVAL_PARTS))
    }

    /// Distance of the empty instant, in parts.
    fn backlog(&self, at_us: u64) -> u64 {
        if at_us > self.empty_us { 0 } else { (self.empty_us - at_us) * INTERVAL_PARTS + self.empty_part }
    }
}
