//! A producer and a subscriber for fault runs: one publishes until the broker confirms, the other collects outcome events.
//!
//! They use none of the program's queue code. An unconfirmed message is published again with the same id, as producers
//! should do.

use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::time::{sleep, timeout};

const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Publishes in flight.
const BATCH: usize = 64;

/// The broker's answer to a publish.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PublishAnswer {
    Taken,
    /// No queue is bound for the message.
    Returned,
    Nothing,
}

/// An AMQP client that connects again after a restart of the broker.
pub struct Client {
    url: String,
    channel: tokio::sync::Mutex<Option<(Connection, Channel)>>,
}

impl Client {
    pub fn new(url: String) -> Self {
        Self { url, channel: tokio::sync::Mutex::new(None) }
    }

    /// Publishes each body to the lane of that name. Returns when the broker has confirmed all of them.
    pub async fn publish(&self, lane: &str, bodies: &[String]) {
        let mut open: Vec<&String> = bodies.iter().collect();
        while !open.is_empty() {
            let batch: Vec<&String> = open.iter().copied().take(BATCH).collect();
            let confirmed = self.publish_some(lane, &batch).await;
            let mut place = 0;
            open.retain(|_| {
                place += 1;
                !confirmed.get(place - 1).copied().unwrap_or(false)
            });
        }
    }

    /// For each body, whether the broker confirmed it.
    async fn publish_some(&self, lane: &str, bodies: &[&String]) -> Vec<bool> {
        let Some(channel) = self.channel().await else {
            sleep(Duration::from_millis(200)).await;
            return Vec::new();
        };
        let publish = async |body: &String| {
            let properties =
                BasicProperties::default().with_delivery_mode(2).with_content_type("application/json".into());
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let exchange = "payments".into();
            let written = channel.basic_publish(exchange, lane.into(), options, body.as_bytes(), properties).await;
            let Ok(confirm) = written else { return PublishAnswer::Nothing };
            match confirm.await {
                Ok(Confirmation::Ack(None)) => PublishAnswer::Taken,
                Ok(Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_))) => PublishAnswer::Returned,
                _ => PublishAnswer::Nothing,
            }
        };
        let publishing = join_all(bodies.iter().map(|body| timeout(CALL_LIMIT, publish(body))));
        let answers: Vec<PublishAnswer> =
            publishing.await.into_iter().map(|answer| answer.unwrap_or(PublishAnswer::Nothing)).collect();
        // lapin 4.12.3 can assign a returned message to another publish's confirm. So a return leaves the whole batch
        // unconfirmed.
        let returned = answers.contains(&PublishAnswer::Returned);
        let confirmed: Vec<bool> =
            answers.into_iter().map(|answer| answer == PublishAnswer::Taken && !returned).collect();
        if confirmed.contains(&false) {
            *self.channel.lock().await = None;
        }
        confirmed
    }

    async fn channel(&self) -> Option<Channel> {
        let mut slot = self.channel.lock().await;
        if let Some((connection, channel)) = slot.as_ref()
            && connection.status().connected()
            && channel.status().connected()
        {
            return Some(channel.clone());
        }
        let connecting = async {
            let connection = Connection::connect(&self.url, ConnectionProperties::default()).await.ok()?;
            let channel = connection.create_channel().await.ok()?;
            channel.confirm_select(ConfirmSelectOptions { nowait: false }).await.ok()?;
            Some((connection, channel))
        };
        *slot = timeout(CALL_LIMIT, connecting).await.ok().flatten();
        slot.as_ref().map(|(_, channel)| channel.clone())
    }

    /// Declares a durable queue and binds it to every message of an exchange.
    pub async fn subscribe(&self, queue: &str, exchange: &str) {
        let channel = self.channel().await.expect("the broker runs");
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        channel.queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments).await.unwrap();
        let nothing = FieldTable::default();
        let options = QueueBindOptions { nowait: false };
        channel.queue_bind(queue.into(), exchange.into(), "#".into(), options, nothing).await.unwrap();
        // The broker writes its registry of quorum queues to disk a second later.
        sleep(Duration::from_millis(1_500)).await;
    }

    /// Messages that are ready in a queue; `None` when the broker does not answer.
    pub async fn ready(&self, queue: &str) -> Option<u32> {
        let channel = self.channel().await?;
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::durable() };
        let asking = channel.queue_declare(queue.into(), options, FieldTable::default());
        timeout(CALL_LIMIT, asking).await.ok()?.ok().map(|queue| queue.message_count())
    }

    /// Consumes every message of a queue: routing key and body.
    pub async fn drain(&self, queue: &str) -> Vec<(String, Vec<u8>)> {
        let channel = self.channel().await.expect("the broker runs");
        let mut messages = Vec::new();
        while let Some(message) = channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap() {
            messages.push((message.delivery.routing_key.to_string(), message.delivery.data));
        }
        messages
    }
}
