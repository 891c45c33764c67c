//! A payment from a producer that traces, through RabbitMQ and the program, to its outcome's event.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio_util::sync::CancellationToken;

use crate::collector::{Collector, Span};
use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::RabbitNode;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PRODUCER: &str = "00f067aa0ba902b7";
/// What must be in no span: payload, account, reference, the provider's key, an idempotency key.
const CANARIES: [&str; 5] = ["canary-payload", "canary-account", "canary-reference", "canary-secret", "canary-key"];
const PATIENCE: Duration = Duration::from_secs(120);

struct Program {
    environment: Vec<(&'static str, String)>,
}

impl Program {
    fn run(&self, args: &[&str]) {
        let mut command = Command::new(PROGRAM);
        let environment = self.environment.iter().map(|(name, value)| (*name, value.as_str()));
        let output = command.args(args).envs(environment).env("SLUICEGATE_OPS__LISTEN", "none").output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn start(&self, dir: &Path) -> Server {
        let port = free_port();
        let listen = format!("127.0.0.1:{port}");
        let mut environment: Vec<(&str, &str)> =
            self.environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        environment.push(("SLUICEGATE_OPS__LISTEN", &listen));
        let server = Server::start(&[PROGRAM, "run"], &environment, &dir.join("worker.log"), Some(dir), "");
        server.await_port(port);
        server
    }
}

/// Debian's own interpreter, which sees Debian's python3-pika.
fn python(url: &str, args: &[&str], input: &str) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/otlp/traced.py");
    let mut command = Command::new("/usr/bin/python3");
    command.args([script, url]).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_goes_from_the_producer_through_the_job_to_the_outcome() {
    let collector = Collector::default();
    let endpoint = collector.serve().await;
    let fake = FakeProvider::new(FakeOptions::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let provider = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let _until_the_end = stop.clone().drop_guard();
    tokio::spawn(fake.serve(listener, stop));

    let broker = RabbitNode::shared().create_vhost("otlp");
    let dir = private_dir("otlp");
    let program = Program {
        environment: vec![
            ("SLUICEGATE_DATABASE__URL", format!("sqlite://{}", dir.join("s.db").display())),
            ("SLUICEGATE_QUEUE__URL", broker.clone()),
            ("SLUICEGATE_TELEMETRY__OTLP_ENDPOINT", endpoint),
            ("ACME_KEY", "canary-secret".to_owned()),
        ],
    };
    let rows = format!(
        "[[provider]]\nname = \"acme\"\nurl = \"http://{provider}/charges\"\nidempotency_retention_s = 86400\n\
         headers = {{ Authorization = \"Bearer ${{env:ACME_KEY}}\" }}\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n"
    );
    std::fs::write(dir.join("acme.toml"), rows).unwrap();
    program.run(&["migrate"]);
    program.run(&["provider", "apply", dir.join("acme.toml").to_str().unwrap()]);
    python(&broker, &["bind"], "");

    let message = json!({
        "id": "traced-1", "amount": 1_299, "currency": "EUR", "account": "canary-account",
        "reference": "canary-reference", "idempotency_key": "canary-key", "payload": { "note": "canary-payload" },
    });
    let parent = format!("00-{TRACE}-{PRODUCER}-01");
    python(&broker, &["publish", &parent, "shop=42"], &format!("{message}\n"));
    let plain = json!({ "id": "plain-1", "amount": 1, "currency": "EUR" });
    python(&broker, &["publish"], &format!("{plain}\n"));

    let worker = program.start(&dir);
    let seen = outcomes(&broker, 2).await;
    worker.signal("TERM");
    let deadline = Instant::now() + PATIENCE;
    while !worker.has_ended() {
        assert!(Instant::now() < deadline, "{}", worker.log_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    let spans = collector.spans();
    let job = whole(&spans, "traced-1");
    assert_eq!((job.trace.as_str(), job.parent.as_str()), (TRACE, PRODUCER));
    let untraced = whole(&spans, "plain-1");
    assert!(untraced.parent.is_empty() && untraced.trace != TRACE, "{untraced:?}");

    // The consumer of the outcome goes on where the job was.
    let event = seen.iter().find(|event| event["body"]["id"] == "traced-1").unwrap();
    assert_eq!(event["headers"]["traceparent"], format!("00-{TRACE}-{}-01", job.id));
    assert_eq!(event["headers"]["tracestate"], "shop=42");
    let text = collector.text();
    for canary in CANARIES {
        assert!(!text.contains(canary), "{canary} is in a span");
    }
    let log = worker.log_text();
    assert!(!log.contains("wait for a permit"), "spans are no log lines: {log}");
}

/// The one span of a job, with all of its steps below it.
fn whole(spans: &[Span], id: &str) -> Span {
    let named =
        |span: &&Span| span.name == "job" && span.attributes.get("sluicegate.job_id").is_some_and(|of| of == id);
    let jobs: Vec<&Span> = spans.iter().filter(named).collect();
    let [job] = jobs.as_slice() else { panic!("{id}: {spans:#?}") };
    assert_eq!((job.kind, job.attributes["sluicegate.provider"].as_str()), (5, "acme"));
    assert_eq!(job.attributes["sluicegate.end"], "acknowledged");
    let below = spans.iter().filter(|span| span.parent == job.id);
    let steps: BTreeSet<(&str, i64)> =
        below.inspect(|span| assert_eq!(span.trace, job.trace)).map(|span| (span.name.as_str(), span.kind)).collect();
    let (internal, client) = (1, 3);
    let wanted = BTreeSet::from([
        ("claim", internal),
        ("wait for a turn", internal),
        ("wait for a permit", internal),
        ("write the request down", internal),
        ("charge", client),
        ("write the outcome down", internal),
        ("finish the delivery", internal),
    ]);
    assert_eq!(steps, wanted);
    (*job).clone()
}

/// Waits for so many outcome events.
async fn outcomes(broker: &str, count: usize) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    let mut seen: Vec<Value> = Vec::new();
    while seen.len() < count {
        assert!(Instant::now() < deadline, "{seen:?}");
        let lines = tokio::task::block_in_place(|| python(broker, &["seen"], ""));
        seen.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    seen
}
