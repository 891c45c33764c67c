//! What the gate makes of a reply: permits for those who wait, or why they wait on.
//!
//! Refuses the grants of a reply whose clock has made a step, and hands out no permit that would start beyond its end.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::GateTask;
use crate::domain::clock_comparison::Comparison;
use crate::domain::decision::{PassedOver, Refusal, Refused, Reply, Run, Shortage, Want};
use crate::domain::disposition::NAMED_WAIT_MAX;
use crate::domain::limit::Scope;
use crate::domain::quota_spec::{CellSpec, QuotaSpec};
use crate::domain::time::{Micros, micros_up};
use crate::limiter::StoreReading;
use crate::limiter::gate::history::{Needs, Told};
use crate::limiter::gate::line::{Aside, Place};
use crate::limiter::gate::outgoing::Outgoing;
use crate::limiter::gate::permit::{Permit, Slots};
use crate::limiter::gate::standing::{ASK_PAUSE, Standing};
use crate::limiter::gate::trust::Sought;
use crate::limiter::gate::warm::{Cold, Warming};
use crate::limiter::gate::{Grant, PAUSE_SPREAD_MAX, RefusedBy};

/// How long a gate with old settings waits for the new ones before it asks again.
const STALE_PAUSE: Duration = Duration::from_millis(100);
/// Between two questions whether somebody vouches for the store's clock.
const WORD_PAUSE: Duration = Duration::from_millis(50);
/// How long one whose permit would have started too late is not asked for, at most.
const TOO_LATE_MAX: Duration = Duration::from_secs(1);

/// A pause is asked for anew after so long at the latest: the longest wait that a provider may name, and the spread.
const PAUSE_MAX: Duration = NAMED_WAIT_MAX.saturating_add(PAUSE_SPREAD_MAX);
const PUT_BACK: &str = "the limiter's state is an earlier one than we have seen";
const NO_VERSION: &str = "the limiter's settings version cannot be true";
/// By how much a store's settings version may be ahead of the database's: more changes than any lost backup held.
const VERSION_AHEAD_MAX: i64 = 1_000_000;

/// When the permits of one run may be used, and what their slots were.
struct Terms {
    start_at: Instant,
    use_before: Instant,
    answer_before: Instant,
    /// From the grant, or from the start of one that was booked ahead.
    budget: Duration,
    origins: Arc<[(String, u64)]>,
}

impl GateTask {
    pub(super) async fn answered(&mut self, outgoing: Outgoing, reply: &Reply) {
        let arrived = Instant::now();
        self.standing = None;
        self.ask_at = arrived.max(outgoing.next_worth_at(reply));
        self.replied_at = arrived;
        self.is_patient = false;
        if self.born.replace(reply.born).is_some_and(|before| before != reply.born) {
            let paused_until = self.paused_until.filter(|until| *until > arrived);
            self.pause_until = self.pause_until.max(paused_until);
        }
        if self.stepped(&outgoing, reply, arrived) || self.put_back(&outgoing, reply, arrived) {
            return;
        }
        if reply.permits() > 0 {
            self.stall.ends();
        }
        self.seek_trust(&outgoing, reply, arrived);
        self.hand_out(&outgoing, reply, arrived);
        self.ask_for_history(&outgoing, reply);
        let Some(refused) = reply.refused else {
            self.cold = None;
            self.stale = false;
            self.wait_for_trust(arrived);
            return;
        };
        if refused.by == Refusal::StaleVersion {
            self.pause_again(&outgoing);
            // Nothing was settled: the newer settings may hold limits that these settlements must reach.
            self.settled.extend(outgoing.settled);
            if reply.version.saturating_sub(outgoing.spec.version) > VERSION_AHEAD_MAX {
                return self.refuse_version(&outgoing.spec, reply, arrived);
            }
            if !self.stale {
                let (ours, theirs) = (outgoing.spec.version, reply.version);
                tracing::warn!(quota = %outgoing.spec.quota, ours, theirs, "no permits: the limiter knows newer settings");
            }
            self.settle_at = (!self.settled.is_empty()).then(|| arrived + STALE_PAUSE);
            (self.parts.newer)(reply.version);
        }
        self.stale = refused.by == Refusal::StaleVersion;
        self.stand(&outgoing.spec, refused, reply, arrived).await;
        self.wait_for_trust(arrived);
    }

