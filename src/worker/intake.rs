//! From a delivery to an acknowledgement: decode, record and claim, then execute, then finish the delivery once.
//!
//! Refuses to lose a message: whatever happens, even a panic, ends in exactly one of acknowledged, parked and
//! acknowledged, or handed back.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};
use tracing::Instrument as _;

use super::active_jobs::LEASE;
use super::decode::{RowRules, decode_delivery};
use super::delay::{MessageCopy, publish_delayed, unless_abandoned};
use super::execute::{self, ClaimedJob, Reservation, batch_delay, discard};
use super::lane::LaneContext;
use super::newer_version::{self, NewerVersionAction};
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology::publish;
use crate::domain::explain::reason::NOT_DUE;
use crate::domain::job::{InvalidMessage, InvalidReason, JobId};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::copies::RejectedMessage;
use crate::ledger::copies::{Claimant, DeliveredCopy, ReturnPlan};
use crate::ledger::{BatchOptions, Claim, Claimed, FencedWrite, LedgerError};
use crate::queue::message::{DecodeError, Decoded};
use crate::queue::{DELAY_STEPS, Delivery, Destination, OutgoingMessage, QueueError, Receipt, headers};
use crate::telemetry::spans;

const INVALID_MESSAGE: &str = "message is no job";
/// A job that waits longer than this is in the ledger alone, and the sweeper publishes it when it is due: a message would
/// go round the longest delay queue for all that time.
const LEDGER_ONLY_FROM: Duration = Duration::from_secs(24 * 60 * 60);
/// After so long the message of a job whose row cannot be read is looked at once more.
const UNREADABLE_ROW_RETRY_DELAY: Duration = Duration::from_secs(30 * 60);
/// Pause before a message goes back after a fault that is its own, so that it does not come round at once.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// How long a lane takes nothing after an engine's refusal: 1,000 deliveries allowed are then most of a working day.
pub(super) const BACKEND_REFUSAL_PAUSE: Duration = Duration::from_secs(30);

/// How a delivery ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryAction {
    /// Everything is written down.
    Ack,
    /// A copy comes back after the wait; then acknowledge. With a number where it is the newest of its job; without one it
    /// takes the message's place.
    Delay { wait: Duration, number: Option<i64> },
    /// To the queue again, for whoever is next.
    Requeue,
    /// The same, after a pause: something is wrong with this job.
    RequeueFault,
    /// The same, and the lane rests: something is wrong with an engine.
    RequeueAndPause,
}

impl DeliveryAction {
    pub(super) fn code(self) -> &'static str {
        match self {
            Self::Ack => "acknowledged",
            Self::Delay { .. } => "parked",
            Self::Requeue => "handed back",
            Self::RequeueFault => "fault",
            Self::RequeueAndPause => "engine refused",
        }
    }
}

/// Works one delivery off.
pub async fn handle_delivery(lane: Arc<LaneContext>, delivery: Delivery) {
    let delivered_at = Instant::now();
    let Delivery { body, properties, receipt, redelivered } = delivery;
    let copy = MessageCopy { provider: lane.name.clone(), body, properties };
    tracing::trace!(provider = %lane.name, redelivered, "delivery");
    let _in_hand = lane.meter.delivery_started(redelivered);
    let receipt = faults::acknowledged_early(receipt).await;
    faults::crash(CrashPoint::AfterDelivery);
    let span = spans::job(lane.name.as_str(), &copy.properties.headers);
    let steps =
        AssertUnwindSafe(process(&lane, &copy, (delivered_at, redelivered)).instrument(span.clone())).catch_unwind();
    let end = steps.await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, "a job panicked; it goes back to the queue");
        DeliveryAction::RequeueFault
    });
    let finishing = span.in_scope(|| spans::step("finish the delivery"));
    let finished = complete(&lane, &copy, receipt, end).instrument(finishing).await;
    spans::record_end(&span, end.code());
    faults::crash(CrashPoint::AfterAck);
    if let Err(error) = finished {
        tracing::debug!(%error, "delivery not finished; the broker will deliver it again and the ledger knows it");
    }
}

