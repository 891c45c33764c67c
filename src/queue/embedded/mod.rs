//! The queue in the SQLite database: the semantics of RabbitMQ with nothing to install.
//!
//! It serves one `run` process per database; other processes may publish. Two differences remain. Any lane can be
//! published to, since a message for an unknown provider is kept until the provider exists. Outcome events are rows of
//! queue `payments.outcomes` without a consumer, of which the newest 100,000 are kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::SqlitePool;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::{
    DELAY_STEPS, DeadLetter, DeathCause, Destination, LaneConsumer, OutgoingMessage, Queue, QueueError, Receipt,
    SearchResult, headers, lane_queue,
};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_up;

mod batch;
mod lane;
mod store;

use lane::EmbeddedLane;
use store::Store;

/// Begins all queue names. Not a setting: a database holds one deployment.
const PREFIX: &str = "payments";

pub struct EmbeddedQueue {
    store: Store,
    signals: LaneSignals,
    /// Those behind lanes, which end after giving back what their lane still held, and commits under way.
    tasks: TaskTracker,
}

/// Wakes the lanes of a queue when something in it changed within this process.
#[derive(Clone, Default)]
struct LaneSignals(Arc<Mutex<HashMap<String, Arc<Notify>>>>);

impl LaneSignals {
    fn for_queue(&self, queue: &str) -> Arc<Notify> {
        let mut signals = self.0.lock();
        Arc::clone(signals.entry(queue.to_owned()).or_default())
    }
}

impl EmbeddedQueue {
    /// Works on table `queue_messages`, which `sluicegate migrate` creates.
    pub fn new(pool: SqlitePool) -> Self {
        let tasks = TaskTracker::new();
        Self { store: Store::new(pool, tasks.clone()), signals: LaneSignals::default(), tasks }
    }

    /// Gives back everything that a process before this one had taken; returns how many messages. Only for `run`, at
    /// its start: it is the one process that takes messages.
    ///
    /// # Errors
    /// [`QueueError::Refused`] when the table is missing, [`QueueError::Unavailable`] otherwise.
    pub async fn recover(&self) -> Result<u64, QueueError> {
        self.store.release_all().await
    }

    /// Waits until every dropped lane has requeued what it held. Lanes still open keep it waiting.
    pub async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[async_trait]
impl Queue for EmbeddedQueue {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        for provider in providers {
            lane_queue(PREFIX, provider)?;
        }
        self.ping().await.map(drop)
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        if places == 0 {
            return Err(QueueError::Refused("a lane needs at least one place".to_owned()));
        }
        let queue = lane_queue(PREFIX, provider)?;
        self.ping().await?;
        let signal = self.signals.for_queue(&queue);
        Ok(Box::new(EmbeddedLane::open(self.store.clone(), queue, signal, places, &self.tasks)))
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        let properties = headers::with_destination_headers(&message);
        let (queue, delay_ms) = match &message.destination {
            Destination::Lane(provider) => (lane_queue(PREFIX, provider)?, 0),
            Destination::Delay { provider, step } => {
                if !DELAY_STEPS.contains(step) {
                    return Err(QueueError::Refused(format!("{step:?} is not one of the delay steps")));
                }
                (lane_queue(PREFIX, provider)?, millis_up(*step))
            }
            Destination::Invalid { .. } => (format!("{PREFIX}.invalid"), 0),
            Destination::Outcomes { .. } => (format!("{PREFIX}.outcomes"), 0),
        };
        let id = self.store.insert(&queue, message.body, &properties, delay_ms).await?;
        if matches!(message.destination, Destination::Outcomes { .. }) {
            self.store.trim(&queue, id).await?;
        }
        self.signals.for_queue(&queue).notify_waiters();
        Ok(())
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        take_dead_letter(&self.store).await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        self.store.ready(&lane_queue(PREFIX, provider)?).await.map(Some)
    }

    async fn find(&self, job: &JobId) -> Result<SearchResult, QueueError> {
        self.store.find(PREFIX, job).await
    }

    async fn oldest_ready(&self, provider: &ProviderName) -> Result<Option<Duration>, QueueError> {
        self.store.oldest_ready(&lane_queue(PREFIX, provider)?).await
    }

    fn reports_ages(&self) -> bool {
        true
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        self.store.ping().await.map(Some)
    }
}

/// Takes a dead-lettered message under a number of its own, so that its receipt finishes its row and no other. A receipt
/// that is dropped keeps its message until the next start.
async fn take_dead_letter(store: &Store) -> Result<Option<DeadLetter>, QueueError> {
    let number = rand::random_range(1..i64::MAX);
    let Some((message, queue)) = store.take_dead(number).await? else { return Ok(None) };
    let name = queue.as_deref().and_then(|queue| queue.strip_prefix(PREFIX)?.strip_prefix('.'));
    Ok(Some(DeadLetter {
        cause: DeathCause::DeliveryLimit,
        lane: name.and_then(|name| ProviderName::new(name).ok()),
        body: message.body.into(),
        properties: message.properties,
        receipt: Box::new(EmbeddedDeadReceipt { store: store.clone(), id: message.id, number }),
    }))
}

struct EmbeddedDeadReceipt {
    store: Store,
    id: i64,
    number: i64,
}

fn check_held(held_until_now: bool) -> Result<(), QueueError> {
    held_until_now.then_some(()).ok_or_else(|| QueueError::Unavailable("the message's row is gone".to_owned()))
}

#[async_trait]
impl Receipt for EmbeddedDeadReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        check_held(self.store.finish(self.id, self.number).await?)
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        check_held(self.store.release(self.id, self.number).await?)
    }
}
