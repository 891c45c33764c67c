//! Acquires the permit for one request, and with it a worker slot: waits as long as the provider's mode and the lane's
//! pauses allow.
//!
//! It sends nothing. A refusal becomes a wait, for which the job sleeps or returns to the backlog.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use super::backlog::{BacklogReturnReason, LIMIT_BLOCK_MIN};
use super::prepare::ProviderCall;
use super::{JobRun, LaneContext, WaitCause};
use crate::domain::disposition::OVERSIZED_WAIT;
use crate::domain::job::Job;
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::{BOOKING_HORIZON, Mode, Provider};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::PauseCause;
use crate::limiter::gate::{
    AcquireRequest, AcquireResult, BlockReason, EgressRequest, EgressRule, GateRefusal, Permit, RefusalScope,
};
use crate::telemetry::spans;
use crate::worker::intake::DeliveryAction;
use crate::worker::lane::{RESUME_AHEAD, max_local_wait};

/// Longest wait of an active job for a limit of its account. Then it returns to the backlog, and its place in the lane
/// is free for jobs of other accounts. A permit that could be booked ahead is booked by then. The gate lets the first
/// jobs of an account wait longer for a slot in flight, because a release wakes them at once.
pub(crate) const ACCOUNT_WAIT: Duration = BOOKING_HORIZON;

/// Longest wait of an active job for its permit in `requeue` mode.
pub(crate) const REQUEUE_WAIT: Duration = Duration::from_millis(250);
/// Shortest wait of a job whose cost exceeds a limit.
const COST_WAIT_MIN: Duration = Duration::from_millis(250);
/// Longest wait of costly jobs for slots whose instant is not known: responses make them free.
const INEXACT_COST_WAIT: Duration = Duration::from_secs(1);

pub(super) enum PermitWait {
    Granted(Permit),
    Refused(GateRefusal),
    /// The lane had no worker slot at its egress rate in time.
    NoWorkerSlot,
    /// The lane must not send.
    LanePaused(Wait),
    Stopping,
}

/// The job's claim on the lane's egress. It waits for a worker slot as long as an active job waits at all.
pub(super) fn egress_request(lane: &LaneContext, rule: EgressRule, delivered_at: Instant) -> EgressRequest {
    let wait_until = delivered_at + max_local_wait(&lane.settings.borrow().provider);
    EgressRequest { lane: Arc::clone(&lane.egress), rule, wait_until }
}

/// A job whose outcome is unknown goes first: its idempotency key ages, and the merchant waits for an answer.
const UNKNOWN_OUTCOME_PRIORITY: u8 = 10;

/// What a job requests from the gate; `is_unknown`: its outcome is.
pub(super) fn acquire_request(
    job: &Job,
    kind: CallKind,
    is_unknown: bool,
    provider: &Provider,
    egress: EgressRequest,
) -> AcquireRequest {
    let (wait_until, accepted_wait) = match provider.mode {
        Mode::Blocking => (egress.wait_until, Duration::ZERO),
        // A wait that is shorter than a return to the backlog and a new claim is slept.
        Mode::Requeue => (Instant::now() + REQUEUE_WAIT, REQUEUE_WAIT),
    };
    AcquireRequest {
        job: Some(job.id.clone()),
        // A job's cost is what its charge uses.
        cost: if kind == CallKind::Charge { u32::from(job.cost) } else { 1 },
        kind,
        priority: if is_unknown { UNKNOWN_OUTCOME_PRIORITY } else { job.priority },
        account: job.account.as_ref().map(Arc::from),
        reference: job.reference.clone(),
        wait_until,
        accepted_wait,
        account_wait: ACCOUNT_WAIT,
        egress: Some(egress),
    }
}

