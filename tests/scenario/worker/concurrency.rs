//! Limits of requests in flight: two workers share one, at a provider that refuses one too many and loses answers, and
//! an account at its own waits for the next release.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::provider::http::OutboundPolicy;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::bench::{Bench, limit, row};
use super::lookups_over_http::Http;
use super::script::Act;

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

/// The flood's payments wait for each other, and few of them return to the ledger meanwhile. Those of other accounts
/// pass, and are not recorded before they are sent, as in a lane at its limit.
#[tokio::test]
async fn account_at_its_limit_of_requests_in_flight_holds_no_other() {
    for workers in [1, 2] {
        let own = LimitRow {
            name: "own".to_owned(),
            algorithm: "concurrency".to_owned(),
            scope: "account".to_owned(),
            max_requests: 2,
            ..LimitRow::default()
        };
        let mut first = Bench::prepared(&[ProviderRow { limits: vec![limit(1_000, 100), own], ..row("acme") }]).await;
        first.keep_limiter();
        let mut benches = vec![first];
        (1..workers).for_each(|_| benches.push(benches[0].beside()));
        benches.iter_mut().for_each(Bench::run);
        let bench = &benches[0];
        for number in 0..20 {
            bench.script.plan(&format!("flood-{number}"), [Act::Hold]);
            for (kind, account) in [("flood", "flood".to_owned()), ("other", format!("other-{number}"))] {
                let body = json!({ "id": format!("{kind}-{number}"), "account": account, "amount": 1299,
                    "currency": "EUR" });
                bench.publish("acme", &body.to_string()).await;
            }
        }
        let sent = || bench.script.order().into_iter().filter(|id| id.starts_with("flood")).collect::<Vec<_>>();
        for number in 0..20 {
            bench.until_state(&format!("other-{number}"), "succeeded").await;
        }
        assert_eq!(sent().len(), 2, "the others passed, and no more of the flood than its limit");
        let recorded_first = || -> u64 { benches.iter().map(|bench| bench.returned_permits("acme", "backlog")).sum() };
        let recorded = recorded_first();
        for number in 0..20 {
            bench.until("the next one is sent", async || sent().len() == (number + 2).min(20)).await;
            // Half a request's time, as there are two.
            sleep(Duration::from_millis(150)).await;
            let next = sent()[number].clone();
            assert!(sent().len() <= number + 2);
            bench.script.release(&next);
            bench.until_state(&next, "succeeded").await;
            let late = format!("late-{number}");
            let late = json!({ "id": late, "account": late, "amount": 1299, "currency": "EUR" });
            bench.publish("acme", &late.to_string()).await;
            bench.until_state(&format!("late-{number}"), "succeeded").await;
        }
        let recorded_late = recorded_first() - recorded;
        assert!(recorded_late <= 4, "{recorded_late} of 20 were recorded in the backlog first, {workers} workers");
        let returns: u64 = benches.iter().map(|bench| bench.returned_permits("acme", "limit")).sum();
        assert!(returns <= 40, "{returns} returns of 20 payments, {workers} workers");
        for bench in &mut benches {
            bench.stop().await;
        }
    }
}
