//! Dead letters: messages that the broker dead-lettered are judged again, by the ledger.
//!
//! Each is published again a few times, with a fresh count of deliveries. After that its job goes to manual review, or
//! the message becomes a rejected one. See `docs/decisions/0004-judge-dead-letters-by-the-ledger.md`.

use super::SweepError;
use crate::domain::job::{InvalidMessage, InvalidReason, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::FencedWrite;
use crate::ledger::upkeep::MessageState;
use crate::queue::{DeadLetter, DeathCause, Destination, OutgoingMessage, Receipt, headers};
use crate::worker::WorkerContext;
use crate::worker::decode::{DecodedMessage, NEWER_VERSION_DELAY, decode_delivery, wait_for_newer_worker};
use crate::worker::publish::{MessageCopy, publish_with_timeout};
use crate::worker::rejections::{overflowing, rejected_message};
use crate::worker::settings_sync::LoadedSettings;

/// How often a message is published again. Each round allows a thousand deliveries, so a message is not given to review
/// because of a single outage.
pub const REPUBLISH_MAX: u32 = 3;
/// Most dead letters that one sweep judges.
const BATCH: usize = 100;
/// Most dead letters of a sweep that cannot be judged yet: each keeps a channel open until the sweep ends.
const DEFERRED_MAX: usize = 16;
const INVALID_MESSAGE: &str = "dead-lettered message rejected: not a valid job";
const DELIVERY_LIMIT_REASON: &str = "its message reached the broker's delivery limit repeatedly; it may crash workers";

/// What to do with a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DeadLetterAction {
    /// Nothing is left to do.
    Done,
    /// Publish it to its lane again, as this round.
    Republish(u32),
    /// The ledger has its job, and no worker has its lane: its provider has no row.
    NoProvider,
    /// Move its job to manual review.
    Review,
    /// Reject it: it can never be a job.
    Invalid(InvalidMessage),
}

/// Decides about a decoded message, by its state in the ledger, how it became a dead letter, how often it was published
/// again before, and whether its provider has a row.
fn decide(state: MessageState, cause: DeathCause, rounds: u32, has_row: bool) -> DeadLetterAction {
    match state {
        MessageState::Open if cause == DeathCause::NoQueue && !has_row => DeadLetterAction::NoProvider,
        MessageState::Open | MessageState::NotRecorded if cause == DeathCause::NoQueue => {
            DeadLetterAction::Republish(rounds)
        }
        MessageState::Finished | MessageState::Superseded => DeadLetterAction::Done,
        MessageState::Conflict => DeadLetterAction::Invalid(InvalidMessage::new(
            InvalidReason::Conflict,
            "id: recorded before with other content",
        )),
        MessageState::Open | MessageState::NotRecorded if rounds < REPUBLISH_MAX => {
            DeadLetterAction::Republish(rounds + 1)
        }
        MessageState::Open => DeadLetterAction::Review,
        MessageState::NotRecorded => {
            DeadLetterAction::Invalid(InvalidMessage::new(InvalidReason::Undeliverable, DELIVERY_LIMIT_REASON))
        }
    }
}

