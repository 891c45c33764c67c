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

use super::execute::{self, JobInHand, Place, given_up, records_within};
use super::in_hand::LEASE;
use super::lane::LaneParts;
use super::newer_version::{self, Newer};
use super::park::{Copy, publish_copy, unless_abandoned};
use super::patience::{GivenUp, until_back};
use super::reading::{RowRules, read};
use super::topology::publish;
use crate::domain::explain::parked::ITS_TIME;
use crate::domain::job::{Invalid, InvalidReason, JobId};
use crate::faults::{self, Point};
use crate::fleet::report::By;
use crate::ledger::copies::{Arrived, Claimant, ComesBack};
use crate::ledger::{Claim, Claimed, LedgerError, RejectedMessage, Timing, Written};
use crate::queue::message::{DecodeError, Decoded};
use crate::queue::{DELAY_STEPS, Delivery, Destination, Outgoing, QueueError, Receipt, headers};
use crate::telemetry::spans;

const NO_JOB: &str = "message is no job";
/// A job that waits longer than this is in the ledger alone, and the sweeper publishes it when it is due: a message would
/// go round the longest delay queue for all that time.
const UNQUEUED_FROM: Duration = Duration::from_secs(24 * 60 * 60);
/// After so long the message of a job whose row cannot be read is looked at once more.
const UNREADABLE_AGAIN: Duration = Duration::from_secs(30 * 60);
/// Pause before a message goes back after a fault that is its own, so that it does not come round at once.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// How long a lane takes nothing after an engine's refusal: 1,000 deliveries allowed are then most of a working day.
pub(super) const REFUSAL_REST: Duration = Duration::from_secs(30);

/// How a delivery ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything is written down.
    Ack,
    /// A copy comes back after the wait; then acknowledge. With a number where it is the newest of its job; without one it
    /// takes the message's place.
    Park { wait: Duration, number: Option<i64> },
    /// To the queue again, for whoever is next.
    HandBack,
    /// The same, after a pause: something is wrong with this job.
    Fault,
    /// The same, and the lane rests: something is wrong with an engine.
    Refused,
}

impl End {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Ack => "acknowledged",
            Self::Park { .. } => "parked",
            Self::HandBack => "handed back",
            Self::Fault => "fault",
            Self::Refused => "engine refused",
        }
    }
}

/// Works one delivery off.
pub async fn work_off(lane: Arc<LaneParts>, delivery: Delivery) {
    let delivered_at = Instant::now();
    let Delivery { body, properties, receipt, redelivered } = delivery;
    let copy = Copy { provider: lane.name.clone(), body, properties };
    tracing::trace!(provider = %lane.name, redelivered, "delivery");
    let _in_hand = lane.meter.taken(redelivered);
    let receipt = faults::acknowledged_early(receipt).await;
    faults::crash(Point::AfterDelivery);
    let span = spans::job(lane.name.as_str(), &copy.properties.headers);
    let steps =
        AssertUnwindSafe(steps(&lane, &copy, (delivered_at, redelivered)).instrument(span.clone())).catch_unwind();
    let end = steps.await.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, "a job panicked; it goes back to the queue");
        End::Fault
    });
    let finishing = span.in_scope(|| spans::step("finish the delivery"));
    let finished = finish(&lane, &copy, receipt, end).instrument(finishing).await;
    spans::ended(&span, end.word());
    faults::crash(Point::AfterAck);
    if let Err(error) = finished {
        tracing::debug!(%error, "delivery not finished; the broker will deliver it again and the ledger knows it");
    }
}

