//! The carousel: a sliding log that holds each slot from grant until a window after the answer.
//!
//! This is the specification of `lua/sliding_log.lua`, statement by statement, and the body of the embedded limiter.
//! Think of L slots. A slot is taken when a call is granted and may be used again only W after that call's answer, so
//! two calls on one slot are counted at least W apart at the provider, whatever the delays; L + 1 calls counted within
//! less than W would need two on one slot. Price, by Little's law: rate ≤ L / (W + E[hold]).
//!
//! Refuses to read a clock, and refuses to make a slot: whatever is doubtful costs throughput, never safety.

use std::collections::{BTreeMap, VecDeque};

use super::decision::{
    BATCH_MAX, Call, Fate, Incarnation, LimitSpec, QuotaSpec, Refusal, Refused, Reply, Run, Settlement, SlotInstant,
};
use super::provider::BOOKING_HORIZON;
use super::time::{Micros, micros_down, micros_up};

/// Most slots in one entry of a log, so that instant and count fit one exact integer in Lua.
pub const ENTRY_COUNT_MAX: u64 = 4_095;
/// How long the reply to a caller's last call is kept for a repeat, in microseconds.
pub const REPLY_KEPT_US: u64 = 600_000_000;
/// How far from the head a slot that is given back looks for its place.
pub const RESTORE_DEPTH: usize = 16;

/// Slots answered at one millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    ms: u64,
    count: u64,
}

/// Used slots of one limit, oldest first, with what is known about the limit itself.
#[derive(Clone, Debug, Default)]
struct Log {
    entries: VecDeque<Entry>,
    logged: u64,
    window_us: u64,
    /// Nothing starts before: a new limit, or a window that grew, does not know its past.
    held_until_us: u64,
    tail_ms: u64,
    /// The newest use that was forgotten for a lower limit and still counts; 0 when there is none. Slots that are unused
    /// because of it (the limit was raised again, calls were given back) wait until it no longer does.
    forgotten_ms: u64,
}

impl Log {
    fn push(&mut self, ms: u64, count: u64) {
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
    fn restore(&mut self, ms: SlotInstant, count: u64) {
        let place = self.entries.iter().take(RESTORE_DEPTH).take_while(|entry| entry.ms < ms).count();
        self.entries.insert(place, Entry { ms, count });
        self.logged += count;
        self.tail_ms = self.tail_ms.max(ms);
    }

    /// Forgets the oldest uses beyond what the limit allows, and says when the newest of them was; the newest of all are
    /// the ones that count longest.
    fn shrink_to(&mut self, slots: u64) -> u64 {
        let mut newest_ms = 0;
        while self.logged > slots {
            let Some(head) = self.entries.front_mut() else { break };
            newest_ms = newest_ms.max(head.ms);
            let dropped = head.count.min(self.logged - slots);
            head.count -= dropped;
            self.logged -= dropped;
            if head.count == 0 {
                self.entries.pop_front();
            }
        }
        newest_ms
    }
}

/// Permits of one call that have not been settled.
#[derive(Clone, Copy, Debug)]
struct Lease {
    deadline_us: u64,
    outstanding: u64,
}

/// Slots that one limit could give, while a call decides.
struct Cursor<'a> {
    entries: std::collections::vec_deque::Iter<'a, Entry>,
    head: Option<Entry>,
    unused: u64,
    forgotten_ms: u64,
    window_us: u64,
    popped: u64,
}

/// Where a want finds its slots in one limit.
#[derive(Clone, Copy)]
struct Found {
    start_us: u64,
    origin_ms: SlotInstant,
}

impl Cursor<'_> {
    /// Looks for `cost` slots from here on; `None` when all others are in flight.
    fn find(&self, cost: u64, now_us: u64, held_until_us: u64) -> Option<Found> {
        let mut found = Found { start_us: now_us.max(held_until_us), origin_ms: 0 };
        if self.unused > 0 && self.forgotten_ms > 0 {
            found.start_us = found.start_us.max(self.forgotten_ms * 1_000 + self.window_us);
            found.origin_ms = self.forgotten_ms;
        }
        let mut missing = cost.saturating_sub(self.unused);
        let rest = self.entries.clone();
        for entry in self.head.into_iter().chain(rest.copied()) {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(entry.count);
            found.start_us = found.start_us.max(entry.ms * 1_000 + self.window_us);
            found.origin_ms = found.origin_ms.max(entry.ms);
        }
        (missing == 0).then_some(found)
    }

    fn take(&mut self, cost: u64) {
        let from_unused = cost.min(self.unused);
        self.unused -= from_unused;
        let mut missing = cost - from_unused;
        self.popped += missing;
        while missing > 0 {
            let Some(mut head) = self.head.take() else { break };
            let taken = missing.min(head.count);
            head.count -= taken;
            missing -= taken;
            self.head = if head.count > 0 { Some(head) } else { self.entries.next().copied() };
        }
    }
}

