//! The limiter of one quota: all its limits in one atomic call, as a pure state machine.
//!
//! This is the specification of the functions in `lua/`, in the same order, and the body of the embedded limiter. Refuses
//! to read a clock, and refuses to trust a state that is not its own: one of another store, or of a clock that made a
//! step, is begun anew, and grants nothing until what may still count has been told or has passed.

use std::collections::BTreeMap;

use super::decision::{BATCH_MAX, Call, Incarnation, PERMITS_MAX, Rebuild, Refusal, Refused, Reply, Seeds, Want};
use super::limit::Scope;
use super::provider::BOOKING_HORIZON;
use super::quota_spec::{QuotaSpec, padded_us};
use super::time::{Micros, micros_up};

mod bucket;
mod cell;
mod crowd;
mod grant;
mod known;
mod log;
mod own;
mod standings;
mod tally;
#[cfg(test)]
mod tests;
pub mod throttle;
mod window;

use grant::{Grants, Tallies, Terms};
use known::{Known, Unknown};
use own::{Own, Owns};
use tally::{InFlight, Past, Tally};

/// How long the reply to a caller's last call is kept for a repeat, in microseconds.
pub const REPLY_KEPT_US: u64 = 600_000_000;
/// How much longer than its uses an account's or reference's tally is kept, in microseconds.
pub const SUBJECT_KEPT_US: u64 = 1_000_000;

/// Who holds the permits of a state that was lost: no caller, so nobody settles them.
const LOST: (Incarnation, u64) = (0, 1);

/// The limiter of one quota. Empty until its first call, which finds it cold.
#[derive(Clone, Debug, Default)]
pub struct Quota {
    state: Option<State>,
}

#[derive(Clone, Debug)]
struct State {
    run_id: String,
    born_us: u64,
    warm_us: u64,
    last_us: u64,
    version: i64,
    calls: u64,
    paused_until_us: u64,
    /// As of the spec that was gone by last; a change ends a pause.
    resumed_at: u64,
    known: Known,
    provider: Tally,
    subjects: BTreeMap<String, Tally>,
    /// So many subjects were left when those without uses were dropped last.
    subjects_kept: usize,
    replies: BTreeMap<Incarnation, (u64, u64, Reply)>,
}

impl Quota {
    /// Answers one call at `clock`. A clock that went back counts as standing still.
    pub fn call(&mut self, clock: Micros, spec: &QuotaSpec, call: &Call) -> Reply {
        let trusted = |state: &State| state.run_id == call.run_id && call.distrust != Some(Micros(state.born_us));
        if !self.state.as_ref().is_some_and(trusted) {
            self.state = None;
        }
        self.state.get_or_insert_with(|| State::cold(clock.0, spec, call)).call(clock.0, spec, call)
    }
}

impl State {
    fn cold(now_us: u64, spec: &QuotaSpec, call: &Call) -> Self {
        let warm_us = now_us + spec.cold_us();
        let all = |_| Unknown::default();
        Self {
            run_id: call.run_id.clone(),
            born_us: now_us,
            warm_us,
            last_us: now_us,
            version: spec.version,
            calls: 0,
            paused_until_us: 0,
            resumed_at: spec.resumed_at,
            known: Known::born(spec, now_us),
            provider: Tally::new(spec.provider_cells(), now_us, all),
            subjects: BTreeMap::new(),
            subjects_kept: 0,
            replies: BTreeMap::new(),
        }
    }

