//! Events that a broker rejects, does not confirm, or confirms late: they wait, and other events are published.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::Value;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::{DeadLetter, Destination, LaneConsumer, OutgoingMessage, Queue, QueueError};
use tokio::sync::watch;

use super::bench::{Bench, row};

/// A queue with a full subscriber's queue for one provider's events.
struct WithFullListener {
    queue: Arc<dyn Queue>,
    full: AtomicBool,
    rejections: AtomicU32,
}

#[async_trait]
impl Queue for WithFullListener {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        self.queue.declare(providers).await
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        self.queue.open_lane(provider, places).await
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        let listened =
            matches!(&message.destination, Destination::Outcomes { provider, .. } if provider.as_str() == "acme");
        if listened && self.full.load(Ordering::SeqCst) {
            self.rejections.fetch_add(1, Ordering::SeqCst);
            return Err(QueueError::Rejected("full".to_owned()));
        }
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

#[tokio::test]
async fn rejected_events_block_no_others() {
    const STUCK: i64 = 600;
    let mut bench = Bench::prepared(&[row("acme"), row("bolt")]).await;
    let broker =
        Arc::new(WithFullListener { queue: bench.queue(), full: AtomicBool::new(true), rejections: AtomicU32::new(0) });
    bench.broker = Some(broker.clone());
    bench.run();
    bench.pay("acme", "a").await;
    bench.until_state("a", "succeeded").await;
    // More events than one batch, all older than later ones.
    bench
        .sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {STUCK}) \
             INSERT INTO events (job_id, n, provider, state, reason, attempts, at) \
             SELECT 'a', 1 + i, 'acme', 'succeeded', 'event ' || i, 1, 1 FROM n"
        ))
        .await;
    let rejected = "SELECT count(*) FROM event_retries WHERE tries > 0";
    bench.until("all events are rejected", async || bench.count(rejected).await == STUCK + 1).await;
    bench.pay("bolt", "b").await;
    bench.until("the other provider's event", async || bench.events_of("b").await.len() == 1).await;
    let tries = "SELECT sum(tries) FROM event_retries";
    assert_eq!(bench.count(tries).await, i64::from(broker.rejections.load(Ordering::SeqCst)), "a try was not counted");
    bench
        .until("the worker reports the rejected events", async || {
            bench.unpublished().is_some_and(|unpublished| unpublished.rejected > 0)
        })
        .await;
    let warning = bench.unpublished().and_then(|unpublished| unpublished.warning()).unwrap();
    assert!(warning.contains("rejected by a queue"), "{warning}");
    // The subscriber's queue accepts events again, and their next try is due.
    broker.full.store(false, Ordering::SeqCst);
    bench.sql("UPDATE event_retries SET next_try_at = 0").await;
    bench.until("all events are published", async || bench.unpublished_events().await == 0).await;
    assert_eq!(bench.events().await.len() as i64, STUCK + 2, "none twice");
    let none_left = async || bench.unpublished().is_some_and(|unpublished| unpublished.events == 0);
    tokio::time::timeout(Duration::from_secs(60), bench.until("the worker reports no unpublished event", none_left))
        .await
        .unwrap();
}

/// A queue, with a fate of their own for some events, by their reasons.
struct WithFates {
    queue: Arc<dyn Queue>,
    /// The reasons of all publishes, in order.
    published: Mutex<Vec<String>>,
    confirms_late: watch::Sender<bool>,
}

impl WithFates {
    fn publishes_of(&self, reason: &str) -> usize {
        self.published.lock().iter().filter(|published| *published == reason).count()
    }
}

#[async_trait]
impl Queue for WithFates {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        self.queue.declare(providers).await
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        self.queue.open_lane(provider, places).await
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        let event: Value = serde_json::from_slice(&message.body).unwrap();
        let reason = event["reason"].as_str().unwrap_or_default().to_owned();
        self.published.lock().push(reason.clone());
        match reason.as_str() {
            "rejected" => return Err(QueueError::Rejected("full".to_owned())),
            "unconfirmed" if self.publishes_of(&reason) == 1 => {
                return Err(QueueError::NotConfirmed("channel closed".to_owned()));
            }
            "unroutable" if self.publishes_of(&reason) == 1 => {
                return Err(QueueError::Unroutable("acme.succeeded".to_owned()));
            }
            "late" => drop(self.confirms_late.subscribe().wait_for(|confirms| *confirms).await),
            _ => {}
        }
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

/// On one page: each event is passed, tried again or waited for by itself.
#[tokio::test]
async fn each_event_of_a_page_has_its_own_end() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "one").await;
    bench.until_state("one", "succeeded").await;
    bench.stop().await;
    bench
        .sql(
            "WITH n(reason) AS (VALUES ('a'), ('rejected'), ('b'), ('unconfirmed'), ('late'), ('unroutable'), ('c')) \
             INSERT INTO events (job_id, n, provider, state, reason, attempts, at) \
             SELECT 'one', 2, 'acme', 'succeeded', reason, 1, 1 FROM n",
        )
        .await;
    let broker = Arc::new(WithFates {
        queue: bench.queue(),
        published: Mutex::default(),
        confirms_late: watch::Sender::new(false),
    });
    bench.broker = Some(broker.clone());
    bench.run();
    let left = "SELECT reason || ' ' || tries FROM events JOIN event_retries USING (sequence) ORDER BY reason";
    bench.until("two have left the order", async || bench.texts(left).await == ["late 0", "rejected 1"]).await;
    assert_eq!(bench.unpublished_events().await, 2);
    for (reason, publishes) in [("a", 1), ("b", 1), ("c", 1), ("unconfirmed", 2), ("unroutable", 2), ("late", 1)] {
        assert_eq!(broker.publishes_of(reason), publishes, "{reason}");
    }
    broker.confirms_late.send_replace(true);
    bench.until("the late one is confirmed", async || bench.texts(left).await == ["rejected 1"]).await;
    assert_eq!(broker.publishes_of("late"), 1, "it was published again");
    let events = bench.events().await;
    let of = |reason: &str| events.iter().filter(|event| event.body["reason"] == reason).count();
    for reason in ["a", "b", "c", "unconfirmed", "unroutable", "late"] {
        assert_eq!(of(reason), 1, "{reason}");
    }
}

/// More events about rejected messages than are published at once.
#[tokio::test]
async fn events_about_rejections_block_no_others() {
    const STUCK: i64 = 120;
    let strict = |name| ProviderRow { require: vec![serde_json::json!("account")], ..row(name) };
    let mut bench = Bench::prepared(&[strict("acme"), strict("bolt")]).await;
    let broker =
        Arc::new(WithFullListener { queue: bench.queue(), full: AtomicBool::new(true), rejections: AtomicU32::new(0) });
    bench.broker = Some(broker.clone());
    bench
        .sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {STUCK}) \
             INSERT INTO rejected_messages (at, lane, reason, detail, body_sha256, body_bytes) \
             SELECT 0, 'acme', 'bad_amount', 'amount', zeroblob(32), 1 FROM n"
        ))
        .await;
    bench.run();
    bench.pay("bolt", "b").await;
    bench.until("the other provider's event", async || bench.published("payments.outcomes").await.len() == 1).await;
    assert!(broker.rejections.load(Ordering::SeqCst) > 0);
    broker.full.store(false, Ordering::SeqCst);
    let open = "SELECT count(*) FROM rejected_messages WHERE announced_at IS NULL";
    bench.until("all events are published", async || bench.count(open).await == 0).await;
    assert_eq!(bench.published("payments.outcomes").await.len() as i64, STUCK + 1);
}
