//! Faults of our own: a panic on the wire, a worker that is gone, messages of another time.

use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, row};
use super::script::Act;

/// Nothing that a provider's client does may lose a job: after its lease it is taken up as of unknown outcome.
#[tokio::test]
async fn a_panic_on_the_wire_does_not_lose_the_job() {
    let forgetful = ProviderRow { idempotency_retention_s: None, ..row("bolt") };
    let bench = Bench::open(&[row("acme"), forgetful]).await;
    bench.script.plan("job", [Act::Panic]);
    bench.script.plan("once", [Act::Panic]);
    bench.pay("acme", "job").await;
    bench.pay("bolt", "once").await;
    for (provider, id) in [("acme", "job"), ("bolt", "once")] {
        bench.until(&format!("{id} comes round again"), async || bench.parked(provider).await == 1).await;
        assert_eq!(bench.job(id).await.unwrap().state, "sending");
    }
    // The lane goes on meanwhile.
    bench.pay("acme", "next").await;
    bench.until_state("next", "succeeded").await;
    // As if the lease had run out, and with it the parked copy's time.
    bench.sql("UPDATE jobs SET lease_until = created_at WHERE state = 'sending'").await;
    bench.sql("UPDATE queue_messages SET visible_at_ms = 0 WHERE queue LIKE 'payments.%' AND taken = 0").await;
    let job = bench.until_state("job", "succeeded").await;
    assert_eq!(job.attempts, 2);
    assert_eq!(bench.attempts("job").await[0], ("unknown".to_owned(), true));
    let sent = bench.script.sent_for("job");
    assert_eq!((sent.len(), sent[0].request == sent[1].request), (2, true), "the same request again");
    bench.until_state("once", "review").await;
    assert_eq!(bench.script.sent_for("once").len(), 1, "a provider that forgets is not sent it twice");
}

/// A format that this program does not know waits for one that does: it is neither a job nor invalid.
#[tokio::test]
async fn a_message_of_a_newer_format_waits() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.publish("acme", r#"{"v":2,"id":"job","amount":1,"currency":"EUR","colour":"red"}"#).await;
    bench.until("it is parked", async || bench.parked("acme").await == 1).await;
    assert!(bench.job("job").await.is_none());
    assert!(bench.published("payments.invalid").await.is_empty());
}

#[tokio::test]
async fn what_can_never_be_a_job_is_kept_with_its_reason() {
    let bench = Bench::open(&[row("acme")]).await;
    let bad = [
        (r#"{"id":"job","amount":0,"currency":"EUR"}"#, "bad_amount"),
        (r#"{"id":"job","amount":1,"currency":"EURO"}"#, "bad_currency"),
        (r#"{"id":"job","amount":1,"currency":"EUR","provider":"bolt"}"#, "wrong_provider"),
    ];
    for (body, _) in bad {
        bench.publish("acme", body).await;
    }
    bench.until("they are kept", async || bench.published("payments.invalid").await.len() == bad.len()).await;
    let mut reasons: Vec<String> = Vec::new();
    for message in bench.published("payments.invalid").await {
        reasons.push(message.properties["headers"]["x-sluicegate-reason"].as_str().unwrap().to_owned());
    }
    reasons.sort();
    assert_eq!(reasons, ["bad_amount", "bad_currency", "wrong_provider"]);
    // None of them has taken the id.
    bench.pay("acme", "job").await;
    bench.until_state("job", "succeeded").await;
}

/// The store knows newer settings than the database of a worker that has just begun: one that was restored from a backup.
#[tokio::test]
async fn a_restored_database_is_noticed_through_the_store() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.keep_limiter();
    bench.sql("UPDATE settings_version SET version = version + 40").await;
    bench.run();
    bench.pay("acme", "before").await;
    bench.until_state("before", "succeeded").await;
    let newest = bench.settings().version().await.unwrap();
    bench.stop().await;
    bench.unruled("UPDATE settings_version SET version = version - 30").await;
    bench.run();
    bench.pay("acme", "after").await;
    bench.until_state("after", "succeeded").await;
    assert!(bench.settings().version().await.unwrap() > newest, "raised above all that was ever said");
}
