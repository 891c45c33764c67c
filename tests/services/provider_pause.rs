//! A wait of a quarter of an hour that a provider names, on real backends: it pauses every worker. `provider resume`
//! ends it in all of them.

use std::time::{Duration, Instant};

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

/// Far shorter than the wait that the provider names.
const PATIENCE: Duration = Duration::from_secs(60);
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
                    [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n";

async fn until(stand: &Stand, what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not so: {what}; {:?}\n{}", stand.states(), stand.worker_log(0));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_ends_a_provider_pause_everywhere() {
    let mut stand = Stand::start();
    // The provider's limit is stricter than the row's, and its 429 names the rest of its window.
    let limits = vec!["5/15m".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    stand.add_worker();
    stand.add_worker();
    let message = |n: u32| json!({ "id": format!("p{n}"), "amount": 100, "currency": "EUR" }).to_string();
    // More than a window admits, so that some jobs wait however late the first 429 comes.
    let messages: Vec<_> = (0..300).map(|n| json!({ "key": "acme", "body": message(n) })).collect();
    assert_eq!(stand.publish(&messages), messages.len());
    let report = || stand.providers["acme"].report();
    let paused = || stand.count("SELECT count(*) FROM jobs WHERE wait_reason = 'provider_paused'") > 0;
    until(&stand, "the provider has named a wait", || report().refused_429 > 0).await;
    until(&stand, "the wait pauses the other jobs", paused).await;
    let before = report().requests;
    stand.sluicegate(&["provider", "resume", "acme", "--because", "they said that it works"]);
    until(&stand, "requests are sent again", || report().requests > before).await;
    let lifted = "SELECT count(*) FROM settings_audit WHERE because = 'they said that it works' \
                  AND new_row ->> 'resumed_at' IS NOT NULL";
    assert_eq!(stand.count(lifted), 1);
    let heard = |worker| stand.worker_log(worker).contains("an operator has lifted the wait that the provider named");
    until(&stand, "each worker's gate has ended the wait", || heard(0) && heard(1)).await;
    assert_eq!(report().charges, 5, "the provider still applies its limit");
}
