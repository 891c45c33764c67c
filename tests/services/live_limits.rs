//! G6 on real backends: a changed limit is in force in every worker within 2 s of its commit, and earlier requests
//! still count.
//!
//! A worker that was stopped during the change does not restore the old limit. The strict provider decides.

use std::time::{Duration, Instant};

use serde_json::json;
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const IN_FORCE_MAX_MS: i64 = 2_000;
/// Jobs that were delayed by the old limit return when its window is over, not before.
const PATIENCE: Duration = Duration::from_secs(120);
const ROWS: &str = "[[provider]]\nname = \"acme\"\nurl = \"{url:acme}\"\nidempotency_retention_s = 86400\n\
                    [[provider.limit]]\nname = \"per-minute\"\nmax_requests = 5\nwindow_ms = 60000\n";

/// Runs SQL in one transaction. Returns the new settings version, and the wall clock just before the commit.
fn commit(stand: &Stand, sql: &str) -> (u64, i64) {
    let committed = "SELECT version || ' ' || floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
                     FROM settings_version";
    let output = stand.psql().args(["-c", &format!("BEGIN; {sql}; {committed}; COMMIT")]).output();
    let output = output.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (version, at) = text.trim().split_once(' ').unwrap_or_else(|| panic!("{text}"));
    (version.parse().unwrap(), at.parse().unwrap())
}

/// Time at which a worker had loaded this version, from its log.
async fn loaded_at_ms(stand: &Stand, worker: usize, version: u64) -> i64 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let log = stand.worker_log(worker);
        let loads = log.lines().filter(|line| line.contains("settings loaded"));
        let found = loads.filter_map(|line| {
            let number = line.split("version=").nth(1)?.split_whitespace().next()?.parse::<u64>().ok()?;
            let at: jiff::Timestamp = line.split_whitespace().next()?.parse().ok()?;
            (number >= version).then_some(at.as_millisecond())
        });
        if let Some(at) = found.min() {
            return at;
        }
        assert!(Instant::now() < deadline, "worker {worker} has not loaded version {version}:\n{log}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn in_force_in_time(stand: &Stand, (version, committed_ms): (u64, i64)) {
    for worker in 0..2 {
        let took = loaded_at_ms(stand, worker, version).await - committed_ms;
        assert!(took <= IN_FORCE_MAX_MS, "worker {worker} had version {version} {took} ms after its commit");
    }
}

async fn until_charges(stand: &Stand, charges: u64) {
    let deadline = Instant::now() + PATIENCE;
    while stand.providers["acme"].report().charges < charges {
        assert!(Instant::now() < deadline, "{:?}\n{}", stand.states(), stand.worker_log(0));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(stand.providers["acme"].report().charges, charges);
}

/// Waits until the store has had a call with these settings. From then on, calls with older ones get no permit.
async fn until_asked_under(stand: &Stand, version: u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Field of the newest version: lua/tallies.lua.
        let state = stand.redis.command::<Vec<u8>>("HGET sluicegate:{acme} m");
        let newest = state[37..43].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        if newest >= version {
            return;
        }
        assert!(Instant::now() < deadline, "the newest call has version {newest}:\n{}", stand.worker_log(1));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn publish(stand: &Stand, jobs: std::ops::Range<u32>) {
    let message = |n| json!({ "id": format!("p{n}"), "amount": 100, "currency": "EUR" }).to_string();
    let messages: Vec<_> = jobs.map(|n| json!({ "key": "acme", "body": message(n) })).collect();
    assert_eq!(stand.publish(&messages), messages.len());
}

fn signal(stand: &Stand, worker: usize, name: &str) {
    let pid = stand.worker_pid(worker).to_string();
    assert!(std::process::Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_limit_applies_fleetwide_and_keeps_usage() {
    // The two seconds hold on a machine without other load.
    let mut stand = Stand::start_alone();
    let limits = vec!["12/1m".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    stand.add_worker();
    stand.add_worker();
    publish(&stand, 0..8);
    until_charges(&stand, 5).await;

    let change = commit(&stand, "UPDATE provider_limits SET max_requests = 6");
    in_force_in_time(&stand, change).await;
    until_charges(&stand, 6).await;

    // The command commits at some moment while it runs; the database records when.
    stand.sluicegate(&["limits", "set", "acme", "per-minute", "7/1m", "--because", "billing day"]);
    let version = stand.count("SELECT version FROM settings_version");
    let at = "SELECT floor(extract(epoch FROM at) * 1000)::bigint FROM settings_audit ORDER BY id DESC LIMIT 1";
    in_force_in_time(&stand, (version, i64::try_from(stand.count(at)).unwrap())).await;
    until_charges(&stand, 7).await;
    let history: serde_json::Value =
        serde_json::from_str(&stand.sluicegate(&["limits", "history", "acme", "--json"])).unwrap();
    assert_eq!(history["changes"][0]["what"], "limit per-minute: max_requests 6 → 7");
    assert_eq!(history["changes"][0]["because"], "billing day");
    assert_eq!(history["changes"][1]["program"], "psql");

    // Without the listeners' connections, polling keeps the promise.
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
    assert_eq!(stand.count(cut), 2);
    let change = commit(&stand, "UPDATE provider_limits SET max_requests = 8");
    in_force_in_time(&stand, change).await;
    until_charges(&stand, 8).await;

    // A worker is stopped while a limit is lowered. It resumes with jobs to consume and four slots of the old limit,
    // and must send no more. Mostly it has loaded the new limit before it asks. The contract's test
    // `stale_settings_acquire_and_release_nothing` shows that a call with the old limit gets no permit.
    let change = commit(&stand, "UPDATE provider_limits SET max_requests = 12");
    in_force_in_time(&stand, change).await;
    signal(&stand, 0, "STOP");
    let (version, _) = commit(&stand, "UPDATE provider_limits SET max_requests = 2");
    loaded_at_ms(&stand, 1, version).await;
    publish(&stand, 8..12);
    until_asked_under(&stand, version).await;
    signal(&stand, 0, "CONT");
    loaded_at_ms(&stand, 0, version).await;
    let peek: serde_json::Value =
        serde_json::from_str(&stand.sluicegate(&["limits", "peek", "acme", "--json"])).unwrap();
    let peek = &peek["limits"][0];
    assert_eq!((&peek["allows"], &peek["used"], &peek["remaining"]), (&json!("2/1m"), &json!(8), &json!(0)));
    let report = stand.providers["acme"].report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (8, 0, 0));
}
