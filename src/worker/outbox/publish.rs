//! One batch of outcome events, published: each is judged by itself, and one that is late holds up no other.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};

use crate::domain::provider::ProviderName;
use crate::faults::{self, Point};
use crate::ledger::OutcomeEvent;
use crate::queue::message::outcome_event_json;
use crate::queue::{Destination, Outgoing, Properties, QueueError};
use crate::worker::Worker;

/// A confirm that takes longer is late.
pub const IN_TIME: Duration = Duration::from_secs(5);

/// What became of one event.
pub struct Done {
    pub sequence: i64,
    pub end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Published,
    /// By a queue that is bound to the exchange; others may have it.
    Rejected,
    /// For the next taking, because the broker is away or had no exchange.
    Left,
}

/// What became of a batch.
#[derive(Default)]
pub struct Sent<'w> {
    pub done: Vec<Done>,
    /// Some of it is left.
    pub left: bool,
    /// By sequence.
    pub late: Vec<(i64, BoxFuture<'w, Done>)>,
}

pub async fn publish_batch(worker: &Worker, events: Vec<OutcomeEvent>) -> Sent<'_> {
    let mut sent = Sent::default();
    if events.is_empty() {
        return sent;
    }
    let mut tally = Tally::default();
    let mut publishing: FuturesUnordered<_> = events.into_iter().map(|event| Publishing::new(worker, event)).collect();
    let deadline = Instant::now() + IN_TIME;
    loop {
        tokio::select! {
            published = publishing.next() => match published {
                Some((event, published)) => sent.done.push(tally.judge(&event, published)),
                None => break,
            },
            () = sleep_until(deadline) => break,
        }
    }
    sent.late = publishing.into_iter().map(|publishing| (publishing.sequence, publishing.judged().boxed())).collect();
    faults::crash(Point::AfterEvent);
    tally.tell(&sent);
    sent.left = tally.left > 0;
    // Once for all of them: an exchange that somebody deleted is back before they are published again.
    if let Some(provider) = tally.unroutable
        && let Err(error) = worker.engines.queue.declare(std::slice::from_ref(&provider)).await
    {
        tracing::warn!(%error, "the exchange of outcome events is not declared again");
    }
    sent
}

/// One event that is being published.
struct Publishing<'w> {
    sequence: i64,
    publishing: BoxFuture<'w, (OutcomeEvent, Result<(), QueueError>)>,
}

impl<'w> Publishing<'w> {
    fn new(worker: &'w Worker, event: OutcomeEvent) -> Self {
        Self { sequence: event.sequence, publishing: publish(worker, event).boxed() }
    }

    async fn judged(self) -> Done {
        let (event, published) = self.publishing.await;
        Tally::default().judge(&event, published)
    }
}

impl Future for Publishing<'_> {
    type Output = (OutcomeEvent, Result<(), QueueError>);

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        self.publishing.poll_unpin(context)
    }
}

/// What went wrong in a batch.
#[derive(Default)]
struct Tally {
    left: usize,
    rejected: usize,
    first: Option<QueueError>,
    unroutable: Option<ProviderName>,
}

impl Tally {
    fn judge(&mut self, event: &OutcomeEvent, published: Result<(), QueueError>) -> Done {
        let end = match published {
            Ok(()) => End::Published,
            Err(error) => {
                let end = match &error {
                    QueueError::Rejected(_) | QueueError::Refused(_) => {
                        self.rejected += 1;
                        End::Rejected
                    }
                    QueueError::Unroutable(_) => {
                        self.unroutable = Some(event.provider.clone());
                        self.left += 1;
                        End::Left
                    }
                    QueueError::Away(_) | QueueError::NotConfirmed(_) => {
                        self.left += 1;
                        End::Left
                    }
                };
                self.first.get_or_insert(error);
                end
            }
        };
        Done { sequence: event.sequence, end }
    }

    fn tell(&self, sent: &Sent<'_>) {
        let (left, rejected, late) = (self.left, self.rejected, sent.late.len());
        match &self.first {
            Some(error) => tracing::warn!(%error, left, rejected, late, "outcome events not published, will try again"),
            None if late > 0 => tracing::warn!(late, "confirms of outcome events are late; waiting for them"),
            None => {}
        }
    }
}

async fn publish(worker: &Worker, event: OutcomeEvent) -> (OutcomeEvent, Result<(), QueueError>) {
    let properties = Properties {
        message_id: Some(event.id.clone()),
        content_type: Some("application/json".to_owned()),
        headers: crate::telemetry::spans::carried(&event.id),
        ..Properties::default()
    };
    let destination = Destination::Outcomes { provider: event.provider.clone(), state: event.state.name() };
    let body = Bytes::from(outcome_event_json(&event));
    let published = worker.engines.queue.publish(Outgoing { destination, body, properties }).await;
    (event, published)
}
