//! Limiter of one quota: all its limits in one atomic call, as a pure state machine.
//!
//! This is the specification of the functions in `lua/`, in the same order, and the code of the embedded limiter. It
//! reads no clock. A state of another store, or of a clock that stepped, is discarded. The new state is cold: it grants
//! no permit until earlier uses are rebuilt from the ledger or have aged out.
//!
//! See `docs/decisions/0008-one-limiter-state-machine.md`.

use std::collections::BTreeMap;

use super::limit::Scope;
use super::permit_protocol::{
    BATCH_MAX, CounterSeeds, Incarnation, LimiterCall, LimiterRefusal, LimiterReply, PERMITS_MAX, PermitRequest,
    RebuildData, RefusalReason,
};
use super::provider::BOOKING_HORIZON;
use super::quota_spec::{QuotaSpec, padded_us};
use super::time::{Micros, micros_down, micros_up};

mod cells;
#[cfg(test)]
mod concurrency_tests;
mod counter;
mod counters;
mod coverage;
mod grant;
mod start_spread;
#[cfg(test)]
mod tests;

use counters::{CallSubjects, Counters, InFlightCost, LedgerUsage, SubjectCounters, select_subjects};
use coverage::{UncountedUses, UsageCoverage};
use grant::{CallCounters, GrantContext, Grants};

/// Retention of the reply to a caller's last call for a repeat, in microseconds.
pub const REPLY_RETENTION_US: u64 = 600_000_000;
/// Retention of an account's or reference's counters beyond its uses, in microseconds.
pub const SUBJECT_RETENTION_US: u64 = 1_000_000;

/// Holder of the permits of a lost state: no caller, so no release ends them.
const LOST_CALLER: (Incarnation, u64) = (0, 1);

/// The limiter of one quota. It has no state until its first call, which finds it cold.
#[derive(Clone, Debug, Default)]
pub struct Quota {
    state: Option<QuotaState>,
}

#[derive(Clone, Debug)]
struct QuotaState {
    run_id: String,
    epoch_us: u64,
    cold_until_us: u64,
    last_us: u64,
    version: i64,
    calls: u64,
    paused_until_us: u64,
    /// Value of the last spec; a change ends a pause.
    resumed_at: u64,
    coverage: UsageCoverage,
    provider: Counters,
    subjects: BTreeMap<String, Counters>,
    /// Number of subjects that were left after idle ones were dropped last.
    subjects_kept: usize,
    replies: BTreeMap<Incarnation, (u64, u64, LimiterReply)>,
}

impl Quota {
    /// Answers one call at `clock`. A clock that went back counts as stopped.
    pub fn call(&mut self, clock: Micros, spec: &QuotaSpec, call: &LimiterCall) -> LimiterReply {
        let trusted =
            |state: &QuotaState| state.run_id == call.run_id && call.invalidate_epoch != Some(Micros(state.epoch_us));
        if !self.state.as_ref().is_some_and(trusted) {
            self.state = None;
        }
        self.state.get_or_insert_with(|| QuotaState::cold(clock.0, spec, call)).call(clock.0, spec, call)
    }
}

impl QuotaState {
    fn cold(now_us: u64, spec: &QuotaSpec, call: &LimiterCall) -> Self {
        let cold_until_us = now_us + spec.cold_start_us();
        let all = |_| UncountedUses::default();
        Self {
            run_id: call.run_id.clone(),
            epoch_us: now_us,
            cold_until_us,
            last_us: now_us,
            version: spec.version,
            calls: 0,
            paused_until_us: 0,
            resumed_at: spec.resumed_at,
            coverage: UsageCoverage::at_state_start(spec, now_us),
            provider: Counters::new(spec.provider_counters(), now_us, all),
            subjects: BTreeMap::new(),
            subjects_kept: 0,
            replies: BTreeMap::new(),
        }
    }

