//! The publisher of outcome events: overlapping pages publish each event once, in order, and one worker at a time
//! publishes.

use std::collections::BTreeSet;

use super::bench::{Bench, row};

const MORE: usize = 1_700;

#[tokio::test]
async fn every_backlogged_event_is_published_once() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "one").await;
    bench.until_state("one", "succeeded").await;
    bench.stop().await;
    assert_eq!(bench.events().await.len(), 1);
    bench
        .sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {MORE}) \
             INSERT INTO events (job_id, n, provider, state, reason, attempts, at) \
             SELECT 'one', 1 + i, 'acme', 'succeeded', 'event ' || i, 1, 1 FROM n"
        ))
        .await;
    bench.run();
    bench.until("all events are published", async || bench.unpublished_events().await == 0).await;
    let events = bench.events().await;
    let reasons: Vec<&str> = events.iter().skip(1).filter_map(|event| event.body["reason"].as_str()).collect();
    let expected: Vec<String> = (1..=MORE).map(|number| format!("event {number}")).collect();
    assert_eq!(reasons, expected);
    let ids: BTreeSet<String> = events.iter().map(|event| event.properties["message_id"].to_string()).collect();
    assert_eq!(ids.len(), MORE + 1, "each has an id of its own");
    bench.stop().await;
}

/// The worker dies after it has published an event, and before it has moved the cursor past it.
#[tokio::test]
async fn cursor_of_a_dead_worker_is_taken_over() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "job").await;
    bench.until_state("job", "succeeded").await;
    bench.until("the event", async || bench.events().await.len() == 1).await;
    bench.stop().await;
    assert_eq!(bench.unpublished_events().await, 0, "a worker that stops publishes all of its events");
    bench.sql("UPDATE event_cursors SET position = 0, holder = 'dead'").await;
    bench.run();
    bench.until("the event is published again", async || bench.events().await.len() == 2).await;
    bench.until("the cursor passes it", async || bench.unpublished_events().await == 0).await;
    let ids: BTreeSet<String> =
        bench.events().await.iter().map(|event| event.properties["message_id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "consumers recognise it");
}

/// Its turn goes on while there is nothing to publish.
#[tokio::test]
async fn idle_worker_keeps_the_cursor() {
    let bench = Bench::open(&[row("acme")]).await;
    let holder = async || bench.texts("SELECT COALESCE(holder, 'none') FROM event_cursors").await;
    bench.until("it has the cursor", async || holder().await != ["none"]).await;
    let first = holder().await;
    let mut other = bench.beside();
    other.run();
    let turn = async || bench.count("SELECT turn FROM event_cursors").await;
    // Longer than another worker would wait for a turn that stands still.
    let until = turn().await + 8;
    bench.until("it has written often", async || turn().await >= until).await;
    assert_eq!(holder().await, first);
}
