//! Fields of a message: `not_before` and `expires_at`, priority, cost, and the identity of the payment.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, row};
use super::script::{Act, busy};

#[tokio::test]
async fn a_job_past_its_expiry_is_not_sent() {
    let bench = Bench::open(&[row("acme")]).await;
    let past = json!({ "id": "late", "amount": 1, "currency": "EUR", "expires_at": "2020-01-01T00:00:00Z" });
    bench.publish("acme", &past.to_string()).await;
    let job = bench.until_state("late", "expired").await;
    assert_eq!((job.attempts, bench.script.sent().len()), (0, 0));
    bench.until("the event", async || bench.events_of("late").await.len() == 1).await;
    assert_eq!(bench.events_of("late").await[0].body["state"], "expired");
}

/// A job expires while it waits for a permit, not only on arrival.
#[tokio::test]
async fn job_expiring_while_delayed_is_not_sent() {
    let bench = Bench::open(&[row("acme")]).await;
    let soon = Timestamp::now() + Duration::from_millis(600);
    let later = soon + Duration::from_millis(200);
    let job = json!({ "id": "job", "amount": 1, "currency": "EUR", "not_before": later.to_string(),
                      "expires_at": soon.to_string() });
    bench.publish("acme", &job.to_string()).await;
    bench.until_state("job", "expired").await;
    assert_eq!(bench.script.sent().len(), 0);
}

#[tokio::test]
async fn a_job_is_not_sent_before_its_time() {
    let bench = Bench::open(&[row("acme")]).await;
    for (id, wait_ms) in [("soon", 130), ("later", 800), ("odd", 1_113)] {
        let not_before = Timestamp::now() + Duration::from_millis(wait_ms);
        let job = json!({ "id": id, "amount": 1, "currency": "EUR", "not_before": not_before.to_string() });
        bench.publish("acme", &job.to_string()).await;
        let job = bench.until_state(id, "succeeded").await;
        assert_eq!(job.attempts, 1, "{id}: waiting counted as an attempt");
        let sent = bench.script.sent_for(id)[0].clock;
        let due_ms = not_before.as_millisecond();
        assert!(millis(sent) >= due_ms, "{id} was sent {} ms early", due_ms - millis(sent));
    }
}

