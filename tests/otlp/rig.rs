//! A test rig: a broker, a provider and the program, configured to send traces to a collector.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::RabbitNode;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
/// Canaries that no span and no log may contain: payload, account, reference, idempotency key, the provider's key.
pub const CANARIES: [&str; 5] = ["canary-payload", "canary-account", "canary-reference", "canary-key", "canary-secret"];
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Rig {
    broker: String,
    dir: PathBuf,
    environment: Vec<(&'static str, String)>,
    _provider: DropGuard,
}

impl Rig {
    /// A provider that allows one request in `window`. A job waits for it in the worker up to `max_wait`. The outcomes
    /// are bound to a queue.
    pub async fn new(name: &str, endpoint: &str, waits: (Duration, Duration)) -> Self {
        Self::with(FakeOptions::default(), name, endpoint, waits).await
    }

    /// The same with these options of the provider.
    pub async fn with(
        options: FakeOptions,
        name: &str,
        endpoint: &str,
        (window, max_wait): (Duration, Duration),
    ) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let provider = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(FakeProvider::new(options).serve(listener, stop.clone()));
        let broker = RabbitNode::shared().create_vhost(name);
        let dir = private_dir(name);
        let environment = vec![
            ("SLUICEGATE_DATABASE__URL", format!("sqlite://{}", dir.join("s.db").display())),
            ("SLUICEGATE_QUEUE__URL", broker.clone()),
            ("SLUICEGATE_TELEMETRY__OTLP_ENDPOINT", endpoint.to_owned()),
            ("SLUICEGATE_OUTBOUND__SECRETS", "env:ACME_KEY@127.0.0.1".to_owned()),
            ("ACME_KEY", "canary-secret".to_owned()),
        ];
        let rig = Self { broker, dir, environment, _provider: stop.drop_guard() };
        // A job that may not wait in the worker is delayed.
        let mode = if max_wait < window { "requeue" } else { "blocking" };
        let rows = format!(
            "[[provider]]\nname = \"acme\"\nurl = \"http://{provider}/charges\"\nidempotency_retention_s = 86400\n\
             mode = \"{mode}\"\nmax_wait_ms = {}\nleak_per_second = 1000\nheaders = {{ Authorization = \"Bearer ${{env:ACME_KEY}}\" }}\n\
             [[provider.limit]]\nname = \"one\"\nmax_requests = 1\nwindow_ms = {}\n",
            max_wait.as_millis(),
            window.as_millis()
        );
        let file = rig.dir.join("acme.toml");
        std::fs::write(&file, rows).unwrap();
        rig.run(&["migrate"]);
        rig.run(&["provider", "apply", file.to_str().unwrap()]);
        rig.python(&["bind"], "");
        rig
    }

    fn environment(&self) -> Vec<(&str, &str)> {
        self.environment.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    fn run(&self, args: &[&str]) {
        let mut command = Command::new(PROGRAM);
        command.args(args).envs(self.environment()).env("SLUICEGATE_OPS__LISTEN", "none");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Starts the worker. Its end removes the rig's directory.
    pub fn start(&self) -> Server {
        let port = free_port();
        let listen = format!("127.0.0.1:{port}");
        let mut environment = self.environment();
        environment.extend([("SLUICEGATE_OPS__LISTEN", listen.as_str()), ("SLUICEGATE_LOG__LEVEL", "trace")]);
        let log = self.dir.join("worker.log");
        let server = Server::start(&[PROGRAM, "run"], &environment, &log, Some(&self.dir), "");
        server.await_port(port);
        server
    }

    /// Debian's own interpreter, which finds Debian's python3-pika.
    fn python(&self, args: &[&str], input: &str) -> String {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/otlp/traced.py");
        let mut command = Command::new("/usr/bin/python3");
        command.args([script, &self.broker]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Publishes a job that contains all canaries, with these values of `traceparent` and `tracestate`.
    pub fn publish(&self, id: &str, context: &[&str]) {
        let message = json!({
            "id": id, "amount": 1_299, "currency": "EUR", "account": "canary-account", "reference": "canary-reference",
            "idempotency_key": format!("canary-key-{id}"), "payload": { "note": "canary-payload" },
        });
        self.python(&[&["publish"], context].concat(), &format!("{message}\n"));
    }

    /// Waits for this many outcome events: body and headers of each.
    pub async fn outcomes(&self, count: usize) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        let mut seen: Vec<Value> = Vec::new();
        while seen.len() < count {
            assert!(Instant::now() < deadline, "{seen:?}");
            let lines = tokio::task::block_in_place(|| self.python(&["seen"], ""));
            seen.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        seen
    }
}

/// Stops the worker and returns its log, which must contain no canary.
pub async fn end(worker: &Server) -> String {
    worker.signal("TERM");
    let deadline = Instant::now() + PATIENCE;
    while !worker.has_ended() {
        assert!(Instant::now() < deadline, "{}", worker.log_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let log = worker.log_text();
    silent_about_canaries(&log);
    log
}

pub fn silent_about_canaries(text: &str) {
    for canary in CANARIES {
        assert!(!text.contains(canary), "{canary} is in {text}");
    }
}
