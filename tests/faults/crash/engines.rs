//! One RabbitMQ, one Redis and one PostgreSQL for all cells: each cell has a database, a lane and Redis keys of its own.
//!
//! The cells share one queue topology: delay queues carry messages of any lane, and declaring ten quorum queues takes a
//! second.

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind};
use sluicegate::ledger::database::Database;
use sluicegate::limiter::leader_election::holder_name;
use tokio::sync::OnceCell;

use crate::support::postgres::Postgres;
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::Redis;

const TEMPLATE: &str = "crash_template";

pub struct Engines {
    pub broker: String,
    pub redis: String,
    /// Name of that Redis in the leader row.
    pub holder: String,
}

impl Engines {
    pub const VHOST: &str = "crash";

    /// Starts the backends at the first call.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Engines> = OnceCell::const_new();
        SHARED
            .get_or_init(|| async {
                let broker = tokio::task::spawn_blocking(|| RabbitNode::shared().create_vhost(Self::VHOST));
                let redis = tokio::task::spawn_blocking(|| Redis::shared().url());
                let template = tokio::task::spawn_blocking(|| Postgres::shared().create_database(TEMPLATE));
                let database = Database::open(&template.await.unwrap(), 1).unwrap();
                database.migrate().await.unwrap();
                database.close().await;
                let redis = redis.await.unwrap();
                let info: String = Redis::shared().command("INFO server");
                let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap();
                Self { broker: broker.await.unwrap(), redis, holder: holder_name(run_id) }
            })
            .await
    }

    /// Creates a migrated database and returns its URL.
    pub async fn database(&self, name: &str) -> String {
        let name = name.to_owned();
        let created = tokio::task::spawn_blocking(move || {
            let sql = format!("CREATE DATABASE \"{name}\" TEMPLATE {TEMPLATE}");
            let output = Postgres::shared().psql("postgres").args(["-c", &sql]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Postgres::shared().url(&name)
        });
        created.await.unwrap()
    }
}

/// A producer and an observer of queues, over one connection of their own.
pub struct Broker {
    channel: Channel,
    connection: Connection,
}

impl Broker {
    pub async fn connect(url: &str) -> Self {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        Self { channel, connection }
    }

    /// Publishes to a lane, mandatory and confirmed.
    pub async fn publish(&self, exchange: &str, lane: &str, body: &str) {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let properties = BasicProperties::default().with_delivery_mode(2);
        let (exchange, lane) = (exchange.into(), lane.into());
        let publishing = self.channel.basic_publish(exchange, lane, options, body.as_bytes(), properties);
        let confirmation = publishing.await.unwrap().await.unwrap();
        assert!(matches!(confirmation, Confirmation::Ack(None)), "{confirmation:?}");
    }

    /// Ready messages of a queue, without unacknowledged ones; `None` if the queue does not exist.
    pub async fn ready(&self, queue: &str) -> Option<u32> {
        let channel = self.connection.create_channel().await.unwrap();
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let found = channel.queue_declare(queue.into(), options, FieldTable::default()).await;
        found.ok().map(|queue| queue.message_count())
    }

    /// Consumes every message of a queue; none if the queue does not exist.
    pub async fn drain(&self, queue: &str) -> Vec<serde_json::Value> {
        let mut bodies = Vec::new();
        if self.ready(queue).await.is_none() {
            return bodies;
        }
        let options = BasicGetOptions { no_ack: true };
        while let Some(message) = self.channel.basic_get(queue.into(), options).await.unwrap() {
            bodies.push(serde_json::from_slice(&message.data).unwrap());
        }
        bodies
    }

    /// Binds a queue to one lane's outcome events and returns its name.
    pub async fn keep_outcomes(&self, prefix: &str, lane: &str) -> String {
        let (exchange, queue) = (format!("{prefix}.outcomes"), format!("kept.{lane}"));
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let (kind, none) = (ExchangeKind::Topic, FieldTable::default);
        self.channel.exchange_declare(exchange.as_str().into(), kind, durable, none()).await.unwrap();
        let options = QueueDeclareOptions::default();
        self.channel.queue_declare(queue.as_str().into(), options, none()).await.unwrap();
        let (q, e, key) = (queue.as_str().into(), exchange.as_str().into(), format!("{lane}.*"));
        self.channel.queue_bind(q, e, key.as_str().into(), QueueBindOptions::default(), none()).await.unwrap();
        queue
    }
}
