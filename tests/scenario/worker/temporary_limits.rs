//! Limits that go back by themselves, while a worker runs and after one was stopped.

use std::time::Duration;

use jiff::Timestamp;
use sluicegate::ops::limit_change::{WantedLimit, set_limit};
use sluicegate::ops::until::Until;

use super::bench::{Bench, limit, name, row};

const HOUR_MS: i64 = 3_600_000;

/// Sets limit `all` of `acme`; returns when it goes back.
async fn set_for(bench: &Bench, rate: &str, time: Duration) -> Timestamp {
    let at = Timestamp::now() + time;
    let provider = name("acme");
    let (rate, until) = (Some(rate.parse().unwrap()), at.to_string().parse::<Until>().unwrap());
    let wanted = WantedLimit { provider: &provider, limit: "all", rate, until };
    set_limit(&bench.database, &wanted, false, None).await.unwrap();
    at
}

async fn most(bench: &Bench) -> i64 {
    bench.database.readable_rows(Some(&name("acme"))).await.unwrap()[0].limits[0].max_requests
}

/// The lower limit counts what was sent under the higher one.
#[tokio::test]
async fn limit_goes_back_and_keeps_its_usage() {
    let lane = sluicegate::ledger::provider_row::ProviderRow {
        mode: "requeue".to_owned(),
        limits: vec![limit(3, HOUR_MS)],
        ..row("acme")
    };
    let bench = Bench::open(&[lane]).await;
    let back_at = set_for(&bench, "10/1h", Duration::from_secs(4)).await;
    for id in ["a", "b", "c", "d", "e"] {
        bench.pay("acme", id).await;
    }
    for id in ["a", "b", "c", "d", "e"] {
        bench.until_state(id, "succeeded").await;
    }
    assert!(Timestamp::now() < back_at, "too slow to send five payments before the limit goes back");
    while most(&bench).await != 3 {
        assert!(Timestamp::now() < back_at + Duration::from_secs(20), "the limit does not go back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(Timestamp::now() >= back_at, "too early");
    bench.settings_known().await;
    bench.pay("acme", "f").await;
    bench.until_delayed("f", "waits for limit all").await;
    assert_eq!(bench.script.sent().len(), 5);
}

/// A worker that starts later sends nothing at the rate whose time is over.
#[tokio::test]
async fn limit_goes_back_before_a_late_start() {
    let mut bench = Bench::prepared(&[sluicegate::ledger::provider_row::ProviderRow {
        limits: vec![limit(0, 1_000)],
        ..row("acme")
    }])
    .await;
    let back_at = set_for(&bench, "100/1s", Duration::from_millis(300)).await;
    bench.pay("acme", "a").await;
    while Timestamp::now() < back_at {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bench.run();
    bench.settings_known().await;
    assert_eq!(most(&bench).await, 0);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(bench.script.sent().len(), 0);
    bench.database.set_rate(&name("acme"), "all", "5/1s".parse().unwrap()).await.unwrap();
    bench.until_state("a", "succeeded").await;
}
