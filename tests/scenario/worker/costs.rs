//! A payment that costs more than a limit has free waits alone: cheaper payments pass it, and it is sent when it can be.

use std::time::Duration;

use serde_json::json;
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};

use super::bench::{Bench, limit, name, row};

const HOUR_MS: i64 = 3_600_000;

async fn pay(bench: &Bench, lane: &str, account: Option<&str>, id: &str, cost: u32) {
    let mut body = json!({ "id": id, "amount": 1299, "currency": "EUR", "cost": cost });
    if let Some(account) = account {
        body["account"] = account.into();
    }
    bench.publish(lane, &body.to_string()).await;
}

/// Two lanes of one quota with so many requests an hour.
fn rows(mode: &str, applies_to: &str, max_requests: i64) -> [ProviderRow; 2] {
    let limit = LimitRow { applies_to: applies_to.to_owned(), ..limit(max_requests, HOUR_MS) };
    ["acme", "bolt"].map(|name| ProviderRow {
        quota: Some("shared".to_owned()),
        mode: mode.to_owned(),
        limits: vec![limit.clone()],
        ..row(name)
    })
}

async fn has_no_pause(bench: &Bench) {
    for lane in ["acme", "bolt"] {
        assert_eq!(bench.settings_known().await.lanes[&name(lane)].status().does, LaneState::Running, "{lane}");
    }
}

/// Sixty of a hundred are used, and payments that cost fifty wait: of an account and of none, on both lanes of the quota,
/// more of them than a lane holds at a time. Those that cost one go on, also of the same account, whether they come
/// later or waited behind. In `blocking` mode the costly ones make no traffic meanwhile.
#[tokio::test]
async fn cheaper_payments_pass_costly_ones() {
    for (mode, applies_to) in [("blocking", "all"), ("blocking", "charge"), ("requeue", "all"), ("requeue", "charge")] {
        let bench = Bench::open(&rows(mode, applies_to, 100)).await;
        pay(&bench, "acme", Some("first"), "sixty", 60).await;
        bench.until_state("sixty", "succeeded").await;
        for number in 0..20 {
            let account = [None, Some("whale")][number % 2];
            for lane in ["acme", "bolt"] {
                pay(&bench, lane, account, &format!("{lane}-costly-{number}"), 50).await;
            }
        }
        for number in 0..30 {
            let account = [None, Some("whale"), Some("other")][number % 3];
            pay(&bench, ["acme", "bolt"][number % 2], account, &format!("early-{number}"), 1).await;
        }
        for number in 0..30 {
            bench.until_state(&format!("early-{number}"), "succeeded").await;
        }
        let waiting = "SELECT count(*) FROM jobs WHERE cost = 50 AND state = 'waiting' AND wait_reason = 'limit'";
        bench.until("some of the costly ones were refused", async || bench.count(waiting).await > 0).await;
        if mode == "blocking" {
            let in_backlog = "SELECT count(*) FROM jobs WHERE cost = 50 AND backlog";
            bench.until("the costly ones wait in the ledger", async || bench.count(in_backlog).await == 40).await;
        }
        let fences = async || bench.count("SELECT sum(fence) FROM jobs WHERE cost = 50").await;
        let before = fences().await;
        for number in 0..10 {
            let account = [None, Some("whale"), Some("other")][number % 3];
            pay(&bench, ["acme", "bolt"][number % 2], account, &format!("late-{number}"), 1).await;
            bench.until_state(&format!("late-{number}"), "succeeded").await;
        }
        assert_eq!(bench.script.sent().len(), 41, "{mode} {applies_to}");
        if mode == "blocking" {
            assert_eq!(fences().await, before, "none of the costly ones was claimed again");
        }
        has_no_pause(&bench).await;
        // A larger limit wakes them.
        bench.apply(&rows(mode, applies_to, 10_000)).await;
        for number in 0..20 {
            for lane in ["acme", "bolt"] {
                bench.until_state(&format!("{lane}-costly-{number}"), "succeeded").await;
            }
        }
    }
}

/// The slots that it needs become free while cheaper payments of others keep coming more slowly than the limit allows.
#[tokio::test]
async fn costly_payment_is_sent_when_its_slots_are_free() {
    for mode in ["blocking", "requeue"] {
        let row = ProviderRow { mode: mode.to_owned(), limits: vec![limit(10, 3_000)], ..row("acme") };
        let bench = Bench::open(&[row]).await;
        pay(&bench, "acme", None, "six", 6).await;
        bench.until_state("six", "succeeded").await;
        pay(&bench, "acme", Some("whale"), "costly", 8).await;
        let mut cheap = 0;
        while !bench.script.order().iter().any(|sent| sent == "costly") {
            pay(&bench, "acme", Some("other"), &format!("cheap-{cheap}"), 1).await;
            bench.until_state(&format!("cheap-{cheap}"), "succeeded").await;
            cheap += 1;
            assert!(cheap < 60, "{mode}: {:?}", bench.script.order());
            tokio::time::sleep(Duration::from_millis(1_600)).await;
        }
        assert_eq!(bench.until_state("costly", "succeeded").await.attempts, 1);
        assert!(cheap > 0, "{mode}: a cheaper one passed it");
    }
}

/// Where the order of accounts is kept, an account's cheaper payments stay behind its costly one; others pass.
#[tokio::test]
async fn order_of_an_account_holds_its_cheaper_payments() {
    let ordered = ProviderRow { order: "account".to_owned(), limits: vec![limit(100, HOUR_MS)], ..row("acme") };
    let bench = Bench::open(&[ordered]).await;
    pay(&bench, "acme", Some("first"), "sixty", 60).await;
    bench.until_state("sixty", "succeeded").await;
    pay(&bench, "acme", Some("whale"), "costly", 50).await;
    let refused = "SELECT count(*) FROM jobs WHERE id = 'costly' AND backlog AND wait_reason = 'limit'";
    bench.until("the costly one waits for the limit", async || bench.count(refused).await == 1).await;
    pay(&bench, "acme", Some("whale"), "behind", 1).await;
    for number in 0..30 {
        pay(&bench, "acme", [None, Some("other")][number % 2], &format!("cheap-{number}"), 1).await;
    }
    for number in 0..30 {
        bench.until_state(&format!("cheap-{number}"), "succeeded").await;
    }
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE id = 'behind' AND backlog").await, 1);
    assert_eq!(bench.script.sent().len(), 31);
}