    fn wait_for_trust(&mut self, arrived: Instant) {
        if !self.trust.is_given() && self.distrust.is_none() {
            let standing = Standing::new(RefusedBy::Cold, arrived + WORD_PAUSE, false, arrived);
            self.ask_at = standing.ask_at;
            self.standing = Some(standing);
        }
    }

    /// Asks the ledger for what this reply shows to be needed, as far as it can be read by now.
    fn ask_for_history(&mut self, outgoing: &Outgoing, reply: &Reply) {
        let (spec, mut needs) = (&outgoing.spec, Needs::default());
        let refused = reply.refused.map(|refused| refused.by);
        needs.provider = matches!(refused, Some(Refusal::NeedsHistory { readable_in_us: 0, .. }));
        let readable = |passed: &&PassedOver| passed.why == Shortage::NeedsHistory { readable_in_us: 0 };
        for passed in reply.passed_over.iter().filter(readable) {
            let Some(group) = outgoing.groups.get(passed.want) else { continue };
            if spec.limits.get(passed.limit).is_none_or(|limit| limit.scope == Scope::Provider) {
                needs.provider = true;
            } else {
                needs.add(&group.want.subjects, &group.of, group.reference.as_deref(), spec);
            }
        }
        self.histories.ask(needs, spec, reply, &self.parts);
    }

    /// Whoever waited for it is asked for again, with what the ledger has told.
    pub(super) fn hear_history(&mut self, answer: Result<Told, String>) {
        if let Err(cause) = self.histories.keep(answer) {
            let quota = &self.parts.spec.borrow().quota;
            tracing::warn!(%quota, cause, "the ledger cannot tell what was used; new limits and accounts are held");
            return;
        }
        let waits = |standing: &Standing| standing.by == RefusedBy::NeedsHistory;
        self.line.return_from_history();
        self.kinds.retain(|_, standing| !waits(standing));
        if self.standing.take_if(|standing| waits(standing)).is_some() {
            self.ask_at = Instant::now();
        }
    }

    /// Compares the clocks before anything of the reply is used. After a step nothing that the store has counted says when
    /// it was; the state is begun anew, and what this call was granted is forgotten with it.
    fn stepped(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) -> bool {
        self.distrust.take_if(|born| outgoing.call.distrust == Some(*born));
        let [departed, arrived] = [outgoing.departed, arrived].map(|at| at.saturating_duration_since(self.origin));
        let (by, direction) = match self.clock.observe(departed, arrived, reply.now) {
            Comparison::First => {
                self.trust.begin(reply.now);
                return false;
            }
            Comparison::Agrees { .. } => return false,
            Comparison::SteppedForward { by } => (by, "forward"),
            Comparison::SteppedBack { by } => (by, "back"),
        };
        let quota = &outgoing.spec.quota;
        tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step; its state is begun anew");
        self.trust.begin(reply.now);
        self.distrust = Some(reply.born);
        self.pause_again(outgoing);
        true
    }

    /// What a state has forgotten that was put back is in the ledger: it is begun anew, and what this call was granted is
    /// forgotten with it.
    fn put_back(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) -> bool {
        if outgoing.call.distrust.is_some() {
            self.order.forget();
        }
        if self.order.goes_on(reply) {
            return false;
        }
        let quota = &outgoing.spec.quota;
        if self.stall.is_news(PUT_BACK, arrived) {
            tracing::error!(%quota, "{PUT_BACK}; it is begun anew. Find out who writes to the keys of limiter.prefix");
        }
        self.begin_anew(reply, arrived);
        self.pause_again(outgoing);
        true
    }

    /// Not at once: functions of somebody else may never hear of it.
    fn begin_anew(&mut self, reply: &Reply, arrived: Instant) {
        self.distrust = Some(reply.born);
        let standing = Standing::new(RefusedBy::Cold, arrived + STALE_PAUSE, false, arrived);
        (self.ask_at, self.is_patient) = (standing.ask_at, true);
        self.standing = Some(standing);
    }

