//! The pipeline of one job: claim, prepare, acquire, begin, send, release, commit, in this order.
//!
//! [`JobRun::run`] shows the sequence, which is the same for a charge and a look-up. [`fast_path`] records a new payment
//! together with its request instead of claiming it first. The delivery is finished in [`super::intake`].
//!
//! A claimed job that is due runs at once. Another one is delayed by a copy of its message, or stays in the ledger alone
//! if it waits for long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use self::acquire::PermitWait;
use self::prepare::{Prepared, ProviderCall};
use super::active_jobs::{ActiveJob, LEASE};
use super::backlog::AheadGuard;
use super::intake::DeliveryAction;
use super::lane::{LaneContext, LaneSettings};
use super::meter::ReturnReason;
use super::retry::{RetryEnded, retry_while_unavailable};
use crate::domain::job::Job;
use crate::domain::permit_protocol::CallKind;
use crate::domain::wait_reason::{Wait, WaitReason, sentence};
use crate::faults::{self, CrashPoint};
use crate::ledger::copies::{Claimant, DeliveredCopy, ReturnPlan};
use crate::ledger::{BatchOptions, Claim, Claimed, FencedWrite, LedgerError};
use crate::limiter::gate::{BlockReason, Permit};
use crate::queue::DELAY_STEPS;
use crate::queue::message::Decoded;

pub(super) use self::acquire::refusal_codes;
pub(super) use self::backlog::review_changed_row;
pub use self::fast_path::{Duplicates, FirstTry, Reservation, batch_delay, discard, record_and_send};

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

/// A job that waits longer than this is kept in the ledger alone, and the sweeper publishes it when it is due. Its
/// message would pass through the longest delay queue again and again for all that time.
const LEDGER_ONLY_FROM: Duration = Duration::from_secs(24 * 60 * 60);

/// How a claimed job came to this worker.
pub struct Arrival<'a> {
    pub at: Instant,
    /// Worker slot and permit that it keeps.
    pub reservation: Option<Reservation<'a>>,
    /// Set for a job of the backlog: it has no message.
    pub ahead: Option<AheadGuard>,
}

impl Arrival<'_> {
    pub fn now() -> Self {
        Self { at: Instant::now(), reservation: None, ahead: None }
    }
}

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
    /// Set for a job that was claimed from the backlog: it has no message.
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

/// Claims the job of a message; `None`: the ledger refused that, or the worker stops.
pub(super) async fn claim(
    lane: &LaneContext,
    decoded: &Decoded,
    delivered_copy: DeliveredCopy,
    max_batch_delay: Duration,
) -> Option<Claim> {
    let worker = &lane.worker;
    let ledger = &worker.backends.ledger;
    // Its lease may have ended while the ledger accepted nothing. A claim would make its answer stale.
    if worker.unwritten.contains(&decoded.job.id) {
        return Some(Claim::LeasedElsewhere { lease_left: LEASE });
    }
    let claimed = retry_while_unavailable("claim a job", &lane.stop, || {
        let timing = BatchOptions { lease: LEASE, max_batch_delay };
        let claimant = Claimant { owner: &worker.options.owner, delivered: delivered_copy };
        ledger.claim_batched(&decoded.job, decoded.hash, claimant, timing)
    });
    match claimed.await {
        Ok(claim) => Some(claim),
        Err(RetryEnded::Failed(LedgerError::Corrupt(problem))) => Some(Claim::Unreadable(problem)),
        Err(error) => {
            tracing::warn!(job = %decoded.job.id, %error, "failed to claim a job; requeueing its message");
            None
        }
    }
}

/// Runs a claimed job that is due; one that must wait is delayed.
pub(super) async fn run_claimed(
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

impl<'a> JobRun<'a> {
    /// The job as it was claimed at this moment.
    fn new(lane: &'a LaneContext, job: Job, claimed: Claimed, arrival: &mut Arrival<'_>) -> Self {
        Self {
            lane,
            settings: lane.settings.borrow().clone(),
            job,
            active: Arc::new(lane.worker.active_jobs.insert(claimed.lease.clone())),
            claimed,
            delivered_at: arrival.at,
            claimed_at: Instant::now(),
            ahead: arrival.ahead.take(),
        }
    }

    /// Takes the job as far as it can go now, from its reservation if it has one.
    async fn run(&self, reservation: Option<Reservation<'_>>) -> DeliveryAction {
        let action = self.run_steps(reservation).await;
        self.lane.backlog.record_end(&self.lane.settings.borrow().provider, self.job.account.as_ref());
        action
    }

    async fn run_steps(&self, reservation: Option<Reservation<'_>>) -> DeliveryAction {
        let call = match self.prepare().await {
            Prepared::Call(call) => call,
            Prepared::Transition(next) => {
                discard(self.lane, reservation);
                return self.transition(next, "retry").await;
            }
            // Rare, and boxed so that the thousands of waiting jobs do not carry its memory.
            Prepared::Unbuildable(error) => {
                discard(self.lane, reservation);
                return Box::pin(self.on_unbuildable(error)).await;
            }
        };
        if call.kind() == CallKind::Charge
            && let Some(action) = self.yield_test().await
        {
            discard(self.lane, reservation);
            return action;
        }
        if let Some(reason) = self.must_return_to_backlog(&call) {
            discard(self.lane, reservation);
            return self.return_to_backlog(reason).await;
        }
        match self.acquire(&call, reservation).await {
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

    /// Whether the job can wait in the backlog. One of unknown outcome has its own way back.
    fn is_for_backlog(&self) -> bool {
        !self.claimed.maybe_charged
    }

    /// Age of the job until now.
    fn age(&self) -> Duration {
        self.claimed.age + self.claimed_at.elapsed()
    }

    async fn wait_until_due(&self, wait: Duration) -> DeliveryAction {
        let ledger = &self.lane.worker.backends.ledger;
        let waits = retry_while_unavailable("release a waiting job", &self.lane.worker.abandon, || {
            ledger.release_waiting_with_copy(&self.active.lease, wait)
        });
        let plan = match waits.await {
            Ok((FencedWrite::Applied, plan)) => plan,
            Ok((FencedWrite::Stale, _)) => return DeliveryAction::Requeue,
            Err(error) => {
                tracing::warn!(job = %self.job.id, %error, "failed to update job state; requeueing");
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
    fn action_after_delay(&self, wait: Duration, plan: Option<ReturnPlan>) -> DeliveryAction {
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
