//! The claim of a job, and what becomes of a claimed job that is not due yet.
//!
//! A due job runs at once. Another one is delayed by a copy of its message, or stays in the ledger alone if it waits for
//! long.

use std::time::Duration;

use tokio::time::sleep;

use super::fast_path::discard;
use super::{Arrival, JobRun};
use crate::domain::wait_reason::{WaitReason, sentence};
use crate::faults::{self, CrashPoint};
use crate::ledger::copies::{Claimant, DeliveredCopy, ReturnPlan};
use crate::ledger::{BatchOptions, Claim, Claimed, FencedWrite, LedgerError};
use crate::queue::DELAY_STEPS;
use crate::queue::message::Decoded;
use crate::worker::active_jobs::LEASE;
use crate::worker::intake::DeliveryAction;
use crate::worker::lane::LaneContext;
use crate::worker::retry::{RetryEnded, retry_while_unavailable};

/// A job that waits longer than this is kept in the ledger alone, and the sweeper publishes it when it is due. Its
/// message would pass through the longest delay queue again and again for all that time.
const LEDGER_ONLY_FROM: Duration = Duration::from_secs(24 * 60 * 60);

/// Claims the job of a message; `None`: the ledger refused that, or the worker stops.
pub(in crate::worker) async fn claim(
    lane: &LaneContext,
    decoded: &Decoded,
    delivered_copy: DeliveredCopy,
    max_batch_delay: Duration,
) -> Option<Claim> {
    let worker = &lane.worker;
    let ledger = &worker.backends.ledger;
    let claimed = retry_while_unavailable("claim a job", &lane.stop, || {
        let timing = BatchOptions { lease: LEASE, max_batch_delay };
        let claimant = Claimant { owner: &worker.options.owner, delivered: delivered_copy };
        ledger.claim_batched(&decoded.job, decoded.hash, claimant, timing)
    });
    match claimed.await {
        Ok(claim) => Some(claim),
        Err(RetryEnded::Failed(LedgerError::Corrupt(problem))) => Some(Claim::Unreadable(problem)),
        Err(error) => {
            tracing::warn!(job = %decoded.job.id, ?error, "failed to claim a job; requeueing its message");
            None
        }
    }
}

/// Runs a claimed job that is due; one that must wait is delayed.
pub(in crate::worker) async fn run_claimed(
    lane: &LaneContext,
    decoded: Box<Decoded>,
    claimed: Box<Claimed>,
    mut arrival: Arrival<'_>,
) -> DeliveryAction {
    faults::crash(CrashPoint::AfterClaim);
    // A job with an expiry is looked at when it expires, however long it was to wait.
    let expires_in = claimed.expires_in.filter(|_| !claimed.maybe_charged);
    let wait = expires_in.map_or(claimed.wait, |left| claimed.wait.min(left));
    let run = JobRun::new(lane, decoded.job, *claimed, &mut arrival);
    let reservation = arrival.reservation;
    // A copy returns shortly before its job is due. Its permit is valid for longer, and may be lost if it is released.
    let sends_soon = wait < DELAY_STEPS[0].min(run.settings.provider.send_budget / 2);
    let (reservation, unused) = if sends_soon { (reservation, None) } else { (None, reservation) };
    discard(lane, unused);
    if wait < DELAY_STEPS[0] {
        sleep(wait).await;
        return run.run(reservation).await;
    }
    run.wait_until_due(wait).await
}

impl JobRun<'_> {
    async fn wait_until_due(&self, wait: Duration) -> DeliveryAction {
        let ledger = &self.lane.worker.backends.ledger;
        let waits = retry_while_unavailable("release a waiting job", &self.lane.worker.abandon, || {
            ledger.release_waiting_with_copy(&self.active.lease, wait)
        });
        let plan = match waits.await {
            Ok((FencedWrite::Applied, plan)) => plan,
            Ok((FencedWrite::Stale, _)) => return DeliveryAction::Requeue,
            Err(error) => {
                tracing::warn!(job = %self.job.id, ?error, "failed to update job state; requeueing");
                return DeliveryAction::RequeueAndPause;
            }
        };
        let action = self.action_after_delay(wait, plan);
        if wait > LEDGER_ONLY_FROM && action != DeliveryAction::Ack && self.keep_in_ledger_only().await {
            return DeliveryAction::Ack;
        }
        self.lane.meter.record_delay("not_yet", &sentence(&WaitReason::NotBefore, None));
        action
    }

    /// How a waiting job returns: by a new copy, unless a delay queue has one that is in time or the sweeper publishes
    /// it.
    pub(super) fn action_after_delay(&self, wait: Duration, plan: Option<ReturnPlan>) -> DeliveryAction {
        match plan.and_then(|plan| plan.copy_to_publish(self.claimed.copy)) {
            Some(number) => DeliveryAction::Delay { wait, number: Some(number) },
            None => DeliveryAction::Ack,
        }
    }

    /// Whether the ledger has recorded that no queue has this job. If not, it is delayed like any other.
    async fn keep_in_ledger_only(&self) -> bool {
        match self.lane.worker.backends.ledger.keep_unqueued(&self.active.lease).await {
            Ok(written) => written == FencedWrite::Applied,
            Err(error) => {
                tracing::debug!(job = %self.job.id, %error, "failed to keep a job in the ledger alone; delaying it");
                false
            }
        }
    }
}