async fn complete(
    lane: &LaneContext,
    copy: &MessageCopy,
    receipt: Box<dyn Receipt>,
    end: DeliveryAction,
) -> Result<(), QueueError> {
    match end {
        DeliveryAction::Ack => receipt.ack().await,
        DeliveryAction::Delay { wait, number } => {
            match publish_delayed(&lane.worker, &copy.with_number(number), wait).await {
                Ok(()) => {
                    faults::crash(CrashPoint::AfterDelayCopy);
                    receipt.ack().await
                }
                Err(error) => {
                    tracing::warn!(provider = %lane.name, ?error, "not parked; the message goes back");
                    lane.meter.record_requeue("engine_refused");
                    pause_after_refusal(lane).await;
                    receipt.requeue().await
                }
            }
        }
        DeliveryAction::Requeue => {
            lane.meter.record_requeue(if lane.stop.is_cancelled() { "stopping" } else { "taken_over" });
            receipt.requeue().await
        }
        DeliveryAction::RequeueFault => {
            lane.meter.record_requeue("fault");
            pause_after_fault(lane).await;
            receipt.requeue().await
        }
        DeliveryAction::RequeueAndPause => {
            lane.meter.record_requeue("engine_refused");
            pause_after_refusal(lane).await;
            receipt.requeue().await
        }
    }
}

/// What is wrong is not the message's fault: it goes back, and the lane takes nothing for a while, because every delivery
/// counts against the broker's delivery limit.
async fn pause_after_refusal(lane: &LaneContext) {
    pause_intake(lane);
    pause_after_fault(lane).await;
}

/// What is in hand goes on.
pub(super) fn pause_intake(lane: &LaneContext) {
    lane.control.pause_intake(BACKEND_REFUSAL_PAUSE, PauseCause::Engine, "an engine refuses what we ask of it");
}

async fn pause_after_fault(lane: &LaneContext) {
    tokio::select! {
        () = sleep(FAULT_PAUSE) => {}
        () = lane.stop.cancelled() => {}
    }
}

async fn process(
    lane: &LaneContext,
    copy: &MessageCopy,
    (delivered_at, redelivered): (Instant, bool),
) -> DeliveryAction {
    let arrived = DeliveredCopy::delivered(headers::copy_number(&copy.properties), redelivered);
    let decoded = match decode_with_row_rules(lane, copy).await {
        // Moved more than once while it waits, and each of its places would be kept.
        Ok(Ok(decoded)) => Box::new(decoded),
        Ok(Err(DecodeError::NewerVersion(version))) => return Box::pin(delay_newer_version(lane, copy, version)).await,
        Ok(Err(DecodeError::Invalid { invalid, claimed_id: id })) => return reject(lane, copy, &invalid, id).await,
        Err(error) => {
            tracing::warn!(provider = %lane.name, ?error, "not known whether a message's job is recorded; it goes back");
            return if lane.worker.stop.is_cancelled() {
                DeliveryAction::Requeue
            } else {
                DeliveryAction::RequeueAndPause
            };
        }
    };
    spans::record_job(&decoded.job.id);
    // A copy of ours is one of a job that is recorded.
    let sent = match redelivered || arrived.copy > 0 {
        true => Err((decoded, None)),
        // Thousands wait in hand, and few of them by this way: those alone pay for the room that it takes.
        false => Box::pin(execute::record_and_send(lane, decoded, delivered_at)).await,
    };
    let (decoded, place) = match sent {
        Ok(end) => return end,
        Err(to_claim) => to_claim,
    };
    let may_wait = batch_delay(place.as_ref(), lane.gate.is_open());
    let not_claimed = match claim(lane, &decoded, arrived, may_wait).instrument(spans::step("claim")).await {
        Some(Claim::Claimed(claimed)) => return run_claimed(lane, decoded, claimed, (delivered_at, place)).await,
        Some(Claim::Finished) => {
            lane.duplicates.record();
            DeliveryAction::Ack
        }
        Some(Claim::Superseded) => {
            tracing::debug!(provider = %lane.name, job = %decoded.job.id, copy = arrived.copy, "an older copy; acknowledged");
            DeliveryAction::Ack
        }
        // Its holder, or whoever takes over, will settle it; then this copy finds it settled.
        Some(Claim::Leased { lease_left }) => {
            lane.meter.record_delay("in_hand_elsewhere", "another delivery of the job is in hand");
            DeliveryAction::Delay { wait: lease_left.clamp(DELAY_STEPS[0], LEASE / 2), number: None }
        }
        // Keeping the message may wait for an engine, and the place must not wait with it.
        Some(Claim::Conflict(invalid)) => {
            discard(lane, place);
            return reject(lane, copy, &invalid, Some(decoded.job.id.clone())).await;
        }
        Some(Claim::Unreadable(problem)) => {
            tracing::error!(
                provider = %lane.name, job = %decoded.job.id, problem,
                "a job's row cannot be read: repair it by SQL. Its message is delayed"
            );
            lane.meter.record_delay("unreadable", "its row cannot be read");
            DeliveryAction::Delay { wait: UNREADABLE_ROW_RETRY_DELAY, number: None }
        }
        None if lane.worker.stop.is_cancelled() => DeliveryAction::Requeue,
        None => DeliveryAction::RequeueAndPause,
    };
    discard(lane, place);
    not_claimed
}

