//! A foreign queue under the name of a lane's queue: its provider is reported as misconfigured, and payments of other
//! providers continue.

use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(60);

fn row(name: &str) -> String {
    format!(
        "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\nidempotency_retention_s = 86400\n\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n\n"
    )
}

async fn channel(stand: &Stand) -> (lapin::Connection, lapin::Channel) {
    let connection = lapin::Connection::connect(stand.broker_url(), Default::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

fn standing(stand: &Stand, worker: usize, provider: &str) -> (String, String) {
    let status: Value = serde_json::from_str(&stand.status_of(worker, &["status", "--json"])).unwrap();
    let of = status["providers"].as_array().unwrap().iter().find(|row| row["name"] == provider).unwrap().clone();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (word(&of["state"]), word(&of["cause"]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_queue_blocks_only_its_provider() {
    let mut stand = Stand::start();
    for name in ["acme", "bolt", "crate"] {
        stand.add_provider(name, FakeOptions::default()).await;
    }
    let (_connection, theirs) = channel(&stand).await;
    let plain = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    theirs.queue_declare("payments.bolt".into(), plain, FieldTable::default()).await.unwrap();

    let file = stand.file("providers.toml", &["acme", "bolt", "crate"].map(row).concat());
    let (code, output) = stand.attempt(&["provider", "apply", &file]);
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("the queues of 2 providers declared") && output.contains("bolt: queue `payments.bolt` exists"),
        "{output}"
    );

    // The worker is ready for the other providers, and reports the one without a queue.
    let worker = stand.add_worker();
    stand.await_ready(worker).await;
    let pay = |provider: &str, id: &str| {
        let args = ["enqueue", "--provider", provider, "--id", id, "--amount", "1299", "--currency", "EUR"];
        stand.attempt(&args)
    };
    assert_eq!(pay("acme", "one").0, Some(0));
    let (code, output) = pay("bolt", "two");
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("nothing is published to `bolt`: queue `payments.bolt` exists"), "{output}");
    let line = |provider: &str, id: &str| {
        json!({ "id": id, "provider": provider, "amount": 1299, "currency": "EUR" }).to_string()
    };
    let mixed = [line("acme", "three"), line("bolt", "two"), line("crate", "four")].join("\n");
    let file = stand.file("jobs.jsonl", &mixed);
    let (code, output) = stand.attempt(&["enqueue", "--file", &file]);
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("2 published, 0 invalid") && output.contains("line 2: queue `payments.bolt` exists"),
        "{output}"
    );
    stand.await_finished(3, PATIENCE);
    let exists = "queue `payments.bolt` exists with other arguments";
    stand.await_that(PATIENCE, || {
        let (state, cause) = standing(&stand, worker, "bolt");
        state == "misconfigured" && cause.contains(exists)
    });
    assert_ne!(standing(&stand, worker, "acme").0, "misconfigured");

    // The queue is fixed while the worker runs.
    theirs.queue_delete("payments.bolt".into(), QueueDeleteOptions::default()).await.unwrap();
    let (code, output) = stand.attempt(&["enqueue", "--file", &file]);
    assert_eq!(code, Some(0), "{output}");
    stand.await_finished(4, PATIENCE);
    assert_eq!(stand.providers["bolt"].effects().len(), 1);
    assert_eq!(stand.providers["acme"].effects().len() + stand.providers["crate"].effects().len(), 3);
    stand.await_that(PATIENCE, || standing(&stand, worker, "bolt").0 != "misconfigured");
}
