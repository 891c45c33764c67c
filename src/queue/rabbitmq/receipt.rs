//! Receipts of one lane, their one writer, and the count of receipts that a cancelled consumer left behind.
//!
//! A written acknowledgement is not a processed one: AMQP does not answer it, so all that is known is that the frame
//! left. Acknowledgements that arrive while frames are written go together in the next write; none waits for others to
//! join.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::acks::AckTracker;
use super::failure::with_call_limit;
use crate::queue::{LaneFault, QueueError, Receipt};

/// Messages given out and not finished, by whether their consumer still takes messages.
#[derive(Default)]
pub(super) struct UnackedMessages {
    counts: Mutex<UnackedCounts>,
    freed: Notify,
    pub fault: LaneFault,
}

#[derive(Default)]
struct UnackedCounts {
    epoch: u64,
    current: usize,
    stale: usize,
}

impl UnackedMessages {
    /// All consumers have ended: what is out now is out on no consumer's account.
    pub fn start_epoch(&self) {
        let mut counts = self.counts.lock();
        counts.epoch += 1;
        counts.stale += counts.current;
        counts.current = 0;
    }

    /// Messages out of consumers that have ended.
    pub fn stale(&self) -> usize {
        self.counts.lock().stale
    }

    /// Waits until one of those is finished.
    pub async fn freed(&self) {
        self.freed.notified().await;
    }

    fn record_delivery(&self) -> u64 {
        let mut counts = self.counts.lock();
        counts.current += 1;
        counts.epoch
    }

    fn record_finish(&self, epoch: u64) {
        let mut counts = self.counts.lock();
        if counts.epoch == epoch {
            counts.current = counts.current.saturating_sub(1);
        } else {
            counts.stale = counts.stale.saturating_sub(1);
            // Stored if no caller waits, so no place is missed.
            self.freed.notify_one();
        }
    }

    /// Gives each caller in the batch its result. Frames that were not written for certain may or may not reach the
    /// broker, and whether their places are free is then unknown.
    fn complete_batch(&self, batch: impl IntoIterator<Item = PendingAck>, written: &Result<(), String>) {
        if let Err(why) = written {
            self.fault.record(why.clone());
        }
        for finish in batch {
            if written.is_ok() {
                self.record_finish(finish.epoch);
            }
            // Who no longer waits for the answer has lost nothing by it.
            finish.written.send(written.clone()).unwrap_or_default();
        }
    }
}

/// What a receipt wants to be written.
#[derive(Debug)]
struct PendingAck {
    tag: u64,
    epoch: u64,
    requeue: bool,
    written: oneshot::Sender<Result<(), String>>,
}

/// Makes a lane's receipts. Dropped, it ends the writing, and unfinished receipts are void.
pub(super) struct AckWriter {
    pub unacked: Arc<UnackedMessages>,
    finishes: mpsc::UnboundedSender<PendingAck>,
    _writing: AbortOnDropHandle<()>,
}

impl AckWriter {
    /// For all deliveries of this channel, from its first on.
    pub fn new(channel: Channel) -> Self {
        let unacked = Arc::default();
        // As many as there are receipts, so never more than places.
        let (finishes, queue) = mpsc::unbounded_channel();
        let writing = tokio::spawn(run(channel, Arc::clone(&unacked), queue));
        Self { unacked, finishes, _writing: AbortOnDropHandle::new(writing) }
    }

    pub fn receipt(&self, tag: u64) -> RabbitReceipt {
        let epoch = self.unacked.record_delivery();
        RabbitReceipt { tag, epoch, unacked: Arc::clone(&self.unacked), finishes: self.finishes.clone() }
    }
}

/// Writes batch after batch until the lane is dropped, or until one fails.
async fn run(channel: Channel, held: Arc<UnackedMessages>, mut finishes: mpsc::UnboundedReceiver<PendingAck>) {
    let (mut tags, mut batch) = (AckTracker::default(), Vec::new());
    while let Some(first) = finishes.recv().await {
        batch.push(first);
        // A group commit wakes many jobs at once; this lets those speak that are about to.
        tokio::task::yield_now().await;
        while let Ok(next) = finishes.try_recv() {
            batch.push(next);
        }
        let written = write_batch(&channel, &mut tags, &batch).await;
        held.complete_batch(batch.drain(..), &written);
        if written.is_err() {
            break;
        }
    }
}

/// A requeue is written before any frame that could cover it, and a batch before the next.
async fn write_batch(channel: &Channel, tags: &mut AckTracker, batch: &[PendingAck]) -> Result<(), String> {
    let tags_of = |hand_back| batch.iter().filter(move |finish| finish.requeue == hand_back).map(|finish| finish.tag);
    let back = BasicNackOptions { multiple: false, requeue: true };
    with_call_limit(try_join_all(tags_of(true).map(|tag| channel.basic_nack(tag, back))))
        .await
        .map_err(|failure| failure.describe("requeue"))?;
    tags_of(true).for_each(|tag| tags.record_requeued(tag));
    let frames = tags.acknowledge(&tags_of(false).collect::<Vec<_>>());
    let ack = |multiple| BasicAckOptions { multiple };
    with_call_limit(try_join_all(frames.into_iter().map(|frame| channel.basic_ack(frame.tag, ack(frame.multiple)))))
        .await
        .map_err(|failure| failure.describe("acknowledge"))?;
    Ok(())
}

pub(super) struct RabbitReceipt {
    tag: u64,
    epoch: u64,
    unacked: Arc<UnackedMessages>,
    finishes: mpsc::UnboundedSender<PendingAck>,
}

impl RabbitReceipt {
    async fn finish(self, hand_back: bool) -> Result<(), QueueError> {
        let (written, answer) = oneshot::channel();
        let finish = PendingAck { tag: self.tag, epoch: self.epoch, requeue: hand_back, written };
        // Sent or not, the other end is dropped with the writing.
        self.finishes.send(finish).unwrap_or_default();
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(QueueError::Unavailable(why)),
            Err(_) => {
                let why = "finish a message: the lane's channel is gone".to_owned();
                self.unacked.fault.record(why.clone());
                Err(QueueError::Unavailable(why))
            }
        }
    }
}

#[async_trait]
impl Receipt for RabbitReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.finish(false).await
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        self.finish(true).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::failure::CallFailure;
    use super::*;

    #[tokio::test]
    async fn ack_timeout_ends_the_lane() {
        let held = UnackedMessages::default();
        let (first, second) = (held.record_delivery(), held.record_delivery());
        held.start_epoch();
        let finish = |epoch| {
            let (written, answer) = oneshot::channel();
            ([PendingAck { tag: epoch, epoch, requeue: false, written }], answer)
        };
        let (batch, answer) = finish(first);
        held.complete_batch(batch, &Ok(()));
        assert_eq!((answer.await.unwrap(), held.stale(), held.fault.reason()), (Ok(()), 1, None));
        // Its place would be missing from every later consumer of this lane.
        let (batch, answer) = finish(second);
        held.complete_batch(batch, &Err(CallFailure::TimedOut.describe("acknowledge")));
        assert_eq!(answer.await.unwrap(), Err("acknowledge: no answer within 5 s".to_owned()));
        assert_eq!(held.stale(), 1);
        assert_eq!(held.fault.wait().await, "acknowledge: no answer within 5 s");
    }
}
