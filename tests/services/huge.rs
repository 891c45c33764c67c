//! A message of the broker's maximum length: it is rejected and stored cut, the worker's memory stays bounded, and
//! later payments are made.

use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const ROWS: &str = r#"
[[provider]]
name = "acme"
url = "{url:acme}"
idempotency_retention_s = 86400

[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000
"#;

const MIB: usize = 1024 * 1024;
const HUGE: usize = 100 * MIB;
/// The received message, its frames while it is republished, and the cost of growing a buffer; measured: 247 MB.
const MEMORY_MAX_KB: u64 = 600 * 1_000;

/// Peak memory of a process, in kB. <https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>
fn peak_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_message_is_kept_in_bounded_memory() {
    let mut stand = tokio::task::spawn_blocking(Stand::start_with_broker).await.unwrap();
    stand.add_provider("acme", FakeOptions { limits: vec!["100/1s".parse().unwrap()], ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    let worker = stand.add_worker();
    let before_kb = peak_kb(stand.worker_pid(worker));

    let connection = lapin::Connection::connect(stand.broker_url(), lapin::ConnectionProperties::default());
    let channel = connection.await.unwrap().create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let good = br#"{"id":"behind","amount":1299,"currency":"EUR"}"#;
    for body in [vec![b'x'; HUGE].as_slice(), good] {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let publishing = channel.basic_publish("payments".into(), "acme".into(), options, body, Default::default());
        assert!(publishing.await.unwrap().await.unwrap().is_ack());
    }

    stand.await_count("SELECT count(*) FROM rejected_messages", 1);
    let kept = stand.column("SELECT reason || ' ' || body_bytes || ' ' || octet_length(body) FROM rejected_messages");
    assert_eq!(kept, [format!("too_large {HUGE} 65536")]);
    stand.await_finished(1, Duration::from_secs(60));
    assert_eq!(stand.states(), [("succeeded".to_owned(), 1)].into());
    stand.await_count("SELECT count(*) FROM rejected_messages", 1);

    let peak_kb = peak_kb(stand.worker_pid(worker));
    println!("peak memory: {before_kb} kB before, {peak_kb} kB after");
    assert!(peak_kb < MEMORY_MAX_KB, "{before_kb} kB before, {peak_kb} kB after");
    tokio::task::block_in_place(|| drop(stand));
}