    fn call(&mut self, clock_us: u64, spec: &QuotaSpec, call: &LimiterCall) -> LimiterReply {
        let now_us = clock_us.max(self.last_us);
        let previous_call = match self.replies.get(&call.incarnation) {
            Some((number, _, reply)) if *number == call.number => return reply.clone(),
            last => last.map_or(0, |(number, _, _)| *number),
        };
        if previous_call > call.number {
            return LimiterReply { previous_call, ..self.refuse(now_us, RefusalReason::StaleCall, 0) };
        }
        // Older settings may not know every limit that a release must reach, so they get nothing.
        if spec.version < self.version {
            return LimiterReply { previous_call, ..self.refuse(now_us, RefusalReason::StaleVersion, 0) };
        }
        self.calls += 1;
        if !self.replies.contains_key(&call.incarnation) {
            self.replies.retain(|_, (_, at_us, _)| *at_us + REPLY_RETENTION_US > now_us);
        }
        self.coverage.apply_spec(spec, now_us);
        self.provider.apply_spec(spec.provider_counters(), now_us, self.coverage.uncounted_before(spec, now_us));
        let missed = self.coverage.uncounted_since(Scope::Provider, self.last_us);
        self.provider.per_limit.iter_mut().for_each(|counter| counter.block_for(missed));
        self.last_us = now_us;
        self.version = spec.version;
        if spec.resumed_at != self.resumed_at {
            (self.resumed_at, self.paused_until_us) = (spec.resumed_at, 0);
        }
        let mut subjects = self.load_subjects(now_us, spec, call);
        self.release(now_us, call, &mut subjects);
        if let Some(pause) = call.pause {
            self.paused_until_us = self.paused_until_us.max(now_us + micros_up(pause));
        }
        // A longer list is ignored: no part of it may be forgotten.
        let whole =
            |rebuild: &&RebuildData| rebuild.state_epoch == Micros(self.epoch_us) && rebuild.ended.len() <= BATCH_MAX;
        let open_until_us = now_us + micros_up(BOOKING_HORIZON) + padded_us(micros_up(spec.hold_max));
        if let Some(rebuild) = call.rebuild.as_ref().filter(whole) {
            self.rebuild(now_us, open_until_us, rebuild);
        }
        let whole =
            |seeds: &&CounterSeeds| seeds.state_epoch == Micros(self.epoch_us) && seeds.past_use_count() <= BATCH_MAX;
        if let Some(seeds) = call.seeds.as_ref().filter(whole) {
            self.seed(now_us, open_until_us, seeds, &mut subjects);
        }
        let answer = if now_us < self.cold_until_us {
            self.refuse(now_us, RefusalReason::Cold, self.cold_until_us - now_us)
        } else if now_us < self.paused_until_us {
            self.refuse(now_us, RefusalReason::Paused, self.paused_until_us - now_us)
        } else {
            self.grant(now_us, spec, call, &mut subjects)
        };
        let reply = LimiterReply { previous_call, ..answer };
        // A new subject without a grant is not kept: its past may be known by the next call.
        for mut subject in
            subjects.list.into_iter().filter(|subject| subject.existed || subject.granted != InFlightCost::default())
        {
            subject.counters.counted_us = now_us;
            let kept_until_us = now_us
                + spec.count_delay_max_us()
                + self.coverage.longest_window_us(subject.scope)
                + SUBJECT_RETENTION_US;
            subject.counters.kept_until_us = subject.counters.kept_until_us.max(kept_until_us);
            self.subjects.insert(subject.key, subject.counters);
        }
        self.drop_idle_subjects(now_us);
        self.replies.insert(call.incarnation, (call.number, now_us, reply.clone()));
        reply
    }

