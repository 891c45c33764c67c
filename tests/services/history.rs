//! The recorded history on real traffic: its sums are the provider's own record and the ledger's, across a restart.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(90);
const JOBS: u64 = 400;

const ROWS: &str = r#"
[[provider]]
name = "acme"
url = "{url:acme}"
timeout_ms = 2000
idempotency_retention_s = 86400
[[provider.limit]]
name = "per-second"
max_requests = 20
window_ms = 1000

[[provider]]
name = "idle"
url = "{url:acme}"
[[provider.limit]]
name = "per-minute"
max_requests = 60
window_ms = 60000
"#;

async fn ask(stand: &Stand, number: usize, path: &str) -> Value {
    let url = format!("{}{path}", stand.ops_url(number));
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
    client.get(url).send().await.unwrap().json().await.unwrap()
}

async fn until(what: &str, condition: impl AsyncFn() -> Result<(), String>) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(seen) = condition().await {
        assert!(Instant::now() < deadline, "{what}: {seen}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn sum(history: &Value, field: &str) -> u64 {
    history["points"].as_array().unwrap().iter().filter_map(|point| point[field].as_u64()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_sums_outlast_the_workers() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let mut stand = Stand::start();
    // Stricter than the row: some requests get a 429.
    let limits = vec!["15/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    let one = stand.add_worker();
    stand.await_ready(one).await;
    let body = |n: u64| json!({"id": format!("a-{n}"), "amount": 100, "currency": "EUR"}).to_string();
    let jobs: Vec<Value> = (0..JOBS).map(|n| json!({"key": "acme", "body": body(n)})).collect();
    assert_eq!(stand.publish(&jobs) as u64, JOBS);
    let finished = || stand.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'");
    until("half of the payments have finished", async || match finished() {
        done if done >= JOBS / 2 => Ok(()),
        done => Err(format!("{done} finished")),
    })
    .await;
    stand.stop_worker(one);
    let (two, three) = (stand.add_worker(), stand.add_worker());
    until("all payments have finished", async || {
        let done = stand.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'");
        if done == JOBS { Ok(()) } else { Err(format!("{done} finished")) }
    })
    .await;
    let path = "/api/v1/history?provider=acme";
    until("the history is recorded", async || {
        let history = ask(&stand, two, path).await;
        // Recorded, with the count that nothing waits any more.
        let last = history["points"].as_array().unwrap().iter().rev().find(|point| !point["started"].is_null());
        let is_over = sum(&history, "finished") == JOBS && last.is_some_and(|point| point["waiting"] == json!(0));
        if is_over { Ok(()) } else { Err(format!("{last:?}, {} finished", sum(&history, "finished"))) }
    })
    .await;

    let history = ask(&stand, three, path).await;
    let provider = stand.providers["acme"].report();
    let ledger =
        |which: &str| stand.count(&format!("SELECT count(*) FROM attempts WHERE provider = 'acme' AND {which}"));
    assert_eq!(sum(&history, "started"), provider.requests, "{history:#}");
    assert_eq!(sum(&history, "started"), ledger("outcome <> 'not_sent'"));
    assert_eq!(sum(&history, "throttled"), ledger("outcome = 'throttled'"));
    assert_eq!(sum(&history, "finished"), JOBS);
    let points = history["points"].as_array().unwrap();
    let most = points.iter().filter_map(|point| point["started_per_s"].as_f64()).fold(0.0, f64::max);
    assert!((5.0..=21.0).contains(&most), "{most} requests a second");
    assert!(points.iter().any(|point| point["waiting"].as_u64() > Some(50)), "{history:#}");
    assert!(points.iter().any(|point| point["limit_per_s"] == json!(20.0)), "{history:#}");
    // An idle provider has a few rows, and is known all the time.
    let rows = stand.count("SELECT count(*) FROM history_samples WHERE provider = 'idle'");
    assert!((1..=6).contains(&rows), "{rows} rows");
    let idle = ask(&stand, three, "/api/v1/history?provider=idle").await;
    let known =
        |history: &Value| history["points"].as_array().unwrap().iter().filter(|p| !p["started"].is_null()).count();
    assert_eq!(known(&idle), known(&history), "{idle:#}");
    assert_eq!((sum(&idle, "started"), sum(&idle, "finished")), (0, 0));

    // Later, without any worker of before, the figures are the same.
    stand.stop_worker(two);
    stand.stop_worker(three);
    let four = stand.add_worker();
    stand.await_ready(four).await;
    let later = ask(&stand, four, path).await;
    assert_eq!(
        ["started", "finished", "throttled"].map(|field| sum(&later, field)),
        ["started", "finished", "throttled"].map(|field| sum(&history, field))
    );
}
