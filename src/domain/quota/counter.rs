//! One limit's count, whatever its algorithm: where a want finds room, and what it takes.
//!
//! Refuses to know other limits; all or nothing over several is [`super::grant`]'s.

use super::bucket::{AHEAD_MAX_US, Bucket};
use super::counters::LedgerUsage;
use super::coverage::UncountedUses;
use super::log::UseLog;
use super::start_spread::StartSpreader;
use super::window::FixedWindowCounter;
use crate::domain::permit_protocol::SlotInstant;
use crate::domain::quota_spec::{CounterKind, CounterSpec};

/// Where a want finds room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Availability {
    pub start_us: u64,
    /// The youngest instant among the slots taken.
    pub origin_ms: SlotInstant,
    /// How many permits of this cost start there on the same terms; 0: too far ahead to be booked.
    pub permits: u64,
}

impl Availability {
    /// What a limit says that does not count the want.
    pub fn unconstrained(start_us: u64) -> Self {
        Self { start_us, origin_ms: 0, permits: u64::MAX }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Counter {
    pub spec: CounterSpec,
    /// Nothing starts before.
    blocked_until_us: u64,
    /// It is held for what was granted before and not counted; 0: for nothing that anybody could tell.
    uncounted_since_us: u64,
    count: CounterState,
    /// Uses on the wire that no lease holds, and when the last of them begins to count.
    unattributed: u64,
    unattributed_until_us: u64,
    /// Starts of this call that a log takes when the call closes: they are no slots for its own wants.
    starts: Vec<(u64, u64)>,
    /// Of this call's starts.
    spreader: StartSpreader,
    pub would_have_refused: u64,
    pub would_have_waited: u64,
}

#[derive(Clone, Debug)]
enum CounterState {
    Log(UseLog),
    Window(FixedWindowCounter),
    Bucket(Bucket),
}

impl Counter {
    /// A count without these uses. One that only watches begins empty.
    pub fn new(spec: CounterSpec, unknown: UncountedUses) -> Self {
        let count = match spec.kind {
            CounterKind::Log { .. } => CounterState::Log(UseLog::default()),
            CounterKind::Window { .. } => CounterState::Window(FixedWindowCounter::default()),
            CounterKind::Bucket { .. } => CounterState::Bucket(Bucket::default()),
        };
        let mut cell = Self {
            spec,
            blocked_until_us: 0,
            uncounted_since_us: 0,
            count,
            unattributed: 0,
            unattributed_until_us: 0,
            starts: Vec::new(),
            spreader: StartSpreader::default(),
            would_have_refused: 0,
            would_have_waited: 0,
        };
        cell.block_for(unknown);
        cell
    }

    /// The same limit with other numbers, its uses carried over; a cell that counts otherwise does not know its past.
    /// Uses beyond a lowered limit stay: they still count, and would count again if the limit were raised.
    pub fn apply_spec(self, spec: CounterSpec, now_us: u64, unknown: UncountedUses) -> Self {
        let mut cell = self;
        if cell.spec == spec {
            return cell;
        }
        let same = match (cell.spec.kind, spec.kind) {
            (CounterKind::Log { held: was, .. }, CounterKind::Log { held, .. }) => was == held,
            (CounterKind::Window { offset_us: was }, CounterKind::Window { offset_us }) => {
                was == offset_us && cell.spec.window_us == spec.window_us
            }
            (CounterKind::Bucket { .. }, CounterKind::Bucket { .. }) => true,
            _ => false,
        };
        // A shadow left out what it would have refused.
        let leaves_the_shadow = cell.spec.shadow && !spec.shadow;
        if !same || leaves_the_shadow || cell.spec.applies_to != spec.applies_to {
            return Self::new(spec, unknown);
        }
        let (mut counted, grew) = (true, spec.window_us > cell.spec.window_us);
        let unknown_until_us = unknown.until_us + spec.window_us;
        match (&mut cell.count, cell.spec.kind, spec.kind) {
            (
                CounterState::Bucket(bucket),
                CounterKind::Bucket { interval: was, .. },
                CounterKind::Bucket { interval, .. },
            ) if was != interval => {
                counted = bucket.rescale(now_us, was, interval);
            }
            (CounterState::Log(_), ..) if grew => {
                cell.blocked_until_us = unknown_until_us;
                cell.uncounted_since_us = cell.uncounted_since_us.max(unknown.since_us);
            }
            _ => {}
        }
        // One that is new would not have to wait longer.
        cell.blocked_until_us = cell.blocked_until_us.min(unknown_until_us);
        if !counted {
            cell.block_until_drained(now_us);
        }
        if spec.shadow {
            (cell.blocked_until_us, cell.uncounted_since_us) = (0, 0);
        }
        Self { spec, ..cell }
    }

    /// These uses are not counted: nothing starts until they are told, or have left the window.
    pub fn block_for(&mut self, unknown: UncountedUses) {
        if unknown.until_us > 0 && !self.spec.shadow {
            self.blocked_until_us = self.blocked_until_us.max(unknown.until_us + self.spec.window_us);
            self.uncounted_since_us = self.uncounted_since_us.max(unknown.since_us);
        }
    }

    /// Until when it is held for a past that the ledger could tell, if that is later.
    pub fn needs_history(&self, at_us: u64) -> Option<u64> {
        (self.uncounted_since_us > 0 && self.blocked_until_us > at_us).then_some(self.blocked_until_us)
    }

    /// When the ledger knows all of that past, for starts that begin so long after their grant at most.
    pub fn readable_at_us(&self, in_hands_us: u64) -> u64 {
        self.uncounted_since_us + in_hands_us
    }

    /// Counts what the ledger knows instead of what it has counted, if that is all that it needs.
    pub fn seed(&mut self, now_us: u64, past: &LedgerUsage, open_until_us: u64) -> bool {
        let is_all = self.uncounted_since_us <= past.as_of_us && self.spec.window_us <= past.within_us;
        if self.needs_history(now_us).is_none() || !is_all {
            return false;
        }
        (self.blocked_until_us, self.uncounted_since_us) = (0, 0);
        match &mut self.count {
            CounterState::Log(log) => log.clear(),
            CounterState::Window(window) => *window = FixedWindowCounter::default(),
            CounterState::Bucket(bucket) => *bucket = Bucket::default(),
        }
        self.replay_all(now_us, past);
        if self.spec.is_held() {
            self.unattributed = past.in_flight.counted_by(self.spec.applies_to);
            self.unattributed_until_us = open_until_us;
        }
        true
    }

    /// Requests that the ledger remembers. What counts the start has been started by now.
    pub fn replay_all(&mut self, now_us: u64, past: &LedgerUsage) {
        for (instant_us, cost) in &past.ended {
            let uses = cost.counted_by(self.spec.applies_to);
            if uses > 0 {
                self.replay(now_us, *instant_us, u64::from(uses));
            }
        }
        let started = past.in_flight.counted_by(self.spec.applies_to);
        if started > 0 && !self.spec.is_held() {
            self.replay(now_us, now_us, started);
        }
    }

    /// Whatever became of what no lease holds, the provider has counted it by then.
    pub fn expire(&mut self, now_us: u64) {
        if self.unattributed > 0 && self.unattributed_until_us <= now_us {
            let uses = std::mem::take(&mut self.unattributed);
            self.log_unanswered(now_us, self.unattributed_until_us, uses);
        }
    }

    fn in_flight(&self, leased: u64) -> u64 {
        if self.spec.is_held() { leased + self.unattributed } else { 0 }
    }

    /// More was used than can be counted: nothing starts for longer than that could tell, and under other numbers until
    /// a limit that is new might.
    fn block_until_drained(&mut self, now_us: u64) {
        self.blocked_until_us = self.blocked_until_us.max(now_us + AHEAD_MAX_US);
    }

    /// Before the first want of a call.
    pub fn begin_batch(&mut self, now_us: u64, leased: u64, jitter_us: u64) {
        let in_flight = self.in_flight(leased);
        match (&mut self.count, self.spec.kind) {
            (CounterState::Log(log), _) => {
                log.begin_batch(self.spec.max, in_flight);
                self.spreader = StartSpreader::after(&self.spec, log.tail_ms(), jitter_us, now_us);
            }
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.roll(now_us, offset_us, self.spec.window_us);
            }
            _ => {}
        }
    }

    pub fn find(&self, cost: u64, from_us: u64) -> Option<Availability> {
        let from_us = from_us.max(self.blocked_until_us);
        let CounterSpec { max, window_us, .. } = self.spec;
        match (&self.count, self.spec.kind) {
            (CounterState::Log(log), _) => log.find(cost, from_us, window_us),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.find(cost, from_us, offset_us, window_us, max)
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, debt }) => {
                bucket.find(cost, from_us, interval, max, debt)
            }
            _ => None,
        }
    }

    /// The same place, or a later one where fewer start at once.
    pub fn spread(&self, found: Availability, cost: u64, now_us: u64) -> Availability {
        self.spreader.spread(found, cost, now_us)
    }

    pub fn consume(&mut self, cost: u64, start_us: u64) {
        // What it was held for is over, and the ledger does not know of this one.
        self.uncounted_since_us = 0;
        match (&mut self.count, self.spec.kind) {
            (CounterState::Log(log), CounterKind::Log { held, .. }) => {
                log.consume(cost);
                if !held {
                    self.starts.push((start_us, cost));
                    self.spreader.record_start(start_us, cost);
                }
            }
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.consume(cost, start_us, offset_us, self.spec.window_us);
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, .. }) => {
                // What finds room can be counted.
                bucket.consume(cost, start_us, interval);
            }
            _ => {}
        }
    }

    /// After the last want of a call whose latest start this is. A start counts for as much longer as the way to the
    /// provider may take.
    pub fn end_batch(&mut self, latest_us: u64, jitter_us: u64) {
        if let CounterState::Log(log) = &mut self.count {
            log.end_batch(latest_us);
        }
        for (start_us, uses) in std::mem::take(&mut self.starts) {
            self.log_use(start_us + jitter_us, uses);
        }
    }

    pub fn is_pacing(&self) -> bool {
        matches!(self.spec.kind, CounterKind::Bucket { debt: true, .. })
    }

    pub fn is_window(&self) -> bool {
        matches!(self.spec.kind, CounterKind::Window { .. })
    }

    /// Uses whose window runs from an instant.
    pub fn log_use(&mut self, instant_us: u64, cost: u64) {
        if let (CounterState::Log(log), CounterKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) {
            log.push(instant_us.div_ceil(1_000), granule_ms, cost);
        }
    }

    /// Uses that nobody answered for, and that were counted by their deadline at the latest. Those that are over are not put
    /// behind younger ones.
    pub fn log_unanswered(&mut self, now_us: u64, deadline_us: u64, cost: u64) {
        if deadline_us + self.spec.window_us > now_us {
            self.log_use(deadline_us, cost);
        }
    }

    /// Slots come back with the instant they had; one whose use is over is free anyway.
    pub fn restore(&mut self, now_us: u64, origin_ms: SlotInstant, cost: u64) {
        let (CounterState::Log(log), CounterKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) else {
            return;
        };
        if origin_ms * 1_000 + self.spec.window_us > now_us {
            log.restore(now_us, origin_ms, granule_ms, cost);
        }
    }

    /// A request that the ledger remembers.
    fn replay(&mut self, now_us: u64, instant_us: u64, cost: u64) {
        match (&mut self.count, self.spec.kind) {
            (CounterState::Log(_), _) => self.log_use(instant_us, cost),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.roll(now_us, offset_us, self.spec.window_us);
                window.replay(instant_us, cost, offset_us, self.spec.window_us);
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, debt }) => {
                // The provider's bucket was never more than full. With debt one start may be.
                let max = u64::from(self.spec.max);
                let most = if debt { cost.max(max) } else { max };
                if !bucket.replay(cost, instant_us, interval, most) {
                    self.block_until_drained(now_us);
                }
            }
            _ => {}
        }
    }

    /// Uses that count at an instant.
    pub fn counted(&self, now_us: u64, leased: u64) -> u64 {
        match (&self.count, self.spec.kind) {
            (CounterState::Log(log), _) => log.counted(now_us, self.spec.window_us) + self.in_flight(leased),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.counted(now_us, offset_us, self.spec.window_us)
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, .. }) => bucket.counted(now_us, interval),
            _ => 0,
        }
    }

    /// What may surely start now, and in how many microseconds all of it is free again.
    pub fn remaining_and_reset(&self, now_us: u64, leased: u64) -> (u64, u64) {
        let in_flight = self.in_flight(leased);
        let CounterSpec { max, window_us, .. } = self.spec;
        match (&self.count, self.spec.kind) {
            (CounterState::Log(log), _) => log.remaining_and_reset(now_us, window_us, max, in_flight),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.rolled(now_us, offset_us, window_us).remaining_and_reset(now_us, offset_us, window_us, max)
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, .. }) => {
                bucket.remaining_and_reset(now_us, interval, max)
            }
            _ => (0, 0),
        }
    }

    /// The start of the next permit of cost 1, from an instant on. Calls in flight count as answered now.
    pub fn next_start_us(&self, now_us: u64, from_us: u64, leased: u64) -> u64 {
        let from_us = from_us.max(self.blocked_until_us);
        let CounterSpec { max, window_us, .. } = self.spec;
        let found = match (&self.count, self.spec.kind) {
            _ if max == 0 => return from_us,
            (CounterState::Log(log), _) => log.next_slot(from_us, window_us, max, self.in_flight(leased)),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.rolled(now_us, offset_us, window_us).find(1, from_us, offset_us, window_us, max)
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, debt }) => {
                bucket.find(1, from_us, interval, max, debt)
            }
            _ => None,
        };
        found.map_or(from_us.max(now_us + window_us), |found| found.start_us)
    }
}
