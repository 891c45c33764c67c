//! Lanes after a restart of PostgreSQL: they send at their limits again within seconds, and lose or double nothing.
//!
//! After a crash of the server, a pool has connections that are dead and not used yet. A new connection is refused while
//! the server is down. That says nothing about how many connections it allows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::oracle::judge;
use crate::provider::ProviderOptions;
use crate::records::Published;
use crate::stand::{Stand, StandOptions};
use crate::watch::Watch;

const LANES: [&str; 5] = ["alpha", "bravo", "carol", "delta", "echo"];
const PER_SECOND: u64 = 20;
const WORKERS: usize = 2;
/// Payments of each lane: enough for calm, outage and recovery, and a few seconds more.
const PAYMENTS: u64 = 700;
const CALM: Duration = Duration::from_secs(6);
/// How long the server is down.
const DOWN: Duration = Duration::from_secs(4);
/// From then on lanes must send at their limits: the server recovers, the leader is confirmed again, and each failed
/// write is repeated after at most five seconds.
const RECOVERED_AFTER: u64 = 7;
/// Seconds that are judged.
const JUDGED: u64 = 10;
/// Least part of the limit, on a machine that does other work as well.
const LEAST_PART: f64 = 0.8;

fn rows() -> String {
    let row = |name: &str| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\ntimeout_ms = 2000\n\
             idempotency_retention_s = 86400\n[[provider.limit]]\nname = \"second\"\nmax_requests = {PER_SECOND}\n\
             window_ms = 1000\n\n"
        )
    };
    LANES.iter().map(|name| row(name)).collect()
}

fn stand() -> Stand {
    let mut options = StandOptions::default();
    options.environment.push(("SLUICEGATE_LOG__LEVEL".to_owned(), "debug".to_owned()));
    let mut stand = Stand::start(options);
    for name in LANES {
        let limits = vec![(usize::try_from(PER_SECOND).unwrap(), Duration::from_secs(1))];
        let latency = (Duration::from_millis(20), Duration::from_millis(60));
        let deduplicates = true;
        stand.add_provider(
            name,
            ProviderOptions { deduplicates, can_be_asked: false, limits, latency, by_grant: false },
        );
    }
    stand.apply(&rows());
    for _ in 0..WORKERS {
        stand.add_worker();
    }
    stand
}

fn amount(number: u64) -> i64 {
    1_000 + 100 * i64::try_from(number % 500).unwrap()
}

fn id(lane: &str, number: u64) -> String {
    format!("{lane}-{number}")
}

fn publish(stand: &Stand) -> BTreeMap<String, Published> {
    let mut published = BTreeMap::new();
    for lane in LANES {
        let body = |number| json!({ "id": id(lane, number), "amount": amount(number), "currency": "EUR" }).to_string();
        let bodies: Vec<String> = (0..PAYMENTS).map(body).collect();
        stand.runtime.block_on(stand.client.publish(lane, &bodies));
        published.extend((0..PAYMENTS).map(|number| {
            let (provider, currency) = (lane.to_owned(), "EUR".to_owned());
            let payment = Published { provider, amount: amount(number), currency, account: None, confirmed: true };
            (id(lane, number), payment)
        }));
    }
    published
}

/// Requests that a lane's provider received in each second from then on.
fn per_second(stand: &Stand, lane: &str, from: Instant, seconds: u64) -> Vec<u64> {
    let at = |second: u64| from + Duration::from_secs(second);
    (0..seconds).map(|second| stand.provider(lane).received_between(at(second), at(second + 1))).collect()
}

#[test]
fn lanes_send_at_their_limits_soon_after_a_restart_of_the_database() {
    let stand = stand();
    let watch = Watch::new(&stand);
    let published = publish(&stand);
    std::thread::sleep(CALM);
    stand.postgres.kill();
    std::thread::sleep(DOWN);
    stand.postgres.restart();
    let restarted = Instant::now();
    let seconds = RECOVERED_AFTER + JUDGED;
    std::thread::sleep(Duration::from_secs(seconds + 1));
    let sent = LANES.map(|lane| (lane, per_second(&stand, lane, restarted, seconds)));
    for (lane, sent) in &sent {
        println!("{lane}: {sent:?}");
    }
    if let Some(keep) = std::env::var_os("KEEP_LOGS") {
        for (path, text) in stand.logs() {
            std::fs::write(std::path::Path::new(&keep).join(path.file_name().unwrap()), text).unwrap();
        }
    }
    let jobs = published.len();
    watch.await_drained(&stand, jobs, Duration::from_secs(180)).unwrap();
    let records = watch.records(&stand, published);
    assert!(judge(&records).is_empty(), "{:?}", judge(&records));
    let skipped = usize::try_from(RECOVERED_AFTER).unwrap();
    for (lane, sent) in sent {
        let sent: u64 = sent[skipped..].iter().sum();
        let least = rounded(LEAST_PART * float(PER_SECOND * JUDGED));
        assert!(sent >= least, "{lane} sent {sent} of {} within {JUDGED} s", PER_SECOND * JUDGED);
    }
}

#[allow(clippy::cast_precision_loss, reason = "a count of requests")]
fn float(count: u64) -> f64 {
    count as f64
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
fn rounded(count: f64) -> u64 {
    count as u64
}
