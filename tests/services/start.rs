//! The start of a worker whose database is not there yet, or is not what it should be.

use std::time::{Duration, Instant};

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
    await_log(&stand, number, "backend unavailable, retrying");
    assert_eq!((stand.probe(number, "livez").await, stand.probe(number, "readyz").await), (200, 503));
    stand.postgres.restart();
    stand.await_ready(number).await;
    assert_eq!(stand.probe(number, "livez").await, 200);
    assert!(stand.stop_worker(number).contains("all requests finished"));
    // One that is stopped while it waits has nothing to hand back.
    stand.postgres.kill();
    stand.start_worker(number);
    await_log(&stand, number, "backend unavailable, retrying");
    assert!(stand.stop_worker(number).contains("all requests finished"));
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
