//! Deliveries of one lane, by its own channel and consumers, and dead letters, fetched one at a time.
//!
//! When its channel ends, the lane ends too, and every receipt of it is void. The same holds when an acknowledgement
//! fails, since the broker may count that place as taken for ever.
//!
//! The bound on unacknowledged messages has to hold over a stop and a resume, although the broker counts per consumer
//! and quorum queues know no other count. So after a resume the new consumer gets only the places that no receipt
//! holds, and further consumers follow as old receipts are finished. (Consuming again under the old consumer's tag
//! would make the broker count. RabbitMQ 3.10.8 answers that with INTERNAL_ERROR and closes the connection.)
//!
//! Dead letters are rare, so they are fetched and not consumed: that needs no prefetch and leaves none behind. The lane
//! of one comes from the broker's own header, which no producer can write.

use std::collections::BTreeMap;
use std::task::Poll;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use lapin::{Acker, BasicProperties, Channel, Consumer};

use super::channels::{CallFailure, OpenChannel, with_call_limit};
use super::receipt::AckWriter;
use super::supervisor::Generation;
use super::topology::Topology;
use super::wire;
use crate::domain::provider::ProviderName;
use crate::queue::{DeadLetter, DeathCause, Delivery, InvalidLetter, LaneConsumer, QueueError, Receipt};

/// What a consumer yields; `None` once, after everything else, when it has ended.
type DeliveryStream = BoxStream<'static, Option<lapin::Result<lapin::message::Delivery>>>;

