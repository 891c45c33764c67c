//! Redis drops keys when its memory is short: the worker says so, in its log, in `status` and as a metric, and pays on.

use std::time::{Duration, Instant};

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::metrics::{scrape, value};
use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(60);
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
                    [[provider.limit]]\nname = \"all\"\nmax_requests = 1000\nwindow_ms = 1000\n\
                    [[provider.limit]]\nname = \"each\"\nscope = \"account\"\nmax_requests = 3\nwindow_ms = 600000\n";
const EVICTED: &str = "sluicegate_limiter_evicted_keys_total";
const EVICTING: &str = "sluicegate_limiter_evicting_servers";
const WARNED: &str = "drops keys when its memory is short";
const LOST: &str = "dropped keys for lack of memory";

fn evicted_keys(stand: &Stand) -> u64 {
    let info: String = stand.redis.command("INFO stats");
    let field = info.lines().find_map(|line| line.strip_prefix("evicted_keys:"));
    field.unwrap().trim().parse().unwrap()
}

/// When the quota's state began: bytes 17 to 23 of its head (lua/tallies.lua).
fn born(stand: &Stand) -> Vec<u8> {
    stand.redis.command::<Vec<u8>>("HGET sluicegate:{acme} m")[16..23].to_vec()
}

async fn until(what: &str, stand: &Stand, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what}:\n{}", stand.worker_log(0));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn publish(stand: &Stand, jobs: std::ops::Range<u32>) {
    let jobs: Vec<_> = jobs
        .map(|n| {
            let body = json!({"id": format!("pay-{n}"), "amount": 100, "currency": "EUR", "account": "merchant"});
            json!({"key": "acme", "body": body.to_string()})
        })
        .collect();
    stand.publish(&jobs);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_limiter_keys_are_shown() {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(ROWS);
    // Drops what expires first: keys of accounts before the keys of the other program, and those before the state.
    stand.redis.command::<()>("CONFIG SET maxmemory-policy volatile-ttl");
    stand.redis.command::<()>("CONFIG SET maxmemory-samples 64");
    let worker = stand.add_worker();
    publish(&stand, 0..3);
    stand.await_finished(3, PATIENCE);
    until("the policy is logged", &stand, async || stand.worker_log(0).contains(WARNED)).await;
    until("the policy is a metric", &stand, async || value(&scrape(&stand, worker).await, EVICTING) > 0.5).await;
    let status = |what: &'static str| stand.status_of(worker, &["status"]).contains(what);
    until("status names the policy", &stand, async || status("maxmemory-policy volatile-ttl")).await;
    assert!(!stand.worker_log(0).contains(LOST) && value(&scrape(&stand, worker).await, EVICTED) < 0.5);
    assert_eq!(evicted_keys(&stand), 0);

    // Another program fills the memory. The account has used its limit.
    let began = born(&stand);
    let accounts = "KEYS sluicegate:{acme}:account*";
    assert_eq!(stand.redis.command::<Vec<String>>(accounts).len(), 1);
    let used: String = stand.redis.command("INFO memory");
    let used: u64 = used.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().trim().parse().unwrap();
    stand.redis.command::<()>(&format!("CONFIG SET maxmemory {}", used + 16_000_000));
    for number in 0..500 {
        stand.redis.command::<()>(&format!("SET other-{number} {} EX 3600", "x".repeat(50_000)));
    }
    stand.redis.command::<()>("CONFIG SET maxmemory 0");
    let lost = evicted_keys(&stand);
    assert_eq!((lost > 0, stand.redis.command::<Vec<String>>(accounts).len()), (true, 0));
    until("the loss is logged", &stand, async || stand.worker_log(0).contains(LOST)).await;
    until("the metric is what Redis counted", &stand, async || {
        value(&scrape(&stand, worker).await, EVICTED).to_string() == lost.to_string()
    })
    .await;
    until("status names the loss", &stand, async || status("for lack of memory")).await;

    // The fault that this shows: a fourth payment within the account's window. There is no cold start.
    publish(&stand, 3..4);
    stand.await_finished(4, PATIENCE);
    assert_eq!((stand.providers["acme"].report().charges, born(&stand)), (4, began));
    stand.redis.command::<()>("CONFIG SET maxmemory-policy noeviction");
    until("the policy is right again", &stand, async || value(&scrape(&stand, worker).await, EVICTING) < 0.5).await;
    until("status does not name it", &stand, async || !status("maxmemory-policy")).await;
}
