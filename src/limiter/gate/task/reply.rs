//! What the gate makes of a reply: permits for those who wait, or why they wait on.
//!
//! Refuses the grants of a reply whose clock has made a step, and hands out no permit that would start beyond its end.

use std::time::Duration;

use tokio::time::Instant;

use super::GateTask;
use crate::domain::clock_comparison::Comparison;
use crate::domain::decision::{CallKind, PassedOver, Refusal, Refused, Reply, Run};
use crate::domain::limit::Scope;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use crate::limiter::gate::line::{Aside, Place};
use crate::limiter::gate::outgoing::Outgoing;
use crate::limiter::gate::permit::{Permit, Slots};
use crate::limiter::gate::standing::{ASK_PAUSE, Standing};
use crate::limiter::gate::warm::Cold;
use crate::limiter::gate::{Grant, RefusedBy};

/// How long a gate with old settings waits for the new ones before it asks again.
const STALE_PAUSE: Duration = Duration::from_millis(100);
/// How long one whose permit would have started too late is not asked for, at most.
const TOO_LATE_MAX: Duration = Duration::from_secs(1);

impl GateTask {
    pub(super) async fn answered(&mut self, outgoing: Outgoing, reply: &Reply) {
        let arrived = Instant::now();
        self.standing = None;
        self.ask_at = arrived;
        self.replied_at = arrived;
        if self.born.replace(reply.born).is_some_and(|before| before != reply.born) {
            let paused_until = self.paused_until.filter(|until| *until > arrived);
            self.pause_until = self.pause_until.max(paused_until);
        }
        if self.stepped(&outgoing, reply, arrived) {
            return;
        }
        self.hand_out(&outgoing, reply, arrived);
        let Some(refused) = reply.refused else {
            self.cold = None;
            self.stale = false;
            return;
        };
        if refused.by == Refusal::StaleVersion {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
            // Nothing was settled: the newer settings may hold limits that these settlements must reach.
            self.settled.extend(outgoing.settled);
            if !self.stale {
                let (ours, theirs) = (outgoing.spec.version, reply.version);
                tracing::warn!(quota = %outgoing.spec.quota, ours, theirs, "no permits: the limiter knows newer settings");
            }
            self.settle_at = (!self.settled.is_empty()).then(|| arrived + STALE_PAUSE);
            (self.parts.newer)(reply.version);
        }
        self.stale = refused.by == Refusal::StaleVersion;
        self.stand(&outgoing.spec, refused, reply, arrived).await;
    }

    /// Compares the clocks before anything of the reply is used. After a step nothing that the store has counted says when
    /// it was; the state is begun anew, and what this call was granted is forgotten with it.
    fn stepped(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) -> bool {
        self.distrust.take_if(|born| outgoing.call.distrust == Some(*born));
        let [departed, arrived] = [outgoing.departed, arrived].map(|at| at.saturating_duration_since(self.origin));
        let (by, direction) = match self.clock.observe(departed, arrived, reply.now) {
            Comparison::First | Comparison::Agrees { .. } => return false,
            Comparison::SteppedForward { by } => (by, "forward"),
            Comparison::SteppedBack { by } => (by, "back"),
        };
        let quota = &outgoing.spec.quota;
        tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step; its state is begun anew");
        self.distrust = Some(reply.born);
        self.pause_until = self.pause_until.max(outgoing.pause_until);
        true
    }

