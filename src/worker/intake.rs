//! Intake of one delivery, up to its acknowledgement: decodes it, records and claims its job, executes it, and
//! completes it.
//!
//! Every delivery ends in exactly one [`DeliveryAction`], even after a panic: acknowledged, delayed by a copy and then
//! acknowledged, or requeued. So no message is lost.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};
use tracing::Instrument as _;

use super::active_jobs::LEASE;
use super::backlog;
use super::decode::{DecodedMessage, NEWER_VERSION_DELAY, NEWER_VERSION_TEXT, decode_delivery, wait_for_newer_worker};
use super::job::{Arrival, FirstTry, batch_delay, claim, discard, record_and_send, run_claimed};
use super::lane::LaneContext;
use super::publish::{MessageCopy, publish_delayed, unless_abandoned};
use super::rejections::{overflowing, rejected_message};
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology::publish;
use crate::domain::job::{InvalidMessage, InvalidReason, JobId};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::backlog::BacklogRecord;
use crate::ledger::copies::DeliveredCopy;
use crate::ledger::{Claim, LedgerError};
use crate::queue::message::Decoded;
use crate::queue::{DELAY_STEPS, Delivery, OutgoingMessage, QueueError, Receipt, headers};
use crate::telemetry::spans;

const INVALID_MESSAGE: &str = "message rejected: not a valid job";
/// Delay after which the message of a job with an unreadable row is tried again.
const UNREADABLE_ROW_RETRY_DELAY: Duration = Duration::from_secs(30 * 60);
/// Pause before a message is requeued after a fault of its own, so that it is not delivered again at once.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// Pause of a lane's intake after a backend rejected a request. At this pace, the broker's delivery limit of 1,000
/// lasts most of a working day.
pub(super) const BACKEND_REFUSAL_PAUSE: Duration = Duration::from_secs(30);

/// How a delivery ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryAction {
    /// The job's state is recorded: acknowledge.
    Ack,
    /// Publish a copy that returns after the wait, then acknowledge. With a number, the copy is the newest of its job;
    /// without one, it replaces the message.
    Delay { wait: Duration, number: Option<i64> },
    /// Requeue, for the next worker.
    Requeue,
    /// Requeue after a pause: this job has a fault.
    RequeueFault,
    /// Requeue, and pause the lane's intake: a backend has a fault.
    RequeueAndPause,
}

impl DeliveryAction {
    pub(super) fn code(self) -> &'static str {
        match self {
            Self::Ack => "acknowledged",
            Self::Delay { .. } => "delayed",
            Self::Requeue => "requeued",
            Self::RequeueFault => "fault",
            Self::RequeueAndPause => "backend refused",
        }
    }
}

/// Processes one delivery from start to end.
pub async fn handle_delivery(lane: Arc<LaneContext>, delivery: Delivery) {
    let delivered_at = Instant::now();
    let Delivery { body, properties, receipt, redelivered } = delivery;
    let copy = MessageCopy { provider: lane.name.clone(), body, properties };
    tracing::trace!(provider = %lane.name, redelivered, "delivery");
    let _active = lane.meter.delivery_started(redelivered);
    faults::crash(CrashPoint::AfterDelivery);
    let span = spans::job(lane.name.as_str(), &copy.properties.headers);
    let steps = process(&lane, &copy, delivered_at, redelivered).instrument(span.clone());
    let action = AssertUnwindSafe(steps).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, "job handler panicked; requeueing the message");
        DeliveryAction::RequeueFault
    });
    let finishing = span.in_scope(|| spans::step("finish the delivery"));
    let finished = complete(&lane, &copy, receipt, action).instrument(finishing).await;
    spans::record_end(&span, action.code());
    faults::crash(CrashPoint::AfterAck);
    if let Err(error) = finished {
        tracing::debug!(%error, "delivery not acknowledged; the broker redelivers it, and the ledger knows its job");
    }
}

