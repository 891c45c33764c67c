//! Readouts compared with SQL, the broker and the provider's records. One deployment has two workers on RabbitMQ, Redis
//! and PostgreSQL, with payments that do not move and a backlog in the broker.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::expected::{Truth, judge};
use crate::prometheus::Prometheus;
use crate::stand::Stand;

/// Waiting payments of `shut`, whose limit admits two an hour.
const UNMOVING: u64 = 50;
const SENT: u64 = 2;
/// Payments of `busy`, and its rate per second.
const BACKLOG: u64 = 2_400;
const PER_SECOND: u64 = 20;
/// Payments of `mute`, which answers too late, and whose limit admits one an hour: the outcome stays unknown.
const UNANSWERED: u64 = 1;
/// Readouts are at most three seconds old; the rest is for a busy machine.
const LATE: Duration = Duration::from_secs(6);
const SLACK: u64 = PER_SECOND * 6;

const ROWS: &str = r#"
[[provider]]
name = "shut"
url = "{url:shut}"
idempotency_retention_s = 86400
[[provider.limit]]
name = "per-hour"
max_requests = 2
window_ms = 3600000

[[provider]]
name = "mute"
url = "{url:mute}"
timeout_ms = 300
idempotency_retention_s = 86400
[[provider.limit]]
name = "per-hour"
max_requests = 1
window_ms = 3600000

[[provider]]
name = "busy"
url = "{url:busy}"
idempotency_retention_s = 86400
[[provider.limit]]
name = "per-second"
max_requests = 20
window_ms = 1000
[[provider.limit]]
name = "rehearsed"
shadow = true
max_requests = 1
window_ms = 1000
[[provider.limit]]
name = "search"
applies_to = "lookup"
max_requests = 1
window_ms = 1000
"#;

struct Deployment {
    stand: Stand,
    workers: [usize; 2],
    client: reqwest::Client,
}

