//! Billing day: two providers, two workers, and thousands of payments from a pika client, with duplicates and invalid
//! messages. A second test kills a worker and each backend meanwhile.
//!
//! The strict providers and the broker decide, not our ledger. Every job has exactly one charge and one outcome event.
//! Every invalid message is in the ledger with its reason. No window of a provider holds more than its limit.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::readout_oracle::finish_times::{FinishTime, finish_times};
use crate::readout_oracle::judge::{OF_FAULTS, judged, table};
use crate::readout_oracle::prometheus::Prometheus;
use crate::readout_oracle::{self, History, Published, watch};
use crate::readouts::Watched;
use crate::stand::Stand;

const ROWS: &str = r#"
[[provider]]
name = "acme"
url = "{url:acme}"
mode = "blocking"
idempotency_retention_s = 86400
timeout_ms = 2000

[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000

[[provider]]
name = "bolt"
url = "{url:bolt}"
mode = "requeue"
idempotency_retention_s = 86400
timeout_ms = 2000

[[provider.limit]]
name = "per-second"
max_requests = 50
window_ms = 1000

[[provider.limit]]
name = "per-half-minute"
max_requests = 300
window_ms = 30000
"#;

/// The published messages.
struct Load {
    /// Distinct jobs per provider.
    acme: u64,
    bolt: u64,
    twice: u64,
    malformed: u64,
}

impl Load {
    fn jobs(&self) -> u64 {
        self.acme + self.bolt
    }

    fn messages(&self) -> Vec<Value> {
        let job = |provider: &str, number: u64| {
            let body = json!({ "id": format!("{provider}-{number}"), "amount": 100 + number, "currency": "EUR",
                               "reference": format!("invoice {number}"), "payload": { "n": number } });
            json!({ "key": provider, "body": body.to_string() })
        };
        let jobs = (0..self.acme).map(|n| job("acme", n)).chain((0..self.bolt).map(|n| job("bolt", n)));
        let mut messages: Vec<Value> = jobs.collect();
        let again: Vec<Value> = (0..self.twice).map(|n| messages[usize::try_from(n * 7).unwrap()].clone()).collect();
        messages.extend(again);
        // Spread between the valid ones.
        for number in 0..self.malformed {
            let place = usize::try_from(number * 11).unwrap() % messages.len();
            messages.insert(place, malformed(number));
        }
        messages
    }
}

/// Invalid messages, each with the expected reason.
const MALFORMED: [(&str, &str); 12] = [
    ("", "malformed"),
    ("{", "malformed"),
    ("[]", "malformed"),
    (r#"{"id":"m-1","amount":1,"amount":2,"currency":"EUR"}"#, "malformed"),
    (r#"{"id":"m 1","amount":1,"currency":"EUR"}"#, "bad_id"),
    (r#"{"amount":1,"currency":"EUR"}"#, "bad_id"),
    (r#"{"id":"m-1","amount":0,"currency":"EUR"}"#, "bad_amount"),
    (r#"{"id":"m-1","amount":10.5,"currency":"EUR"}"#, "bad_amount"),
    (r#"{"id":"m-1","amount":1,"currency":"EURO"}"#, "bad_currency"),
    (r#"{"id":"m-1","amount":1,"currency":"EUR","colour":"red"}"#, "unknown_field"),
    (r#"{"id":"m-1","amount":1,"currency":"EUR","provider":"bolt"}"#, "wrong_provider"),
    (r#"{"id":"m-1","amount":1,"currency":"EUR","payload":{"card":"4242 4242 4242 4242"}}"#, "card_number"),
];

fn malformed(number: u64) -> Value {
    match MALFORMED.get(usize::try_from(number).unwrap() % (MALFORMED.len() + 1)) {
        Some((body, _)) => json!({ "key": "acme", "body": body }),
        None => json!({ "key": "acme", "hex": "fffe7b7d" }),
    }
}

fn reason(number: u64) -> &'static str {
    MALFORMED.get(usize::try_from(number).unwrap() % (MALFORMED.len() + 1)).map_or("malformed", |(_, reason)| reason)
}

async fn opened(mut stand: Stand) -> Stand {
    let latency = (Duration::from_millis(20), Duration::from_millis(80));
    let limits = |limits: &[&str]| limits.iter().map(|limit| limit.parse().unwrap()).collect();
    stand.add_provider("acme", FakeOptions { limits: limits(&["100/1s"]), latency, ..FakeOptions::default() }).await;
    let options = FakeOptions { limits: limits(&["50/1s", "300/30s"]), latency, ..FakeOptions::default() };
    stand.add_provider("bolt", options).await;
    stand.apply(ROWS);
    stand.bind("test.outcomes", "payments.outcomes");
    stand.add_worker();
    stand.add_worker();
    stand
}

/// Checks that hold with and without faults. Events are delivered at least once, without faults exactly once.
fn judge(stand: &Stand, load: &Load, exactly_once: bool) {
    let states = stand.states();
    assert_eq!(states, BTreeMap::from([("succeeded".to_owned(), load.jobs())]));
    for (name, fake) in &stand.providers {
        let report = fake.report();
        println!("{name}: {}", serde_json::to_string(&report).unwrap());
        assert_eq!((report.doubles, report.several_keys, report.refused_429), (0, 0, 0), "{name}");
        for limit in &report.limits {
            assert_eq!(limit.breaches, 0, "{name} {}: {} at most", limit.limit, limit.largest);
        }
        let jobs = if *name == "acme" { load.acme } else { load.bolt };
        let effects = fake.effects();
        let ids: BTreeSet<String> = effects.iter().map(|effect| effect.id.clone()).collect();
        assert_eq!((effects.len() as u64, ids.len() as u64, report.charges), (jobs, jobs, jobs), "{name}");
        for effect in effects {
            let number: i64 = effect.id.rsplit('-').next().unwrap().parse().unwrap();
            assert_eq!((effect.amount, effect.currency.as_str(), effect.count), (100 + number, "EUR", 1));
            assert_eq!(effect.key.as_deref(), Some(effect.id.as_str()));
        }
    }
    stand.await_count("SELECT count(*) FROM rejected_messages WHERE announced_at IS NULL", 0);
    let (rejected, events): (Vec<_>, Vec<_>) =
        stand.drain("test.outcomes").into_iter().partition(|event| event.key.ends_with(".rejected"));
    assert!(rejected.len() as u64 >= load.malformed, "each rejection has an event: {}", rejected.len());
    let ids: BTreeSet<&str> = events.iter().map(|event| event.id.as_deref().unwrap()).collect();
    assert_eq!(ids.len() as u64, load.jobs(), "each payment has one event");
    if exactly_once {
        assert_eq!(events.len() as u64, load.jobs());
    }
    for event in &events {
        let body: Value = serde_json::from_str(&event.body).unwrap();
        assert_eq!((body["event_id"].as_str(), body["state"].as_str()), (event.id.as_deref(), Some("succeeded")));
        assert_eq!(event.key, format!("{}.succeeded", body["provider"].as_str().unwrap()));
    }
    let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
    for reason in stand.column("SELECT reason FROM rejected_messages") {
        *reasons.entry(reason).or_default() += 1;
    }
    let mut expected: BTreeMap<String, u64> = BTreeMap::new();
    for number in 0..load.malformed {
        *expected.entry(reason(number).to_owned()).or_default() += 1;
    }
    if exactly_once {
        assert_eq!(reasons, expected);
    } else {
        // A message may be handled twice if its acknowledgement is lost, but none may be missing.
        assert!(expected.iter().all(|(reason, count)| reasons.get(reason) >= Some(count)), "{reasons:?}");
    }
}

/// Payments that are sent while a lane starts.
const STARTING: u64 = 400;

/// Publishes all messages and waits until all jobs have finished, while the readout oracle watches.
fn watched(stand: &Stand, load: &Load) -> History {
    let messages = load.messages();
    // Paused lanes: on a busy machine, publishing takes as long as the payments, and the oracle would look only once
    // all are made.
    let all = |action: &str| {
        for provider in ["acme", "bolt"] {
            stand.sluicegate(&["provider", action, provider]);
        }
    };
    all("pause");
    assert_eq!(stand.publish(&messages), messages.len());
    // Invalid messages are also in the queue of `acme` until they are consumed.
    let of = |jobs: u64, copies: u64| Published { confirmed: jobs, sent: jobs, copies };
    let published = BTreeMap::from([
        ("acme".to_owned(), of(load.acme, load.twice + load.malformed)),
        ("bolt".to_owned(), of(load.bolt, load.twice)),
    ]);
    let (watched, over) = (Watched { stand, published }, AtomicBool::new(false));
    let prometheus = Prometheus::start();
    prometheus.scrape(&stand.running().into_iter().map(|worker| stand.ops_port(worker)).collect::<Vec<_>>());
    let explained = ["acme-2100".to_owned(), "bolt-330".to_owned()];
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch(&watched, &explained, Some(&prometheus), &over));
        all("resume");
        let waited = catch_unwind(AssertUnwindSafe(|| stand.await_finished(load.jobs(), Duration::from_secs(240))));
        over.store(true, Ordering::Relaxed);
        let history = watching.join().unwrap();
        waited.unwrap();
        history
    })
}

fn judge_readouts(history: &History, load: &Load) {
    let untruths = readout_oracle::judge::judge(history);
    assert!(untruths.is_empty(), "{}", table(&untruths));
    for (rule, count) in judged(history) {
        println!("  {rule:<50} {count:>4}");
        assert!(count > 0 || OF_FAULTS.contains(&rule), "{rule}: no readout was judged");
    }
    let finish_times = finish_times(history);
    // The other provider's second limit releases its slots all at once, and the estimate spreads them over the window.
    // In its first seconds, a lane sends jobs at once that it later sends at its pace.
    let steady = |time: &FinishTime| time.provider == "acme" && time.open <= load.acme - STARTING;
    let finish_times: Vec<FinishTime> = finish_times.into_iter().filter(steady).collect();
    // On a slow machine, a look takes longer than the second between two looks.
    assert!(finish_times.len() >= 3, "{finish_times:?}");
    let wrong: Vec<&FinishTime> = finish_times.iter().filter(|finish_time| !finish_time.is_right()).collect();
    assert!(wrong.is_empty(), "{} of {} finish times: {wrong:?}", wrong.len(), finish_times.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_paid_once_within_every_limit() {
    let mut stand = opened(Stand::start_alone()).await;
    let load = Load { acme: 2_200, bolt: 340, twice: 100, malformed: 50 };
    let history = tokio::task::block_in_place(|| watched(&stand, &load));
    judge(&stand, &load, true);
    judge_readouts(&history, &load);

    let report = stand.providers["acme"].report();
    let hold = report.answer_ms.unwrap().mean / 1_000.0;
    let possible = 100.0 / (1.0 + hold);
    // Whole turns of the limit, from the first turn with all slots in use until the last jobs run out.
    let arrivals = stand.providers["acme"].arrivals_us();
    let (from, to) = (500, (arrivals.len() - 150) / 100 * 100);
    let rate = (to - from) as f64 * 1e6 / (arrivals[to] - arrivals[from]) as f64;
    // Printed only: a busy machine is slower, which breaks no guarantee.
    println!("acme: {rate:.2}/s of {possible:.2}/s, {:.1} %", 100.0 * rate / possible);

    for worker in 0..2 {
        let log = stand.stop_worker(worker);
        assert!(log.contains("all requests finished, unsent jobs returned to the backlog"), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_and_backend_kills_lose_nothing() {
    let mut stand = opened(Stand::start_with_broker()).await;
    let load = Load { acme: 1_800, bolt: 300, twice: 60, malformed: 26 };
    let messages = load.messages();
    assert_eq!(stand.publish(&messages), messages.len());

    stand.await_progress(300);
    stand.kill_worker(0);
    stand.await_progress(500);
    stand.start_worker(0);
    stand.await_progress(700);
    stand.redis.kill();
    stand.redis.restart();
    stand.await_progress(900);
    tokio::task::block_in_place(|| {
        stand.rabbit.own().kill();
        stand.rabbit.own().restart();
    });
    stand.await_progress(1_100);
    stand.postgres.kill();
    stand.postgres.restart();

    stand.await_finished(load.jobs(), Duration::from_secs(300));
    judge(&stand, &load, false);
    for worker in 0..2 {
        let log = stand.stop_worker(worker);
        assert!(log.contains("all requests finished, unsent jobs returned to the backlog"), "{log}");
    }
}