/// The limiter of one quota. Empty until its first call, which finds it cold.
#[derive(Clone, Debug, Default)]
pub struct Carousel {
    state: Option<State>,
}

#[derive(Clone, Debug)]
struct State {
    run_id: String,
    born_us: u64,
    warm_us: u64,
    last_us: u64,
    version: i64,
    paused_until_us: u64,
    oldest_deadline_us: u64,
    in_flight: u64,
    logs: BTreeMap<String, Log>,
    leases: BTreeMap<(Incarnation, u64), Lease>,
    replies: BTreeMap<Incarnation, (u64, u64, Reply)>,
}

impl Carousel {
    /// Answers one call at `clock`. A clock that went back counts as standing still.
    pub fn call(&mut self, clock: Micros, spec: &QuotaSpec, call: &Call) -> Reply {
        if self.state.as_ref().is_some_and(|state| state.run_id != call.run_id) {
            self.state = None;
        }
        self.state.get_or_insert_with(|| State::cold(clock.0, spec, call)).call(clock.0, spec, call)
    }

    /// Uses within each limit's window and in flight, as counted at `clock`: per limit of the spec.
    #[must_use]
    pub fn used(&self, clock: Micros, spec: &QuotaSpec) -> Vec<u64> {
        let used = |limit: &LimitSpec| {
            let Some(state) = &self.state else { return 0 };
            let now_us = clock.0.max(state.last_us);
            let logged = state.logs.get(&limit.name).map_or(0, |log| {
                let live = log.entries.iter().filter(|entry| entry.ms * 1_000 + log.window_us > now_us);
                live.map(|entry| entry.count).sum()
            });
            logged + state.in_flight
        };
        spec.limits.iter().map(used).collect()
    }
}

impl State {
    fn cold(now_us: u64, spec: &QuotaSpec, call: &Call) -> Self {
        Self {
            run_id: call.run_id.clone(),
            born_us: now_us,
            warm_us: now_us + spec.cold_us(),
            last_us: now_us,
            version: spec.version,
            paused_until_us: 0,
            oldest_deadline_us: 0,
            in_flight: 0,
            logs: spec.limits.iter().map(|limit| (limit.name.clone(), Log::of(limit, 0))).collect(),
            leases: BTreeMap::new(),
            replies: BTreeMap::new(),
        }
    }

    fn call(&mut self, clock_us: u64, spec: &QuotaSpec, call: &Call) -> Reply {
        let now_us = clock_us.max(self.last_us);
        match self.replies.get(&call.incarnation) {
            Some((number, _, reply)) if *number == call.number => return reply.clone(),
            Some((number, _, _)) if *number > call.number => {
                return self.reply(now_us, Vec::new(), 0, Some(Refusal::StaleCall), (0, false));
            }
            _ => {}
        }
        // Older settings may not know every limit that a settlement must reach, so nothing is done for their holder.
        if spec.version < self.version {
            return self.reply(now_us, Vec::new(), 0, Some(Refusal::StaleVersion), (0, false));
        }
        if !self.replies.contains_key(&call.incarnation) {
            self.replies.retain(|_, (_, at_us, _)| *at_us + REPLY_KEPT_US > now_us);
        }
        self.last_us = now_us;
        for settlement in call.settlements.iter().take(BATCH_MAX) {
            self.settle(now_us, spec, call.incarnation, settlement);
        }
        self.expire(now_us);
        if let Some(pause) = call.pause {
            self.paused_until_us = self.paused_until_us.max(now_us + micros_up(pause));
        }
        if call.warm == Some(Micros(self.born_us)) {
            self.warm_us = self.warm_us.min(now_us);
        }
        let reply = self.decide(now_us, spec, call);
        self.replies.insert(call.incarnation, (call.number, now_us, reply.clone()));
        reply
    }

