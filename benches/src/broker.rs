//! RabbitMQ without our worker: the rate of a bare consume-and-acknowledge loop, and the removal of a run's queues and
//! exchanges.
//!
//! The loop acknowledges each message on its own, so its rate is the ceiling for a worker. It uses only a queue that
//! the run declared.

use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde::Serialize;
use tokio::time::{Instant, timeout};

use super::BenchError;

/// The same prefetch as the reference figure.
const PREFETCH: u16 = 100;
const CONFIRMS_AT_ONCE: u64 = 1_000;
/// A body as long as one of our messages.
const BODY: &str = r#"{"amount":100,"currency":"EUR","id":"bench-00000000-0000000","provider":"bench-00000000","v":1}"#;
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// lapin's `persistent`.
const PERSISTENT: u8 = 2;

/// The rate of one consumer that only acknowledges, message by message.
#[derive(Clone, Debug, Serialize)]
pub struct BareLoop {
    pub messages: u64,
    pub prefetch: u16,
    pub messages_per_second: f64,
}

/// Publishes messages to a new quorum queue, consumes and acknowledges each, and removes the queue.
pub async fn bare_loop(url: &str, prefix: &str, messages: u64) -> Result<BareLoop, BenchError> {
    let connection = connect(url).await?;
    let channel = connection.create_channel().await.map_err(to_bench_error)?;
    let queue = format!("{prefix}.bare");
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions::durable();
    channel.queue_declare(queue.as_str().into(), durable, arguments).await.map_err(to_bench_error)?;
    let measured = async {
        fill(&channel, &queue, messages).await?;
        empty(&channel, &queue, messages).await
    };
    let measured = measured.await;
    let removed =
        channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.map_err(to_bench_error);
    let per_second = measured?;
    removed?;
    connection.close(200, "done".into()).await.map_err(to_bench_error)?;
    Ok(BareLoop { messages, prefetch: PREFETCH, messages_per_second: per_second })
}

async fn fill(channel: &Channel, queue: &str, messages: u64) -> Result<(), BenchError> {
    channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(to_bench_error)?;
    let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    let mut left = messages;
    while left > 0 {
        let mut confirms = Vec::new();
        for _ in 0..left.min(CONFIRMS_AT_ONCE) {
            let options = BasicPublishOptions::default();
            let publish = channel.basic_publish("".into(), queue.into(), options, BODY.as_bytes(), properties.clone());
            confirms.push(publish.await.map_err(to_bench_error)?);
        }
        left -= left.min(CONFIRMS_AT_ONCE);
        for confirm in confirms {
            confirm.await.map_err(to_bench_error)?;
        }
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
async fn empty(channel: &Channel, queue: &str, messages: u64) -> Result<f64, BenchError> {
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await.map_err(to_bench_error)?;
    let options = BasicConsumeOptions::default();
    let consuming = channel.basic_consume(queue.into(), "bare".into(), options, FieldTable::default());
    let mut consumer = consuming.await.map_err(to_bench_error)?;
    let mut began = None;
    for _ in 0..messages {
        let quiet = |_| BenchError::InvalidMeasurement("the broker stopped delivering".to_owned());
        let next = timeout(IDLE_TIMEOUT, consumer.next()).await.map_err(quiet)?;
        let delivery = next
            .ok_or_else(|| BenchError::InvalidMeasurement("the consumer was cancelled".to_owned()))?
            .map_err(to_bench_error)?;
        began.get_or_insert_with(Instant::now);
        delivery.ack(BasicAckOptions::default()).await.map_err(to_bench_error)?;
    }
    let seconds = began.map_or(0.0, |began| began.elapsed().as_secs_f64());
    // A dropped consumer is cancelled later, and a broker without the queue then closes the connection (3.10.8).
    channel.basic_cancel("bare".into(), BasicCancelOptions::default()).await.map_err(to_bench_error)?;
    if seconds > 0.0 {
        Ok(messages as f64 / seconds)
    } else {
        Err(BenchError::InvalidMeasurement("no message was delivered".to_owned()))
    }
}

/// Deletes every queue and exchange of a run.
pub async fn remove(url: &str, prefix: &str, lanes: impl Iterator<Item = String>) -> Result<(), BenchError> {
    let connection = connect(url).await?;
    let channel = connection.create_channel().await.map_err(to_bench_error)?;
    let own = ["invalid", "dead", "bare"].map(str::to_owned).into_iter();
    for name in own.chain(lanes) {
        // Deleting a missing queue is no error: https://www.rabbitmq.com/docs/specification#method-status-queue.delete
        let queue = format!("{prefix}.{name}");
        channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.map_err(to_bench_error)?;
    }
    for name in [format!("{prefix}.outcomes"), prefix.to_owned()] {
        channel
            .exchange_delete(name.as_str().into(), ExchangeDeleteOptions::default())
            .await
            .map_err(to_bench_error)?;
    }
    connection.close(200, "done".into()).await.map_err(to_bench_error)
}

async fn connect(url: &str) -> Result<Connection, BenchError> {
    // `amqp://host/` means the virtual host `/`, which the library writes differently.
    let mut uri: lapin::uri::AMQPUri =
        url.parse().map_err(|_| BenchError::Server("queue.url is not an AMQP URL".to_owned()))?;
    if uri.vhost.is_empty() {
        "/".clone_into(&mut uri.vhost);
    }
    Connection::connect_uri(uri, ConnectionProperties::default()).await.map_err(to_bench_error)
}

fn to_bench_error(error: lapin::Error) -> BenchError {
    BenchError::Server(format!("RabbitMQ: {error}"))
}
