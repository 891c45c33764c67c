//! The handling of a limiter reply: permits for the waiters, or the reason why they keep waiting.
//!
//! The grants of a reply are discarded if the store's clock made a step. A permit that would start after its send
//! budget is not handed out.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::cold::ColdQuery;
use super::store_checks::{IMPLAUSIBLE_VERSION, STALE_PAUSE};
use super::{AcquireResult, GateCore, GrantedPermit, Notice, RETRY_FIRST, Ticket};
use crate::domain::clock_comparison::AttestationCheck;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{
    CallKind, LimiterRefusal, LimiterReply, PermitGrant, PermitRequest, RefusalReason, Shortage, SkippedRequest,
};
use crate::domain::persist_window::BookingAhead;
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};
use crate::domain::time::Micros;
use crate::limiter::StoreClockReading;
use crate::limiter::gate::BlockReason;
use crate::limiter::gate::block::{QueueBlock, RETRY_PAUSE_MIN, longest_wait_us};
use crate::limiter::gate::history_stock::{HistoryNeeds, HistoryRequest};
use crate::limiter::gate::pending_call::{GrantedSlots, PendingCall};
use crate::limiter::gate::wait_queue::{CountingScope, Deferral, QueueKey, RequestBatch};

/// Longest deferral of a waiter whose permit would have started too late.
const LATE_START_DEFERRAL_MAX: Duration = Duration::from_secs(1);
/// By how much a store's settings version may be ahead of the database's: more changes than any lost backup held. The
/// database takes over the version, so a number that is wrong would stay there for good.
const VERSION_AHEAD_MAX: i64 = 1_000_000;

/// Facts about the store that its reply does not contain.
pub(crate) struct StoreFacts<'a> {
    /// Whether a request costs more than this worker's share of a limit.
    pub exceeds_share: &'a dyn Fn(&QuotaSpec, &PermitRequest) -> bool,
    /// What other processes attest about the store's clock.
    pub attestation: &'a dyn Fn(&StoreClockReading) -> AttestationCheck,
}

/// What the driver does after a reply, besides delivering the decisions.
#[derive(Debug, Default)]
pub(crate) struct ReplyEffects {
    /// To attest for other processes.
    pub clock_proof: Option<ClockProof>,
    /// To query from the ledger, unless a query runs.
    pub history: Option<HistoryRequest>,
    /// A settings version of the store that is newer than ours.
    pub newer_version: Option<i64>,
    /// To query from the ledger, and to answer with [`GateCore::resolve_cold`].
    pub cold: Option<ColdQuery>,
}

/// The store's clock as this gate has compared it without a break since then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockProof {
    /// By the store's clock.
    pub since: Micros,
    pub read: StoreClockReading,
}

/// When the permits of one grant may be used, and the origins of their slots.
struct GrantTerms {
    start_at: Instant,
    use_before: Instant,
    answer_before: Instant,
    /// From the grant, or from the start of a permit that was booked ahead.
    budget: Duration,
    origins: Arc<[(String, u64)]>,
}

/// A call with its reply.
#[derive(Clone, Copy)]
pub(super) struct AnsweredCall<'a> {
    pub outgoing: &'a PendingCall,
    pub reply: &'a LimiterReply,
    pub facts: &'a StoreFacts<'a>,
    pub arrived: Instant,
}

/// A request that a limit of the provider refuses.
struct RefusedCost<'a> {
    batch: &'a RequestBatch,
    /// The limit counts calls of this kind alone; `None`: all.
    kind: Option<CallKind>,
    reason: BlockReason,
    until: Instant,
    exact: bool,
}

