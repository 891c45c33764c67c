//! Outcome events on their way out: committed with the outcome, published from here, at least once.
//!
//! Refuses to hold up a payment: an event that cannot be published stays in the ledger until it can. Refuses to ask the
//! ledger for what this process has just written: that is taken with its writing and handed over. One that comes alone
//! goes at once, those that come in crowds go together, and while one batch is with the broker the next is gathered and
//! the last is marked.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _, OptionFuture, join_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Worker;
use crate::faults::{self, Point};
use crate::ledger::OutcomeEvent;
use crate::queue::message::outcome_event_json;
use crate::queue::{Destination, Outgoing, Properties, QueueError};

/// Most events of one batch.
const BATCH: u32 = 500;
/// Batches that may be with the broker at once.
const BATCHES: usize = 3;
/// How long a batch is ours: longer than publishing takes, short enough that a dead worker's events are not late.
pub const TAKEN_FOR: Duration = Duration::from_secs(10);
/// Most events that are kept here; beyond them the ledger's are enough.
const HANDED_MAX: usize = 10_000;
/// Least time from one taking to the next, so that two statements do for all that settles meanwhile.
const GATHER: Duration = Duration::from_millis(20);
/// Other workers' leftovers and missed wake-ups are looked for this often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const AWAY_PAUSE: Duration = Duration::from_secs(1);

/// Where those who settle jobs leave word.
#[derive(Default)]
pub struct Outbox {
    /// Taken for [`TAKEN_FOR`] as they were written, shortly before the instant beside them.
    handed: Mutex<VecDeque<(Instant, OutcomeEvent)>>,
    came: Notify,
    left: Notify,
}

impl Outbox {
    /// An event that the caller has written and taken for [`TAKEN_FOR`].
    pub fn hand_over(&self, event: OutcomeEvent) {
        let mut handed = self.handed();
        if handed.len() < HANDED_MAX {
            handed.push_back((Instant::now(), event));
            drop(handed);
            self.came.notify_one();
        }
    }

    /// There are events in the ledger that nobody has taken.
    pub fn left(&self) {
        self.left.notify_one();
    }

    /// The next batch. Those that others may have taken meanwhile are theirs.
    fn gather(&self) -> Vec<OutcomeEvent> {
        let mut handed = self.handed();
        let batch = handed.len().min(BATCH as usize);
        let ours = handed.drain(..batch).filter(|(at, _)| at.elapsed() < TAKEN_FOR / 2);
        ours.map(|(_, event)| event).collect()
    }

    fn is_empty(&self) -> bool {
        self.handed().is_empty()
    }