pub(super) async fn wait_for_permit(lane: &LaneContext, request: AcquireRequest) -> PermitWait {
    if let Some(refusal) = cost_refusal(lane, &request) {
        return PermitWait::Refused(refusal);
    }
    let (asked_at, _waiting) = (Instant::now(), lane.meter.permit_wait_started());
    let charge = request.job.as_ref().filter(|_| request.kind == CallKind::Charge);
    let charge_wait = charge.map(|job| lane.backlog.begin_wait(job));
    let mut sending = lane.control.watch_sending();
    let mut outcomes = lane.control.outcomes.watch_pause();
    let mut settings = lane.settings.clone();
    settings.mark_unchanged();
    let acquired = lane.gate.acquire(request);
    tokio::pin!(acquired);
    loop {
        sending.mark_unchanged();
        outcomes.mark_unchanged();
        if let Some(pause) = lane.control.sending_pause() {
            return PermitWait::LanePaused(pause.reason);
        }
        if settings.borrow_and_update().provider.paused {
            return PermitWait::LanePaused(WaitReason::OperatorPaused.into());
        }
        tokio::select! {
            grant = &mut acquired => return match grant {
                AcquireResult::Granted(permit) => {
                    if let Some(wait) = charge_wait.as_ref().filter(|_| !permit.waited_for_account) {
                        wait.record_grant(&lane.gate.view().borrow());
                    }
                    let usable_at = permit.start_at.max(Instant::now());
                    lane.meter.record_grant(usable_at.saturating_duration_since(asked_at));
                    PermitWait::Granted(permit)
                }
                AcquireResult::Refused(GateRefusal { reason: BlockReason::Stopping, .. })
                    if lane.stop.is_cancelled() =>
                {
                    PermitWait::Stopping
                }
                // A message that is requeued to a lane that still consumes would be delivered again at once.
                AcquireResult::Refused(GateRefusal { reason: BlockReason::Stopping, .. }) => {
                    PermitWait::LanePaused(WaitReason::QuotaClosed.into())
                }
                AcquireResult::Refused(refusal) => PermitWait::Refused(refusal),
                AcquireResult::NoWorkerSlot => PermitWait::NoWorkerSlot,
            },
            _ = sending.changed() => {}
            _ = outcomes.changed() => {}
            _ = settings.changed() => {}
            () = lane.stop.cancelled() => return PermitWait::Stopping,
        }
    }
}

/// How long jobs of a refused cost wait: until shortly before the slots are free, if that is known.
pub(crate) fn cost_wait(refusal: &GateRefusal) -> Duration {
    let longest = if refusal.exact { Duration::MAX } else { INEXACT_COST_WAIT };
    refusal.retry_after.min(longest).saturating_sub(RESUME_AHEAD).max(LIMIT_BLOCK_MIN)
}

/// The refusal of a charge that costs as much as one that was refused, while that one's wait lasts.
fn cost_refusal(lane: &LaneContext, request: &AcquireRequest) -> Option<GateRefusal> {
    let wait = lane.control.cost_wait(request.cost).filter(|_| request.kind == CallKind::Charge)?;
    let retry_after = wait.until.saturating_duration_since(Instant::now());
    Some(GateRefusal { retry_after, exact: false, reason: BlockReason::Limit(wait.limit), scope: RefusalScope::Cost })
}

