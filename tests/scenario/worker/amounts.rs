//! Sums that a provider counts differently from ISO 4217: what is on the wire, what is refused before it is recorded,
//! and what becomes of recorded payments if the row changes.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::domain::sum::SentSum;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::http::OutboundPolicy;
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::bench::{Bench, row};
use super::lookups_over_http::Http;
use super::script::{Act, busy, timeout};

fn message(id: &str, amount: i64, currency: &str) -> String {
    json!({ "id": id, "amount": amount, "currency": currency }).to_string()
}

fn object(value: &Value) -> Option<serde_json::Map<String, Value>> {
    value.as_object().cloned()
}

/// A row that lists three currencies.
fn listing(row: ProviderRow) -> ProviderRow {
    ProviderRow {
        currencies: Some(vec![json!("EUR"), json!("ISK"), json!("CVE")]),
        decimals: object(&json!({"ISK": 2, "CVE": 0})),
        ..row
    }
}

/// A worker over HTTP, with a provider whose options and row are given.
pub(super) async fn over_http(
    options: FakeOptions,
    change: impl Fn(ProviderRow, &str) -> ProviderRow,
) -> (Bench, FakeHandle, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let (fake, stop) = (FakeProvider::new(options), CancellationToken::new());
    let handle = fake.handle();
    tokio::spawn(fake.serve(listener, stop.clone()));
    let row = change(ProviderRow { url: url.clone(), timeout_ms: 1_000, ..row("acme") }, &url);
    let mut bench = Bench::prepared(&[row]).await;
    bench.providers = Some(Arc::new(Http(OutboundPolicy::parse(&["loopback".to_owned()]).unwrap())));
    bench.run();
    (bench, handle, stop.drop_guard())
}

/// Half of all answers are lost, so charges are confirmed by their `echo`, or by a look-up that compares the sum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_on_the_wire_are_the_providers() {
    let options = FakeOptions { lost_answer_rate: 0.5, deduplicate: false, seed: 7, ..FakeOptions::default() };
    let (bench, fake, _stop) = over_http(options, |row, url| {
        let lookup = json!({
            "url": format!("{url}charges?id=${{job:id}}"), "amount": "/amount", "currency": "/currency",
        });
        let request = object(&json!({"echo": {"amount": "/amount"}}));
        listing(ProviderRow { idempotency_retention_s: None, lookup: object(&lookup), request, ..row })
    })
    .await;
    for n in 0..10 {
        bench.publish("acme", &message(&format!("isk-{n}"), 500, "ISK")).await;
        bench.publish("acme", &message(&format!("cve-{n}"), 1_200, "CVE")).await;
        bench.publish("acme", &message(&format!("eur-{n}"), 1_299, "EUR")).await;
    }
    let succeeded = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    bench.until("all are paid", async || bench.count(succeeded).await == 30).await;
    assert!(fake.report().lost_answers > 5 && fake.report().lookups > 5 && fake.report().doubles == 0);
    for effect in fake.effects() {
        let expected = match effect.currency.as_str() {
            "ISK" => 50_000,
            "CVE" => 12,
            _ => 1_299,
        };
        assert_eq!(effect.amount, expected, "{effect:?}");
    }
}

const SUM_AT: &str = r#"{"amount": "/amount", "currency": "/currency"}"#;

/// A `request` or `lookup` that says where the sum is.
fn with_sum(column: Value, partial: Option<&str>) -> Option<serde_json::Map<String, Value>> {
    let mut column = object(&column).unwrap();
    column.extend(object(&serde_json::from_str(SUM_AT).unwrap()).unwrap());
    column.extend(partial.map(|partial| ("partial".to_owned(), json!(partial))));
    Some(column)
}

fn partial(lost_answer_rate: f64) -> FakeOptions {
    FakeOptions { partial_rate: 1.0, lost_answer_rate, seed: 3, ..FakeOptions::default() }
}

/// Each payment is charged half. Without `partial` none of them succeeds, and none is sent again: by the charge's
/// response, by that of a repeat, and by a look-up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smaller_sum_is_review_and_never_sent_again() {
    for (lost, retention, echoes) in
        [(0.0, Some(86_400), false), (0.5, Some(86_400), false), (0.5, None, false), (0.0, Some(86_400), true)]
    {
        let (bench, fake, _stop) = over_http(partial(lost), |row, url| {
            let lookup = with_sum(json!({"url": format!("{url}charges?id=${{job:id}}")}), None);
            let echo = object(&json!({"echo": {"amount": "/amount"}}));
            let request = if echoes { echo } else { with_sum(json!({}), None) };
            let lookup = lookup.filter(|_| retention.is_none());
            // Five reviews in a row pause the account; these payments have none in common.
            ProviderRow { request, lookup, idempotency_retention_s: retention, max_attempts: 20, ..row }
        })
        .await;
        for n in 0..4 {
            bench.publish("acme", &message(&format!("pay-{n}"), 1_000, "EUR")).await;
        }
        let review = "SELECT count(*) FROM jobs WHERE state = 'review' AND reason LIKE 'amount_differs: %'";
        bench.until("all are in review", async || bench.count(review).await == 4).await;
        let report = fake.report();
        assert_eq!((report.charges, report.doubles, report.partials), (4, 0, 4), "{report:?}");
        let answered = "SELECT count(*) FROM attempts WHERE outcome = 'differs'";
        assert_eq!(bench.count(answered).await, 4, "a request followed a response with another sum");
        if lost == 0.0 {
            assert_eq!(report.requests, 4);
        }
    }
}

