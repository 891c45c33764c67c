//! One lane: a task that takes messages as places come free, and the receipts that finish them.
//!
//! Refuses to take a message inside [`Lane::next`]: that future may be dropped between the statement and its answer, and
//! the message would be held by nobody. The task is dropped by nobody; it ends itself when its lane is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::task::TaskTracker;

use super::store::{Store, Taken};
use crate::queue::fault::Fault;
use crate::queue::{Delivery, Lane, QueueError, Receipt};

/// How soon messages that other processes publish are seen.
const LOOK: Duration = Duration::from_millis(200);

/// What the lane wants of its task. Each stop has its own number, so that an old answer is not taken for a new one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wanted {
    taking: bool,
    stops: u64,
}

/// What the task tells its lane, in order.
enum Arrival {
    Message(Box<Taken>),
    /// Nothing more comes because of that stop.
    Stopped(u64),
    Failed(QueueError),
}

pub(super) struct EmbeddedLane {
    wanted: watch::Sender<Wanted>,
    /// Unbounded, but never more than `places` are out.
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    /// Everything that had arrived before the last stop has been given out.
    drained: bool,
    gone: Option<String>,
    held: Arc<Held>,
}

/// What the lane, its task and its receipts share.
struct Held {
    store: Store,
    queue: String,
    signal: Arc<Notify>,
    /// This lane's number in column `taken`.
    number: i64,
    places: usize,
    /// Messages taken and not finished. A receipt whose future is dropped half-way keeps its place until the lane closes.
    out: AtomicUsize,
    fault: Fault,
}

impl EmbeddedLane {
    pub fn open(store: Store, queue: String, signal: Arc<Notify>, places: u16, lanes: &TaskTracker) -> Self {
        let held = Arc::new(Held {
            store,
            queue,
            signal,
            // Random, so that lanes of two processes cannot have the same.
            number: rand::random_range(1..i64::MAX),
            places: usize::from(places),
            out: AtomicUsize::new(0),
            fault: Fault::default(),
        });
        let (wanted, wants) = watch::channel(Wanted { taking: true, stops: 0 });
        let (sender, arrivals) = mpsc::unbounded_channel();
        lanes.spawn(serve(Arc::clone(&held), wants, sender));
        Self { wanted, arrivals, drained: false, gone: None, held }
    }
}

/// Takes until the lane is dropped, then gives everything back.
async fn serve(held: Arc<Held>, mut wants: watch::Receiver<Wanted>, arrivals: mpsc::UnboundedSender<Arrival>) {
    if let Err(error) = take_until_closed(&held, &mut wants, &arrivals).await {
        // A failed send means that the lane is gone already.
        if arrivals.send(Arrival::Failed(error)).is_ok() {
            arrivals.closed().await;
        }
    }
    while let Err(error) = held.store.release_lane(&held.queue, held.number).await {
        tracing::warn!(%error, queue = held.queue, "messages of a closed lane cannot be given back yet");
        tokio::time::sleep(LOOK).await;
    }
    held.signal.notify_waiters();
}

async fn take_until_closed(
    held: &Held,
    wants: &mut watch::Receiver<Wanted>,
    arrivals: &mpsc::UnboundedSender<Arrival>,
) -> Result<(), QueueError> {
    loop {
        let wanted = *wants.borrow_and_update();
        // Registered before looking, so that nothing published in between is missed.
        let mut changed = std::pin::pin!(held.signal.notified());
        changed.as_mut().enable();
        let mut wait = Some(LOOK);
        if wanted.taking {
            let free = held.places.saturating_sub(held.out.load(Ordering::Acquire));
            if free > 0 {
                let next = held.store.next_in(&held.queue).await?;
                if next.is_some_and(|next| next.is_zero()) {
                    for message in held.store.take(&held.queue, held.number, free).await? {
                        held.out.fetch_add(1, Ordering::AcqRel);
                        if arrivals.send(Arrival::Message(Box::new(message))).is_err() {
                            return Ok(());
                        }
                    }
                    wait = None;
                } else {
                    wait = Some(next.map_or(LOOK, |next| next.min(LOOK)));
                }
            }
        } else {
            if arrivals.send(Arrival::Stopped(wanted.stops)).is_err() {
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
impl Lane for EmbeddedLane {
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            if self.gone.is_none() {
                self.gone = self.held.fault.told();
            }
            if let Some(why) = &self.gone {
                return Err(QueueError::Away(why.clone()));
            }
            if self.drained {
                return Ok(None);
            }
            let arrival = tokio::select! {
                arrival = self.arrivals.recv() => arrival,
                _ = self.held.fault.wait() => continue,
            };
            match arrival {
                Some(Arrival::Message(message)) => return Ok(Some(self.held.clone().delivery(*message))),
                Some(Arrival::Stopped(stop)) => {
                    let wanted = *self.wanted.borrow();
                    self.drained = !wanted.taking && wanted.stops == stop;
                }
                Some(Arrival::Failed(error)) => self.gone = Some(error.to_string()),
                None => self.gone = Some("the lane's task has ended".to_owned()),
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        self.wanted.send_if_modified(|wanted| {
            let was_taking = std::mem::replace(&mut wanted.taking, false);
            wanted.stops += u64::from(was_taking);
            was_taking
        });
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.gone {
            return Err(QueueError::Away(why.clone()));
        }
        self.drained = false;
        self.wanted.send_if_modified(|wanted| !std::mem::replace(&mut wanted.taking, true));
        Ok(())
    }
}

impl Held {
    fn delivery(self: Arc<Self>, message: Taken) -> Delivery {
        Delivery {
            body: message.body.into(),
            properties: message.properties,
            redelivered: message.redelivered,
            receipt: Box::new(EmbeddedReceipt { id: message.id, held: self }),
        }
    }

    /// A place has come free; the task waits for that only when all were taken.
    fn finished(&self) {
        if self.out.fetch_sub(1, Ordering::AcqRel) == self.places {
            self.signal.notify_waiters();
        }
    }
}

struct EmbeddedReceipt {
    id: i64,
    held: Arc<Held>,
}

impl EmbeddedReceipt {
    /// `Ok(false)` means that the row is this lane's no more.
    fn judge(&self, answer: Result<bool, QueueError>) -> Result<(), QueueError> {
        match answer {
            Ok(held_until_now) => {
                self.held.finished();
                let lost =
                    || QueueError::Away("the lane that took this message is closed, or its row is gone".to_owned());
                held_until_now.then_some(()).ok_or_else(lost)
            }
            Err(error) => {
                // The row stays taken until the lane closes.
                self.held.fault.tell(format!("a message could not be finished: {error}"));
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Receipt for EmbeddedReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.judge(self.held.store.finish(self.id, self.held.number).await)
    }

    async fn hand_back(self: Box<Self>) -> Result<(), QueueError> {
        self.judge(self.held.store.release(self.id, self.held.number).await)?;
        self.held.signal.notify_waiters();
        Ok(())
    }
}