    /// No database was ever so far behind: somebody else wrote this number.
    fn refuse_version(&mut self, spec: &QuotaSpec, reply: &Reply, arrived: Instant) {
        let (quota, ours, theirs) = (&spec.quota, spec.version, reply.version);
        if self.stall.is_news(NO_VERSION, arrived) {
            tracing::error!(
                %quota,
                ours,
                theirs,
                "{NO_VERSION}; its state is begun anew. Find out who writes to the keys of limiter.prefix"
            );
        }
        self.begin_anew(reply, arrived);
        self.settle_at = (!self.settled.is_empty()).then_some(self.ask_at);
    }

    /// What the state counted before our first exchange is trusted on the word of somebody who was there; else the state
    /// is begun anew. Once it is trusted, our own word is kept for others.
    fn seek_trust(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) {
        let since_origin = arrived.saturating_duration_since(self.origin);
        let over = Duration::from_micros(outgoing.spec.longest_us()) + outgoing.spec.hold_max;
        let Some((least_ns, most_ns)) = self.clock.reading(since_origin, over) else { return };
        let (quota, read) = (&outgoing.spec.quota, StoreReading { at: arrived, least_ns, most_ns });
        let limiter = &self.parts.limiter;
        match self.trust.seek(reply.born, arrived, || limiter.witness(quota, &read)) {
            Sought::Given { since, hidden } => {
                self.clock.assume_hidden(hidden);
                limiter.clock_kept(quota, &outgoing.call.run_id, since, read);
            }
            Sought::Kept { since } => limiter.clock_kept(quota, &outgoing.call.run_id, since, read),
            Sought::Wait => {}
            Sought::Refused => {
                tracing::warn!(%quota, "nobody vouches for the limiter store's clock; its state is begun anew");
                self.distrust = Some(reply.born);
            }
        }
    }

