//! Two workers on one limit of requests in flight, at a provider that refuses one too many and loses answers.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::provider::http::OutboundPolicy;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::bench::{Bench, row};
use super::lookups_over_http::Http;

const JOBS: i64 = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_share_requests_in_flight() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let fake = FakeProvider::new(FakeOptions {
        concurrency: Some(3),
        // Longer than a busy machine needs to grant the next one, so that all three are in flight at some time.
        latency: (Duration::from_millis(100), Duration::from_millis(200)),
        lost_answer_rate: 0.05,
        seed: 3,
        ..FakeOptions::default()
    });
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    tokio::spawn(fake.serve(listener, stop.clone()));
    let slots = LimitRow {
        name: "slots".to_owned(),
        algorithm: "concurrency".to_owned(),
        max_requests: 3,
        ..LimitRow::default()
    };
    let row = ProviderRow { url, timeout_ms: 1_000, limits: vec![slots], ..row("acme") };
    let mut first = Bench::prepared(&[row]).await;
    first.providers = Some(Arc::new(Http(OutboundPolicy::parse(&["loopback".to_owned()]).unwrap())));
    first.keep_limiter();
    let mut second = first.beside();
    first.run();
    second.run();
    for n in 0..JOBS {
        first.pay("acme", &format!("pay-{n}")).await;
    }
    let done = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    first.until("everything is paid", async || first.count(done).await == JOBS).await;
    let report = handle.report();
    assert_eq!((report.in_flight_breaches, report.refused_429, report.doubles), (0, 0, 0), "{report:?}");
    assert_eq!((report.largest_in_flight, report.charges), (3, JOBS as u64), "{report:?}");
    assert!(report.lost_answers > 0, "{report:?}");
    first.stop().await;
    second.stop().await;
    stop.cancel();
}
