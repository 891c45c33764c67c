//! The handling of a limiter reply: permits for the waiters, or the reason why they keep waiting.
//!
//! The grants of a reply are discarded if the store's clock made a step. A permit that would start after its send
//! budget is not handed out.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::PermitDispatcher;
use crate::domain::clock_comparison::Comparison;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{
    LimiterRefusal, LimiterReply, PermitGrant, PermitRequest, RefusalReason, Shortage, SkippedRequest,
};
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};
use crate::domain::time::Micros;
use crate::limiter::StoreClockReading;
use crate::limiter::gate::block::{QueueBlock, RETRY_PAUSE_MIN, exceeded_wait, longest_wait_us};
use crate::limiter::gate::clock_verification::VerifyResult;
use crate::limiter::gate::history::{HistoryAnswer, HistoryNeeds};
use crate::limiter::gate::pending_call::PendingCall;
use crate::limiter::gate::permit::{Permit, PermitSlots};
use crate::limiter::gate::rebuild::{Rebuild, RebuildStep};
use crate::limiter::gate::wait_queue::{Deferral, QueueKey};
use crate::limiter::gate::{AcquireResult, BlockReason};

/// How long a gate with old settings waits for the new ones before it asks again.
const STALE_PAUSE: Duration = Duration::from_millis(100);
/// Time between two checks for a clock attestation.
const ATTESTATION_PAUSE: Duration = Duration::from_millis(50);
/// Longest deferral of a waiter whose permit would have started too late.
const LATE_START_DEFERRAL_MAX: Duration = Duration::from_secs(1);

const ROLLED_BACK: &str = "the limiter's state is an earlier one than we have seen";
const EXCESSIVE_WAIT: &str = "the limiter's state makes payments wait longer than settings allow";
const LATE_PERMITS: &str = "permits arrive too late: the limiter takes longer than the send budget";
const IMPLAUSIBLE_VERSION: &str = "the limiter's settings version cannot be true";
/// By how much a store's settings version may be ahead of the database's: more changes than any lost backup held.
const VERSION_AHEAD_MAX: i64 = 1_000_000;

/// When the permits of one grant may be used, and the origins of their slots.
struct GrantTerms {
    start_at: Instant,
    use_before: Instant,
    answer_before: Instant,
    /// From the grant, or from the start of a permit that was booked ahead.
    budget: Duration,
    origins: Arc<[(String, u64)]>,
}

impl PermitDispatcher {
    pub(super) async fn handle_reply(&mut self, outgoing: PendingCall, reply: &LimiterReply) {
        let arrived = Instant::now();
        self.block = None;
        self.call_at = arrived.max(outgoing.next_call_at(reply));
        self.replied_at = arrived;
        self.may_delay_reset = false;
        if self.state_epoch.replace(reply.state_epoch).is_some_and(|before| before != reply.state_epoch) {
            let paused_until = self.sent_pause_until.filter(|until| *until > arrived);
            self.pause_until = self.pause_until.max(paused_until);
        }
        if self.detect_clock_step(&outgoing, reply, arrived) || self.detect_tampering(&outgoing, reply, arrived) {
            return;
        }
        self.verify_clock(&outgoing, reply, arrived);
        self.deliver_grants(&outgoing, reply, arrived);
        self.query_history(&outgoing, reply);
        let Some(refused) = reply.refused else {
            self.rebuild = None;
            self.stale = false;
            self.wait_for_verification(arrived);
            self.stalled_since.take_if(|_| self.block.is_none() && self.kind_blocks.is_empty());
            return;
        };
        if refused.reason == RefusalReason::StaleVersion {
            self.repeat_pause(&outgoing);
            // Nothing was released: the newer settings may have limits that count these releases too.
            self.releases.extend(outgoing.releases);
            if reply.version.saturating_sub(outgoing.spec.version) > VERSION_AHEAD_MAX {
                return self.reject_version(&outgoing.spec, reply, arrived);
            }
            if !self.stale {
                let (ours, theirs) = (outgoing.spec.version, reply.version);
                let quota = &outgoing.spec.quota;
                tracing::warn!(%quota, ours, theirs, "no permits: the limiter has newer settings than this worker");
            }
            self.release_at = (!self.releases.is_empty()).then(|| arrived + STALE_PAUSE);
            (self.parts.on_newer_version)(reply.version);
        }
        self.stale = refused.reason == RefusalReason::StaleVersion;
        self.block_queue(&outgoing.spec, refused, reply, arrived).await;
        self.wait_for_verification(arrived);
    }

