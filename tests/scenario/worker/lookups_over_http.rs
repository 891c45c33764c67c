//! End to end over HTTP with a provider that loses responses and never deduplicates. With look-ups, every payment is
//! resolved; without them, lost responses go to manual review. No payment is charged twice.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sluicegate::domain::provider::Provider;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use sluicegate::provider::{FreezeError, PaymentProvider, ProviderFactory};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::bench::{Bench, limit, row};

const JOBS: usize = 60;

pub struct Http(pub OutboundPolicy);

impl ProviderFactory for Http {
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError> {
        Ok(Arc::new(HttpProvider::new(provider, &self.0)?))
    }
}

/// Runs every payment at a provider that loses a third of its responses, look-ups included.
async fn paid(can_be_asked: bool) -> (Bench, FakeHandle, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let fake = FakeProvider::new(FakeOptions {
        limits: vec!["40/1s".parse().unwrap()],
        latency: (Duration::ZERO, Duration::from_millis(20)),
        lost_answer_rate: 0.3,
        decline_rate: 0.1,
        deduplicate: false,
        lookup: can_be_asked,
        seed: 5,
        ..FakeOptions::default()
    });
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    tokio::spawn(fake.serve(listener, stop.clone()));
    let lookup = json!({"url": format!("{url}charges?id=${{job:id}}"), "amount": "/amount", "currency": "/currency"});
    let row = ProviderRow {
        url,
        timeout_ms: 1_000,
        idempotency_retention_s: None,
        lookup: can_be_asked.then(|| lookup.as_object().unwrap().clone()),
        limits: vec![limit(40, 1_000)],
        ..row("acme")
    };
    let mut bench = Bench::prepared(&[row]).await;
    bench.providers = Some(Arc::new(Http(OutboundPolicy::parse(&["loopback".to_owned()]).unwrap())));
    bench.run();
    for n in 0..JOBS {
        bench.pay("acme", &format!("pay-{n}")).await;
    }
    let open = "SELECT count(*) FROM jobs WHERE state IN ('waiting', 'sending', 'unknown')";
    let all = "SELECT count(*) FROM jobs";
    bench
        .until("every job has finished", async || bench.count(all).await == JOBS as i64 && bench.count(open).await == 0)
        .await;
    (bench, handle, stop.drop_guard())
}

async fn in_state(bench: &Bench, state: &str) -> i64 {
    bench.count(&format!("SELECT count(*) FROM jobs WHERE state = '{state}'")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_resolve_every_lost_response() {
    let (bench, fake, _stop) = paid(true).await;
    let (report, effects) = (fake.report(), fake.effects());
    assert_eq!((report.doubles, report.limits[0].breaches, report.refused_429), (0, 0, 0), "{report:?}");
    assert!(report.lost_answers >= 10 && report.lookups >= 10, "{report:?}");
    assert_eq!(
        (effects.len(), report.requests),
        (JOBS, JOBS as u64 + report.lookups),
        "not one charge for each payment"
    );
    let (succeeded, declined) = (in_state(&bench, "succeeded").await, in_state(&bench, "declined").await);
    assert_eq!((succeeded as u64, declined as u64), (report.charges, report.declines));
    assert_eq!(succeeded + declined, JOBS as i64);
    let rows = bench.count("SELECT count(*) FROM attempts WHERE outcome <> 'not_sent'").await;
    assert_eq!(rows as u64, report.requests, "a request has no attempt row");
    let references = bench.count("SELECT count(DISTINCT provider_reference) FROM jobs WHERE state = 'succeeded'").await;
    assert_eq!(references, succeeded, "two payments share a charge");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_responses_without_lookup_need_review() {
    let (bench, fake, _stop) = paid(false).await;
    let report = fake.report();
    assert_eq!((report.doubles, report.lookups, report.requests), (0, 0, JOBS as u64), "{report:?}");
    assert_eq!(in_state(&bench, "review").await as u64, report.lost_answers);
    let finished = in_state(&bench, "succeeded").await + in_state(&bench, "declined").await;
    assert_eq!(finished as u64 + report.lost_answers, JOBS as u64);
    assert!(report.lost_answers >= 5, "{report:?}");
}
