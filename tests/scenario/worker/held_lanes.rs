//! A held lane records payments and sends look-ups, and starts no charge until it is released.

use std::time::Duration;

use sluicegate::domain::commit_memory::HoldCause;
use sluicegate::domain::limit::Rate;
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, name, row};

fn operator() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("compared".to_owned()) }
}

async fn hold(bench: &Bench) {
    bench.database.hold_lanes(&[name("acme")], HoldCause::DatabaseWentBack, "1 payment").await.unwrap();
}

#[tokio::test]
async fn held_lane_records_and_charges_nothing() {
    for mode in ["blocking", "requeue"] {
        let mut bench = Bench::prepared(&[ProviderRow { mode: mode.to_owned(), ..row("acme") }, row("bolt")]).await;
        hold(&bench).await;
        bench.run();
        bench.pay("acme", "first").await;
        bench.pay("bolt", "other").await;
        bench.until_state("other", "succeeded").await;
        bench
            .until("the payment is recorded", async || {
                bench.count("SELECT count(*) FROM jobs WHERE backlog").await == 1
            })
            .await;
        assert_eq!(bench.script.order(), ["other"], "{mode}");
        assert!(bench.database.release_lane(&name("acme"), &operator()).await.unwrap());
        bench.until_state("first", "succeeded").await;
        bench.stop().await;
    }
}

#[tokio::test]
async fn hold_reaches_payments_at_the_gate() {
    // One slot in half a minute, so a job that waits for it outlasts the test.
    let nearly_closed = ProviderRow {
        limits: vec![limit(1, 30_000)],
        leak_per_second: Some(1_000.0),
        max_wait_ms: 60_000,
        ..row("acme")
    };
    let bench = Bench::open(&[nearly_closed]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.pay("acme", "second").await;
    bench.until("the second one waits", async || bench.active().await == 1).await;
    hold(&bench).await;
    let is_held = async || {
        let status = bench.settings_known().await;
        status.lanes[&name("acme")].status().does == LaneState::Held
    };
    bench.until("the lane is held", is_held).await;
    let open = Rate::new(1_000, Duration::from_millis(100)).unwrap();
    bench.database.set_rate(&name("acme"), "all", open).await.unwrap();
    let delayed = bench.until_delayed("second", "the lane is held: database_went_back").await;
    assert_eq!((delayed.state.as_str(), delayed.attempts), ("waiting", 0));
    assert_eq!(bench.script.order(), ["first"]);
}
