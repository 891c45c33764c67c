//! The sweeper: jobs whose messages are lost, jobs in no queue, jobs that end without a delivery, and dead letters of
//! the broker.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::queue::message::{CardNumbers, decode};
use sluicegate::worker::sweeper::republish::{GRACE_BUSY, GRACE_EMPTY};

use super::bench::{Bench, limit, name, row};
use super::script::{Act, busy, not_sent, rejected, throttled, timeout};

/// A job that the worker delayed for ten minutes, and whose message is lost since.
async fn delay_and_lose(bench: &Bench, id: &str) {
    bench.script.plan(id, [Act::Answer(busy(Some(Duration::from_secs(600))))]);
    bench.pay("acme", id).await;
    bench.until_delayed(id, "busy").await;
    bench.until("the message is delayed", async || bench.delayed("acme").await > 0).await;
    bench.sql("DELETE FROM queue_messages").await;
    // Resets the copy number, as if no copy had been published: the messages of these tests are not numbered.
    bench.sql("UPDATE jobs SET copy = 0, delayed_copy = NULL, delayed_until = NULL").await;
}

/// Makes a job overdue by this time, whatever it waits for.
async fn make_overdue(bench: &Bench, id: &str, by: Duration) {
    let ms = by.as_millis();
    bench.sql(&format!("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - {ms} WHERE id = '{id}'")).await;
}

const COPIES: &str = "SELECT coalesce(sum(sweeps), 0) FROM jobs";

#[tokio::test]
async fn lost_message_is_republished_and_paid_once() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("job", [Act::Answer(timeout())]);
    bench.pay("acme", "job").await;
    bench.until_sent("acme", 1).await;
    bench.until("the job is delayed", async || bench.job("job").await.is_some_and(|job| job.state == "unknown")).await;
    bench.stop().await;
    bench.sql("DELETE FROM queue_messages").await;
    make_overdue(&bench, "job", GRACE_EMPTY + Duration::from_secs(1)).await;
    bench.run();
    bench.until_state("job", "succeeded").await;
    assert_eq!((bench.script.sent().len(), bench.count(COPIES).await), (2, 1));
    let sent = bench.script.sent_for("job");
    assert_eq!(sent[0].request, sent[1].request, "the repeat differs from the frozen request");
    assert!(bench.script.charges("acme", "job") == 1);
}

/// All messages are lost, as with the broker's data. Jobs that never reached the ledger must be published again by
/// their producer.
#[tokio::test]
async fn lost_queue_republishes_every_ledger_job() {
    let closed = ProviderRow { limits: vec![limit(0, 100)], max_wait_ms: 100, ..row("acme") };
    let mut bench = Bench::open(&[closed]).await;
    for number in 0..40 {
        bench.pay("acme", &format!("p{number}")).await;
    }
    bench.until("some are recorded", async || bench.count("SELECT count(*) FROM jobs").await > 3).await;
    bench.stop().await;
    bench.sql("DELETE FROM queue_messages").await;
    let recorded = bench.count("SELECT count(*) FROM jobs").await;
    bench.sql("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - 20000").await;
    bench.apply(&[row("acme")]).await;
    bench.run();
    let paid = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    bench.until("all jobs have succeeded", async || bench.count(paid).await == recorded).await;
    assert_eq!(bench.script.sent().len(), usize::try_from(recorded).unwrap());
}

/// If the lane's queue is not empty, this job's message may be in it; if it is empty, the message is lost.
#[tokio::test]
async fn probably_queued_job_is_not_republished() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
    // The lane consumes no more, so published messages stay in its queue.
    bench.script.plan("throttled", [Act::Answer(throttled(Duration::from_secs(600)))]);
    bench.pay("acme", "throttled").await;
    bench.until_delayed("throttled", "throttled").await;
    bench.until("the message is delayed", async || bench.delayed("acme").await == 1).await;
    bench.pay("acme", "other").await;
    make_overdue(&bench, "job", GRACE_BUSY - Duration::from_secs(60)).await;
    sweeps(&bench, 5).await;
    assert_eq!(bench.count(COPIES).await, 0);
    make_overdue(&bench, "job", GRACE_BUSY + Duration::from_secs(60)).await;
    bench.until("a copy", async || bench.count(COPIES).await == 1).await;
    sweeps(&bench, 5).await;
    assert_eq!((bench.count(COPIES).await, bench.queued("acme").await), (1, 3), "not one copy in this interval");
}

