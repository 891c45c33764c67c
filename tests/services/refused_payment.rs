//! One payment without an account whose payer the provider does not know (404), among a hundred good ones.
//!
//! Real backends, two workers.

use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::{AccountStatus, FakeOptions};

use crate::stand::Stand;

const GOOD: u64 = 100;
/// The payments have no account here; at the provider, the reference is the account that is charged.
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\n[provider.request]\n\
    template = { id = \"${id}\", amount = \"${amount}\", currency = \"${currency}\", account = \"${reference}\" }\n\
    [[provider.limit]]\nname = \"all\"\nmax_requests = 50\nwindow_ms = 1000\n";

fn job(id: String, reference: &str) -> Value {
    let body = json!({ "id": id, "reference": reference, "amount": 100, "currency": "EUR" });
    json!({ "key": "acme", "body": body.to_string() })
}

fn done(count: u64) -> String {
    format!("SELECT CASE WHEN count(*) = {count} THEN 1 ELSE 0 END FROM jobs WHERE state = 'succeeded'")
}

/// It waits alone, `status` and `explain` name it, no lane pauses, and after its third refusal it is in review.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_payment_stops_no_other() {
    let mut stand = Stand::start();
    let account_statuses = vec![AccountStatus { account: "gone".to_owned(), status: 404 }];
    stand.add_provider("acme", FakeOptions { account_statuses, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    let bad = job("bad".to_owned(), "gone");
    let good = (0..GOOD).map(|number| job(format!("good-{number}"), "shop"));
    let messages: Vec<_> = std::iter::once(bad).chain(good).collect();
    assert_eq!(stand.publish(&messages), messages.len());
    stand.add_worker();
    stand.add_worker();
    // Its second try comes after 30 s: by then all others are sent.
    stand.await_count(&done(GOOD), 1);
    assert_eq!(stand.count("SELECT count(*) FROM attempts WHERE job_id = 'bad'"), 1);
    let named = "payment bad is refused, and waits alone: provider answered 404";
    stand.await_that(Duration::from_secs(30), || stand.sluicegate(&["status"]).contains(named));
    let explained = stand.sluicegate(&["jobs", "explain", "bad"]);
    assert!(explained.contains("provider answered 404"), "{explained}");
    for (round, refusals) in [(1, 2), (2, 3)] {
        assert_eq!(stand.publish(&[job(format!("between-{round}"), "shop")]), 1);
        stand.await_count(&done(GOOD + round), 1);
        let attempts = "SELECT count(*) FROM attempts WHERE job_id = 'bad' AND outcome = 'misconfigured'";
        stand.await_that(Duration::from_secs(120), || stand.count(attempts) == refusals);
    }
    let review = "SELECT count(*) FROM jobs WHERE id = 'bad' AND state = 'review' AND reason LIKE 'refused_alone: %'";
    stand.await_count(review, 1);
    for worker in stand.running() {
        let log = stand.worker_log(worker);
        assert!(!log.contains("lane paused"), "{log}");
    }
}
