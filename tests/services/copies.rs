//! Message copies of delayed jobs in RabbitMQ: however often their limit changes, each job has at most one message.

use std::time::Duration;

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const JOBS: u64 = 200;
const CHANGES: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(60);
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
     mode = \"requeue\"\nleak_per_second = 1000\n\
     [[provider.limit]]\nname = \"per-second\"\nmax_requests = 1000\nwindow_ms = 1000\n\
     [[provider.limit]]\nname = \"per-reference\"\nmax_requests = 1\nwindow_ms = 3600000\nscope = \"reference\"\n";

/// Messages of the lane and of all delay queues, unacknowledged ones included.
fn messages(stand: &Stand) -> u64 {
    let queues = stand.rabbit.ctl(&["list_queues", "-p", "billing", "--no-table-headers", "name", "messages"]);
    let counted = queues.lines().filter_map(|line| line.split_once('\t'));
    let ours = counted.filter(|(name, _)| *name == "payments.acme" || name.starts_with("payments.delay."));
    ours.map(|(_, messages)| messages.trim().parse::<u64>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_limits_add_no_messages_of_delayed_jobs() {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(ROWS);
    stand.add_worker();
    let job = |number: u64| {
        let body = json!({ "id": format!("p-{number}"), "reference": "m", "amount": 100, "currency": "EUR" });
        json!({ "key": "acme", "body": body.to_string() })
    };
    let jobs: Vec<serde_json::Value> = (0..JOBS).map(job).collect();
    assert_eq!(stand.publish(&jobs), jobs.len());
    let open = "SELECT count(*) FROM jobs WHERE state = 'waiting'";
    let refused_since = |instant: &str| {
        format!(
            "{open} AND lease_until IS NULL AND NOT unqueued AND wait_begun_at > '{instant}' \
             AND wake_at > now() + interval '2 minutes'"
        )
    };
    let all_refused_since = |instant: &str| {
        let refused = refused_since(instant);
        stand.await_that(PATIENCE, || {
            stand.count("SELECT count(*) FROM jobs") == JOBS && stand.count(&refused) == stand.count(open)
        });
    };
    all_refused_since("epoch");
    for change in 1..=CHANGES {
        let sql = format!("UPDATE provider_limits SET max_requests = {} WHERE name = 'per-reference'", 1 + change);
        let changed = stand.psql().args(["-At", "-c", &sql, "-c", "SELECT clock_timestamp()"]).output();
        let changed = String::from_utf8(changed.unwrap().stdout).unwrap();
        all_refused_since(changed.lines().last().unwrap());
        // A message is acknowledged a moment after its job is recorded. Copies of finished jobs are still in their
        // delay queues.
        stand.await_that(PATIENCE, || messages(&stand) <= JOBS);
    }
    assert_eq!(stand.count("SELECT count(*) FROM jobs WHERE delayed_copy IS NULL AND state = 'waiting'"), 0);
    let report = stand.providers["acme"].report();
    assert_eq!((report.doubles, report.several_keys), (0, 0));
}
