//! Receipts of one lane, their one writer, and the frames that acknowledge finished deliveries.
//!
//! A written acknowledgement is not a processed one: AMQP does not answer it, so all that is known is that the frame
//! left. Acknowledgements that arrive while frames are written go together in the next write; none waits for others to
//! join. Receipts that a cancelled consumer left behind are counted.
//!
//! A frame for many deliveries reaches no further than the first delivery that is still active. The broker numbers a
//! channel's deliveries from 1 without gaps. If a number is missing, nothing above it is ever acknowledged in
//! multiples. <https://www.rabbitmq.com/docs/confirms#consumer-acks-multiple-parameter>

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::channels::with_call_limit;
use crate::queue::{LaneFault, QueueError, Receipt};

/// Messages given out and not finished, by whether their consumer still takes messages.
#[derive(Default)]
pub struct UnackedMessages {
    counts: Mutex<UnackedCounts>,
    /// A message out of a consumer that has ended is finished.
    pub freed: Notify,
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
pub struct AckWriter {
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
    tags_of(true).for_each(|tag| tags.finish(tag));
    let frames = tags.acknowledge(&tags_of(false).collect::<Vec<_>>());
    let ack = |multiple| BasicAckOptions { multiple };
    with_call_limit(try_join_all(frames.into_iter().map(|frame| channel.basic_ack(frame.tag, ack(frame.multiple)))))
        .await
        .map_err(|failure| failure.describe("acknowledge"))?;
    Ok(())
}

pub struct RabbitReceipt {
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

/// One `basic.ack`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AckFrame {
    tag: u64,
    /// With all that are out below it.
    multiple: bool,
}

/// Runs of finished tags, first and last of each. There are at most as many as active deliveries, and one.
#[derive(Debug, Default)]
struct AckTracker {
    finished: BTreeMap<u64, u64>,
}

impl AckTracker {
    /// The frames that acknowledge these and nothing else. Each is named once, and what was requeued, or acknowledged
    /// before, is written already: then no frame covers, or names, what the broker has no longer.
    pub fn acknowledge(&mut self, tags: &[u64]) -> Vec<AckFrame> {
        for tag in tags {
            self.finish(*tag);
        }
        let reach = self.finished.get(&1).copied().unwrap_or(0);
        let (below, above): (Vec<u64>, Vec<u64>) = tags.iter().partition(|tag| **tag <= reach);
        // The highest tag of a frame has to be one that is out, so it is the highest of these and not the reach.
        let many = below.iter().max().map(|tag| AckFrame { tag: *tag, multiple: below.len() > 1 });
        many.into_iter().chain(above.into_iter().map(|tag| AckFrame { tag, multiple: false })).collect()
    }

    /// Its own frame is written, so that no later one covers it.
    fn finish(&mut self, tag: u64) {
        let last = self.finished.remove(&(tag + 1)).unwrap_or(tag);
        match self.finished.range_mut(..tag).next_back() {
            Some((_, end)) if *end + 1 == tag => *end = last,
            _ => {
                self.finished.insert(tag, last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::channels::CallFailure;
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

    const fn one(tag: u64) -> AckFrame {
        AckFrame { tag, multiple: false }
    }

    const fn up_to(tag: u64) -> AckFrame {
        AckFrame { tag, multiple: true }
    }

    #[test]
    fn multiple_ack_ends_below_the_first_unacked() {
        let mut tags = AckTracker::default();
        let requeued = |tags: &mut AckTracker, tag| {
            tags.finish(tag);
            Vec::new()
        };
        for (step, (frames, expected)) in [
            (tags.acknowledge(&[1]), vec![one(1)]),
            (tags.acknowledge(&[3, 2]), vec![up_to(3)]),
            // 4 is active.
            (tags.acknowledge(&[6, 5]), vec![one(6), one(5)]),
            (tags.acknowledge(&[8]), vec![one(8)]),
            // What was acknowledged alone is gone: the frame names 4, and not 6.
            (tags.acknowledge(&[4]), vec![one(4)]),
            (requeued(&mut tags, 7), vec![]),
            (tags.acknowledge(&[10, 9]), vec![up_to(10)]),
            (requeued(&mut tags, 12), vec![]),
            (tags.acknowledge(&[14, 13, 11]), vec![up_to(14)]),
            (tags.acknowledge(&[]), vec![]),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(frames, expected, "step {step}");
        }
        assert_eq!(tags.finished, BTreeMap::from([(1, 14)]));
    }

    #[test]
    fn one_unacked_delivery_costs_no_memory() {
        let mut tags = AckTracker::default();
        for tag in 2..10_000 {
            assert_eq!(tags.acknowledge(&[tag]), [one(tag)]);
        }
        assert_eq!(tags.finished.len(), 1);
    }

    /// What happens to a channel's deliveries, one batch after the other.
    #[derive(Clone, Debug)]
    struct Batch {
        delivered: usize,
        /// Which of the active ones, by their place.
        acknowledged: Vec<prop::sample::Index>,
        requeued: Vec<prop::sample::Index>,
    }

    fn batch() -> impl Strategy<Value = Batch> {
        let picked = || prop::collection::vec(any::<prop::sample::Index>(), 0..8);
        (0..12_usize, picked(), prop::collection::vec(any::<prop::sample::Index>(), 0..2))
            .prop_map(|(delivered, acknowledged, requeued)| Batch { delivered, acknowledged, requeued })
    }

    fn pick(unacked: &mut Vec<u64>, places: &[prop::sample::Index]) -> Vec<u64> {
        let take = |place: &prop::sample::Index| {
            (!unacked.is_empty()).then(|| unacked.swap_remove(place.index(unacked.len())))
        };
        places.iter().filter_map(take).collect()
    }

    /// As RabbitMQ does it: a tag that is not out is an error that closes the channel.
    fn broker(out: &mut BTreeSet<u64>, frame: AckFrame) -> BTreeSet<u64> {
        assert!(out.contains(&frame.tag), "{frame:?}: unknown delivery tag");
        if !frame.multiple {
            out.remove(&frame.tag);
            return BTreeSet::from([frame.tag]);
        }
        let rest = out.split_off(&(frame.tag + 1));
        std::mem::replace(out, rest)
    }

    proptest! {
        #[test]
        fn only_finished_tags_are_acknowledged(batches in prop::collection::vec(batch(), 1..40)) {
            let (mut tags, mut out, mut unacked, mut next) = (AckTracker::default(), BTreeSet::new(), Vec::new(), 1);
            for batch in batches {
                for tag in next..next + batch.delivered as u64 {
                    out.insert(tag);
                    unacked.push(tag);
                }
                next += batch.delivered as u64;
                for tag in pick(&mut unacked, &batch.requeued) {
                    prop_assert!(out.remove(&tag));
                    tags.finish(tag);
                }
                let asked = pick(&mut unacked, &batch.acknowledged);
                let frames = tags.acknowledge(&asked);
                prop_assert!(frames.iter().filter(|frame| frame.multiple).count() <= 1);
                let done: BTreeSet<u64> = frames.into_iter().flat_map(|frame| broker(&mut out, frame)).collect();
                prop_assert_eq!(done, asked.into_iter().collect::<BTreeSet<_>>());
                prop_assert_eq!(&out, &unacked.iter().copied().collect::<BTreeSet<_>>());
                prop_assert!(tags.finished.len() <= unacked.len() + 1);
            }
        }
    }
}
