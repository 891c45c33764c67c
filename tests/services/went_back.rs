//! A database that went back: an asynchronous standby is promoted that lacks the last charges of the lost primary.

use std::time::Duration;

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;
use crate::support::roles::DATABASE;

const PATIENCE: Duration = Duration::from_secs(120);
/// The provider neither deduplicates nor offers a look-up: each repeated request charges again.
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\n\
                    [[provider.limit]]\nname = \"per-second\"\nmax_requests = 5\nwindow_ms = 1000\n";
/// So many that their repair takes longer than the first charges after the fail-over.
const PAYMENTS: u64 = 1_500;
/// Published while the lane is held.
const LATE: u64 = 5;
const ERA: &str = "SELECT era FROM event_order";
const DONE: &str = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";

fn publish(stand: &Stand, numbers: std::ops::Range<u64>) {
    let body = |n: u64| json!({ "id": format!("p{n}"), "amount": 100, "currency": "EUR" }).to_string();
    let messages: Vec<_> = numbers.map(|n| json!({ "key": "acme", "body": body(n) })).collect();
    assert_eq!(stand.publish(&messages), messages.len());
}

/// Payments that the provider has charged more than once.
fn doubles(stand: &Stand) -> Vec<String> {
    let twice = |effect: &sluicegate::provider::simulated::Effect| effect.count > 1;
    stand.providers["acme"].effects().iter().filter(|effect| twice(effect)).map(|effect| effect.id.clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promoted_standby_charges_nothing_twice() {
    let mut stand = Stand::start();
    let strict = FakeOptions { deduplicate: false, lookup: false, ..FakeOptions::default() };
    stand.add_provider("acme", strict).await;
    stand.apply(ROWS);
    let mut standby = stand.postgres.start_standby();
    let worker = stand.add_worker();
    publish(&stand, 0..PAYMENTS);
    stand.await_count("SELECT count(*) FROM jobs", PAYMENTS);
    stand.sluicegate(&["limits", "set", "acme", "per-second", "150/1s"]);
    // The standby has every payment and the limit, and from here on no charge.
    standby.await_answer(DATABASE, "SELECT count(*) FROM jobs", &PAYMENTS.to_string());
    standby.await_answer(DATABASE, "SELECT max_requests FROM provider_limits", "150");
    standby.stop_receiving();
    let before = stand.count(DONE);
    let era = stand.count(ERA);
    stand.await_that(PATIENCE, || stand.count(DONE) >= before + 600);

    stand.postgres.kill();
    standby.take_over(&stand.postgres);
    let _lost = std::mem::replace(&mut stand.postgres, standby);

    let held = "SELECT count(*) FROM lane_holds WHERE provider = 'acme' AND cause = 'database_went_back'";
    stand.await_count(held, 1);
    stand.await_that(PATIENCE, || stand.worker_log(worker).contains("the database went back"));
    assert!(stand.count(ERA) > era, "positions of events mean other events now");
    // What this worker remembers is in the ledger again.
    let settled = "SELECT count(*) FROM jobs WHERE state IN ('succeeded', 'unknown', 'review')";
    stand.await_that(PATIENCE, || stand.count(settled) >= stand.providers["acme"].effects().len() as u64);
    assert_eq!(doubles(&stand), Vec::<String>::new());
    let charged = stand.providers["acme"].report().charges;
    // A held lane goes on recording, and says why it sends nothing.
    publish(&stand, PAYMENTS..PAYMENTS + LATE);
    stand.await_count("SELECT count(*) FROM jobs", PAYMENTS + LATE);
    stand.await_that(PATIENCE, || stand.status_of(worker, &["status"]).contains("held"));
    let (code, said) = stand.attempt(&["provider", "resume", "acme"]);
    assert!(code == Some(0) && said.contains("the lane of acme is held"), "{code:?} {said}");
    assert_eq!((stand.attempt(&["provider", "resume", "acme", "--release-hold"]).0, stand.count(held)), (Some(2), 1));
    assert_eq!(stand.providers["acme"].report().charges, charged, "a held lane charges nothing");

    stand.sluicegate(&["provider", "resume", "acme", "--release-hold", "--because", "compared with acme"]);
    stand.await_finished(PAYMENTS + LATE, PATIENCE);
    assert_eq!(doubles(&stand), Vec::<String>::new());
    let log = stand.worker_log(worker);
    assert_eq!(log.matches("the database went back: it lacks commits").count(), 1, "{log}");
    let released = "SELECT count(*) FROM settings_audit WHERE table_name = 'lane_holds' AND new_row IS NULL \
                    AND because = 'compared with acme'";
    assert_eq!(stand.count(released), 1);
}