fn millis(clock: SystemTime) -> i64 {
    i64::try_from(clock.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

#[tokio::test]
async fn duplicate_payment_is_made_once() {
    let bench = Bench::open(&[row("acme"), row("bolt")]).await;
    bench.script.plan("pay-1", [Act::Hold]);
    bench.publish("acme", r#"{"id":"pay-1","amount":1299,"currency":"EUR","payload":{"a":1,"b":2}}"#).await;
    bench.until_sent("acme", 1).await;
    // A duplicate while the first request is in flight, in another formatting.
    bench.publish("acme", r#"{ "payload": {"b":2, "a":1}, "currency": "EUR", "amount": 1299, "id": "pay-1" }"#).await;
    bench.until("the duplicate is acknowledged", async || bench.unacknowledged("acme") == 0).await;
    assert_eq!(bench.job("pay-1").await.unwrap().state, "sending");
    bench.script.release_all();
    bench.until_state("pay-1", "succeeded").await;
    // A duplicate after the job has finished.
    bench.publish("acme", r#"{"id":"pay-1","amount":1299,"currency":"EUR","payload":{"a":1,"b":2}}"#).await;
    bench.until("all duplicates are acknowledged", async || bench.unacknowledged("acme") == 0).await;
    assert_eq!(bench.script.sent().len(), 1);
    bench.until("the event", async || !bench.events().await.is_empty()).await;
    assert_eq!(bench.events().await.len(), 1);
    assert!(bench.rejected().await.is_empty());
}

#[tokio::test]
async fn contradicting_payment_is_a_conflict() {
    let bench = Bench::open(&[row("acme"), row("bolt")]).await;
    bench.publish("acme", r#"{"id":"pay-1","amount":1299,"currency":"EUR","idempotency_key":"key-1"}"#).await;
    bench.until_state("pay-1", "succeeded").await;
    let conflicts = [
        ("acme", r#"{"id":"pay-1","amount":1300,"currency":"EUR","idempotency_key":"key-1"}"#),
        ("acme", r#"{"id":"pay-1","amount":1299,"currency":"EUR"}"#),
        ("acme", r#"{"id":"pay-2","amount":1299,"currency":"EUR","idempotency_key":"key-1"}"#),
        ("bolt", r#"{"id":"pay-1","amount":1299,"currency":"EUR","idempotency_key":"key-1"}"#),
    ];
    for (provider, body) in conflicts {
        bench.publish(provider, body).await;
    }
    // A key is unique per provider, so this is another payment.
    bench.publish("bolt", r#"{"id":"pay-3","amount":1299,"currency":"EUR","idempotency_key":"key-1"}"#).await;
    bench.until_state("pay-3", "succeeded").await;
    let kept = async || bench.rejected().await.len() == conflicts.len();
    bench.until("four conflicting messages are kept", kept).await;
    for message in bench.rejected().await {
        assert_eq!(message.reason, "conflict", "{message:?}");
        assert!(conflicts.iter().any(|(_, body)| *body == message.body));
    }
    let left = async || bench.unacknowledged("acme") + bench.unacknowledged("bolt");
    bench.until("all messages are acknowledged", async || left().await == 0).await;
    assert_eq!(bench.script.order(), ["pay-1", "pay-3"]);
    assert_eq!(bench.count("SELECT count(*) FROM rejected_messages WHERE reason = 'conflict'").await, 4);
    // The rejected messages, which claim its id, have events of their own.
    let mut events = bench.events_of("pay-1").await;
    events.retain(|event| event.body["state"] != "rejected");
    assert_eq!(events.len(), 1, "a conflict changed the first job");
}

/// Jobs wait for the one worker slot or the one permit. Either way, the most urgent leaves first, then the oldest.
#[tokio::test]
async fn waiting_jobs_leave_by_priority() {
    let one_worker = ProviderRow { workers: 1, ..row("acme") };
    let one_slot = ProviderRow { limits: vec![limit(1, 150)], leak_per_second: Some(10_000.0), ..row("bolt") };
    for row in [one_worker, one_slot] {
        let provider = row.name.clone();
        let bench = Bench::open(&[row]).await;
        bench.script.plan("first", [Act::Hold]);
        bench.pay(&provider, "first").await;
        bench.until_sent(&provider, 1).await;
        for (id, priority) in [("a0", 0), ("b3", 3), ("c9", 9), ("d3", 3), ("e5", 5)] {
            let job = json!({ "id": id, "amount": 1, "currency": "EUR", "priority": priority });
            bench.publish(&provider, &job.to_string()).await;
        }
        // The least urgent one may stay in the backlog: a lane with one worker slot claims four ahead.
        const CLAIMED: &str =
            "SELECT count(*) FROM jobs WHERE state = 'waiting' AND holder IS NOT NULL AND priority > 0";
        let recorded = async || bench.count("SELECT count(*) FROM jobs WHERE state = 'waiting'").await;
        bench
            .until("all wait, and the urgent ones are claimed", async || {
                recorded().await == 5 && bench.count(CLAIMED).await == 4
            })
            .await;
        // After the claim, which the ledger shows, a job enters the wait queue without further I/O.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        bench.script.release_all();
        bench.until_sent(&provider, 6).await;
        assert_eq!(bench.script.order(), ["first", "c9", "e5", "b3", "d3", "a0"], "{provider}");
    }
}

/// The earliest and latest instants that can be written wait or expire like any others.
#[tokio::test]
async fn extreme_instants_are_handled() {
    let bench = Bench::open(&[row("acme")]).await;
    let (first, last) = ("0001-01-01T00:00:00Z", "9999-12-30T21:59:59.999Z");
    for (id, not_before, expires_at) in [
        ("never", last, None),
        ("never-ever", last, Some(last)),
        ("late", last, Some(first)),
        ("now", first, Some(last)),
    ] {
        let job =
            json!({ "id": id, "amount": 1, "currency": "EUR", "not_before": not_before, "expires_at": expires_at });
        bench.publish("acme", &job.to_string()).await;
    }
    bench.until_state("now", "succeeded").await;
    bench.until_state("late", "expired").await;
    for id in ["never", "never-ever"] {
        assert_eq!(bench.until_delayed(id, "waits for its time").await.state, "waiting", "{id}");
    }
    bench.until("both jobs wait in the ledger only", async || bench.queued("acme") == 0).await;
    let asleep = "SELECT count(*) FROM jobs WHERE state = 'waiting' AND holder IS NULL AND NOT backlog";
    assert_eq!(bench.count(asleep).await, 2);
    assert_eq!(bench.script.order(), ["now"]);
}

/// A limit per account does not count messages without an account. The row can reject such messages.
#[tokio::test]
async fn a_message_without_a_required_field_is_invalid() {
    let open = row("acme");
    let mut bench = Bench::prepared(std::slice::from_ref(&open)).await;
    bench.run();
    bench.script.plan("before", [Act::Answer(busy(Some(Duration::from_secs(1))))]);
    bench.pay("acme", "before").await;
    bench.until_delayed("before", "busy").await;
    bench.apply(&[ProviderRow { require: vec![json!("account"), json!("reference")], ..open }]).await;
    bench.settings_known().await;
    let with = |id: &str, fields: serde_json::Value| {
        let mut job = json!({ "id": id, "amount": 1, "currency": "EUR" });
        job.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        job.to_string()
    };
    bench.publish("acme", &with("neither", json!({}))).await;
    bench.publish("acme", &with("no-reference", json!({ "account": "shop" }))).await;
    bench.publish("acme", &with("whole", json!({ "account": "shop", "reference": "r-1" }))).await;
    bench.until_state("whole", "succeeded").await;
    let rejected = "SELECT job_id || ' ' || reason FROM rejected_messages ORDER BY job_id";
    let expected = ["neither missing_account", "no-reference missing_reference"];
    bench.until("both are rejected", async || bench.texts(rejected).await == expected).await;
    // A job that was recorded before the rule is finished.
    bench.until_state("before", "succeeded").await;
    assert_eq!(bench.count("SELECT count(*) FROM jobs").await, 2);
}
