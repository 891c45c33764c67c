//! Backends that answer and do not do their work: a database that commits nothing, and a broker that blocks publishers.
//! `status`, `check` and the probe say so in the same sentence.

use std::time::{Duration, Instant};

use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(90);
const NO_STANDBY: &str = "the database commits nothing: each commit waits, as if a synchronous standby were missing";
const READ_ONLY: &str = "the database cannot write: it is read-only";
const BLOCKED: &str = "the broker blocks publishers: low on disk";

fn set(stand: &Stand, name: &str, value: &str) {
    for sql in [format!("ALTER SYSTEM SET {name} = '{value}'"), "SELECT pg_reload_conf()".to_owned()] {
        assert!(stand.psql().args(["-c", &sql]).output().unwrap().status.success(), "{sql}");
    }
    let shown = || String::from_utf8(stand.psql().args(["-c", &format!("SHOW {name}")]).output().unwrap().stdout);
    stand.await_that(PATIENCE, || shown().unwrap().trim() == value);
}

fn await_status(stand: &Stand, worker: usize, text: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let json = stand.status_of(worker, &["status", "--json"]);
        assert!(json.contains("acme"), "{json}\n{}", stand.worker_log(worker));
        let status = stand.status_of(worker, &["status"]);
        if status.contains(text) {
            return status;
        }
        assert!(Instant::now() < deadline, "`{text}`:\n{status}\n{}", stand.worker_log(worker));
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn assert_check_fails(stand: &Stand, text: &str) {
    let (code, found) = stand.attempt(&["check"]);
    assert!(code == Some(1) && found.contains(text), "`{text}`: {code:?}\n{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_of_a_backend_that_answers_is_named_everywhere() {
    let mut stand = Stand::start_with_broker();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(
        "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 3600\n[[provider.limit]]\nname = \
         \"second\"\nmax_requests = 20\nwindow_ms = 1000\n",
    );
    set(&stand, "synchronous_standby_names", "missing");
    for _ in 0..3 {
        assert_check_fails(&stand, NO_STANDBY);
    }
    let hung = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    assert!(stand.count(hung) <= 1, "one session at most is left");
    assert!(stand.attempt(&["status"]).1.contains(NO_STANDBY), "without a worker");
    // A worker that starts now.
    let worker = stand.add_worker();
    let status = await_status(&stand, worker, NO_STANDBY);
    assert!(!status.contains("no worker reports"), "{status}");
    set(&stand, "synchronous_standby_names", "");
    await_status(&stand, worker, " idle ");

    set(&stand, "default_transaction_read_only", "on");
    let status = await_status(&stand, worker, READ_ONLY);
    assert!(status.contains("backend_unavailable") && !status.contains("no worker reports"), "{status}");
    assert_check_fails(&stand, READ_ONLY);
    set(&stand, "default_transaction_read_only", "off");
    await_status(&stand, worker, " idle ");

    stand.rabbit.own().ctl(&["set_disk_free_limit", "100000GB"]);
    await_status(&stand, worker, BLOCKED);
    assert_check_fails(&stand, BLOCKED);
    stand.rabbit.own().ctl(&["set_disk_free_limit", "1MB"]);
    let deadline = Instant::now() + PATIENCE;
    while stand.status_of(worker, &["status"]).contains(BLOCKED) {
        assert!(Instant::now() < deadline, "{}", stand.worker_log(worker));
        std::thread::sleep(Duration::from_millis(100));
    }
}
