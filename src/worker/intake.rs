//! Intake of one delivery, up to its acknowledgement: decodes it, and records its job.
//!
//! A job that may start at once is recorded together with its first request. Any other is recorded in the backlog. A
//! message is acknowledged once its record is committed, and from then on the ledger alone gives the job to a worker.
//! Every delivery ends in exactly one [`DeliveryAction`], even after a panic: acknowledged or requeued. So no message is
//! lost.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep};
use tracing::Instrument as _;

use super::backlog;
use super::backlog::unrecorded::UnrecordedPayment;
use super::decode::{DecodedMessage, decode_delivery};
use super::held::{NEWER_VERSION_TEXT, hold};
use super::job::{FirstTry, NewPayment, record_and_send};
use super::lane::LaneContext;
use super::publish::{MessageCopy, unless_abandoned};
use super::rejections::{overflowing, rejected_message};
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology::publish;
use crate::domain::job::{FlowKey, InvalidMessage, InvalidReason, JobId};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::LedgerError;
use crate::ledger::backlog::BacklogRecord;
use crate::queue::message::Decoded;
use crate::queue::{Delivery, OutgoingMessage, QueueError, Receipt};
use crate::telemetry::spans;

const INVALID_MESSAGE: &str = "message rejected: not a valid job";
/// Pause before a message is requeued after a fault of its own, so that it is not delivered again at once.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// Pause of a lane's intake after a backend rejected a request. At this pace, the broker's delivery limit of 1,000
/// lasts most of a working day.
pub(super) const BACKEND_REFUSAL_PAUSE: Duration = Duration::from_secs(30);

/// How a delivery, or the run of a job, ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryAction {
    /// The job's state is recorded: acknowledge.
    Ack,
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
            Self::Requeue => "requeued",
            Self::RequeueFault => "fault",
            Self::RequeueAndPause => "backend refused",
        }
    }
}

/// A message in this worker's hands: the right to finish it, and its share of the lane's prefetch.
pub struct MessageInHand {
    lane: Arc<LaneContext>,
    receipt: Option<Box<dyn Receipt>>,
    share: Option<OwnedSemaphorePermit>,
}

impl MessageInHand {
    /// Acknowledges the message, whose job is recorded. Without effect if it is finished.
    pub(super) async fn acknowledge(&mut self) {
        let Some(receipt) = self.take() else { return };
        report_unfinished(receipt.ack().await);
        faults::crash(CrashPoint::AfterAck);
    }

    async fn requeue(&mut self) {
        if let Some(receipt) = self.take() {
            report_unfinished(receipt.requeue().await);
        }
    }

    fn take(&mut self) -> Option<Box<dyn Receipt>> {
        if self.share.take().is_some() {
            self.lane.intake_bound.lock().record_end();
        }
        self.receipt.take()
    }
}

fn report_unfinished(finished: Result<(), QueueError>) {
    if let Err(error) = finished {
        tracing::debug!(%error, "delivery not finished; the broker delivers it again, and the ledger knows its job");
    }
}

/// Processes one delivery from start to end, and runs its job if that starts at once.
pub async fn handle_delivery(lane: Arc<LaneContext>, delivery: Delivery, share: OwnedSemaphorePermit) {
    let delivered_at = Instant::now();
    let Delivery { body, properties, receipt, redelivered } = delivery;
    let copy = MessageCopy { provider: lane.name.clone(), body, properties };
    let mut message = MessageInHand { lane: Arc::clone(&lane), receipt: Some(receipt), share: Some(share) };
    tracing::trace!(provider = %lane.name, redelivered, "delivery");
    let _active = lane.meter.delivery_started(redelivered);
    faults::crash(CrashPoint::AfterDelivery);
    let span = spans::job(lane.name.as_str(), &copy.properties.headers);
    let arrived = Arrived { copy: &copy, at: delivered_at, is_redelivered: redelivered };
    let steps = process(&lane, arrived, &mut message).instrument(span.clone());
    let action = AssertUnwindSafe(steps).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, "job handler panicked; its message is requeued unless its job is recorded");
        DeliveryAction::RequeueFault
    });
    let finishing = span.in_scope(|| spans::step("finish the delivery"));
    finish(&lane, &mut message, action).instrument(finishing).await;
    spans::record_end(&span, action.code());
}

