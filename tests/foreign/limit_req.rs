//! nginx `limit_req` as an independent limiter: a leaky bucket that counts in milliseconds.
//!
//! docs/recipes.md names the limit of ours that fits it, and these tests check that with nginx itself.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use sluicegate::domain::outcome::{Outcome, Refusal};

use crate::embedded::Embedded;
use crate::nginx::{Nginx, Served};
use crate::page::Page;
use crate::sender::Sender;

/// The row of the page, with nginx at its URL.
fn row(nginx: &Nginx) -> String {
    const URL: &str = "https://gateway.example.com/charges";
    let blocks: Vec<String> = Page::read("docs/recipes.md").blocks_of("toml");
    let rows: Vec<&String> = blocks.iter().filter(|block| block.contains(URL)).collect();
    let [row] = rows.as_slice() else { panic!("{blocks:?}") };
    assert_eq!(row.matches(URL).count(), 1);
    row.replace(URL, &nginx.url())
}

/// The `rate` and `burst` of the page's nginx configuration.
fn figures() -> (String, u32) {
    let blocks = Page::read("docs/recipes.md").blocks_of("nginx");
    let word = |name: &str| {
        let (_, rest) = blocks[0].split_once(&format!("{name}=")).unwrap();
        rest.split([' ', ';']).next().unwrap().to_owned()
    };
    (word("rate"), word("burst").parse().unwrap())
}

pub fn refused(served: &[Served]) -> Vec<&Served> {
    served.iter().filter(|request| request.status == 429).collect()
}

/// Checks that each payment passed nginx once.
pub fn assert_paid_once(served: &[Served], payments: usize) {
    let charged: Vec<&str> =
        served.iter().filter(|request| request.status == 200).map(|request| request.key.as_str()).collect();
    let keys: BTreeSet<&str> = charged.iter().copied().collect();
    assert_eq!((charged.len(), keys.len()), (payments, payments));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn matching_limit_causes_no_429() {
    let (rate, burst) = figures();
    let nginx = Nginx::start(&rate, burst, 1);
    let outcomes = Sender::new(&row(&nginx)).send(10_000).await;
    let accepted = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Accepted { .. })).count();
    let served = nginx.all_served();
    assert_eq!((accepted, refused(&served).len()), (10_000, 0), "of {}", served.len());
    assert_paid_once(&served, 10_000);
}

/// Counter-test: if the two limits do not fit, the test above sees 429s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_small_bucket_causes_429s() {
    let nginx = Nginx::start("20r/s", 9, 1);
    let outcomes = Sender::new(&row(&nginx)).send(400).await;
    let throttled =
        outcomes.iter().filter(|outcome| matches!(outcome.refusal(), Some(Refusal::Throttled { .. }))).count();
    assert_eq!(throttled, refused(&nginx.all_served()).len());
    assert!(throttled > 0);
}

/// The whole program with an nginx that allows less than the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lower_provider_limit_429s_are_honoured() {
    const RETRY_AFTER_S: u32 = 2;
    const PAYMENTS: u32 = 24;
    let nginx = Nginx::start("1r/s", 3, RETRY_AFTER_S);
    let mut embedded = Embedded::new(&[]);
    embedded.apply(&row(&nginx));
    let message = |n| json!({ "id": format!("pay-{n}"), "amount": 100 + n, "currency": "EUR" });
    embedded.enqueue("gateway", &(0..PAYMENTS).map(message).collect::<Vec<_>>());
    embedded.start();
    let states = embedded.await_finished(PAYMENTS.into()).await;
    assert_eq!(states, BTreeMap::from([("succeeded".to_owned(), u64::from(PAYMENTS))]));
    embedded.stop();
    let served = nginx.all_served();
    let refused = refused(&served);
    assert!(!refused.is_empty(), "{served:?}");
    assert_paid_once(&served, PAYMENTS as usize);

    // Each 429 is recorded as an attempt, and none counts for the payment.
    let attempts: Vec<(String, i64)> = embedded.rows("SELECT outcome, count(*) FROM attempts GROUP BY outcome").await;
    let attempts: BTreeMap<String, i64> = attempts.into_iter().collect();
    let count = |outcome: &str| attempts.get(outcome).copied().unwrap_or(0);
    assert_eq!(count("accepted"), i64::from(PAYMENTS), "{attempts:?}");
    // A 429 on a connection that carried a response before may be a copy of an earlier one: that outcome is unknown.
    let throttled = count("throttled") + count("unknown");
    assert_eq!(
        (throttled, attempts.values().sum()),
        (i64::try_from(refused.len()).unwrap(), count("accepted") + throttled),
        "{attempts:?}"
    );
    let counted: Vec<(i64,)> = embedded.rows("SELECT DISTINCT attempts FROM jobs").await;
    assert_eq!(counted, [(1,)], "a 429 used an attempt");

    // Requests in flight at a 429 may still arrive. Then no request arrives until the wait is over.
    for request in &refused {
        let quiet = request.at_ms + 1_000..request.at_ms + u64::from(RETRY_AFTER_S) * 1_000 - 50;
        let early = served.iter().find(|other| quiet.contains(&other.at_ms));
        assert!(early.is_none(), "{early:?} came although {request:?} asked for {RETRY_AFTER_S} s");
    }
}
