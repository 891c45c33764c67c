//! One lane: its own channel, its consumers, their deliveries.
//!
//! Refuses to outlive its channel: when that ends, every receipt of this lane is void and the lane says so. The same when
//! an acknowledgement fails, since the broker may count that place as taken for ever.
//!
//! The bound on messages out has to hold over a stop and a resume, although the broker counts per consumer and quorum
//! queues know no other count. So after a resume the new consumer gets only the places that nobody holds any more, and
//! further consumers follow as old receipts are finished. (Consuming again under the old consumer's tag would make the
//! broker count for us, but RabbitMQ 3.10.8 answers that with INTERNAL_ERROR and closes the connection.)

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, SelectAll};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};

use super::channels::OpenChannel;
use super::failure::{Failure, limited};
use super::receipt::Receipts;
use super::supervisor::Generation;
use super::wire;
use crate::domain::provider::ProviderName;
use crate::queue::{Delivery, Lane, QueueError};

/// What a consumer yields; `None` once, after everything else, when it has ended.
type Arrivals = BoxStream<'static, Option<lapin::Result<lapin::message::Delivery>>>;

pub(super) struct RabbitLane {
    provider: ProviderName,
    queue: String,
    channel: OpenChannel,
    places: usize,
    receipts: Receipts,
    arrivals: SelectAll<Arrivals>,
    /// Streams in `arrivals` that have not ended.
    live: usize,
    /// Tags of the consumers that take messages.
    tags: Vec<String>,
    tags_used: u64,
    /// Sum of the prefetches of the consumers that take messages.
    granted: usize,
    /// A consumer being opened. It is kept here, because a future of [`Lane::next`] may be dropped half-way.
    opening: Option<BoxFuture<'static, Result<Consumer, Failure>>>,
    taking: bool,
    /// Consumers have been cancelled and what had arrived is still being given out.
    draining: bool,
    /// Why the lane is gone; from then on it answers nothing else.
    gone: Option<String>,
}

impl RabbitLane {
    pub async fn open(
        generation: &Generation,
        provider: &ProviderName,
        queue: String,
        places: u16,
    ) -> Result<Self, QueueError> {
        let channel = generation.open_channel().await?;
        let mut lane = Self {
            provider: provider.clone(),
            queue,
            receipts: Receipts::new(Channel::clone(&channel)),
            channel,
            places: usize::from(places),
            arrivals: SelectAll::new(),
            live: 0,
            tags: Vec::new(),
            tags_used: 0,
            granted: 0,
            opening: None,
            taking: true,
            draining: false,
            gone: None,
        };
        lane.grant();
        lane.opened().await?;
        Ok(lane)
    }

    /// Begins to open a consumer for the places that neither a consumer nor an old receipt has, if that is worth it.
    fn grant(&mut self) {
        let stale = self.receipts.held.stale();
        let missing = self.places.saturating_sub(self.granted);
        let free = missing.saturating_sub(stale);
        // The first takes what there is; later ones at least half of what is missing, so that they stay few.
        if free == 0 || (self.granted > 0 && free * 2 < missing) {
            return;
        }
        self.granted += free;
        self.tags_used += 1;
        let tag = format!("{}.{}", self.provider, self.tags_used);
        self.opening = Some(consume(Channel::clone(&self.channel), self.queue.clone(), tag.clone(), free).boxed());
        self.tags.push(tag);
    }

    /// Waits for the consumer that is being opened, if there is one.
    async fn opened(&mut self) -> Result<(), QueueError> {
        if self.opening.is_none() {
            return Ok(());
        }
        let opened = ready(&mut self.opening).await;
        self.admit(opened)
    }

    fn admit(&mut self, opened: Result<Consumer, Failure>) -> Result<(), QueueError> {
        match opened {
            Ok(consumer) => {
                self.live += 1;
                self.arrivals.push(consumer.map(Some).chain(stream::once(async { None })).boxed());
                Ok(())
            }
            Err(failure) if failure.is_not_found() => {
                self.lost("the queue is not there".to_owned());
                Err(QueueError::Unroutable(self.provider.to_string()))
            }
            Err(failure) => {
                let error = failure.into_error(&format!("consume from queue `{}`", self.queue));
                self.gone = Some(error.to_string());
                Err(error)
            }
        }
    }

