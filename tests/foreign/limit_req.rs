//! A limiter that nobody here wrote. nginx' `limit_req` is a leaky bucket that counts in milliseconds; docs/recipes.md
//! says which of our limits fits it, and these tests hold that to nginx itself.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::embedded::Embedded;
use crate::nginx::{Nginx, Served};
use crate::page::Page;

fn rows(url: &str, max_requests: u32) -> String {
    format!(
        "[[provider]]\nname = \"walled\"\nurl = \"{url}\"\nidempotency_retention_s = 86400\nworkers = 256\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = {max_requests}\nwindow_ms = 1000\n"
    )
}

fn messages(count: u32) -> Vec<Value> {
    (0..count).map(|n| json!({ "id": format!("pay-{n}"), "amount": 100 + n, "currency": "EUR" })).collect()
}

/// Works off so many payments, and returns what nginx says of them.
async fn paid(nginx: &Nginx, max_requests: u32, count: u32) -> (Embedded, Vec<Served>) {
    let mut embedded = Embedded::new(&[]);
    embedded.apply(&rows(&nginx.url(), max_requests));
    embedded.enqueue("walled", &messages(count));
    embedded.start();
    let states = embedded.settled(count.into()).await;
    assert_eq!(states, BTreeMap::from([("succeeded".to_owned(), u64::from(count))]));
    embedded.stop();
    let served = nginx.served();
    let charged: Vec<&str> = served.iter().filter(|one| one.status == 200).map(|one| one.key.as_str()).collect();
    let payments: BTreeSet<&str> = charged.iter().copied().collect();
    assert_eq!((charged.len(), payments.len()), (count as usize, count as usize), "each payment was let through once");
    (embedded, served)
}

/// The figures of docs/recipes.md: no window of a second holds more than 500, so a bucket of 500 never overflows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_limit_that_fits_ten_thousand_payments_meet_no_429() {
    let page = Page::read("docs/recipes.md");
    let fitting =
        "limit_req_zone $server_name zone=payments:1m rate=500r/s;\nlimit_req zone=payments burst=499 nodelay;";
    assert!(page.text.contains(fitting) && page.text.contains("max_requests = 500\nwindow_ms = 1000\n"));
    let nginx = Nginx::start("500r/s", 499, 1);
    let (_embedded, served) = paid(&nginx, 500, 10_000).await;
    let refused: Vec<&Served> = served.iter().filter(|one| one.status != 200).collect();
    assert!(refused.is_empty(), "{} of {}: {:?}", refused.len(), served.len(), refused[0]);
}

/// nginx allows less than the row says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_lower_limit_429s_are_honoured_and_counted() {
    const RETRY_AFTER_S: u32 = 2;
    let nginx = Nginx::start("10r/s", 9, RETRY_AFTER_S);
    let (embedded, served) = paid(&nginx, 40, 60).await;
    let refused: Vec<&Served> = served.iter().filter(|one| one.status == 429).collect();
    assert!(refused.len() > 10, "{served:?}");

    // Counted: each 429 is a row, and none was the payment's fault.
    let attempts: Vec<(String, i64)> = embedded.rows("SELECT outcome, count(*) FROM attempts GROUP BY outcome").await;
    let attempts: BTreeMap<String, i64> = attempts.into_iter().collect();
    let wanted = [("accepted", 60), ("throttled", i64::try_from(refused.len()).unwrap())];
    assert_eq!(attempts, BTreeMap::from(wanted.map(|(word, count)| (word.to_owned(), count))));
    let counted: Vec<(i64,)> = embedded.rows("SELECT DISTINCT attempts FROM jobs").await;
    assert_eq!(counted, [(1,)], "a refusal for the rate uses no attempt");
    let log = embedded.log_text();
    assert!(log.contains("429") || log.contains("throttled"), "{log}");

    // Honoured: what was in flight may still come; then nobody comes until the wait is over.
    for one in &refused {
        let quiet = one.at_ms + 1_000..one.at_ms + u64::from(RETRY_AFTER_S) * 1_000 - 50;
        let early = served.iter().find(|other| quiet.contains(&other.at_ms));
        assert!(early.is_none(), "{early:?} came although {one:?} asked for {RETRY_AFTER_S} s");
    }
}