/// The message, by the rules of the lane's row as it is now.
async fn decode_with_row_rules(
    lane: &LaneContext,
    copy: &MessageCopy,
) -> Result<Result<Decoded, DecodeError>, RetryEnded<LedgerError>> {
    let settings = Arc::clone(&lane.settings.borrow());
    let rules = RowRules { require: &settings.provider.require, client: &*settings.client };
    retry_while_unavailable("read a message", &lane.stop, || {
        decode_delivery(&lane.worker, &copy.body, &lane.name, Some(&rules))
    })
    .await
}

pub(super) async fn claim(
    lane: &LaneContext,
    decoded: &Decoded,
    arrived: DeliveredCopy,
    may_wait: Duration,
) -> Option<Claim> {
    let worker = &lane.worker;
    let ledger = &worker.backends.ledger;
    let claimed = retry_while_unavailable("claim a job", &lane.stop, || {
        let timing = BatchOptions { lease: LEASE, max_batch_delay: may_wait };
        let claimant = Claimant { owner: &worker.options.owner, delivered: arrived };
        ledger.claim_batched(&decoded.job, decoded.hash, claimant, timing)
    });
    match claimed.await {
        Ok(claim) => Some(claim),
        Err(RetryEnded::Failed(LedgerError::Corrupt(problem))) => Some(Claim::Unreadable(problem)),
        Err(error) => {
            tracing::warn!(job = %decoded.job.id, ?error, "not claimed");
            None
        }
    }
}