async fn finish(lane: &LaneParts, copy: &Copy, receipt: Box<dyn Receipt>, end: End) -> Result<(), QueueError> {
    match end {
        End::Ack => receipt.ack().await,
        End::Park { wait, number } => match publish_copy(&lane.worker, &copy.numbered(number), wait).await {
            Ok(()) => {
                faults::crash(Point::AfterDelayCopy);
                receipt.ack().await
            }
            Err(error) => {
                tracing::warn!(provider = %lane.name, ?error, "not parked; the message goes back");
                lane.meter.requeued("engine_refused");
                rest_after_refusal(lane).await;
                receipt.hand_back().await
            }
        },
        End::HandBack => {
            lane.meter.requeued(if lane.stop.is_cancelled() { "stopping" } else { "taken_over" });
            receipt.hand_back().await
        }
        End::Fault => {
            lane.meter.requeued("fault");
            pause_after_fault(lane).await;
            receipt.hand_back().await
        }
        End::Refused => {
            lane.meter.requeued("engine_refused");
            rest_after_refusal(lane).await;
            receipt.hand_back().await
        }
    }
}

/// What is wrong is not the message's fault: it goes back, and the lane takes nothing for a while, because every delivery
/// counts against the broker's delivery limit.
async fn rest_after_refusal(lane: &LaneParts) {
    rest_from_taking(lane);
    pause_after_fault(lane).await;
}

/// What is in hand goes on.
pub(super) fn rest_from_taking(lane: &LaneParts) {
    lane.pauses.stop_taking(REFUSAL_REST, By::Engine, "an engine refuses what we ask of it");
}

async fn pause_after_fault(lane: &LaneParts) {
    tokio::select! {
        () = sleep(FAULT_PAUSE) => {}
        () = lane.stop.cancelled() => {}
    }
}

async fn steps(lane: &LaneParts, copy: &Copy, (delivered_at, redelivered): (Instant, bool)) -> End {
    let arrived = Arrived::delivered(headers::copy_number(&copy.properties), redelivered);
    let decoded = match read_by_row(lane, copy).await {
        // Moved more than once while it waits, and each of its places would be kept.
        Ok(Ok(decoded)) => Box::new(decoded),
        Ok(Err(DecodeError::NewerVersion(version))) => return Box::pin(wait_for_newer(lane, copy, version)).await,
        Ok(Err(DecodeError::Invalid { invalid, claimed_id: id })) => return reject(lane, copy, &invalid, id).await,
        Err(error) => {
            tracing::warn!(provider = %lane.name, ?error, "not known whether a message's job is recorded; it goes back");
            return if lane.worker.stop.is_cancelled() { End::HandBack } else { End::Refused };
        }
    };
    spans::name_job(&decoded.job.id);
    // A copy of ours is one of a job that is recorded.
    let sent = match redelivered || arrived.copy > 0 {
        true => Err((decoded, None)),
        // Thousands wait in hand, and few of them by this way: those alone pay for the room that it takes.
        false => Box::pin(execute::send_new(lane, decoded, delivered_at)).await,
    };
    let (decoded, place) = match sent {
        Ok(end) => return end,
        Err(to_claim) => to_claim,
    };
    let may_wait = records_within(place.as_ref(), lane.gate.moves());
    let not_claimed = match claim(lane, &decoded, arrived, may_wait).instrument(spans::step("claim")).await {
        Some(Claim::Claimed(claimed)) => return begin(lane, decoded, claimed, (delivered_at, place)).await,
        Some(Claim::Settled) => {
            lane.repeats.came();
            End::Ack
        }
        Some(Claim::Superseded) => {
            tracing::debug!(provider = %lane.name, job = %decoded.job.id, copy = arrived.copy, "an older copy; acknowledged");
            End::Ack
        }
        // Its holder, or whoever takes over, will settle it; then this copy finds it settled.
        Some(Claim::InHand { lease_left }) => {
            lane.meter.parked("in_hand_elsewhere", "another delivery of the job is in hand");
            End::Park { wait: lease_left.clamp(DELAY_STEPS[0], LEASE / 2), number: None }
        }
        // Keeping the message may wait for an engine, and the place must not wait with it.
        Some(Claim::Conflict(invalid)) => {
            given_up(lane, place);
            return reject(lane, copy, &invalid, Some(decoded.job.id.clone())).await;
        }
        Some(Claim::Unreadable(problem)) => {
            tracing::error!(
                provider = %lane.name, job = %decoded.job.id, problem,
                "a job's row cannot be read: repair it by SQL. Its message is delayed"
            );
            lane.meter.parked("unreadable", "its row cannot be read");
            End::Park { wait: UNREADABLE_AGAIN, number: None }
        }
        None if lane.worker.stop.is_cancelled() => End::HandBack,
        None => End::Refused,
    };
    given_up(lane, place);
    not_claimed
}

