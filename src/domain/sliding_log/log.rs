//! The log of one limit: which of its slots were answered when, and which of them a call could take.
//!
//! Refuses to know calls and leases; it counts slots.

use std::collections::{VecDeque, vec_deque};

use crate::domain::decision::{LimitSpec, SlotInstant};

/// Most slots in one entry of a log, so that instant and count fit one exact integer in Lua.
pub const ENTRY_COUNT_MAX: u64 = 4_095;
/// How far from the head a slot that is given back looks for its place.
pub const RESTORE_DEPTH: usize = 16;

/// Slots answered at one millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub ms: u64,
    pub count: u64,
}

/// Used slots of one limit, oldest first, with what is known about the limit itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    pub entries: VecDeque<Entry>,
    pub logged: u64,
    pub window_us: u64,
    /// Nothing starts before: a new limit, or a window that grew, does not know its past.
    pub held_until_us: u64,
    pub tail_ms: u64,
    /// Uses beyond a lowered limit left the log for a start that was booked; all of them are over by then. A slot that
    /// was never used must not begin before.
    pub excess_until_us: u64,
}

impl Log {
    pub fn of(limit: &LimitSpec, held_until_us: u64) -> Self {
        Self { window_us: limit.padded_window_us(), held_until_us, ..Self::default() }
    }

    pub fn push(&mut self, ms: u64, count: u64) {
        let ms = ms.max(self.tail_ms);
        self.tail_ms = ms;
        self.logged += count;
        match self.entries.back_mut() {
            Some(tail) if tail.ms == ms && tail.count + count <= ENTRY_COUNT_MAX => tail.count += count,
            _ => self.entries.push_back(Entry { ms, count }),
        }
    }

    /// Puts slots back with the instant they had: before the first younger entry among those near the head. Further in
    /// is still safe, since every entry carries its own instant.
    pub fn restore(&mut self, ms: SlotInstant, count: u64) {
        let place = self.entries.iter().take(RESTORE_DEPTH).take_while(|entry| entry.ms < ms).count();
        self.entries.insert(place, Entry { ms, count });
        self.logged += count;
        self.tail_ms = self.tail_ms.max(ms);
    }

    /// As [`Log::push`], in as many entries as the count needs.
    pub fn push_many(&mut self, ms: u64, mut count: u64) {
        while count > 0 {
            let part = count.min(ENTRY_COUNT_MAX);
            self.push(ms, part);
            count -= part;
        }
    }

    /// Forgets the oldest uses; their slots have been taken again.
    pub fn forget_oldest(&mut self, mut uses: u64) {
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

/// Slots that one limit could give, while a call decides.
pub(super) struct Cursor<'a> {
    pub entries: vec_deque::Iter<'a, Entry>,
    pub head: Option<Entry>,
    /// Slots that were never used; below zero, that many uses must end before one more may begin.
    pub unused: i64,
    pub log: &'a Log,
    pub popped: u64,
}

/// Where a want finds its slots in one limit.
#[derive(Clone, Copy)]
pub(super) struct Found {
    pub start_us: u64,
    pub origin_ms: SlotInstant,
}

impl Cursor<'_> {
    /// Looks for `cost` slots from here on; `None` when all others are in flight.
    pub fn find(&self, cost: u64, now_us: u64) -> Option<Found> {
        let mut found = Found { start_us: now_us.max(self.log.held_until_us), origin_ms: 0 };
        if self.unused > 0 {
            found.start_us = found.start_us.max(self.log.excess_until_us);
        }
        let mut missing = self.missing(cost);
        let rest = self.entries.clone();
        for entry in self.head.into_iter().chain(rest.copied()) {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(entry.count);
            found.start_us = found.start_us.max(entry.ms * 1_000 + self.log.window_us);
            found.origin_ms = found.origin_ms.max(entry.ms);
        }
        (missing == 0).then_some(found)
    }

    pub fn take(&mut self, cost: u64) {
        let mut missing = self.missing(cost);
        self.unused = (self.unused - cost.cast_signed()).max(0);
        self.popped += missing;
        while missing > 0 {
            let Some(mut head) = self.head.take() else { break };
            let taken = missing.min(head.count);
            head.count -= taken;
            missing -= taken;
            self.head = if head.count > 0 { Some(head) } else { self.entries.next().copied() };
        }
    }

    /// Used slots that a cost needs to see the end of.
    fn missing(&self, cost: u64) -> u64 {
        (cost.cast_signed() - self.unused).max(0).cast_unsigned()
    }
}
