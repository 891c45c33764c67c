//! The sweeper after a loss of all messages in the broker: it republishes the jobs of the ledger, and each is paid
//! once.
//!
//! Two workers sweep at the production intervals. The strict provider and the events decide.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;
use sluicegate::queue::DELAY_STEPS;

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
/// Long enough to record and delay all of them, and to delete their queues.
const WAIT: Duration = Duration::from_secs(12);

/// R17: lane and delay queues are deleted with all delayed messages, as after a loss of the broker's data.
#[tokio::test(flavor = "multi_thread")]
async fn lost_broker_queues_are_refilled_from_the_ledger() {
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
    stand.await_count("SELECT count(*) FROM jobs WHERE lease_until IS NULL AND wake_at > now()", JOBS);
    let delays = DELAY_STEPS.iter().map(|step| format!("payments.delay.{}", step.as_millis()));
    let queues: Vec<String> = delays.chain(["payments.acme".to_owned()]).collect();
    stand.delete_queues(&queues);
    // All messages are gone: a copy that moved between two queues would make this test prove nothing.
    assert_eq!(stand.count("SELECT count(*) FROM jobs WHERE state <> 'waiting'"), 0);

    stand.await_finished(JOBS, Duration::from_secs(120));
    assert_eq!(stand.states(), BTreeMap::from([("succeeded".to_owned(), JOBS)]));
    let copies = stand.count("SELECT sum(sweeps) FROM jobs");
    assert!((1..=JOBS).contains(&copies), "{copies} copies, but at most one per job");
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.several_keys), (JOBS, 0, 0));
    let events = stand.drain("test.outcomes");
    let ids: BTreeSet<_> = events.iter().filter_map(|event| event.id.clone()).collect();
    assert_eq!((events.len() as u64, ids.len() as u64), (JOBS, JOBS));
    let logs: String = workers.iter().map(|worker| stand.worker_log(*worker)).collect();
    assert!(logs.contains("republishing overdue jobs"), "{logs}");
    assert!(!logs.contains("jobs are not accounted for") && !logs.contains("jobs are overdue"), "{logs}");
}
