//! Stricter rules for new messages while jobs that passed the old rules are open: these jobs are finished.

use std::time::Duration;

use serde_json::json;
use sluicegate::domain::outcome::{LookupResult, Outcome};
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::message::{CardNumbers, decode, decode_recorded};

use super::bench::{Bench, name, row};
use super::script::{Act, busy, timeout};
use super::sweeps::{dead_letters, give_up};

const CARD: &str = "4242424242424242";

fn with_card(id: &str, amount: u32) -> String {
    json!({ "id": id, "amount": amount, "currency": "EUR", "payload": { "card": CARD } }).to_string()
}

/// A worker that allows card numbers has delayed three jobs for ten minutes and ended: `waiting`, `given-up`, and
/// `unknown`, whose response was lost.
async fn recorded_under_the_old_rule() -> Bench {
    let long = 600_000;
    let mut bench =
        Bench::prepared(&[ProviderRow { backoff_base_ms: long, backoff_max_ms: long, ..row("acme") }]).await;
    bench.card_numbers = CardNumbers::Off;
    bench.run();
    for (id, act) in
        [("waiting", busy(Some(Duration::from_secs(600)))), ("given-up", busy(None)), ("unknown", timeout())]
    {
        bench.script.plan(id, [Act::Answer(act)]);
        bench.publish("acme", &with_card(id, 1)).await;
        bench
            .until("the job is delayed", async || {
                bench.attempts(id).await.len() == 1 && !bench.job(id).await.unwrap().held
            })
            .await;
    }
    bench.stop().await;
    for (id, state) in [("waiting", "waiting"), ("given-up", "waiting"), ("unknown", "unknown")] {
        assert_eq!(bench.job(id).await.unwrap().state, state, "{id}");
    }
    bench
}

#[tokio::test]
async fn job_recorded_under_older_rule_finishes() {
    let mut bench = recorded_under_the_old_rule().await;
    // All are due. A dead letter of one is acknowledged.
    bench.sql("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - 7200000").await;
    give_up(&bench, &with_card("given-up", 1), "payments.acme");
    // The rule against secrets also came later than some jobs.
    let secret = json!({ "auth": "Bearer 0123456789abcdefghij" });
    let body = json!({ "id": "unknown", "amount": 1, "currency": "EUR", "payload": &secret }).to_string();
    assert!(decode(body.as_bytes(), &name("acme"), CardNumbers::Off).is_err());
    let hash = decode_recorded(body.as_bytes(), &name("acme")).unwrap().hash.0;
    let hash = hex::encode(hash);
    bench
        .without_constraints(&format!(
            "UPDATE jobs SET payload = '{secret}', content_hash = x'{hash}' WHERE id = 'unknown'"
        ))
        .await;
    bench.card_numbers = CardNumbers::Refuse;
    bench.run();
    for id in ["waiting", "given-up", "unknown"] {
        bench.until_state(id, "succeeded").await;
        assert_eq!(bench.script.sent_for(id).len(), 2, "{id}");
    }
    // Messages that come after all jobs have finished are acknowledged too.
    bench.publish("acme", &with_card("waiting", 1)).await;
    give_up(&bench, &body, "payments.acme");
    bench.until("no message is left", async || bench.queued("acme") == 0 && dead_letters(&bench) == 0).await;
    bench.stop().await;
    assert!(bench.rejected().await.is_empty());
    assert_eq!(bench.count("SELECT count(*) FROM rejected_messages").await, 0);
    assert_eq!(bench.script.sent().len(), 6);
}

#[tokio::test]
async fn new_or_changed_messages_are_still_rejected() {
    let mut bench = recorded_under_the_old_rule().await;
    bench.card_numbers = CardNumbers::Refuse;
    bench.run();
    bench.publish("acme", &with_card("new", 1)).await;
    bench.publish("acme", &with_card("waiting", 2)).await;
    give_up(&bench, &with_card("new", 1), "payments.acme");
    give_up(&bench, &with_card("waiting", 2), "payments.acme");
    bench.until("four messages are kept", async || bench.rejected().await.len() == 4).await;
    for message in bench.rejected().await {
        assert_eq!(message.reason, "card_number", "{message:?}");
    }
    assert!(bench.job("new").await.is_none());
    assert_eq!((bench.job("waiting").await.unwrap().state.as_str(), bench.script.sent().len()), ("waiting", 3));
}

/// A provider reference may be sensitive: the charge counts, and the reference is left out.
#[tokio::test]
async fn sensitive_reference_is_dropped_but_outcome_kept() {
    let secret = "sk_live_4eC39HqLyjWDarjtT1zdp7dc";
    let lookup = json!({"url": "https://acme.test/charges?id=${job:id}"}).as_object().cloned();
    let mut bench = Bench::open(&[ProviderRow { idempotency_retention_s: None, lookup, ..row("acme") }]).await;
    let accepted = |reference: &str| Outcome::Accepted { reference: Some(reference.to_owned()) };
    for (id, outcome) in [
        ("card", accepted(CARD)),
        ("another-card", accepted("4111 1111 1111 1111")),
        ("key", accepted(secret)),
        ("plain", accepted("ch_1")),
        ("refused", Outcome::Declined { reason: format!("provider answered 402: {secret}") }),
    ] {
        bench.script.plan(id, [Act::Answer(outcome)]);
        bench.pay("acme", id).await;
    }
    bench.script.plan("asked", [Act::Answer(timeout())]);
    bench.script.plan_lookups("asked", [LookupResult::Accepted { reference: Some(CARD.to_owned()) }]);
    bench.pay("acme", "asked").await;
    let of_card = "its reference is (withheld): it holds what looks like a card number";
    let of_key = "its reference is (withheld): it holds what is obviously a secret";
    for (id, state, reason, reference) in [
        ("card", "succeeded", format!("accepted; {of_card}"), None),
        ("another-card", "succeeded", format!("accepted; {of_card}"), None),
        ("key", "succeeded", format!("accepted; {of_key}"), None),
        ("plain", "succeeded", "accepted".to_owned(), Some("ch_1")),
        ("refused", "declined", "(withheld)".to_owned(), None),
        ("asked", "succeeded", format!("accepted, as the look-up reports; {of_card}"), None),
    ] {
        let job = bench.until_state(id, state).await;
        assert_eq!((job.reason, job.reference.as_deref()), (reason, reference), "{id}");
    }
    let kept = "SELECT COALESCE(group_concat(COALESCE(detail, '')), '') FROM attempts UNION ALL \
                SELECT COALESCE(group_concat(COALESCE(reason, '') || COALESCE(provider_reference, '')), '') FROM events";
    let kept = bench.texts(kept).await.join(" ");
    assert!(![CARD, "4111 1111 1111 1111", secret].iter().any(|value| kept.contains(value)), "{kept}");
    bench.stop().await;
}

/// `worker.card_numbers = "off"` also holds for provider responses: their references may look like card numbers.
#[tokio::test]
async fn allowed_card_like_reference_is_kept() {
    let mut bench = Bench::prepared(&[row("acme")]).await;
    bench.card_numbers = CardNumbers::Off;
    bench.run();
    bench.script.plan("card", [Act::Answer(Outcome::Accepted { reference: Some(CARD.to_owned()) })]);
    bench.pay("acme", "card").await;
    assert_eq!(bench.until_state("card", "succeeded").await.reference.as_deref(), Some(CARD));
    bench.stop().await;
}