/// The message, by the rules of the lane's row as it is now.
async fn read_by_row(lane: &LaneParts, copy: &Copy) -> Result<Result<Decoded, DecodeError>, GivenUp<LedgerError>> {
    let settings = Arc::clone(&lane.settings.borrow());
    let rules = RowRules { require: &settings.provider.require, client: &*settings.client };
    until_back("read a message", &lane.stop, || read(&lane.worker, &copy.body, &lane.name, Some(&rules))).await
}

pub(super) async fn claim(lane: &LaneParts, decoded: &Decoded, arrived: Arrived, may_wait: Duration) -> Option<Claim> {
    let worker = &lane.worker;
    let ledger = &worker.engines.ledger;
    let claimed = until_back("claim a job", &lane.stop, || {
        let timing = Timing { lease: LEASE, may_wait };
        let claimant = Claimant { owner: &worker.options.owner, arrived };
        ledger.claim_in_company(&decoded.job, decoded.hash, claimant, timing)
    });
    match claimed.await {
        Ok(claim) => Some(claim),
        Err(GivenUp::Failed(LedgerError::Corrupt(problem))) => Some(Claim::Unreadable(problem)),
        Err(error) => {
            tracing::warn!(job = %decoded.job.id, ?error, "not claimed");
            None
        }
    }
}

