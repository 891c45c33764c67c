//! A provider that refuses the requests of one account, or rejects its payments: only that account waits.

use serde_json::json;
use sluicegate::domain::account_faults::TEST_MAX;
use sluicegate::domain::outcome::Outcome;
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, name, row};
use super::script::{Act, accepted, rejected};

const IN_BACKLOG: &str = "SELECT count(*) FROM jobs WHERE backlog AND account = 'mallory'";

async fn pay(bench: &Bench, account: &str, id: &str) {
    let body = json!({ "id": id, "account": account, "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &body.to_string()).await;
}

async fn pay_many(bench: &Bench, account: &str, jobs: usize) {
    for number in 0..jobs {
        pay(bench, account, &format!("{account}-{number}")).await;
    }
}

fn forbidden() -> Act {
    Act::Answer(Outcome::Misconfigured { status: 403 })
}

fn changed() -> ProviderRow {
    ProviderRow { workers: 2, ..row("acme") }
}

/// One merchant's credential is wrong: its payments wait after the first refusal, and no other payment does.
#[tokio::test]
async fn forbidden_account_waits_alone() {
    let bench = Bench::open(&[row("acme")]).await;
    pay(&bench, "other", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.script.plan("mallory-0", [forbidden()]);
    pay(&bench, "mallory", "mallory-0").await;
    bench.until_delayed("mallory-0", "403").await;
    for number in 1..=20 {
        pay(&bench, "mallory", &format!("mallory-{number}")).await;
    }
    pay_many(&bench, "other", 20).await;
    for number in 0..20 {
        bench.until_state(&format!("other-{number}"), "succeeded").await;
    }
    bench.until("the account's payments wait in the ledger", async || bench.count(IN_BACKLOG).await == 20).await;
    let blocked = "SELECT count(*) FROM flows WHERE account = 'mallory' AND blocked_reason = 'misconfigured'";
    bench.until("its flow is blocked", async || bench.count(blocked).await == 1).await;
    assert_eq!(bench.script.sent().len(), 22);
    // A changed row may have fixed it.
    bench.apply(&[changed()]).await;
    for number in 1..=20 {
        assert_eq!(bench.until_state(&format!("mallory-{number}"), "succeeded").await.attempts, 1);
    }
}

/// The account is refused while its next payment waits for a permit, unrecorded for a short wait and recorded for a long
/// one: the permit is not used.
#[tokio::test]
async fn payment_that_waits_for_its_permit_stops_with_its_account() {
    for window_ms in [80, 600] {
        let bench = Bench::open(&[ProviderRow { limits: vec![limit(1, window_ms)], ..row("acme") }]).await;
        pay(&bench, "other", "first").await;
        bench.until_state("first", "succeeded").await;
        bench.script.plan("mallory-0", [forbidden()]);
        pay_many(&bench, "mallory", 2).await;
        bench.until_delayed("mallory-0", "403").await;
        bench.until("the next payment waits in the ledger", async || bench.count(IN_BACKLOG).await == 1).await;
        assert_eq!(bench.script.sent().len(), 2, "{window_ms} ms");
    }
}

/// The pause of a refused account ends: one of its payments is sent as a test, and the next one when that has no response
/// for two seconds. The first response lets all others go.
#[tokio::test]
async fn paused_account_is_tested_with_one_payment() {
    let bench = Bench::open(&[row("acme")]).await;
    pay(&bench, "other", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.script.plan("mallory-0", [forbidden(), Act::Hold]);
    pay(&bench, "mallory", "mallory-0").await;
    bench.until_delayed("mallory-0", "403").await;
    for number in 1..=12 {
        bench.script.plan(&format!("mallory-{number}"), [Act::Hold]);
        pay(&bench, "mallory", &format!("mallory-{number}")).await;
    }
    let of_account = || {
        let sent = bench.script.sent().into_iter();
        sent.filter(|sent| sent.id.starts_with("mallory")).map(|sent| sent.at).collect::<Vec<_>>()
    };
    bench.until("a second payment tests the account", async || of_account().len() >= 3).await;
    let sent = of_account();
    assert!(sent[2] >= sent[1] + TEST_MAX, "{:?}", sent[2] - sent[1]);
    bench.script.release_all();
    bench.until("the others are sent", async || of_account().len() == 14).await;
    for number in 0..=12 {
        bench.until_state(&format!("mallory-{number}"), "succeeded").await;
    }
}

/// The test is refused, too, and no payment of another account has passed since: the lane stops.
#[tokio::test]
async fn refused_test_stops_a_lane_without_other_accounts() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.always("acme", forbidden());
    pay(&bench, "mallory", "mallory-0").await;
    bench.until_delayed("mallory-0", "403").await;
    for number in 1..5 {
        pay(&bench, "mallory", &format!("mallory-{number}")).await;
    }
    bench.until("the account is tested", async || bench.script.sent().len() >= 2).await;
    let lanes = bench.settings_known().await.lanes;
    let stopped = async || lanes[&name("acme")].status().does == LaneState::Stopped;
    bench.until("the lane stops", stopped).await;
    assert_eq!(bench.script.sent().len(), 2);
}

/// Five rejected payments of one merchant in a row: its further payments wait, and do not all end in review.
#[tokio::test]
async fn rejected_payments_of_one_merchant_stop_no_other() {
    let bench = Bench::open(&[ProviderRow { workers: 1, ..row("acme") }]).await;
    for number in 0..5 {
        bench.script.plan(&format!("mallory-{number}"), [Act::Answer(rejected())]);
    }
    pay_many(&bench, "mallory", 5).await;
    for number in 0..5 {
        bench.until_state(&format!("mallory-{number}"), "review").await;
    }
    for number in 5..20 {
        pay(&bench, "mallory", &format!("mallory-{number}")).await;
    }
    pay_many(&bench, "other", 10).await;
    for number in 0..10 {
        bench.until_state(&format!("other-{number}"), "succeeded").await;
    }
    bench.until("the account's payments wait in the ledger", async || bench.count(IN_BACKLOG).await == 15).await;
    assert_eq!(bench.script.sent().len(), 15);
    bench.apply(&[changed()]).await;
    for number in 5..20 {
        bench.until_state(&format!("mallory-{number}"), "succeeded").await;
    }
}

/// The lane's own credential is wrong: after a few accounts the lane stops, and no payment is lost.
#[tokio::test]
async fn wrong_key_of_a_lane_stops_it_after_a_few_accounts() {
    let bench = Bench::open(&[ProviderRow { workers: 1, ..row("acme") }]).await;
    bench.script.always("acme", forbidden());
    for number in 0..30 {
        pay(&bench, &format!("merchant-{number}"), &format!("job-{number}")).await;
    }
    let stopped = "SELECT count(*) FROM jobs WHERE wait_reason = 'misconfigured' AND attempts = 0";
    bench.until("the lane stops", async || bench.count(stopped).await >= 5).await;
    bench.until("nothing is active", async || bench.active().await == 0).await;
    assert_eq!(bench.script.sent().len(), 5);
    bench.script.always("acme", Act::Answer(accepted()));
    bench.apply(&[changed()]).await;
    let done = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    bench.until("those that were not sent succeed", async || bench.count(done).await >= 25).await;
}