    fn hand_out(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) {
        let mut places: Vec<_> = outgoing.groups.iter().map(|group| group.places.iter()).collect();
        for run in &reply.granted {
            let (Some(group), Some(places)) = (outgoing.groups.get(run.want), places.get_mut(run.want)) else {
                continue;
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            for place in places.by_ref().take(permits) {
                let permit = self.permit(outgoing, run, reply.now, arrived);
                if permit.start_at > permit.use_before {
                    // Nobody could use it. It drops and gives its slots back, and its start is asked for when it comes.
                    let until = permit.start_at.clamp(arrived + ASK_PAUSE, arrived + TOO_LATE_MAX);
                    self.line.put_off(*place, until);
                    continue;
                }
                if let Some(waiter) = self.line.leave(*place) {
                    debug_assert_eq!(waiter.cost, group.want.cost);
                    // Sent to somebody who has gone away, the permit drops and gives its slots back.
                    let _ = waiter.reply.send(Grant::Granted(permit));
                }
            }
        }
        for group in &outgoing.groups {
            self.kinds.remove(&group.of.kind());
        }
        for passed in &reply.passed_over {
            let (Some(group), Some(places)) = (outgoing.groups.get(passed.want), places.get_mut(passed.want)) else {
                continue;
            };
            self.pass_over(&outgoing.spec, passed, group.of.kind(), places, arrived);
        }
    }

    /// One whose account or reference refuses steps aside; behind one whose kind of call is refused, that kind waits.
    fn pass_over<'a>(
        &mut self,
        spec: &QuotaSpec,
        passed: &PassedOver,
        kind: CallKind,
        places: impl Iterator<Item = &'a Place>,
        arrived: Instant,
    ) {
        let by = RefusedBy::Limit(spec.limit_name(passed.limit).to_owned());
        let until = arrived + Duration::from_micros(passed.wait_us).max(ASK_PAUSE);
        let mut places = places.copied();
        match spec.limits.get(passed.limit) {
            Some(limit) if limit.scope != Scope::Provider => {
                let counts = Some((limit.scope, limit.applies_to));
                let aside = Aside { until, by, exact: passed.exact, counts };
                for place in places {
                    self.line.step_aside(place, &aside, arrived);
                }
            }
            _ => {
                // Those of the kind that were behind the first are refused with its wait.
                let standing = Standing::new(by, until, passed.exact, arrived).for_first(places.next());
                self.kinds.entry(kind).or_insert(standing);
            }
        }
    }

    fn permit(&self, outgoing: &Outgoing, run: &Run, now: Micros, arrived: Instant) -> Permit {
        let Outgoing { spec, departed, call, groups, .. } = outgoing;
        // Within the allowance for jitter the way to the provider must not hide a late start.
        let budget = spec.grant_jitter.map_or(spec.send_budget, |jitter| jitter.min(spec.send_budget));
        let wait = Duration::from_micros(run.wait_us);
        let start_at = self.start_at(spec, run, now, arrived);
        let names = spec.provider_limits().into_iter().map(|index| spec.limit_name(index).to_owned());
        let slots = Slots {
            call: call.number,
            cost: groups.get(run.want).map_or(0, |group| group.want.cost),
            of: groups.get(run.want).map(|group| group.of.clone()).unwrap_or_default(),
            origins: names.zip(run.origins.iter().copied()).collect(),
            gate: self.outbox.clone(),
        };
        Permit::new(start_at, *departed + wait + budget, *departed + wait + spec.hold_max, slots)
    }

    /// From the arrival of the reply on; and not before each slot's window is over by the store's clock as it went while
    /// that window ran, in case it made a step since that nobody can see.
    fn start_at(&self, spec: &QuotaSpec, run: &Run, now: Micros, arrived: Instant) -> Instant {
        let since = arrived.saturating_duration_since(self.origin);
        let mut start = since + Duration::from_micros(run.wait_us);
        for (cell, origin_ms) in spec.provider_cells().iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0)
        {
            let due = Micros((origin_ms * 1_000 + cell.window_us).min(now.0 + run.wait_us));
            start = start.max(self.clock.not_before(since, due, Duration::from_micros(cell.window_us)));
        }
        self.origin + start
    }

    async fn stand(&mut self, spec: &QuotaSpec, refused: Refused, reply: &Reply, arrived: Instant) {
        let until = arrived + Duration::from_micros(refused.wait_us);
        let (by, until) = match refused.by {
            Refusal::Limit { index } => {
                self.cold = None;
                (RefusedBy::Limit(spec.limit_name(index).to_owned()), until)
            }
            Refusal::Paused => {
                self.cold = None;
                (RefusedBy::Paused, until)
            }
            Refusal::Cold => {
                let mut cold = Cold::known_or_new(self.cold.take(), reply.born);
                let until = cold.warm_up(spec, &self.parts, until).await;
                self.cold = Some(cold);
                (RefusedBy::Cold, until)
            }
            Refusal::StaleVersion => (RefusedBy::StaleSettings, arrived + STALE_PAUSE),
            Refusal::StaleCall => (RefusedBy::StoreAway("call overtaken".to_owned()), arrived + super::RETRY_FIRST),
        };
        let limited = matches!(by, RefusedBy::Limit(_));
        let first = self.line.first_ready(&self.kinds, arrived).filter(|_| limited);
        let standing = Standing::new(by, until, refused.exact, arrived).for_first(first);
        self.ask_at = standing.ask_at;
        self.standing = Some(standing);
    }
}
