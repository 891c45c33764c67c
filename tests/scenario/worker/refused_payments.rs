//! A provider that refuses one payment's request as such, or a payment whose request cannot be built: it waits alone, and
//! goes to review where others pass between its refusals.

use serde_json::json;
use sluicegate::domain::outcome::Outcome;
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, name, row};
use super::script::{Act, accepted};

fn refused(status: u16) -> Act {
    Act::Answer(Outcome::Misconfigured { status })
}

async fn pay_with(bench: &Bench, account: Option<&str>, id: &str) {
    let mut body = json!({ "id": id, "amount": 1299, "currency": "EUR" });
    if let Some(account) = account {
        body["account"] = account.into();
    }
    bench.publish("acme", &body.to_string()).await;
}

async fn does(bench: &Bench) -> LaneState {
    bench.settings_known().await.lanes[&name("acme")].status().does
}

/// What the lane says of the payment that it refused last.
async fn reported(bench: &Bench) -> String {
    let lane = &bench.settings_known().await.lanes[&name("acme")];
    lane.reported_refusal().map(|refused| refused.words).unwrap_or_default()
}

/// Its wait is over.
async fn due_now(bench: &Bench, id: &str) {
    bench.sql(&format!("UPDATE jobs SET wake_at = created_at WHERE id = '{id}'")).await;
}

/// Seconds that a payment waits since it was refused.
async fn wait_s(bench: &Bench, id: &str) -> i64 {
    bench.count(&format!("SELECT (wake_at - updated_at) / 1000 FROM jobs WHERE id = '{id}'")).await
}

async fn refusals(bench: &Bench, id: &str) -> i64 {
    bench.count(&format!("SELECT COALESCE(max(refusals), 0) FROM payment_refusals WHERE job_id = '{id}'")).await
}

/// A payment without an account gets 404, 405, 401: a hundred good ones around it are sent at once, and the lane never
/// pauses. After three refusals with others between it goes to review.
#[tokio::test]
async fn refused_payment_waits_alone() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("bad", [refused(404), refused(405), refused(401)]);
    pay_with(&bench, None, "good-0").await;
    pay_with(&bench, None, "bad").await;
    for number in 1..100 {
        pay_with(&bench, [None, Some("shop")][number % 2], &format!("good-{number}")).await;
    }
    for number in 0..100 {
        bench.until_state(&format!("good-{number}"), "succeeded").await;
    }
    let bad = bench.until_delayed("bad", "404").await;
    assert_eq!((bad.state.as_str(), bad.attempts), ("waiting", 0));
    assert_eq!((does(&bench).await, wait_s(&bench, "bad").await), (LaneState::Running, 30));
    let words = reported(&bench).await;
    assert!(words.contains("payment bad is refused, and waits alone: provider answered 404"), "{words}");
    due_now(&bench, "bad").await;
    bench.until("it is refused again", async || refusals(&bench, "bad").await == 2).await;
    bench.until_delayed("bad", "405").await;
    assert_eq!((does(&bench).await, wait_s(&bench, "bad").await), (LaneState::Running, 60));
    pay_with(&bench, None, "between").await;
    bench.until_state("between", "succeeded").await;
    due_now(&bench, "bad").await;
    let bad = bench.until_state("bad", "review").await;
    assert!(bad.reason.starts_with("refused_alone: refused 3 times") && bad.reason.contains("401"), "{}", bad.reason);
    assert_eq!((does(&bench).await, bad.attempts), (LaneState::Running, 0));
}

/// The count is the ledger's: a worker that starts anew goes on with it. Passes by another account, and a payment that
/// passed before the refusal, prove nothing.
#[tokio::test]
async fn refusals_are_counted_across_restarts() {
    let mut bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("bad", [refused(404), refused(404), refused(404), refused(404)]);
    pay_with(&bench, Some("shop"), "bad").await;
    bench.until("it is refused", async || refusals(&bench, "bad").await == 1).await;
    for (refusal, account) in [(2, "other"), (3, "shop")] {
        bench.until("nothing is active", async || bench.active().await == 0).await;
        bench.stop().await;
        bench.run();
        let id = format!("between-{refusal}");
        pay_with(&bench, Some(account), &id).await;
        bench.until_state(&id, "succeeded").await;
        due_now(&bench, "bad").await;
        bench.until("it is refused again", async || refusals(&bench, "bad").await == refusal).await;
    }
    let alone = "SELECT alone FROM payment_refusals WHERE job_id = 'bad'";
    assert_eq!(bench.count(alone).await, 2, "another account's payment passed, and then one of its own");
    bench.until("nothing is active", async || bench.active().await == 0).await;
    bench.stop().await;
    bench.run();
    pay_with(&bench, Some("shop"), "last").await;
    bench.until_state("last", "succeeded").await;
    due_now(&bench, "bad").await;
    assert!(bench.until_state("bad", "review").await.reason.starts_with("refused_alone"));
}

/// Every payment is refused: the key is wrong, and none goes to review. The lane pauses after five, names the last one,
/// and after its pause another payment is the test.
#[tokio::test]
async fn wrong_key_sends_nothing_to_review() {
    let bench = Bench::open(&[ProviderRow { workers: 1, ..row("acme") }]).await;
    bench.script.always("acme", refused(401));
    for number in 0..20 {
        pay_with(&bench, None, &format!("job-{number}")).await;
    }
    bench.until("the lane pauses", async || does(&bench).await == LaneState::Stopped).await;
    let first = bench.script.order();
    assert_eq!(first.len(), 5, "{first:?}");
    let status = bench.settings_known().await.lanes[&name("acme")].status();
    let words = status.pause.unwrap().words;
    assert!(words.contains(&format!("last refused: payment {}", first[4])), "{words}");
    // The lane's pause is over for a test; the five that were refused come back, too, and leave it to the others.
    bench.until("another one tests the lane", async || bench.script.order().len() >= 6).await;
    assert!(!first.contains(&bench.script.order()[5]), "{:?}", bench.script.order());
    bench.until("the lane pauses again", async || does(&bench).await == LaneState::Stopped).await;
    // The lane pauses before the ledger has the answer.
    bench.until("nothing is active", async || bench.active().await == 0).await;
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE state <> 'waiting'").await, 0);
    // A corrected row: they are sent, and none has gone to review.
    bench.script.always("acme", Act::Answer(accepted()));
    bench.apply(&[ProviderRow { workers: 2, ..row("acme") }]).await;
    bench.settings_known().await;
    for number in 0..20 {
        due_now(&bench, &format!("job-{number}")).await;
    }
    for number in 0..20 {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
}
