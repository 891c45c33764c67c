//! Account rules of a row without account limits, on real backends: the provider counts what each account sends.

use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(60);
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
                    [[provider.limit]]\nname = \"per-second\"\nmax_requests = 1000\nwindow_ms = 1000\n\
                    [[provider.account]]\naccount = \"a\"\nrule = \"limit\"\nmax_requests = 3\nwindow_ms = 3600000\n";

fn payments(account: &str, numbers: std::ops::Range<u32>) -> Vec<Value> {
    let message = |n| {
        let message = json!({ "id": format!("{account}-{n}"), "amount": 100, "currency": "EUR", "account": account });
        json!({ "key": "acme", "body": message.to_string() })
    };
    numbers.map(message).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_without_account_limit_holds_at_the_provider() {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(ROWS);
    stand.add_worker();
    stand.add_worker();
    let charged = |account: &str| {
        let effects = stand.providers["acme"].effects();
        effects.iter().filter(|effect| effect.id.split('-').next() == Some(account)).count()
    };
    assert_eq!(stand.publish(&[payments("a", 0..8), payments("b", 0..8)].concat()), 16);
    stand.await_that(PATIENCE, || (charged("a"), charged("b")) == (3, 8));
    // `b` has used 8 of its 10 before it had a rule.
    let rule = "INSERT INTO account_overrides (provider, account, rule, max_requests, window_ms) \
                VALUES ('acme', 'b', 'limit', 10, 3600000)";
    assert!(stand.psql().args(["-c", rule]).output().unwrap().status.success());
    let known = "SELECT count(*) FROM worker_reports \
                 WHERE (report ->> 'settings_version')::bigint >= (SELECT version FROM settings_version)";
    stand.await_count(known, 2);
    assert_eq!(stand.publish(&payments("b", 8..14)), 6);
    stand.await_that(PATIENCE, || charged("b") == 10);
    // Accounts without a rule pass those that wait.
    assert_eq!(stand.publish(&payments("c", 0..8)), 8);
    stand.await_that(PATIENCE, || charged("c") == 8);
    assert_eq!((charged("a"), charged("b")), (3, 10));
    let waits = "SELECT count(*) FROM flows WHERE account IN ('a', 'b') AND blocked_limit = 'account rule'";
    stand.await_count(waits, 2);
    assert_eq!(stand.providers["acme"].report().doubles, 0);
}
