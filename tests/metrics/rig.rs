//! One worker process with a broker, its other backends embedded, and three strict providers with their row file.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::domain::provider::ProviderName;
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider, FakeProviderReport};
use sluicegate::queue::rabbitmq::{RabbitMq, RabbitSettings};
use sluicegate::queue::{Destination, OutgoingMessage, Properties, Queue};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::scrape::Scrape;
use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::RabbitNode;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
/// Longer than any condition of these tests takes on a working machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// Name, mode, the provider's limit, and our limit.
const PROVIDERS: [(&str, &str, &str, u32); 3] = [
    // Both limits are equal.
    ("acme", "blocking", "20/1s", 20),
    // The provider allows less than its row.
    ("bolt", "blocking", "5/1s", 50),
    // So slow that jobs are delayed.
    ("crate", "requeue", "2/1s", 2),
];

pub struct Rig {
    pub port: u16,
    worker: Option<Server>,
    dir: PathBuf,
    broker: String,
    fakes: Vec<(&'static str, FakeHandle, DropGuard)>,
    /// The provider file.
    pub rows: String,
}

impl Rig {
    /// Starts the providers and applies their rows, without a worker.
    pub async fn prepare() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut rows = String::new();
        let mut fakes = Vec::new();
        // So far ahead that no payment misses it.
        let cutoff = (jiff::Timestamp::now() + Duration::from_secs(12 * 3_600)).strftime("%H:%M UTC").to_string();
        for (name, mode, theirs, ours) in PROVIDERS {
            let limits = vec![theirs.parse().unwrap()];
            let latency = (Duration::from_millis(2), Duration::from_millis(10));
            let fake = FakeProvider::new(FakeOptions { limits, latency, ..FakeOptions::default() });
            let (handle, stop) = (fake.handle(), CancellationToken::new());
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            tokio::spawn(fake.serve(listener, stop.clone()));
            fakes.push((name, handle, stop.drop_guard()));
            rows += &format!(
                "[[provider]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}/charges\"\nmode = \"{mode}\"\n\
                 timeout_ms = 5000\nidempotency_retention_s = 86400\ncutoff = \"{cutoff}\"\n\
                 [[provider.limit]]\nname = \"per-second\"\nmax_requests = {ours}\nwindow_ms = 1000\n\n"
            );
            // These limits are lower, but do not apply to charges.
            for (limit, column) in [("rehearsed", "shadow = true"), ("search", "applies_to = \"lookup\"")] {
                rows += &format!(
                    "[[provider.limit]]\nname = \"{limit}\"\n{column}\nmax_requests = 1\nwindow_ms = 1000\n\n"
                );
            }
        }
        let port = free_port();
        let broker = RabbitNode::shared().create_vhost(&format!("metrics-{port}"));
        let rig = Self { port, worker: None, dir: private_dir("metrics"), broker, fakes, rows };
        rig.apply(&rig.rows);
        rig
    }

    pub fn apply(&self, rows: &str) {
        let file = self.dir.join("providers.toml");
        std::fs::write(&file, rows).unwrap();
        self.sluicegate(&["provider", "apply", file.to_str().unwrap()]);
    }

    /// Publishes messages to lanes without validation, before the worker runs.
    pub async fn publish(&self, messages: impl IntoIterator<Item = (&'static str, String)>) {
        assert!(self.worker.is_none());
        let queue = RabbitMq::connect(RabbitSettings::new(&self.broker.as_str().into(), "payments").unwrap());
        for (lane, body) in messages {
            let destination = Destination::Lane(ProviderName::new(lane).unwrap());
            let body = body.into_bytes().into();
            queue.publish(OutgoingMessage { destination, body, properties: Properties::default() }).await.unwrap();
        }
    }

    pub fn run(&mut self) {
        let listen = format!("127.0.0.1:{}", self.port);
        let env = self.environment(listen);
        let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let server = Server::start(&[PROGRAM, "run"], &env, &self.dir.join("worker.log"), None, "");
        server.await_open(self.port);
        self.worker = Some(server);
    }

    fn environment(&self, listen: String) -> [(&'static str, String); 3] {
        [
            ("SLUICEGATE_DATABASE__URL", format!("sqlite://{}", self.dir.join("ledger.db").display())),
            ("SLUICEGATE_QUEUE__URL", self.broker.clone()),
            ("SLUICEGATE_OPS__LISTEN", listen),
        ]
    }

    /// Runs a command of the program and returns its output.
    pub fn sluicegate(&self, args: &[&str]) -> String {
        let env = self.environment(format!("127.0.0.1:{}", self.port));
        let output = Command::new(PROGRAM).args(args).envs(env).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn report(&self, provider: &str) -> FakeProviderReport {
        self.fakes.iter().find(|(name, ..)| *name == provider).unwrap().1.report()
    }

    async fn get(&self, path: &str, accept: &str) -> (String, String) {
        let request = reqwest::Client::new().get(format!("http://127.0.0.1:{}{path}", self.port));
        let answer = request.header("accept", accept).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        let kind = answer.headers()["content-type"].to_str().unwrap().to_owned();
        (kind, answer.text().await.unwrap())
    }

    /// A scrape in the older text format, which includes all jobs that were counted before the call.
    pub async fn scrape(&self) -> Scrape {
        let called = Instant::now();
        loop {
            let (kind, text) = self.get("/metrics", "*/*").await;
            assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
            let scrape = Scrape::parse(&text);
            if scrape.value("sluicegate_ledger_counts_age_seconds", &[]) < called.elapsed().as_secs_f64() {
                return scrape;
            }
            assert!(called.elapsed() < PATIENCE, "{text}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    pub async fn scrape_as_open_metrics(&self) -> (String, String) {
        self.get("/metrics", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2").await
    }

    /// Waits until the warnings of the overview meet this condition, and returns them.
    pub async fn await_warnings(&self, what: &str, holds: impl Fn(&[String]) -> bool) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let overview: Value = serde_json::from_str(&self.get("/api/v1/overview", "*/*").await.1).unwrap();
            let warnings: Vec<String> = serde_json::from_value(overview["warnings"].clone()).unwrap();
            if holds(&warnings) {
                return warnings;
            }
            assert!(Instant::now() < deadline, "{what}: {warnings:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until this many jobs have succeeded.
    pub async fn await_succeeded(&self, jobs: u64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let accounts: Value = serde_json::from_str(&self.get("/api/v1/reconciliation", "*/*").await.1).unwrap();
            let succeeded = |account: &Value| account["states"]["succeeded"].as_u64().unwrap_or(0);
            let all: u64 = accounts.as_array().unwrap().iter().map(succeeded).sum();
            if all == jobs {
                return;
            }
            assert!(Instant::now() < deadline, "{all} of {jobs}:\n{accounts}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn log(&self) -> String {
        self.worker.as_ref().map(Server::log_text).unwrap_or_default()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        drop(self.worker.take());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Payments for a lane. Ids and accounts begin with words that no metric may show.
pub fn jobs(lane: &'static str, count: u32) -> Vec<(&'static str, String)> {
    let job = |number| json!({"id": format!("payment-{lane}-{number}"), "amount": 100 + number, "currency": "EUR", "account": "customer-1"});
    (0..count).map(|number| (lane, job(number).to_string())).collect()
}
