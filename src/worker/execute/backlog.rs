//! Returns jobs to the backlog instead of delaying their messages.
//!
//! A job that a limit of its account refuses returns with a block of its flow. In blocking mode, one that a limit of the
//! provider refuses returns, too. One that came from the backlog also returns when its lane cannot send: it has no
//! message that could be delayed.

use std::time::Duration;

use tokio::time::Instant;

use super::record::{delay, transition};
use super::{Arrival, ClaimedJob, LANE_PAUSED_DELAY, LaneContext};
use crate::domain::account_faults::SetupSign;
use crate::domain::disposition::Transition;
use crate::domain::job::Job;
use crate::domain::outcome::FinalState;
use crate::domain::provider::Mode;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::ledger::backlog::{BacklogReturn, BlockedReason, FlowBlock, FlowKey};
use crate::ledger::{Claimed, FencedWrite};
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};
use crate::telemetry::spans;
use crate::worker::intake::DeliveryAction;
use crate::worker::retry::retry_while_unavailable;

/// Bounds of a blocked account's block. It ends early when the account's rule changes. It ends late at the age at which
/// the first job ends.
const ACCOUNT_BLOCK_MIN: Duration = Duration::from_secs(60);
const ACCOUNT_BLOCK_MAX: Duration = Duration::from_secs(60 * 60);

const CHANGED_ROW: &str = "its message cannot be made from the ledger: content and hash differ";

/// A flow wakes this long before its limit has a slot, so that its first job is at the gate by then. Shorter than an
/// active job waits for a limit of its account.
pub(crate) const WAKE_AHEAD: Duration = Duration::from_millis(150);
/// Shortest block: a job that was refused is not claimed again at once.
pub(crate) const LIMIT_BLOCK_MIN: Duration = Duration::from_millis(20);

/// Block of a flow from a refusal on.
pub(super) struct BlockUntil {
    at: Instant,
    reason: BlockedReason,
    limit: Option<String>,
}

/// The block of the job's flow while the provider refuses its account, and what the job waits for.
pub(super) fn refused_account_block(lane: &LaneContext, job: &ClaimedJob) -> Option<(BlockUntil, WaitReason)> {
    let pause = lane.control.account_pause(job.job.account.as_ref()).filter(|_| job.is_for_backlog())?;
    let (reason, wait) = match pause.sign {
        SetupSign::Rejected => (BlockedReason::RejectedStreak, WaitReason::RejectedStreak),
        SetupSign::Misconfigured | SetupSign::Passed => (BlockedReason::Misconfigured, WaitReason::Misconfigured),
    };
    Some((BlockUntil { at: pause.until, reason, limit: None }, wait))
}

/// The block of the job's flow, if the refusal concerns its account alone.
pub(super) fn flow_block(lane: &LaneContext, job: &ClaimedJob, refusal: &GateRefusal) -> Option<BlockUntil> {
    if refusal.scope != RefusalScope::Account || !job.is_for_backlog() {
        return None;
    }
    let now = Instant::now();
    match &refusal.reason {
        BlockReason::Limit(name) => {
            let limit = Some(name.clone());
            let wait = refusal.retry_after.saturating_sub(WAKE_AHEAD).max(LIMIT_BLOCK_MIN);
            Some(BlockUntil { at: now + wait, reason: BlockedReason::Limit, limit })
        }
        BlockReason::AccountBlocked { .. } => {
            let age = job.claimed.age + job.claimed_at.elapsed();
            let left = lane.settings.borrow().provider.max_age.saturating_sub(age);
            let at = now + left.clamp(ACCOUNT_BLOCK_MIN, ACCOUNT_BLOCK_MAX);
            Some(BlockUntil { at, reason: BlockedReason::AccountBlocked, limit: None })
        }
        _ => None,
    }
}

/// Whether a job that its lane's limit refuses waits in the backlog, and not in a delay queue.
pub(super) fn waits_in_backlog(lane: &LaneContext, job: &ClaimedJob) -> bool {
    job.is_for_backlog() && lane.settings.borrow().provider.mode == Mode::Blocking
}

/// Ends the wait of a job whose lane cannot send now; `label` names it in metrics.
pub(super) async fn wait_for_lane(
    lane: &LaneContext,
    job: &ClaimedJob,
    wait: Duration,
    (label, reason): (&'static str, Wait),
) -> DeliveryAction {
    if job.place.is_none() || !job.is_for_backlog() {
        return delay(lane, job, wait, (label, reason)).await;
    }
    lane.backlog.hold(wait.min(LANE_PAUSED_DELAY));
    return_to_backlog(lane, job, (label, reason), None).await
}

/// Returns the job to the backlog, and blocks its flow in the same commit.
pub(super) async fn return_to_backlog(
    lane: &LaneContext,
    job: &ClaimedJob,
    (label, reason): (&'static str, Wait),
    block: Option<BlockUntil>,
) -> DeliveryAction {
    let backlog = &lane.worker.backends.backlog;
    let came_from_backlog = job.place.is_some();
    let returned = retry_while_unavailable("return a job to the backlog", &lane.worker.abandon, || {
        // The write may be repeated after an outage, and the block ends at the same instant.
        let block = block.as_ref().map(|block| FlowBlock {
            wait: block.at.saturating_duration_since(Instant::now()),
            reason: block.reason,
            limit: block.limit.clone(),
        });
        let reason = &reason;
        async move {
            let how = BacklogReturn { reason, came_from_backlog, block };
            backlog.return_to_backlog(&job.active.lease, &how).await
        }
    });
    match returned.await {
        Ok(FencedWrite::Applied) => {
            faults::crash(CrashPoint::AfterBacklogReturn);
            lane.backlog.record_return(FlowKey::of(&job.job), block.map(|block| block.at));
            spans::record_result(label);
            lane.meter.record_delay(label, &reason.to_string());
            DeliveryAction::Ack
        }
        Ok(FencedWrite::Stale) => DeliveryAction::Requeue,
        Err(error) => {
            tracing::warn!(job = %job.job.id, ?error, "failed to return a job to the backlog; requeueing");
            DeliveryAction::RequeueAndPause
        }
    }
}

/// Moves a job to review whose row no longer says what was recorded.
pub(in crate::worker) async fn review_changed_row(
    lane: &LaneContext,
    job: Job,
    claimed: Claimed,
    mut arrival: Arrival<'_>,
) -> DeliveryAction {
    tracing::error!(provider = %lane.name, job = %job.id, CHANGED_ROW);
    let job = ClaimedJob::new(lane, job, claimed, &mut arrival);
    let next = Transition::Finalize { state: FinalState::Review, reason: CHANGED_ROW.to_owned(), reference: None };
    transition(lane, &job, next, "review").await
}