impl JobRun<'_> {
    /// Waits for the permit of the call.
    pub(super) async fn acquire(&self, call: &ProviderCall) -> PermitWait {
        let provider = &self.settings.provider;
        let egress = egress_request(self.lane, call.egress_rule(provider), self.delivered_at);
        let acquire = acquire_request(&self.job, call.kind(), self.claimed.maybe_charged, provider, egress);
        let account_wait = if self.is_for_backlog() { acquire.account_wait } else { Duration::MAX };
        let acquire = AcquireRequest { account_wait, ..acquire };
        let waiting = spans::step("wait for a permit");
        let waited = wait_for_permit(self.lane, acquire).instrument(waiting.clone()).await;
        if let Some(ahead) = &self.ahead {
            ahead.release();
        }
        if let PermitWait::Refused(refusal) = &waited {
            self.record_refusal(refusal, &waiting);
        }
        waited
    }

    pub(super) async fn delay_refused(&self, refusal: &GateRefusal) -> DeliveryAction {
        let (label, by) = refusal_codes(&refusal.reason);
        let reason = match &refusal.reason {
            BlockReason::Oversized { limit, max_cost: at_once } => {
                let reason = Wait::for_larger_limit(limit, self.job.cost, *at_once);
                return self.delay(self.cost_wait(), WaitCause::new(label, reason)).await;
            }
            BlockReason::Limit(name) if refusal.scope == RefusalScope::Cost => {
                let cause = WaitCause::new(label, Wait::for_slots_at_once(name, self.job.cost));
                return self.delay_costly(name, refusal, cause).await;
            }
            BlockReason::Limit(name) => WaitReason::Limit(name.clone()),
            BlockReason::AccountBlocked { .. } => WaitReason::AccountBlocked,
            BlockReason::Cold => WaitReason::LimiterCold,
            BlockReason::NeedsHistory => WaitReason::NeedsHistory,
            BlockReason::Paused => WaitReason::ProviderPaused,
            BlockReason::StoreUnavailable(_) => WaitReason::LimiterUnavailable,
            BlockReason::StaleSettings => WaitReason::StaleSettings,
            BlockReason::Stopping => return self.release().await,
        };
        let cause = WaitCause::new(label, reason);
        if let Some(block) = self.flow_block(refusal) {
            let reason = BacklogReturnReason { block: Some(block), ..cause.into() };
            return self.return_to_backlog(reason).await;
        }
        let control = &self.lane.control;
        match refusal.scope {
            // The refusal says nothing about the jobs behind it.
            RefusalScope::Job | RefusalScope::Account | RefusalScope::Cost => {}
            RefusalScope::Charges => control.pause_charges(refusal.retry_after, by, cause.reason.clone()),
            // Over soon: to record what arrives meanwhile would cost more than to let it wait in the queue.
            RefusalScope::All if by == PauseCause::Cold => {
                control.pause_intake(refusal.retry_after, by, cause.reason.clone());
            }
            RefusalScope::All => control.pause_claims(refusal.retry_after, by, cause.reason.clone()),
        }
        if refusal.scope == RefusalScope::Job {
            return self.delay(refusal.retry_after, cause).await;
        }
        if by == PauseCause::Limit && self.is_for_backlog() {
            return self.return_to_backlog(cause.into()).await;
        }
        self.wait_for_lane(refusal.retry_after, cause).await
    }

    /// Delays a job that costs more than a limit has free. Cheaper ones go on, and those that cost as much wait with it.
    async fn delay_costly(&self, limit: &str, refusal: &GateRefusal, cause: WaitCause) -> DeliveryAction {
        self.lane.control.record_cost_wait(u32::from(self.job.cost), limit, Instant::now() + cost_wait(refusal));
        if self.is_for_backlog() {
            return self.return_to_backlog(cause.into()).await;
        }
        self.delay(refusal.retry_after, cause).await
    }

    /// Wait of a job whose cost exceeds a limit: it is checked again before its age ends it, in case the limit was
    /// raised.
    fn cost_wait(&self) -> Duration {
        let left = self.lane.settings.borrow().provider.max_age.saturating_sub(self.age());
        left.clamp(COST_WAIT_MIN, OVERSIZED_WAIT)
    }

    /// Counts a refusal, and records it on the span of the wait and among the lane's decisions; never with an account.
    fn record_refusal(&self, refusal: &GateRefusal, waiting: &Span) {
        let (reason, _) = refusal_codes(&refusal.reason);
        let (limit, by) = match &refusal.reason {
            BlockReason::Limit(name) => {
                let limit = self.settings.provider.limits.iter().find(|limit| limit.name == *name);
                let allows = limit.map(|limit| format!(" ({})", limit.rate)).unwrap_or_default();
                (Some(name.as_str()), format!("{name}{allows}"))
            }
            BlockReason::Cold => (None, "the limiter (its state was lost)".to_owned()),
            BlockReason::NeedsHistory => (None, "the limiter (usage is being read from the ledger)".to_owned()),
            BlockReason::Paused => (None, "a pause that the provider asked for".to_owned()),
            BlockReason::StoreUnavailable(_) => (None, "the limiter (its store is unavailable)".to_owned()),
            BlockReason::StaleSettings => (None, "the limiter (newer settings are being loaded)".to_owned()),
            BlockReason::Oversized { limit, max_cost: at_once } => (
                Some(limit.as_str()),
                format!("limit {limit}: the job's cost exceeds the {at_once} that it admits at once"),
            ),
            BlockReason::AccountBlocked { .. } => (None, "a rule for its account".to_owned()),
            BlockReason::Stopping => (None, "a gate that is closing".to_owned()),
        };
        spans::record_refusal(waiting, reason, limit);
        let free = if refusal.exact { "free in" } else { "free no sooner than in" };
        let reason_text = format!("refused by {by}, {free} {:.1} s", refusal.retry_after.as_secs_f64());
        self.lane.meter.record_refusal(reason, limit, reason_text);
    }
}

/// The label of a refusal for metrics, which is stable, and its pause cause, as reports name it.
pub(in crate::worker) fn refusal_codes(reason: &BlockReason) -> (&'static str, PauseCause) {
    match reason {
        BlockReason::Limit(_) => ("limit", PauseCause::Limit),
        BlockReason::Cold => ("cold", PauseCause::Cold),
        BlockReason::NeedsHistory => ("needs_history", PauseCause::Cold),
        BlockReason::Paused => ("paused_by_provider", PauseCause::Provider),
        BlockReason::StoreUnavailable(_) => ("limiter_unavailable", PauseCause::Backend),
        BlockReason::StaleSettings => ("stale_settings", PauseCause::Other),
        BlockReason::Oversized { .. } => ("cost_exceeds_limit", PauseCause::Other),
        BlockReason::AccountBlocked { .. } => ("blocked", PauseCause::Other),
        BlockReason::Stopping => ("stopping", PauseCause::Other),
    }
}
