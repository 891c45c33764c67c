//! One lane: a task that takes messages as prefetch places come free, and the receipts that finish them.
//!
//! [`LaneConsumer::next`] does not take a message itself: its future may be dropped between the statement and the
//! result, and no receipt would then hold the message. The task ends itself when its lane is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::task::TaskTracker;

use super::store::{Store, TakenMessage};
use crate::queue::{Delivery, LaneConsumer, LaneFault, QueueError, Receipt};

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

pub(super) struct EmbeddedLane {
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
    prefetch: usize,
    /// Messages taken and not finished. A receipt whose future is dropped half-way keeps its place until the lane closes.
    unacked: AtomicUsize,
    fault: LaneFault,
}

impl EmbeddedLane {
    pub fn open(store: Store, queue: String, signal: Arc<Notify>, places: u16, lanes: &TaskTracker) -> Self {
        let shared = Arc::new(LaneShared {
            store,
            queue,
            signal,
            // Random, so that lanes of two processes cannot have the same.
            number: rand::random_range(1..i64::MAX),
            prefetch: usize::from(places),
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
        let mut wait = Some(POLL_EVERY);
        if wanted.taking {
            let free = held.prefetch.saturating_sub(held.unacked.load(Ordering::Acquire));
            if free > 0 {
                let next = held.store.next_in(&held.queue).await?;
                if next.is_some_and(|next| next.is_zero()) {
                    for message in held.store.take(&held.queue, held.number, free).await? {
                        held.unacked.fetch_add(1, Ordering::AcqRel);
                        if arrivals.send(LaneEvent::Message(Box::new(message))).is_err() {
                            return Ok(());
                        }
                    }
                    wait = None;
                } else {
                    wait = Some(next.map_or(POLL_EVERY, |next| next.min(POLL_EVERY)));
                }
            }
        } else {
            if arrivals.send(LaneEvent::Stopped(wanted.stops)).is_err() {
                return Ok(());
            }
            // Nothing but the lane itself can end this wait.
            if wants.changed().await.is_err() {
                return Ok(());
            }
            continue;
        }
        let Some(wait) = wait else { continue };
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
}

impl LaneShared {
    fn delivery(self: Arc<Self>, message: TakenMessage) -> Delivery {
        Delivery {
            body: message.body.into(),
            properties: message.properties,
            redelivered: message.redelivered,
            receipt: Box::new(EmbeddedReceipt { id: message.id, shared: self }),
        }
    }

    /// A place has come free; the task waits for that only when all were taken.
    fn release_one(&self) {
        if self.unacked.fetch_sub(1, Ordering::AcqRel) == self.prefetch {
            self.signal.notify_waiters();
        }
    }
}

struct EmbeddedReceipt {
    id: i64,
    shared: Arc<LaneShared>,
}

impl EmbeddedReceipt {
    /// `Ok(false)` means that the row is this lane's no more.
    fn check_finished(&self, answer: Result<bool, QueueError>) -> Result<(), QueueError> {
        match answer {
            Ok(held_until_now) => {
                self.shared.release_one();
                let lost = || {
                    QueueError::Unavailable("the lane that took this message is closed, or its row is gone".to_owned())
                };
                held_until_now.then_some(()).ok_or_else(lost)
            }
            Err(error) => {
                // The row stays taken until the lane closes.
                self.shared.fault.record(format!("a message could not be finished: {error}"));
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Receipt for EmbeddedReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.check_finished(self.shared.store.finish(self.id, self.shared.number).await)
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        self.check_finished(self.shared.store.release(self.id, self.shared.number).await)?;
        self.shared.signal.notify_waiters();
        Ok(())
    }
}