    fn wait_for_verification(&mut self, arrived: Instant) {
        if !self.clock_verification.is_verified() && self.invalidate_epoch.is_none() {
            let standing = QueueBlock::new(BlockReason::Cold, arrived + ATTESTATION_PAUSE, false, arrived);
            self.call_at = standing.retry_at;
            self.block = Some(standing);
        }
    }

    /// Queries the ledger for the history that this reply shows to be needed, as far as it can be read now.
    fn query_history(&mut self, outgoing: &PendingCall, reply: &LimiterReply) {
        let (spec, mut needs) = (&outgoing.spec, HistoryNeeds::default());
        let refused = reply.refused.map(|refused| refused.reason);
        needs.provider = matches!(refused, Some(RefusalReason::NeedsHistory { readable_in_us: 0, .. }));
        let readable = |passed: &&SkippedRequest| passed.shortage == Shortage::NeedsHistory { readable_in_us: 0 };
        for passed in reply.skipped.iter().filter(readable) {
            let Some(group) = outgoing.batches.get(passed.request_index) else { continue };
            if spec.limits.get(passed.limit).is_none_or(|limit| limit.scope == Scope::Provider) {
                needs.provider = true;
            } else {
                needs.add(&group.request.subjects, &group.scope, group.reference.as_deref(), spec);
            }
        }
        self.history.start_query(needs, spec, reply, &self.parts);
    }

    /// Takes a history from the ledger, and lets the jobs that waited for it try again.
    pub(super) fn receive_history(&mut self, answer: Result<HistoryAnswer, String>) {
        if let Err(cause) = self.history.store_result(answer) {
            let quota = &self.parts.spec.borrow().quota;
            tracing::warn!(%quota, cause, "cannot read past usage from the ledger: new limits wait, retrying");
            return;
        }
        let waits = |block: &QueueBlock| block.reason == BlockReason::NeedsHistory;
        self.queue.resume_after_history();
        self.kind_blocks.retain(|_, block| !waits(block));
        if self.block.take_if(|block| waits(block)).is_some() {
            self.call_at = Instant::now();
        }
    }

    /// Compares the clocks before anything of the reply is used. After a step the instants that the store counted mean
    /// nothing. The state is reset, and the grants of this call are discarded.
    fn detect_clock_step(&mut self, outgoing: &PendingCall, reply: &LimiterReply, arrived: Instant) -> bool {
        self.invalidate_epoch.take_if(|born| outgoing.call.invalidate_epoch == Some(*born));
        let [departed, arrived] = [outgoing.sent_at, arrived].map(|at| at.saturating_duration_since(self.origin));
        let (by, direction) = match self.clock.observe(departed, arrived, reply.now) {
            Comparison::First => {
                self.clock_verification.begin(reply.now);
                return false;
            }
            Comparison::Agrees { .. } => return false,
            Comparison::SteppedForward { by } => (by, "forward"),
            Comparison::SteppedBack { by } => (by, "back"),
        };
        let quota = &outgoing.spec.quota;
        tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step: its state is reset");
        self.clock_verification.begin(reply.now);
        self.invalidate_epoch = Some(reply.state_epoch);
        self.repeat_pause(outgoing);
        true
    }

    /// Detects a state that was restored, which has forgotten uses that are in the ledger, and one that makes payments
    /// wait too long, which counts uses that are not. Such a state is reset, and the grants of this call are discarded.
    fn detect_tampering(&mut self, outgoing: &PendingCall, reply: &LimiterReply, arrived: Instant) -> bool {
        if outgoing.call.invalidate_epoch.is_some() {
            self.call_sequence.reset();
        }
        let problem = if !self.call_sequence.is_in_sequence(outgoing.call.number, reply, arrived) {
            ROLLED_BACK
        } else if self.is_wait_excessive(outgoing, reply, arrived) {
            EXCESSIVE_WAIT
        } else {
            return false;
        };
        let quota = &outgoing.spec.quota;
        if self.stall.should_log(problem, arrived) {
            tracing::error!(%quota, "{problem}: it is reset. Find out which program writes keys of limiter.prefix");
        }
        self.reset_state(reply, arrived);
        self.repeat_pause(outgoing);
        true
    }