/// While the provider is down, its jobs wait in the queue, however overdue they are. Copies would count them twice.
#[tokio::test]
async fn provider_outage_causes_no_republish() {
    let slow = ProviderRow { backoff_base_ms: 1_000, backoff_max_ms: 1_000, max_attempts: 100, ..row("acme") };
    let bench = Bench::open(&[slow]).await;
    bench.script.always("acme", Act::Answer(not_sent()));
    for number in 0..8 {
        bench.pay("acme", &format!("p{number}")).await;
    }
    let down = async || bench.settings_known().await.lanes.values().all(|pauses| pauses.healthy_for().is_none());
    bench.until("the circuit breaker is open", down).await;
    bench
        .until("most messages are back in the queue", async || {
            bench.queued("acme").await >= 7 && bench.delayed("acme").await == 0
        })
        .await;
    bench.sql("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - 7200000 WHERE lease_until IS NULL").await;
    sweeps(&bench, 5).await;
    assert_eq!(bench.count(COPIES).await, 0);
}

#[tokio::test]
async fn paused_lane_causes_no_republish() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
    bench.apply(&[ProviderRow { paused: true, ..row("acme") }]).await;
    bench.settings_known().await;
    // A sweep that began before the pause may still republish.
    sweeps(&bench, 2).await;
    make_overdue(&bench, "job", Duration::from_secs(7_200)).await;
    sweeps(&bench, 5).await;
    assert_eq!((bench.count(COPIES).await, bench.queued("acme").await), (0, 0));
    bench.apply(&[row("acme")]).await;
    bench.until_state("job", "succeeded").await;
    assert_eq!(bench.count(COPIES).await, 1);
}

#[tokio::test]
async fn altered_job_goes_to_review() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
    bench.without_constraints("UPDATE jobs SET amount = 1300").await;
    make_overdue(&bench, "job", Duration::from_secs(60)).await;
    let job = bench.until_state("job", "review").await;
    assert!(job.reason.contains("cannot be made from the ledger"), "{job:?}");
    assert_eq!((bench.script.sent().len(), bench.queued("acme").await), (1, 0));
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
async fn far_future_job_waits_in_the_ledger_only() {
    let bench = Bench::open(&[row("acme")]).await;
    let soon = Timestamp::now() + Duration::from_secs(23 * 3_600);
    let later = Timestamp::now() + Duration::from_secs(25 * 3_600);
    for (id, at) in [("soon", soon), ("later", later)] {
        let job = json!({ "id": id, "amount": 1, "currency": "EUR", "not_before": at.to_string() });
        bench.publish("acme", &job.to_string()).await;
        bench.until_delayed(id, "waits for its time").await;
    }
    bench.until("one message is delayed", async || bench.delayed("acme").await == 1).await;
    assert_eq!(bench.queued("acme").await, 1);
    let unqueued = "SELECT count(*) FROM jobs WHERE unqueued AND id = 'later'";
    bench.until("the other job is marked as in no queue", async || bench.count(unqueued).await == 1).await;
    sweeps(&bench, 3).await;
    assert_eq!(bench.count(COPIES).await, 0);
    // The job is due now.
    let due = Timestamp::now() + Duration::from_millis(1_500);
    let body = json!({ "id": "later", "amount": 1, "currency": "EUR", "not_before": due.to_string() }).to_string();
    let decoded = decode(body.as_bytes(), &name("acme"), CardNumbers::Refuse).unwrap();
    let due_ms = decoded.job.not_before.unwrap().0;
    let hash = hex::encode(decoded.hash.0);
    let today = format!("not_before = {due_ms}, wake_at = {due_ms}, content_hash = x'{hash}'");
    bench.without_constraints(&format!("UPDATE jobs SET {today} WHERE id = 'later'")).await;
    bench.until_state("later", "succeeded").await;
    let sent = bench.script.sent_for("later")[0].clock.duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(i64::try_from(sent.as_millis()).unwrap() >= due_ms, "sent early");
    assert_eq!((bench.count(COPIES).await, bench.script.sent().len()), (1, 1));
}