async fn complete(
    lane: &LaneContext,
    copy: &MessageCopy,
    receipt: Box<dyn Receipt>,
    action: DeliveryAction,
) -> Result<(), QueueError> {
    match action {
        DeliveryAction::Ack => receipt.ack().await,
        DeliveryAction::Delay { wait, number } => {
            match publish_delayed(&lane.worker, &copy.with_number(number), wait).await {
                Ok(()) => {
                    faults::crash(CrashPoint::AfterDelayCopy);
                    receipt.ack().await
                }
                Err(error) => {
                    tracing::warn!(provider = %lane.name, %error, "failed to delay a message; requeueing it");
                    requeue_and_pause(lane, receipt).await
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
        DeliveryAction::RequeueAndPause => requeue_and_pause(lane, receipt).await,
    }
}

/// Requeues because of a backend's fault: the lane's intake is paused, because every delivery counts against the
/// broker's delivery limit.
async fn requeue_and_pause(lane: &LaneContext, receipt: Box<dyn Receipt>) -> Result<(), QueueError> {
    lane.meter.record_requeue("backend_refused");
    pause_intake(lane);
    pause_after_fault(lane).await;
    receipt.requeue().await
}

/// Pauses the lane's intake; active jobs continue.
pub(super) fn pause_intake(lane: &LaneContext) {
    let reason = "the queue or the database rejects the worker's requests: see its log";
    let reason = Wait::with_detail(WaitReason::LedgerRefused, reason);
    lane.control.pause_intake(BACKEND_REFUSAL_PAUSE, PauseCause::Backend, reason);
}

async fn pause_after_fault(lane: &LaneContext) {
    tokio::select! {
        () = sleep(FAULT_PAUSE) => {}
        () = lane.stop.cancelled() => {}
    }
}

async fn process(lane: &LaneContext, copy: &MessageCopy, delivered_at: Instant, redelivered: bool) -> DeliveryAction {
    let delivered_copy = DeliveredCopy::delivered(headers::copy_number(&copy.properties), redelivered);
    let decoded = match decode_with_row_rules(lane, copy).await {
        Ok(DecodedMessage::Job(decoded)) => decoded,
        Ok(DecodedMessage::NewerVersion(version)) => return Box::pin(delay_newer_version(lane, copy, version)).await,
        Ok(DecodedMessage::Invalid { invalid, claimed_id }) => return reject(lane, copy, &invalid, claimed_id).await,
        Err(error) => {
            tracing::warn!(provider = %lane.name, %error, "failed to look up a message's job; requeueing the message");
            return if lane.worker.stop.is_cancelled() {
                DeliveryAction::Requeue
            } else {
                DeliveryAction::RequeueAndPause
            };
        }
    };
    spans::record_job(&decoded.job.id);
    // A copy that a worker published belongs to a recorded job. The job of a refused account ends with its claim.
    let is_refused = lane.settings.borrow().provider.refuses_account(decoded.job.account_name());
    let must_be_claimed = redelivered || delivered_copy.copy > 0 || is_refused;
    if !must_be_claimed && let Some(action) = Box::pin(enter_backlog(lane, copy, &decoded)).await {
        return action;
    }
    let _admitted = (!must_be_claimed).then(|| lane.backlog.admit(&decoded.job.id));
    let sent = match must_be_claimed {
        true => FirstTry::MustBeClaimed(decoded, None),
        // Both are boxed because thousands of jobs wait, and few take these paths: only those need their memory.
        false => Box::pin(record_and_send(lane, decoded, delivered_at)).await,
    };
    let (decoded, reservation) = match sent {
        FirstTry::Finished(action) => return action,
        FirstTry::MustBeClaimed(decoded, reservation) => (decoded, reservation),
    };
    let max_batch_delay = batch_delay(reservation.as_ref(), lane.gate.is_open());
    let not_claimed =
        match claim(lane, &decoded, delivered_copy, max_batch_delay).instrument(spans::step("claim")).await {
            Some(Claim::Claimed(claimed)) => {
                let arrival = Arrival { at: delivered_at, reservation, ahead: None };
                return run_claimed(lane, decoded, claimed, arrival).await;
            }
            Some(Claim::Finished) => {
                lane.duplicates.record();
                DeliveryAction::Ack
            }
            Some(Claim::Superseded) => {
                let (provider, job) = (&lane.name, &decoded.job.id);
                tracing::debug!(%provider, %job, copy = delivered_copy.copy, "older copy acknowledged");
                DeliveryAction::Ack
            }
            // The worker that has the lease finishes the job, or the next one does; then this copy finds it finished.
            Some(Claim::LeasedElsewhere { lease_left }) => {
                lane.meter.record_delay("active_elsewhere", "another delivery of the job is active");
                DeliveryAction::Delay { wait: lease_left.clamp(DELAY_STEPS[0], LEASE / 2), number: None }
            }
            // Publishing the rejected message may wait for a backend, and the reservation must not wait with it.
            Some(Claim::Conflict(invalid)) => {
                discard(lane, reservation);
                return reject(lane, copy, &invalid, Some(decoded.job.id.clone())).await;
            }
            Some(Claim::Unreadable(problem)) => {
                tracing::error!(
                    provider = %lane.name, job = %decoded.job.id, problem,
                    "job row cannot be read: repair it by SQL; its message is delayed"
                );
                lane.meter.record_delay("unreadable", "its row cannot be read");
                DeliveryAction::Delay { wait: UNREADABLE_ROW_RETRY_DELAY, number: None }
            }
            None if lane.worker.stop.is_cancelled() => DeliveryAction::Requeue,
            None => DeliveryAction::RequeueAndPause,
        };
    discard(lane, reservation);
    not_claimed
}

/// Records a new job in the backlog, if it must wait there. `None`: it goes on like any other.
async fn enter_backlog(lane: &LaneContext, copy: &MessageCopy, decoded: &Decoded) -> Option<DeliveryAction> {
    let action = match backlog::record_if_it_must_wait(lane, decoded).await? {
        Ok(BacklogRecord::Recorded) => {
            lane.meter.record_delay("backlog", "the lane or its account is at a limit");
            DeliveryAction::Ack
        }
        Ok(BacklogRecord::InBacklog | BacklogRecord::Finished) => {
            lane.duplicates.record();
            DeliveryAction::Ack
        }
        Ok(BacklogRecord::Conflict(invalid)) => reject(lane, copy, &invalid, Some(decoded.job.id.clone())).await,
        Ok(BacklogRecord::Open) => return None,
        Err(RetryEnded::Stopped) => DeliveryAction::Requeue,
        Err(RetryEnded::Failed(error)) => {
            tracing::warn!(job = %decoded.job.id, %error, "failed to record a job; requeueing its message");
            DeliveryAction::RequeueAndPause
        }
    };
    Some(action)
}

/// Runs a job that has no message: nothing is acknowledged or requeued.
pub(super) async fn run_without_message(lane: &LaneContext, job: &JobId, steps: impl Future<Output = DeliveryAction>) {
    let _active = lane.meter.delivery_started(false);
    let span = spans::job(lane.name.as_str(), &BTreeMap::new());
    let action = AssertUnwindSafe(steps.instrument(span.clone())).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, %job, "job handler panicked; the job's lease expires");
        DeliveryAction::RequeueFault
    });
    spans::record_end(&span, action.code());
    if action == DeliveryAction::RequeueAndPause {
        pause_intake(lane);
    }
}