    /// Whether a wait exceeds what settings allow. A limit that was slowed down while it was booked may wait as long
    /// too. So the state is reset only once within the longest wait, which does that limit no harm.
    fn is_wait_excessive(&mut self, outgoing: &PendingCall, reply: &LimiterReply, arrived: Instant) -> bool {
        let is_due = self.wait_reset_again_at.is_none_or(|at| at <= arrived);
        let exceeds_share = |skipped: &SkippedRequest| {
            let batch = outgoing.batches.get(skipped.request_index);
            batch.is_some_and(|batch| self.parts.limiter.exceeds_share(&outgoing.spec, &batch.request))
        };
        let exceeded = exceeded_wait(&outgoing.spec, reply, exceeds_share);
        let Some(longest) = exceeded.filter(|_| is_due) else { return false };
        self.wait_reset_again_at = Some(arrived + longest);
        true
    }

    /// Has the state reset with the next call, after a delay: functions of another program may ignore it for ever.
    fn reset_state(&mut self, reply: &LimiterReply, arrived: Instant) {
        self.invalidate_epoch = Some(reply.state_epoch);
        let standing = QueueBlock::new(BlockReason::Cold, arrived + STALE_PAUSE, false, arrived);
        (self.call_at, self.may_delay_reset) = (standing.retry_at, true);
        self.block = Some(standing);
    }

    /// Rejects a version that no database was ever so far behind: another program wrote this number.
    fn reject_version(&mut self, spec: &QuotaSpec, reply: &LimiterReply, arrived: Instant) {
        let (quota, ours, theirs) = (&spec.quota, spec.version, reply.version);
        if self.stall.should_log(IMPLAUSIBLE_VERSION, arrived) {
            tracing::error!(
                %quota,
                ours,
                theirs,
                "{IMPLAUSIBLE_VERSION}; its state is reset. Find out which program writes to the keys of limiter.prefix"
            );
        }
        self.reset_state(reply, arrived);
        self.release_at = (!self.releases.is_empty()).then_some(self.call_at);
    }

    /// What the state counted before the first exchange counts if an attestation covers it; otherwise the state is
    /// reset. Once the clock is verified, this worker records attestations for others.
    fn verify_clock(&mut self, outgoing: &PendingCall, reply: &LimiterReply, arrived: Instant) {
        let since_origin = arrived.saturating_duration_since(self.origin);
        let over = Duration::from_micros(outgoing.spec.longest_window_us()) + outgoing.spec.hold_max;
        let Some((least_ns, most_ns)) = self.clock.reading(since_origin, over) else { return };
        let (quota, read) = (&outgoing.spec.quota, StoreClockReading { at: arrived, least_ns, most_ns });
        let limiter = &self.parts.limiter;
        match self.clock_verification.verify(reply.state_epoch, arrived, || limiter.check_attestation(quota, &read)) {
            VerifyResult::Verified { since, undetected_step: hidden } => {
                self.clock.assume_undetected_step(hidden);
                limiter.attest_clock(quota, &outgoing.call.run_id, since, read);
            }
            VerifyResult::AlreadyVerified { since } => limiter.attest_clock(quota, &outgoing.call.run_id, since, read),
            VerifyResult::Pending => {}
            VerifyResult::Failed => {
                // So it is after every pause of all workers, and on a busy machine when two of them start together.
                tracing::info!(%quota, "no clock attestation covers the limiter's state; rebuilding it from the ledger");
                self.invalidate_epoch = Some(reply.state_epoch);
            }
        }
    }

