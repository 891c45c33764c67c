//! Faults of the worker itself and of its input: a panic in a request, an unreadable row, and messages of other
//! formats.

use sha2::{Digest as _, Sha256};
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::Properties;

use super::bench::{Bench, Published, row};
use super::script::Act;
use crate::captured_log::capture_log;

/// No fault of a provider client may lose a job. The worker finds that it has it without knowing, and resumes it with an
/// unknown outcome.
#[tokio::test]
async fn panic_during_a_request_loses_no_job() {
    // So that no response can come any more soon after.
    let quick = |name: &str| ProviderRow { timeout_ms: 500, ..row(name) };
    let forgetful = ProviderRow { idempotency_retention_s: None, ..quick("bolt") };
    let bench = Bench::open(&[quick("acme"), forgetful]).await;
    bench.script.plan("job", [Act::Panic]);
    bench.script.plan("once", [Act::Panic]);
    bench.pay("acme", "job").await;
    bench.pay("bolt", "once").await;
    for (provider, id) in [("acme", "job"), ("bolt", "once")] {
        bench.until(&format!("{id} is sent"), async || bench.job(id).await.is_some()).await;
        assert_eq!(bench.job(id).await.unwrap().state, "sending", "{provider}");
    }
    // The lane continues meanwhile.
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    let job = bench.until_state("job", "succeeded").await;
    assert_eq!(job.attempts, 2);
    assert_eq!(bench.attempts("job").await[0], ("unknown".to_owned(), true));
    let sent = bench.script.sent_for("job");
    assert_eq!((sent.len(), sent[0].request == sent[1].request), (2, true), "the same request is repeated");
    bench.until_state("once", "review").await;
    assert_eq!(bench.script.sent_for("once").len(), 1, "a provider that does not deduplicate got the request twice");
}

/// An operator must repair an unreadable row. It does not pause its lane.
#[tokio::test]
async fn unreadable_job_row_blocks_no_other_job() {
    let bench = Bench::open(&[row("acme")]).await;
    let body = r#"{"id":"bad","amount":1299,"currency":"EUR","not_before":"2100-01-01T00:00:00Z"}"#;
    bench.publish("acme", body).await;
    let delayed = "SELECT count(*) FROM jobs WHERE id = 'bad' AND holder IS NULL";
    bench.until("the job is delayed", async || bench.count(delayed).await == 1 && bench.active().await == 0).await;
    bench.sql("DROP TRIGGER instants_are_finite_of_jobs").await;
    bench.sql("UPDATE jobs SET created_at = 9000000000000000000, wake_at = 0").await;
    bench.publish("acme", body).await;
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    bench.until("its message is acknowledged", async || bench.queued("acme") == 0).await;
    assert!(bench.script.sent_for("bad").is_empty());
}

const HELD: &str = "SELECT count(*) FROM held_messages";

