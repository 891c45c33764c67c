//! Receipts of one lane, the one place that writes what they say, and the count of those that a cancelled consumer left
//! behind.
//!
//! Refuses to take a written acknowledgement for a processed one: AMQP has no answer to it, so all that is known is that
//! the frame left. Refuses to wait for company: what was acknowledged while the last frames were written goes together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::failure::limited;
use super::tags::Tags;
use crate::queue::fault::Fault;
use crate::queue::{QueueError, Receipt};

/// Messages given out and not finished, by whether their consumer still takes messages.
#[derive(Default)]
pub(super) struct Held {
    counts: Mutex<Counts>,
    freed: Notify,
    pub fault: Fault,
}

#[derive(Default)]
struct Counts {
    epoch: u64,
    fresh: usize,
    stale: usize,
}

impl Held {
    /// All consumers have ended: what is out now is out on no consumer's account.
    pub fn begin_epoch(&self) {
        let mut counts = self.counts();
        counts.epoch += 1;
        counts.stale += counts.fresh;
        counts.fresh = 0;
    }

    /// Messages out of consumers that have ended.
    pub fn stale(&self) -> usize {
        self.counts().stale
    }

    /// Waits until one of those is finished.
    pub async fn freed(&self) {
        self.freed.notified().await;
    }

    fn given_out(&self) -> u64 {
        let mut counts = self.counts();
        counts.fresh += 1;
        counts.epoch
    }

    fn finished(&self, epoch: u64) {
        let mut counts = self.counts();
        if counts.epoch == epoch {
            counts.fresh = counts.fresh.saturating_sub(1);
        } else {
            counts.stale = counts.stale.saturating_sub(1);
            // Stored if nobody waits, so no place is missed.
            self.freed.notify_one();
        }
    }

    /// Tells everybody in the batch what became of it. Frames that were not written for certain may or may not reach the
    /// broker, and whether their places are free is then unknown.
    fn judge(&self, batch: impl IntoIterator<Item = Finish>, written: &Result<(), String>) {
        if let Err(why) = written {
            self.fault.tell(why.clone());
        }
        for finish in batch {
            if written.is_ok() {
                self.finished(finish.epoch);
            }
            // Who no longer waits for the answer has lost nothing by it.
            finish.written.send(written.clone()).unwrap_or_default();
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a receipt wants to be written.
#[derive(Debug)]
struct Finish {
    tag: u64,
    epoch: u64,
    hand_back: bool,
    written: oneshot::Sender<Result<(), String>>,
}

/// Makes a lane's receipts. Dropped, it ends the writing, and receipts in hand are void.
pub(super) struct Receipts {
    pub held: Arc<Held>,
    finishes: mpsc::UnboundedSender<Finish>,
    _writing: AbortOnDropHandle<()>,
}

impl Receipts {
    /// For all deliveries of this channel, from its first on.
    pub fn new(channel: Channel) -> Self {
        let held = Arc::default();
        // As many as there are receipts, so never more than places.
        let (finishes, queue) = mpsc::unbounded_channel();
        let writing = tokio::spawn(write(channel, Arc::clone(&held), queue));
        Self { held, finishes, _writing: AbortOnDropHandle::new(writing) }
    }

    pub fn receipt(&self, tag: u64) -> RabbitReceipt {
        let epoch = self.held.given_out();
        RabbitReceipt { tag, epoch, held: Arc::clone(&self.held), finishes: self.finishes.clone() }
    }
}

/// Writes batch after batch until the lane is dropped, or until one fails.
async fn write(channel: Channel, held: Arc<Held>, mut finishes: mpsc::UnboundedReceiver<Finish>) {
    let (mut tags, mut batch) = (Tags::default(), Vec::new());
    while let Some(first) = finishes.recv().await {
        batch.push(first);
        // A group commit wakes many jobs at once; this lets those speak that are about to.
        tokio::task::yield_now().await;
        while let Ok(next) = finishes.try_recv() {
            batch.push(next);
        }
        let written = write_batch(&channel, &mut tags, &batch).await;
        held.judge(batch.drain(..), &written);
        if written.is_err() {
            break;
        }
    }
}

/// What is handed back is on the wire before any frame that could cover it, and a batch before the next.
async fn write_batch(channel: &Channel, tags: &mut Tags, batch: &[Finish]) -> Result<(), String> {
    let tags_of = |hand_back| batch.iter().filter(move |finish| finish.hand_back == hand_back).map(|finish| finish.tag);
    let back = BasicNackOptions { multiple: false, requeue: true };
    limited(try_join_all(tags_of(true).map(|tag| channel.basic_nack(tag, back))))
        .await
        .map_err(|failure| failure.describe("hand back"))?;
    tags_of(true).for_each(|tag| tags.handed_back(tag));
    let frames = tags.acknowledge(&tags_of(false).collect::<Vec<_>>());
    let ack = |multiple| BasicAckOptions { multiple };
    limited(try_join_all(frames.into_iter().map(|frame| channel.basic_ack(frame.tag, ack(frame.multiple)))))
        .await
        .map_err(|failure| failure.describe("acknowledge"))?;
    Ok(())
}

pub(super) struct RabbitReceipt {
    tag: u64,
    epoch: u64,
    held: Arc<Held>,
    finishes: mpsc::UnboundedSender<Finish>,
}

impl RabbitReceipt {
    async fn finish(self, hand_back: bool) -> Result<(), QueueError> {
        let (written, answer) = oneshot::channel();
        let finish = Finish { tag: self.tag, epoch: self.epoch, hand_back, written };
        // Sent or not, the other end is dropped with the writing.
        self.finishes.send(finish).unwrap_or_default();
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(QueueError::Away(why)),
            Err(_) => {
                let why = "finish a message: the lane's channel is gone".to_owned();
                self.held.fault.tell(why.clone());
                Err(QueueError::Away(why))
            }
        }
    }
}

#[async_trait]
impl Receipt for RabbitReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.finish(false).await
    }

    async fn hand_back(self: Box<Self>) -> Result<(), QueueError> {
        self.finish(true).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::failure::Failure;
    use super::*;

    #[tokio::test]
    async fn an_acknowledgement_that_times_out_ends_the_lane() {
        let held = Held::default();
        let (first, second) = (held.given_out(), held.given_out());
        held.begin_epoch();
        let finish = |epoch| {
            let (written, answer) = oneshot::channel();
            ([Finish { tag: epoch, epoch, hand_back: false, written }], answer)
        };
        let (batch, answer) = finish(first);
        held.judge(batch, &Ok(()));
        assert_eq!((answer.await.unwrap(), held.stale(), held.fault.told()), (Ok(()), 1, None));
        // Its place would be missing from every later consumer of this lane.
        let (batch, answer) = finish(second);
        held.judge(batch, &Err(Failure::TimedOut.describe("acknowledge")));
        assert_eq!(answer.await.unwrap(), Err("acknowledge: no answer within 5 s".to_owned()));
        assert_eq!(held.stale(), 1);
        assert_eq!(held.fault.wait().await, "acknowledge: no answer within 5 s");
    }
}
