//! Limits that have not counted earlier requests: after a restart, as new limits, and when a row joins their quota.
//!
//! Earlier requests still count, and no job waits for requests that its account or reference did not make.

use serde_json::json;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};

use super::bench::{Bench, limit, row};

const DAY_MS: i64 = 86_400_000;

fn daily(name: &str, scope: &str, max_requests: i64) -> LimitRow {
    LimitRow { name: name.to_owned(), scope: scope.to_owned(), ..limit(max_requests, DAY_MS) }
}

/// A row whose jobs are delayed at once if they get no permit.
fn limited(provider: &str, limits: Vec<LimitRow>) -> ProviderRow {
    let limits = [vec![limit(1_000, 100)], limits].concat();
    ProviderRow { mode: "requeue".to_owned(), limits, leak_per_second: Some(1_000.0), ..row(provider) }
}

impl Bench {
    async fn pay_for(&self, provider: &str, id: &str, account: &str) {
        let reference = format!("order {id}");
        let body = json!({ "id": id, "amount": 1, "currency": "EUR", "account": account, "reference": reference });
        self.publish(provider, &body.to_string()).await;
    }

    /// Restarts the worker with an empty limiter.
    async fn restart(&mut self) {
        self.stop().await;
        self.run();
    }
}

#[tokio::test]
async fn restart_keeps_account_and_reference_usage() {
    let limits = vec![daily("per-account", "account", 3), daily("per-reference", "reference", 1)];
    let mut bench = Bench::open(&[limited("acme", limits)]).await;
    for (id, account) in [("a1", "a"), ("a2", "a"), ("b1", "b")] {
        bench.pay_for("acme", id, account).await;
        bench.until_state(id, "succeeded").await;
    }
    for (round, id) in ["a3", "c1", "b2"].into_iter().enumerate() {
        bench.restart().await;
        bench.pay_for("acme", id, &id[..1]).await;
        let job = bench.until_state(id, "succeeded").await;
        assert_eq!(job.attempts, 1, "restart {round}");
    }
    bench.restart().await;
    bench.pay_for("acme", "a4", "a").await;
    bench.pay_for("acme", "b3", "b").await;
    bench.until_delayed("a4", "waits for limit per-account").await;
    bench.until_state("b3", "succeeded").await;
    assert_eq!(bench.script.sent_to("acme").len(), 7);
}

#[tokio::test]
async fn added_daily_limit_counts_the_current_day() {
    let bench = Bench::open(&[limited("acme", Vec::new())]).await;
    for id in ["p1", "p2"] {
        bench.pay_for("acme", id, "a").await;
        bench.until_state(id, "succeeded").await;
    }
    bench.apply(&[limited("acme", vec![daily("daily", "provider", 4), daily("own", "account", 3)])]).await;
    bench.settings_known().await;
    bench.pay_for("acme", "p3", "a").await;
    bench.until_state("p3", "succeeded").await;
    bench.pay_for("acme", "p4", "a").await;
    bench.until_delayed("p4", "waits for limit own").await;
    bench.pay_for("acme", "p5", "b").await;
    bench.until_state("p5", "succeeded").await;
    bench.pay_for("acme", "p6", "c").await;
    bench.until_delayed("p6", "waits for limit daily").await;
    assert_eq!(bench.script.sent_to("acme").len(), 4);
}

#[tokio::test]
async fn row_joining_a_quota_keeps_its_usage() {
    let quota = |provider: &str, quota: &str| ProviderRow {
        quota: Some(quota.to_owned()),
        ..limited(provider, vec![daily("daily", "provider", 4)])
    };
    let bench = Bench::open(&[quota("one", "shared"), quota("two", "other")]).await;
    for (provider, id) in [("one", "o1"), ("two", "t1"), ("two", "t2")] {
        bench.pay_for(provider, id, "a").await;
        bench.until_state(id, "succeeded").await;
    }
    bench.sql("UPDATE providers SET quota = 'shared' WHERE name = 'two'").await;
    bench.settings_known().await;
    bench.pay_for("one", "o2", "a").await;
    bench.until_state("o2", "succeeded").await;
    bench.pay_for("one", "o3", "a").await;
    bench.until_delayed("o3", "waits for limit daily").await;
    assert_eq!(bench.script.sent().len(), 4);
}