impl<'a> AnsweredCall<'a> {
    /// The request that ended the grants: the first one that is neither granted in full nor skipped.
    fn refused_batch(self) -> Option<&'a RequestBatch> {
        let granted = |index: usize| {
            let runs = self.reply.grants.iter().filter(move |run| run.request_index == index);
            runs.map(|run| usize::try_from(run.permits).unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
        };
        let is_skipped = |index: usize| self.reply.skipped.iter().any(|skipped| skipped.request_index == index);
        let mut batches = self.outgoing.batches.iter().enumerate();
        batches.find(|(index, batch)| !is_skipped(*index) && granted(*index) < batch.keys.len()).map(|(_, batch)| batch)
    }

    /// Whether a request costs more than this worker's share of a limit.
    pub fn exceeds_share(self, skipped: &SkippedRequest) -> bool {
        let request = self.outgoing.call.requests.get(skipped.request_index);
        request.is_some_and(|request| (self.facts.exceeds_share)(&self.outgoing.spec, request))
    }
}

impl GrantTerms {
    fn is_late(&self) -> bool {
        self.start_at > self.use_before
    }

    fn slots(&self, call: u64, cost: u32, scope: CountingScope) -> GrantedSlots {
        GrantedSlots { call, cost, scope, origins: Arc::clone(&self.origins) }
    }
}

impl<T: Ticket> GateCore<T> {
    /// Takes the reply to a call.
    pub fn receive_reply(
        &mut self,
        mut outgoing: PendingCall,
        reply: &LimiterReply,
        facts: &StoreFacts<'_>,
        arrived: Instant,
    ) -> ReplyEffects {
        let mut effects = ReplyEffects::default();
        self.failures = 0;
        self.block = None;
        self.call_at = arrived.max(outgoing.next_call_at(reply));
        self.replied_at = arrived;
        self.persist_window.record_call(arrived.saturating_duration_since(outgoing.sent_at));
        self.may_delay_reset = false;
        if self.state_epoch.replace(reply.state_epoch).is_some_and(|before| before != reply.state_epoch) {
            let paused_until = self.sent_pause_until.filter(|until| *until > arrived);
            self.pause_until = self.pause_until.max(paused_until);
        }
        let answered = AnsweredCall { outgoing: &outgoing, reply, facts, arrived };
        if self.detect_clock_step(answered) || self.detect_unusable_state(answered) {
            return effects;
        }
        effects.clock_proof = self.verify_clock(answered);
        self.deliver_grants(answered);
        effects.history = self.missing_history(answered);
        let Some(refused) = reply.refused else {
            self.cold = None;
            self.stale = false;
            self.wait_for_verification(arrived);
            self.stalled_since.take_if(|_| self.block.is_none() && self.kind_blocks.is_empty());
            return effects;
        };
        let is_stale = refused.reason == RefusalReason::StaleVersion;
        if is_stale && !self.receive_newer_version(&mut outgoing, reply, arrived) {
            return effects;
        }
        self.stale = is_stale;
        effects.newer_version = is_stale.then_some(reply.version);
        effects.cold = self.block_queue(AnsweredCall { outgoing: &outgoing, reply, facts, arrived }, refused);
        if effects.cold.is_none() {
            self.wait_for_verification(arrived);
        }
        effects
    }

    /// Keeps what a call with old settings could not do. Returns whether the store's version is plausible.
    fn receive_newer_version(&mut self, outgoing: &mut PendingCall, reply: &LimiterReply, arrived: Instant) -> bool {
        self.repeat_pause(outgoing);
        // Nothing was released: the newer settings may have limits that count these releases too.
        self.releases.append(&mut outgoing.releases);
        let (ours, theirs) = (outgoing.spec.version, reply.version);
        self.release_at = (!self.releases.is_empty()).then(|| arrived + STALE_PAUSE);
        let is_plausible = theirs.saturating_sub(ours) <= VERSION_AHEAD_MAX;
        if !is_plausible {
            self.reset_state(reply, arrived, Notice::StateReset(IMPLAUSIBLE_VERSION));
        } else if !self.stale {
            self.notices.push(Notice::NewerSettings { ours, theirs });
        }
        is_plausible
    }