    fn deliver_grants(&mut self, outgoing: &PendingCall, reply: &LimiterReply, arrived: Instant) {
        let mut places: Vec<_> = outgoing.batches.iter().map(|group| group.keys.iter()).collect();
        let cells = outgoing.spec.provider_counters();
        let mut has_late_permits = false;
        for run in &reply.grants {
            let (Some(group), Some(places)) =
                (outgoing.batches.get(run.request_index), places.get_mut(run.request_index))
            else {
                continue;
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            let terms = self.grant_terms(outgoing, &cells, run, reply.now, arrived);
            for place in places.by_ref().take(permits) {
                let slots = PermitSlots {
                    call: outgoing.call.number,
                    cost: group.request.cost,
                    scope: group.scope.clone(),
                    origins: Arc::clone(&terms.origins),
                    gate: self.outbox.clone(),
                };
                let usable = terms.start_at <= terms.use_before;
                let hand = usable.then(|| self.persist_window.occupy(arrived, terms.budget));
                let permit = Permit::new((terms.start_at, terms.use_before, terms.answer_before), slots, hand);
                if !usable {
                    has_late_permits = true;
                    // No job could use it. Dropping it releases its slots, and the limiter is asked again at its start.
                    let until = permit.start_at.clamp(arrived + RETRY_PAUSE_MIN, arrived + LATE_START_DEFERRAL_MAX);
                    self.queue.defer_until(*place, until);
                    continue;
                }
                if let Some(waiter) = self.queue.remove(*place, arrived) {
                    self.stall.end();
                    self.stalled_since = None;
                    debug_assert_eq!(waiter.cost, group.request.cost);
                    let egress = waiter.egress.as_ref();
                    let slot = egress.map(|egress| egress.lane.take(egress.rule, arrived, self.outbox.clone()));
                    // If the waiter was cancelled, the permit is dropped, which releases its slots.
                    let _ = waiter.reply.send(AcquireResult::Granted(permit.with_worker_slot(slot)));
                }
            }
        }
        if has_late_permits {
            let stalled = self.stall.observe(LATE_PERMITS.to_owned(), false, arrived, arrived);
            self.log_stall_report(stalled, &outgoing.spec.quota);
        }
        for group in &outgoing.batches {
            self.kind_blocks.remove(&group.scope.kind());
        }
        for passed in &reply.skipped {
            let (Some(group), Some(places)) =
                (outgoing.batches.get(passed.request_index), places.get_mut(passed.request_index))
            else {
                continue;
            };
            self.handle_skipped(&outgoing.spec, passed, &group.request, places, arrived);
        }
    }

    /// Defers waiters that a limit of their account or reference refuses, or that cost more than this worker's share.
    /// If a limit of their kind of call refuses, that kind is blocked.
    fn handle_skipped<'a>(
        &mut self,
        spec: &QuotaSpec,
        passed: &SkippedRequest,
        want: &PermitRequest,
        places: impl Iterator<Item = &'a QueueKey>,
        arrived: Instant,
    ) {
        let longest_us = longest_wait_us(spec, RefusalReason::Limit { index: passed.limit });
        let (by, until, exact) = match passed.shortage {
            Shortage::NoSlot => {
                let wait_us = passed.wait_us.min(longest_us);
                let until = arrived + Duration::from_micros(wait_us).max(RETRY_PAUSE_MIN);
                let exact = passed.exact && wait_us == passed.wait_us;
                (BlockReason::Limit(spec.limit_name(passed.limit).to_owned()), until, exact)
            }
            Shortage::NeedsHistory { readable_in_us } => {
                let readable_in_us = readable_in_us.min(longest_us);
                (BlockReason::NeedsHistory, self.history.wait_until(arrived, readable_in_us), false)
            }
        };
        let mut places = places.copied();
        let counts = match spec.limits.get(passed.limit) {
            // It can use no slot that becomes free, so none is kept for it.
            _ if self.parts.limiter.exceeds_share(spec, want) => None,
            Some(limit) if limit.scope != Scope::Provider => Some((limit.scope, limit.applies_to)),
            _ => {
                // Waiters of this kind behind the first one are refused with its wait.
                let standing = QueueBlock::new(by, until, exact, arrived).with_first_waiter(places.next());
                self.kind_blocks.entry(want.kind).or_insert(standing);
                return;
            }
        };
        let aside = Deferral { until, reason: by, exact, counted_with: counts };
        places.for_each(|place| self.queue.defer(place, &aside, arrived));
    }