    fn call(&mut self, clock_us: u64, spec: &QuotaSpec, call: &Call) -> Reply {
        let now_us = clock_us.max(self.last_us);
        match self.replies.get(&call.incarnation) {
            Some((number, _, reply)) if *number == call.number => return reply.clone(),
            Some((number, _, _)) if *number > call.number => return self.refuse(now_us, Refusal::StaleCall, 0),
            _ => {}
        }
        // Older settings may not know every limit that a settlement must reach, so nothing is done for their holder.
        if spec.version < self.version {
            return self.refuse(now_us, Refusal::StaleVersion, 0);
        }
        self.calls += 1;
        if !self.replies.contains_key(&call.incarnation) {
            self.replies.retain(|_, (_, at_us, _)| *at_us + REPLY_KEPT_US > now_us);
        }
        self.known.adopt(spec, now_us);
        self.provider.adopt(spec.provider_cells(), now_us, self.known.before(spec, now_us));
        let missed = self.known.missed(Scope::Provider, self.last_us);
        self.provider.cells.iter_mut().for_each(|cell| cell.hold(missed));
        self.last_us = now_us;
        self.version = spec.version;
        if spec.resumed_at != self.resumed_at {
            (self.resumed_at, self.paused_until_us) = (spec.resumed_at, 0);
        }
        let mut owns = self.own_tallies(now_us, spec, call);
        self.settle(now_us, call, &mut owns);
        if let Some(pause) = call.pause {
            self.paused_until_us = self.paused_until_us.max(now_us + micros_up(pause));
        }
        // Of a longer list no part may be forgotten.
        let whole = |rebuild: &&Rebuild| rebuild.born == Micros(self.born_us) && rebuild.ended.len() <= BATCH_MAX;
        let open_until_us = now_us + micros_up(BOOKING_HORIZON) + padded_us(micros_up(spec.hold_max));
        if let Some(rebuild) = call.rebuild.as_ref().filter(whole) {
            self.rebuild(now_us, open_until_us, rebuild);
        }
        let whole = |seeds: &&Seeds| seeds.born == Micros(self.born_us) && seeds.uses() <= BATCH_MAX;
        if let Some(seeds) = call.seeds.as_ref().filter(whole) {
            self.seed(now_us, open_until_us, seeds, &mut owns);
        }
        let reply = if now_us < self.warm_us {
            self.refuse(now_us, Refusal::Cold, self.warm_us - now_us)
        } else if now_us < self.paused_until_us {
            self.refuse(now_us, Refusal::Paused, self.paused_until_us - now_us)
        } else {
            self.grant(now_us, spec, call, &mut owns)
        };
        // One that is new and was granted nothing is not kept: what is not known of it may be known by the next call.
        for mut own in owns.list.into_iter().filter(|own| own.known || own.granted != InFlight::default()) {
            own.tally.touched_us = now_us;
            let kept_until_us = now_us + spec.before_us() + self.known.longest_us(own.scope) + SUBJECT_KEPT_US;
            own.tally.kept_until_us = own.tally.kept_until_us.max(kept_until_us);
            self.subjects.insert(own.key, own.tally);
        }
        self.drop_idle_subjects(now_us);
        self.replies.insert(call.incarnation, (call.number, now_us, reply.clone()));
        reply
    }