/// A claimed job whose time has come is executed; one that must wait is put down for that long.
pub(super) async fn run_claimed(
    lane: &LaneContext,
    decoded: Box<Decoded>,
    claimed: Box<Claimed>,
    (delivered_at, place): (Instant, Option<Reservation<'_>>),
) -> DeliveryAction {
    faults::crash(CrashPoint::AfterClaim);
    // One that may expire is looked at when it does, however long it was to wait.
    let expires_in = claimed.expires_in.filter(|_| !claimed.maybe_charged);
    let wait = expires_in.map_or(claimed.wait, |left| claimed.wait.min(left));
    let job = ClaimedJob {
        job: decoded.job,
        active: lane.worker.active_jobs.insert(claimed.lease.clone()),
        claimed: *claimed,
        delivered_at,
        claimed_at: Instant::now(),
    };
    // A copy comes back a little before its time. Its permit is good for longer than that, and may be lost if given back.
    let sends_soon = wait < DELAY_STEPS[0].min(lane.settings.borrow().provider.send_budget / 2);
    let (place, unused) = if sends_soon { (place, None) } else { (None, place) };
    discard(lane, unused);
    if wait < DELAY_STEPS[0] {
        sleep(wait).await;
        return execute::execute(lane, &job, place).await;
    }
    let ledger = &lane.worker.backends.ledger;
    let waits = retry_while_unavailable("let a job wait on", &lane.worker.abandon, || {
        ledger.release_waiting_with_copy(&job.active.lease, wait)
    });
    let waits = waits.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok();
    let back = match waits {
        Some((FencedWrite::Applied, back)) => back,
        Some((FencedWrite::Stale, _)) => return DeliveryAction::Requeue,
        None => return DeliveryAction::RequeueAndPause,
    };
    let end = action_after_delay(&job, wait, back);
    if wait > LEDGER_ONLY_FROM && end != DeliveryAction::Ack && keep_in_ledger_only(lane, &job).await {
        return DeliveryAction::Ack;
    }
    lane.meter.record_delay("not_yet", NOT_DUE);
    end
}

/// A job that waits comes back by a new copy, unless a delay queue has one that is in time, or the sweeper brings it.
pub(super) fn action_after_delay(job: &ClaimedJob, wait: Duration, back: Option<ReturnPlan>) -> DeliveryAction {
    match back.and_then(|back| back.copy_to_publish(job.claimed.copy)) {
        Some(number) => DeliveryAction::Delay { wait, number: Some(number) },
        None => DeliveryAction::Ack,
    }
}

/// Whether the ledger has noted that no queue has this job. If not, it is parked like any other.
async fn keep_in_ledger_only(lane: &LaneContext, job: &ClaimedJob) -> bool {
    match lane.worker.backends.upkeep.keep_unqueued(&job.active.lease).await {
        Ok(written) => written == FencedWrite::Applied,
        Err(error) => {
            tracing::debug!(job = %job.job.id, %error, "not noted as unqueued; it is parked");
            false
        }
    }
}

/// A message of a newer format: parked for a newer worker, until it is too old.
async fn delay_newer_version(lane: &LaneContext, copy: &MessageCopy, version: u64) -> DeliveryAction {
    let max_age = lane.settings.borrow().provider.max_age;
    let properties = match newer_version::decide(&copy.properties, version, Some(max_age)) {
        NewerVersionAction::Delay(properties) => properties,
        NewerVersionAction::TooOld(invalid) => return reject(lane, copy, &invalid, None).await,
    };
    let reason = InvalidReason::NewerVersion.code();
    if lane.worker.log_throttle.admits(lane.name.as_str(), newer_version::DELAYED_TEXT, reason) {
        tracing::error!(provider = %lane.name, version, "{}", newer_version::DELAYED_TEXT);
    }
    lane.meter.record_delay(reason, newer_version::DELAYED_TEXT);
    match publish_delayed(&lane.worker, &MessageCopy { properties, ..copy.clone() }, newer_version::RETRY_DELAY).await {
        Ok(()) => DeliveryAction::Ack,
        Err(error) => {
            tracing::warn!(provider = %lane.name, ?error, "not parked; the message goes back");
            DeliveryAction::RequeueAndPause
        }
    }
}

/// What can never be a job: kept in the ledger and in `invalid`, then acknowledged.
async fn reject(
    lane: &LaneContext,
    copy: &MessageCopy,
    invalid: &InvalidMessage,
    job_id: Option<JobId>,
) -> DeliveryAction {
    let worker = &lane.worker;
    let (outgoing, message) = rejection(copy, invalid, job_id);
    let reason = invalid.reason.code();
    if worker.log_throttle.admits(lane.name.as_str(), INVALID_MESSAGE, reason) {
        tracing::warn!(provider = %lane.name, reason, detail = invalid.detail, "{INVALID_MESSAGE}");
    }
    let kept =
        retry_while_unavailable("keep an invalid message", &lane.stop, || publish(worker, &copy.provider, &outgoing));
    if let Err(error) = unless_abandoned(worker, kept).await {
        tracing::warn!(?error, "invalid message not kept; it goes back");
        return DeliveryAction::RequeueAndPause;
    }
    let noted =
        retry_while_unavailable("note an invalid message", &lane.stop, || worker.backends.ledger.reject(&message));
    match noted.await {
        Ok(()) => {
            lane.meter.record_rejected(reason);
            DeliveryAction::Ack
        }
        Err(error) => {
            tracing::warn!(?error, "invalid message not noted; it goes back");
            DeliveryAction::RequeueAndPause
        }
    }
}

/// What is kept of a message that can never be a job: the message itself for `invalid`, and its row.
pub(super) fn rejection(
    copy: &MessageCopy,
    invalid: &InvalidMessage,
    job_id: Option<JobId>,
) -> (OutgoingMessage, RejectedMessage) {
    let row = RejectedMessage {
        lane: copy.provider.clone(),
        job_id: job_id.map(|id| id.as_str().to_owned()),
        reason: invalid.reason.code(),
        detail: invalid.detail.clone(),
        body_sha256: Sha256::digest(&copy.body).into(),
        body_bytes: copy.body.len(),
    };
    let outgoing = OutgoingMessage {
        destination: Destination::Invalid { reason: invalid.reason, detail: invalid.detail.clone() },
        body: copy.body.clone(),
        properties: headers::without_waits_since(copy.properties.clone()),
    };
    (outgoing, row)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn future_size<A, B, F>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Ten thousand wait in hand at once, each in a future as large as its largest step.
    #[test]
    fn delivery_future_stays_small() {
        let bytes = future_size(handle_delivery);
        assert!(bytes <= 5_000, "{bytes} bytes");
    }
}
