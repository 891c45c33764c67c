//! One group of events with the broker: each has its own result, and a late one holds up no other.

use std::collections::BTreeMap;
use std::future::ready;
use std::pin::pin;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use tokio::time::sleep;

use super::Publisher;
use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::events::{OutcomeEvent, PublishResults};
use crate::outcomes::timing::CONFIRM_TIMEOUT;
use crate::queue::message::outcome_event_json;
use crate::queue::{Destination, OutgoingMessage, Properties, QueueError};
use crate::telemetry::spans;

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
    /// To be published again: the broker was unavailable or had no exchange.
    Retry,
}

/// Result of a group.
#[derive(Default)]
pub struct GroupResult<'p> {
    pub results: PublishResults,
    /// Events to publish again.
    pub retries: Vec<OutcomeEvent>,
    /// Results of the events with late confirms, as they come; `None`: there are none.
    pub late: Option<BoxStream<'p, EventResult>>,
}

pub async fn publish_group(publisher: &Publisher, events: Vec<OutcomeEvent>) -> GroupResult<'_> {
    let mut group = GroupResult::default();
    if events.is_empty() {
        return group;
    }
    let Some(queue) = &publisher.queue else {
        group.results.published = events.iter().map(|event| event.sequence).collect();
        return group;
    };
    let mut failures = PublishFailures::default();
    let mut publishing = queue.publish_all(events.iter().map(message).collect());
    let mut open: BTreeMap<usize, OutcomeEvent> = events.into_iter().enumerate().collect();
    let mut late = pin!(sleep(CONFIRM_TIMEOUT));
    while !open.is_empty() {
        let published = tokio::select! {
            published = publishing.next() => published,
            () = &mut late => break,
        };
        let Some((place, published)) = published else {
            group.retries.extend(std::mem::take(&mut open).into_values());
            break;
        };
        let Some(event) = open.remove(&place) else { continue };
        match failures.record(&event.provider, published) {
            EventStatus::Published => group.results.published.push(event.sequence),
            EventStatus::Rejected => group.results.rejected.push(event.sequence),
            EventStatus::Retry => group.retries.push(event),
        }
    }
    faults::crash(CrashPoint::AfterEvent);
    failures.log(open.len());
    if !open.is_empty() {
        group.results.unconfirmed = open.values().map(|event| event.sequence).collect();
        let late = publishing.filter_map(move |(place, published)| ready(late_result(&open, place, published)));
        group.late = Some(late.boxed());
    }
    // Declared once for all of them: a deleted exchange exists again before they are published again.
    if let Some(provider) = failures.unroutable
        && let Err(error) = queue.declare(std::slice::from_ref(&provider)).await
    {
        tracing::warn!(%error, "failed to declare the exchange of outcome events again");
    }
    group
}

/// The result of an event whose confirm was late.
fn late_result(
    late: &BTreeMap<usize, OutcomeEvent>,
    place: usize,
    published: Result<(), QueueError>,
) -> Option<EventResult> {
    let event = late.get(&place)?;
    let status = PublishFailures::default().record(&event.provider, published);
    Some(EventResult { sequence: event.sequence, status })
}

/// Failures of a group.
#[derive(Default)]
struct PublishFailures {
    retries: usize,
    rejected: usize,
    first_error: Option<QueueError>,
    unroutable: Option<ProviderName>,
}

impl PublishFailures {
    fn record(&mut self, provider: &ProviderName, published: Result<(), QueueError>) -> EventStatus {
        let Err(error) = published else { return EventStatus::Published };
        let status = match &error {
            QueueError::Rejected(_) | QueueError::Refused(_) => EventStatus::Rejected,
            QueueError::Unroutable(_) => {
                self.unroutable = Some(provider.clone());
                EventStatus::Retry
            }
            QueueError::Unavailable(_) | QueueError::NotConfirmed(_) => EventStatus::Retry,
        };
        match status {
            EventStatus::Rejected => self.rejected += 1,
            EventStatus::Published | EventStatus::Retry => self.retries += 1,
        }
        self.first_error.get_or_insert(error);
        status
    }

    fn log(&self, late: usize) {
        let left = self.retries;
        let rejected = self.rejected;
        match &self.first_error {
            Some(error) => tracing::warn!(%error, left, rejected, late, "outcome events not published, retrying"),
            None if late > 0 => tracing::warn!(late, "confirms of outcome events are late; waiting for them"),
            None => {}
        }
    }
}

fn message(event: &OutcomeEvent) -> OutgoingMessage {
    let properties = Properties {
        message_id: Some(event.event_id.clone()),
        headers: spans::trace_headers(&event.id),
        ..Properties::default()
    };
    let destination = Destination::Outcomes { provider: event.provider.clone(), state: event.state.name() };
    OutgoingMessage { destination, body: Bytes::from(outcome_event_json(event)), properties }
}