/// Number of republishes. A header that cannot be read was not written by a worker; it counts as 0.
fn republish_count(letter: &DeadLetter) -> u32 {
    letter.properties.headers.get(headers::DEAD_ROUNDS).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Judges the dead letters that are there. Those that cannot be judged yet are kept until the end, because a requeued
/// letter would be the next one again. Then they are requeued for another sweep.
pub async fn process_all(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let mut not_yet = Vec::new();
    let judged = process_each(worker, known, &mut not_yet).await;
    for receipt in not_yet {
        if let Err(error) = receipt.requeue().await {
            tracing::debug!(%error, "dead letter not requeued; the broker requeues it");
        }
    }
    judged
}

/// Judges one letter after the other; an error of one holds up no other.
async fn process_each(
    worker: &WorkerContext,
    known: &LoadedSettings,
    not_yet: &mut Vec<Box<dyn Receipt>>,
) -> Result<(), SweepError> {
    let mut judged = Ok(());
    for _ in 0..BATCH {
        if not_yet.len() >= DEFERRED_MAX {
            break;
        }
        let Some(letter) = worker.backends.queue.take_dead_letter().await? else { break };
        match process(worker, known, &letter).await {
            Ok(true) => letter.receipt.ack().await?,
            Ok(false) => not_yet.push(letter.receipt),
            Err(error) => {
                not_yet.push(letter.receipt);
                judged = judged.and(Err(error));
            }
        }
    }
    judged
}

/// Whether the letter is finished.
async fn process(worker: &WorkerContext, known: &LoadedSettings, letter: &DeadLetter) -> Result<bool, SweepError> {
    let Some(lane) = &letter.lane else {
        let unknown = "the broker does not say from which lane it was dead-lettered";
        return reject(worker, letter, &InvalidMessage::new(InvalidReason::Undeliverable, unknown), None).await;
    };
    let rounds = republish_count(letter);
    // The lane's row rules are applied by the lane, when the message returns to it.
    let decoded = match decode_delivery(worker, &letter.body, lane, None).await? {
        DecodedMessage::Job(decoded) => decoded,
        DecodedMessage::Invalid { invalid, claimed_id } => return reject(worker, letter, &invalid, claimed_id).await,
        DecodedMessage::NewerVersion(version) => {
            return delay_newer_version(worker, known, letter, lane, version).await;
        }
    };
    let id = &decoded.job.id;
    let state = {
        let copy = headers::copy_number(&letter.properties);
        worker.backends.ledger.message_state(&decoded.job, decoded.hash, copy).await?
    };
    match decide(state, letter.cause, rounds, known.providers.contains_key(lane.as_str())) {
        DeadLetterAction::Done => Ok(true),
        DeadLetterAction::NoProvider => {
            tracing::warn!(job = %id, provider = %lane, "provider has no row; the job waits in the ledger for one");
            Ok(true)
        }
        DeadLetterAction::Republish(round) => {
            match letter.cause {
                DeathCause::DeliveryLimit => {
                    tracing::error!(
                        job = %id,
                        provider = %lane,
                        round,
                        "message reached the broker's delivery limit; publishing it again"
                    );
                }
                DeathCause::NoQueue => {
                    tracing::warn!(job = %id, provider = %lane, "delayed message was unroutable; publishing it again");
                }
            }
            republish(worker, letter, lane, round).await
        }
        DeadLetterAction::Review => {
            tracing::error!(job = %id, provider = %lane, DELIVERY_LIMIT_REASON);
            let written = worker.backends.ledger.move_to_review(id, DELIVERY_LIMIT_REASON).await?;
            worker.outbox.notify_unleased();
            // If a worker has it active or has just finished it, the next sweep judges the letter again.
            Ok(written == FencedWrite::Applied)
        }
        DeadLetterAction::Invalid(invalid) => reject(worker, letter, &invalid, Some(id.clone())).await,
    }
}

/// Delays the message as a lane does, with the same header.
async fn delay_newer_version(
    worker: &WorkerContext,
    known: &LoadedSettings,
    letter: &DeadLetter,
    lane: &ProviderName,
    version: u64,
) -> Result<bool, SweepError> {
    let max_age = known.providers.get(lane.as_str()).map(|row| row.max_age);
    let properties = match wait_for_newer_worker(worker, lane, &letter.properties, version, max_age) {
        Ok(properties) => properties,
        Err(invalid) => return reject(worker, letter, &invalid, None).await,
    };
    let destination = Destination::Delay { provider: lane.clone(), step: NEWER_VERSION_DELAY };
    publish(worker, lane, OutgoingMessage { destination, body: letter.body.clone(), properties }).await
}

async fn republish(
    worker: &WorkerContext,
    letter: &DeadLetter,
    lane: &ProviderName,
    round: u32,
) -> Result<bool, SweepError> {
    let mut properties = letter.properties.clone();
    if round > 0 {
        properties.headers.insert(headers::DEAD_ROUNDS.to_owned(), round.to_string());
    }
    let destination = Destination::Lane(lane.clone());
    publish(worker, lane, OutgoingMessage { destination, body: letter.body.clone(), properties }).await
}

async fn publish(worker: &WorkerContext, lane: &ProviderName, outgoing: OutgoingMessage) -> Result<bool, SweepError> {
    if worker.unconfirmed.blocks(lane) {
        return Ok(false);
    }
    publish_with_timeout(worker, lane, outgoing).await?;
    Ok(true)
}

async fn reject(
    worker: &WorkerContext,
    letter: &DeadLetter,
    invalid: &InvalidMessage,
    id: Option<JobId>,
) -> Result<bool, SweepError> {
    let (reason, lane) = (invalid.reason.code(), letter.lane.as_ref().map_or("", ProviderName::as_str));
    if worker.log_throttle.admits(lane, INVALID_MESSAGE, reason) {
        tracing::error!(provider = lane, reason, detail = invalid.detail, "{INVALID_MESSAGE}");
    }
    let Some(provider) = letter.lane.clone().or_else(|| ProviderName::new("dead").ok()) else { return Ok(false) };
    let copy = MessageCopy { provider, body: letter.body.clone(), properties: letter.properties.clone() };
    let ledger = &worker.backends.ledger;
    match worker.rejected_room.is_full(ledger).await? {
        true => publish_with_timeout(worker, &copy.provider, overflowing(&copy, invalid)).await?,
        false => ledger.reject(&rejected_message(&copy, invalid, id)).await?,
    }
    if let Some(lane) = letter.lane.as_ref().and_then(|lane| worker.meter.find_lane(lane)) {
        lane.record_rejected(reason);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_recorded_state_has_its_action() {
        let invalid = |action: &DeadLetterAction| match action {
            DeadLetterAction::Invalid(invalid) => Some(invalid.reason.code()),
            _ => None,
        };
        for rounds in 0..=REPUBLISH_MAX + 1 {
            let last = rounds >= REPUBLISH_MAX;
            let limited = |state, has_row| decide(state, DeathCause::DeliveryLimit, rounds, has_row);
            for has_row in [true, false] {
                assert_eq!(limited(MessageState::Finished, has_row), DeadLetterAction::Done);
                assert_eq!(limited(MessageState::Superseded, has_row), DeadLetterAction::Done);
                assert_eq!(invalid(&limited(MessageState::Conflict, has_row)), Some("conflict"));
                let open = if last { DeadLetterAction::Review } else { DeadLetterAction::Republish(rounds + 1) };
                assert_eq!(limited(MessageState::Open, has_row), open);
            }
            match limited(MessageState::NotRecorded, true) {
                DeadLetterAction::Republish(round) => assert!(!last && round == rounds + 1),
                other => assert_eq!((last, invalid(&other)), (true, Some("undeliverable"))),
            }
            // A lane without a queue is no fault of the message, so it counts as no round.
            let unrouted = |state, has_row| decide(state, DeathCause::NoQueue, rounds, has_row);
            assert_eq!(unrouted(MessageState::Open, true), DeadLetterAction::Republish(rounds));
            assert_eq!(unrouted(MessageState::NotRecorded, true), DeadLetterAction::Republish(rounds));
            assert_eq!(unrouted(MessageState::Open, false), DeadLetterAction::NoProvider);
            assert_eq!(unrouted(MessageState::Finished, false), DeadLetterAction::Done);
        }
    }
}
