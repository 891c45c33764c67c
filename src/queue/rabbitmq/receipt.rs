//! Receipts of one lane, and the count of those that a cancelled consumer left behind.
//!
//! Refuses to take a written acknowledgement for a processed one: AMQP has no answer to it, so all that is known is that
//! the frame left.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use lapin::Acker;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use tokio::sync::Notify;

use super::failure::{Failure, limited};
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

    /// `Ok(true)` means that the frame was written, `Ok(false)` that the channel is gone. Anything else may or may not
    /// reach the broker, and whether that place is free is then unknown.
    fn judge(&self, epoch: u64, answer: Result<bool, Failure>, doing: &str) -> Result<(), QueueError> {
        let why = match answer {
            Ok(true) => {
                self.finished(epoch);
                return Ok(());
            }
            Ok(false) => format!("{doing}: the lane's channel is gone"),
            Err(failure) => failure.describe(doing),
        };
        self.fault.tell(why.clone());
        Err(QueueError::Away(why))
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct RabbitReceipt {
    acker: Acker,
    held: Arc<Held>,
    epoch: u64,
}

impl RabbitReceipt {
    pub fn new(acker: Acker, held: Arc<Held>) -> Self {
        let epoch = held.given_out();
        Self { acker, held, epoch }
    }
}

#[async_trait]
impl Receipt for RabbitReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        let answer = limited(self.acker.ack(BasicAckOptions { multiple: false })).await;
        self.held.judge(self.epoch, answer, "acknowledge")
    }

    async fn hand_back(self: Box<Self>) -> Result<(), QueueError> {
        let answer = limited(self.acker.nack(BasicNackOptions { multiple: false, requeue: true })).await;
        self.held.judge(self.epoch, answer, "hand back")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_acknowledgement_that_times_out_ends_the_lane() {
        let held = Held::default();
        let (first, second) = (held.given_out(), held.given_out());
        held.begin_epoch();
        held.judge(first, Ok(true), "acknowledge").unwrap();
        assert_eq!((held.stale(), held.fault.told()), (1, None));
        // Its place would be missing from every later consumer of this lane.
        let answer = held.judge(second, Err(Failure::TimedOut), "acknowledge");
        assert!(matches!(answer, Err(QueueError::Away(_))));
        assert_eq!(held.fault.wait().await, "acknowledge: no answer within 5 s");
    }
}
