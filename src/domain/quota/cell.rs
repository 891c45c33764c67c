//! One limit's count, whatever its algorithm: where a want finds room, and what it takes.
//!
//! Refuses to know other limits; all or nothing over several is [`super::grant`]'s.

use super::bucket::{AHEAD_MAX_US, Bucket};
use super::crowd::Crowd;
use super::known::Unknown;
use super::log::Log;
use super::tally::Past;
use super::window::Window;
use crate::domain::decision::SlotInstant;
use crate::domain::quota_spec::{CellKind, CellSpec};

/// Where a want finds room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub start_us: u64,
    /// The youngest instant among the slots taken.
    pub origin_ms: SlotInstant,
    /// How many permits of this cost start there on the same terms; 0: too far ahead to be booked.
    pub permits: u64,
}

impl Found {
    /// What a limit says that does not count the want.
    pub fn anything(start_us: u64) -> Self {
        Self { start_us, origin_ms: 0, permits: u64::MAX }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub spec: CellSpec,
    /// Nothing starts before.
    held_until_us: u64,
    /// It is held for what was granted before and not counted; 0: for nothing that anybody could tell.
    unknown_since_us: u64,
    count: Count,
    /// Uses on the wire that no lease holds, and when the last of them begins to count.
    unleased: u64,
    unleased_until_us: u64,
    /// Starts of this call that a log takes when the call closes: they are no slots for its own wants.
    starts: Vec<(u64, u64)>,
    /// Of this call's starts.
    crowd: Crowd,
    pub would_have_refused: u64,
    pub would_have_waited: u64,
}

#[derive(Clone, Debug)]
enum Count {
    Log(Log),
    Window(Window),
    Bucket(Bucket),
}

impl Cell {
    /// A count without these uses. One that only watches begins empty.
    pub fn new(spec: CellSpec, unknown: Unknown) -> Self {
        let count = match spec.kind {
            CellKind::Log { .. } => Count::Log(Log::default()),
            CellKind::Window { .. } => Count::Window(Window::default()),
            CellKind::Bucket { .. } => Count::Bucket(Bucket::default()),
        };
        let mut cell = Self {
            spec,
            held_until_us: 0,
            unknown_since_us: 0,
            count,
            unleased: 0,
            unleased_until_us: 0,
            starts: Vec::new(),
            crowd: Crowd::default(),
            would_have_refused: 0,
            would_have_waited: 0,
        };
        cell.hold(unknown);
        cell
    }

    /// The same limit with other numbers, its uses carried over; a cell that counts otherwise does not know its past.
    /// Uses beyond a lowered limit stay: they still count, and would count again if the limit were raised.
    pub fn adopt(self, spec: CellSpec, now_us: u64, unknown: Unknown) -> Self {
        let mut cell = self;
        if cell.spec == spec {
            return cell;
        }
        let same = match (cell.spec.kind, spec.kind) {
            (CellKind::Log { held: was, .. }, CellKind::Log { held, .. }) => was == held,
            (CellKind::Window { offset_us: was }, CellKind::Window { offset_us }) => {
                was == offset_us && cell.spec.window_us == spec.window_us
            }
            (CellKind::Bucket { .. }, CellKind::Bucket { .. }) => true,
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
            (Count::Bucket(bucket), CellKind::Bucket { interval: was, .. }, CellKind::Bucket { interval, .. })
                if was != interval =>
            {
                counted = bucket.rescale(now_us, was, interval);
            }
            (Count::Log(_), ..) if grew => {
                cell.held_until_us = unknown_until_us;
                cell.unknown_since_us = cell.unknown_since_us.max(unknown.since_us);
            }
            _ => {}
        }
        // One that is new would not have to wait longer.
        cell.held_until_us = cell.held_until_us.min(unknown_until_us);
        if !counted {
            cell.hold_long(now_us);
        }
        if spec.shadow {
            (cell.held_until_us, cell.unknown_since_us) = (0, 0);
        }
        Self { spec, ..cell }
    }

    /// These uses are not counted: nothing starts until they are told, or have left the window.
    pub fn hold(&mut self, unknown: Unknown) {
        if unknown.until_us > 0 && !self.spec.shadow {
            self.held_until_us = self.held_until_us.max(unknown.until_us + self.spec.window_us);
            self.unknown_since_us = self.unknown_since_us.max(unknown.since_us);
        }
    }

