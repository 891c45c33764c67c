//! A loss of all messages in the broker: the ledger has each recorded job, and each is paid once.
//!
//! Two workers run at the production intervals. The strict provider and the events decide.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const ROW: &str = r#"
[[provider]]
name = "acme"
url = "{url:acme}"
idempotency_retention_s = 86400
timeout_ms = 2000

[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000
"#;
const JOBS: u64 = 40;
/// Long enough to record all of them, and to delete their queue.
const WAIT: Duration = Duration::from_secs(12);

/// R17: the lane's queue is deleted, as after a loss of the broker's data, while its jobs wait for their time.
#[tokio::test(flavor = "multi_thread")]
async fn lost_broker_queue_loses_no_recorded_job() {
    let mut stand = Stand::start();
    let limits = vec!["100/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROW);
    stand.bind("test.outcomes", "payments.outcomes");
    let workers = [stand.add_worker(), stand.add_worker()];

    let due = (Timestamp::now() + WAIT).to_string();
    let job = |number: u64| {
        let body = json!({ "id": format!("p-{number}"), "amount": 100 + number, "currency": "EUR",
                           "reference": "\u{e9} \"x\"", "not_before": due, "payload": { "n": 1.0 } });
        json!({ "key": "acme", "body": body.to_string() })
    };
    let jobs: Vec<serde_json::Value> = (0..JOBS).map(job).collect();
    assert_eq!(stand.publish(&jobs), jobs.len());
    stand.await_count("SELECT count(*) FROM jobs WHERE holder IS NULL AND wake_at > now()", JOBS);
    stand.delete_queues(&["payments.acme".to_owned()]);
    assert_eq!(stand.count("SELECT count(*) FROM jobs WHERE state <> 'waiting'"), 0);

    stand.await_finished(JOBS, Duration::from_secs(120));
    assert_eq!(stand.states(), BTreeMap::from([("succeeded".to_owned(), JOBS)]));
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.several_keys), (JOBS, 0, 0));
    let events = stand.drain("test.outcomes");
    let ids: BTreeSet<_> = events.iter().filter_map(|event| event.id.clone()).collect();
    assert_eq!((events.len() as u64, ids.len() as u64), (JOBS, JOBS));
    let logs: String = workers.iter().map(|worker| stand.worker_log(*worker)).collect();
    assert!(!logs.contains("jobs are not accounted for") && !logs.contains("jobs are overdue"), "{logs}");
}
