//! Truth of readouts while backends are killed under load: the fault stand, watched by the readout oracle.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::Row as _;

use crate::inject::raise;
use crate::plan::{Alarm, WriteTrouble};
use crate::provider::ProviderOptions;
use crate::readout_oracle::judge::{GRACE, judge, judged, table};
use crate::readout_oracle::prometheus::Prometheus;
use crate::readout_oracle::{Deployment, Published, Truth, WorkerTruth, is_redis_kept, watch};
use crate::stand::{Stand, StandOptions};
use crate::watch::Watch;
use crate::writes;

/// The fault stand as a source for the readout oracle.
pub struct Watched<'a> {
    stand: &'a Stand,
    watch: Watch,
    /// Messages that producers have sent so far, by provider.
    published: &'a (dyn Fn() -> BTreeMap<String, Published> + Sync),
}

impl<'a> Watched<'a> {
    pub fn new(stand: &'a Stand, published: &'a (dyn Fn() -> BTreeMap<String, Published> + Sync)) -> Self {
        Self { stand, watch: Watch::new(stand), published }
    }
}

impl Deployment for Watched<'_> {
    fn workers(&self) -> Vec<WorkerTruth> {
        self.stand.worker_truths()
    }

    fn ledger(&self) -> Option<BTreeMap<String, BTreeMap<String, u64>>> {
        let rows =
            self.watch.rows(self.stand, "SELECT provider, state, count(*) FROM jobs GROUP BY provider, state")?;
        let mut states: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for row in rows {
            let jobs = u64::try_from(row.get::<i64, _>(2)).unwrap();
            states.entry(row.get(0)).or_default().insert(row.get(1), jobs);
        }
        Some(states)
    }

    fn ready(&self) -> Option<BTreeMap<String, u64>> {
        let ready = |name: &String| {
            let ready = self.stand.runtime.block_on(self.stand.client.ready(&format!("payments.{name}")))?;
            Some((name.clone(), u64::from(ready)))
        };
        self.stand.providers.keys().map(ready).collect()
    }

    fn limiter_kept(&self) -> Option<bool> {
        is_redis_kept(&self.stand.redis.url())
    }

    fn published(&self) -> BTreeMap<String, Published> {
        (self.published)()
    }

    fn received(&self, provider: &str, from: Instant, to: Instant) -> u64 {
        self.stand.provider(provider).received_between(from, to)
    }

    fn throttled(&self, provider: &str, within: Option<Duration>) -> Option<u64> {
        let from = within.and_then(|within| Instant::now().checked_sub(within));
        Some(self.stand.provider(provider).throttled_since(from))
    }

    fn writes_are_refused(&self) -> bool {
        self.stand.writes_are_refused.load(Ordering::Relaxed)
    }

    fn publishers_are_blocked(&self) -> bool {
        self.stand.publishers_are_blocked.load(Ordering::Relaxed)
    }

    fn status(&self, ops_port: u16) -> Option<Value> {
        serde_json::from_str(&self.stand.asked(ops_port, &["status", "--json"])?).ok()
    }

    fn state_of(&self, job: &str) -> Option<String> {
        let rows = self.watch.rows(self.stand, &format!("SELECT state FROM jobs WHERE id = '{job}'"))?;
        rows.first().map(|row| row.get(0))
    }
}

fn bodies(lane: &str, jobs: u64) -> Vec<String> {
    let body =
        |number| json!({ "id": format!("{lane}-{number}"), "amount": 100 + number, "currency": "EUR" }).to_string();
    (0..jobs).map(body).collect()
}

