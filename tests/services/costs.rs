//! A payment that costs more than the limit of an hour has free: cheaper payments pass it.
//!
//! Real backends, two workers. The strict provider counts the costs.

use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
    mode = \"{mode}\"\n\
    [[provider.limit]]\nname = \"hourly\"\nmax_requests = 100\nwindow_ms = 3600000\n";

fn job(account: Option<&str>, id: String, cost: u32) -> Value {
    let mut body = json!({ "id": id, "cost": cost, "amount": 100, "currency": "EUR" });
    if let Some(account) = account {
        body["account"] = account.into();
    }
    json!({ "key": "acme", "body": body.to_string() })
}

/// Sixty of a hundred an hour are used. Costly payments of a merchant wait, and thirty cheap ones of others, and of none,
/// are sent. `status` says that they pass, and `explain` says what the costly one needs.
async fn cheap_payments_pass_in(mode: &str) {
    let mut stand = Stand::start();
    let limits = vec!["100/1h".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(&ROWS.replace("{mode}", mode));
    stand.add_worker();
    stand.add_worker();
    let sixty: Vec<_> = (0..6).map(|number| job(Some("first"), format!("first-{number}"), 10)).collect();
    assert_eq!(stand.publish(&sixty), 6);
    stand.await_count("SELECT count(*) FROM jobs WHERE state = 'succeeded'", 6);
    let costly: Vec<_> = (0..4).map(|number| job(Some("whale"), format!("costly-{number}"), 50)).collect();
    assert_eq!(stand.publish(&costly), 4);
    let waiting = "SELECT count(*) FROM jobs WHERE cost = 50 AND state = 'waiting' AND wait_reason = 'limit'";
    stand.await_that(Duration::from_secs(60), || stand.count(waiting) > 0);
    let accounts = [Some("other"), None, Some("another")];
    let cheap: Vec<_> = (0..30).map(|number| job(accounts[number % 3], format!("cheap-{number}"), 1)).collect();
    assert_eq!(stand.publish(&cheap), 30);
    stand.await_that(Duration::from_secs(60), || {
        stand.count("SELECT count(*) FROM jobs WHERE cost = 1 AND state = 'succeeded'") == 30
    });
    assert_eq!(stand.count("SELECT count(*) FROM jobs WHERE cost = 50 AND state = 'waiting'"), 4);
    let status = stand.sluicegate(&["status"]);
    assert!(!status.contains("used up"), "{status}");
    let passes = "payments that cost 50 or more wait for limit hourly; cheaper ones pass them";
    stand.await_that(Duration::from_secs(30), || stand.sluicegate(&["status"]).contains(passes));
    let id = "SELECT substr(min(id), 8)::int FROM jobs WHERE cost = 50 AND wait_reason = 'limit'";
    let explained = stand.sluicegate(&["jobs", "explain", &format!("costly-{}", stand.count(id))]);
    assert!(explained.contains("it needs 50 free slots at once, and cheaper payments pass it"), "{explained}");
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (36, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cheap_payments_pass_a_costly_one() {
    cheap_payments_pass_in("blocking").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cheap_payments_pass_a_costly_one_in_requeue_mode() {
    cheap_payments_pass_in("requeue").await;
}
