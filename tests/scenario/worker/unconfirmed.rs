//! Refusals on used connections: what ends a payment that was refused there, and what may not.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::domain::outcome::{Outcome, Refusal};
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, row};
use super::script::Act;

fn throttled_on_used_connection(wait: Duration) -> Act {
    let refusal = Refusal::Throttled { retry_after: Some(wait) };
    Act::AnswerOnUsedConnection(Outcome::Unconfirmed { refusal, status: 429 })
}

/// A row whose requests may take this long.
fn with_timeout(timeout_ms: i64) -> ProviderRow {
    ProviderRow { timeout_ms, ..row("acme") }
}

fn job(expires_in: Duration) -> String {
    let at = Timestamp::now() + expires_in;
    json!({ "id": "job", "amount": 1, "currency": "EUR", "expires_at": at.to_string() }).to_string()
}

/// If no other response followed until the deadline, the refusal counts as what it says.
#[tokio::test]
async fn refused_payment_expires_after_its_deadline() {
    let bench = Bench::open(&[with_timeout(4_000)]).await;
    bench.script.plan("job", [throttled_on_used_connection(Duration::from_millis(100))]);
    bench.publish("acme", &job(Duration::from_secs(3))).await;
    let job = bench.until_state("job", "expired").await;
    assert_eq!((job.attempts, bench.script.sent().len()), (0, 1), "{job:?}");
}

/// The own response follows the stray one: the payment may have been charged, so it does not expire.
#[tokio::test]
async fn other_response_makes_the_payment_unknown() {
    let bench = Bench::open(&[with_timeout(60_000)]).await;
    bench.script.plan("job", [throttled_on_used_connection(Duration::from_millis(100))]);
    let expiry = Timestamp::now() + Duration::from_secs(2);
    bench.publish("acme", &job(Duration::from_secs(1))).await;
    bench.until("the request", async || bench.script.sent().len() == 1).await;
    // While the connection is watched, the payment is in flight: neither its expiry nor an operator ends it.
    bench.until("its expiry", async || Timestamp::now() > expiry).await;
    assert_eq!(bench.job("job").await.unwrap().state, "sending");
    bench.script.release("job");
    let job = bench.until_state("job", "succeeded").await;
    assert_eq!((job.attempts, bench.script.sent().len()), (2, 2), "{job:?}");
}

/// Without deduplication a refusal on a used connection stays unknown, whatever follows.
#[tokio::test]
async fn refusal_without_deduplication_stays_unknown() {
    let bench = Bench::open(&[ProviderRow { idempotency_retention_s: None, ..with_timeout(500) }]).await;
    bench.script.plan("job", [throttled_on_used_connection(Duration::from_millis(100))]);
    bench.publish("acme", &job(Duration::from_secs(3_600))).await;
    bench.until_state("job", "review").await;
    assert_eq!(bench.script.sent().len(), 1);
}

/// The watch of one payment takes no worker slot from the others.
#[tokio::test]
async fn watched_payment_frees_its_worker_slot() {
    let bench = Bench::open(&[ProviderRow { workers: 1, ..with_timeout(60_000) }]).await;
    bench.script.plan("job", [throttled_on_used_connection(Duration::from_millis(50))]);
    bench.publish("acme", &job(Duration::from_secs(3_600))).await;
    bench.until("the request", async || bench.script.sent().len() == 1).await;
    bench.publish("acme", &json!({ "id": "other", "amount": 1, "currency": "EUR" }).to_string()).await;
    bench.until_state("other", "succeeded").await;
    assert_eq!(bench.job("job").await.unwrap().state, "sending");
}
