//! Faults of the worker itself and of its input: a panic in a request, an unreadable row, and messages of other
//! formats.

use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::Properties;

use super::bench::{Bench, row};
use super::late_answers::capture_log;
use super::script::Act;

/// No fault of a provider client may lose a job. After its lease, the job is resumed with an unknown outcome.
#[tokio::test]
async fn panic_during_a_request_loses_no_job() {
    let forgetful = ProviderRow { idempotency_retention_s: None, ..row("bolt") };
    let bench = Bench::open(&[row("acme"), forgetful]).await;
    bench.script.plan("job", [Act::Panic]);
    bench.script.plan("once", [Act::Panic]);
    bench.pay("acme", "job").await;
    bench.pay("bolt", "once").await;
    for (provider, id) in [("acme", "job"), ("bolt", "once")] {
        bench.until(&format!("{id} is delayed"), async || bench.delayed(provider).await == 1).await;
        assert_eq!(bench.job(id).await.unwrap().state, "sending");
    }
    // The lane continues meanwhile.
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    // The lease looks as if it had run out, and the delayed copy is due.
    bench.sql("UPDATE jobs SET lease_until = created_at WHERE state = 'sending'").await;
    bench.sql("UPDATE queue_messages SET visible_at_ms = 0 WHERE queue LIKE 'payments.%' AND taken = 0").await;
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
    let delayed = "SELECT count(*) FROM jobs WHERE id = 'bad' AND lease_until IS NULL";
    bench.until("the job is delayed", async || bench.count(delayed).await == 1 && bench.active().await == 0).await;
    let delayed_before = bench.delayed("acme").await;
    bench.sql("DROP TRIGGER instants_are_finite_of_jobs").await;
    bench.sql("UPDATE jobs SET created_at = 9000000000000000000, wake_at = 0").await;
    bench.publish("acme", body).await;
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    // The sweeper may have published a copy of it, which is delayed too.
    bench.until("its message is delayed", async || bench.delayed("acme").await > delayed_before).await;
    assert!(bench.script.sent_for("bad").is_empty());
}

/// A message of an unknown newer format waits for a worker that can decode it: it is neither a job nor invalid.
#[tokio::test]
async fn newer_format_message_is_delayed() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.publish("acme", r#"{"v":2,"id":"job","amount":1,"currency":"EUR","colour":"red"}"#).await;
    bench.until("the message is delayed", async || bench.delayed("acme").await == 1).await;
    assert!(bench.job("job").await.is_none());
    assert!(bench.rejected().await.is_empty());
}

/// No worker that knows the format has started within `max_age_s` of this row.
#[tokio::test]
async fn expired_newer_format_message_is_kept() {
    let (page, _guard) = capture_log();
    let mut bench = Bench::open(&[row("acme")]).await;
    let mut seen_in_1970 = Properties::default();
    seen_in_1970.headers.insert("x-sluicegate-waits-since".to_owned(), "1".to_owned());
    for number in 0..10 {
        bench.publish("acme", &format!(r#"{{"v":2,"id":"new-{number}"}}"#)).await;
        bench.publish_with("acme", r#"{"v":2,"id":"old"}"#, seen_in_1970.clone()).await;
    }
    bench.until("the old messages are kept", async || bench.rejected().await.len() == 10).await;
    bench.until("the new messages are delayed", async || bench.delayed("acme").await == 10).await;
    let old = &bench.rejected().await[0];
    assert_eq!(old.reason, "newer_version");
    let detail = "v: 2 is a newer format, and no newer worker came within max_age_s = ";
    assert!(old.detail.starts_with(detail), "{old:?}");
    // When it is published again, its wait starts again.
    assert!(old.properties["headers"].get("x-sluicegate-waits-since").is_none(), "{old:?}");
    let waits_since = "SELECT json_extract(properties, '$.headers.x-sluicegate-waits-since') FROM queue_messages \
                  WHERE queue = 'payments.acme' AND taken = 0";
    let since: Vec<u64> = bench.texts(waits_since).await.iter().map(|since| since.parse().unwrap()).collect();
    assert!(since.len() == 10 && since.iter().all(|since| *since > 1_700_000_000), "{since:?}");
    bench.stop().await;
    let lines = page.lines_with("message of a newer format waits");
    let has = |line: &String, parts: &[&str]| parts.iter().all(|part| line.contains(part));
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(has(&lines[0], &["ERROR", "provider=acme", "version=2"]), "{lines:?}");
    assert!(has(&lines[1], &["WARN", "provider=\"acme\"", "count=9"]), "{lines:?}");
}

/// A burst of invalid messages does not flood the log, and every message is counted.
#[tokio::test]
async fn invalid_messages_are_logged_as_one_count() {
    let (page, _guard) = capture_log();
    let mut bench = Bench::open(&[row("acme")]).await;
    for _ in 0..30 {
        bench.publish("acme", r#"{"id":"job","amount":0,"currency":"EUR"}"#).await;
        bench.publish("acme", r#"{"id":"job","amount":1,"currency":"EURO"}"#).await;
    }
    bench.until("all messages are kept", async || bench.rejected().await.len() == 60).await;
    bench.stop().await;
    for reason in ["bad_amount", "bad_currency"] {
        let lines = page.lines_with(&format!("reason=\"{reason}\""));
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