    /// Takes out the tallies of all subjects that the wants or the settlements name, with their limits as wanted.
    fn own_tallies<'a>(&mut self, now_us: u64, spec: &QuotaSpec, call: &'a Call) -> Owns<'a> {
        let mut owns = Owns::default();
        let told = call.seeds.iter().flat_map(|seeds| &seeds.subjects).map(|seed| &seed.subject);
        let wanted = call.wants.iter().flat_map(|want| &want.subjects).chain(told).map(|subject| (subject, true));
        let settled = call.settlements.iter().flat_map(|settlement| &settlement.subjects);
        for (subject, wanted) in wanted.chain(settled.map(|subject| (subject, false))) {
            if owns.has(subject) || !(wanted || self.subjects.contains_key(&subject.key)) {
                continue;
            }
            let (cells, scope) = (spec.subject_cells(subject), spec.scope_of(subject));
            let known = self.subjects.remove(&subject.key).filter(|tally| tally.kept_until_us > now_us);
            let (known, tally) = match known {
                Some(mut tally) => {
                    // Every use of it that a new limit has not counted was granted before it was counted last.
                    tally.adopt(cells, now_us, self.known.before(spec, tally.touched_us));
                    let missed = self.known.missed(scope, tally.touched_us);
                    tally.cells.iter_mut().for_each(|cell| cell.hold(missed));
                    (true, tally)
                }
                None => (false, Tally::new(cells, now_us, |window_us| self.known.of_new(scope, window_us))),
            };
            let (key, granted) = (subject.key.clone(), InFlight::default());
            let indices = subject.limits.iter().map(|limit| limit.index).collect();
            owns.push(subject, Own { key, scope, tally, indices, known, granted, latest_us: now_us });
        }
        owns
    }

    fn settle(&mut self, now_us: u64, call: &Call, owns: &mut Owns<'_>) {
        for settlement in call.settlements.iter().take(BATCH_MAX) {
            self.provider.settle(now_us, call.incarnation, settlement, true);
            let of = owns.positions(&settlement.subjects);
            for own in own::at(&mut owns.list, &of) {
                own.tally.settle(now_us, call.incarnation, settlement, false);
            }
        }
        self.provider.expire(now_us);
        owns.list.iter_mut().for_each(|own| own.tally.expire(now_us));
    }

    /// The ledger has told what may still count, so the state is as good as if it had not been lost.
    fn rebuild(&mut self, now_us: u64, open_until_us: u64, rebuild: &Rebuild) {
        if now_us >= self.warm_us {
            return;
        }
        self.warm_us = now_us;
        let past = Past::told(now_us, &rebuild.ended, rebuild.open);
        if past.ended.is_empty() && past.open == InFlight::default() {
            self.known.never_used(self.born_us);
        }
        self.provider.cells.iter_mut().for_each(|cell| cell.recall_all(now_us, &past));
        self.provider.lease(LOST, past.open, open_until_us);
    }

    /// Counters that did not count their past are told it. A subject that was told anything is known from now on.
    fn seed(&mut self, now_us: u64, open_until_us: u64, seeds: &Seeds, owns: &mut Owns<'_>) {
        if let Some(history) = &seeds.provider {
            self.provider.seed(now_us, &Past::of(now_us, history), open_until_us);
        }
        for seed in &seeds.subjects {
            let of = owns.positions(std::slice::from_ref(&seed.subject));
            for own in own::at(&mut owns.list, &of) {
                own.known |= own.tally.seed(now_us, &Past::of(now_us, &seed.history), open_until_us);
            }
        }
    }

    fn grant(&mut self, now_us: u64, spec: &QuotaSpec, call: &Call, owns: &mut Owns<'_>) -> Reply {
        let jitter_us = spec.grant_jitter.map_or(0, micros_up);
        self.provider.open(now_us, jitter_us);
        owns.list.iter_mut().for_each(|own| own.tally.open(now_us, jitter_us));
        let indices = spec.provider_limits();
        let (horizon_us, in_hands_us) = (now_us + micros_up(BOOKING_HORIZON), spec.in_hands_us());
        let terms = Terms { now_us, horizon_us, in_hands_us, indices: &indices };
        let mut grants = Grants::at(now_us);
        for (index, want) in call.wants.iter().take(BATCH_MAX).enumerate() {
            let want = Want { permits: want.permits.min(PERMITS_MAX), ..want.clone() };
            let of = owns.positions(&want.subjects);
            let mut tallies = Tallies { provider: &mut self.provider, owns: &mut owns.list };
            if !grants.serve(&terms, &mut tallies, &of, index, &want) {
                break;
            }
        }
        let caller = (call.incarnation, call.number);
        let lasts_us = padded_us(micros_up(spec.hold_max));
        self.provider.lease(caller, grants.granted, grants.latest_us + lasts_us);
        self.provider.cells.iter_mut().for_each(|cell| cell.close(grants.latest_us, jitter_us));
        for own in &mut owns.list {
            own.tally.lease(caller, own.granted, own.latest_us + lasts_us);
            own.tally.cells.iter_mut().for_each(|cell| cell.close(own.latest_us, jitter_us));
        }
        let (decides, remaining, reset_us) = self.outlook(now_us, &indices, grants.refused);
        Reply {
            granted: grants.runs,
            passed_over: grants.passed_over,
            remaining,
            decides,
            reset_us,
            refused: grants.refused,
            ..self.reply(now_us)
        }
    }

    /// The limit that decides, what may surely start under it, and when all of it is free again.
    fn outlook(&self, now_us: u64, indices: &[usize], refused: Option<Refused>) -> (usize, u64, u64) {
        let cells = self.provider.cells.iter().zip(indices).filter(|(cell, _)| !cell.spec.shadow && !cell.is_pacing());
        let outlooks = cells.map(|(cell, index)| {
            let (remaining, reset_us) = cell.outlook(now_us, self.provider.in_flight.of(cell.spec.applies_to));
            (*index, remaining, reset_us)
        });
        let refusing = match refused.map(|refused| refused.by) {
            Some(Refusal::Limit { index } | Refusal::NeedsHistory { index, .. }) => Some(index),
            _ => None,
        };
        // The refusing limit decides; else the first of those with the least remaining.
        outlooks
            .min_by_key(|(index, remaining, _)| (refusing.is_some_and(|refusing| refusing != *index), *remaining))
            .unwrap_or((0, 0, 0))
    }

    fn drop_idle_subjects(&mut self, now_us: u64) {
        if self.subjects.len() <= 2 * self.subjects_kept + 64 {
            return;
        }
        self.subjects.retain(|_, tally| tally.kept_until_us > now_us);
        self.subjects_kept = self.subjects.len();
    }

    fn refuse(&self, now_us: u64, by: Refusal, wait_us: u64) -> Reply {
        Reply { refused: Some(Refused { by, wait_us, exact: false }), ..self.reply(now_us) }
    }

    fn reply(&self, now_us: u64) -> Reply {
        Reply {
            now: Micros(now_us),
            version: self.version,
            born: Micros(self.born_us),
            calls: self.calls,
            granted: Vec::new(),
            passed_over: Vec::new(),
            remaining: 0,
            decides: 0,
            reset_us: 0,
            refused: None,
        }
    }
}
