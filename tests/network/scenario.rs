//! The one run that all tests judge: payments at three providers, and a network that fails meanwhile.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::catch_unwind;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::faults::{draw, happen};
use crate::oracle::{Violation, judge};
use crate::provider::ProviderOptions;
use crate::records::{Published, Records};
use crate::stand::{Stand, await_that};
use crate::watch::Watch;

/// A provider whose outage affects a worker that keeps running.
pub const ALIVE: &str = "alive";
/// A provider whose outage affects a worker that is killed meanwhile.
pub const KILLED: &str = "killed";
/// A provider that deduplicates nothing and answers look-ups.
const ASKED: &str = "asked";

const LIMIT: usize = 100;
const WINDOW: Duration = Duration::from_secs(1);
/// Longer than `timeout_ms`, so that TCP's next retransmission comes when the slots are free again.
const OUTAGE: Duration = Duration::from_secs(7);
/// Until the retransmission 12.6 s after the first transmission is over.
const AFTERWARDS: Duration = Duration::from_secs(8);
/// A killed worker's jobs return after its silence, their responses' time and two delays.
const PATIENCE: Duration = Duration::from_secs(180);

pub struct RunResult {
    records: Records,
    violations: Vec<Violation>,
    /// Packets that the outage dropped.
    dropped: u64,
    drained: Result<(), String>,
    text: String,
}

impl RunResult {
    /// Checks that no window of the provider holds more than the limit.
    pub fn assert_exact(&self, provider: &str) {
        println!("{}", self.text);
        // The number depends on the machine's speed: from 70 on a busy one to some hundreds.
        assert!(self.dropped > 0, "the outage dropped no packet");
        let record = &self.records.providers[provider];
        let window_us = u64::try_from(WINDOW.as_micros()).unwrap();
        let (largest, breaches) = (record.largest_window(window_us), record.broken_windows(LIMIT, window_us));
        assert_eq!(breaches, 0, "{provider}: {largest} in a window of {LIMIT}");
    }

    /// Checks that no oracle of the fault tests finds a violation.
    pub fn assert_faultless(&self) {
        println!("{}", self.text);
        self.drained.as_ref().unwrap_or_else(|left| panic!("{left}"));
        let found: Vec<String> =
            self.violations.iter().map(|violation| format!("{}: {}", violation.oracle, violation.what)).collect();
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}

/// Result of the run; the first caller runs it.
pub fn result() -> &'static RunResult {
    static RESULT: OnceLock<Option<RunResult>> = OnceLock::new();
    RESULT.get_or_init(|| catch_unwind(run).ok()).as_ref().expect("the run did not end normally")
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is not a number")))
}

fn rows() -> String {
    let row = |name: &str, requests: usize, more: &str| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\ntimeout_ms = 2000\nworkers = 100\n\
             backoff_max_ms = 4000\n{more}\n[[provider.limit]]\nname = \"all\"\nmax_requests = {requests}\n\
             window_ms = 1000\n\n"
        )
    };
    let keeps = "idempotency_retention_s = 86400";
    let lookup = "[provider.lookup]\nurl = \"{url:asked}?id=${job:id}\"\ngive_up_after_s = 10\n\
                  amount = \"/amount\"\ncurrency = \"/currency\"";
    row(ALIVE, LIMIT, keeps) + &row(KILLED, LIMIT, keeps) + &row(ASKED, 20, lookup)
}

fn stand() -> Stand {
    let mut stand = Stand::start();
    for (name, deduplicates, requests) in [(ALIVE, true, LIMIT), (KILLED, true, LIMIT), (ASKED, false, 20)] {
        let latency = (Duration::from_millis(5), Duration::from_millis(20));
        let (limits, can_be_asked) = (vec![(requests, WINDOW)], !deduplicates);
        stand.add_provider(
            name,
            ProviderOptions { deduplicates, can_be_asked, limits, latency, by_grant: false, accepts_per_s: None },
        );
    }
    stand.apply(&rows());
    for worker in [0, 1] {
        stand.start_worker(worker);
    }
    for worker in [0, 1] {
        stand.await_ready(worker);
    }
    stand
}

fn publish(stand: &Stand, provider: &str, count: usize) -> BTreeMap<String, Published> {
    let (mut published, mut bodies) = (BTreeMap::new(), Vec::new());
    for number in 0..count {
        let (id, amount) = (format!("{provider}-{number}"), 100 + i64::try_from(number).unwrap());
        bodies.push(json!({ "id": id, "amount": amount, "currency": "EUR" }).to_string());
        let (provider, currency) = (provider.to_owned(), "EUR".to_owned());
        published.insert(id, Published { provider, amount, currency, account: None, confirmed: true });
    }
    stand.runtime.block_on(stand.client.publish(provider, &bodies));
    published
}

fn run() -> RunResult {
    let (started, stand) = (Instant::now(), stand());
    let mut text = String::new();
    let mut note = |what: String| {
        let line = format!("{:>7.3} s  {what}", started.elapsed().as_secs_f64());
        println!("{line}");
        let _ = writeln!(text, "{line}");
    };
    let mut published = publish(&stand, ALIVE, 1_600);
    published.extend(publish(&stand, KILLED, 1_600));
    published.extend(publish(&stand, ASKED, 300));
    let calls = |provider: &str| stand.provider(provider).record().calls.len();
    await_that("payments are made", Duration::from_secs(60), || calls(ALIVE) > LIMIT && calls(KILLED) > LIMIT);
    note("payments are made".to_owned());

    let here = &stand.network.here.address;
    stand.network.part(&stand.address(0), here, Some(stand.provider(ALIVE).port));
    stand.network.part(&stand.address(1), here, Some(stand.provider(KILLED).port));
    let outage = Instant::now();
    std::thread::sleep(Duration::from_millis(1_500));
    stand.kill_worker(1);
    note("the second worker is killed".to_owned());
    std::thread::sleep(OUTAGE.saturating_sub(outage.elapsed()));
    let dropped = stand.network.heal();
    note(format!("packets pass again; {dropped} were dropped"));
    std::thread::sleep(AFTERWARDS);

    stand.start_worker(1);
    let faults = draw(setting("NETWORK_SEED", 1), usize::try_from(setting("NETWORK_FAULTS", 5)).unwrap());
    for (fault, lasts) in faults {
        note(format!("{fault:?} for {lasts:?}"));
        happen(&stand, fault, lasts);
    }
    note("all faults are over".to_owned());
    let watch = Watch::new(&stand);
    let drained = watch.await_drained(&stand, published.len(), PATIENCE);
    note(if drained.is_ok() { "drained".to_owned() } else { "not drained".to_owned() });
    let records = watch.records(&stand, published);
    for (name, record) in &records.providers {
        for (allowed, window_us) in &record.limits {
            let (largest, broken) = (record.largest_window(*window_us), record.broken_windows(*allowed, *window_us));
            let look_ups = record.calls.iter().filter(|call| call.is_look_up).count();
            let calls = record.calls.len();
            note(format!(
                "{name}: {calls} requests, {look_ups} of them look-ups; at most {largest} of {allowed} in a window, \
                 {broken} windows broken"
            ));
        }
    }
    note(format!("longest transit of a request: {} ms; assumed are 2500 ms", records.longest_way_ms()));
    let violations = judge(&records);
    RunResult { records, violations, dropped, drained, text }
}
