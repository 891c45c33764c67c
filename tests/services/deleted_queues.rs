//! Queues and exchanges that an operator deletes while workers run. The worker that misses one declares it again. No
//! payment, event or message waits for a restart.

use std::time::{Duration, SystemTime};

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use serde_json::{Value, json};
use sluicegate::ledger::operator::DatabaseTime;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(90);
const ROW: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\n\
     [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n";

/// A payment, one that sleeps until it is due, and an invalid message.
fn messages(run: &str) -> Vec<Value> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let soon = DatabaseTime(i64::try_from(since.as_millis()).unwrap() + 2_500).to_string();
    let now = json!({ "id": format!("{run}-now"), "amount": 1299, "currency": "EUR" });
    let later = json!({ "id": format!("{run}-later"), "amount": 1299, "currency": "EUR", "not_before": soon });
    let none = json!({ "id": format!("{run}-none"), "amount": -1, "currency": "EUR" });
    [now, later, none].iter().map(|body| json!({ "key": "acme", "body": body.to_string() })).collect()
}

async fn delete_exchanges_and_the_queue_of_invalid_messages(stand: &Stand) {
    let properties = lapin::ConnectionProperties::default();
    let connection = lapin::Connection::connect(stand.broker_url(), properties).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.exchange_delete("payments.outcomes".into(), ExchangeDeleteOptions::default()).await.unwrap();
    channel.queue_delete("payments.invalid".into(), QueueDeleteOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_queues_are_declared_again() {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(ROW);
    stand.add_worker();
    for (run, finished) in [("before", 2), ("after", 4)] {
        if run == "after" {
            delete_exchanges_and_the_queue_of_invalid_messages(&stand).await;
        }
        assert_eq!(stand.publish(&messages(run)), 3);
        stand.await_finished(finished, PATIENCE);
        stand.await_count("SELECT count(*) FROM rejected_messages", finished / 2);
        let bodies = stand.column("SELECT encode(body, 'escape') FROM rejected_messages ORDER BY id DESC LIMIT 1");
        assert!(bodies[0].contains(&format!("{run}-none")), "{bodies:?}");
    }
    assert_eq!(stand.providers["acme"].effects().len(), 4);
}
