//! PostgreSQL that refuses outcomes: all of them for a while, or those of single payments. No payment is lost, charged
//! twice or reviewed in vain, and the lane charges nothing more while the ledger accepts no outcome.

use std::time::Duration;

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PAYMENTS: u64 = 150;
const WORKERS: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(180);
/// Without retention or look-up, a lost outcome ends in review.
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nworkers = 8\n\
                    [[provider.limit]]\nname = \"rate\"\nmax_requests = 20\nwindow_ms = 1000\n";
const REFUSE: &str = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
                      $$ BEGIN RAISE EXCEPTION 'index is corrupted' USING ERRCODE = 'XX002'; END $$";

async fn stand() -> Stand {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(ROWS);
    let worker = stand.add_worker();
    stand.await_ready(worker).await;
    sql(&stand, REFUSE);
    let message = |n| json!({ "id": format!("p{n}"), "amount": 100, "currency": "EUR" }).to_string();
    let messages: Vec<_> = (0..PAYMENTS).map(|n| json!({ "key": "acme", "body": message(n) })).collect();
    assert_eq!(stand.publish(&messages), messages.len());
    stand.await_progress(20);
    stand
}

fn sql(stand: &Stand, sql: &str) {
    let output = stand.psql().args(["-c", sql]).output().unwrap();
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
}

fn charges(stand: &Stand) -> u64 {
    stand.providers["acme"].report().charges
}

/// Waits until the lane charges nothing more, and returns what it has charged.
fn until_charges_end(stand: &Stand) -> u64 {
    let mut last = charges(stand);
    loop {
        std::thread::sleep(Duration::from_secs(3));
        let now = charges(stand);
        if now == last {
            return now;
        }
        last = now;
    }
}

/// Every payment succeeded, and was charged once.
fn assert_all_succeeded(stand: &Stand) {
    stand.await_finished(PAYMENTS, PATIENCE);
    assert_eq!(stand.states().get("succeeded"), Some(&PAYMENTS), "{:?}", stand.states());
    let effects = stand.providers["acme"].effects();
    assert!(effects.len() as u64 == PAYMENTS && effects.iter().all(|effect| effect.count == 1), "{effects:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_outcomes_are_kept_until_they_are_accepted() {
    let stand = stand().await;
    sql(&stand, "CREATE TRIGGER refuse BEFORE UPDATE ON attempts FOR EACH ROW EXECUTE FUNCTION refuse()");
    let charged = until_charges_end(&stand);
    let accepted = stand.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'");
    assert!(charged > accepted && charged <= accepted + WORKERS, "{charged} charged, {accepted} accepted");
    assert!(charged < PAYMENTS, "the lane charges on");
    sql(&stand, "DROP TRIGGER refuse ON attempts");
    assert_all_succeeded(&stand);
}

/// A logical replica that became the primary has the rows, and its sequences begin at 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequence_behind_its_table_loses_no_outcome() {
    let stand = stand().await;
    let sequence = "pg_get_serial_sequence('events', 'sequence')";
    sql(&stand, &format!("SELECT setval({sequence}, 1, false)"));
    let found = stand.attempt(&["check", "--json"]).1;
    assert!(found.contains("events") && found.contains("setval"), "{found}");
    until_charges_end(&stand);
    sql(&stand, &format!("SELECT setval({sequence}, (SELECT max(sequence) FROM events))"));
    assert_all_succeeded(&stand);
    assert!(!stand.attempt(&["check", "--json"]).1.contains("setval"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_refused_outcome_does_not_hold_up_the_lane() {
    let stand = stand().await;
    let succeeds = "BEFORE UPDATE ON jobs FOR EACH ROW WHEN (NEW.id = 'p60' AND NEW.state = 'succeeded')";
    sql(&stand, &format!("CREATE TRIGGER refuse_success {succeeds} EXECUTE FUNCTION refuse()"));
    let ends = "BEFORE UPDATE ON attempts FOR EACH ROW WHEN (NEW.job_id = 'p70')";
    sql(&stand, &format!("CREATE TRIGGER refuse_end {ends} EXECUTE FUNCTION refuse()"));
    stand.await_finished(PAYMENTS - 1, PATIENCE);
    let review = "SELECT count(*) FROM jobs WHERE id = 'p60' AND state = 'review' \
                  AND reason LIKE '%outcome accepted, status 200, reference %'";
    assert_eq!(stand.count(review), 1, "{:?}\n{}", stand.states(), stand.worker_log(0));
    assert_eq!(stand.states().get("sending"), Some(&1), "{:?}", stand.states());
    let metrics = reqwest::get(format!("{}/metrics", stand.ops_url(0))).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("sluicegate_unwritten_outcomes{provider=\"acme\"} 1"), "{metrics}");
    sql(&stand, "DROP TRIGGER refuse_end ON attempts");
    stand.await_finished(PAYMENTS, PATIENCE);
    assert_eq!(stand.states().get("succeeded"), Some(&(PAYMENTS - 1)), "{:?}", stand.states());
    let effects = stand.providers["acme"].effects();
    assert!(effects.len() as u64 == PAYMENTS && effects.iter().all(|effect| effect.count == 1), "{effects:?}");
}