    fn settle(&mut self, now_us: u64, spec: &QuotaSpec, incarnation: Incarnation, settlement: &Settlement) {
        let key = (incarnation, settlement.call);
        let Some(lease) = self.leases.get_mut(&key) else { return };
        let cost = u64::from(settlement.cost).min(lease.outstanding);
        lease.outstanding -= cost;
        if lease.outstanding == 0 {
            self.leases.remove(&key);
        }
        self.in_flight = self.in_flight.saturating_sub(cost);
        for (index, limit) in spec.limits.iter().enumerate() {
            let Some(log) = self.logs.get_mut(&limit.name) else { continue };
            match &settlement.fate {
                // Taken to be younger than it is, an answer frees its slot later: safe.
                Fate::Used { age } => log.push(now_us.saturating_sub(micros_down(*age)).div_ceil(1_000), cost),
                Fate::NotSent { origins } => {
                    let ms = origins.get(index).copied().unwrap_or(0);
                    if ms * 1_000 + log.window_us > now_us {
                        log.restore(ms, cost);
                    }
                }
            }
        }
    }

    /// A lease past its deadline frees its slots: whatever its calls did, the provider has counted it a window ago.
    fn expire(&mut self, now_us: u64) {
        if self.in_flight == 0 {
            self.oldest_deadline_us = 0;
        }
        if self.in_flight == 0 || now_us < self.oldest_deadline_us {
            return;
        }
        let mut freed = 0;
        self.leases.retain(|_, lease| {
            let live = lease.deadline_us > now_us;
            freed += if live { 0 } else { lease.outstanding };
            live
        });
        self.in_flight = self.in_flight.saturating_sub(freed);
        self.oldest_deadline_us = self.leases.values().map(|lease| lease.deadline_us).min().unwrap_or(0);
    }

    fn decide(&mut self, now_us: u64, spec: &QuotaSpec, call: &Call) -> Reply {
        self.version = spec.version;
        self.adopt(now_us, spec);
        if now_us < self.warm_us {
            return self.reply(now_us, Vec::new(), 0, Some(Refusal::Cold), (self.warm_us - now_us, false));
        }
        if now_us < self.paused_until_us {
            let wait = (self.paused_until_us - now_us, false);
            return self.reply(now_us, Vec::new(), 0, Some(Refusal::Paused), wait);
        }
        self.grant(now_us, spec, call)
    }

    /// Takes over the limits of the spec: new ones and longer windows wait one window, lower ones forget oldest uses.
    fn adopt(&mut self, now_us: u64, spec: &QuotaSpec) {
        self.logs.retain(|name, _| spec.limits.iter().any(|limit| limit.name == *name));
        for limit in &spec.limits {
            let window_us = limit.padded_window_us();
            let log = self.logs.entry(limit.name.clone()).or_insert_with(|| Log::of(limit, now_us + window_us));
            if window_us > log.window_us {
                log.held_until_us = now_us + window_us;
            }
            log.window_us = window_us;
            let newest_ms = log.shrink_to(u64::from(limit.max_requests).saturating_sub(self.in_flight));
            log.forgotten_ms = log.forgotten_ms.max(newest_ms);
            if log.forgotten_ms * 1_000 + window_us <= now_us {
                log.forgotten_ms = 0;
            }
        }
    }

