//! Accounts that a rule refuses: their jobs end as declined without a request, wherever they wait. One of unknown outcome
//! is looked up, and never sent again.

use serde_json::json;
use sluicegate::ledger::provider_row::{AccountRow, LimitRow, ProviderRow};

use super::bench::{Bench, limit, row};
use super::script::Act;

const HOUR_MS: i64 = 3_600_000;

fn with_rule(rule: &str, row: &ProviderRow) -> ProviderRow {
    let rule = AccountRow { account: "mallory".to_owned(), rule: Some(rule.to_owned()), ..AccountRow::default() };
    ProviderRow { accounts: vec![rule], ..row.clone() }
}

async fn pay_many(bench: &Bench, account: &str, jobs: usize) {
    for number in 0..jobs {
        let id = format!("{account}-{number}");
        let body = json!({ "id": id, "account": account, "amount": 1299, "currency": "EUR" });
        bench.publish("acme", &body.to_string()).await;
    }
}

async fn until_in_backlog(bench: &Bench, jobs: i64) {
    let waiting = async || bench.count("SELECT count(*) FROM jobs WHERE backlog").await == jobs;
    bench.until(&format!("{jobs} jobs wait in the backlog"), waiting).await;
}

/// Waits until so many jobs of the account are declined, each with its event and without a request.
async fn until_declined(bench: &Bench, jobs: usize) {
    for number in 0..jobs {
        let id = format!("mallory-{number}");
        let job = bench.until_state(&id, "declined").await;
        assert_eq!((job.attempts, job.reason.as_str(), job.held), (0, "account_refused", false), "{id}");
        bench.until(&format!("the event of {id}"), async || !bench.events_of(&id).await.is_empty()).await;
        let events = bench.events_of(&id).await;
        let told: Vec<_> = events.iter().map(|event| (&event.body["state"], &event.body["reason"])).collect();
        assert_eq!(told, [(&json!("declined"), &json!("account_refused"))], "{id}");
        assert!(bench.script.sent_for(&id).is_empty(), "{id}");
    }
    let different = "SELECT count(*) FROM flows WHERE account = 'mallory' AND waiting <> 0";
    assert_eq!(bench.count(different).await, 0);
}

/// They use no permit: the only one is left for another account.
#[tokio::test]
async fn refused_job_ends_without_a_request() {
    let one_per_hour = ProviderRow { limits: vec![limit(1, HOUR_MS)], ..row("acme") };
    let bench = Bench::open(&[with_rule("refuse", &one_per_hour)]).await;
    pay_many(&bench, "mallory", 3).await;
    until_declined(&bench, 3).await;
    pay_many(&bench, "other", 1).await;
    assert_eq!(bench.until_state("other-0", "succeeded").await.attempts, 1);
}

/// The lane cannot send for an hour, and they end all the same.
#[tokio::test]
async fn waiting_jobs_end_when_the_rule_is_set() {
    let one_per_hour = ProviderRow { limits: vec![limit(1, HOUR_MS)], ..row("acme") };
    let bench = Bench::open(std::slice::from_ref(&one_per_hour)).await;
    pay_many(&bench, "other", 5).await;
    until_in_backlog(&bench, 4).await;
    pay_many(&bench, "mallory", 30).await;
    until_in_backlog(&bench, 34).await;
    bench.apply(&[with_rule("refuse", &one_per_hour)]).await;
    until_declined(&bench, 30).await;
    until_in_backlog(&bench, 4).await;
    // A new one does not wait there.
    bench.settings_known().await;
    let late = json!({ "id": "mallory-30", "account": "mallory", "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &late.to_string()).await;
    until_declined(&bench, 31).await;
    assert_eq!(bench.script.sent().len(), 1);
}

#[tokio::test]
async fn blocked_jobs_end_when_their_account_is_refused() {
    let open = row("acme");
    let bench = Bench::open(&[with_rule("blocked", &open)]).await;
    pay_many(&bench, "mallory", 20).await;
    until_in_backlog(&bench, 20).await;
    bench.apply(&[with_rule("refuse", &open)]).await;
    until_declined(&bench, 20).await;
    // Without the rule, new jobs are sent.
    bench.apply(&[open]).await;
    bench.settings_known().await;
    let free = json!({ "id": "free", "account": "mallory", "amount": 1299, "currency": "EUR" });
    bench.publish("acme", &free.to_string()).await;
    assert_eq!(bench.until_state("free", "succeeded").await.attempts, 1);
}

/// The provider deduplicates, so without the rule the job would be sent again first.
#[tokio::test]
async fn unknown_job_of_a_refused_account_is_only_looked_up() {
    let per_account = LimitRow { name: "each".to_owned(), scope: "account".to_owned(), ..limit(100, 1_000) };
    let lane = ProviderRow {
        lookup: json!({ "url": "https://acme.test/charges?id=${job:id}" }).as_object().cloned(),
        limits: vec![limit(1_000, 100), per_account],
        backoff_base_ms: 60_000,
        backoff_max_ms: 60_000,
        ..row("acme")
    };
    let bench = Bench::open(std::slice::from_ref(&lane)).await;
    bench.script.plan("mallory-0", [Act::ChargeAndLose]);
    pay_many(&bench, "mallory", 1).await;
    bench.until_state("mallory-0", "unknown").await;
    bench.apply(&[with_rule("refuse", &lane)]).await;
    bench.settings_known().await;
    bench.sql("UPDATE jobs SET wake_at = created_at").await;
    bench.until_state("mallory-0", "succeeded").await;
    assert_eq!((bench.script.sent().len(), bench.script.asked_for("mallory-0").len()), (1, 1));
    assert_eq!(bench.script.charges("acme", "mallory-0"), 1);
}
