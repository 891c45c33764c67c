//! The pipeline of one job: claim, prepare, acquire, begin, send, release, commit, in this order.
//!
//! [`JobRun::run`] shows the sequence, which is the same for a charge and a look-up. [`fast_path`] records a new payment
//! together with its request instead of claiming it from the backlog.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::acquire::PermitWait;
use self::prepare::{Prepared, ProviderCall};
use super::active_jobs::ActiveJob;
use super::backlog::AheadGuard;
use super::intake::DeliveryAction;
use super::lane::{LaneContext, LaneSettings};
use super::meter::ReturnReason;
use crate::domain::job::Job;
use crate::domain::permit_protocol::CallKind;
use crate::domain::wait_reason::Wait;
use crate::ledger::Claimed;
use crate::limiter::gate::{BlockReason, Permit};

pub(super) use self::acquire::refusal_codes;
pub(super) use self::backlog::review_changed_row;
pub use self::fast_path::{Duplicates, FirstTry, NewPayment, record_and_send};

pub(crate) mod acquire;
mod answer;
pub(crate) mod backlog;
mod commit;
mod fast_path;
mod prepare;
mod refusal;
mod send;

/// Delay of jobs whose lane must not send.
pub(crate) const LANE_PAUSED_DELAY: Duration = Duration::from_secs(5);

/// Delay of a job that got no worker slot at the egress rate in time. In the backlog, it ends when a slot is free.
pub const EGRESS_DELAY: Duration = Duration::from_secs(5);

/// Delay of a job whose request was recorded and not sent.
pub(crate) const UNSENT_DELAY: Duration = Duration::from_millis(250);

/// One job whose lease this process has, on its way through the steps.
pub struct JobRun<'a> {
    lane: &'a LaneContext,
    /// The row and its client, as they were when the run began.
    settings: Arc<LaneSettings>,
    job: Job,
    claimed: Claimed,
    active: Arc<ActiveJob>,
    delivered_at: Instant,
    claimed_at: Instant,
    /// Set for a job that was claimed from the backlog.
    ahead: Option<AheadGuard>,
}

/// Why a job waits: the label for metrics, which is stable, and the reason in the ledger.
struct WaitCause {
    label: &'static str,
    reason: Wait,
}

impl WaitCause {
    fn new(label: &'static str, reason: impl Into<Wait>) -> Self {
        Self { label, reason: reason.into() }
    }
}

/// Runs a job that a dispatcher has claimed.
pub(super) async fn run_claimed(lane: &LaneContext, job: Job, claimed: Claimed, ahead: AheadGuard) -> DeliveryAction {
    JobRun::new(lane, job, claimed, ahead).run().await
}

impl<'a> JobRun<'a> {
    /// The job as it was claimed at this moment.
    fn new(lane: &'a LaneContext, job: Job, claimed: Claimed, ahead: AheadGuard) -> Self {
        Self {
            lane,
            settings: lane.settings.borrow().clone(),
            job,
            active: Arc::new(lane.worker.active_jobs.insert(claimed.lease.clone())),
            claimed,
            delivered_at: Instant::now(),
            claimed_at: Instant::now(),
            ahead: Some(ahead),
        }
    }

    /// Takes the job as far as it can go now.
    async fn run(&self) -> DeliveryAction {
        let action = self.run_steps().await;
        self.lane.backlog.record_end(&self.lane.settings.borrow().provider, self.job.account.as_ref());
        action
    }

    async fn run_steps(&self) -> DeliveryAction {
        let call = match self.prepare().await {
            Prepared::Call(call) => call,
            Prepared::Transition(next) => return self.transition(next, "retry").await,
            // Rare, and boxed so that the thousands of waiting jobs do not carry its memory.
            Prepared::Unbuildable(error) => return Box::pin(self.on_unbuildable(error)).await,
        };
        if call.kind() == CallKind::Charge
            && let Some(action) = self.yield_test().await
        {
            return action;
        }
        if call.kind() == CallKind::Charge
            && let Some(held) = self.lane.control.hold()
        {
            return self.wait_for_release(held).await;
        }
        if let Some(reason) = self.must_return_to_backlog(&call) {
            return self.return_to_backlog(reason).await;
        }
        match self.acquire(&call).await {
            PermitWait::Granted(permit) => self.use_permit(&call, permit).await,
            PermitWait::Refused(refusal) => {
                // The rule may have been set while the job waited.
                let is_blocked = matches!(refusal.reason, BlockReason::AccountBlocked { .. });
                match is_blocked.then(|| self.transition_instead(&call)).flatten() {
                    Some(next) => self.transition(next, "retry").await,
                    None => self.delay_refused(&refusal).await,
                }
            }
            PermitWait::NoWorkerSlot => self.wait_for_slot().await,
            PermitWait::LanePaused(reason) => {
                self.wait_for_lane(LANE_PAUSED_DELAY, WaitCause::new("lane_paused", reason)).await
            }
            PermitWait::Stopping => self.release().await,
        }
    }

    /// Sends the call with its permit, unless time or the lane's state have changed while it waited.
    async fn use_permit(&self, call: &ProviderCall, permit: Permit) -> DeliveryAction {
        if let Some(next) = self.transition_instead(call) {
            // The transition may wait for the ledger; the permit must not.
            drop(permit);
            self.lane.meter.record_return(ReturnReason::NotNeeded);
            return self.transition(next, "retry").await;
        }
        // Its account may have been refused while it waited.
        if let Some(reason) = self.must_return_to_backlog(call) {
            drop(permit);
            self.lane.meter.record_return(ReturnReason::NotNeeded);
            return self.return_to_backlog(reason).await;
        }
        let Some(permission) = self.lane.control.try_send(self.settings.provider.workers) else {
            drop(permit);
            self.lane.meter.record_return(ReturnReason::Probing);
            let cause = WaitCause::new("probing", self.lane.control.probing_reason());
            return self.wait_for_lane(LANE_PAUSED_DELAY, cause).await;
        };
        // Boxed because thousands wait for their permits and few send: only those need its memory.
        Box::pin(self.begin_and_send(call, permit, &permission)).await
    }

    /// Whether the job waits in the backlog for its lane. One of unknown outcome sleeps instead, and goes first then.
    fn is_for_backlog(&self) -> bool {
        !self.claimed.maybe_charged
    }

    /// Age of the job until now.
    fn age(&self) -> Duration {
        self.claimed.age + self.claimed_at.elapsed()
    }
}