    /// Takes out the counters of all subjects that the requests or the releases name, with their limits as requested.
    fn load_subjects<'a>(&mut self, now_us: u64, spec: &QuotaSpec, call: &'a LimiterCall) -> CallSubjects<'a> {
        let mut subjects = CallSubjects::default();
        let seeded = call.seeds.iter().flat_map(|seeds| &seeds.subjects).map(|seed| &seed.subject);
        let requested =
            call.requests.iter().flat_map(|request| &request.subjects).chain(seeded).map(|subject| (subject, true));
        let released = call.releases.iter().flat_map(|release| &release.subjects);
        for (subject, requested) in requested.chain(released.map(|subject| (subject, false))) {
            if subjects.contains(subject) || !(requested || self.subjects.contains_key(&subject.key)) {
                continue;
            }
            let (specs, scope) = (spec.subject_counters(subject), spec.scope_of(subject));
            let known = self.subjects.remove(&subject.key).filter(|counters| counters.kept_until_us > now_us);
            let (existed, counters) = match known {
                Some(mut counters) => {
                    // Every use that a new limit has not counted was granted before the subject was counted last.
                    counters.apply_spec(specs, now_us, self.coverage.uncounted_before(spec, counters.counted_us));
                    let missed = self.coverage.uncounted_since(scope, counters.counted_us);
                    counters.per_limit.iter_mut().for_each(|counter| counter.block_for(missed));
                    (true, counters)
                }
                None => {
                    (false, Counters::new(specs, now_us, |window_us| self.coverage.uncounted_of_new(scope, window_us)))
                }
            };
            let (key, granted) = (subject.key.clone(), InFlightCost::default());
            let indices = subject.limits.iter().map(|limit| limit.index).collect();
            subjects
                .push(subject, SubjectCounters { key, scope, counters, indices, existed, granted, latest_us: now_us });
        }
        subjects
    }

    fn release(&mut self, now_us: u64, call: &LimiterCall, subjects: &mut CallSubjects<'_>) {
        for release in call.releases.iter().take(BATCH_MAX) {
            self.provider.release(now_us, call.incarnation, release, true);
            let positions = subjects.positions(&release.subjects);
            for subject in select_subjects(&mut subjects.list, &positions) {
                subject.counters.release(now_us, call.incarnation, release, false);
            }
        }
        self.provider.expire(now_us);
        subjects.list.iter_mut().for_each(|subject| subject.counters.expire(now_us));
    }

    /// Rebuilds the state from the ledger; it is then as complete as the lost one.
    fn rebuild(&mut self, now_us: u64, open_until_us: u64, rebuild: &RebuildData) {
        if now_us >= self.cold_until_us {
            return;
        }
        self.cold_until_us = now_us;
        let past = LedgerUsage::from_uses(now_us, &rebuild.ended, rebuild.in_flight);
        if past.ended.is_empty() && past.in_flight == InFlightCost::default() {
            self.coverage.mark_never_used(self.epoch_us);
        }
        self.provider.per_limit.iter_mut().for_each(|counter| counter.replay_all(now_us, &past));
        self.provider.hold_slots(LOST_CALLER, past.in_flight, open_until_us);
    }

    /// Seeds counters that did not count their past. A subject that was seeded is kept from now on.
    fn seed(&mut self, now_us: u64, open_until_us: u64, seeds: &CounterSeeds, subjects: &mut CallSubjects<'_>) {
        if let Some(history) = &seeds.provider {
            self.provider.seed(now_us, &LedgerUsage::from_history(now_us, history), open_until_us);
        }
        for seed in &seeds.subjects {
            let positions = subjects.positions(std::slice::from_ref(&seed.subject));
            for subject in select_subjects(&mut subjects.list, &positions) {
                subject.existed |=
                    subject.counters.seed(now_us, &LedgerUsage::from_history(now_us, &seed.history), open_until_us);
            }
        }
    }

    fn grant(
        &mut self,
        now_us: u64,
        spec: &QuotaSpec,
        call: &LimiterCall,
        subjects: &mut CallSubjects<'_>,
    ) -> LimiterReply {
        let jitter_us = spec.grant_jitter.map_or(0, micros_up);
        self.provider.begin_batch(now_us, jitter_us);
        subjects.list.iter_mut().for_each(|subject| subject.counters.begin_batch(now_us, jitter_us));
        let indices = spec.provider_limits();
        let look_ahead_us = micros_down(call.look_ahead.min(BOOKING_HORIZON));
        let (horizon_us, start_delay_max_us) = (now_us + look_ahead_us, spec.start_delay_max_us());
        let context = GrantContext { now_us, horizon_us, start_delay_max_us, indices: &indices };
        let mut grants = Grants::starting_at(now_us);
        for (index, request) in call.requests.iter().take(BATCH_MAX).enumerate() {
            let request = PermitRequest { permits: request.permits.min(PERMITS_MAX), ..request.clone() };
            let positions = subjects.positions(&request.subjects);
            let mut counters = CallCounters { provider: &mut self.provider, subjects: &mut subjects.list };
            if !grants.serve(&context, &mut counters, &positions, index, &request) {
                break;
            }
        }
        let caller = (call.incarnation, call.number);
        let hold_us = padded_us(micros_up(spec.hold_max));
        self.provider.hold_slots(caller, grants.granted, grants.latest_us + hold_us);
        self.provider.per_limit.iter_mut().for_each(|counter| counter.end_batch(grants.latest_us, jitter_us));
        for subject in &mut subjects.list {
            subject.counters.hold_slots(caller, subject.granted, subject.latest_us + hold_us);
            subject.counters.per_limit.iter_mut().for_each(|counter| counter.end_batch(subject.latest_us, jitter_us));
        }
        let (deciding_limit, remaining, reset_us) = self.remaining_and_reset(now_us, &indices, grants.refused);
        LimiterReply {
            grants: grants.grants,
            skipped: grants.skipped,
            remaining,
            deciding_limit,
            reset_us,
            refused: grants.refused,
            ..self.reply(now_us)
        }
    }

    /// The limit that decides, the permits that can certainly start under it, and the time until all of it is free
    /// again.
    fn remaining_and_reset(
        &self,
        now_us: u64,
        indices: &[usize],
        refused: Option<LimiterRefusal>,
    ) -> (usize, u64, u64) {
        let counters = self
            .provider
            .per_limit
            .iter()
            .zip(indices)
            .filter(|(counter, _)| !counter.spec.shadow && !counter.spec.is_pacing());
        let outlooks = counters.map(|(counter, index)| {
            let (remaining, reset_us) =
                counter.remaining_and_reset(now_us, self.provider.in_flight.counted_by(counter.spec.applies_to));
            (*index, remaining, reset_us)
        });
        let refusing = match refused.map(|refused| refused.reason) {
            Some(RefusalReason::Limit { index } | RefusalReason::NeedsHistory { index, .. }) => Some(index),
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
        self.subjects.retain(|_, counters| counters.kept_until_us > now_us);
        self.subjects_kept = self.subjects.len();
    }

    fn refuse(&self, now_us: u64, reason: RefusalReason, wait_us: u64) -> LimiterReply {
        LimiterReply { refused: Some(LimiterRefusal { reason, wait_us, exact: false }), ..self.reply(now_us) }
    }

    fn reply(&self, now_us: u64) -> LimiterReply {
        LimiterReply {
            now: Micros(now_us),
            version: self.version,
            state_epoch: Micros(self.epoch_us),
            calls: self.calls,
            previous_call: 0,
            grants: Vec::new(),
            skipped: Vec::new(),
            remaining: 0,
            deciding_limit: 0,
            reset_us: 0,
            refused: None,
        }
    }
}
