//! Publishing of one batch of outcome events: each event has its own result, and a late one holds up no other.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use tokio::time::sleep;

use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::OutcomeEvent;
use crate::queue::message::outcome_event_json;
use crate::queue::{Destination, OutgoingMessage, Properties, QueueError};
use crate::worker::WorkerContext;

/// A confirm that takes longer is late.
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// Result of one event.
pub struct EventResult {
    pub sequence: i64,
    pub status: EventStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventStatus {
    Published,
    /// Rejected by a queue that is bound to the exchange; others may have it.
    Rejected,
    /// Publish again with a later batch: the broker was unavailable or had no exchange.
    Retry,
}

/// Result of a batch.
#[derive(Default)]
pub struct BatchResult<'w> {
    pub results: Vec<EventResult>,
    /// Some events must be published again.
    pub has_retries: bool,
    /// Results of the events with late confirms, as they come; `None`: there are none.
    pub late: Option<BoxStream<'w, EventResult>>,
    /// Sequences of these events.
    pub late_sequences: BTreeSet<i64>,
}

pub async fn publish_batch(worker: &WorkerContext, events: Vec<OutcomeEvent>) -> BatchResult<'_> {
    let mut sent = BatchResult::default();
    if events.is_empty() {
        return sent;
    }
    let mut failures = PublishFailures::default();
    sent.late_sequences = events.iter().map(|event| event.sequence).collect();
    let mut publishing = worker.backends.queue.publish_all(events.iter().map(message).collect());
    let mut late = pin!(sleep(CONFIRM_TIMEOUT));
    loop {
        tokio::select! {
            published = publishing.next() => match published {
                Some((place, published)) => {
                    sent.late_sequences.remove(&events[place].sequence);
                    sent.results.push(failures.record(&events[place], published));
                }
                // Without a result, the lease of an event ends, and it is published again.
                None => {
                    sent.late_sequences.clear();
                    break;
                }
            },
            () = &mut late => break,
        }
    }
    if !sent.late_sequences.is_empty() {
        let late =
            publishing.map(move |(place, published)| PublishFailures::default().record(&events[place], published));
        sent.late = Some(late.boxed());
    }
    faults::crash(CrashPoint::AfterEvent);
    failures.log(&sent);
    sent.has_retries = failures.retries > 0;
    // Declared once for all of them: a deleted exchange exists again before they are published again.
    if let Some(provider) = failures.unroutable
        && let Err(error) = worker.backends.queue.declare(std::slice::from_ref(&provider)).await
    {
        tracing::warn!(%error, "failed to declare the exchange of outcome events again");
    }
    sent
}

/// Failures of a batch.
#[derive(Default)]
struct PublishFailures {
    retries: usize,
    rejected: usize,
    first_error: Option<QueueError>,
    unroutable: Option<ProviderName>,
}

impl PublishFailures {
    fn record(&mut self, event: &OutcomeEvent, published: Result<(), QueueError>) -> EventResult {
        let end = match published {
            Ok(()) => EventStatus::Published,
            Err(error) => {
                let end = match &error {
                    QueueError::Rejected(_) | QueueError::Refused(_) => {
                        self.rejected += 1;
                        EventStatus::Rejected
                    }
                    QueueError::Unroutable(_) => {
                        self.unroutable = Some(event.provider.clone());
                        self.retries += 1;
                        EventStatus::Retry
                    }
                    QueueError::Unavailable(_) | QueueError::NotConfirmed(_) => {
                        self.retries += 1;
                        EventStatus::Retry
                    }
                };
                self.first_error.get_or_insert(error);
                end
            }
        };
        EventResult { sequence: event.sequence, status: end }
    }

    fn log(&self, sent: &BatchResult<'_>) {
        let left = self.retries;
        let rejected = self.rejected;
        let late = sent.late_sequences.len();
        match &self.first_error {
            Some(error) => tracing::warn!(%error, left, rejected, late, "outcome events not published, retrying"),
            None if late > 0 => tracing::warn!(late, "confirms of outcome events are late; waiting for them"),
            None => {}
        }
    }
}

fn message(event: &OutcomeEvent) -> OutgoingMessage {
    let properties = Properties {
        message_id: Some(event.id.clone()),
        content_type: Some("application/json".to_owned()),
        headers: crate::telemetry::spans::trace_headers(&event.id),
        ..Properties::default()
    };
    let destination = Destination::Outcomes { provider: event.provider.clone(), state: event.state.name() };
    OutgoingMessage { destination, body: Bytes::from(outcome_event_json(event)), properties }
}