/// The row accepts parts: the payment succeeds, with what was charged, in ISO 4217 minor units.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accepted_part_succeeds_with_its_sum() {
    for (lost, retention) in [(0.0, Some(86_400)), (0.5, Some(86_400)), (0.5, None)] {
        let (bench, fake, _stop) = over_http(partial(lost), |row, url| {
            let lookup = with_sum(json!({"url": format!("{url}charges?id=${{job:id}}")}), Some("accept"));
            let lookup = lookup.filter(|_| retention.is_none());
            let request = with_sum(json!({}), Some("accept"));
            listing(ProviderRow { request, lookup, idempotency_retention_s: retention, max_attempts: 20, ..row })
        })
        .await;
        bench.publish("acme", &message("eur", 1_000, "EUR")).await;
        bench.publish("acme", &message("isk", 500, "ISK")).await;
        for (id, charged) in [("eur", 500), ("isk", 250)] {
            let job = bench.until_state(id, "succeeded").await;
            assert_eq!(job.reason, "accepted in part", "{id}");
            assert_eq!(bench.count(&format!("SELECT charged_amount FROM jobs WHERE id = '{id}'")).await, charged);
            bench.until("its event is published", async || !bench.events_of(id).await.is_empty()).await;
            assert_eq!(bench.events_of(id).await[0].body["charged_amount"], charged, "{id}");
        }
        assert_eq!((fake.report().charges, fake.report().doubles), (2, 0));
    }
}

/// The row's rules hold for new messages and for messages that an operator publishes again.
#[tokio::test]
async fn unsupported_sums_are_invalid_by_every_way() {
    let mut bench = Bench::open(&[listing(row("acme"))]).await;
    for (id, amount, currency) in [("dollars", 1_299, "USD"), ("cents", 1_250, "CVE"), ("huge", i64::MAX, "ISK")] {
        bench.publish("acme", &message(id, amount, currency)).await;
    }
    let rejected = "SELECT job_id || ' ' || reason FROM rejected_messages ORDER BY job_id";
    let expected = ["cents unsupported_amount", "dollars unsupported_currency", "huge unsupported_amount"];
    bench.until("all are rejected", async || bench.texts(rejected).await == expected).await;
    bench.publish("acme", &message("dollars", 1_299, "USD")).await;
    bench.until("it is rejected again", async || bench.texts(rejected).await.len() == 4).await;
    assert_eq!(bench.count("SELECT count(*) FROM jobs").await, 0);
    for published in bench.rejected().await {
        let detail = published.detail;
        assert!(detail.starts_with("amount: ") || detail.starts_with("currency: "), "{detail}");
        assert!(!detail.contains("1250") && !detail.contains("USD"), "{detail}");
    }
    bench.stop().await;
    assert!(bench.script.sent().is_empty());
}

/// The row changed after these jobs were recorded.
#[tokio::test]
async fn unsupported_recorded_jobs_are_dead_and_unknown_ones_repeat() {
    let slow = ProviderRow { backoff_base_ms: 1_000, backoff_max_ms: 1_000, ..row("acme") };
    let mut bench = Bench::open(std::slice::from_ref(&slow)).await;
    bench.script.plan("tried", [Act::Answer(busy(Some(Duration::from_secs(1))))]);
    bench.script.plan("unknown", [Act::Answer(timeout())]);
    let later = jiff::Timestamp::now() + Duration::from_millis(1_500);
    let untried = json!({ "id": "untried", "amount": 5, "currency": "ISK", "not_before": later.to_string() });
    bench.publish("acme", &untried.to_string()).await;
    bench.until("it is recorded", async || bench.job("untried").await.is_some()).await;
    bench.publish("acme", &message("tried", 5, "ISK")).await;
    bench.publish("acme", &message("unknown", 5, "ISK")).await;
    bench.until_delayed("tried", "busy").await;
    bench.until("its outcome is unknown", async || bench.attempts("unknown").await.len() == 1).await;
    bench.apply(&[ProviderRow { currencies: Some(vec![json!("EUR")]), ..slow }]).await;
    for id in ["tried", "untried"] {
        let job = bench.until_state(id, "dead").await;
        assert!(job.reason.starts_with("unsupported_currency: "), "{id}: {}", job.reason);
    }
    bench.until_state("unknown", "succeeded").await;
    let sums: Vec<SentSum> = bench.script.sent_for("unknown").iter().map(|sent| sent.request.sum).collect();
    assert_eq!(sums, [SentSum { units: 5, decimals: 0 }; 2]);
    assert_eq!(bench.script.sent_for("tried").len(), 1);
    assert!(bench.script.sent_for("untried").is_empty());
    bench.stop().await;
}

/// Its frozen bytes have another sum than the row sends now, and nothing can have been charged.
#[tokio::test]
async fn other_decimals_hold_back_a_frozen_sum() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("tried", [Act::Answer(busy(Some(Duration::from_secs(1))))]);
    bench.publish("acme", &message("tried", 5, "ISK")).await;
    bench.until_delayed("tried", "busy").await;
    bench.apply(&[ProviderRow { decimals: object(&json!({"ISK": 2})), ..row("acme") }]).await;
    let job = bench.until_state("tried", "review").await;
    assert!(job.reason.starts_with("confirmed not charged; the request is frozen with another sum"), "{}", job.reason);
    assert_eq!(bench.script.sent_for("tried").len(), 1);
    bench.stop().await;
}