    fn handed(&self) -> MutexGuard<'_, VecDeque<(Instant, OutcomeEvent)>> {
        // Whole after every statement.
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes events until no job is in hand any more, then finishes what it has taken: what a drain settles leaves at once.
pub async fn run(worker: Worker, drained: CancellationToken) {
    let mut publishing: FuturesUnordered<BoxFuture<'_, Sent>> = FuturesUnordered::new();
    let mut taking: Option<BoxFuture<'_, Option<Vec<OutcomeEvent>>>> = None;
    let mut marking: Option<BoxFuture<'_, bool>> = None;
    // Published, and not marked yet.
    let mut published = Vec::new();
    let (mut not_before, mut look_at, mut gather_at) = (Instant::now(), Instant::now(), Instant::now());
    let mut asked = true;
    loop {
        if marking.is_none() && !published.is_empty() {
            marking = Some(mark(&worker, std::mem::take(&mut published)).boxed());
        }
        let stopping = drained.is_cancelled();
        let may_publish = publishing.len() < BATCHES;
        if may_publish && Instant::now() >= gather_at {
            let events = worker.outbox.gather();
            if !events.is_empty() {
                gather_at = Instant::now() + GATHER;
                publishing.push(publish_batch(&worker, events).boxed());
            }
        }
        let handed = !worker.outbox.is_empty();
        if stopping && !handed && taking.is_none() && marking.is_none() && publishing.is_empty() {
            return;
        }
        let may_take = !stopping && taking.is_none() && publishing.len() < BATCHES;
        if may_take && asked && Instant::now() >= not_before {
            (asked, not_before, look_at) = (false, Instant::now() + GATHER, Instant::now() + LOOK_EVERY);
            taking = Some(take(&worker).boxed());
        }
        let next = if asked { not_before } else { look_at };
        tokio::select! {
            Some(taken) = OptionFuture::from(taking.as_mut()) => {
                taking = None;
                match taken {
                    Some(events) if !events.is_empty() => {
                        asked |= events.len() == BATCH as usize;
                        publishing.push(publish_batch(&worker, events).boxed());
                    }
                    Some(_) => {}
                    None => (asked, not_before) = (true, Instant::now() + AWAY_PAUSE),
                }
            }
            Some(sent) = publishing.next() => {
                if !sent.all {
                    (asked, not_before) = (true, Instant::now() + AWAY_PAUSE);
                }
                published.extend(sent.sequences);
            }
            Some(marked) = OptionFuture::from(marking.as_mut()) => {
                marking = None;
                if !marked {
                    not_before = Instant::now() + AWAY_PAUSE;
                }
            }
            () = worker.outbox.left.notified(), if !asked && !stopping => asked = true,
            () = worker.outbox.came.notified(), if !handed => {}
            () = sleep_until(gather_at), if handed && may_publish => {}
            () = sleep_until(next), if may_take && taking.is_none() => asked = true,
            () = drained.cancelled(), if !stopping => {}
        }
    }
}

/// Publishes whatever is left, as long as no engine is away.
pub async fn publish_rest(worker: &Worker) {
    loop {
        let events = worker.outbox.gather();
        if events.is_empty() && worker.outbox.is_empty() {
            break;
        }
        let sent = publish_batch(worker, events).await;
        if !mark(worker, sent.sequences).await || !sent.all {
            return;
        }
    }
    while let Some(events) = take(worker).await {
        let is_last = events.len() < BATCH as usize;
        let sent = publish_batch(worker, events).await;
        let marked = mark(worker, sent.sequences).await;
        if is_last || !marked || !sent.all {
            return;
        }
    }
}

/// Events that the broker has.
struct Sent {
    sequences: Vec<i64>,
    /// None of the batch was left.
    all: bool,
}

async fn take(worker: &Worker) -> Option<Vec<OutcomeEvent>> {
    let taken = worker.engines.ledger.take_outcomes(BATCH, TAKEN_FOR).await;
    taken.map_err(|error| tracing::debug!(%error, "outcome events cannot be read")).ok()
}

async fn publish_batch(worker: &Worker, events: Vec<OutcomeEvent>) -> Sent {
    let results = join_all(events.iter().map(|event| publish(worker, event))).await;
    if !results.is_empty() {
        faults::crash(Point::AfterEvent);
    }
    let with_results = events.iter().zip(&results);
    let sequences: Vec<i64> =
        with_results.filter(|(_, result)| result.is_ok()).map(|(event, _)| event.sequence).collect();
    if let Some(Err(error)) = results.iter().find(|result| result.is_err()) {
        tracing::warn!(%error, left = events.len() - sequences.len(), "outcome events not published, will try again");
    }
    // Once for all of them: an exchange that somebody deleted is back before they are published again.
    let returned = events.iter().zip(&results).find(|(_, result)| matches!(result, Err(QueueError::Unroutable(_))));
    if let Some((event, _)) = returned
        && let Err(error) = worker.engines.queue.declare(std::slice::from_ref(&event.provider)).await
    {
        tracing::warn!(%error, "the exchange of outcome events is not declared again");
    }
    Sent { all: sequences.len() == events.len(), sequences }
}

async fn mark(worker: &Worker, sequences: Vec<i64>) -> bool {
    let marked = worker.engines.ledger.outcomes_published(&sequences).await;
    marked
        .inspect_err(|error| tracing::warn!(%error, "published events not marked; they will be published again"))
        .is_ok()
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
