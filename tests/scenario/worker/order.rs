//! The order in which payments are sent: those of one account one after another, where the row says so, and unknown
//! outcomes before all others.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, row};
use super::script::{Act, accepted, not_sent, timeout};

const EACH: usize = 8;

/// Requests for a payment after the first one for a later payment of its account.
const OUT_OF_ORDER: &str = "SELECT count(*) FROM attempts JOIN jobs AS earlier ON earlier.id = attempts.job_id \
     JOIN jobs AS later ON later.account = earlier.account AND later.seq > earlier.seq \
         AND later.first_sent_at < attempts.began_at";

fn ordered() -> ProviderRow {
    ProviderRow { order: "account".to_owned(), limits: vec![limit(1_000, 100)], ..row("acme") }
}

async fn pay_both(bench: &Bench) {
    for number in 0..EACH {
        for account in ["first", "second"] {
            let id = format!("{account}-{number}");
            let body = json!({ "id": id, "account": account, "amount": 1299, "currency": "EUR" });
            bench.publish("acme", &body.to_string()).await;
        }
    }
}

async fn until_all_succeeded(bench: &Bench) {
    let done = async || {
        let succeeded = bench.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'").await;
        succeeded == i64::try_from(2 * EACH).unwrap()
    };
    bench.until("all payments succeeded", done).await;
}

fn sent_of(bench: &Bench, account: &str) -> Vec<String> {
    bench.script.order().into_iter().filter(|id| id.starts_with(account)).collect()
}

/// One that fails holds its account, and no other.
#[tokio::test]
async fn failed_payment_holds_the_later_ones_of_its_account() {
    let bench = Bench::prepared(&[ordered()]).await;
    let retries = [not_sent(), timeout(), accepted()];
    bench.script.plan("first-2", retries.map(Act::Answer));
    bench.script.plan("second-0", [Act::Hold]);
    let mut bench = bench;
    bench.run();
    pay_both(&bench).await;
    // The other account waits for its first payment meanwhile.
    bench.until("the first account is through", async || sent_of(&bench, "first").len() == EACH + 2).await;
    assert_eq!(sent_of(&bench, "second"), ["second-0"]);
    bench.script.release_all();
    until_all_succeeded(&bench).await;
    let numbers = |account: &str, numbers: &[usize]| -> Vec<String> {
        numbers.iter().map(|number| format!("{account}-{number}")).collect()
    };
    assert_eq!(sent_of(&bench, "first"), numbers("first", &[0, 1, 2, 2, 2, 3, 4, 5, 6, 7]));
    assert_eq!(sent_of(&bench, "second"), numbers("second", &[0, 1, 2, 3, 4, 5, 6, 7]));
    for number in 1..EACH {
        let sent_at = bench.script.sent_for(&format!("first-{number}"))[0].at;
        assert!(sent_at >= bench.script.answered_at(&format!("first-{}", number - 1)));
    }
}

#[tokio::test]
async fn two_workers_keep_the_order_of_accounts() {
    let mut first = Bench::prepared(&[ordered()]).await;
    first.keep_limiter();
    let mut second = first.beside();
    for id in ["first-1", "second-3"] {
        first.script.plan(id, [not_sent(), timeout(), accepted()].map(Act::Answer));
    }
    pay_both(&first).await;
    first.run();
    second.run();
    until_all_succeeded(&first).await;
    assert_eq!(first.count(OUT_OF_ORDER).await, 0, "{:?}", first.script.order());
    assert_eq!(first.script.order().len(), 2 * EACH + 4, "both were sent three times");
    first.stop().await;
    second.stop().await;
}

/// A payment that comes by a message of its own, such as one with a time, enters the order when it is due.
#[tokio::test]
async fn due_payment_enters_the_order_of_its_account() {
    let bench = Bench::prepared(&[ordered()]).await;
    bench.script.plan("now", [Act::Hold]);
    let mut bench = bench;
    bench.run();
    let pay = |id: &str| json!({ "id": id, "account": "merchant", "amount": 1299, "currency": "EUR" });
    let (now, mut timed) = (pay("now"), pay("timed"));
    timed["not_before"] = json!((Timestamp::now() + Duration::from_millis(800)).to_string());
    bench.publish("acme", &timed.to_string()).await;
    bench.until("it waits", async || bench.count("SELECT count(*) FROM jobs WHERE id = 'timed'").await == 1).await;
    bench.publish("acme", &now.to_string()).await;
    bench.until_sent("acme", 1).await;
    assert_eq!(bench.script.order(), ["now"], "one whose time has not come holds nothing");
    let is_in_backlog = "SELECT count(*) FROM jobs WHERE id = 'timed' AND backlog";
    bench.until("the other is due", async || bench.count(is_in_backlog).await == 1).await;
    assert_eq!(bench.script.order(), ["now"]);
    bench.script.release_all();
    bench.until_state("timed", "succeeded").await;
}

/// The resend of a payment that may have been charged passes a limited lane's backlog, whatever its priority.
#[tokio::test]
async fn unknown_outcome_is_resolved_before_urgent_payments() {
    let limits = vec![limit(20, 1_000)];
    let bench =
        Bench::open(&[ProviderRow { limits, backoff_base_ms: 1_000, backoff_max_ms: 1_000, ..row("acme") }]).await;
    bench.script.plan("lost", [timeout(), accepted()].map(Act::Answer));
    bench.pay("acme", "lost").await;
    bench.until_sent("acme", 1).await;
    for number in 0..200 {
        let body = json!({ "id": format!("flood-{number}"), "priority": 9, "amount": 1299, "currency": "EUR" });
        bench.publish("acme", &body.to_string()).await;
    }
    bench.until_state("lost", "succeeded").await;
    let others = bench.script.order().len();
    assert!(others < 120, "{others} were sent before its second request");
}
