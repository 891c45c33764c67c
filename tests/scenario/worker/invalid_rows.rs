//! Provider rows that are invalid and never were valid: their quota may have limits that no worker knows.

use std::sync::Arc;

use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::http::OutboundPolicy;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::bench::{Bench, limit, row};
use super::lookups_over_http::Http;
use super::script::Act;

#[tokio::test]
async fn quota_resumes_after_unknown_limits() {
    let acme = |max_requests| ProviderRow {
        quota: Some("shared".to_owned()),
        limits: vec![limit(max_requests, 30_000)],
        max_wait_ms: 60_000,
        leak_per_second: Some(1_000.0),
        ..row("acme")
    };
    let bench = Bench::open(&[acme(1)]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.pay("acme", "second").await;
    bench.until("the second job waits", async || bench.active().await == 1).await;
    // A row without an enabled limit.
    bench.sql("INSERT INTO providers (name, url, quota) VALUES ('bolt', 'https://bolt.test/', 'shared')").await;
    let progress = bench.settings_known().await;
    assert_eq!(progress.settings.invalid_rows.iter().map(|bad| bad.provider.as_str()).collect::<Vec<_>>(), ["bolt"]);
    bench.until("no job is leased", async || bench.active().await == 0).await;
    bench.pay("acme", "third").await;
    let bolt = ProviderRow { quota: Some("shared".to_owned()), limits: vec![limit(9, 30_000)], ..row("bolt") };
    bench.apply(&[acme(9), bolt]).await;
    for id in ["second", "third"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1, "{id}");
    }
}

/// A missing secret declines no job: each waits alone until the row or the environment is fixed, and other lanes go on.
#[tokio::test]
async fn missing_secret_declines_no_job() {
    let header = |name: &str| [(name.to_owned(), "${env:KEY}".into())].into_iter().collect();
    let bench = Bench::open(&[ProviderRow { headers: header("missing"), ..row("acme") }, row("bolt")]).await;
    bench.pay("acme", "job").await;
    let job = bench.until_delayed("job", "the request cannot be built yet").await;
    assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
    bench.pay("bolt", "other").await;
    bench.until_state("other", "succeeded").await;
    assert!(bench.script.sent_to("acme").is_empty());
    bench.apply(&[ProviderRow { headers: header("authorization"), ..row("acme") }]).await;
    bench.settings_known().await;
    bench.sql("UPDATE jobs SET wake_at = created_at WHERE id = 'job'").await;
    assert_eq!(bench.until_state("job", "succeeded").await.attempts, 1);
}

/// A provider row can read no file or variable of the worker that the configuration does not grant.
#[tokio::test]
async fn ungranted_secret_stops_only_its_own_row() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let (fake, stop) = (FakeProvider::new(FakeOptions::default()), CancellationToken::new());
    let (handle, _stop) = (fake.handle(), stop.clone().drop_guard());
    tokio::spawn(fake.serve(listener, stop));
    let to_it = |name: &str| ProviderRow { url: url.clone(), ..row(name) };
    let headers = [("x-a".to_owned(), "${env:PATH}".into())].into_iter().collect();
    let mut bench = Bench::prepared(&[ProviderRow { headers, ..to_it("acme") }, to_it("bolt")]).await;
    bench.providers = Some(Arc::new(Http(OutboundPolicy::parse(&["loopback".to_owned()]).unwrap())));
    bench.run();
    bench.pay("acme", "asks").await;
    bench.pay("bolt", "other").await;
    bench.until_state("other", "succeeded").await;
    let [problem] = bench.bad_rows(1).await.try_into().unwrap();
    assert!(problem.contains("header `x-a`") && problem.contains("secrets = [\"env:PATH@127.0.0.1\"]"), "{problem}");
    assert_eq!(handle.report().requests, 1);
}

/// No request is sent to a URL with an empty part, and other jobs continue.
#[tokio::test]
async fn missing_url_field_sends_job_to_review() {
    let captures = |path: &str| ProviderRow {
        url: format!("https://acme.test/payments/{path}/captures"),
        idempotency_retention_s: Some(86_400),
        backoff_base_ms: 60_000,
        backoff_max_ms: 60_000,
        ..row("acme")
    };
    let bench = Bench::open(&[captures("${reference}")]).await;
    let with = |id: &str, reference: &str| {
        serde_json::json!({ "id": id, "amount": 1, "currency": "EUR", "reference": reference }).to_string()
    };
    bench.pay("acme", "without").await;
    bench.publish("acme", &with("with", "inv/1")).await;
    bench.publish("acme", &with("climbing", "..")).await;
    bench.until_state("with", "succeeded").await;
    assert_eq!(&*bench.script.sent_for("with")[0].request.url, "https://acme.test/payments/inv%2F1/captures");
    for (id, reason) in [
        ("without", "confirmed not charged; the job has no reference, which url needs"),
        ("climbing", "confirmed not charged; a field of the job would change the path of url"),
    ] {
        let job = bench.until_state(id, "review").await;
        assert_eq!((job.reason.as_str(), job.attempts), (reason, 0));
        assert!(bench.script.sent_for(id).is_empty() && bench.attempts(id).await.is_empty());
    }
    // A request whose outcome is unknown is not sent to another URL either.
    bench.script.plan("unknown", [Act::ChargeAndLose]);
    bench.publish("acme", &with("unknown", "inv-2")).await;
    bench
        .until("its outcome is unknown", async || {
            bench.job("unknown").await.is_some_and(|job| job.state == "unknown" && !job.held)
        })
        .await;
    bench.apply(&[captures("x/${reference}")]).await;
    bench.settings_known().await;
    bench.sql("UPDATE jobs SET wake_at = created_at WHERE id = 'unknown'").await;
    bench.until_state("unknown", "review").await;
    assert_eq!(bench.script.sent_for("unknown").len(), 1);
}