    fn hand_out(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) {
        let mut places: Vec<_> = outgoing.groups.iter().map(|group| group.places.iter()).collect();
        let cells = outgoing.spec.provider_cells();
        for run in &reply.granted {
            let (Some(group), Some(places)) = (outgoing.groups.get(run.want), places.get_mut(run.want)) else {
                continue;
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            let terms = self.terms(outgoing, &cells, run, reply.now, arrived);
            for place in places.by_ref().take(permits) {
                let slots = Slots {
                    call: outgoing.call.number,
                    cost: group.want.cost,
                    of: group.of.clone(),
                    origins: Arc::clone(&terms.origins),
                    gate: self.outbox.clone(),
                };
                let usable = terms.start_at <= terms.use_before;
                let hand = usable.then(|| self.hands.take(arrived, terms.budget));
                let permit = Permit::new((terms.start_at, terms.use_before, terms.answer_before), slots, hand);
                if !usable {
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
            self.pass_over(&outgoing.spec, passed, &group.want, places, arrived);
        }
    }

    /// One whose account or reference refuses, or who costs more than this worker's share, steps aside; behind one whose kind
    /// of call is refused, that kind waits.
    fn pass_over<'a>(
        &mut self,
        spec: &QuotaSpec,
        passed: &PassedOver,
        want: &Want,
        places: impl Iterator<Item = &'a Place>,
        arrived: Instant,
    ) {
        let (by, until, exact) = match passed.why {
            Shortage::NoSlot => {
                let wait_us = passed.wait_us.min(longest_wait_us(spec));
                let until = arrived + Duration::from_micros(wait_us).max(ASK_PAUSE);
                let exact = passed.exact && wait_us == passed.wait_us;
                (RefusedBy::Limit(spec.limit_name(passed.limit).to_owned()), until, exact)
            }
            Shortage::NeedsHistory { readable_in_us } => {
                let readable_in_us = readable_in_us.min(longest_wait_us(spec));
                (RefusedBy::NeedsHistory, self.histories.wait_until(arrived, readable_in_us), false)
            }
        };
        let mut places = places.copied();
        let counts = match spec.limits.get(passed.limit) {
            // No slot that comes free is any use to it, so it need not be kept for it.
            _ if self.parts.limiter.outgrows_share(spec, want) => None,
            Some(limit) if limit.scope != Scope::Provider => Some((limit.scope, limit.applies_to)),
            _ => {
                // Those of the kind that were behind the first are refused with its wait.
                let standing = Standing::new(by, until, exact, arrived).for_first(places.next());
                self.kinds.entry(want.kind).or_insert(standing);
                return;
            }
        };
        let aside = Aside { until, by, exact, counts };
        places.for_each(|place| self.line.step_aside(place, &aside, arrived));
    }

    /// What all permits of a run have in common.
    fn terms(&self, outgoing: &Outgoing, cells: &[CellSpec], run: &Run, now: Micros, arrived: Instant) -> Terms {
        let Outgoing { spec, departed, .. } = outgoing;
        let (budget, wait) = (spec.use_within(), Duration::from_micros(run.wait_us));
        Terms {
            start_at: self.start_at(outgoing, cells, run, now, arrived),
            use_before: *departed + wait + budget,
            answer_before: *departed + wait + spec.hold_max,
            budget: (*departed + budget).saturating_duration_since(arrived),
            origins: cells.iter().map(|cell| cell.name.clone()).zip(run.origins.iter().copied()).collect(),
        }
    }

    /// From the arrival of the reply on; and not before each slot's window is over by the store's clock as it went while
    /// that window ran, in case it made a step since that nobody can see. An account's slot is not named: the latest that
    /// it can be due is now.
    fn start_at(&self, outgoing: &Outgoing, cells: &[CellSpec], run: &Run, now: Micros, arrived: Instant) -> Instant {
        let since = arrived.saturating_duration_since(self.origin);
        let known = cells.iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0);
        let known =
            known.map(|(cell, origin_ms)| ((origin_ms * 1_000 + cell.window_us).min(now.0 + run.wait_us), cell));
        let own = outgoing.groups.get(run.want).into_iter().flat_map(|group| &group.own_cells);
        let slots = known.chain(own.map(|cell| (now.0, cell)));
        let starts = slots
            .map(|(due_us, cell)| self.clock.not_before(since, Micros(due_us), Duration::from_micros(cell.window_us)));
        self.origin + starts.fold(since + Duration::from_micros(run.wait_us), Duration::max)
    }

    async fn stand(&mut self, spec: &QuotaSpec, refused: Refused, reply: &Reply, arrived: Instant) {
        let most_us = if refused.by == Refusal::Paused { micros_up(PAUSE_MAX) } else { longest_wait_us(spec) };
        let wait_us = refused.wait_us.min(most_us);
        let until = arrived + Duration::from_micros(wait_us);
        let (mut come_back, mut exact) = (None, refused.exact && wait_us == refused.wait_us);
        let (by, until) = match refused.by {
            Refusal::Limit { index } => {
                self.cold = None;
                (RefusedBy::Limit(spec.limit_name(index).to_owned()), until)
            }
            Refusal::NeedsHistory { readable_in_us, .. } => {
                self.cold = None;
                exact = false;
                let readable_in_us = readable_in_us.min(longest_wait_us(spec));
                (RefusedBy::NeedsHistory, self.histories.wait_until(arrived, readable_in_us))
            }
            Refusal::Paused => {
                self.cold = None;
                (RefusedBy::Paused, until)
            }
            Refusal::Cold => {
                let mut cold = Cold::known_or_new(self.cold.take(), reply.born);
                let warming = cold.warm_up(spec, &self.parts, until).await;
                self.cold = Some(cold);
                let (Warming::Waits { until } | Warming::Looks { until }) = warming;
                come_back = matches!(warming, Warming::Looks { .. }).then(Instant::now);
                (RefusedBy::Cold, until)
            }
            Refusal::StaleVersion => (RefusedBy::StaleSettings, arrived + STALE_PAUSE),
            Refusal::StaleCall => (RefusedBy::StoreAway("call overtaken".to_owned()), arrived + super::RETRY_FIRST),
        };
        let limited = matches!(by, RefusedBy::Limit(_));
        let first = self.line.first_ready(&self.kinds, arrived).filter(|_| limited);
        let standing = Standing::new(by, until, exact, arrived).for_first(first);
        if first.is_some_and(|first| self.line.send_costly_away(first, &standing, arrived)) {
            self.ask_at = arrived + ASK_PAUSE;
            return;
        }
        self.ask_at = come_back.unwrap_or(standing.ask_at);
        self.standing = Some(standing);
    }
}

/// Whoever must wait asks anew after so long at the latest, whatever the store says: all that these settings let anybody wait
/// for is over by then.
fn longest_wait_us(spec: &QuotaSpec) -> u64 {
    // Some limits keep a use up to 1/256 of its window longer.
    spec.cold_us() + spec.longest_us() / 128
}
