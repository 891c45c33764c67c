//! A subscriber whose queue is full: its events wait, other events are published, and a warning reports it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sluicegate::domain::provider::ProviderName;
use sluicegate::queue::{DeadLetter, Destination, LaneConsumer, OutgoingMessage, Queue, QueueError};

use super::bench::{Bench, row};

/// The embedded queue with a full subscriber's queue for one provider's events.
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
             INSERT INTO outcome_events (job_id, provider, state, reason, attempts, at) \
             SELECT 'a', 'acme', 'succeeded', 'event ' || i, 1, 1 FROM n"
        ))
        .await;
    let rejected = "SELECT count(*) FROM outcome_events WHERE tries > 0 AND published_at IS NULL";
    bench.until("all events are rejected", async || bench.count(rejected).await == STUCK + 1).await;
    bench.pay("bolt", "b").await;
    bench.until("the other provider's event", async || bench.events_of("b").await.len() == 1).await;
    let tries = "SELECT sum(tries) FROM outcome_events";
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
    bench.sql("UPDATE outcome_events SET next_try_at = at WHERE next_try_at IS NOT NULL").await;
    let open = "SELECT count(*) FROM outcome_events WHERE published_at IS NULL";
    bench.until("all events are published", async || bench.count(open).await == 0).await;
    assert_eq!(bench.events().await.len() as i64, STUCK + 2, "none twice");
    let none_left = async || bench.unpublished().is_some_and(|unpublished| unpublished.events == 0);
    tokio::time::timeout(Duration::from_secs(60), bench.until("the worker reports no unpublished event", none_left))
        .await
        .unwrap();
}
