//! Dead letters: messages that the broker gave up before a worker acknowledged them.
//!
//! If the ledger has a message's job, the message is acknowledged, because the ledger alone brings the job back. Any
//! other message becomes a rejected one: it may crash workers, so none is published again before an operator has seen
//! it. See `docs/decisions/0004-judge-dead-letters-by-the-ledger.md`.

use super::SweepError;
use crate::domain::job::{InvalidMessage, InvalidReason, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::rejected::RecordedContent;
use crate::queue::{DeadLetter, DeathCause, LANE_DELIVERY_LIMIT, QueueError};
use crate::worker::WorkerContext;
use crate::worker::decode::{DecodedMessage, decode_delivery};
use crate::worker::held::hold;
use crate::worker::publish::{MessageCopy, publish_with_timeout};
use crate::worker::rejections::{overflowing, rejected_message};

/// Most dead letters that one sweep judges.
const BATCH: usize = 100;
const INVALID_MESSAGE: &str = "dead letter rejected";
const NO_LANE: &str = "the broker does not say from which lane it was dead-lettered";

/// Why a message without a job is rejected.
fn undeliverable(cause: DeathCause) -> InvalidMessage {
    let why = match cause {
        DeathCause::DeliveryLimit => {
            format!("the broker gave it up after {LANE_DELIVERY_LIMIT} deliveries, so it may crash workers")
        }
        DeathCause::Expired => {
            "the broker gave it up, because its expiration passed before a worker took it".to_owned()
        }
    };
    InvalidMessage::new(InvalidReason::Undeliverable, format!("{why}; inspect it, then publish it again or discard it"))
}

/// Judges the dead letters that are there. After an error, the next sweep goes on.
pub async fn process_all(worker: &WorkerContext) -> Result<(), SweepError> {
    let Some(queue) = &worker.backends.queue else { return Ok(()) };
    for _ in 0..BATCH {
        let Some(letter) = queue.take_dead_letter().await? else { break };
        match process(worker, &letter).await {
            Ok(()) => letter.receipt.ack().await?,
            Err(error) => {
                letter.receipt.requeue().await?;
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Keeps what the ledger needs of a letter. After that, it may be acknowledged.
async fn process(worker: &WorkerContext, letter: &DeadLetter) -> Result<(), SweepError> {
    let Some(lane) = &letter.lane else {
        return reject(worker, letter, &InvalidMessage::new(InvalidReason::Undeliverable, NO_LANE), None).await;
    };
    // The lane's row rules are applied by the lane, when an operator publishes the message again.
    let decoded = match decode_delivery(worker, &letter.body, lane, None).await? {
        DecodedMessage::Job(decoded) => decoded,
        DecodedMessage::Invalid { invalid, claimed_id } => return reject(worker, letter, &invalid, claimed_id).await,
        DecodedMessage::NewerVersion(version) => {
            return match hold(worker, &message_of(letter, lane.clone()), version).await? {
                Some(invalid) => reject(worker, letter, &invalid, None).await,
                None => Ok(()),
            };
        }
    };
    let invalid = match worker.backends.ledger.recorded_content(&decoded.job, decoded.hash).await? {
        RecordedContent::Same => return Ok(()),
        RecordedContent::Other => {
            InvalidMessage::new(InvalidReason::Conflict, "id: recorded before with other content")
        }
        RecordedContent::Nothing => undeliverable(letter.cause),
    };
    reject(worker, letter, &invalid, Some(decoded.job.id)).await
}

fn message_of(letter: &DeadLetter, provider: ProviderName) -> MessageCopy {
    MessageCopy { provider, body: letter.body.clone(), properties: letter.properties.clone() }
}

async fn reject(
    worker: &WorkerContext,
    letter: &DeadLetter,
    invalid: &InvalidMessage,
    id: Option<JobId>,
) -> Result<(), SweepError> {
    let (reason, lane) = (invalid.reason.code(), letter.lane.as_ref().map_or("", ProviderName::as_str));
    if worker.log_throttle.admits(lane, INVALID_MESSAGE, reason) {
        tracing::error!(provider = lane, reason, detail = invalid.detail, "{INVALID_MESSAGE}");
    }
    let Some(provider) = letter.lane.clone().or_else(|| ProviderName::new("dead").ok()) else {
        return Err(QueueError::Refused(NO_LANE.to_owned()).into());
    };
    let copy = message_of(letter, provider);
    match worker.has_no_room_for_rejected().await? {
        true => publish_with_timeout(worker, &copy.provider, overflowing(&copy, invalid)).await?,
        false => worker.backends.ledger.reject(&rejected_message(&copy, invalid, id)).await?,
    }
    if let Some(lane) = letter.lane.as_ref().and_then(|lane| worker.meter.find_lane(lane)) {
        lane.record_rejected(reason);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detail_names_cause_and_next_step() {
        let causes = [
            (DeathCause::DeliveryLimit, "after 1000 deliveries, so it may crash workers"),
            (DeathCause::Expired, "its expiration passed"),
        ];
        for (cause, words) in causes {
            let invalid = undeliverable(cause);
            assert_eq!(invalid.reason, InvalidReason::Undeliverable);
            assert!(invalid.detail.contains(words) && invalid.detail.ends_with("discard it"), "{}", invalid.detail);
        }
    }
}
