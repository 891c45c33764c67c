//! The queue in the SQLite database: the semantics of RabbitMQ with nothing to install.
//!
//! It serves one `run` process per database; other processes may publish. Two differences remain. Any lane can be
//! published to, since a message for an unknown provider is kept until the provider exists. Outcome events are rows of
//! queue `payments.outcomes` without a consumer, of which the newest 100,000 are kept.
//!
//! A lane is a task that takes messages as prefetch places come free. [`LaneConsumer::next`] does not take a message
//! itself: its future may be dropped between the statement and the result, and no receipt would then hold the message.
//! The task ends itself when its lane is gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::SqlitePool;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::task::TaskTracker;

use self::store::{DEAD, Store, TakenMessage};
use super::{
    DELAY_STEPS, DeadLetter, DeathCause, Delivery, Destination, InvalidLetter, LaneConsumer, LaneFault,
    OutgoingMessage, Queue, QueueError, Receipt, SearchResult, headers, lane_queue,
};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_up;

mod store;

/// Begins all queue names. Not a setting: a database holds one deployment.
const PREFIX: &str = "payments";
const INVALID: &str = "payments.invalid";

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
            Destination::Invalid { .. } => (INVALID.to_owned(), 0),
            Destination::Outcomes { .. } => (format!("{PREFIX}.outcomes"), 0),
        };
        let id = self.store.insert(&queue, message.body, &properties, delay_ms).await?;
        if matches!(message.destination, Destination::Outcomes { .. }) {
            self.store.trim(&queue, id).await?;
        }
        self.signals.for_queue(&queue).notify_waiters();
        Ok(())
    }

    /// Takes it under a number of its own, so that its receipt finishes its row and no other. A receipt that is dropped
    /// keeps its message until the next start.
    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        let number = rand::random_range(1..i64::MAX);
        let Some((message, queue)) = self.store.take_from(DEAD, number).await? else { return Ok(None) };
        let name = queue.as_deref().and_then(|queue| queue.strip_prefix(PREFIX)?.strip_prefix('.'));
        Ok(Some(DeadLetter {
            cause: DeathCause::DeliveryLimit,
            lane: name.and_then(|name| ProviderName::new(name).ok()),
            body: message.body.into(),
            properties: message.properties,
            receipt: Box::new(EmbeddedReceipt { store: self.store.clone(), id: message.id, number, lane: None }),
        }))
    }

    async fn take_invalid(&self) -> Result<Option<InvalidLetter>, QueueError> {
        let number = rand::random_range(1..i64::MAX);
        let Some((message, _)) = self.store.take_from(INVALID, number).await? else { return Ok(None) };
        Ok(Some(InvalidLetter {
            body: message.body.into(),
            properties: message.properties,
            receipt: Box::new(EmbeddedReceipt { store: self.store.clone(), id: message.id, number, lane: None }),
        }))
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

/// How soon messages that other processes publish are seen.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// What the lane wants of its task. Each stop has its own number, so that an old answer is not taken for a new one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct LaneRequest {
    taking: bool,
    stops: u64,
}

/// What the task tells its lane, in order.
enum LaneEvent {
    Message(Box<TakenMessage>),
    /// Nothing more comes because of that stop.
    Stopped(u64),
    Failed(QueueError),
}

struct EmbeddedLane {
    request: watch::Sender<LaneRequest>,
    /// Unbounded, but never more than `places` are out.
    arrivals: mpsc::UnboundedReceiver<LaneEvent>,
    /// Everything that had arrived before the last stop has been given out.
    drained: bool,
    failure: Option<String>,
    shared: Arc<LaneShared>,
}

/// What the lane, its task and its receipts share.
struct LaneShared {
    store: Store,
    queue: String,
    signal: Arc<Notify>,
    /// This lane's number in column `taken`.
    number: i64,
    prefetch: AtomicUsize,
    /// Messages taken and not finished. A receipt whose future is dropped half-way keeps its place until the lane closes.
    unacked: AtomicUsize,
    fault: LaneFault,
}

impl EmbeddedLane {
    fn open(store: Store, queue: String, signal: Arc<Notify>, places: u16, lanes: &TaskTracker) -> Self {
        let shared = Arc::new(LaneShared {
            store,
            queue,
            signal,
            // Random, so that lanes of two processes cannot have the same.
            number: rand::random_range(1..i64::MAX),
            prefetch: AtomicUsize::new(usize::from(places)),
            unacked: AtomicUsize::new(0),
            fault: LaneFault::default(),
        });
        let (request, wants) = watch::channel(LaneRequest { taking: true, stops: 0 });
        let (sender, arrivals) = mpsc::unbounded_channel();
        lanes.spawn(run(Arc::clone(&shared), wants, sender));
        Self { request, arrivals, drained: false, failure: None, shared }
    }
}

/// Takes until the lane is dropped, then gives everything back.
async fn run(
    held: Arc<LaneShared>,
    mut wants: watch::Receiver<LaneRequest>,
    arrivals: mpsc::UnboundedSender<LaneEvent>,
) {
    if let Err(error) = take_until_closed(&held, &mut wants, &arrivals).await {
        // A failed send means that the lane is gone already.
        if arrivals.send(LaneEvent::Failed(error)).is_ok() {
            arrivals.closed().await;
        }
    }
    while let Err(error) = held.store.release_lane(&held.queue, held.number).await {
        tracing::warn!(%error, queue = held.queue, "messages of a closed lane cannot be requeued yet");
        tokio::time::sleep(POLL_EVERY).await;
    }
    held.signal.notify_waiters();
}

