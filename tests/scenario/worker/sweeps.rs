//! What brings jobs back or ends them without a delivery: sleepers that are due, lost workers, the sweeper, and dead
//! letters of the broker.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::queue::Properties;

use super::bench::{Bench, limit, row};
use super::script::{Act, busy, rejected, timeout};

/// A job that sleeps for ten minutes.
async fn put_to_sleep(bench: &Bench, id: &str) {
    bench.script.plan(id, [Act::Answer(busy(Some(Duration::from_secs(600))))]);
    bench.pay("acme", id).await;
    bench.until_delayed(id, "busy").await;
}

/// Makes a job due.
async fn make_due(bench: &Bench, id: &str) {
    bench.sql(&format!("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - 1 WHERE id = '{id}'")).await;
}

/// All messages are lost, as with the broker's data: the ledger has each recorded job, and brings it back.
#[tokio::test]
async fn lost_queue_loses_no_recorded_job() {
    let closed = ProviderRow { limits: vec![limit(0, 100)], max_wait_ms: 100, ..row("acme") };
    let mut bench = Bench::open(&[closed]).await;
    for number in 0..40 {
        bench.pay("acme", &format!("p{number}")).await;
    }
    bench.until("some are recorded", async || bench.count("SELECT count(*) FROM jobs").await > 3).await;
    bench.stop().await;
    bench.messages.lose_all();
    let recorded = bench.count("SELECT count(*) FROM jobs").await;
    bench.apply(&[row("acme")]).await;
    bench.run();
    let paid = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    bench.until("all jobs have succeeded", async || bench.count(paid).await == recorded).await;
    assert_eq!(bench.script.sent().len(), usize::try_from(recorded).unwrap());
}

/// The worker is lost with a request in flight: when its lease has ended, the same request is sent again.
#[tokio::test]
async fn job_of_a_lost_worker_is_paid_once() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("job", [Act::Answer(timeout())]);
    bench.pay("acme", "job").await;
    bench
        .until("its outcome is unknown", async || bench.job("job").await.is_some_and(|job| job.state == "unknown"))
        .await;
    bench.stop().await;
    let lost = "UPDATE jobs SET backlog = 0, holder = 'lost', \
                fence = fence + 1";
    bench.sql(lost).await;
    bench.run();
    bench.until_state("job", "succeeded").await;
    let sent = bench.script.sent_for("job");
    assert_eq!(sent.len(), 2);
    assert_eq!(sent[0].request, sent[1].request, "the repeat differs from the frozen request");
    assert!(bench.script.charges("acme", "job") == 1);
}

#[tokio::test]
async fn altered_job_goes_to_review() {
    let bench = Bench::open(&[row("acme")]).await;
    put_to_sleep(&bench, "job").await;
    bench.without_constraints("UPDATE jobs SET amount = 1300").await;
    make_due(&bench, "job").await;
    let job = bench.until_state("job", "review").await;
    assert!(job.reason.contains("cannot be made from the ledger"), "{job:?}");
    assert_eq!((bench.script.sent().len(), bench.queued("acme")), (1, 0));
    bench.until("the event", async || bench.events_of("job").await.len() == 1).await;
}

/// Waits for this many more sweeps.
pub async fn sweeps(bench: &Bench, count: usize) {
    let turn = async || bench.count("SELECT max(taken_until) FROM upkeep_turns WHERE duty = 'sweep'").await;
    bench
        .until("it sweeps", async || bench.count("SELECT count(*) FROM upkeep_turns WHERE duty = 'sweep'").await > 0)
        .await;
    for _ in 0..count {
        let last = turn().await;
        bench.until("the next sweep", async || turn().await > last).await;
    }
}

