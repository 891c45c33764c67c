//! Metrics of two workers on real backends: their counts equal the provider's, and an unavailable backend is a zero in
//! a successful scrape.

use std::time::{Duration, Instant};

use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const JOBS: u32 = 40;
const LIMIT: &str = r#"provider="acme",limit="per-second",scope="provider",applies_to="all",shadow="false""#;
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn scrape(stand: &Stand, worker: usize) -> String {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let answer = reqwest::get(format!("http://127.0.0.1:{}/metrics", stand.ops_port(worker))).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.text().await.unwrap()
}

/// Value of the sample with exactly this name and these labels.
pub fn value(scrape: &str, sample: &str) -> f64 {
    let line = scrape.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {sample} in:\n{scrape}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_sum_workers_and_show_outages() {
    let mut stand = Stand::start();
    let limits = vec!["20/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(
        "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\ntimeout_ms = 2000\nidempotency_retention_s = 86400\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = 20\nwindow_ms = 1000\n",
    );
    let jobs: Vec<_> = (0..JOBS)
        .map(|n| {
            let body = serde_json::json!({"id": format!("pay-{n}"), "amount": 100 + n, "currency": "EUR"});
            serde_json::json!({"key": "acme", "body": body.to_string()})
        })
        .collect();
    let workers = [stand.add_worker(), stand.add_worker()];
    stand.publish(&jobs);
    stand.await_finished(u64::from(JOBS), PATIENCE);

    let report = stand.providers["acme"].report();
    let scrapes = [scrape(&stand, workers[0]).await, scrape(&stand, workers[1]).await];
    // A worker shows a provider's counts from its first job on, and one of the two may have taken all.
    let count = |scrape: &String, sample: &str| {
        let is_idle = !scrape.contains("sluicegate_jobs_total{provider=\"acme\"");
        if is_idle { 0.0 } else { value(scrape, sample) }
    };
    let sum = |sample: &str| scrapes.iter().map(|scrape| count(scrape, sample)).sum::<f64>().to_string();
    assert_eq!(sum("sluicegate_start_lateness_seconds_count{provider=\"acme\"}"), report.requests.to_string());
    assert_eq!(sum("sluicegate_jobs_total{provider=\"acme\",outcome=\"succeeded\"}"), report.charges.to_string());
    assert_eq!((sum("sluicegate_provider_throttled_total{provider=\"acme\"}").as_str(), report.refused_429), ("0", 0));
    for scrape in &scrapes {
        assert!(value(scrape, &format!("sluicegate_limit_in_use{{{LIMIT}}}")) <= 20.0);
        for engine in ["database", "queue", "limiter"] {
            let up = format!("sluicegate_dependency_up{{dependency=\"{engine}\"}}");
            assert!(value(scrape, &up) > 0.5, "{engine}:\n{scrape}");
        }
    }

    stand.redis.kill();
    let deadline = Instant::now() + PATIENCE;
    let without = loop {
        let scrape = scrape(&stand, workers[0]).await;
        let is_down = value(&scrape, "sluicegate_dependency_up{dependency=\"limiter\"}") < 0.5;
        // The limits are the overview's, which reads them a moment later.
        if is_down && !scrape.contains("sluicegate_limit_in_use{") {
            break scrape;
        }
        assert!(Instant::now() < deadline, "{scrape}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert!(value(&without, "sluicegate_dependency_up{dependency=\"database\"}") > 0.5);
    assert!(!without.contains("sluicegate_dependency_rtt_seconds{dependency=\"limiter\"}"));
    assert!(!without.contains("sluicegate_limit_in_use{"), "{without}");
    assert!(without.contains(&format!("sluicegate_limit_requests{{{LIMIT}}} 20.0")));
}
