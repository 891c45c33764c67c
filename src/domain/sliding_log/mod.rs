//! The carousel: a sliding log that holds each slot from grant until a window after the answer.
//!
//! This is the specification of `lua/sliding_log.lua`, statement by statement, and the body of the embedded limiter.
//! Think of L slots. A slot is taken when a call is granted and may be used again only W after that call's answer, so
//! two calls on one slot are counted at least W apart at the provider, whatever the delays; L + 1 calls counted within
//! less than W would need two on one slot. Price, by Little's law: rate ≤ L / (W + E[hold]).
//!
//! Refuses to read a clock, and refuses to make a slot: whatever is doubtful costs throughput, never safety.

use std::collections::BTreeMap;

use crate::domain::decision::{
    BATCH_MAX, Call, Fate, Incarnation, LimitSpec, QuotaSpec, Refusal, Refused, Reply, Run, Settlement, SlotInstant,
};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::time::{Micros, micros_down, micros_up};

mod log;
#[cfg(test)]
mod tests;

use log::{Cursor, Found, Log};

/// How long the reply to a caller's last call is kept for a repeat, in microseconds.
pub const REPLY_KEPT_US: u64 = 600_000_000;

/// Permits of one call that have not been settled.
#[derive(Clone, Copy, Debug)]
struct Lease {
    deadline_us: u64,
    outstanding: u64,
}

/// What one call takes.
struct Taken {
    runs: Vec<Run>,
    slots: u64,
    /// The latest start among them.
    latest_us: u64,
    /// Per limit, how many slots leave its log.
    popped: Vec<u64>,
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

    /// Takes over the limits of the spec. A new limit or a longer window does not know its past, so nothing starts until
    /// whatever may still count has left the window. Uses beyond a lowered limit stay in the log: they still count, and
    /// would count again if the limit were raised.
    fn adopt(&mut self, now_us: u64, spec: &QuotaSpec) {
        self.logs.retain(|name, _| spec.limits.iter().any(|limit| limit.name == *name));
        let horizon_us = micros_up(BOOKING_HORIZON);
        for limit in &spec.limits {
            let window_us = limit.padded_window_us();
            let past_us = now_us + horizon_us + micros_up(spec.hold_max) + window_us;
            let log = self.logs.entry(limit.name.clone()).or_insert_with(|| Log::of(limit, past_us));
            if window_us > log.window_us {
                log.held_until_us = past_us;
            }
            log.window_us = window_us;
        }
    }

    fn grant(&mut self, now_us: u64, spec: &QuotaSpec, call: &Call) -> Reply {
        let horizon_us = now_us + micros_up(BOOKING_HORIZON);
        let in_flight = self.in_flight;
        let mut cursors: Vec<Cursor<'_>> = Vec::with_capacity(spec.limits.len());
        for limit in &spec.limits {
            let Some(log) = self.logs.get(&limit.name) else { continue };
            let mut entries = log.entries.iter();
            let head = entries.next().copied();
            let unused = i64::from(limit.max_requests) - log.logged.cast_signed() - in_flight.cast_signed();
            let cursor = Cursor { entries, head, unused, log, popped: 0 };
            cursors.push(cursor);
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut granted = 0;
        let mut latest_us = now_us;
        let mut refused = None;
        for &want in call.wants.iter().take(BATCH_MAX) {
            let cost = u64::from(want);
            let found: Vec<Option<Found>> = cursors.iter().map(|cursor| cursor.find(cost, now_us)).collect();
            if let Some(refusal) = self.refusal(now_us, horizon_us, spec, cost, &found) {
                refused = Some(refusal);
                break;
            }
            let start_us = found.iter().flatten().map(|found| found.start_us).max().unwrap_or(now_us);
            let origins: Vec<SlotInstant> = found.iter().flatten().map(|found| found.origin_ms).collect();
            cursors.iter_mut().for_each(|cursor| cursor.take(cost));
            granted += cost;
            latest_us = latest_us.max(start_us);
            let wait_us = start_us - now_us;
            match runs.last_mut() {
                Some(run) if run.wait_us == wait_us && run.origins == origins => run.permits += 1,
                _ => runs.push(Run { permits: 1, wait_us, origins }),
            }
        }
        let unused = cursors.iter().map(|cursor| cursor.unused).min().unwrap_or(0);
        let remaining = unused.max(0).cast_unsigned();
        let popped = cursors.iter().map(|cursor| cursor.popped).collect();
        let taken = Taken { runs, slots: granted, latest_us, popped };
        if granted > 0 {
            self.record(now_us, spec, call, &taken);
        }
        let (by, wait) = refused.map_or((None, (0, false)), |(by, wait)| (Some(by), wait));
        self.reply(now_us, taken.runs, remaining, by, wait)
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

    fn record(&mut self, now_us: u64, spec: &QuotaSpec, call: &Call, taken: &Taken) {
        for (limit, popped) in spec.limits.iter().zip(&taken.popped) {
            if let Some(log) = self.logs.get_mut(&limit.name) {
                let excess = log.logged + self.in_flight > u64::from(limit.max_requests);
                if excess {
                    log.excess_until_us = log.excess_until_us.max(taken.latest_us);
                }
                log.forget_oldest(*popped);
            }
        }
        match spec.grant_jitter {
            None => {
                let longest_us = spec.limits.iter().map(LimitSpec::padded_window_us).max().unwrap_or(0);
                let deadline_us = taken.latest_us + micros_up(spec.hold_max) + longest_us;
                self.leases.insert((call.incarnation, call.number), Lease { deadline_us, outstanding: taken.slots });
                self.in_flight += taken.slots;
                let oldest_us = self.oldest_deadline_us;
                self.oldest_deadline_us = if oldest_us == 0 { deadline_us } else { oldest_us.min(deadline_us) };
            }
            Some(jitter) => {
                let mut wants = call.wants.iter();
                for run in &taken.runs {
                    let cost: u64 = wants.by_ref().take(run.permits).map(|cost| u64::from(*cost)).sum();
                    let ms = (now_us + run.wait_us + micros_up(jitter)).div_ceil(1_000);
                    for limit in &spec.limits {
                        if let Some(log) = self.logs.get_mut(&limit.name) {
                            log.push_many(ms, cost);
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
