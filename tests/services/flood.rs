//! One merchant floods a provider: the others are served as if the flood were not there, or by turns with it.
//!
//! Real backends, two workers. The strict provider counts the lane's limit; the ledger has the order of the charges.

use std::time::Duration;

use serde_json::json;
use sluicegate::provider::simulated::{AccountStatus, FakeOptions};

use crate::stand::Stand;

const FLOOD: u64 = 300;
const OTHERS: u64 = 120;
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
    [[provider.limit]]\nname = \"all\"\nmax_requests = 100\nwindow_ms = 1000\n\
    [[provider.limit]]\nname = \"per-account\"\nscope = \"account\"\nmax_requests = 10\nwindow_ms = 1000\n";
/// Charges of the flood before the last one of the others.
const BEFORE_THE_OTHERS: &str = "SELECT count(*) FROM attempts WHERE account = 'flood' AND began_at < \
    (SELECT max(began_at) FROM attempts WHERE account <> 'flood')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_one_merchant_delays_no_other() {
    let mut stand = Stand::start();
    let limits = vec!["100/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    let job = |account: String, id: String| {
        let body = json!({ "id": id, "account": account, "amount": 100, "currency": "EUR" });
        json!({ "key": "acme", "body": body.to_string() })
    };
    let flood = (0..FLOOD).map(|number| job("flood".to_owned(), format!("flood-{number}")));
    let others = (0..OTHERS).map(|number| job(format!("merchant-{}", number % 60), format!("other-{number}")));
    let messages: Vec<_> = flood.chain(others).collect();
    assert_eq!(stand.publish(&messages), messages.len());
    stand.add_worker();
    stand.add_worker();
    let done = format!(
        "SELECT CASE WHEN count(*) = {OTHERS} THEN 1 ELSE 0 END FROM jobs WHERE account <> 'flood' AND state = 'succeeded'"
    );
    stand.await_count(&done, 1);
    // The queue is empty, and the flood waits in the ledger alone.
    assert_eq!(stand.ready(&["payments.acme".to_owned()]), [0]);
    assert!(stand.count("SELECT count(*) FROM jobs WHERE backlog") > FLOOD / 3, "{:?}", stand.states());
    // Each of the others needs a few seconds at most, in which the flood gets ten each.
    let before = stand.count(BEFORE_THE_OTHERS);
    assert!(before < FLOOD / 2, "{before} charges of the flood came first");
    stand.await_finished(FLOOD + OTHERS, Duration::from_secs(300));
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (FLOOD + OTHERS, 0, 0));
    assert_eq!(stand.count("SELECT count(*) FROM flows WHERE waiting <> 0"), 0);
}

/// Without a limit of merchants: what comes later shares the lane with a flood that was published before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_merchant_and_urgent_payment_pass_a_flood() {
    let mut stand = Stand::start();
    let limits = vec!["50/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(
        "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 50\nwindow_ms = 1000\n",
    );
    let job = |account: &str, number: u64, priority: u8| {
        let id = format!("{account}-{number}");
        let body = json!({ "id": id, "account": account, "priority": priority, "amount": 100, "currency": "EUR" });
        json!({ "key": "acme", "body": body.to_string() })
    };
    let flood: Vec<_> = (0..1_000).map(|number| job("flood", number, 0)).collect();
    assert_eq!(stand.publish(&flood), flood.len());
    stand.add_worker();
    stand.add_worker();
    stand.await_count("SELECT CASE WHEN count(*) >= 900 THEN 1 ELSE 0 END FROM jobs WHERE account = 'flood'", 1);
    let late: Vec<_> = (0..40).map(|number| job("late", number, 0)).chain([job("urgent", 0, 9)]).collect();
    assert_eq!(stand.publish(&late), late.len());
    stand.await_finished(1_041, Duration::from_secs(300));
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (1_041, 0, 0));
    assert!(report.limits.iter().all(|limit| limit.breaches == 0), "{report:?}");
    let before = |account: &str| {
        stand.count(&format!(
            "SELECT count(*) FROM attempts WHERE account = 'flood' \
             AND began_at < (SELECT max(began_at) FROM attempts WHERE account = '{account}')"
        ))
    };
    let (late, urgent) = (before("late"), before("urgent"));
    assert!(
        urgent < 600 && late < 800,
        "{urgent} of the flood came before the urgent one, {late} before the late ones"
    );
    assert_eq!(stand.count("SELECT count(*) FROM flows WHERE waiting <> 0"), 0);
}

/// The provider refuses each request of one merchant with 403: its payments wait, and the lane pauses for none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_merchant_stops_no_other() {
    let mut stand = Stand::start();
    let account_statuses = vec![AccountStatus { account: "wrong-key".to_owned(), status: 403 }];
    stand.add_provider("acme", FakeOptions { account_statuses, ..FakeOptions::default() }).await;
    stand.apply(
        "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 50\nwindow_ms = 1000\n",
    );
    let job = |account: String, id: String| {
        let body = json!({ "id": id, "account": account, "amount": 100, "currency": "EUR" });
        json!({ "key": "acme", "body": body.to_string() })
    };
    // Connections are used again: the provider's answer may be one to an earlier request.
    let messages: Vec<_> = (0..OTHERS)
        .flat_map(|number| {
            let other = job(format!("merchant-{}", number % 60), format!("other-{number}"));
            [other, job("wrong-key".to_owned(), format!("wrong-{number}"))]
        })
        .collect();
    assert_eq!(stand.publish(&messages), messages.len());
    stand.add_worker();
    stand.add_worker();
    let done = format!(
        "SELECT CASE WHEN count(*) = {OTHERS} THEN 1 ELSE 0 END FROM jobs WHERE account <> 'wrong-key' AND state = 'succeeded'"
    );
    stand.await_count(&done, 1);
    let refused = stand.count("SELECT count(*) FROM attempts WHERE account = 'wrong-key'");
    assert!((1..OTHERS / 2).contains(&refused), "{refused} requests of the refused merchant");
    for worker in stand.running() {
        let log = stand.worker_log(worker);
        assert!(!log.contains("lane paused"), "{log}");
    }
}
