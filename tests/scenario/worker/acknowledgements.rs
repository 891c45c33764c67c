//! Acknowledgements and commits: at the instant of an acknowledgement, a worker that dies loses nothing.
//!
//! The queue of these tests looks at each acknowledgement before it passes it on: what the message was for must be
//! committed, or must come back by another message. A worker that acknowledged first would lose the job in a crash
//! between the two.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::{Value, json};
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::{DeadLetter, Delivery, LaneConsumer, OutgoingMessage, Queue, QueueError, Receipt};
use sqlx::SqlitePool;

use super::bench::{Bench, limit, row};

/// Where a job is safe without the message with its id: recorded, or rejected.
const SAFE: &str = "SELECT (SELECT count(*) FROM jobs WHERE id = ?1) \
     + (SELECT count(*) FROM rejected_messages WHERE job_id = ?1)";

/// What was seen at the acknowledgements.
struct Seen {
    pool: SqlitePool,
    acknowledged: Mutex<Vec<String>>,
    /// Jobs that a crash at this instant would have lost.
    lost: Mutex<Vec<String>>,
}

struct WatchedQueue {
    queue: Arc<dyn Queue>,
    seen: Arc<Seen>,
}

struct WatchedLane {
    lane: Box<dyn LaneConsumer>,
    seen: Arc<Seen>,
}

struct WatchedReceipt {
    id: String,
    receipt: Box<dyn Receipt>,
    seen: Arc<Seen>,
}

#[async_trait]
impl Receipt for WatchedReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        let safe: i64 = sqlx::query_scalar(SAFE).bind(&self.id).fetch_one(&self.seen.pool).await.unwrap();
        if safe == 0 {
            self.seen.lost.lock().unwrap().push(self.id.clone());
        }
        self.seen.acknowledged.lock().unwrap().push(self.id);
        self.receipt.ack().await
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        self.receipt.requeue().await
    }
}

#[async_trait]
impl LaneConsumer for WatchedLane {
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        let seen = &self.seen;
        let watched = |delivery: Delivery| {
            let body: Value = serde_json::from_slice(&delivery.body).unwrap();
            let (id, seen) = (body["id"].as_str().unwrap().to_owned(), Arc::clone(seen));
            Delivery { receipt: Box::new(WatchedReceipt { id, receipt: delivery.receipt, seen }), ..delivery }
        };
        Ok(self.lane.next().await?.map(watched))
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        self.lane.stop().await
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        self.lane.resume().await
    }

    async fn resize(&mut self, places: u16) -> Result<(), QueueError> {
        self.lane.resize(places).await
    }
}

#[async_trait]
impl Queue for WatchedQueue {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        self.queue.declare(providers).await
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        let lane = self.queue.open_lane(provider, places).await?;
        Ok(Box::new(WatchedLane { lane, seen: Arc::clone(&self.seen) }))
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        self.queue.publish(message).await
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        self.queue.take_dead_letter().await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        self.queue.depth(provider).await
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        self.queue.ping().await
    }
}

/// By each way to an acknowledgement: sent at once, recorded in the backlog or asleep, known, and invalid.
#[tokio::test]
async fn no_message_is_acknowledged_before_its_commit() {
    const AT_ONCE: usize = 5;
    const JOBS: usize = 40;
    let hour = ProviderRow { limits: vec![limit(AT_ONCE.try_into().unwrap(), 3_600_000)], ..row("acme") };
    let mut bench = Bench::prepared(&[hour]).await;
    let pool = bench.database.sqlite_pool().unwrap();
    let seen = Arc::new(Seen { pool, acknowledged: Mutex::default(), lost: Mutex::default() });
    bench.broker = Some(Arc::new(WatchedQueue { queue: bench.queue(), seen: Arc::clone(&seen) }));
    for number in 0..JOBS {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench.pay("acme", "job-0").await;
    let body = |id: &str, amount: u64| json!({ "id": id, "amount": amount, "currency": "EUR" });
    bench.publish("acme", &body("invalid", 0).to_string()).await;
    let mut timed = body("timed", 1299);
    timed["not_before"] = json!((Timestamp::now() + Duration::from_secs(60)).to_string());
    bench.publish("acme", &timed.to_string()).await;
    bench.run();
    let acknowledged = || seen.acknowledged.lock().unwrap().clone();
    bench.until("all messages are acknowledged", async || acknowledged().len() >= JOBS + 3).await;
    assert_eq!(*seen.lost.lock().unwrap(), Vec::<String>::new(), "a crash would have lost them");
    for id in ["job-0", "job-39", "invalid", "timed"] {
        assert!(acknowledged().iter().any(|seen| seen == id), "{id}: {:?}", acknowledged());
    }
    assert_eq!(bench.script.sent().len(), AT_ONCE);
    let waiting = i64::try_from(JOBS - AT_ONCE).unwrap();
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE backlog").await, waiting);
}
