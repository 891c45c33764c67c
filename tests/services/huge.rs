//! A message of the broker's maximum length: it ends in `payments.invalid`, the worker's memory stays bounded, and
//! later payments are made.

use std::time::{Duration, Instant};

use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::AMQPValue;
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
    let mut stand = tokio::task::spawn_blocking(Stand::start).await.unwrap();
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

    let deadline = Instant::now() + Duration::from_secs(180);
    let kept = loop {
        let got = channel.basic_get("payments.invalid".into(), BasicGetOptions { no_ack: false }).await.unwrap();
        if let Some(kept) = got {
            break kept.delivery;
        }
        assert!(Instant::now() < deadline, "the message is not kept:\n{}", stand.worker_log(worker));
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(kept.data.len(), HUGE);
    let headers = kept.properties.headers().clone().unwrap_or_default();
    let reason = headers.inner().get("x-sluicegate-reason").cloned();
    assert_eq!(reason, Some(AMQPValue::LongString("too_large".into())));
    kept.ack(BasicAckOptions::default()).await.unwrap();
    stand.await_finished(1, Duration::from_secs(60));
    assert_eq!(stand.states(), [("succeeded".to_owned(), 1)].into());
    let again = channel.basic_get("payments.invalid".into(), BasicGetOptions { no_ack: true }).await.unwrap();
    assert!(again.is_none(), "the message is kept twice");

    let peak_kb = peak_kb(stand.worker_pid(worker));
    println!("peak memory: {before_kb} kB before, {peak_kb} kB after");
    assert!(peak_kb < MEMORY_MAX_KB, "{before_kb} kB before, {peak_kb} kB after");
    tokio::task::block_in_place(|| drop(stand));
}
