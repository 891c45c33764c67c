//! A backlog of outcome events: overlapping batches publish each event once and leave none behind.

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
             INSERT INTO outcome_events (job_id, provider, state, reason, attempts, at) \
             SELECT 'one', 'acme', 'succeeded', 'event ' || i, 1, 1 FROM n"
        ))
        .await;
    bench.run();
    let unpublished = "SELECT count(*) FROM outcome_events WHERE published_at IS NULL";
    bench.until("all events are marked as published", async || bench.count(unpublished).await == 0).await;
    let events = bench.events().await;
    let reasons: BTreeSet<&str> = events.iter().filter_map(|event| event.body["reason"].as_str()).collect();
    let expected: BTreeSet<String> = (1..=MORE).map(|number| format!("event {number}")).collect();
    assert_eq!(events.len(), MORE + 1, "none twice");
    assert!(expected.iter().all(|reason| reasons.contains(reason.as_str())), "an event is missing");
    bench.stop().await;
}