/// `alpha` has a long log that fills and drains, and `bravo` has a backlog in the broker. The limit of `carol` admits
/// none of its fifty payments. They move between queue, delay queue and workers until `carol` is paused. `delta` accepts
/// half of what its row allows, and answers the rest with 429.
fn stand() -> Stand {
    let mut stand = Stand::start(StandOptions::default());
    let latency = (Duration::from_millis(20), Duration::from_millis(60));
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    for (name, limits) in [
        ("alpha", vec![(20, second), (600, minute)]),
        ("bravo", vec![(25, second)]),
        ("carol", vec![(0, second)]),
        ("delta", vec![(30, second)]),
    ] {
        let limits: Vec<(usize, Duration)> = limits;
        let options = ProviderOptions {
            deduplicates: true,
            can_be_asked: false,
            limits,
            latency,
            by_grant: false,
            accepts_per_s: (name == "delta").then_some(15),
        };
        stand.add_provider(name, options);
    }
    let row = |name: &str, limits: &[(&str, usize, usize)]| {
        let limit = |(limit, requests, window_ms): &(&str, usize, usize)| {
            format!("[[provider.limit]]\nname = \"{limit}\"\nmax_requests = {requests}\nwindow_ms = {window_ms}\n")
        };
        let limits: String = limits.iter().map(limit).collect();
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\ntimeout_ms = 2000\n\
             idempotency_retention_s = 86400\n{limits}\n"
        )
    };
    stand.apply(
        &(row("alpha", &[("second", 20, 1_000), ("minute", 600, 60_000)])
            + &row("bravo", &[("second", 25, 1_000)])
            + &row("carol", &[("closed", 0, 1_000)])
            + &row("delta", &[("second", 30, 1_000)])),
    );
    stand.add_worker();
    stand.add_worker();
    stand
}

#[test]
fn readouts_stay_correct_during_backend_outages() {
    let stand = stand();
    writes::prepare(&stand);
    let load = [("carol", 50), ("bravo", 2_500), ("delta", 2_500), ("alpha", 500)];
    let all = |(lane, jobs): (&str, u64)| (lane.to_owned(), Published { confirmed: jobs, sent: jobs, copies: 0 });
    let published = move || load.into_iter().map(all).collect();
    let prometheus = Prometheus::start();
    prometheus.scrape(&stand.worker_truths().iter().map(|worker| worker.ops_port).collect::<Vec<_>>());
    for (lane, jobs) in load {
        stand.runtime.block_on(stand.client.publish(lane, &bodies(lane, jobs)));
    }
    let watched = Watched::new(&stand, &published);
    let explained: Vec<String> = (0..10).map(|number| format!("bravo-{}", number * 60)).collect();
    let over = AtomicBool::new(false);
    let history = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch(&watched, &explained, Some(&prometheus), &over));
        let outages = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| outages(&stand)));
        over.store(true, Ordering::Relaxed);
        let history = watching.join().unwrap();
        outages.unwrap();
        history
    });
    report(&history.truths);
    let untruths = judge(&history);
    assert!(untruths.is_empty(), "{}", table(&untruths));
    for (rule, count) in judged(&history) {
        println!("  {rule:<50} {count:>4}");
        assert!(count > 0, "{rule}: no readout was judged");
    }
}

/// Phases: calm, `carol` paused and PostgreSQL killed, calm for longer than a past false readout lasted, RabbitMQ
/// killed, calm, a read-only and then a full database, calm, a broker that is short of disk, calm.
fn outages(stand: &Stand) {
    let quiet = |seconds: u64| std::thread::sleep(Duration::from_secs(seconds));
    quiet(18);
    // While the change spreads, the workers' settings differ. The oracle judges them only once they agree again.
    stand.sluicegate(&["provider", "pause", "carol"]);
    stand.postgres.kill();
    quiet(16);
    stand.postgres.restart();
    quiet(18);
    stand.rabbit.kill();
    quiet(20);
    stand.rabbit.restart();
    quiet(16);
    let long_enough = GRACE + Duration::from_secs(4);
    writes::refuse(stand, WriteTrouble::ReadOnly, long_enough);
    writes::refuse(stand, WriteTrouble::DiskFull, long_enough);
    quiet(12);
    raise(stand, Alarm::Disk, long_enough);
    quiet(12);
}

fn report(truths: &[Truth]) {
    for truth in truths {
        let up = (truth.ledger.is_some(), truth.ready.is_some(), truth.limiter_kept);
        let (from, to) = (truth.from.as_secs_f64(), truth.to.as_secs_f64());
        println!("{from:>7.3} to {to:>7.3} s  database, broker, limiter {up:?}, {:?}", truth.ledger);
    }
}