#[tokio::test]
async fn future_job_sleeps_until_its_time() {
    let bench = Bench::open(&[row("acme")]).await;
    let due = Timestamp::now() + Duration::from_millis(1_500);
    let body = json!({ "id": "later", "amount": 1, "currency": "EUR", "not_before": due.to_string() }).to_string();
    bench.publish("acme", &body).await;
    bench.until("it is recorded", async || bench.job("later").await.is_some()).await;
    bench.until("its message is acknowledged", async || bench.queued("acme") == 0).await;
    bench.until_state("later", "succeeded").await;
    let sent = bench.script.sent_for("later")[0].clock.duration_since(std::time::UNIX_EPOCH).unwrap();
    let due_ms = u128::try_from(due.as_millisecond()).unwrap();
    assert!(sent.as_millis() >= due_ms, "sent early");
    assert_eq!(bench.script.sent().len(), 1);
}

#[tokio::test]
async fn a_waiting_job_expires_without_a_delivery() {
    let bench = Bench::open(&[row("acme")]).await;
    put_to_sleep(&bench, "job").await;
    bench.without_constraints("UPDATE jobs SET expires_at = unixepoch('subsec') * 1000 - 1").await;
    let job = bench.until_state("job", "expired").await;
    assert_eq!((bench.script.sent().len(), job.reason.as_str()), (1, "expires_at has passed"));
    bench.until("the event", async || bench.events_of("job").await.len() == 1).await;
}

/// A day's payments, more than a few batches. The payload of those that finished long ago is removed, and of no others.
#[tokio::test]
async fn old_finished_jobs_are_emptied() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "today").await;
    bench.until_state("today", "succeeded").await;
    bench
        .sql(
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 2200) \
             INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, \
                 payload, state, wake_at, fence, created_at, updated_at) \
             SELECT 'old-' || n, provider, 'old-' || n, key_given, content_hash, amount, currency, cost, priority, \
                 '{\"card\": \"tok_1\"}', CASE WHEN n <= 2 THEN 'review' ELSE 'declined' END, wake_at - 90000000, fence, \
                 created_at - 90000000, updated_at - CASE n WHEN 2 THEN 180000000 ELSE 90000000 END \
             FROM jobs JOIN n ON id = 'today'",
        )
        .await;
    let kept = async || bench.count("SELECT count(*) FROM jobs WHERE payload IS NOT NULL AND id LIKE 'old-%'").await;
    // A review of yesterday keeps its payload; one of the day before does not.
    bench.until("the old jobs have no payload", async || kept().await == 1).await;
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE scrubbed_at IS NOT NULL").await, 2_199);
    assert_eq!(bench.job("today").await.unwrap().state, "succeeded");
}

/// Publishes a message as a dead letter of its lane.
pub(super) fn give_up(bench: &Bench, body: &str, lane: &str) {
    let properties = Properties { message_id: Some("m".to_owned()), ..Properties::default() };
    bench.messages.put_dead(body, lane, properties);
}

pub(super) fn dead_letters(bench: &Bench) -> usize {
    bench.messages.count("payments.dead")
}