/// A message of an unknown newer format waits in the ledger for a worker that can decode it: it is neither a job nor
/// invalid.
#[tokio::test]
async fn newer_format_message_is_held() {
    let (log, _guard) = capture_log();
    let mut bench = Bench::open(&[row("acme")]).await;
    let body = |number: u32| format!(r#"{{"v":2,"id":"new-{number}","colour":"red"}}"#);
    let mut properties = Properties::default();
    properties.headers.insert("tenant".to_owned(), "a".to_owned());
    for number in 0..10 {
        bench.publish_with("acme", &body(number), properties.clone()).await;
        bench.publish("acme", &body(number)).await;
    }
    bench.until("all messages are held", async || bench.count(HELD).await == 10).await;
    bench.until("all messages are acknowledged", async || bench.unacknowledged("acme") == 0).await;
    let first = "SELECT CAST(body AS text) FROM held_messages WHERE version = 2 \
                 AND json_extract(properties, '$.headers.tenant') = 'a' ORDER BY 1 LIMIT 1";
    assert_eq!(bench.texts(first).await, [body(0)]);
    assert!(bench.job("new-0").await.is_none() && bench.rejected().await.is_empty());
    bench.stop().await;
    let lines = log.lines_with("message of a newer format waits");
    let has = |line: &String, parts: &[&str]| parts.iter().all(|part| line.contains(part));
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(has(&lines[0], &["ERROR", "provider=acme", "version=2"]), "{lines:?}");
    assert!(has(&lines[1], &["WARN", "provider=\"acme\"", "count=19"]), "{lines:?}");
}

/// Puts a message into the ledger, as a worker does that cannot read it.
async fn hold(bench: &Bench, lane: &str, version: u32, body: &str) {
    let received_at = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";
    let hash = hex::encode(Sha256::digest(body));
    let values = format!("'{lane}', x'{hash}', {version}, CAST('{body}' AS BLOB), '{{}}', {received_at}");
    let columns = "lane, body_sha256, version, body, properties, received_at";
    bench.sql(&format!("INSERT INTO held_messages ({columns}) VALUES ({values})")).await;
}

/// The rows of a newer version look to this worker as those of version 2 look to its successor.
#[tokio::test]
async fn newer_worker_records_held_messages() {
    let bench = Bench::open(&[row("acme")]).await;
    let body = |id: &str, amount: u32| format!(r#"{{"id":"{id}","amount":{amount},"currency":"EUR"}}"#);
    bench.pay("acme", "paid").await;
    bench.until_state("paid", "succeeded").await;
    for (id, amount) in [("job", 1299), ("paid", 1299), ("paid", 1300), ("bad", 0)] {
        hold(&bench, "acme", 1, &body(id, amount)).await;
    }
    hold(&bench, "gone", 1, &body("elsewhere", 1299)).await;
    bench.until_state("job", "succeeded").await;
    // The lane `gone` has no provider row, so its message waits for one.
    bench.until("the other messages are done with", async || bench.count(HELD).await == 1).await;
    assert_eq!(bench.texts("SELECT lane FROM held_messages").await, ["gone"]);
    let mut reasons: Vec<String> = bench.rejected().await.into_iter().map(|message| message.reason).collect();
    reasons.sort();
    assert_eq!(reasons, ["bad_amount", "conflict"]);
    assert_eq!(bench.script.order(), ["paid", "job"]);
}

/// No worker that knows the format has started within `max_age_s` of this row.
#[tokio::test]
async fn expired_newer_format_message_is_rejected() {
    let bench = Bench::open(&[row("acme")]).await;
    hold(&bench, "acme", 2, r#"{"v":2,"id":"new"}"#).await;
    hold(&bench, "acme", 2, r#"{"v":2,"id":"old"}"#).await;
    bench.sql("UPDATE held_messages SET received_at = 1000 WHERE CAST(body AS text) LIKE '%old%'").await;
    bench.until("the old message is rejected", async || bench.rejected().await.len() == 1).await;
    let old = &bench.rejected().await[0];
    assert_eq!((old.reason.as_str(), old.body.as_str()), ("newer_version", r#"{"v":2,"id":"old"}"#));
    let detail = "v: 2 is a newer format, and no newer worker came within max_age_s = ";
    assert!(old.detail.starts_with(detail), "{old:?}");
    assert_eq!(bench.texts("SELECT CAST(body AS text) FROM held_messages").await, [r#"{"v":2,"id":"new"}"#]);
    let is_rejected = |event: &Published| event.body["reason"] == "newer_version";
    bench.until("the event", async || bench.events().await.iter().any(is_rejected)).await;
}

/// What must not be stored is not held either.
#[tokio::test]
async fn newer_format_message_with_a_card_is_rejected() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.publish("acme", r#"{"v":2,"id":"card","pan":"4111111111111111"}"#).await;
    bench.publish("acme", r#"{"v":2,"id":"key","auth":"Bearer 0123456789abcdefghij"}"#).await;
    bench.until("both are rejected", async || bench.rejected().await.len() == 2).await;
    let rejected = bench.rejected().await;
    let mut reasons: Vec<&str> = rejected.iter().map(|message| message.reason.as_str()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["card_number", "secret"]);
    assert!(rejected.iter().all(|message| !message.body.contains("4111111111111111")), "{rejected:?}");
    assert_eq!(bench.count("SELECT count(*) FROM rejected_messages WHERE masked").await, 2);
    assert_eq!(bench.count(HELD).await, 0);
}

/// A burst of invalid messages does not flood the log, and every message is counted.
#[tokio::test]
async fn invalid_messages_are_logged_as_one_count() {
    let (log, _guard) = capture_log();
    let mut bench = Bench::open(&[row("acme")]).await;
    for _ in 0..30 {
        bench.publish("acme", r#"{"id":"job","amount":0,"currency":"EUR"}"#).await;
        bench.publish("acme", r#"{"id":"job","amount":1,"currency":"EURO"}"#).await;
    }
    bench.until("all messages are kept", async || bench.rejected().await.len() == 60).await;
    bench.stop().await;
    for reason in ["bad_amount", "bad_currency"] {
        let lines = log.lines_with(&format!("reason=\"{reason}\""));
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("message rejected: not a valid job") && lines[0].contains("detail="), "{lines:?}");
        assert!(lines[1].contains("count=29") && lines[1].contains("message rejected: not a valid job"), "{lines:?}");
    }
}

#[tokio::test]
async fn invalid_message_is_kept_with_its_reason() {
    let bench = Bench::open(&[row("acme")]).await;
    let bad = [
        (r#"{"id":"job","amount":0,"currency":"EUR"}"#, "bad_amount"),
        (r#"{"id":"job","amount":1,"currency":"EURO"}"#, "bad_currency"),
        (r#"{"id":"job","amount":1,"currency":"EUR","provider":"bolt"}"#, "wrong_provider"),
    ];
    for (body, _) in bad {
        bench.publish("acme", body).await;
    }
    bench.until("all messages are kept", async || bench.rejected().await.len() == bad.len()).await;
    let mut reasons: Vec<String> = bench.rejected().await.into_iter().map(|message| message.reason).collect();
    reasons.sort();
    assert_eq!(reasons, ["bad_amount", "bad_currency", "wrong_provider"]);
    // No rejected message occupies the id.
    bench.pay("acme", "job").await;
    bench.until_state("job", "succeeded").await;
}

/// The store knows newer settings than a new worker's database, because the database was restored from a backup.
#[tokio::test]
async fn restored_database_is_detected_via_the_store() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.keep_limiter();
    bench.sql("UPDATE settings_version SET version = version + 40").await;
    bench.run();
    bench.pay("acme", "before").await;
    bench.until_state("before", "succeeded").await;
    let newest = bench.database.settings_version().await.unwrap();
    bench.stop().await;
    bench.without_constraints("UPDATE settings_version SET version = version - 30").await;
    bench.run();
    bench.pay("acme", "after").await;
    bench.until_state("after", "succeeded").await;
    assert!(
        bench.database.settings_version().await.unwrap() > newest,
        "the version was not raised above the newest one"
    );
}
