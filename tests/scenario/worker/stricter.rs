//! Rules for new jobs become stricter while jobs that passed the old ones are open: those are finished, whoever brings
//! their messages.

use std::time::Duration;

use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::queue::message::{CardNumbers, decode, decode_recorded};

use super::bench::{Bench, name, row};
use super::script::{Act, busy, timeout};
use super::sweeps::{DEAD, give_up};

const CARD: &str = "4242424242424242";

fn with_card(id: &str, amount: u32) -> String {
    json!({ "id": id, "amount": amount, "currency": "EUR", "payload": { "card": CARD } }).to_string()
}

/// A worker that lets cards through has put these down for ten minutes: `waiting`, `given-up`, and `unknown`, whose
/// answer was lost. Then it ended.
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
            .until("it is put down", async || bench.attempts(id).await.len() == 1 && !bench.job(id).await.unwrap().held)
            .await;
    }
    bench.until("all are parked", async || bench.parked("acme").await == 3).await;
    bench.stop().await;
    for (id, state) in [("waiting", "waiting"), ("given-up", "waiting"), ("unknown", "unknown")] {
        assert_eq!(bench.job(id).await.unwrap().state, state, "{id}");
    }
    bench
}

#[tokio::test]
async fn a_job_recorded_under_a_laxer_rule_is_finished() {
    let mut bench = recorded_under_the_old_rule().await;
    // One comes by its own message, one by the sweeper's copy, one by the broker's giving up.
    bench.sql("DELETE FROM queue_messages WHERE CAST(body AS text) NOT LIKE '%\"waiting\"%'").await;
    bench.sql("UPDATE queue_messages SET visible_at_ms = 0").await;
    bench.sql("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 WHERE id <> 'unknown'").await;
    bench.sql("UPDATE jobs SET wake_at = unixepoch('subsec') * 1000 - 7200000 WHERE id = 'unknown'").await;
    give_up(&bench, &with_card("given-up", 1), "payments.acme", 0).await;
    // There was a time before the rule against secrets, too.
    let secret = json!({ "auth": "Bearer 0123456789abcdefghij" });
    let body = json!({ "id": "unknown", "amount": 1, "currency": "EUR", "payload": &secret }).to_string();
    assert!(decode(body.as_bytes(), &name("acme"), CardNumbers::Off).is_err());
    let hash = decode_recorded(body.as_bytes(), &name("acme")).unwrap().hash.0;
    let hash = hex::encode(hash);
    bench
        .unruled(&format!("UPDATE jobs SET payload = '{secret}', content_hash = x'{hash}' WHERE id = 'unknown'"))
        .await;
    bench.card_numbers = CardNumbers::Refuse;
    bench.run();
    for id in ["waiting", "given-up", "unknown"] {
        bench.until_state(id, "succeeded").await;
        assert_eq!(bench.script.sent_for(id).len(), 2, "{id}");
    }
    // Copies that come when all is done are done with, too.
    bench.publish("acme", &with_card("waiting", 1)).await;
    give_up(&bench, &body, "payments.acme", 0).await;
    bench.until("no message is left", async || bench.queued("acme").await == 0 && bench.count(DEAD).await == 0).await;
    bench.stop().await;
    assert!(bench.published("payments.invalid").await.is_empty());
    assert_eq!(bench.count("SELECT count(*) FROM rejected_messages").await, 0);
    assert_eq!(bench.script.sent().len(), 6);
}

#[tokio::test]
async fn whoever_is_new_or_says_something_else_is_still_refused() {
    let mut bench = recorded_under_the_old_rule().await;
    bench.sql("DELETE FROM queue_messages").await;
    bench.card_numbers = CardNumbers::Refuse;
    bench.run();
    bench.publish("acme", &with_card("new", 1)).await;
    bench.publish("acme", &with_card("waiting", 2)).await;
    give_up(&bench, &with_card("new", 1), "payments.acme", 0).await;
    give_up(&bench, &with_card("waiting", 2), "payments.acme", 0).await;
    bench.until("four are kept", async || bench.published("payments.invalid").await.len() == 4).await;
    for message in bench.published("payments.invalid").await {
        assert_eq!(message.properties["headers"]["x-sluicegate-reason"], "card_number", "{message:?}");
    }
    assert!(bench.job("new").await.is_none());
    assert_eq!((bench.job("waiting").await.unwrap().state.as_str(), bench.script.sent().len()), ("waiting", 3));
}