/// A claimed job whose time has come is executed; one that must wait is put down for that long.
pub(super) async fn begin(
    lane: &LaneParts,
    decoded: Box<Decoded>,
    claimed: Box<Claimed>,
    (delivered_at, place): (Instant, Option<Place<'_>>),
) -> End {
    faults::crash(Point::AfterClaim);
    // One that may expire is looked at when it does, however long it was to wait.
    let expires_in = claimed.expires_in.filter(|_| !claimed.unknown);
    let wait = expires_in.map_or(claimed.wait, |left| claimed.wait.min(left));
    let job = JobInHand {
        job: decoded.job,
        held: lane.worker.in_hand.hold(claimed.hold.clone()),
        claimed: *claimed,
        delivered_at,
        claimed_at: Instant::now(),
    };
    // A copy comes back a little before its time. Its permit is good for longer than that, and may be lost if given back.
    let sends_soon = wait < DELAY_STEPS[0].min(lane.settings.borrow().provider.send_budget / 2);
    let (place, unused) = if sends_soon { (place, None) } else { (None, place) };
    given_up(lane, unused);
    if wait < DELAY_STEPS[0] {
        sleep(wait).await;
        return execute::execute(lane, &job, place).await;
    }
    let ledger = &lane.worker.engines.ledger;
    let waits = until_back("let a job wait on", &lane.worker.abandon, || ledger.delay_further(&job.held.hold, wait));
    let waits = waits.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok();
    let back = match waits {
        Some((Written::Kept, back)) => back,
        Some((Written::Lost, _)) => return End::HandBack,
        None => return End::Refused,
    };
    let end = after_delay(&job, wait, back);
    if wait > UNQUEUED_FROM && end != End::Ack && kept_unqueued(lane, &job).await {
        return End::Ack;
    }
    lane.meter.parked("not_yet", ITS_TIME);
    end
}

/// A job that waits comes back by a new copy, unless a delay queue has one that is in time, or the sweeper brings it.
pub(super) fn after_delay(job: &JobInHand, wait: Duration, back: Option<ComesBack>) -> End {
    match back.and_then(|back| back.publishes(job.claimed.copy)) {
        Some(number) => End::Park { wait, number: Some(number) },
        None => End::Ack,
    }
}

/// Whether the ledger has noted that no queue has this job. If not, it is parked like any other.
async fn kept_unqueued(lane: &LaneParts, job: &JobInHand) -> bool {
    match lane.worker.engines.upkeep.keep_unqueued(&job.held.hold).await {
        Ok(written) => written == Written::Kept,
        Err(error) => {
            tracing::debug!(job = %job.job.id, %error, "not noted as unqueued; it is parked");
            false
        }
    }
}

/// A message of a newer format: parked for a newer worker, until it is too old.
async fn wait_for_newer(lane: &LaneParts, copy: &Copy, version: u64) -> End {
    let max_age = lane.settings.borrow().provider.max_age;
    let properties = match newer_version::judge(&copy.properties, version, Some(max_age)) {
        Newer::Waits(properties) => properties,
        Newer::TooOld(invalid) => return reject(lane, copy, &invalid, None).await,
    };
    let reason = InvalidReason::NewerVersion.code();
    if lane.worker.log_throttle.admits(lane.name.as_str(), newer_version::WAITS, reason) {
        tracing::error!(provider = %lane.name, version, "{}", newer_version::WAITS);
    }
    lane.meter.parked(reason, newer_version::WAITS);
    match publish_copy(&lane.worker, &Copy { properties, ..copy.clone() }, newer_version::LOOK_AGAIN).await {
        Ok(()) => End::Ack,
        Err(error) => {
            tracing::warn!(provider = %lane.name, ?error, "not parked; the message goes back");
            End::Refused
        }
    }
}

/// What can never be a job: kept in the ledger and in `invalid`, then acknowledged.
async fn reject(lane: &LaneParts, copy: &Copy, invalid: &Invalid, job_id: Option<JobId>) -> End {
    let worker = &lane.worker;
    let (outgoing, message) = rejection(copy, invalid, job_id);
    let reason = invalid.reason.code();
    if worker.log_throttle.admits(lane.name.as_str(), NO_JOB, reason) {
        tracing::warn!(provider = %lane.name, reason, detail = invalid.detail, "{NO_JOB}");
    }
    let kept = until_back("keep an invalid message", &lane.stop, || publish(worker, &copy.provider, &outgoing));
    if let Err(error) = unless_abandoned(worker, kept).await {
        tracing::warn!(?error, "invalid message not kept; it goes back");
        return End::Refused;
    }
    let noted = until_back("note an invalid message", &lane.stop, || worker.engines.ledger.reject(&message));
    match noted.await {
        Ok(()) => {
            lane.meter.rejected(reason);
            End::Ack
        }
        Err(error) => {
            tracing::warn!(?error, "invalid message not noted; it goes back");
            End::Refused
        }
    }
}

/// What is kept of a message that can never be a job: the message itself for `invalid`, and its row.
pub(super) fn rejection(copy: &Copy, invalid: &Invalid, job_id: Option<JobId>) -> (Outgoing, RejectedMessage) {
    let row = RejectedMessage {
        lane: copy.provider.clone(),
        job_id: job_id.map(|id| id.as_str().to_owned()),
        reason: invalid.reason.code(),
        detail: invalid.detail.clone(),
        body_sha256: Sha256::digest(&copy.body).into(),
        body_bytes: copy.body.len(),
    };
    let outgoing = Outgoing {
        destination: Destination::Invalid { reason: invalid.reason, detail: invalid.detail.clone() },
        body: copy.body.clone(),
        properties: headers::without_waits_since(copy.properties.clone()),
    };
    (outgoing, row)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of<A, B, F>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Ten thousand wait in hand at once, each in a future as large as its largest step.
    #[test]
    fn a_job_in_hand_takes_little_room() {
        let bytes = bytes_of(work_off);
        assert!(bytes <= 5_000, "{bytes} bytes");
    }
}
