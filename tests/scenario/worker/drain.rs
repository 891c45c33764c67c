//! Drain of a stopping worker: waiting jobs are requeued, requests in flight are finished, and the report counts the
//! rest.

use std::time::Duration;

use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::worker::supervisor::DrainReport;

use super::bench::{Bench, limit, row};
use super::script::{Act, accepted};

/// Jobs in flight, at the gate, without a worker slot and in the backlog, all at once.
#[tokio::test]
async fn drain_finishes_in_flight_and_returns_the_rest() {
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
    bench.until("all worker slots and the wait queue are in use", async || bench.active().await >= 6).await;
    let refused = "SELECT count(*) FROM jobs WHERE provider = 'cool' AND backlog";
    bench.until("refused jobs wait in the backlog", async || bench.count(refused).await >= 1).await;
    bench.ask_to_stop();
    bench.until("no waiting job is leased", async || bench.active().await == 0).await;
    bench.script.release_all();
    assert_eq!(bench.stopped().await, DrainReport::default());
    for provider in ["acme", "bolt", "cool"] {
        let first = bench.job(&format!("{provider}-0")).await.unwrap();
        assert_eq!((first.state.as_str(), first.held), ("succeeded", false), "{provider}");
        let in_backlog = format!("SELECT count(*) FROM jobs WHERE provider = '{provider}' AND backlog");
        assert_eq!((bench.count(&in_backlog).await, bench.queued(provider)), (3, 0), "{provider}");
    }
    assert_eq!(bench.messages.taken(), 0);
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE holder IS NOT NULL").await, 0);
    assert_eq!(bench.script.sent().len(), 3, "a request was begun after the stop");
    assert_eq!(bench.events().await.len(), 3, "an event was not published before the worker ended");
}

/// If an event waited for the slowest response, it would be late. After five seconds, another worker would publish it.
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
    bench.script.release("soon");
    bench.until("its event is published", async || bench.events_of("soon").await.len() == 1).await;
    assert_eq!(bench.events_of("late").await.len(), 0);
    bench.script.release_all();
    assert_eq!(bench.stopped().await, DrainReport::default());
    assert_eq!(bench.events_of("late").await.len(), 1);
}

/// The next worker resumes what the first one abandoned: the same request, one charge.
#[tokio::test]
async fn timed_out_drain_reports_abandoned_jobs() {
    // A short timeout, because after a cold start the limiter waits until earlier requests have aged out.
    let mut bench = Bench::prepared(&[ProviderRow { timeout_ms: 500, ..row("acme") }]).await;
    bench.drain_timeout(Duration::from_millis(50));
    bench.run();
    for id in ["one", "two"] {
        bench.script.plan(id, [Act::Hold, Act::Answer(accepted())]);
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 2).await;
    assert_eq!(
        bench.stop().await,
        DrainReport { timed_out: true, left_active: 2, abandoned_in_flight: 2, unwritten: 0 }
    );
    for id in ["one", "two"] {
        assert_eq!(bench.job(id).await.unwrap().state, "sending", "the outcome of {id} is unknown");
    }
    bench.run();
    for id in ["one", "two"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 2);
        let sent = bench.script.sent_for(id);
        assert_eq!((sent.len(), sent[0].request == sent[1].request), (2, true));
        assert_eq!(bench.script.charges("acme", id), 1);
    }
    // The first worker's responses come late and change no row.
    bench.script.release_all();
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

/// A worker that is stopped before it has begun consumes no message.
#[tokio::test]
async fn worker_stopped_at_start_consumes_nothing() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.pay("acme", "job").await;
    bench.run();
    assert_eq!(bench.stop().await, DrainReport::default());
    assert_eq!((bench.queued("acme"), bench.script.sent().len()), (1, 0));
}