impl Deployment {
    async fn start() -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let mut stand = Stand::start_with_broker();
        for (name, latency_ms) in [("shut", 10), ("mute", 10_000), ("busy", 10)] {
            let latency = (Duration::from_millis(latency_ms / 2), Duration::from_millis(latency_ms));
            stand.add_provider(name, FakeOptions { latency, ..FakeOptions::default() }).await;
        }
        stand.apply(ROWS);
        let workers = [stand.add_worker(), stand.add_worker()];
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
        Self { stand, workers, client }
    }

    fn publish(&self) {
        let message = |lane: &str, number: u64| {
            let body = json!({"id": format!("{lane}-{number}"), "amount": 100, "currency": "EUR"}).to_string();
            json!({"key": lane, "body": body})
        };
        let shut = (0..UNMOVING + SENT).map(|number| message("shut", number));
        let mute = (0..UNANSWERED).map(|number| message("mute", number));
        let lines: Vec<Value> = shut.chain(mute).chain((0..BACKLOG).map(|number| message("busy", number))).collect();
        assert_eq!(self.stand.publish(&lines), lines.len());
    }

    async fn text(&self, worker: usize, path: &str) -> String {
        let url = format!("{}{path}", self.stand.ops_url(self.workers[worker]));
        self.client.get(url).send().await.unwrap().text().await.unwrap()
    }

    async fn ask(&self, worker: usize, path: &str) -> Value {
        serde_json::from_str(&self.text(worker, path).await).unwrap()
    }

    async fn provider(&self, worker: usize, name: &str) -> Value {
        of(&self.ask(worker, "/api/v1/overview").await, name)
    }

    /// Payments of `busy` without a request, by the provider's own records.
    fn unsent(&self) -> u64 {
        BACKLOG - self.stand.providers["busy"].report().charges
    }

    /// Age of the oldest payment of unknown outcome, by SQL.
    fn oldest_unknown_s(&self) -> f64 {
        let age = "SELECT extract(epoch FROM now() - min(first_sent_at)) FROM jobs WHERE state = 'unknown'";
        let output = self.stand.psql().args(["-At", "-c", age]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    /// Polls both workers until the condition holds; returns the time.
    async fn until(&self, what: &str, holds: impl Fn(&Value, &Value) -> bool) -> Duration {
        let began = Instant::now();
        loop {
            let mut seen = Vec::new();
            for worker in [0, 1] {
                let overview = self.ask(worker, "/api/v1/overview").await;
                let workers = self.ask(worker, "/api/v1/workers").await;
                if !holds(&overview, &workers) {
                    seen.push(format!("{overview}\n{workers}"));
                }
            }
            if seen.is_empty() {
                return began.elapsed();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{what}: {}", seen.join("\n"));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn of(overview: &Value, name: &str) -> Value {
    let providers = overview["providers"].as_array().unwrap();
    providers.iter().find(|provider| provider["name"] == name).unwrap().clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Unmoving payments have one figure in every readout at any moment, and it is the sum of its parts.
async fn unmoving_payments_are_one_figure(deployment: &Deployment) -> Vec<String> {
    let (began, mut paused, mut problems, mut samples) = (Instant::now(), false, Vec::new(), 0);
    let mut record: Vec<(Timestamp, u64)> = Vec::new();
    while began.elapsed() < Duration::from_secs(14) {
        if !paused && began.elapsed() > Duration::from_secs(5) {
            deployment.stand.sluicegate(&["provider", "pause", "shut"]);
            paused = true;
        }
        for worker in [0, 1] {
            let shut = deployment.provider(worker, "shut").await;
            let page = deployment.ask(worker, "/api/v1/providers/shut").await["overview"].clone();
            let held = number(&shut["active"]) - number(&shut["in_flight"]);
            let parts = number(&shut["queued"]) + number(&shut["backlog"]) + number(&shut["delayed"]) + held;
            let figures = [number(&shut["waiting"]), number(&page["waiting"]), parts];
            if figures != [UNMOVING; 3] {
                problems
                    .push(format!("worker {worker} after {:?}: overview, page, parts {figures:?}", began.elapsed()));
            }
            // Compared with the provider's records at the instant of the snapshot, which the readout names.
            record.push((Timestamp::now(), deployment.unsent()));
            let overview = deployment.ask(worker, "/api/v1/overview").await;
            let counted_at: Timestamp = overview["counted_at"].as_str().unwrap().parse().unwrap();
            let then = record.iter().rev().find(|(at, _)| *at <= counted_at).map(|(_, unsent)| *unsent);
            let waiting = number(&of(&overview, "busy")["waiting"]);
            if then.is_some_and(|unsent| waiting.abs_diff(unsent) > SLACK) {
                problems.push(format!("busy: {waiting} of {then:?} wait"));
            }
        }
        samples += 1;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let status: Value =
        serde_json::from_str(&deployment.stand.status_of(deployment.workers[0], &["status", "--json"])).unwrap();
    if of(&status, "shut")["waiting"] != UNMOVING {
        problems.push(format!("status: {}", of(&status, "shut")));
    }
    assert!(samples > 10, "{samples} samples");
    problems
}

/// Readouts report an outage of the database, and within a few seconds after it all figures are correct.
async fn figures_recover_after_a_database_outage(deployment: &Deployment) -> Vec<String> {
    let mut problems = Vec::new();
    deployment.stand.postgres.kill();
    let is_reported = |overview: &Value, _: &Value| {
        let shut = of(overview, "shut");
        // The queue alone does not count payments that are recorded and delayed.
        let unknown = ["backlog", "delayed", "active", "in_flight", "review", "dead", "succeeded", "rate_per_s"];
        shut["waiting_is_at_least"] == true && unknown.iter().all(|figure| shut[*figure].is_null())
    };
    deployment.until("the outage is reported", is_reported).await;
    // Longer than the time after which a silent worker is lost.
    tokio::time::sleep(Duration::from_secs(12)).await;
    deployment.stand.postgres.restart();
    deployment.stand.await_count("SELECT 1", 1);
    let true_again = |overview: &Value, workers: &Value| {
        let ready = workers["workers"].as_array().unwrap().iter().filter(|worker| worker["state"] == "ready").count();
        let shut = of(overview, "shut");
        let warnings = overview["warnings"].as_array().unwrap();
        let exact = shut["waiting"] == UNMOVING && shut["waiting_is_at_least"] != true;
        ready == 2 && exact && warnings.is_empty()
    };
    let took = deployment.until("all figures are correct again", true_again).await;
    if took > LATE {
        problems.push(format!("figures are correct only {took:?} after the database was available again"));
    }
    problems
}

/// An unavailable broker does not count as zero.
async fn without_the_broker_figures_are_lower_bounds(deployment: &Deployment) -> Vec<String> {
    let mut problems = Vec::new();
    deployment.stand.rabbit.own().kill();
    let is_reported = |overview: &Value, _: &Value| {
        let busy = of(overview, "busy");
        busy["queued"].is_null() && busy["waiting_is_at_least"] == true && busy["clears"]["kind"] != "clears_in"
    };
    deployment.until("the broker's outage is reported", is_reported).await;
    let status = deployment.stand.status_of(deployment.workers[1], &["status"]);
    if !status.contains("wait; the broker is unreachable") || !status.contains("≥ ") {
        problems.push(format!("status: {status}"));
    }
    let scraped = deployment.text(0, "/metrics").await;
    for metric in ["sluicegate_waiting_jobs{", "sluicegate_clear_seconds{", "sluicegate_queue_ready_messages{"] {
        if scraped.contains(metric) {
            problems.push(format!("{metric} is shown without the broker"));
        }
    }
    problems
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readouts_are_correct_during_backend_failures() {
    let deployment = Deployment::start().await;
    let ports = deployment.workers.map(|worker| deployment.stand.ops_port(worker));
    let prometheus = Prometheus::start(&ports).await;
    deployment.publish();
    deployment.stand.await_count("SELECT count(*) FROM jobs WHERE provider = 'shut' AND state = 'succeeded'", SENT);
    deployment.stand.await_count("SELECT count(*) FROM jobs WHERE provider = 'mute' AND state = 'unknown'", UNANSWERED);
    // From here on, no payment of `shut` moves.
    let still = Timestamp::now();
    let counted = |overview: &Value, _: &Value| {
        let counted_at = overview["counted_at"].as_str().and_then(|at| at.parse::<Timestamp>().ok());
        counted_at.is_some_and(|at| at > still) && of(overview, "shut")["waiting"] == UNMOVING
    };
    deployment.until("all payments are counted", counted).await;
    let mut problems = unmoving_payments_are_one_figure(&deployment).await;
    let drain_ms = deployment.provider(0, "busy").await["clears"]["ms"].as_f64().unwrap();
    let truth = Truth {
        unmoving: UNMOVING,
        unsent: deployment.unsent(),
        per_second: PER_SECOND,
        slack: SLACK,
        workers: 2,
        queued: deployment.stand.ready(&["payments.shut".to_owned()])[0],
        unknown: UNANSWERED,
        oldest_unknown_s: deployment.oldest_unknown_s(),
        drain_s: drain_ms / 1_000.0,
    };
    problems.extend(judge(&prometheus, &truth).await);
    problems.extend(figures_recover_after_a_database_outage(&deployment).await);
    problems.extend(without_the_broker_figures_are_lower_bounds(&deployment).await);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