async fn take_until_closed(
    held: &LaneShared,
    wants: &mut watch::Receiver<LaneRequest>,
    arrivals: &mpsc::UnboundedSender<LaneEvent>,
) -> Result<(), QueueError> {
    loop {
        let wanted = *wants.borrow_and_update();
        // Registered before looking, so that nothing published in between is missed.
        let mut changed = std::pin::pin!(held.signal.notified());
        changed.as_mut().enable();
        if !wanted.taking {
            // Nothing but the lane itself can end this wait.
            if arrivals.send(LaneEvent::Stopped(wanted.stops)).is_err() || wants.changed().await.is_err() {
                return Ok(());
            }
            continue;
        }
        let mut wait = POLL_EVERY;
        let places = held.prefetch.load(Ordering::Acquire);
        let free = places.saturating_sub(held.unacked.load(Ordering::Acquire));
        if free > 0 {
            wait = held.store.next_in(&held.queue).await?.map_or(POLL_EVERY, |next| next.min(POLL_EVERY));
            if wait.is_zero() {
                for message in held.store.take(&held.queue, held.number, free).await? {
                    held.unacked.fetch_add(1, Ordering::AcqRel);
                    if arrivals.send(LaneEvent::Message(Box::new(message))).is_err() {
                        return Ok(());
                    }
                }
                continue;
            }
        }
        tokio::select! {
            wanted = wants.changed() => if wanted.is_err() { return Ok(()) },
            () = changed => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

#[async_trait]
impl LaneConsumer for EmbeddedLane {
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            if self.failure.is_none() {
                self.failure = self.shared.fault.reason();
            }
            if let Some(why) = &self.failure {
                return Err(QueueError::Unavailable(why.clone()));
            }
            if self.drained {
                return Ok(None);
            }
            let arrival = tokio::select! {
                arrival = self.arrivals.recv() => arrival,
                _ = self.shared.fault.wait() => continue,
            };
            match arrival {
                Some(LaneEvent::Message(message)) => return Ok(Some(self.shared.clone().delivery(*message))),
                Some(LaneEvent::Stopped(stop)) => {
                    let wanted = *self.request.borrow();
                    self.drained = !wanted.taking && wanted.stops == stop;
                }
                Some(LaneEvent::Failed(error)) => self.failure = Some(error.to_string()),
                None => self.failure = Some("the lane's task has ended".to_owned()),
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        self.request.send_if_modified(|wanted| {
            let was_taking = std::mem::replace(&mut wanted.taking, false);
            wanted.stops += u64::from(was_taking);
            was_taking
        });
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.failure {
            return Err(QueueError::Unavailable(why.clone()));
        }
        self.drained = false;
        self.request.send_if_modified(|wanted| !std::mem::replace(&mut wanted.taking, true));
        Ok(())
    }

    async fn resize(&mut self, places: u16) -> Result<(), QueueError> {
        self.shared.prefetch.store(usize::from(places), Ordering::Release);
        self.shared.signal.notify_waiters();
        Ok(())
    }
}

impl LaneShared {
    fn delivery(self: Arc<Self>, message: TakenMessage) -> Delivery {
        Delivery {
            body: message.body.into(),
            properties: message.properties,
            redelivered: message.redelivered,
            receipt: Box::new(EmbeddedReceipt {
                store: self.store.clone(),
                id: message.id,
                number: self.number,
                lane: Some(self),
            }),
        }
    }

    /// A place has come free; the task waits for that only when all were taken.
    fn release_one(&self) {
        if self.unacked.fetch_sub(1, Ordering::AcqRel) >= self.prefetch.load(Ordering::Acquire) {
            self.signal.notify_waiters();
        }
    }
}

struct EmbeddedReceipt {
    store: Store,
    id: i64,
    /// The number in column `taken`.
    number: i64,
    /// `None` for a message that was given up.
    lane: Option<Arc<LaneShared>>,
}

impl EmbeddedReceipt {
    /// `Ok(false)` means that the row is this receipt's no more.
    fn check_finished(&self, answer: Result<bool, QueueError>) -> Result<(), QueueError> {
        let held_until_now = answer.inspect_err(|error| {
            // The row stays taken until the lane closes.
            let why = format!("a message could not be finished: {error}");
            self.lane.iter().for_each(|lane| lane.fault.record(why.clone()));
        })?;
        self.lane.iter().for_each(|lane| lane.release_one());
        let lost = match self.lane {
            Some(_) => "the lane that took this message is closed, or its row is gone",
            None => "the message's row is gone",
        };
        held_until_now.then_some(()).ok_or_else(|| QueueError::Unavailable(lost.to_owned()))
    }
}

#[async_trait]
impl Receipt for EmbeddedReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.check_finished(self.store.finish(self.id, self.number).await)
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        self.check_finished(self.store.release(self.id, self.number).await)?;
        self.lane.iter().for_each(|lane| lane.signal.notify_waiters());
        Ok(())
    }
}
