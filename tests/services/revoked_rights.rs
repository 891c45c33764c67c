//! Queue rights that the broker revokes from the worker's user while it runs. The providers of those queues are
//! reported. Other providers' payments continue over the same connection, and no payment is lost or charged twice.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(90);
const USER: &str = "till";
/// Rights on every queue except those of the `bolt` providers.
const NO_BOLTS: &str = r"^(?!payments\.bolt).*";
/// More queues than are checked concurrently, so that refusals come while other checks are running.
const BOLTS: usize = 24;

fn row(name: &str, fake: &str) -> String {
    format!(
        "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{fake}}}\"\nidempotency_retention_s = 86400\n\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n\n"
    )
}

fn payment(provider: &str, id: &str) -> Value {
    json!({ "key": provider, "body": json!({ "id": id, "amount": 1299, "currency": "EUR" }).to_string() })
}

fn bolt_payments(run: &str) -> Vec<Value> {
    (0..BOLTS).map(|number| payment(&format!("bolt{number}"), &format!("{run}-{number}"))).collect()
}

/// State and cause of a provider, from `status`.
fn state_and_cause(stand: &Stand, worker: usize, provider: &str) -> (String, String) {
    let status: Value = serde_json::from_str(&stand.status_of(worker, &["status", "--json"])).unwrap();
    let of = status["providers"].as_array().unwrap().iter().find(|row| row["name"] == provider).unwrap();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (word(&of["state"]), word(&of["cause"]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_rights_block_only_one_provider() {
    let mut stand = Stand::start();
    stand.use_broker_as(USER);
    let latency = Duration::from_millis(300);
    // Some of its payments are in flight at every moment.
    stand.add_provider("acme", FakeOptions { latency: (latency, latency), ..FakeOptions::default() }).await;
    stand.add_provider("bolts", FakeOptions::default()).await;
    let mut rows = row("acme", "acme");
    for number in 0..BOLTS {
        write!(rows, "{}", row(&format!("bolt{number}"), "bolts")).unwrap();
    }
    stand.apply(&rows);
    let worker = stand.add_worker();
    stand.await_ready(worker).await;
    assert_eq!(stand.publish(&bolt_payments("before")), BOLTS);
    let mut finished = u64::try_from(BOLTS).unwrap();
    stand.await_finished(finished, PATIENCE);

    stand.set_broker_rights(USER, NO_BOLTS);
    // Publishes until all queues have been checked, and three more batches.
    let (mut paid, mut left) = (0_u64, 3);
    while left > 0 {
        let payments: Vec<Value> = (0..20).map(|number| payment("acme", &format!("acme-{}", paid + number))).collect();
        assert_eq!(stand.publish(&payments), payments.len());
        paid += 20;
        stand.await_finished(finished + paid - 10, PATIENCE);
        let log = stand.worker_log(worker);
        assert!(!log.contains("connection lost") && !log.contains("lane closed"), "{log}");
        assert!(paid < 10_000, "the log does not name the queues without rights:\n{log}");
        if log.contains("its lane continues until it is reopened") {
            left -= 1;
        }
    }
    finished += paid;
    stand.await_finished(finished, PATIENCE);
    let log = stand.worker_log(worker);
    assert!(log.contains("queue `payments.bolt0`") && log.contains("ACCESS_REFUSED"), "{log}");

    // A worker that starts without those rights.
    stand.stop_worker(worker);
    let worker = stand.add_worker();
    stand.await_ready(worker).await;
    assert_eq!(stand.publish(&bolt_payments("refused")), BOLTS);
    assert_eq!(stand.publish(&[payment("acme", "beside")]), 1);
    finished += 1;
    stand.await_finished(finished, PATIENCE);
    stand.await_that(PATIENCE, || {
        let (state, cause) = state_and_cause(&stand, worker, "bolt7");
        let names = cause.contains("queue `payments.bolt7`") && cause.contains("ACCESS_REFUSED");
        state == "misconfigured" && names && cause.contains("give the user of queue.url the rights")
    });
    assert_ne!(state_and_cause(&stand, worker, "acme").0, "misconfigured");

    // The rights are granted again while it runs.
    stand.set_broker_rights(USER, ".*");
    finished += u64::try_from(BOLTS).unwrap();
    stand.await_finished(finished, PATIENCE);
    assert!(!stand.worker_log(worker).contains("connection lost"), "{}", stand.worker_log(worker));
    assert_eq!(stand.providers["acme"].effects().len(), usize::try_from(paid).unwrap() + 1);
    assert_eq!(stand.providers["bolts"].effects().len(), 2 * BOLTS);
}