async fn finish(lane: &LaneContext, message: &mut MessageInHand, action: DeliveryAction) {
    if action == DeliveryAction::RequeueAndPause {
        pause_intake(lane);
    }
    if message.receipt.is_none() {
        return;
    }
    match action {
        DeliveryAction::Ack => message.acknowledge().await,
        DeliveryAction::Requeue => {
            lane.meter.record_requeue(if lane.stop.is_cancelled() { "stopping" } else { "taken_over" });
            message.requeue().await;
        }
        DeliveryAction::RequeueFault => {
            lane.meter.record_requeue("fault");
            pause_after_fault(lane).await;
            message.requeue().await;
        }
        // Every delivery counts against the broker's delivery limit.
        DeliveryAction::RequeueAndPause => {
            lane.meter.record_requeue("backend_refused");
            pause_after_fault(lane).await;
            message.requeue().await;
        }
    }
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

/// A delivered message.
struct Arrived<'a> {
    copy: &'a MessageCopy,
    at: Instant,
    is_redelivered: bool,
}

async fn process(lane: &LaneContext, arrived: Arrived<'_>, message: &mut MessageInHand) -> DeliveryAction {
    let Arrived { copy, at, is_redelivered } = arrived;
    let decoded = match decode_with_row_rules(lane, copy).await {
        Ok(DecodedMessage::Job(decoded)) => decoded,
        Ok(DecodedMessage::NewerVersion(version)) => return Box::pin(hold_newer_version(lane, copy, version)).await,
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
    let arrival = lane.backlog.unrecorded.add(FlowKey::of(&decoded.job));
    if is_redelivered || backlog::must_wait(lane, &decoded.job) {
        return Box::pin(record(lane, copy, &decoded, arrival)).await;
    }
    let admitted = lane.backlog.admit(&decoded.job.id);
    // Both are boxed because thousands of jobs wait, and few take these paths: only those need their memory.
    let new = NewPayment { decoded, delivered_at: at, arrival };
    let (decoded, arrival) = match Box::pin(record_and_send(lane, new, message)).await {
        FirstTry::Finished(action) => return action,
        FirstTry::MustBeRecorded(decoded, arrival) => (decoded, arrival),
    };
    drop(admitted);
    Box::pin(record(lane, copy, &decoded, arrival)).await
}

/// Records a job in the backlog, or asleep until its `not_before`. A message of a known job changes nothing.
async fn record(
    lane: &LaneContext,
    copy: &MessageCopy,
    decoded: &Decoded,
    arrival: UnrecordedPayment<'_>,
) -> DeliveryAction {
    match backlog::record(lane, decoded, arrival).await {
        Ok(BacklogRecord::Recorded { .. }) => {
            lane.meter.record_delay("backlog", "it waits for its turn");
            DeliveryAction::Ack
        }
        Ok(BacklogRecord::Known) => {
            lane.duplicates.record();
            DeliveryAction::Ack
        }
        Ok(BacklogRecord::Conflict(invalid)) => reject(lane, copy, &invalid, Some(decoded.job.id.clone())).await,
        Err(RetryEnded::Stopped) => DeliveryAction::Requeue,
        Err(RetryEnded::Failed(error)) => {
            tracing::warn!(job = %decoded.job.id, %error, "failed to record a job; requeueing its message");
            DeliveryAction::RequeueAndPause
        }
    }
}

/// Runs a job that has no message: nothing is acknowledged or requeued.
pub(super) async fn run_without_message(lane: &LaneContext, job: &JobId, steps: impl Future<Output = DeliveryAction>) {
    let _active = lane.meter.delivery_started(false);
    let span = spans::job(lane.name.as_str(), &spans::trace_headers(job.as_str()));
    let action = AssertUnwindSafe(steps.instrument(span.clone())).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, %job, "job handler panicked; the job returns to the backlog");
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

/// Holds a message of a newer format in the ledger for a newer worker.
async fn hold_newer_version(lane: &LaneContext, copy: &MessageCopy, version: u64) -> DeliveryAction {
    let held =
        retry_while_unavailable("hold a message of a newer format", &lane.stop, || hold(&lane.worker, copy, version));
    match held.await {
        Ok(None) => {
            lane.meter.record_delay(InvalidReason::NewerVersion.code(), NEWER_VERSION_TEXT);
            DeliveryAction::Ack
        }
        Ok(Some(invalid)) => reject(lane, copy, &invalid, None).await,
        Err(RetryEnded::Stopped) => DeliveryAction::Requeue,
        Err(RetryEnded::Failed(error)) => {
            tracing::warn!(provider = %lane.name, %error, "failed to hold a message; requeueing it");
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
    let room = retry_while_unavailable("count invalid messages", &lane.stop, || worker.has_no_room_for_rejected());
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

    fn future_size<A, B, C, F>(_: impl Fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    /// Ten thousand deliveries wait at once, each in a future as large as its largest step.
    #[test]
    fn delivery_future_stays_small() {
        let bytes = future_size(handle_delivery);
        assert!(bytes <= 5_000, "{bytes} bytes");
    }
}
