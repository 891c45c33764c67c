//! A worker without a broker: its lanes have no intake, and pay what a door records in the ledger.

use std::time::Duration;

use serde_json::json;
use sluicegate::ledger::backlog::BacklogRecord;
use sluicegate::ledger::provider_row::{AccountRow, ProviderRow};
use sluicegate::queue::message::{CardNumbers, Decoded, decode};

use super::bench::{Bench, name, row};
use super::sweeps::sweeps;

/// A bench whose worker has no broker.
async fn open(row: ProviderRow) -> Bench {
    let mut bench = Bench::prepared(&[row]).await;
    bench.has_broker = false;
    bench.run();
    bench.settings_known().await;
    bench
}

async fn record(bench: &Bench, body: serde_json::Value) -> BacklogRecord {
    let lane = name("acme");
    let Decoded { job, hash, .. } = decode(body.to_string().as_bytes(), &lane, CardNumbers::Refuse).unwrap();
    let recorded = bench.database.record_backlog(&job, hash, Duration::ZERO).await.unwrap();
    bench.database.record_news().send(Some(lane));
    recorded
}

#[tokio::test]
async fn recorded_payments_are_paid_without_a_broker() {
    let bench = open(row("acme")).await;
    for number in 0..50 {
        let payment = json!({ "id": format!("p{number}"), "amount": 1, "currency": "EUR", "account": "a" });
        assert!(matches!(record(&bench, payment).await, BacklogRecord::Recorded { .. }));
    }
    for number in 0..50 {
        assert_eq!(bench.until_state(&format!("p{number}"), "succeeded").await.attempts, 1);
    }
    // Its events are passed, published nowhere, and kept.
    bench.until("no event waits for a broker", async || bench.unpublished_events().await == 0).await;
    assert_eq!(bench.count("SELECT count(*) FROM events").await, 50);
    assert!(bench.messages.bodies().is_empty());
}

#[tokio::test]
async fn pause_and_disable_stop_a_lane_without_intake() {
    let bench = open(ProviderRow { paused: true, ..row("acme") }).await;
    record(&bench, json!({ "id": "p", "amount": 1, "currency": "EUR" })).await;
    sweeps(&bench, 2).await;
    assert!(bench.script.sent().is_empty(), "a paused lane sends");
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    bench.until_state("p", "succeeded").await;
    bench.apply(&[ProviderRow { enabled: false, ..row("acme") }]).await;
    bench.until("the lane is gone", async || bench.settings_known().await.lanes.is_empty()).await;
    record(&bench, json!({ "id": "q", "amount": 1, "currency": "EUR" })).await;
    sweeps(&bench, 2).await;
    assert_eq!(bench.script.order(), ["p"], "a disabled lane sends");
    bench.apply(&[row("acme")]).await;
    bench.until_state("q", "succeeded").await;
}

/// A door and the worker's intake record alike: a refused account, a missed date, and a later one.
#[tokio::test]
async fn both_doors_end_a_payment_alike() {
    let rule = AccountRow { account: "mallory".to_owned(), rule: Some("refuse".to_owned()), ..AccountRow::default() };
    let payments = |door: &str| {
        [
            json!({ "id": format!("{door}-refused"), "amount": 1, "currency": "EUR", "account": "mallory" }),
            json!({ "id": format!("{door}-missed"), "amount": 1, "currency": "EUR", "expires_at": "2020-01-01T00:00:00Z" }),
            json!({ "id": format!("{door}-later"), "amount": 1, "currency": "EUR", "not_before": "2999-01-01T00:00:00Z" }),
        ]
    };
    let mut bench = Bench::open(&[ProviderRow { accounts: vec![rule], ..row("acme") }]).await;
    for payment in payments("broker") {
        bench.publish("acme", &payment.to_string()).await;
    }
    bench.until("they are recorded", async || bench.count("SELECT count(*) FROM jobs").await == 3).await;
    bench.until("two have ended", async || bench.count(ENDED).await == 2).await;
    bench.stop().await;
    bench.has_broker = false;
    bench.run();
    for payment in payments("ledger") {
        record(&bench, payment).await;
    }
    bench.until("two more have ended", async || bench.count(ENDED).await == 4).await;
    for what in ["refused", "missed", "later"] {
        let [broker, ledger] = [bench.job(&format!("broker-{what}")).await, bench.job(&format!("ledger-{what}")).await];
        assert_eq!(broker, ledger, "{what}");
    }
    assert!(bench.script.sent().is_empty());
}

const ENDED: &str = "SELECT count(*) FROM jobs WHERE state NOT IN ('waiting', 'sending', 'unknown')";