    /// The terms that all permits of one grant share.
    fn grant_terms(
        &self,
        outgoing: &PendingCall,
        cells: &[CounterSpec],
        run: &PermitGrant,
        now: Micros,
        arrived: Instant,
    ) -> GrantTerms {
        let PendingCall { spec, sent_at: departed, .. } = outgoing;
        let (budget, wait) = (spec.use_within(), Duration::from_micros(run.wait_us));
        GrantTerms {
            start_at: self.start_at(outgoing, cells, run, now, arrived),
            use_before: *departed + wait + budget,
            answer_before: *departed + wait + spec.hold_max,
            budget: (*departed + budget).saturating_duration_since(arrived),
            origins: cells.iter().map(|cell| cell.name.clone()).zip(run.origins.iter().copied()).collect(),
        }
    }

    /// Earliest start of a grant's permits: not before the reply arrived, and not before each slot's window is over.
    /// The store's clock counts as it ran during that window, in case it has made an undetected step since. The origin
    /// of an account's slot is not in the reply; it is due now at the latest.
    fn start_at(
        &self,
        outgoing: &PendingCall,
        cells: &[CounterSpec],
        run: &PermitGrant,
        now: Micros,
        arrived: Instant,
    ) -> Instant {
        let since = arrived.saturating_duration_since(self.origin);
        let known = cells.iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0);
        let known =
            known.map(|(cell, origin_ms)| ((origin_ms * 1_000 + cell.window_us).min(now.0 + run.wait_us), cell));
        let own = outgoing.batches.get(run.request_index).into_iter().flat_map(|group| &group.subject_counters);
        let slots = known.chain(own.map(|cell| (now.0, cell)));
        let starts = slots
            .map(|(due_us, cell)| self.clock.not_before(since, Micros(due_us), Duration::from_micros(cell.window_us)));
        self.origin + starts.fold(since + Duration::from_micros(run.wait_us), Duration::max)
    }

    async fn block_queue(&mut self, spec: &QuotaSpec, refused: LimiterRefusal, reply: &LimiterReply, arrived: Instant) {
        let most_us = longest_wait_us(spec, refused.reason);
        let wait_us = refused.wait_us.min(most_us);
        let until = arrived + Duration::from_micros(wait_us);
        let (mut come_back, mut exact) = (None, refused.exact && wait_us == refused.wait_us);
        let (by, until) = match refused.reason {
            RefusalReason::Limit { index } => {
                self.rebuild = None;
                (BlockReason::Limit(spec.limit_name(index).to_owned()), until)
            }
            RefusalReason::NeedsHistory { readable_in_us, .. } => {
                self.rebuild = None;
                exact = false;
                (BlockReason::NeedsHistory, self.history.wait_until(arrived, readable_in_us.min(most_us)))
            }
            RefusalReason::Paused => {
                self.rebuild = None;
                (BlockReason::Paused, until)
            }
            RefusalReason::Cold => {
                let mut cold = Rebuild::resume_or_new(self.rebuild.take(), reply.state_epoch);
                let warming = cold.advance(spec, &self.parts, until).await;
                self.rebuild = Some(cold);
                let (RebuildStep::Wait { until } | RebuildStep::Querying { until }) = warming;
                come_back = matches!(warming, RebuildStep::Querying { .. }).then(Instant::now);
                (BlockReason::Cold, until)
            }
            RefusalReason::StaleVersion => (BlockReason::StaleSettings, arrived + STALE_PAUSE),
            RefusalReason::StaleCall => (
                BlockReason::StoreUnavailable("a later call of this process was answered first".to_owned()),
                arrived + super::RETRY_FIRST,
            ),
        };
        let limited = matches!(by, BlockReason::Limit(_));
        let first = self.queue.first_ready(&self.kind_blocks, arrived).filter(|_| limited);
        let standing = QueueBlock::new(by, until, exact, arrived).with_first_waiter(first);
        if first.is_some_and(|first| self.queue.evict_oversized(first, &standing, arrived)) {
            self.call_at = arrived + RETRY_PAUSE_MIN;
            return;
        }
        self.call_at = come_back.unwrap_or(standing.retry_at);
        self.block = Some(standing);
    }
}