    /// Until when it is held for a past that the ledger could tell, if that is later.
    pub fn needs_history(&self, at_us: u64) -> Option<u64> {
        (self.unknown_since_us > 0 && self.held_until_us > at_us).then_some(self.held_until_us)
    }

    /// When the ledger knows all of that past, for starts that begin so long after their grant at most.
    pub fn readable_at_us(&self, in_hands_us: u64) -> u64 {
        self.unknown_since_us + in_hands_us
    }

    /// Counts what the ledger knows instead of what it has counted, if that is all that it needs.
    pub fn seed(&mut self, now_us: u64, past: &Past, open_until_us: u64) -> bool {
        let is_all = self.unknown_since_us <= past.as_of_us && self.spec.window_us <= past.within_us;
        if self.needs_history(now_us).is_none() || !is_all {
            return false;
        }
        (self.held_until_us, self.unknown_since_us) = (0, 0);
        match &mut self.count {
            Count::Log(log) => log.clear(),
            Count::Window(window) => *window = Window::default(),
            Count::Bucket(bucket) => *bucket = Bucket::default(),
        }
        self.recall_all(now_us, past);
        if self.spec.held() {
            self.unleased = past.open.of(self.spec.applies_to);
            self.unleased_until_us = open_until_us;
        }
        true
    }

    /// Requests that the ledger remembers. What counts the start has been started by now.
    pub fn recall_all(&mut self, now_us: u64, past: &Past) {
        for (instant_us, cost) in &past.ended {
            let uses = cost.of(self.spec.applies_to);
            if uses > 0 {
                self.recall(now_us, *instant_us, u64::from(uses));
            }
        }
        let started = past.open.of(self.spec.applies_to);
        if started > 0 && !self.spec.held() {
            self.recall(now_us, now_us, started);
        }
    }

    /// Whatever became of what no lease holds, the provider has counted it by then.
    pub fn expire(&mut self, now_us: u64) {
        if self.unleased > 0 && self.unleased_until_us <= now_us {
            let uses = std::mem::take(&mut self.unleased);
            self.log_unanswered(now_us, self.unleased_until_us, uses);
        }
    }

    fn in_flight(&self, leased: u64) -> u64 {
        if self.spec.held() { leased + self.unleased } else { 0 }
    }

    /// More was used than can be counted: nothing starts for longer than that could tell, and under other numbers until
    /// a limit that is new might.
    fn hold_long(&mut self, now_us: u64) {
        self.held_until_us = self.held_until_us.max(now_us + AHEAD_MAX_US);
    }

    /// Before the first want of a call.
    pub fn open(&mut self, now_us: u64, leased: u64, jitter_us: u64) {
        let in_flight = self.in_flight(leased);
        match (&mut self.count, self.spec.kind) {
            (Count::Log(log), _) => {
                log.open(self.spec.max, in_flight);
                self.crowd = Crowd::behind(&self.spec, log.tail_ms(), jitter_us, now_us);
            }
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.roll(now_us, offset_us, self.spec.window_us);
            }
            _ => {}
        }
    }