    fn lost(&mut self, why: String) -> QueueError {
        let why = format!("lane `{}`: {why}", self.provider);
        self.gone = Some(why.clone());
        QueueError::Away(why)
    }

    /// Judges what a consumer yielded.
    fn arrived(
        &mut self,
        arrival: Option<lapin::Result<lapin::message::Delivery>>,
    ) -> Result<Option<Delivery>, QueueError> {
        match arrival {
            // A delivery that can no longer be acknowledged is somebody else's already.
            Some(Ok(message)) if message.acker.usable() => Ok(Some(self.delivery(message))),
            Some(Ok(_)) => Err(self.lost("channel closed".to_owned())),
            Some(Err(error)) => Err(self.lost(error.to_string())),
            None if self.draining => {
                self.live = self.live.saturating_sub(1);
                Ok(None)
            }
            None => Err(self.lost("the broker ended the consumer".to_owned())),
        }
    }

    fn delivery(&self, message: lapin::message::Delivery) -> Delivery {
        Delivery {
            properties: wire::from_amqp(&message.properties),
            redelivered: message.redelivered,
            receipt: Box::new(self.receipts.receipt(message.delivery_tag)),
            body: message.data.into(),
        }
    }
}

/// Polls the future in its place, and clears the place with the answer: dropped before that, nothing is lost.
async fn ready<T>(place: &mut Option<BoxFuture<'static, T>>) -> T {
    std::future::poll_fn(|context| match place {
        Some(future) => future.poll_unpin(context).map(|answer| {
            *place = None;
            answer
        }),
        None => std::task::Poll::Pending,
    })
    .await
}

/// The prefetch counts for consumers begun after it, so the two calls belong together. It comes first, because lapin
/// buffers without bound. <https://www.rabbitmq.com/docs/consumer-prefetch>
async fn consume(channel: Channel, queue: String, tag: String, prefetch: usize) -> Result<Consumer, Failure> {
    let prefetch = u16::try_from(prefetch).unwrap_or(u16::MAX);
    limited(channel.basic_qos(prefetch, BasicQosOptions { global: false })).await?;
    let options = BasicConsumeOptions {
        // Not supported by RabbitMQ; off.
        no_local: false,
        // Every message is acknowledged by hand.
        no_ack: false,
        // Other workers take from the same lane.
        exclusive: false,
        nowait: false,
    };
    limited(channel.basic_consume(queue.as_str().into(), tag.as_str().into(), options, FieldTable::default())).await
}

#[async_trait]
impl Lane for RabbitLane {
    /// Cancel-safe: a delivery leaves lapin's buffer only in the poll that returns it.
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            if let Some(why) = &self.gone {
                return Err(QueueError::Away(why.clone()));
            }
            if let Some(why) = self.receipts.held.fault.told() {
                return Err(self.lost(why));
            }
            if self.draining && self.live == 0 {
                self.draining = false;
                self.granted = 0;
                self.receipts.held.begin_epoch();
            }
            if !self.taking && !self.draining {
                if self.channel.status().connected() {
                    return Ok(None);
                }
                return Err(self.lost("channel closed".to_owned()));
            }
            if !self.draining && self.opening.is_none() {
                self.grant();
            }
            let (live, waiting) = (self.live > 0, !self.draining && self.granted < self.places);
            let opening = self.opening.is_some();
            tokio::select! {
                arrival = self.arrivals.next(), if live => {
                    if let Some(delivery) = self.arrived(arrival.flatten())? {
                        return Ok(Some(delivery));
                    }
                }
                opened = ready(&mut self.opening), if opening => self.admit(opened)?,
                () = self.receipts.held.freed(), if waiting => {}
                _ = self.receipts.held.fault.wait() => {}
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.gone {
            return Err(QueueError::Away(why.clone()));
        }
        self.taking = false;
        self.opened().await?;
        self.draining |= !self.tags.is_empty();
        while let Some(tag) = self.tags.last() {
            let call = self.channel.basic_cancel(tag.as_str().into(), BasicCancelOptions { nowait: false });
            if let Err(failure) = limited(call).await {
                return Err(self.lost(failure.describe("cancel the consumer")));
            }
            self.tags.pop();
        }
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.gone {
            return Err(QueueError::Away(why.clone()));
        }
        // `next` opens a consumer once everything that had arrived is given out and its places are known.
        self.taking = true;
        Ok(())
    }
}
