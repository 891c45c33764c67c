//! Leaving: what waits is handed back, what is on the wire is finished, and the report says what was not.

use std::time::Duration;

use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::worker::supervisor::DrainReport;

use super::bench::{Bench, limit, row};
use super::script::{Act, accepted};

/// On the wire, at the gate, in the pool, parked and in the queue, all at once.
#[tokio::test]
async fn drain_finishes_in_flight_and_requeues_the_rest() {
    let one_slot = ProviderRow {
        limits: vec![limit(1, 30_000)],
        leak_per_second: Some(1_000.0),
        max_wait_ms: 60_000,
        ..row("acme")
    };
    let one_worker = ProviderRow { workers: 1, ..row("bolt") };
    let requeue = ProviderRow { mode: "requeue".to_owned(), name: "cool".to_owned(), ..one_slot.clone() };
    let mut bench = Bench::open(&[one_slot, one_worker, requeue]).await;
    for provider in ["acme", "bolt", "cool"] {
        bench.script.plan(&format!("{provider}-0"), [Act::Hold]);
        bench.pay(provider, &format!("{provider}-0")).await;
        bench.until_sent(provider, 1).await;
        for number in 1..4 {
            bench.pay(provider, &format!("{provider}-{number}")).await;
        }
    }
    bench.until("gate and pool are full", async || bench.in_hand().await >= 6).await;
    bench.until("refused ones are parked", async || bench.parked("cool").await >= 1).await;
    bench.ask_to_stop();
    bench.until("what waits is free", async || bench.in_hand().await == 0).await;
    bench.script.let_go();
    assert_eq!(bench.stopped().await, DrainReport::default());
    for provider in ["acme", "bolt", "cool"] {
        let first = bench.job(&format!("{provider}-0")).await.unwrap();
        assert_eq!((first.state.as_str(), first.held), ("succeeded", false), "{provider}");
        assert_eq!(bench.queued(provider).await, 3, "{provider}");
    }
    assert_eq!(bench.count("SELECT count(*) FROM queue_messages WHERE taken <> 0").await, 0);
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE lease_until IS NOT NULL").await, 0);
    assert_eq!(bench.script.sent().len(), 3, "nothing was begun after the stop");
    assert_eq!(bench.events().await.len(), 3, "the last outcomes left before the worker did");
}

/// An event that waited for the slowest answer would be late, and after five seconds somebody else's to publish.
#[tokio::test]
async fn drain_publishes_events_without_waiting() {
    let mut bench = Bench::open(&[row("acme")]).await;
    for id in ["soon", "late"] {
        bench.script.plan(id, [Act::Hold]);
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 2).await;
    bench.ask_to_stop();
    bench.until_draining().await;
    bench.script.let_go_of("soon");
    bench.until("its event is out", async || bench.events_of("soon").await.len() == 1).await;
    assert_eq!(bench.events_of("late").await.len(), 0);
    bench.script.let_go();
    assert_eq!(bench.stopped().await, DrainReport::default());
    assert_eq!(bench.events_of("late").await.len(), 1);
}

/// What the first worker abandoned, the next one takes up: the same request, one charge.
#[tokio::test]
async fn timed_out_drain_reports_abandoned_jobs() {
    // Short, because a limiter that knows nothing waits until nothing from before can count any more.
    let mut bench = Bench::prepared(&[ProviderRow { timeout_ms: 500, ..row("acme") }]).await;
    bench.drain_timeout(Duration::from_millis(50));
    bench.run();
    for id in ["one", "two"] {
        bench.script.plan(id, [Act::Hold, Act::Answer(accepted())]);
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 2).await;
    assert_eq!(bench.stop().await, DrainReport { timed_out: true, left_active: 2, abandoned_in_flight: 2 });
    bench.until("the queue has them again", async || bench.queued("acme").await == 2).await;
    for id in ["one", "two"] {
        assert_eq!(bench.job(id).await.unwrap().state, "sending", "nobody knows what became of {id}");
    }
    // As if the first worker's leases had run out.
    bench.sql("UPDATE jobs SET lease_until = created_at").await;
    bench.run();
    for id in ["one", "two"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 2);
        let sent = bench.script.sent_for(id);
        assert_eq!((sent.len(), sent[0].request == sent[1].request), (2, true));
        assert_eq!(bench.script.charges("acme", id), 1);
    }
    // The first worker's answers come late and write nothing.
    bench.script.let_go();
    assert_eq!(bench.stop().await, DrainReport::default());
    assert_eq!(bench.count("SELECT count(*) FROM attempts").await, 4);
    assert_eq!(bench.events().await.len(), 2);
}

#[tokio::test]
async fn an_idle_worker_stops_at_once() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.settings_known().await;
    assert_eq!(bench.stop().await, DrainReport::default());
}

/// A worker that is told to stop before it has begun takes nothing.
#[tokio::test]
async fn worker_stopped_at_start_consumes_nothing() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.pay("acme", "job").await;
    bench.run();
    assert_eq!(bench.stop().await, DrainReport::default());
    assert_eq!((bench.queued("acme").await, bench.script.sent().len()), (1, 0));
}
