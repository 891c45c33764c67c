//! A ledger that refuses outcomes, of all payments or of one: what the lane keeps, sends, writes and logs.

use std::time::Duration;

use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, row};
use crate::captured_log::capture_log;

fn slow_row() -> ProviderRow {
    ProviderRow { workers: 4, idempotency_retention_s: None, limits: vec![limit(20, 1_000)], ..row("acme") }
}

async fn succeeded(bench: &Bench) -> i64 {
    bench.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'").await
}

#[tokio::test]
async fn outcomes_are_kept_while_all_are_refused() {
    let bench = Bench::open(&[slow_row()]).await;
    bench.sql("CREATE TRIGGER refused BEFORE UPDATE ON attempts BEGIN SELECT RAISE(ABORT, 'not now'); END").await;
    for number in 0..30 {
        bench.pay("acme", &format!("p{number}")).await;
    }
    bench.until("the first answers are kept", async || bench.script.sent().len() >= 2).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sent = bench.script.sent().len();
    assert!(sent <= 4, "{sent} requests, and the ledger accepts no outcome");
    bench.sql("DROP TRIGGER refused").await;
    bench.until("all succeed", async || succeeded(&bench).await == 30).await;
    assert_eq!(bench.script.sent().len(), 30);
}

#[tokio::test]
async fn one_refused_outcome_becomes_a_review_with_its_reference() {
    let (log, _guard) = capture_log();
    let bench = Bench::open(&[slow_row()]).await;
    bench
        .sql(
            "CREATE TRIGGER refused BEFORE UPDATE ON jobs WHEN NEW.id = 'p3' AND NEW.state = 'succeeded' \
             BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        )
        .await;
    for number in 0..60 {
        bench.pay("acme", &format!("p{number}")).await;
    }
    bench.until("the others succeed", async || succeeded(&bench).await == 59).await;
    bench.until("it is reviewed", async || bench.job("p3").await.is_some_and(|job| job.state == "review")).await;
    let reason = bench.job("p3").await.unwrap().reason;
    assert!(reason.ends_with("3 times: outcome accepted, reference ch_p3"), "{reason}");
    assert_eq!(bench.events_of("p3").await.len(), 1);
    assert_eq!(log.lines_with("the payment goes to review").len(), 1);
    assert_eq!(bench.script.sent().len(), 60);
}