    fn grant(&mut self, now_us: u64, spec: &QuotaSpec, call: &Call) -> Reply {
        let horizon_us = now_us + micros_up(BOOKING_HORIZON);
        let in_flight = self.in_flight;
        let mut cursors: Vec<(Cursor<'_>, u64)> = Vec::with_capacity(spec.limits.len());
        for limit in &spec.limits {
            let Some(log) = self.logs.get(&limit.name) else { continue };
            let mut entries = log.entries.iter();
            let head = entries.next().copied();
            let unused = u64::from(limit.max_requests).saturating_sub(log.logged + in_flight);
            let (forgotten_ms, window_us) = (log.forgotten_ms, log.window_us);
            let cursor = Cursor { entries, head, unused, forgotten_ms, window_us, popped: 0 };
            cursors.push((cursor, log.held_until_us));
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut granted = 0;
        let mut latest_us = now_us;
        let mut refused = None;
        for &want in call.wants.iter().take(BATCH_MAX) {
            let cost = u64::from(want);
            let found: Vec<Option<Found>> =
                cursors.iter().map(|(cursor, held)| cursor.find(cost, now_us, *held)).collect();
            if let Some(refusal) = self.refusal(now_us, horizon_us, spec, cost, &found) {
                refused = Some(refusal);
                break;
            }
            let start_us = found.iter().flatten().map(|found| found.start_us).max().unwrap_or(now_us);
            let origins: Vec<SlotInstant> = found.iter().flatten().map(|found| found.origin_ms).collect();
            cursors.iter_mut().for_each(|(cursor, _)| cursor.take(cost));
            granted += cost;
            latest_us = latest_us.max(start_us);
            let wait_us = start_us - now_us;
            match runs.last_mut() {
                Some(run) if run.wait_us == wait_us && run.origins == origins => run.permits += 1,
                _ => runs.push(Run { permits: 1, wait_us, origins }),
            }
        }
        let remaining = cursors.iter().map(|(cursor, _)| cursor.unused).min().unwrap_or(0);
        let popped: Vec<u64> = cursors.iter().map(|(cursor, _)| cursor.popped).collect();
        self.record(now_us, spec, call, &runs, granted, latest_us, &popped);
        let (by, wait) = refused.map_or((None, (0, false)), |(by, wait)| (Some(by), wait));
        self.reply(now_us, runs, remaining, by, wait)
    }

    /// Which limit refuses a want, and for how long: the one whose slot comes last.
    fn refusal(
        &self,
        now_us: u64,
        horizon_us: u64,
        spec: &QuotaSpec,
        cost: u64,
        found: &[Option<Found>],
    ) -> Option<(Refusal, (u64, bool))> {
        let mut worst: Option<(usize, u64)> = None;
        for (index, (limit, found)) in spec.limits.iter().zip(found).enumerate() {
            let at_us = found.map_or_else(|| self.earliest_us(now_us, limit, cost), |found| found.start_us);
            let refuses = found.is_none() || at_us > horizon_us;
            if refuses && worst.is_none_or(|(_, worst_us)| at_us > worst_us) {
                worst = Some((index, at_us));
            }
        }
        let exact = found.iter().all(Option::is_some);
        worst.map(|(index, at_us)| (Refusal::Limit { index }, (at_us - now_us, exact)))
    }

    /// The earliest instant at which a slot now in flight can be used again: answered at once, or its lease runs out.
    fn earliest_us(&self, now_us: u64, limit: &LimitSpec, cost: u64) -> u64 {
        let answered_now = now_us + limit.padded_window_us();
        let possible = u64::from(limit.max_requests) >= cost && self.oldest_deadline_us > now_us;
        if possible { answered_now.min(self.oldest_deadline_us) } else { answered_now }
    }

    fn record(
        &mut self,
        now_us: u64,
        spec: &QuotaSpec,
        call: &Call,
        runs: &[Run],
        granted: u64,
        latest_us: u64,
        popped: &[u64],
    ) {
        if granted == 0 {
            return;
        }
        for (limit, popped) in spec.limits.iter().zip(popped) {
            if let Some(log) = self.logs.get_mut(&limit.name) {
                let kept = log.logged - popped;
                log.shrink_to(kept);
            }
        }
        match spec.grant_jitter {
            None => {
                let longest_us = spec.limits.iter().map(LimitSpec::padded_window_us).max().unwrap_or(0);
                let deadline_us = latest_us + micros_up(spec.hold_max) + longest_us;
                self.leases.insert((call.incarnation, call.number), Lease { deadline_us, outstanding: granted });
                self.in_flight += granted;
                let oldest_us = self.oldest_deadline_us;
                self.oldest_deadline_us = if oldest_us == 0 { deadline_us } else { oldest_us.min(deadline_us) };
            }
            Some(jitter) => {
                let mut wants = call.wants.iter();
                for run in runs {
                    let cost: u64 = wants.by_ref().take(run.permits).map(|cost| u64::from(*cost)).sum();
                    let ms = (now_us + run.wait_us + micros_up(jitter)).div_ceil(1_000);
                    for limit in &spec.limits {
                        if let Some(log) = self.logs.get_mut(&limit.name) {
                            log.push(ms, cost);
                        }
                    }
                }
            }
        }
    }

    fn reply(
        &self,
        now_us: u64,
        granted: Vec<Run>,
        remaining: u64,
        by: Option<Refusal>,
        (wait_us, exact): (u64, bool),
    ) -> Reply {
        let refused = by.map(|by| Refused { by, wait_us, exact });
        Reply { now: Micros(now_us), version: self.version, born: Micros(self.born_us), granted, remaining, refused }
    }
}

impl Log {
    fn of(limit: &LimitSpec, held_until_us: u64) -> Self {
        Self { window_us: limit.padded_window_us(), held_until_us, ..Self::default() }
    }
}