    /// The history that this reply shows to be needed, as far as it can be read now.
    fn missing_history(&self, answered: AnsweredCall<'_>) -> Option<HistoryRequest> {
        let AnsweredCall { outgoing, reply, arrived, .. } = answered;
        let (spec, mut needs) = (&outgoing.spec, HistoryNeeds::default());
        let refused = reply.refused.map(|refused| refused.reason);
        needs.provider = matches!(refused, Some(RefusalReason::NeedsHistory { readable_in_us: 0, .. }));
        let readable = |passed: &&SkippedRequest| passed.shortage == Shortage::NeedsHistory { readable_in_us: 0 };
        for passed in reply.skipped.iter().filter(readable) {
            let Some(group) = outgoing.batches.get(passed.request_index) else { continue };
            if spec.limits.get(passed.limit).is_none_or(|limit| limit.scope == Scope::Provider) {
                needs.provider = true;
            } else {
                needs.add(&group.counted.subjects, &group.scope, group.reference.as_deref(), spec);
            }
        }
        self.history.request(needs, spec, reply, arrived)
    }

    fn deliver_grants(&mut self, answered: AnsweredCall<'_>) {
        let AnsweredCall { outgoing, reply, arrived, .. } = answered;
        let mut places: Vec<_> = outgoing.batches.iter().map(|group| group.keys.iter()).collect();
        let cells = if reply.grants.is_empty() { Vec::new() } else { outgoing.spec.provider_counters() };
        let (mut unused, mut late) = (Vec::new(), Vec::new());
        for run in &reply.grants {
            let (Some(group), Some(places)) =
                (outgoing.batches.get(run.request_index), places.get_mut(run.request_index))
            else {
                continue;
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            let start_at = self.store.start_at(&cells, run, answered, &group.counted);
            let terms = grant_terms(outgoing, &cells, run, start_at, arrived);
            for place in places.by_ref().take(permits) {
                // No job could use a late permit. Its slots are released, and its waiter is deferred below.
                if !terms.is_late() && self.grant(*place, outgoing.call.number, &terms, arrived) {
                    continue;
                }
                unused.push(terms.slots(outgoing.call.number, group.cost, group.scope.clone()).unused());
            }
            late.extend(terms.is_late().then_some((run, terms.use_before)));
        }
        for (run, use_before) in &late {
            // All waiters whose permits would start as late wait until the limiter is asked again. Otherwise each of them
            // would get the same permit and return it, call after call.
            let store = &self.store;
            self.queue.defer_ready(|waiter| {
                let start_at = store.start_at(&cells, run, answered, &waiter.counted);
                let until = start_at.clamp(arrived + RETRY_PAUSE_MIN, arrived + LATE_START_DEFERRAL_MAX);
                (start_at > *use_before).then_some(until)
            });
        }
        if !late.is_empty() {
            self.notices.push(Notice::LatePermits);
        }
        for group in &outgoing.batches {
            self.kind_blocks.remove(&group.scope.kind);
        }
        let mut costly_kinds = Vec::new();
        for passed in &reply.skipped {
            let (Some(batch), Some(places)) =
                (outgoing.batches.get(passed.request_index), places.get_mut(passed.request_index))
            else {
                continue;
            };
            let of_provider = self.defer_skipped(answered, passed, places);
            // Requests behind a costly one are refused with its wait, and are made again without it.
            let Some(refused) = of_provider.filter(|_| !costly_kinds.contains(&batch.scope.kind)) else { continue };
            if self.pass_costly(&refused, arrived) {
                costly_kinds.push(batch.scope.kind);
                continue;
            }
            // Waiters of this kind behind the first one are refused with its wait.
            let (first, ahead) = (places.next().copied(), self.persist_window.ahead().retry());
            let RefusedCost { reason, until, exact, .. } = refused;
            let block = QueueBlock::new(reason, until, exact, arrived).with_first_waiter(first, ahead, arrived);
            self.kind_blocks.entry(batch.scope.kind).or_insert(block.by_cost(batch.cost));
        }
        for release in unused {
            self.release(release, arrived);
        }
    }

    /// Hands a permit to the waiter, with a worker slot of its lane. Returns whether the waiter is still there.
    fn grant(&mut self, key: QueueKey, call: u64, terms: &GrantTerms, arrived: Instant) -> bool {
        let Some(waiter) = self.queue.remove(key, arrived) else { return false };
        self.stalled_since = None;
        if let Some(egress) = &waiter.egress {
            egress.lane.occupy(egress.rule, arrived);
        }
        let permit = GrantedPermit {
            start_at: terms.start_at,
            use_before: terms.use_before,
            answer_before: terms.answer_before,
            slots: terms.slots(call, waiter.cost, waiter.scope),
            window_slot: self.persist_window.occupy(arrived, terms.budget),
            waited_for_account: waiter.waited_for_account,
            egress: waiter.egress,
        };
        self.queue.decide(waiter.ticket, AcquireResult::Granted(permit));
        true
    }

    /// Defers waiters that a limit of their account or reference refuses, or that cost more than this worker's share.
    /// Returns the refusal by a limit of the provider on their kind of call.
    fn defer_skipped<'a>(
        &mut self,
        answered: AnsweredCall<'a>,
        passed: &SkippedRequest,
        places: &mut impl Iterator<Item = &'a QueueKey>,
    ) -> Option<RefusedCost<'a>> {
        let (spec, arrived) = (&answered.outgoing.spec, answered.arrived);
        let longest_us = longest_wait_us(spec);
        let (reason, until, exact) = match passed.shortage {
            Shortage::NoSlot => {
                let wait_us = passed.wait_us.min(longest_us);
                let until = arrived + Duration::from_micros(wait_us).max(RETRY_PAUSE_MIN);
                let exact = passed.exact && wait_us == passed.wait_us;
                (BlockReason::Limit(spec.limit_name(passed.limit).to_owned()), until, exact)
            }
            Shortage::NeedsHistory { readable_in_us } => {
                (BlockReason::NeedsHistory, self.history.wait_until(arrived, readable_in_us), false)
            }
        };
        let counted_with = match spec.limits.get(passed.limit) {
            // It can use no slot that becomes free, so none is kept for it.
            _ if answered.exceeds_share(passed) => None,
            Some(limit) if limit.scope != Scope::Provider => Some((limit.scope, limit.applies_to)),
            _ => {
                let batch = answered.outgoing.batches.get(passed.request_index)?;
                return Some(RefusedCost { batch, kind: Some(batch.scope.kind), reason, until, exact });
            }
        };
        let ends_by_release = matches!(&reason, BlockReason::Limit(name) if spec.counts_in_flight(name));
        let until = if ends_by_release { self.release_check(until, arrived) } else { until };
        let aside = Deferral { until, reason, exact, ends_by_release, counted_with, is_by_cost: false };
        places.copied().for_each(|place| self.queue.defer(place, &aside, arrived));
        None
    }

    /// Lets cheaper waiters pass one that costs more than a limit of the provider has free, with those that cost as much,
    /// unless it soon has its slots. Returns whether it did so. What costs 1 has no cheaper ones.
    fn pass_costly(&mut self, refused: &RefusedCost<'_>, arrived: Instant) -> bool {
        let RefusedCost { batch, kind, reason, until, exact } = refused;
        let BlockReason::Limit(_) = reason else { return false };
        if batch.cost <= 1 {
            return false;
        }
        let first = batch.keys.iter().copied().find(|key| self.queue.contains(*key));
        if first.is_some_and(|first| self.queue.holds_until(first, *until, arrived)) {
            return false;
        }
        let deferral = Deferral {
            until: *until,
            reason: reason.clone(),
            exact: *exact,
            ends_by_release: false,
            counted_with: None,
            is_by_cost: true,
        };
        self.queue.defer_costly(batch.cost, *kind, &deferral, arrived);
        self.call_at = arrived + RETRY_PAUSE_MIN;
        true
    }

    /// When a waiter for a slot in flight is requested again: together with the others, so that they cost no more calls
    /// than one of them. Permits of other processes end without notice.
    fn release_check(&mut self, until: Instant, arrived: Instant) -> Instant {
        if self.release_check_at < arrived + RETRY_PAUSE_MIN {
            self.release_check_at = until;
        }
        self.release_check_at.min(until)
    }

    /// Blocks the queue for the reason of the refusal. Returns the query of the ledger that a cold state needs.
    fn block_queue(&mut self, answered: AnsweredCall<'_>, refused: LimiterRefusal) -> Option<ColdQuery> {
        let (spec, arrived) = (&answered.outgoing.spec, answered.arrived);
        let wait_us = match refused.reason {
            RefusalReason::Limit { .. } => refused.wait_us.min(longest_wait_us(spec)),
            _ => refused.wait_us,
        };
        let until = arrived + Duration::from_micros(wait_us);
        let mut exact = refused.exact && wait_us == refused.wait_us;
        if !matches!(refused.reason, RefusalReason::Cold | RefusalReason::StaleVersion | RefusalReason::StaleCall) {
            self.cold = None;
        }
        let (by, until) = match refused.reason {
            RefusalReason::Limit { index } => (BlockReason::Limit(spec.limit_name(index).to_owned()), until),
            RefusalReason::NeedsHistory { readable_in_us, .. } => {
                exact = false;
                (BlockReason::NeedsHistory, self.history.wait_until(arrived, readable_in_us))
            }
            RefusalReason::Paused => (BlockReason::Paused, until),
            RefusalReason::Cold => {
                let query = ColdQuery { state_epoch: answered.reply.state_epoch, at_latest: until, exact };
                return self.receive_cold(spec, query, arrived);
            }
            RefusalReason::StaleVersion => (BlockReason::StaleSettings, arrived + STALE_PAUSE),
            RefusalReason::StaleCall => (
                BlockReason::StoreUnavailable("a later call of this process was answered first".to_owned()),
                arrived + RETRY_FIRST,
            ),
        };
        let limited = matches!(by, BlockReason::Limit(_));
        let refused_batch = answered.refused_batch().filter(|_| limited);
        if let Some(batch) = refused_batch {
            let refused = RefusedCost { batch, kind: None, reason: by.clone(), until, exact };
            if self.pass_costly(&refused, arrived) {
                return None;
            }
        }
        let first = self.queue.first_ready(&self.kind_blocks, arrived).filter(|_| limited);
        // An urgent waiter asks as soon as its start can be booked.
        let is_urgent = first.is_some_and(|first| self.queue.is_urgent(first));
        let retry_ahead = if is_urgent { BookingAhead::urgent_booking() } else { self.persist_window.ahead().retry() };
        let block = QueueBlock::new(by, until, exact, arrived).with_first_waiter(first, retry_ahead, arrived);
        self.block_until_retry(block.by_cost(refused_batch.map_or(1, |batch| batch.cost)));
        None
    }
}

/// The terms that all permits of one grant share.
fn grant_terms(
    outgoing: &PendingCall,
    cells: &[CounterSpec],
    grant: &PermitGrant,
    start_at: Instant,
    arrived: Instant,
) -> GrantTerms {
    let PendingCall { spec, sent_at: departed, .. } = outgoing;
    let (budget, wait) = (spec.use_within(), Duration::from_micros(grant.wait_us));
    GrantTerms {
        start_at,
        use_before: *departed + wait + budget,
        answer_before: *departed + wait + spec.hold_max,
        budget: (*departed + budget).saturating_duration_since(arrived),
        origins: cells.iter().map(|cell| cell.name.clone()).zip(grant.origins.iter().copied()).collect(),
    }
}
