//! The fast path: a payment that need not wait is recorded with its first request; any other is recorded before it
//! waits.

use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, row};
use super::script::Act;

/// Records each job's first state and every later one.
const RECORD_STATES: &str = "CREATE TABLE states (job_id text, state text);
    CREATE TRIGGER recorded AFTER INSERT ON jobs BEGIN INSERT INTO states VALUES (NEW.id, NEW.state); END;
    CREATE TRIGGER changed AFTER UPDATE OF state ON jobs WHEN NEW.state <> OLD.state
        BEGIN INSERT INTO states VALUES (NEW.id, NEW.state); END";

async fn open_recording(rows: &[ProviderRow]) -> Bench {
    let bench = Bench::open(rows).await;
    bench.sql(RECORD_STATES).await;
    for row in rows {
        // A cold gate makes every job wait.
        bench.pay(&row.name, &format!("warm-{}", row.name)).await;
        bench.until_state(&format!("warm-{}", row.name), "succeeded").await;
    }
    bench
}

async fn states(bench: &Bench, id: &str) -> Vec<String> {
    let rows = bench.texts(&format!("SELECT state FROM states WHERE job_id = '{id}' ORDER BY rowid")).await;
    assert!(!rows.is_empty(), "{id} is not recorded");
    rows
}

#[tokio::test]
async fn ready_payment_is_recorded_with_its_request() {
    let bench = open_recording(&[row("acme")]).await;
    bench.pay("acme", "quick").await;
    bench.until_state("quick", "succeeded").await;
    assert_eq!(states(&bench, "quick").await, ["sending", "succeeded"]);
    assert_eq!(bench.attempts("quick").await, [("accepted".to_owned(), true)]);
    bench.until("the event", async || bench.events_of("quick").await.len() == 1).await;
    bench.until("no worker holds its lease", async || bench.active().await == 0).await;
}

#[tokio::test]
async fn waiting_payment_is_recorded_first() {
    let closed = ProviderRow { limits: vec![limit(1, 600_000)], ..row("bolt") };
    let one_worker = ProviderRow { workers: 1, ..row("cora") };
    let bench = open_recording(&[row("acme"), closed, one_worker]).await;
    let timely = json!({ "id": "timely", "amount": 1, "currency": "EUR", "expires_at": "9999-01-01T00:00:00Z" });
    bench.publish("acme", &timely.to_string()).await;
    bench.until_state("timely", "succeeded").await;
    assert_eq!(
        states(&bench, "timely").await,
        ["waiting", "sending", "succeeded"],
        "the ledger must check its expiry first"
    );
    // The one slot is used for ten minutes.
    bench.pay("bolt", "limited").await;
    bench.until("the job is recorded", async || bench.job("limited").await.is_some()).await;
    assert_eq!(states(&bench, "limited").await, ["waiting"]);
    bench.script.plan("held", [Act::Hold]);
    bench.pay("cora", "held").await;
    bench.until_sent("cora", 2).await;
    bench.pay("cora", "behind").await;
    // No worker slot becomes free within the time that a job may stay unrecorded.
    bench.until("the job is recorded", async || bench.job("behind").await.is_some()).await;
    bench.script.release_all();
    bench.until_state("behind", "succeeded").await;
    assert_eq!(states(&bench, "behind").await, ["waiting", "sending", "succeeded"]);
}

#[tokio::test]
async fn duplicate_messages_make_no_second_payment() {
    let bench = open_recording(&[row("acme")]).await;
    for round in 0..3 {
        for id in ["a", "b", "c"] {
            bench.pay("acme", &format!("{id}-{round}")).await;
            bench.pay("acme", "warm-acme").await;
        }
    }
    for id in ["a-0", "b-1", "c-2"] {
        bench.until_state(id, "succeeded").await;
    }
    bench.until("all messages are acknowledged", async || bench.queued("acme") == 0).await;
    assert_eq!(bench.script.sent().len(), 10);
    assert_eq!(bench.script.sent_for("warm-acme").len(), 1);
    assert!(bench.rejected().await.is_empty());
}

/// The ledger rejects the first write: no request is sent, no job is lost, and the lane pauses instead of retrying at
/// once.
#[tokio::test]
async fn unrecorded_first_request_is_not_sent() {
    let mut bench = open_recording(&[row("acme")]).await;
    bench.sql("CREATE TRIGGER refused BEFORE INSERT ON attempts BEGIN SELECT RAISE(ABORT, 'not now'); END").await;
    bench.pay("acme", "job").await;
    bench.until("the lane pauses", async || bench.returned_permits("acme", "backend_refused") == 1).await;
    bench.stop().await;
    assert_eq!((bench.script.sent_for("job").len(), bench.queued("acme")), (0, 1));
    // A new worker takes the job at once: it is redelivered, so it is claimed first.
    bench.run();
    let delayed = bench.until_delayed("job", "not now").await;
    assert_eq!((delayed.state.as_str(), delayed.attempts), ("waiting", 0));
    assert_eq!(bench.script.sent_for("job").len(), 0);
    bench.stop().await;
    bench.sql("DROP TRIGGER refused").await;
    bench.sql("UPDATE jobs SET wake_at = created_at WHERE id = 'job'").await;
    bench.run();
    bench.until_state("job", "succeeded").await;
    assert_eq!(bench.script.sent_for("job").len(), 1);
}
