//! Returns of claimed jobs to the backlog.
//!
//! If a limit of its account refuses a job, the job returns with a block of its flow. If a limit of the provider refuses
//! it, or its lane cannot send, the job returns without a block.

use std::time::Duration;

use tokio::time::Instant;

use super::prepare::ProviderCall;
use super::{EGRESS_DELAY, JobRun, LANE_PAUSED_DELAY, LaneContext, WaitCause};
use crate::domain::account_faults::SetupSign;
use crate::domain::disposition::Transition;
use crate::domain::job::{FlowKey, Job};
use crate::domain::outcome::FinalState;
use crate::domain::permit_protocol::CallKind;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::ledger::backlog::{BacklogReturn, BlockedReason, FlowBlock};
use crate::ledger::{Claimed, FencedWrite};
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};
use crate::telemetry::spans;
use crate::worker::backlog::AheadGuard;
use crate::worker::intake::DeliveryAction;
use crate::worker::retry::retry_while_unavailable;

/// Bounds of a blocked account's block. It ends early when the account's rule changes. It ends late at the age at which
/// the first job ends.
const ACCOUNT_BLOCK_MIN: Duration = Duration::from_secs(60);
const ACCOUNT_BLOCK_MAX: Duration = Duration::from_secs(60 * 60);

const BEHIND_OTHERS: &str = "an earlier payment of its account may wait";

const CHANGED_ROW: &str = "its message cannot be made from the ledger: content and hash differ";

/// A flow wakes this long before its limit has a slot, so that its first job is at the gate by then. Shorter than an
/// active job waits for a limit of its account.
pub(crate) const WAKE_AHEAD: Duration = Duration::from_millis(150);
/// Longest time for which nothing is claimed after a job whose lane could not send. Its pause may end earlier than
/// expected.
const HOLD_MAX: Duration = Duration::from_millis(500);
/// Shortest block: a job that was refused is not claimed again at once.
pub(crate) const LIMIT_BLOCK_MIN: Duration = Duration::from_millis(20);

/// Block of a flow from a refusal on.
pub(super) struct BlockUntil {
    at: Instant,
    reason: BlockedReason,
    limit: Option<String>,
}

/// Why a job returns to the backlog.
pub(super) struct BacklogReturnReason {
    /// Names it in metrics; stable.
    pub label: &'static str,
    /// `None`: it waits for its turn alone.
    pub reason: Option<Wait>,
    /// Blocks its flow in the same commit.
    pub block: Option<BlockUntil>,
}

impl From<WaitCause> for BacklogReturnReason {
    fn from(WaitCause { label, reason }: WaitCause) -> Self {
        Self { label, reason: Some(reason), block: None }
    }
}

impl JobRun<'_> {
    /// Why the job waits in the backlog before its request. `None`: the job may be sent.
    pub(super) fn must_return_to_backlog(&self, call: &ProviderCall) -> Option<BacklogReturnReason> {
        if !self.is_for_backlog() {
            return None;
        }
        if call.kind() != CallKind::Charge {
            return None;
        }
        let pause = self.lane.control.admit_charge(&self.job)?;
        let (blocked, wait) = match pause.sign {
            SetupSign::Rejected => (BlockedReason::RejectedStreak, WaitReason::RejectedStreak),
            SetupSign::Misconfigured | SetupSign::Passed => (BlockedReason::Misconfigured, WaitReason::Misconfigured),
        };
        let block = BlockUntil { at: pause.until, reason: blocked, limit: None };
        Some(BacklogReturnReason { label: "account_refused", reason: Some(wait.into()), block: Some(block) })
    }

    /// The block of the job's flow, if the refusal concerns its account alone.
    pub(super) fn flow_block(&self, refusal: &GateRefusal) -> Option<BlockUntil> {
        if refusal.scope != RefusalScope::Account || !self.is_for_backlog() {
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
                let left = self.lane.settings.borrow().provider.max_age.saturating_sub(self.age());
                let at = now + left.clamp(ACCOUNT_BLOCK_MIN, ACCOUNT_BLOCK_MAX);
                Some(BlockUntil { at, reason: BlockedReason::AccountBlocked, limit: None })
            }
            _ => None,
        }
    }

    /// Ends the run of a job whose lane cannot send now.
    pub(super) async fn wait_for_lane(&self, wait: Duration, cause: WaitCause) -> DeliveryAction {
        if !self.is_for_backlog() {
            return self.delay(wait, cause).await;
        }
        self.lane.backlog.hold(wait.min(HOLD_MAX));
        self.return_to_backlog(cause.into()).await
    }

    /// Ends the run of a charge whose lane is held.
    pub(super) async fn wait_for_release(&self, held: Wait) -> DeliveryAction {
        let cause = WaitCause::new("lane_held", held);
        match self.is_for_backlog() {
            true => self.return_to_backlog(cause.into()).await,
            false => self.delay(LANE_PAUSED_DELAY, cause).await,
        }
    }

    /// Ends the run of a job that got no worker slot in time. In the backlog it keeps its place, and is claimed again as
    /// soon as a slot is free. A job of unknown outcome sleeps.
    pub(super) async fn wait_for_slot(&self) -> DeliveryAction {
        let cause = WaitCause::new("egress", WaitReason::Egress);
        if !self.is_for_backlog() {
            return self.delay(EGRESS_DELAY, cause).await;
        }
        self.lane.backlog.await_slot(EGRESS_DELAY);
        self.return_to_backlog(cause.into()).await
    }

    /// Returns the job to the backlog, and blocks its flow in the same commit.
    pub(super) async fn return_to_backlog(&self, how: BacklogReturnReason) -> DeliveryAction {
        let BacklogReturnReason { label, reason, block } = how;
        let ledger = &self.lane.worker.backends.ledger;
        let came_from_backlog = self.ahead.is_some();
        let returned = retry_while_unavailable("return a job to the backlog", &self.lane.worker.abandon, || {
            // The write may be repeated after an outage, and the block ends at the same instant.
            let block = block.as_ref().map(|block| FlowBlock {
                wait: block.at.saturating_duration_since(Instant::now()),
                reason: block.reason,
                limit: block.limit.clone(),
            });
            let reason = reason.as_ref();
            async move {
                let how = BacklogReturn { reason, came_from_backlog, block };
                ledger.return_to_backlog(&self.active.lease, &how).await
            }
        });
        match returned.await {
            Ok(FencedWrite::Applied) => {
                faults::crash(CrashPoint::AfterBacklogReturn);
                self.lane.backlog.record_return(FlowKey::of(&self.job), block.map(|block| block.at));
                spans::record_result(label);
                let why = reason.map_or_else(|| BEHIND_OTHERS.to_owned(), |reason| reason.to_string());
                self.lane.meter.record_delay(label, why);
                DeliveryAction::Ack
            }
            Ok(FencedWrite::Stale) => DeliveryAction::Requeue,
            Err(error) => {
                tracing::warn!(job = %self.job.id, %error, "failed to return a job to the backlog; requeueing");
                DeliveryAction::RequeueAndPause
            }
        }
    }
}

/// Moves a job to review whose row no longer says what was recorded.
pub(in crate::worker) async fn review_changed_row(
    lane: &LaneContext,
    job: Job,
    claimed: Claimed,
    ahead: AheadGuard,
) -> DeliveryAction {
    tracing::error!(provider = %lane.name, job = %job.id, CHANGED_ROW);
    let run = JobRun::new(lane, job, claimed, ahead);
    let next = Transition::Finalize { state: FinalState::Review, reason: CHANGED_ROW.to_owned(), reference: None };
    run.transition(next, "review").await
}