/// A message that workers may crash on is never published again by itself: an operator decides.
#[tokio::test]
async fn dead_letter_without_a_job_is_rejected() {
    let bench = Bench::open(&[row("acme")]).await;
    let body = |id: &str, amount: u32| json!({ "id": id, "amount": amount, "currency": "EUR" }).to_string();
    bench.pay("acme", "paid").await;
    bench.until_state("paid", "succeeded").await;
    put_to_sleep(&bench, "open").await;
    for id in ["paid", "open", "new"] {
        give_up(&bench, &body(id, 1299), "payments.acme");
    }
    give_up(&bench, &body("paid", 1300), "payments.acme");
    give_up(&bench, "{", "payments.acme");
    give_up(&bench, &body("whose", 1), "elsewhere");
    give_up(&bench, r#"{"v":2,"id":"newer"}"#, "payments.acme");
    bench.until("all dead letters are handled", async || dead_letters(&bench) == 0).await;
    let rejected = bench.rejected().await;
    let reasons: Vec<&str> = rejected.iter().map(|message| message.reason.as_str()).collect();
    assert_eq!(reasons, ["undeliverable", "conflict", "malformed", "undeliverable"]);
    assert!(rejected[0].detail.contains("after 1000 deliveries"), "{:?}", rejected[0]);
    assert_eq!(rejected[0].body, body("new", 1299));
    bench.until("the event", async || bench.events_of("new").await.len() == 1).await;
    let event = &bench.events_of("new").await[0];
    assert_eq!((&event.body["state"], &event.body["reason"]), (&json!("rejected"), &json!("undeliverable")));
    assert_eq!(bench.count("SELECT count(*) FROM held_messages").await, 1, "the newer format waits");
    assert!(bench.job("new").await.is_none());
    assert_eq!(bench.script.order(), ["paid", "open"]);
    assert_eq!((bench.job("open").await.unwrap().state.as_str(), bench.queued("acme")), ("waiting", 0));
}

/// The queue's own delivery limit, from the first delivery to the acknowledgement by the ledger.
#[tokio::test]
async fn over_delivered_message_is_dead_lettered_and_resolved() {
    let mut bench = Bench::open(&[row("acme")]).await;
    put_to_sleep(&bench, "job").await;
    bench.stop().await;
    bench.pay("acme", "job").await;
    bench.messages.exhaust_deliveries();
    assert_eq!((dead_letters(&bench), bench.queued("acme")), (1, 0));
    bench.run();
    bench.until("the dead letter is acknowledged", async || dead_letters(&bench) == 0).await;
    assert_eq!((bench.job("job").await.unwrap().state.as_str(), bench.queued("acme")), ("waiting", 0));
    assert!(bench.rejected().await.is_empty());
}

/// A duplicate of an old job finds its emptied row.
#[tokio::test]
async fn emptied_job_still_detects_duplicates() {
    let bench = Bench::open(&[row("acme")]).await;
    let body = r#"{"id":"job","amount":1299,"currency":"EUR","payload":{"a":1}}"#;
    bench.publish("acme", body).await;
    bench.until_state("job", "succeeded").await;
    bench.sql("UPDATE jobs SET updated_at = updated_at - 86400000").await;
    let emptied = "SELECT count(*) FROM jobs WHERE payload IS NULL AND length(frozen_body) = 0";
    bench.until("the job is emptied", async || bench.count(emptied).await == 1).await;
    bench.publish("acme", body).await;
    bench.until("the duplicate is acknowledged", async || bench.queued("acme") == 0 && bench.active().await == 0).await;
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    assert_eq!(bench.script.order(), ["job", "next"]);
    assert!(bench.rejected().await.is_empty());
}

/// Two workers on one database: each sleeping job returns once.
#[tokio::test]
async fn sleeping_job_returns_once() {
    let bench = Bench::open(&[row("acme")]).await;
    let mut other = bench.beside();
    other.run();
    for round in 1..=5 {
        let id = format!("job-{round}");
        put_to_sleep(&bench, &id).await;
        make_due(&bench, &id).await;
        bench.until_state(&id, "succeeded").await;
        assert_eq!(bench.script.sent_for(&id).len(), 2);
    }
    other.stop().await;
}

#[tokio::test]
async fn running_worker_passes_reconciliation() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("held", [Act::Hold]);
    bench.script.plan("asked", [Act::Answer(rejected())]);
    for id in ["held", "asked", "paid-1", "paid-2"] {
        bench.pay("acme", id).await;
    }
    put_to_sleep(&bench, "parked").await;
    bench.until_sent("acme", 4).await;
    bench.until_state("asked", "review").await;
    bench.until_state("paid-1", "succeeded").await;
    bench.until_state("paid-2", "succeeded").await;
    let accounts = bench.database.reconcile(Duration::from_secs(60), CheckScope::All).await.unwrap();
    let [account] = accounts.as_slice() else { panic!("{accounts:?}") };
    assert_eq!(account.discrepancies(), Vec::<String>::new());
    assert_eq!((account.recorded, account.active, account.delayed, account.due), (5, 1, 1, 0), "{account:?}");
    bench.script.release_all();
    bench.until_state("held", "succeeded").await;
}