pub struct RabbitLane {
    provider: ProviderName,
    queue: String,
    channel: OpenChannel,
    prefetch: usize,
    receipts: AckWriter,
    arrivals: Vec<DeliveryStream>,
    /// Streams in `arrivals` that have not ended.
    live_streams: usize,
    /// Tags of the consumers that take messages.
    tags: Vec<String>,
    tags_used: u64,
    /// Sum of the prefetches of the consumers that take messages.
    consumers_prefetch: usize,
    /// A consumer being opened. It is kept here, because a future of [`LaneConsumer::next`] may be dropped half-way.
    opening: Option<BoxFuture<'static, Result<Consumer, CallFailure>>>,
    consuming: bool,
    /// Consumers have been cancelled and what had arrived is still being given out.
    draining: bool,
    /// Why the lane is gone; from then on it answers nothing else.
    failure: Option<String>,
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
            receipts: AckWriter::new(Channel::clone(&channel)),
            channel,
            prefetch: usize::from(places),
            arrivals: Vec::new(),
            live_streams: 0,
            tags: Vec::new(),
            tags_used: 0,
            consumers_prefetch: 0,
            opening: None,
            consuming: true,
            draining: false,
            failure: None,
        };
        lane.open_consumer();
        lane.wait_opened().await?;
        Ok(lane)
    }

    /// Begins to open a consumer for the places that neither a consumer nor an old receipt has, if that is worth it.
    fn open_consumer(&mut self) {
        let stale = self.receipts.unacked.stale();
        let missing = self.prefetch.saturating_sub(self.consumers_prefetch);
        let free = missing.saturating_sub(stale);
        // The first takes what there is; later ones at least half of what is missing, so that they stay few.
        if free == 0 || (self.consumers_prefetch > 0 && free * 2 < missing) {
            return;
        }
        self.consumers_prefetch += free;
        self.tags_used += 1;
        let tag = format!("{}.{}", self.provider, self.tags_used);
        self.opening = Some(consume(Channel::clone(&self.channel), self.queue.clone(), tag.clone(), free).boxed());
        self.tags.push(tag);
    }

    /// Waits for the consumer that is being opened, if there is one.
    async fn wait_opened(&mut self) -> Result<(), QueueError> {
        if self.opening.is_none() {
            return Ok(());
        }
        let opened = ready(&mut self.opening).await;
        self.add_consumer(opened)
    }

    fn add_consumer(&mut self, opened: Result<Consumer, CallFailure>) -> Result<(), QueueError> {
        match opened {
            Ok(consumer) => {
                self.live_streams += 1;
                self.arrivals.push(consumer.map(Some).chain(stream::once(async { None })).boxed());
                Ok(())
            }
            Err(failure) if failure.is_not_found() => {
                self.fail("the queue is not there".to_owned());
                Err(QueueError::Unroutable(self.provider.to_string()))
            }
            Err(failure) => {
                let error = failure.into_error(&format!("consume from queue `{}`", self.queue));
                self.failure = Some(error.to_string());
                Err(error)
            }
        }
    }

    fn fail(&mut self, why: String) -> QueueError {
        let why = format!("lane `{}`: {why}", self.provider);
        self.failure = Some(why.clone());
        QueueError::Unavailable(why)
    }

    /// Judges what a consumer yielded.
    fn handle_item(
        &mut self,
        arrival: Option<lapin::Result<lapin::message::Delivery>>,
    ) -> Result<Option<Delivery>, QueueError> {
        match arrival {
            // A delivery that can no longer be acknowledged is another consumer's already.
            Some(Ok(message)) if message.acker.usable() => Ok(Some(self.delivery(message))),
            Some(Ok(_)) => Err(self.fail("channel closed".to_owned())),
            Some(Err(error)) => Err(self.fail(error.to_string())),
            None if self.draining => {
                self.live_streams = self.live_streams.saturating_sub(1);
                Ok(None)
            }
            None => Err(self.fail("the broker ended the consumer".to_owned())),
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

/// What a consumer yields next, the first one first; `None` when one has ended, or none is left. Dropped, it loses nothing.
async fn next_arrival(streams: &mut Vec<DeliveryStream>) -> Option<lapin::Result<lapin::message::Delivery>> {
    std::future::poll_fn(|context| {
        for at in 0..streams.len() {
            match streams[at].poll_next_unpin(context) {
                Poll::Ready(Some(Some(arrival))) => return Poll::Ready(Some(arrival)),
                Poll::Ready(Some(None) | None) => {
                    drop(streams.remove(at));
                    return Poll::Ready(None);
                }
                Poll::Pending => {}
            }
        }
        if streams.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}

/// Polls the future in its place, and clears the place with the answer: dropped before that, nothing is lost.
async fn ready<T>(place: &mut Option<BoxFuture<'static, T>>) -> T {
    std::future::poll_fn(|context| match place {
        Some(future) => future.poll_unpin(context).map(|answer| {
            *place = None;
            answer
        }),
        None => Poll::Pending,
    })
    .await
}

/// The prefetch counts for consumers begun after it, so the two calls belong together. It comes first, because lapin
/// buffers without bound. <https://www.rabbitmq.com/docs/consumer-prefetch>
async fn consume(channel: Channel, queue: String, tag: String, prefetch: usize) -> Result<Consumer, CallFailure> {
    let prefetch = u16::try_from(prefetch).unwrap_or(u16::MAX);
    with_call_limit(channel.basic_qos(prefetch, BasicQosOptions { global: false })).await?;
    let options = BasicConsumeOptions {
        // Not supported by RabbitMQ; off.
        no_local: false,
        // Every message is acknowledged by hand.
        no_ack: false,
        // Other workers take from the same lane.
        exclusive: false,
        nowait: false,
    };
    with_call_limit(channel.basic_consume(queue.as_str().into(), tag.as_str().into(), options, FieldTable::default()))
        .await
}

#[async_trait]
impl LaneConsumer for RabbitLane {
    /// Cancel-safe: a delivery leaves lapin's buffer only in the poll that returns it.
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            if let Some(why) = &self.failure {
                return Err(QueueError::Unavailable(why.clone()));
            }
            if let Some(why) = self.receipts.unacked.fault.reason() {
                return Err(self.fail(why));
            }
            if self.draining && self.live_streams == 0 {
                self.draining = false;
                self.consumers_prefetch = 0;
                self.receipts.unacked.start_epoch();
            }
            if !self.consuming && !self.draining {
                if self.channel.status().connected() {
                    return Ok(None);
                }
                return Err(self.fail("channel closed".to_owned()));
            }
            if !self.draining && self.opening.is_none() {
                self.open_consumer();
            }
            let (live, waiting) = (self.live_streams > 0, !self.draining && self.consumers_prefetch < self.prefetch);
            let opening = self.opening.is_some();
            tokio::select! {
                arrival = next_arrival(&mut self.arrivals), if live => {
                    if let Some(delivery) = self.handle_item(arrival)? {
                        return Ok(Some(delivery));
                    }
                }
                opened = ready(&mut self.opening), if opening => self.add_consumer(opened)?,
                () = self.receipts.unacked.freed.notified(), if waiting => {}
                _ = self.receipts.unacked.fault.wait() => {}
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.failure {
            return Err(QueueError::Unavailable(why.clone()));
        }
        self.consuming = false;
        self.wait_opened().await?;
        self.draining |= !self.tags.is_empty();
        while let Some(tag) = self.tags.last() {
            let call = self.channel.basic_cancel(tag.as_str().into(), BasicCancelOptions { nowait: false });
            if let Err(failure) = with_call_limit(call).await {
                return Err(self.fail(failure.describe("cancel the consumer")));
            }
            self.tags.pop();
        }
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        if let Some(why) = &self.failure {
            return Err(QueueError::Unavailable(why.clone()));
        }
        // `next` opens a consumer once everything that had arrived is given out and its places are known.
        self.consuming = true;
        Ok(())
    }

    /// For more places, `next` opens a further consumer. A consumer keeps its prefetch, so for fewer, another begins.
    async fn resize(&mut self, places: u16) -> Result<(), QueueError> {
        self.prefetch = usize::from(places);
        if self.consuming && self.prefetch < self.consumers_prefetch {
            self.stop().await?;
            self.resume().await?;
        }
        Ok(())
    }
}

/// <https://www.rabbitmq.com/docs/dlx#effects>
const DEATHS: &str = "x-death";

/// The oldest message of a queue, if it has one, on a channel of its own.
async fn take_one(
    generation: &Generation,
    queue: &str,
) -> Result<Option<(lapin::message::Delivery, OpenChannel)>, QueueError> {
    let channel = generation.open_channel().await?;
    match with_call_limit(channel.basic_get(queue.into(), BasicGetOptions { no_ack: false })).await {
        Ok(got) => Ok(got.map(|message| (message.delivery, channel))),
        // Nothing was ever put there where nothing is declared.
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure.into_error(&format!("look into queue `{queue}`"))),
    }
}

pub async fn take_invalid(generation: &Generation, topology: &Topology) -> Result<Option<InvalidLetter>, QueueError> {
    let got = take_one(generation, &topology.invalid()).await?;
    Ok(got.map(|(message, channel)| InvalidLetter {
        properties: wire::from_amqp(&message.properties),
        body: message.data.into(),
        receipt: Box::new(HeldMessage::new(message.acker, channel)),
    }))
}

pub async fn take_dead_letter(generation: &Generation, topology: &Topology) -> Result<Option<DeadLetter>, QueueError> {
    let got = take_one(generation, &topology.dead()).await?;
    Ok(got.map(|(message, channel)| DeadLetter {
        lane: lane_of(&message.properties, topology),
        cause: cause_of(&message.properties),
        properties: wire::from_amqp(&message.properties),
        body: message.data.into(),
        receipt: Box::new(HeldMessage::new(message.acker, channel)),
    }))
}

/// The lane that gave up last, for whatever reason: too many deliveries, or an `expiration` that the producer set.
fn lane_of(properties: &BasicProperties, topology: &Topology) -> Option<ProviderName> {
    deaths(properties).find_map(|death| topology.provider_of(&text(death.get("queue")?)?))
}

/// The broker puts the last death first.
fn cause_of(properties: &BasicProperties) -> DeathCause {
    let reason = deaths(properties).next().and_then(|death| text(death.get("reason")?));
    if reason.as_deref() == Some("expired") { DeathCause::Expired } else { DeathCause::DeliveryLimit }
}

fn deaths(properties: &BasicProperties) -> impl Iterator<Item = &BTreeMap<ShortString, AMQPValue>> {
    let header = properties.headers().as_ref().and_then(|headers| headers.inner().get(DEATHS)?.as_array());
    let deaths = header.map(FieldArray::as_slice).unwrap_or_default();
    deaths.iter().filter_map(|death| death.as_field_table().map(FieldTable::inner))
}

fn text(value: &AMQPValue) -> Option<String> {
    value.as_long_string().map(ToString::to_string)
}

/// Dropping it closes the channel, and the broker has the message back.
pub struct HeldMessage {
    acker: Acker,
    _channel: OpenChannel,
}

impl HeldMessage {
    pub fn new(acker: Acker, channel: OpenChannel) -> Self {
        Self { acker, _channel: channel }
    }
}

fn check_result(answer: Result<bool, CallFailure>, doing: &str) -> Result<(), QueueError> {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(QueueError::Unavailable(format!("{doing}: the channel is gone"))),
        Err(failure) => Err(QueueError::Unavailable(failure.describe(doing))),
    }
}

#[async_trait]
impl Receipt for HeldMessage {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        check_result(with_call_limit(self.acker.ack(BasicAckOptions { multiple: false })).await, "acknowledge")
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        check_result(
            with_call_limit(self.acker.nack(BasicNackOptions { multiple: false, requeue: true })).await,
            "requeue",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(queue: &str, reason: &str) -> AMQPValue {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString(queue.into()));
        death.insert("reason".into(), AMQPValue::LongString(reason.into()));
        AMQPValue::FieldTable(death)
    }

    fn with(deaths: Vec<AMQPValue>) -> BasicProperties {
        let mut headers = FieldTable::default();
        headers.insert(DEATHS.into(), AMQPValue::FieldArray(FieldArray::from(deaths)));
        BasicProperties::default().with_headers(headers)
    }

    fn lane(deaths: Vec<AMQPValue>) -> Option<String> {
        lane_of(&with(deaths), &Topology::new("payments")).map(|provider| provider.to_string())
    }

    #[test]
    fn death_header_names_the_lane() {
        assert_eq!(lane(vec![death("payments.acme", "delivery_limit")]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![death("payments.acme", "expired")]).as_deref(), Some("acme"));
        let cause = |deaths| cause_of(&with(deaths));
        assert_eq!(cause(vec![death("payments.acme", "delivery_limit")]), DeathCause::DeliveryLimit);
        assert_eq!(cause(vec![death("payments.acme", "expired")]), DeathCause::Expired);
        for other in [death("payments.dead", "delivery_limit"), death("other.acme", "delivery_limit")] {
            assert_eq!(lane(vec![other.clone()]), None, "{other:?}");
        }
        assert_eq!(lane_of(&BasicProperties::default(), &Topology::new("payments")), None);
    }
}