#[tokio::test]
async fn a_waiting_job_expires_without_a_delivery() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
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
pub(super) async fn give_up(bench: &Bench, body: &str, lane: &str, rounds: u32) {
    // Its copy number is higher than any published one, so it is valid.
    let mut headers = json!({ "x-sluicegate-copy": "1000" });
    if rounds > 0 {
        headers["x-sluicegate-dead-rounds"] = rounds.to_string().into();
    }
    let properties = json!({ "message_id": "m", "headers": headers });
    bench
        .sql(&format!(
            "INSERT INTO queue_messages (queue, body, properties, visible_at_ms, deliveries, dead_of) \
             VALUES ('payments.dead', CAST('{body}' AS BLOB), '{properties}', 0, 1001, '{lane}')"
        ))
        .await;
}

pub(super) const DEAD: &str = "SELECT count(*) FROM queue_messages WHERE queue = 'payments.dead'";

#[tokio::test]
async fn dead_lettered_message_is_resolved_by_the_ledger() {
    let bench = Bench::open(&[row("acme")]).await;
    let body = |id: &str, amount: u32| json!({ "id": id, "amount": amount, "currency": "EUR" }).to_string();
    bench.pay("acme", "paid").await;
    bench.until_state("paid", "succeeded").await;
    give_up(&bench, &body("paid", 1299), "payments.acme", 0).await;
    give_up(&bench, &body("new", 1299), "payments.acme", 0).await;
    give_up(&bench, &body("paid", 1300), "payments.acme", 0).await;
    give_up(&bench, "{", "payments.acme", 0).await;
    give_up(&bench, &body("whose", 1), "elsewhere", 0).await;
    give_up(&bench, &body("poison", 1), "payments.acme", 3).await;
    bench.until("all dead letters are handled", async || bench.count(DEAD).await == 0).await;
    bench.until_state("new", "succeeded").await;
    assert_eq!(bench.script.order(), ["paid", "new"]);
    let reasons: Vec<String> = bench.rejected().await.into_iter().map(|message| message.reason).collect();
    assert_eq!(reasons, ["conflict", "malformed", "undeliverable", "undeliverable"]);
    assert_eq!(bench.count("SELECT count(*) FROM rejected_messages").await, 4);
}

/// A job that crashes every worker must not be republished for ever.
#[tokio::test]
async fn repeatedly_dead_lettered_job_goes_to_review() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
    let body = json!({ "id": "job", "amount": 1299, "currency": "EUR" }).to_string();
    for round in 0..3 {
        // The dead letter is the job's valid copy.
        bench.sql("UPDATE jobs SET delayed_copy = NULL, delayed_until = NULL").await;
        give_up(&bench, &body, "payments.acme", round).await;
        let again = format!(
            "SELECT count(*) FROM queue_messages WHERE queue = 'payments.acme' \
             AND taken = 0 AND visible_at_ms > unixepoch('subsec') * 1000 AND properties LIKE '%\"x-sluicegate-dead-rounds\":\"{}\"%'",
            round + 1
        );
        bench.until("the message is back in its lane and delayed", async || bench.count(&again).await == 1).await;
        assert_eq!(bench.job("job").await.unwrap().state, "waiting");
    }
    give_up(&bench, &body, "payments.acme", 3).await;
    let job = bench.until_state("job", "review").await;
    assert!(job.reason.contains("delivery limit"), "{job:?}");
    bench.until("the dead letter is acknowledged", async || bench.count(DEAD).await == 0).await;
    bench.until("the event", async || bench.events_of("job").await.len() == 1).await;
}