/// Decodes the message by the rules of the lane's current row.
async fn decode_with_row_rules(
    lane: &LaneContext,
    copy: &MessageCopy,
) -> Result<DecodedMessage, RetryEnded<LedgerError>> {
    let settings = Arc::clone(&lane.settings.borrow());
    retry_while_unavailable("decode a message", &lane.stop, || {
        decode_delivery(&lane.worker, &copy.body, &lane.name, Some(&*settings))
    })
    .await
}

/// Delays a message of a newer format for a newer worker, until it is too old.
async fn delay_newer_version(lane: &LaneContext, copy: &MessageCopy, version: u64) -> DeliveryAction {
    let max_age = lane.settings.borrow().provider.max_age;
    let waits = wait_for_newer_worker(&lane.worker, &lane.name, &copy.properties, version, Some(max_age));
    let properties = match waits {
        Ok(properties) => properties,
        Err(invalid) => return reject(lane, copy, &invalid, None).await,
    };
    lane.meter.record_delay(InvalidReason::NewerVersion.code(), NEWER_VERSION_TEXT);
    match publish_delayed(&lane.worker, &MessageCopy { properties, ..copy.clone() }, NEWER_VERSION_DELAY).await {
        Ok(()) => DeliveryAction::Ack,
        Err(error) => {
            tracing::warn!(provider = %lane.name, %error, "failed to delay a message; requeueing it");
            DeliveryAction::RequeueAndPause
        }
    }
}

/// Records a message that can never be a job, then acknowledges it. If the ledger has no room, its queue keeps it.
async fn reject(
    lane: &LaneContext,
    copy: &MessageCopy,
    invalid: &InvalidMessage,
    job_id: Option<JobId>,
) -> DeliveryAction {
    let worker = &lane.worker;
    let reason = invalid.reason.code();
    if worker.log_throttle.admits(lane.name.as_str(), INVALID_MESSAGE, reason) {
        tracing::warn!(provider = %lane.name, reason, detail = invalid.detail, "{INVALID_MESSAGE}");
    }
    let ledger = &worker.backends.ledger;
    let room = retry_while_unavailable("count invalid messages", &lane.stop, || worker.rejected_room.is_full(ledger));
    let kept = match room.await {
        Ok(true) => publish_invalid(lane, &overflowing(copy, invalid)).await,
        Ok(false) => {
            let message = rejected_message(copy, invalid, job_id);
            let recorded =
                retry_while_unavailable("record an invalid message", &lane.stop, || ledger.reject(&message)).await;
            recorded.map_err(|error| error.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    match kept {
        Ok(()) => {
            lane.meter.record_rejected(reason);
            DeliveryAction::Ack
        }
        Err(error) => {
            tracing::warn!(provider = %lane.name, error, "failed to keep an invalid message; requeueing it");
            DeliveryAction::RequeueAndPause
        }
    }
}

async fn publish_invalid(lane: &LaneContext, outgoing: &OutgoingMessage) -> Result<(), String> {
    let worker = &lane.worker;
    let published =
        retry_while_unavailable("publish an invalid message", &lane.stop, || publish(worker, &lane.name, outgoing));
    unless_abandoned(worker, published).await.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn future_size<A, B, F>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Ten thousand deliveries wait at once, each in a future as large as its largest step.
    #[test]
    fn delivery_future_stays_small() {
        let bytes = future_size(handle_delivery);
        assert!(bytes <= 5_000, "{bytes} bytes");
    }
}
