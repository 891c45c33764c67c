//! Oversized requests: a message is rejected as `too_large` if its request would exceed the limits, before it is sent
//! or recorded.
//!
//! If the row changed meanwhile, the job goes to review. So does a job that crashes several workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::http::OutboundPolicy;

use super::bench::{Bench, row};
use super::lookups_over_http::Http;
use super::script::{Act, busy, timeout};

/// A row whose requests have no room for payloads.
fn narrow(name: &str) -> ProviderRow {
    ProviderRow { headers: BTreeMap::from([("narrow".to_owned(), json!("1"))]).into_iter().collect(), ..row(name) }
}

fn with_payload(id: &str) -> String {
    json!({ "id": id, "amount": 1, "currency": "EUR", "payload": { "a": 1 } }).to_string()
}

async fn rejected(bench: &Bench) -> Vec<(String, String)> {
    bench.rejected().await.into_iter().map(|message| (message.reason, message.detail)).collect()
}

/// A message of 65 kB that would expand to a form of 3.5 GB, each kind of expansion, and a payment behind them.
#[tokio::test]
async fn oversized_expansion_is_too_large() {
    let form = json!({ "body": "form" });
    let template = json!({ "template": { "all": vec!["${payload}"; 40] } });
    let url = |suffix: &str| format!("https://api.example/{suffix}");
    let rows = [
        ProviderRow { url: url("form"), request: form.as_object().cloned(), ..row("form") },
        ProviderRow { url: url("template"), request: template.as_object().cloned(), ..row("template") },
        ProviderRow { url: url(&"${reference}".repeat(4)), ..row("url") },
        ProviderRow {
            url: url("lookup"),
            lookup: json!({ "url": url(&"${reference}".repeat(4)) }).as_object().cloned(),
            ..row("lookup")
        },
    ];
    let mut bench = Bench::prepared(&rows).await;
    bench.providers = Some(Arc::new(Http(OutboundPolicy::default())));
    bench.run();
    let payload = format!("{{\"{}\":[{}]}}", "k".repeat(32_000), ["1"; 16_500].join(","));
    let job = |fields: &str| format!(r#"{{"id":"pay","amount":1,"currency":"EUR",{fields}}}"#);
    let (payload, reference) =
        (job(&format!(r#""payload":{payload}"#)), job(&format!(r#""reference":"{}""#, "\u{1f600}".repeat(255))));
    assert!(payload.len() > 65_000 && payload.len() <= 65_536);
    let table = [
        ("form", &payload, "payload: the request body that"),
        ("template", &payload, "payload: the request body that"),
        ("url", &reference, "reference: the url that"),
        ("lookup", &reference, "reference: the lookup.url that"),
    ];
    for (number, (lane, body, detail)) in table.into_iter().enumerate() {
        bench.publish(lane, body).await;
        bench.until("the message is rejected", async || rejected(&bench).await.len() > number).await;
        let (reason, text) = rejected(&bench).await.pop().unwrap();
        assert!(reason == "too_large" && text.starts_with(detail), "{lane}: {reason} {text}");
    }
    assert!(bench.job("pay").await.is_none());
    bench.stop().await;
}

/// A recorded job is not rejected any more. A job that may have been charged is looked up or reviewed.
#[tokio::test]
async fn narrowed_row_sends_recorded_jobs_to_review() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("waiting", [Act::Answer(busy(Some(Duration::from_millis(400))))]);
    bench.script.plan("unknown", [Act::Answer(timeout())]);
    bench.script.plan("unknown", [Act::Answer(timeout())]);
    for id in ["waiting", "unknown"] {
        bench.publish("acme", &with_payload(id)).await;
    }
    bench.until_sent("acme", 2).await;
    bench.apply(&[ProviderRow { backoff_base_ms: 20, ..narrow("acme") }]).await;
    bench.settings_known().await;
    bench.publish("acme", &with_payload("new")).await;
    bench.pay("acme", "plain").await;
    let waiting = bench.until_state("waiting", "review").await;
    let expected = "confirmed not charged; payload: the request body that the provider's row makes of it exceeds";
    assert!(waiting.reason.starts_with(expected), "{waiting:?}");
    bench.until_state("plain", "succeeded").await;
    bench.until("the new message is rejected", async || rejected(&bench).await.len() == 1).await;
    assert_eq!(rejected(&bench).await[0].0, "too_large");
    assert!(bench.job("new").await.is_none());
    let unknown =
        bench.until("the unknown job has finished", async || bench.job("unknown").await.unwrap().state != "unknown");
    unknown.await;
    assert_eq!(bench.script.sent_for("waiting").len(), 1);
}

/// An older version froze a request that is too large by now.
#[tokio::test]
async fn oversized_frozen_request_is_not_resent() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("old", [Act::Answer(busy(Some(Duration::from_secs(600))))]);
    bench.pay("acme", "old").await;
    bench.until_delayed("old", "busy").await;
    bench.stop().await;
    for trigger in ["frozen_request_never_changes", "frozen_request_is_at_most_1_mib_to_a_url_of_8_kib"] {
        bench.sql(&format!("DROP TRIGGER {trigger}")).await;
    }
    bench.sql("UPDATE jobs SET frozen_body = zeroblob(1048577), wake_at = 0").await;
    bench.run();
    let old = bench.until_state("old", "review").await;
    assert_eq!(old.reason, "confirmed not charged; the frozen request is larger than requests may be");
    assert_eq!(bench.script.sent_for("old").len(), 1);
}

#[tokio::test]
async fn job_that_crashes_workers_goes_to_review() {
    let mut bench = Bench::open(&[row("acme")]).await;
    for id in ["poison", "victim", "unknown"] {
        let act = if id == "unknown" { timeout() } else { busy(Some(Duration::from_secs(600))) };
        bench.script.plan(id, [Act::Answer(act)]);
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 3).await;
    bench.stop().await;
    // The rows look as if five workers in a row had lost two of the jobs, and four the third.
    let lost = "UPDATE jobs SET holder = 'gone', wake_at = 0, lost_holders =";
    bench.sql(&format!("{lost} 4 WHERE id IN ('poison', 'unknown')")).await;
    bench.sql(&format!("{lost} 3 WHERE id = 'victim'")).await;
    bench.run();
    let poison = bench.until_state("poison", "review").await;
    assert!(poison.reason.starts_with("confirmed not charged; 5 workers in a row were lost"), "{poison:?}");
    let unknown = bench.until_state("unknown", "review").await;
    assert!(unknown.reason.starts_with("the outcome is unknown; 5 workers in a row"), "{unknown:?}");
    bench.until_state("victim", "succeeded").await;
    let sent = ["poison", "unknown", "victim"].map(|id| bench.script.sent_for(id).len());
    assert_eq!(sent, [1, 1, 2]);
    bench.until("its event", async || bench.events_of("poison").await.len() == 1).await;
    assert_eq!(bench.events_of("poison").await[0].body["state"], "review");
}