    pub fn find(&self, cost: u64, from_us: u64) -> Option<Found> {
        let from_us = from_us.max(self.held_until_us);
        let CellSpec { max, window_us, .. } = self.spec;
        match (&self.count, self.spec.kind) {
            (Count::Log(log), _) => log.find(cost, from_us, window_us),
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.find(cost, from_us, offset_us, window_us, max)
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, debt }) => {
                bucket.find(cost, from_us, interval, max, debt)
            }
            _ => None,
        }
    }

    /// The same place, or a later one where fewer start at once.
    pub fn apart(&self, found: Found, cost: u64, now_us: u64) -> Found {
        self.crowd.apart(found, cost, now_us)
    }

    pub fn take(&mut self, cost: u64, start_us: u64) {
        // What it was held for is over, and the ledger does not know of this one.
        self.unknown_since_us = 0;
        match (&mut self.count, self.spec.kind) {
            (Count::Log(log), CellKind::Log { held, .. }) => {
                log.take(cost);
                if !held {
                    self.starts.push((start_us, cost));
                    self.crowd.take(start_us, cost);
                }
            }
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.take(cost, start_us, offset_us, self.spec.window_us);
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, .. }) => {
                // What finds room can be counted.
                bucket.take(cost, start_us, interval);
            }
            _ => {}
        }
    }

    /// After the last want of a call whose latest start this is. A start counts for as much longer as the way to the
    /// provider may take.
    pub fn close(&mut self, latest_us: u64, jitter_us: u64) {
        if let Count::Log(log) = &mut self.count {
            log.close(latest_us);
        }
        for (start_us, uses) in std::mem::take(&mut self.starts) {
            self.log(start_us + jitter_us, uses);
        }
    }

    pub fn is_pacing(&self) -> bool {
        matches!(self.spec.kind, CellKind::Bucket { debt: true, .. })
    }

    pub fn is_window(&self) -> bool {
        matches!(self.spec.kind, CellKind::Window { .. })
    }

    /// Uses whose window runs from an instant.
    pub fn log(&mut self, instant_us: u64, cost: u64) {
        if let (Count::Log(log), CellKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) {
            log.push(instant_us.div_ceil(1_000), granule_ms, cost);
        }
    }

    /// Uses that nobody answered for, and that were counted by their deadline at the latest. Those that are over are not put
    /// behind younger ones.
    pub fn log_unanswered(&mut self, now_us: u64, deadline_us: u64, cost: u64) {
        if deadline_us + self.spec.window_us > now_us {
            self.log(deadline_us, cost);
        }
    }

    /// Slots come back with the instant they had; one whose use is over is free anyway.
    pub fn restore(&mut self, now_us: u64, origin_ms: SlotInstant, cost: u64) {
        let (Count::Log(log), CellKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) else { return };
        if origin_ms * 1_000 + self.spec.window_us > now_us {
            log.restore(now_us, origin_ms, granule_ms, cost);
        }
    }

    /// A request that the ledger remembers.
    fn recall(&mut self, now_us: u64, instant_us: u64, cost: u64) {
        match (&mut self.count, self.spec.kind) {
            (Count::Log(_), _) => self.log(instant_us, cost),
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.roll(now_us, offset_us, self.spec.window_us);
                window.recall(instant_us, cost, offset_us, self.spec.window_us);
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, debt }) => {
                // The provider's bucket was never more than full. With debt one start may be.
                let max = u64::from(self.spec.max);
                let most = if debt { cost.max(max) } else { max };
                if !bucket.recall(cost, instant_us, interval, most) {
                    self.hold_long(now_us);
                }
            }
            _ => {}
        }
    }

    /// Uses that count at an instant.
    pub fn counted(&self, now_us: u64, leased: u64) -> u64 {
        match (&self.count, self.spec.kind) {
            (Count::Log(log), _) => log.counted(now_us, self.spec.window_us) + self.in_flight(leased),
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.counted(now_us, offset_us, self.spec.window_us)
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, .. }) => bucket.counted(now_us, interval),
            _ => 0,
        }
    }

    /// What may surely start now, and in how many microseconds all of it is free again.
    pub fn outlook(&self, now_us: u64, leased: u64) -> (u64, u64) {
        let in_flight = self.in_flight(leased);
        let CellSpec { max, window_us, .. } = self.spec;
        match (&self.count, self.spec.kind) {
            (Count::Log(log), _) => log.outlook(now_us, window_us, max, in_flight),
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.rolled(now_us, offset_us, window_us).outlook(now_us, offset_us, window_us, max)
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, .. }) => bucket.outlook(now_us, interval, max),
            _ => (0, 0),
        }
    }

    /// The start of the next permit of cost 1, from an instant on. Calls in flight count as answered now.
    pub fn next_start_us(&self, now_us: u64, from_us: u64, leased: u64) -> u64 {
        let from_us = from_us.max(self.held_until_us);
        let CellSpec { max, window_us, .. } = self.spec;
        let found = match (&self.count, self.spec.kind) {
            _ if max == 0 => return from_us,
            (Count::Log(log), _) => log.next(from_us, window_us, max, self.in_flight(leased)),
            (Count::Window(window), CellKind::Window { offset_us }) => {
                window.rolled(now_us, offset_us, window_us).find(1, from_us, offset_us, window_us, max)
            }
            (Count::Bucket(bucket), CellKind::Bucket { interval, debt }) => {
                bucket.find(1, from_us, interval, max, debt)
            }
            _ => None,
        };
        found.map_or(from_us.max(now_us + window_us), |found| found.start_us)
    }
}
