//! Counter of one limit, whatever its algorithm: where a request finds capacity, and what it uses.
//!
//! A counter does not know other limits. Acquiring from several limits or from none is the work of [`super::grant`].

use super::cells::{AHEAD_MAX_US, Bucket, FixedWindowCounter, UseLog};
use super::counters::{FreeSlots, LedgerUsage};
use super::coverage::UncountedUses;
use super::start_spread::StartSpreader;
use crate::domain::limit_usage::{STILL_USED_STEPS, STILL_USED_WINDOW_MIN_US};
use crate::domain::permit_protocol::SlotInstant;
use crate::domain::quota_spec::{CounterKind, CounterSpec};

/// Earliest start that a limit allows a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Availability {
    pub start_us: u64,
    /// The youngest instant among the acquired slots.
    pub origin_ms: SlotInstant,
    /// Permits of this cost that start then on the same terms; 0: too far ahead to be booked.
    pub permits: u64,
}

impl Availability {
    /// Availability by a limit that does not count the request.
    pub fn unconstrained(start_us: u64) -> Self {
        Self { start_us, origin_ms: 0, permits: u64::MAX }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Counter {
    pub spec: CounterSpec,
    /// Nothing starts before this instant.
    blocked_until_us: u64,
    /// Reason of the block: permits granted before this instant were not counted, and the ledger may know them. 0: no
    /// such reason.
    uncounted_since_us: u64,
    count: CounterState,
    /// Uses in flight that no lease holds, and when the last of them begins to count.
    unattributed: u64,
    unattributed_until_us: u64,
    /// Starts of this call, which a log takes when the batch ends: they are no free slots for the same call.
    starts: Vec<(u64, u64)>,
    /// Spreads the starts of this call.
    spreader: StartSpreader,
    pub would_have_refused: u64,
    pub would_have_waited: u64,
}

#[derive(Clone, Debug)]
enum CounterState {
    Log(UseLog),
    Window(FixedWindowCounter),
    Bucket(Bucket),
    InFlight(FreeSlots),
}

impl Counter {
    /// An empty counter that has not counted the uses in `unknown`. A shadow limit ignores them.
    pub fn new(spec: CounterSpec, unknown: UncountedUses) -> Self {
        let count = match spec.kind {
            CounterKind::Log { .. } => CounterState::Log(UseLog::default()),
            CounterKind::Window { .. } => CounterState::Window(FixedWindowCounter::default()),
            CounterKind::Bucket { .. } => CounterState::Bucket(Bucket::default()),
            CounterKind::InFlight => CounterState::InFlight(FreeSlots::default()),
        };
        let mut counter = Self {
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
        counter.block_for(unknown);
        counter
    }

    /// Changes the numbers of the limit and keeps its uses. A counter that counts in another way does not know its
    /// past. Uses beyond a lowered limit stay: they still count, and count again if the limit is raised.
    pub fn apply_spec(self, spec: CounterSpec, now_us: u64, unknown: UncountedUses) -> Self {
        let mut counter = self;
        if counter.spec == spec {
            return counter;
        }
        let same = match (counter.spec.kind, spec.kind) {
            (CounterKind::Log { held: was, .. }, CounterKind::Log { held, .. }) => was == held,
            (CounterKind::Window { offset_us: was }, CounterKind::Window { offset_us }) => {
                was == offset_us && counter.spec.window_us == spec.window_us
            }
            (CounterKind::Bucket { .. }, CounterKind::Bucket { .. })
            | (CounterKind::InFlight, CounterKind::InFlight) => true,
            _ => false,
        };
        // A shadow limit did not count what it would have refused.
        let leaves_the_shadow = counter.spec.shadow && !spec.shadow;
        if !same || leaves_the_shadow || counter.spec.applies_to != spec.applies_to {
            return Self::new(spec, unknown);
        }
        let (mut counted, grew) = (true, spec.window_us > counter.spec.window_us);
        let unknown_until_us = unknown.until_us + spec.window_us;
        match (&mut counter.count, counter.spec.kind, spec.kind) {
            (
                CounterState::Bucket(bucket),
                CounterKind::Bucket { interval: was, .. },
                CounterKind::Bucket { interval, .. },
            ) if was != interval => {
                counted = bucket.rescale(now_us, was, interval);
            }
            (CounterState::Log(_), ..) if grew => {
                counter.blocked_until_us = unknown_until_us;
                counter.uncounted_since_us = counter.uncounted_since_us.max(unknown.since_us);
            }
            _ => {}
        }
        // A new counter would not have to wait longer.
        counter.blocked_until_us = counter.blocked_until_us.min(unknown_until_us);
        if !counted {
            counter.block_until_drained(now_us);
        }
        if spec.shadow {
            (counter.blocked_until_us, counter.uncounted_since_us) = (0, 0);
        }
        Self { spec, ..counter }
    }

    /// Blocks the counter for uncounted uses: nothing starts until the history is read, or the uses have left the
    /// window.
    pub fn block_for(&mut self, unknown: UncountedUses) {
        if unknown.until_us > 0 && !self.spec.shadow {
            self.blocked_until_us = self.blocked_until_us.max(unknown.until_us + self.spec.window_us);
            self.uncounted_since_us = self.uncounted_since_us.max(unknown.since_us);
        }
    }

    /// Until when it is blocked for a past that the ledger may know, if that is after `at_us`.
    pub fn needs_history(&self, at_us: u64) -> Option<u64> {
        (self.uncounted_since_us > 0 && self.blocked_until_us > at_us).then_some(self.blocked_until_us)
    }

    /// Instant at which the ledger knows all of that past, if starts begin at most `start_delay_us` after their grant.
    pub fn readable_at_us(&self, start_delay_us: u64) -> u64 {
        self.uncounted_since_us + start_delay_us
    }

    /// Replaces its usage by the ledger's, if that covers the whole past that it needs.
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
            CounterState::InFlight(_) => {}
        }
        self.replay_all(now_us, past);
        if self.spec.is_held() {
            self.unattributed = past.in_flight.counted_by(self.spec.applies_to);
            self.unattributed_until_us = open_until_us;
        }
        true
    }

    /// Counts requests from the ledger. Where the start counts, requests in flight have started by now.
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

    /// Ends uses in flight that no lease holds: the provider has counted them by now.
    pub fn expire(&mut self, now_us: u64) {
        if self.unattributed > 0 && self.unattributed_until_us <= now_us {
            let uses = std::mem::take(&mut self.unattributed);
            self.log_unanswered(now_us, self.unattributed_until_us, uses);
        }
    }

    fn in_flight(&self, leased: u64) -> u64 {
        if self.spec.is_held() { leased + self.unattributed } else { 0 }
    }

    /// More was used than can be counted: nothing starts for longer than any count could tell. Under other numbers,
    /// nothing starts until a new limit would allow it.
    fn block_until_drained(&mut self, now_us: u64) {
        self.blocked_until_us = self.blocked_until_us.max(now_us + AHEAD_MAX_US);
    }

    /// Called before the first request of a call.
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
            (CounterState::InFlight(free), _) => free.begin_batch(self.spec.max, in_flight),
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
            (CounterState::InFlight(free), _) => free.find(cost, from_us),
            _ => None,
        }
    }

    /// Moves a start to a later instant if too many would start at once.
    pub fn spread(&self, found: Availability, cost: u64, now_us: u64) -> Availability {
        self.spreader.spread(found, cost, now_us)
    }

    pub fn consume(&mut self, cost: u64, start_us: u64) {
        // The reason for the block is over, and the ledger does not know this use.
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
                // What fits can be counted.
                bucket.consume(cost, start_us, interval);
            }
            (CounterState::InFlight(free), _) => free.consume(cost),
            _ => {}
        }
    }

    /// Called after the last request of a call; `latest_us` is its latest start. A start counts longer by the transit
    /// jitter.
    pub fn end_batch(&mut self, latest_us: u64, jitter_us: u64) {
        if let CounterState::Log(log) = &mut self.count {
            log.end_batch(latest_us);
        }
        for (start_us, uses) in std::mem::take(&mut self.starts) {
            self.log_use(start_us + jitter_us, uses);
        }
    }

    pub fn is_window(&self) -> bool {
        matches!(self.spec.kind, CounterKind::Window { .. })
    }

    /// Logs uses whose window begins at an instant.
    pub fn log_use(&mut self, instant_us: u64, cost: u64) {
        if let (CounterState::Log(log), CounterKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) {
            log.push(instant_us.div_ceil(1_000), granule_ms, cost);
        }
    }

    /// Logs uses without a response: the provider counted them by their deadline. Uses that are over are not logged, so
    /// they do not follow younger ones.
    pub fn log_unanswered(&mut self, now_us: u64, deadline_us: u64, cost: u64) {
        if deadline_us + self.spec.window_us > now_us {
            self.log_use(deadline_us, cost);
        }
    }

    /// Returns slots with the instant that they had. A slot whose use is over is free anyway.
    pub fn restore(&mut self, now_us: u64, origin_ms: SlotInstant, cost: u64) {
        let (CounterState::Log(log), CounterKind::Log { granule_ms, .. }) = (&mut self.count, self.spec.kind) else {
            return;
        };
        if origin_ms * 1_000 + self.spec.window_us > now_us {
            log.restore(now_us, origin_ms, granule_ms, cost);
        }
    }

    /// Counts a request from the ledger.
    fn replay(&mut self, now_us: u64, instant_us: u64, cost: u64) {
        match (&mut self.count, self.spec.kind) {
            (CounterState::Log(_), _) => self.log_use(instant_us, cost),
            (CounterState::Window(window), CounterKind::Window { offset_us }) => {
                window.roll(now_us, offset_us, self.spec.window_us);
                window.replay(instant_us, cost, offset_us, self.spec.window_us);
            }
            (CounterState::Bucket(bucket), CounterKind::Bucket { interval, debt }) => {
                // The provider's bucket was never more than full. With debt, one start may exceed it.
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
            (CounterState::InFlight(_), _) => self.in_flight(leased),
            _ => 0,
        }
    }

    /// Uses that still count after each part of the window; see [`crate::domain::limit_usage::LimitUsage`].
    pub fn still_used(&self, now_us: u64, leased: u64) -> Vec<u64> {
        let window_us = self.spec.window_us;
        let is_log = matches!(self.count, CounterState::Log(_));
        if !is_log || window_us < STILL_USED_WINDOW_MIN_US || self.counted(now_us, leased) == 0 {
            return Vec::new();
        }
        let steps = u64::from(STILL_USED_STEPS);
        let ends = (1..=steps).map(|step| now_us + window_us * step / steps);
        ends.map(|at_us| self.counted(at_us, leased)).collect()
    }

    /// Permits that can certainly start now, and the time until all of the limit is free again, in microseconds.
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
            (CounterState::InFlight(_), _) => {
                (u64::from(max).saturating_sub(in_flight), if in_flight > 0 { window_us } else { 0 })
            }
            _ => (0, 0),
        }
    }

    /// Start of the next permit of cost 1, from an instant on. Calls in flight count as answered now.
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
            (CounterState::InFlight(_), _) => FreeSlots::of(max, self.in_flight(leased)).find(1, from_us),
            _ => None,
        };
        found.map_or(from_us.max(now_us + window_us), |found| found.start_us)
    }
}