/// A dead letter that cannot be resolved yet is read once per sweep, and does not block later ones.
#[tokio::test]
async fn sweep_checks_an_active_jobs_dead_letter_once() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("held", [Act::Hold]);
    bench.pay("acme", "held").await;
    bench.until_sent("acme", 1).await;
    bench
        .sql(
            "CREATE TABLE looks (at TEXT); \
             CREATE TRIGGER turns AFTER UPDATE ON upkeep_turns WHEN NEW.duty = 'sweep' \
                 BEGIN INSERT INTO looks VALUES ('sweep'); END; \
             CREATE TRIGGER letters AFTER UPDATE OF taken ON queue_messages \
                 WHEN NEW.queue = 'payments.dead' AND NEW.taken <> 0 AND CAST(NEW.body AS text) LIKE '%\"held\"%' \
                 BEGIN INSERT INTO looks VALUES ('letter'); END",
        )
        .await;
    let body = |id: &str| json!({ "id": id, "amount": 1299, "currency": "EUR" }).to_string();
    give_up(&bench, &body("held"), "payments.acme", 3).await;
    give_up(&bench, &body("behind"), "payments.acme", 0).await;
    sweeps(&bench, 4).await;
    assert!(bench.count("SELECT count(*) FROM looks WHERE at = 'letter'").await >= 3);
    // A sweep that had begun before the count may have read it too.
    assert!(bench.count("SELECT sum(at = 'letter') - sum(at = 'sweep') FROM looks").await <= 1);
    bench.until_state("behind", "succeeded").await;
    assert_eq!(bench.count(DEAD).await, 1);
    bench.script.release_all();
    bench.until_state("held", "succeeded").await;
    bench.until("the dead letter is acknowledged", async || bench.count(DEAD).await == 0).await;
    assert!(bench.rejected().await.is_empty());
}

/// The queue's own delivery limit, from the first delivery to the decision by the ledger.
#[tokio::test]
async fn over_delivered_message_is_dead_lettered_and_resolved() {
    let bench = Bench::open(&[row("acme")]).await;
    delay_and_lose(&bench, "job").await;
    bench.pay("acme", "job").await;
    bench.until("the message is delayed", async || bench.delayed("acme").await == 1).await;
    let mut bench = bench;
    bench.stop().await;
    bench.sql("UPDATE queue_messages SET deliveries = 1001, taken = 7").await;
    bench.recover().await;
    assert_eq!((bench.count(DEAD).await, bench.queued("acme").await), (1, 0));
    bench.run();
    bench
        .until("the message is delayed again, with a new delivery count", async || {
            bench.count("SELECT count(*) FROM queue_messages WHERE queue = 'payments.acme' AND deliveries < 5").await
                == 1
        })
        .await;
    assert_eq!(bench.count(DEAD).await, 0);
}

/// Another worker publishes a dead worker's events once their lease has run out.
#[tokio::test]
async fn events_of_a_dead_worker_are_published() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "job").await;
    bench.until_state("job", "succeeded").await;
    bench.until("the event", async || bench.events().await.len() == 1).await;
    bench.stop().await;
    bench.sql("UPDATE outcome_events SET published_at = NULL, taken_until = unixepoch('subsec') * 1000 + 700").await;
    let free_at = bench.count("SELECT CAST(taken_until AS INTEGER) FROM outcome_events").await;
    bench.run();
    bench.until("the event is published again", async || bench.events().await.len() == 2).await;
    let came_at = "SELECT max(visible_at_ms) FROM queue_messages WHERE queue = 'payments.outcomes'";
    assert!(bench.count(came_at).await >= free_at);
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
    bench
        .until("the duplicate is acknowledged", async || bench.queued("acme").await == 0 && bench.active().await == 0)
        .await;
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    assert_eq!(bench.script.order(), ["job", "next"]);
    assert!(bench.rejected().await.is_empty());
}

/// Two workers on one database: one of them publishes each copy.
#[tokio::test]
async fn concurrent_sweepers_publish_one_copy() {
    let bench = Bench::open(&[row("acme")]).await;
    let mut other = bench.beside();
    other.run();
    for round in 1..=5 {
        let id = format!("job-{round}");
        delay_and_lose(&bench, &id).await;
        bench.sql("UPDATE upkeep_turns SET taken_until = 0").await;
        make_overdue(&bench, &id, Duration::from_secs(60)).await;
        bench.until_state(&id, "succeeded").await;
        sweeps(&bench, 2).await;
        assert_eq!((bench.count(COPIES).await, bench.script.sent_for(&id).len()), (round, 2));
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
    delay_and_lose(&bench, "parked").await;
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
