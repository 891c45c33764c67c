//! Outcome events on their way out: committed with the outcome, published from here, at least once.
//!
//! Refuses to hold up a payment: an event that cannot be published stays in the ledger until it can.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::sleep;

use super::Worker;
use crate::faults::{self, Point};
use crate::ledger::{LedgerError, OutcomeEvent};
use crate::queue::message::outcome_event_json;
use crate::queue::{Destination, Outgoing, Properties, QueueError};

const BATCH: u32 = 100;
/// How long a batch is ours: longer than publishing takes, short enough that a dead worker's events are not late.
const TAKEN_FOR: Duration = Duration::from_secs(10);
/// Other workers' leftovers and missed wake-ups are looked for this often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const AWAY_PAUSE: Duration = Duration::from_secs(1);

/// Publishes events until the worker stops, then whatever is left at once.
pub async fn run(worker: Worker) {
    while !worker.stop.is_cancelled() {
        match publish_some(&worker).await {
            Some(published) if published == BATCH as usize => {}
            Some(_) => tokio::select! {
                () = worker.outbox.notified() => {}
                () = sleep(LOOK_EVERY) => {}
                () = worker.stop.cancelled() => {}
            },
            None => tokio::select! {
                () = sleep(AWAY_PAUSE) => {}
                () = worker.stop.cancelled() => {}
            },
        }
    }
}

/// Publishes one batch; `None` when an engine is away.
pub async fn publish_some(worker: &Worker) -> Option<usize> {
    let events = match worker.engines.ledger.take_outcomes(BATCH, TAKEN_FOR).await {
        Ok(events) => events,
        Err(error) => {
            tracing::debug!(%error, "outcome events cannot be read");
            return None;
        }
    };
    let results = join_all(events.iter().map(|event| publish(worker, event))).await;
    if !results.is_empty() {
        faults::crash(Point::AfterEvent);
    }
    let published: Vec<i64> =
        events.iter().zip(&results).filter(|(_, result)| result.is_ok()).map(|(event, _)| event.sequence).collect();
    if let Some(Err(error)) = results.iter().find(|result| result.is_err()) {
        tracing::warn!(%error, left = events.len() - published.len(), "outcome events not published, will try again");
    }
    let marked: Result<(), LedgerError> = worker.engines.ledger.outcomes_published(&published).await;
    if let Err(error) = &marked {
        tracing::warn!(%error, "published events not marked; they will be published again");
    }
    (marked.is_ok() && published.len() == events.len()).then_some(published.len())
}

async fn publish(worker: &Worker, event: &OutcomeEvent) -> Result<(), QueueError> {
    let properties = Properties {
        message_id: Some(event.id.clone()),
        content_type: Some("application/json".to_owned()),
        headers: crate::telemetry::spans::carried(&event.id),
        ..Properties::default()
    };
    let destination = Destination::Outcomes { provider: event.provider.clone(), state: event.state.name() };
    let body = Bytes::from(outcome_event_json(event));
    worker.engines.queue.publish(Outgoing { destination, body, properties }).await
}
