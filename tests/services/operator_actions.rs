//! Operator actions on real backends: replayed dead payments and resent reviews are paid once, within the limit.
//! Cancelled payments are never sent. The strict provider decides.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::stand::Stand;
use crate::support::process::free_port;

const PATIENCE: Duration = Duration::from_secs(90);

/// `acme` has one attempt, `bolt` does not deduplicate, `shut` has a closed limit.
fn rows(acme: u16, bolt: u16) -> String {
    let provider = |name: &str, port: u16, more: &str, limit: u32| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}/charges\"\ntimeout_ms = 2000\n{more}\n\
             [[provider.limit]]\nname = \"per-second\"\nmax_requests = {limit}\nwindow_ms = 1000\n\n"
        )
    };
    [
        provider("acme", acme, "max_attempts = 1\nidempotency_retention_s = 86400", 100),
        provider("bolt", bolt, "", 2),
        provider("shut", acme, "", 0),
    ]
    .concat()
}

struct Serving {
    handle: FakeHandle,
    _until_dropped: DropGuard,
}

async fn serve(port: u16, options: FakeOptions) -> Serving {
    let fake = FakeProvider::new(options);
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    // A provider that has just ended may not have released the port yet.
    let deadline = std::time::Instant::now() + PATIENCE;
    let listener = loop {
        match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => break listener,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{port}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    tokio::spawn(fake.serve(listener, stop.clone()));
    Serving { handle, _until_dropped: stop.drop_guard() }
}

fn jobs(provider: &str, count: u32) -> Vec<Value> {
    let message = |n| json!({ "id": format!("{provider}-{n}"), "amount": 100 + n, "currency": "EUR" }).to_string();
    (0..count).map(|n| json!({ "key": provider, "body": message(n) })).collect()
}

/// Each of the `count` payments was charged once, and no window held more than the provider allows.
fn assert_paid_once(serving: &Serving, count: usize) {
    let (report, effects) = (serving.handle.report(), serving.handle.effects());
    let ids: BTreeSet<&str> = effects.iter().map(|effect| effect.id.as_str()).collect();
    assert_eq!((effects.len(), ids.len(), report.doubles, report.refused_429), (count, count, 0, 0));
    assert!(report.limits.iter().all(|limit| limit.breaches == 0), "{report:?}");
}

async fn await_counts(stand: &Stand, provider: &str, state: &str, jobs: u64) {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let status: Value = serde_json::from_str(&stand.sluicegate(&["status", "--json"])).unwrap();
        let line = status["providers"].as_array().unwrap().iter().find(|line| line["name"] == provider).unwrap();
        if line[state] == jobs {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{jobs} {state}: {line}\n{}", stand.worker_log(0));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_undecided_payments() {
    let (acme, bolt) = (free_port(), free_port());
    let mut stand = Stand::start();
    stand.apply(&rows(acme, bolt));
    // Responds with 500 to every request and charges nothing, which only its own records show.
    let failing = serve(bolt, FakeOptions { error_rate: 1.0, ..FakeOptions::default() }).await;
    stand.add_worker();

    // No server listens at `acme`, so its jobs are confirmed not charged and become dead.
    assert_eq!(stand.publish(&jobs("acme", 6)), 6);
    assert_eq!(stand.publish(&jobs("bolt", 6)), 6);
    assert_eq!(stand.publish(&jobs("shut", 2)), 2);
    await_counts(&stand, "acme", "dead", 6).await;
    await_counts(&stand, "bolt", "review", 6).await;
    await_counts(&stand, "shut", "waiting", 2).await;
    assert!(failing.handle.effects().is_empty());

    let back = serve(acme, FakeOptions { limits: vec!["100/1s".parse().unwrap()], ..FakeOptions::default() }).await;
    stand.sluicegate(&["dlq", "discard", "acme-5", "--yes"]);
    let dry: Value = serde_json::from_str(&stand.sluicegate(&["dlq", "replay", "--dry-run", "--json"])).unwrap();
    assert_eq!(dry["jobs"], 5);
    stand.sluicegate(&["dlq", "replay", "--because", "acme is back"]);
    await_counts(&stand, "acme", "succeeded", 5).await;
    assert_paid_once(&back, 5);

    drop(failing);
    // A provider that does not deduplicate would charge a second request.
    let options = FakeOptions { limits: vec!["2/1s".parse().unwrap()], deduplicate: false, ..FakeOptions::default() };
    let mended = serve(bolt, options).await;
    stand.sluicegate(&["jobs", "resolve", "bolt-0", "--as", "declined"]);
    for number in 1..6 {
        let id = format!("bolt-{number}");
        stand.sluicegate(&["jobs", "resolve", &id, "--as", "resend", "--confirm", &id]);
    }
    await_counts(&stand, "bolt", "succeeded", 5).await;
    assert_paid_once(&mended, 5);

    stand.sluicegate(&["jobs", "cancel", "shut-0"]);
    // The worker of the stand applies a list.
    let file = stand.file("ids", "shut-1\n");
    let dry = stand.sluicegate(&["jobs", "cancel", "--file", &file, "--dry-run", "--json"]);
    let digest = serde_json::from_str::<Value>(&dry).unwrap()["digest"].as_str().unwrap().to_owned();
    stand.sluicegate(&["jobs", "cancel", "--file", &file, "--confirm", &digest, "--because", "closed"]);
    await_counts(&stand, "shut", "waiting", 0).await;
    stand.sluicegate(&["limits", "set", "shut", "per-second", "100/1s"]);
    let details: Value = serde_json::from_str(&stand.sluicegate(&["jobs", "show", "bolt-1", "--json"])).unwrap();
    let events: Vec<&str> =
        details["events"].as_array().unwrap().iter().map(|event| event["state"].as_str().unwrap()).collect();
    assert_eq!(events, ["review", "succeeded"]);
    let audit = &details["audit"][0];
    assert_eq!((&audit["who"], &audit["cleared_maybe_charged"]), (&"sluicegate_operator".into(), &true.into()));
    let log = tokio::task::block_in_place(|| stand.stop_worker(0));
    assert!(log.contains("all requests finished, unsent jobs returned to the backlog"), "{log}");
    // Messages of cancelled jobs came from the queue and were acknowledged without effect.
    assert_paid_once(&back, 5);
    assert_eq!(stand.states()["cancelled"], 3);
}
