//! Start of a worker whose database is unavailable, or has the wrong schema or version.

use std::time::{Duration, Instant};

use sluicegate::provider::simulated::FakeOptions;

use crate::program::Program;
use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(60);

fn await_log(stand: &Stand, number: usize, text: &str) {
    let deadline = Instant::now() + PATIENCE;
    while !stand.worker_log(number).contains(text) {
        assert!(Instant::now() < deadline, "`{text}` is not in the log:\n{}", stand.worker_log(number));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starting_worker_waits_for_the_database() {
    let mut stand = Stand::start();
    stand.postgres.kill();
    let number = stand.add_waiting_worker();
    await_log(&stand, number, "database unavailable");
    assert_eq!((stand.probe(number, "livez").await, stand.probe(number, "readyz").await), (200, 503));
    stand.postgres.restart();
    stand.await_ready(number).await;
    assert_eq!(stand.probe(number, "livez").await, 200);
    assert!(stand.stop_worker(number).contains("all requests finished"));
    // A worker that is stopped while it waits has no messages to requeue.
    stand.postgres.kill();
    stand.start_worker(number);
    await_log(&stand, number, "database unavailable");
    assert!(stand.stop_worker(number).contains("all requests finished"));
}

fn assert_no_warning(stand: &Stand, workers: [usize; 2]) {
    for number in workers {
        let log = stand.worker_log(number);
        // On a busy machine, the warning of a slow limiter is correct.
        let is_fault = |line: &&str| (line.contains(" WARN ") || line.contains("ERROR")) && !line.contains("lasted=");
        assert_eq!(log.lines().find(is_fault), None, "{log}");
    }
}

/// A false warning teaches operators to ignore warnings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn healthy_start_logs_no_warning() {
    let mut stand = Stand::start();
    stand.add_provider("acme", FakeOptions::default()).await;
    stand.apply(
        "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 3600\n[[provider.limit]]\nname = \
         \"second\"\nmax_requests = 20\nwindow_ms = 1000\n",
    );
    let workers = [stand.add_worker(), stand.add_worker()];
    for number in workers {
        stand.await_ready(number).await;
    }
    let deadline = Instant::now() + PATIENCE * 2;
    while !stand.status_of(workers[0], &["status"]).contains(" idle ") {
        assert!(Instant::now() < deadline, "{}", stand.status_of(workers[0], &["status"]));
    }
    assert_no_warning(&stand, workers);
    // After a pause of all workers, nobody has watched the store's clock.
    for number in workers {
        stand.stop_worker(number);
    }
    let cleared = "UPDATE limiter_authority SET clock_ahead_least_us = NULL, clock_ahead_most_us = NULL, \
                   clock_since_us = NULL, clock_said_at = NULL";
    assert!(stand.psql().args(["-c", cleared]).status().unwrap().success());
    for number in workers {
        stand.start_worker(number);
    }
    let deadline = Instant::now() + PATIENCE;
    while !workers.iter().any(|number| stand.worker_log(*number).contains("no clock attestation covers")) {
        assert!(Instant::now() < deadline, "{}", stand.worker_log(workers[0]));
        std::thread::sleep(Duration::from_millis(50));
    }
    for number in workers {
        stand.await_ready(number).await;
    }
    assert_no_warning(&stand, workers);
}

#[test]
fn a_worker_does_not_wait_for_a_schema() {
    let stand = Stand::start();
    let empty = stand.postgres.create_database("empty");
    let log = tempfile::NamedTempFile::new().unwrap();
    let environment = [
        ("SLUICEGATE_DATABASE__URL", empty.as_str()),
        ("SLUICEGATE_QUEUE__URL", stand.broker_url()),
        ("SLUICEGATE_OPS__LISTEN", "none"),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (code, text) = Program::start(&["run"], &environment, log.path()).ended();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("run `sluicegate migrate`"), "{text}");
}
