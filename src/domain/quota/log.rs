//! Log of uses: each use counts from its instant for one window. The sliding log holds a slot from the grant to the
//! response and logs the response's instant. All other logs log the start.
//!
//! Think of L slots. A held slot may be used again only W after the response of the call that had it. So two calls on
//! one slot are counted at least W apart at the provider, whatever the latency. L + 1 calls counted within less than W
//! would need two on one slot. The price by Little's law: rate ≤ L / (W + E\[hold\]). See
//! `docs/decisions/0007-hold-slots-until-the-response.md`.
//!
//! In doubt a slot is not free: doubt costs throughput, never safety.

use std::collections::VecDeque;

use super::counter::Availability;
use crate::domain::permit_protocol::SlotInstant;

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
