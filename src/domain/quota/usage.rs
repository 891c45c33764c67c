//! Usage of a quota's limits: what is used, when the next permit may start, and when all of a limit is free again.
//!
//! Reading changes nothing. Calls in flight count as answered now; a call whose deadline has passed stays in flight
//! until the next call to the limiter. The limits are those of the last call, whose settings may be older than the
//! caller's.

use super::counter::Counter;
use super::counters::Counters;
use super::coverage::UncountedUses;
use super::{Quota, QuotaState};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{LimitUsage, Subject};
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};
use crate::domain::time::Micros;

/// Instants of one reading.
#[derive(Clone, Copy)]
struct UsageView {
    now_us: u64,
    /// No permit starts before this: the state is cold, or a provider named a wait.
    grants_from_us: u64,
}

impl Quota {
    /// Usage of the provider's limits at `clock`, and of one subject's.
    pub fn usage(&self, clock: Micros, spec: &QuotaSpec, subject: Option<&Subject>) -> Vec<LimitUsage> {
        let state = self.state.as_ref();
        let now_us = state.map_or(clock.0, |state| clock.0.max(state.last_us));
        let grants_from_us = state.map_or(now_us + spec.cold_start_us(), |state| state.grants_from_us(spec, now_us));
        let view = UsageView { now_us, grants_from_us };
        let new_limit =
            state.map_or_else(UncountedUses::default, |state| state.coverage.uncounted_before(spec, now_us));
        let provider =
            state.map(|state| (&state.provider, state.coverage.uncounted_since(Scope::Provider, state.last_us)));
        let provider_limits = spec.provider_limits().into_iter().zip(spec.provider_counters());
        let provider_limits =
            provider_limits.map(|(index, counter)| view.limit_usage(index, &counter, provider, new_limit));
        let own = state.and_then(|state| state.subjects.get(&subject?.key)).filter(|own| own.kept_until_us > now_us);
        let own_limits = subject.into_iter().flat_map(|subject| {
            let scope = spec.scope_of(subject);
            let own = own.and_then(|own| Some((own, state?.coverage.uncounted_since(scope, own.counted_us))));
            let indices = subject.limits.iter().map(|limit| limit.index);
            indices.zip(spec.subject_counters(subject)).map(move |(index, counter)| {
                let new_subject = state.filter(|_| own.is_none());
                let unknown =
                    new_subject.map_or(new_limit, |state| state.coverage.uncounted_of_new(scope, counter.window_us));
                view.limit_usage(index, &counter, own, unknown)
            })
        });
        provider_limits.chain(own_limits).filter(|usage| usage.index < spec.limits.len()).collect()
    }
}

impl QuotaState {
    fn grants_from_us(&self, spec: &QuotaSpec, now_us: u64) -> u64 {
        let paused_until_us = if self.resumed_at == spec.resumed_at { self.paused_until_us } else { 0 };
        now_us.max(self.cold_until_us).max(paused_until_us)
    }
}

impl UsageView {
    /// `counters` come with the uses that they have not counted. `unknown`: the uses that a counter which does not
    /// exist yet has not counted.
    fn limit_usage(
        self,
        index: usize,
        spec: &CounterSpec,
        counters: Option<(&Counters, UncountedUses)>,
        unknown: UncountedUses,
    ) -> LimitUsage {
        let Self { now_us, grants_from_us } = self;
        let of_limit = |counter: &&Counter| counter.spec.name == spec.name;
        let known =
            counters.and_then(|(counters, missed)| Some((counters, counters.per_limit.iter().find(of_limit)?, missed)));
        let Some((counters, counter, missed)) = known else {
            return LimitUsage::unused(index, grants_from_us.max(blocked_until_us(spec, unknown)) - now_us);
        };
        let leased = counters.in_flight.counted_by(counter.spec.applies_to);
        let from_us = grants_from_us.max(blocked_until_us(&counter.spec, missed));
        let retry_us = counter.next_start_us(now_us, from_us, leased) - now_us;
        let (_, reset_us) = counter.remaining_and_reset(now_us, leased);
        LimitUsage {
            index,
            used: counter.counted(now_us, leased),
            would_have_refused: counter.would_have_refused,
            would_have_waited: counter.would_have_waited,
            retry_us,
            reset_us: reset_us.max(retry_us),
        }
    }
}

/// Until when a limit is blocked for uncounted uses; 0: it is not.
fn blocked_until_us(spec: &CounterSpec, unknown: UncountedUses) -> u64 {
    if unknown.until_us > 0 && !spec.shadow { unknown.until_us + spec.window_us } else { 0 }
}
