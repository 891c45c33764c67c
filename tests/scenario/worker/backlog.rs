//! The backlog in the ledger: an account's trouble stays its own, a limited lane serves all of its backlog in fair order,
//! and its jobs come back by the ledger alone.

use std::time::Duration;

use serde_json::json;
use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::{AccountRow, LimitRow, ProviderRow};
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::worker::job::EGRESS_DELAY;
use tokio::time::sleep;

use super::bench::{Bench, limit, name, row};
use super::script::Act;

const HOUR_MS: i64 = 3_600_000;

/// So many for each account and window, far below what the provider allows.
fn strict_on_accounts(max_requests: i64, window_ms: i64) -> ProviderRow {
    let per_account =
        LimitRow { name: "per-account".to_owned(), scope: "account".to_owned(), ..limit(max_requests, window_ms) };
    ProviderRow { limits: vec![limit(1_000, 100), per_account], ..row("acme") }
}

/// So many for the lane.
fn strict_on_lane(max_requests: i64, window_ms: i64) -> ProviderRow {
    ProviderRow { limits: vec![limit(max_requests, window_ms)], ..row("acme") }
}

async fn pay(bench: &Bench, account: &str, id: &str) {
    let body = json!({ "id": id, "account": account, "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &body.to_string()).await;
}

/// The place of a payment among the requests.
fn place_of(bench: &Bench, id: &str) -> usize {
    bench.script.order().iter().position(|sent| sent == id).expect("the payment was sent")
}

async fn pay_many(bench: &Bench, account: &str, jobs: usize) {
    for number in 0..jobs {
        pay(bench, account, &format!("{account}-{number}")).await;
    }
}

async fn until_in_backlog(bench: &Bench, jobs: i64) {
    let there = async || {
        let waiting = bench.count("SELECT count(*) FROM jobs WHERE backlog").await;
        waiting == jobs && bench.unacknowledged("acme") == 0
    };
    bench.until(&format!("{jobs} jobs wait in the ledger alone"), there).await;
}

/// Waits for a flow like this, such as a blocked one. The first sweeps of a worker end all blocks, because a limit may have
/// changed before: the first jobs of a flow then block it again.
async fn until_flow(bench: &Bench, flow: &str) {
    let blocked = format!("SELECT count(*) FROM flows WHERE {flow}");
    bench.until(&format!("a flow with {flow}"), async || bench.count(&blocked).await == 1).await;
}

async fn all_are_accounted_for(bench: &Bench) {
    let found = bench.database.reconcile(Duration::from_secs(7_200), CheckScope::All).await.unwrap();
    assert!(found.iter().all(|account| account.discrepancies().is_empty()), "{found:?}");
    let different = "SELECT count(*) FROM flows WHERE waiting <> (SELECT count(*) FROM jobs \
         WHERE jobs.backlog AND jobs.provider = flows.provider AND COALESCE(jobs.account, '') = flows.account \
             AND 10 - jobs.priority = flows.class)";
    assert_eq!(bench.count(different).await, 0);
}

#[tokio::test]
async fn flood_of_one_account_delays_no_other() {
    let bench = Bench::open(&[strict_on_accounts(2, HOUR_MS)]).await;
    pay_many(&bench, "flood", 60).await;
    pay_many(&bench, "other", 2).await;
    for id in ["other-0", "other-1"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1);
    }
    until_in_backlog(&bench, 58).await;
    assert_eq!(bench.script.sent().len(), 4);
    until_flow(&bench, "blocked_reason = 'limit' AND blocked_limit = 'per-account' AND waiting = 58").await;
    bench.until("nothing is active", async || bench.active().await == 0).await;
    // A new job goes behind them, and is not claimed before.
    pay(&bench, "flood", "late").await;
    until_in_backlog(&bench, 59).await;
    assert_eq!(bench.count("SELECT fence FROM jobs WHERE id = 'late'").await, 0);
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn blocked_flow_is_served_at_its_limit() {
    let bench = Bench::open(&[strict_on_accounts(3, 400)]).await;
    pay_many(&bench, "flood", 20).await;
    for number in 0..20 {
        assert_eq!(bench.until_state(&format!("flood-{number}"), "succeeded").await.attempts, 1);
    }
    assert_eq!(bench.script.sent().len(), 20);
    until_in_backlog(&bench, 0).await;
    all_are_accounted_for(&bench).await;
}

/// A payment that needs the whole window waits while cheap ones of its account keep coming: at the gate, where some wait
/// with it, and in the ledger, where its flow is blocked. It is the first one when the flow wakes.
#[tokio::test]
async fn costly_payment_is_not_starved_by_cheap_ones_of_its_account() {
    for mode in ["blocking", "requeue"] {
        let bench = Bench::open(&[ProviderRow { mode: mode.to_owned(), ..strict_on_accounts(4, 500) }]).await;
        pay_many(&bench, "merchant", 2).await;
        bench.until_sent("acme", 2).await;
        let costly = json!({ "id": "costly", "account": "merchant", "amount": 1299, "currency": "EUR", "cost": 4 });
        bench.publish("acme", &costly.to_string()).await;
        // From its record on, it is before those that come later.
        let recorded = async || bench.count("SELECT count(*) FROM jobs WHERE id = 'costly'").await == 1;
        bench.until("the costly payment is recorded", recorded).await;
        let mut cheap = 0;
        while !bench.script.order().iter().any(|sent| sent == "costly") {
            // Before the next one comes, the earlier ones have been recorded: five times what the account may send.
            pay(&bench, "merchant", &format!("cheap-{cheap}")).await;
            cheap += 1;
            assert!(cheap < 200, "{:?}", bench.script.order());
            sleep(Duration::from_millis(25)).await;
        }
        let before = place_of(&bench, "costly");
        assert!(before <= 6, "{mode}: {before} requests were sent before it");
        bench.until("the cheap ones are sent", async || bench.script.order().len() == cheap + 3).await;
        all_are_accounted_for(&bench).await;
    }
}

#[tokio::test]
async fn requeue_mode_needs_no_delayed_copies() {
    let bench = Bench::open(&[ProviderRow { mode: "requeue".to_owned(), ..strict_on_accounts(1, HOUR_MS) }]).await;
    pay_many(&bench, "flood", 20).await;
    until_in_backlog(&bench, 19).await;
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn raised_limit_wakes_the_backlog() {
    let bench = Bench::open(&[strict_on_accounts(1, HOUR_MS)]).await;
    pay_many(&bench, "flood", 12).await;
    until_in_backlog(&bench, 11).await;
    let rate = Rate::new(100, Duration::from_secs(3_600)).unwrap();
    bench.database.set_rate(&name("acme"), "per-account", rate).await.unwrap();
    for number in 0..12 {
        assert_eq!(bench.until_state(&format!("flood-{number}"), "succeeded").await.attempts, 1);
    }
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn blocked_account_waits_for_its_rule() {
    let open = strict_on_accounts(100, HOUR_MS);
    let rule = AccountRow { account: "mallory".to_owned(), rule: Some("blocked".to_owned()), ..AccountRow::default() };
    let bench = Bench::open(&[ProviderRow { accounts: vec![rule], ..open.clone() }]).await;
    pay_many(&bench, "mallory", 30).await;
    pay_many(&bench, "other", 3).await;
    bench.until_sent("acme", 3).await;
    until_in_backlog(&bench, 30).await;
    until_flow(&bench, "blocked_reason = 'account_blocked' AND waiting = 30").await;
    bench.apply(&[open]).await;
    for number in 0..30 {
        assert_eq!(bench.until_state(&format!("mallory-{number}"), "succeeded").await.attempts, 1);
    }
    all_are_accounted_for(&bench).await;
}

/// A worker that ends leaves the backlog to the next one, and so do claimed jobs that it could not send.
#[tokio::test]
async fn next_worker_goes_on_with_the_backlog() {
    let mut bench = Bench::prepared(&[strict_on_accounts(1, 600)]).await;
    bench.keep_limiter();
    bench.run();
    pay_many(&bench, "flood", 6).await;
    bench.until_sent("acme", 2).await;
    bench.stop().await;
    assert_eq!(bench.active().await, 0);
    bench.run();
    for number in 0..6 {
        assert_eq!(bench.until_state(&format!("flood-{number}"), "succeeded").await.attempts, 1);
    }
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn paused_provider_claims_nothing() {
    let bench = Bench::open(&[strict_on_accounts(1, 300)]).await;
    pay_many(&bench, "flood", 4).await;
    bench.until_sent("acme", 1).await;
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.settings_known().await;
    bench.until("nothing is active", async || bench.active().await == 0).await;
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for number in 0..4 {
        assert_eq!(bench.until_state(&format!("flood-{number}"), "succeeded").await.attempts, 1);
    }
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn job_with_changed_row_goes_to_review() {
    let bench = Bench::open(&[strict_on_accounts(1, HOUR_MS)]).await;
    pay_many(&bench, "flood", 3).await;
    let blocked = "SELECT count(*) FROM flows WHERE blocked_until IS NOT NULL";
    bench.until("the flow is blocked", async || bench.count(blocked).await == 1).await;
    until_in_backlog(&bench, 2).await;
    bench.without_constraints("UPDATE jobs SET amount = 1 WHERE backlog").await;
    let rate = Rate::new(100, Duration::from_secs(3_600)).unwrap();
    bench.database.set_rate(&name("acme"), "per-account", rate).await.unwrap();
    bench.until("both are in review", async || bench.finished("acme").get("review") == Some(&2)).await;
    assert_eq!(bench.script.sent().len(), 1);
    all_are_accounted_for(&bench).await;
}

/// The queue is empty soon, and no job waits in a delay queue: all are counted in the ledger, and none has a worker.
#[tokio::test]
async fn lane_at_its_limit_empties_its_queue() {
    let bench = Bench::open(&[strict_on_lane(5, HOUR_MS)]).await;
    pay_many(&bench, "merchant", 80).await;
    bench.until_sent("acme", 5).await;
    until_in_backlog(&bench, 75).await;
    bench.until("nothing is active", async || bench.active().await == 0).await;
    // New ones are recorded behind them, though the lane waits for an hour.
    pay_many(&bench, "late", 10).await;
    until_in_backlog(&bench, 85).await;
    let rate = Rate::new(100, Duration::from_secs(3_600)).unwrap();
    bench.database.set_rate(&name("acme"), "all", rate).await.unwrap();
    bench.until_sent("acme", 90).await;
    until_in_backlog(&bench, 0).await;
    assert_eq!(bench.script.sent().len(), 90);
    all_are_accounted_for(&bench).await;
}

/// A lane of five jobs a second takes five messages at a time, and none waits when the next one comes.
#[tokio::test]
async fn slow_lane_empties_its_queue() {
    let bench = Bench::prepared(&[ProviderRow { max_wait_ms: 5_000, ..strict_on_lane(5, 1_000) }]).await;
    pay_many(&bench, "merchant", 40).await;
    let mut bench = bench;
    bench.run();
    bench.until("the queue is empty", async || bench.queued("acme") == 0).await;
    let sent = bench.script.sent().len();
    assert!(sent < 25, "{sent} were sent first");
    bench.until_sent("acme", 40).await;
    all_are_accounted_for(&bench).await;
}

/// The jobs behind a slow response get no worker slot in time. They wait in the backlog, and go on with the next free slot:
/// no slot is idle until a delay ends.
#[tokio::test]
async fn free_slot_ends_the_wait_for_one() {
    let lane = ProviderRow { workers: 1, max_wait_ms: 300, ..strict_on_lane(1_000, 1_000) };
    let bench = Bench::open(&[lane]).await;
    bench.script.plan("slow", [Act::Hold]);
    bench.pay("acme", "slow").await;
    bench.until_sent("acme", 1).await;
    pay_many(&bench, "merchant", 5).await;
    until_in_backlog(&bench, 5).await;
    let refused = "SELECT count(*) FROM jobs WHERE backlog AND wait_reason = 'egress'";
    bench.until("some waited for the slot in vain", async || bench.count(refused).await >= 1).await;
    bench.script.release_all();
    bench.until_sent("acme", 6).await;
    let idle = bench.script.sent_to("acme")[1].at.saturating_duration_since(bench.script.answered_at("slow"));
    assert!(idle < EGRESS_DELAY / 2, "the slot was idle for {idle:?}");
    all_are_accounted_for(&bench).await;
}

/// Its queue fills at once. Nothing holds the lane back, so it sends most payments without recording them first.
#[tokio::test]
async fn free_lane_keeps_its_queue_in_the_broker() {
    let lane = ProviderRow { workers: 8, bucket_capacity: 16, ..strict_on_lane(100_000, 1_000) };
    let bench = Bench::open(&[lane]).await;
    // Then its limiter is warm: a cold one holds the lane back.
    pay(&bench, "first", "first").await;
    bench.until_state("first", "succeeded").await;
    for number in 0..200 {
        pay(&bench, &format!("merchant-{number}"), &format!("p{number}")).await;
    }
    bench.until_sent("acme", 201).await;
    let recorded_first = bench.count("SELECT count(*) FROM jobs WHERE fence < 4294967296").await;
    assert!(recorded_first < 100, "{recorded_first} of 200 were recorded first");
    all_are_accounted_for(&bench).await;
}

/// The bench with a lane at its limit, whose queue was full when the worker started.
async fn flooded(limits: ProviderRow, jobs: usize) -> Bench {
    let mut bench = Bench::prepared(&[limits]).await;
    pay_many(&bench, "flood", jobs).await;
    bench.run();
    bench.until("the queue is empty", async || bench.queued("acme") == 0).await;
    bench
}

#[tokio::test]
async fn urgent_job_passes_a_recorded_backlog() {
    let bench = flooded(strict_on_lane(20, 1_000), 200).await;
    let sent = bench.script.sent().len();
    let urgent = json!({ "id": "urgent", "account": "flood", "priority": 9, "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &urgent.to_string()).await;
    bench.until_state("urgent", "succeeded").await;
    bench.until_sent("acme", 201).await;
    let before = place_of(&bench, "urgent") - sent;
    assert!(before < 80, "{before} were sent before it, after {sent}");
    all_are_accounted_for(&bench).await;
}

/// Without a limit of accounts: the lane's limit is shared by turns.
#[tokio::test]
async fn merchants_share_a_limited_lane() {
    let bench = flooded(strict_on_lane(30, 1_000), 300).await;
    let sent = bench.script.sent().len();
    pay_many(&bench, "small", 20).await;
    bench.until_sent("acme", 320).await;
    let last = (0..20).map(|number| place_of(&bench, &format!("small-{number}"))).max().unwrap() - sent;
    assert!(last < 130, "the last one was sent after {last} others, {sent} came before");
    all_are_accounted_for(&bench).await;
}

/// Of two accounts whose jobs wait, one with weight 3 gets three of four requests.
#[tokio::test]
async fn account_with_more_weight_gets_more() {
    let heavy = AccountRow { account: "heavy".to_owned(), weight: 3, ..AccountRow::default() };
    let bench = Bench::open(&[ProviderRow { accounts: vec![heavy], ..strict_on_lane(1, HOUR_MS) }]).await;
    pay_many(&bench, "light", 60).await;
    pay_many(&bench, "heavy", 60).await;
    until_in_backlog(&bench, 119).await;
    let rate = Rate::new(20, Duration::from_millis(500)).unwrap();
    bench.database.set_rate(&name("acme"), "all", rate).await.unwrap();
    bench.until("most of the heavy account are sent", async || bench.script.order().len() > 64).await;
    let sent = bench.script.order();
    let heavy = sent[1..65].iter().filter(|id| id.starts_with("heavy")).count();
    assert!((44..=52).contains(&heavy), "{heavy} of 64: {sent:?}");
    all_are_accounted_for(&bench).await;
}

#[tokio::test]
async fn changed_weight_reaches_the_backlog() {
    let open = strict_on_lane(1, HOUR_MS);
    let bench = Bench::open(std::slice::from_ref(&open)).await;
    pay_many(&bench, "merchant", 5).await;
    until_in_backlog(&bench, 4).await;
    let weight = |weight| AccountRow { account: "merchant".to_owned(), weight, ..AccountRow::default() };
    for number in [7, 1_000] {
        bench.apply(&[ProviderRow { accounts: vec![weight(number)], ..open.clone() }]).await;
        until_flow(&bench, &format!("account = 'merchant' AND weight = {number}")).await;
    }
    bench.apply(&[open]).await;
    until_flow(&bench, "account = 'merchant' AND weight = 1").await;
}

/// In requeue mode, jobs that the lane's limit refuses wait in the backlog. The queue holds no message of theirs.
#[tokio::test]
async fn requeue_mode_returns_refused_jobs_to_the_backlog() {
    let bench = Bench::open(&[ProviderRow { mode: "requeue".to_owned(), ..strict_on_lane(5, HOUR_MS) }]).await;
    pay_many(&bench, "merchant", 20).await;
    bench.until_sent("acme", 5).await;
    until_in_backlog(&bench, 15).await;
    assert_eq!(bench.queued("acme"), 0);
}
