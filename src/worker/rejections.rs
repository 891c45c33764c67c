//! Rejected messages on their way to the ledger, and the events about them.
//!
//! A message that can never be a job becomes a row, committed before it is acknowledged, and the row is the only copy. If
//! too many rows are open, the message goes to `payments.invalid` with a confirm, and is recorded from there once
//! operators have decided about enough of them. Each row has one event for producers, without content, published at least
//! once.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::WorkerContext;
use super::publish::{MessageCopy, publish_with_timeout};
use crate::domain::job::{BODY_BYTES_MAX, InvalidMessage, InvalidReason, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::rejected::{RejectedEvent, RejectedMessage, StoredMessage, StoredSize};
use crate::queue::message::{REJECTED_EVENT, body_head, rejected_event_json, stored_message};
use crate::queue::{Destination, InvalidLetter, OutgoingMessage, Properties, QueueError, headers};

/// Most rows, and most bytes of their bodies; for the open rejected messages, and for the held ones.
const STORED_MAX: StoredSize = StoredSize { messages: 100_000, bytes: 1 << 30 };
/// Below this part of both, messages are recorded again.
const ROOM_PERCENT: u64 = 95;
/// Age of a count of rows.
const COUNT_AGE_MAX: Duration = Duration::from_secs(5);
/// Most messages of `payments.invalid` that one sweep records.
const RECORDED_MAX: usize = 500;
/// Events that are published at once, and how often in one sweep.
const EVENTS_AT_ONCE: u32 = 50;
const EVENT_ROUNDS_MAX: u32 = 20;

/// Whether the ledger has room for further messages of one kind.
#[derive(Default)]
pub struct MessageRoom(Mutex<RoomCount>);

#[derive(Default)]
struct RoomCount {
    counted_at: Option<Instant>,
    is_full: bool,
}

impl MessageRoom {
    /// Counts the rows by `size`, at most every few seconds.
    async fn is_full(&self, size: impl Future<Output = Result<StoredSize, LedgerError>>) -> Result<bool, LedgerError> {
        let mut count = self.0.lock().await;
        if count.counted_at.is_none_or(|at| at.elapsed() >= COUNT_AGE_MAX) {
            let size = size.await?;
            *count = RoomCount { counted_at: Some(Instant::now()), is_full: is_full(size, count.is_full) };
        }
        Ok(count.is_full)
    }
}

impl WorkerContext {
    /// Whether too many rejected messages are open.
    pub(super) async fn has_no_room_for_rejected(&self) -> Result<bool, LedgerError> {
        let ledger: &Database = &self.backends.ledger;
        self.rejected_room.is_full(ledger.open_rejected(STORED_MAX.messages, BODY_BYTES_MAX)).await
    }

    /// Whether too many messages of a newer format are held.
    pub(super) async fn has_no_room_for_held(&self) -> Result<bool, LedgerError> {
        self.held_room.is_full(self.backends.ledger.held_size(STORED_MAX.messages)).await
    }
}

/// Full rows have room again only below [`ROOM_PERCENT`] of both bounds.
fn is_full(size: StoredSize, was_full: bool) -> bool {
    let percent = if was_full { ROOM_PERCENT } else { 100 };
    size.messages >= STORED_MAX.messages * percent / 100 || size.bytes >= STORED_MAX.bytes * percent / 100
}

/// The row of a rejected message.
pub fn rejected_message(copy: &MessageCopy, invalid: &InvalidMessage, job_id: Option<JobId>) -> RejectedMessage {
    RejectedMessage {
        lane: copy.provider.clone(),
        job_id: job_id.map(|id| id.as_str().to_owned()),
        reason: invalid.reason.code(),
        detail: invalid.detail.clone(),
        body_sha256: Sha256::digest(&copy.body).into(),
        body_bytes: copy.body.len(),
        head: body_head(&copy.body),
        stored: stored_message(&copy.body, &copy.properties),
    }
}

/// The same message for the queue of those that the ledger has no room for: masked like a row.
pub fn overflowing(copy: &MessageCopy, invalid: &InvalidMessage) -> OutgoingMessage {
    let InvalidMessage { reason, detail } = invalid.clone();
    let StoredMessage { body, properties, is_masked } = stored_message(&copy.body, &copy.properties);
    let mut properties: Properties = serde_json::from_str(&properties).unwrap_or_default();
    if is_masked {
        properties.headers.insert(headers::MASKED.to_owned(), "1".to_owned());
    }
    OutgoingMessage {
        destination: Destination::Invalid { lane: copy.provider.clone(), reason, detail },
        body: body.into(),
        properties,
    }
}

/// Records what is in `payments.invalid`, while there is room.
pub async fn record_overflow(worker: &WorkerContext) -> Result<(), OverflowError> {
    let Some(queue) = &worker.backends.queue else { return Ok(()) };
    let ledger = &worker.backends.ledger;
    for _ in 0..RECORDED_MAX {
        if worker.has_no_room_for_rejected().await? {
            break;
        }
        let Some(InvalidLetter { body, properties, receipt }) = queue.take_invalid().await? else {
            break;
        };
        let Some((lane, invalid)) = rejection_of(&properties) else { break };
        let is_masked = properties.headers.contains_key(headers::MASKED);
        let copy = MessageCopy { provider: lane, body, properties: headers::without_rejection(properties) };
        let mut message = rejected_message(&copy, &invalid, None);
        message.stored.is_masked |= is_masked;
        match ledger.reject(&message).await {
            Ok(()) => receipt.ack().await?,
            Err(error) => {
                receipt.requeue().await?;
                return Err(error.into());
            }
        }
    }
    Ok(())
}

/// Why recording ended early; the next sweep goes on.
#[derive(Debug, thiserror::Error)]
pub enum OverflowError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Queue(#[from] QueueError),
}

/// Lane and reason by the headers; a message that another program put there has none.
fn rejection_of(properties: &Properties) -> Option<(ProviderName, InvalidMessage)> {
    let header = |name: &str| properties.headers.get(name).map(String::as_str);
    let lane = header(headers::LANE).and_then(|lane| ProviderName::new(lane).ok());
    let lane = lane.or_else(|| ProviderName::new("invalid").ok())?;
    let reason = InvalidReason::ALL.into_iter().find(|reason| Some(reason.code()) == header(headers::REASON));
    let detail = header(headers::DETAIL).unwrap_or("another program put it into payments.invalid");
    Some((lane, InvalidMessage::new(reason.unwrap_or(InvalidReason::Undeliverable), detail)))
}

/// Publishes the events about rejected messages that are not published yet. If a queue takes none of a provider's events,
/// those of other providers are published all the same.
pub async fn announce(worker: &WorkerContext) -> Result<(), OverflowError> {
    if worker.backends.queue.is_none() {
        return Ok(());
    }
    let ledger = &worker.backends.ledger;
    let mut rejecting = BTreeMap::new();
    for _ in 0..EVENT_ROUNDS_MAX {
        let left_out: Vec<&str> = rejecting.keys().map(String::as_str).collect();
        let events = ledger.unannounced_rejected(EVENTS_AT_ONCE, &left_out).await?;
        if events.is_empty() {
            break;
        }
        let published = join_all(events.iter().map(|event| publish_event(worker, event))).await;
        let mut done = Vec::new();
        for (event, published) in events.into_iter().zip(published) {
            match published {
                Ok(()) => done.push(event.id),
                Err(error) => drop(rejecting.insert(event.provider, error)),
            }
        }
        if !done.is_empty() {
            ledger.mark_announced(&done).await?;
        }
        if rejecting.values().any(|error| !matches!(error, QueueError::Rejected(_))) {
            break;
        }
    }
    rejecting.into_values().next().map_or(Ok(()), |error| Err(error.into()))
}

async fn publish_event(worker: &WorkerContext, event: &RejectedEvent) -> Result<(), QueueError> {
    let Ok(provider) = ProviderName::new(event.provider.as_str()) else { return Ok(()) };
    let properties = Properties {
        message_id: Some(format!("{REJECTED_EVENT}-{}", event.id)),
        content_type: Some("application/json".to_owned()),
        ..Properties::default()
    };
    let destination = Destination::Outcomes { provider: provider.clone(), state: REJECTED_EVENT };
    let message = OutgoingMessage { destination, body: rejected_event_json(event).into(), properties };
    publish_with_timeout(worker, &provider, message).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_rows_have_room_again_below_95_percent() {
        let gib = 1 << 30;
        for (messages, bytes, was_full, expected) in [
            (99_999, 0, false, false),
            (100_000, 0, false, true),
            (96_000, 0, true, true),
            (94_999, 0, true, false),
            (10, gib - 1, false, false),
            (10, gib, false, true),
            (10, gib - 1, true, true),
            (10, gib / 2, true, false),
        ] {
            assert_eq!(is_full(StoredSize { messages, bytes }, was_full), expected, "{messages} {bytes} {was_full}");
        }
    }

    #[test]
    fn headers_name_lane_and_reason() {
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let known =
            [header(headers::LANE, "acme"), header(headers::REASON, "bad_amount"), header(headers::DETAIL, "amount")];
        let foreign = [header(headers::LANE, "No"), header(headers::REASON, "odd")];
        for (headers, lane, reason) in
            [(known.to_vec(), "acme", "bad_amount"), (foreign.to_vec(), "invalid", "undeliverable")]
        {
            let properties = Properties { headers: headers.into_iter().collect(), ..Properties::default() };
            let (found, invalid) = rejection_of(&properties).unwrap();
            assert_eq!((found.as_str(), invalid.reason.code()), (lane, reason));
        }
    }
}
