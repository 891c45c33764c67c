//! Message copies of one job: at most one is valid, however often the job is republished.

use std::time::Duration;

use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ledger::upkeep::CheckScope;

use super::bench::{Bench, limit, name, row};

const HOUR_MS: i64 = 3_600_000;
const JOBS: usize = 20;

/// One payment an hour per reference, far below the provider's limit.
fn strict_on_references() -> ProviderRow {
    let per_reference =
        LimitRow { name: "per-reference".to_owned(), scope: "reference".to_owned(), ..limit(1, HOUR_MS) };
    ProviderRow {
        mode: "requeue".to_owned(),
        limits: vec![limit(1_000, 100), per_reference],
        leak_per_second: Some(1_000.0),
        ..row("acme")
    }
}

async fn pay(bench: &Bench, id: &str) {
    let body = serde_json::json!({ "id": id, "reference": "m", "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &body.to_string()).await;
}

/// Waits until the current limits have refused every open job, for longer than this test takes.
async fn until_all_are_delayed(bench: &Bench, since_ms: i64) {
    let refused = format!(
        "SELECT count(*) FROM jobs WHERE state = 'waiting' AND lease_until IS NULL AND NOT unqueued \
         AND wait_begun_at > {since_ms} AND wake_at > unixepoch('subsec') * 1000 + 60000"
    );
    let open = "SELECT count(*) FROM jobs WHERE state = 'waiting'";
    let idle = async || {
        let ready = bench.queued("acme").await - bench.delayed("acme").await;
        let taken = bench.count("SELECT count(*) FROM queue_messages WHERE taken <> 0").await;
        bench.count(&refused).await == bench.count(open).await && ready == 0 && taken == 0
    };
    bench.until("all are delayed by the limits as they are now", idle).await;
}

#[tokio::test]
async fn changed_limits_add_no_copies_of_delayed_jobs() {
    let bench = Bench::open(&[strict_on_references()]).await;
    for number in 0..JOBS {
        pay(&bench, &format!("p-{number}")).await;
    }
    let all = format!("{JOBS} jobs");
    bench.until(&all, async || bench.count("SELECT count(*) FROM jobs").await == JOBS as i64).await;
    until_all_are_delayed(&bench, 0).await;
    for change in 1..=3 {
        let now_ms = bench.count("SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)").await;
        let rate = Rate::new(1 + change, Duration::from_secs(3_600)).unwrap();
        bench.database.set_rate(&name("acme"), "per-reference", rate).await.unwrap();
        until_all_are_delayed(&bench, now_ms).await;
        // Copies of jobs that have finished are still in their delay queues.
        let copies = bench.queued("acme").await;
        assert!(copies <= JOBS as i64, "{copies} copies of {JOBS} jobs after {change} changes");
    }
    // Those copies bring each job again, and each job is charged once.
    bench.apply(&[ProviderRow { limits: vec![limit(1_000, 100)], ..strict_on_references() }]).await;
    for number in 0..JOBS {
        let job = bench.until_state(&format!("p-{number}"), "succeeded").await;
        assert_eq!(job.attempts, 1, "p-{number}");
    }
    let faults = bench.database.reconcile(Duration::from_secs(7_200), CheckScope::All).await.unwrap();
    assert!(faults.iter().all(|account| account.discrepancies().is_empty()), "{faults:?}");
}
