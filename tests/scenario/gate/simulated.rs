//! Predictions of `simulate`, compared with the gate on the same rows, response times and jobs.
//!
//! Both run in virtual time, where no machine is slow, so they are compared in both directions. A worker here acquires,
//! persists, sends and gets a response. The whole worker is compared with its prediction in `worker/simulation.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{AcquireResult, Gate};
use sluicegate::provider::simulated::{FakeOptions, OnLimit, StrictProvider};
use sluicegate::simulation::{JobArrivals, LatencyModel, Model, simulate, steady_rate};
use sluicegate::worker::quotas::quota_spec;
use sluicegate::worker::settings_sync::LoadedSettings;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{ask, open_gate};

/// Tolerance of a prediction: response times are drawn separately, and timers count whole milliseconds.
const OFF_MAX: f64 = 0.01;
const COMMIT: Duration = Duration::from_millis(1);
/// Transit to the provider, and back.
const WAY: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3_600);

struct Case {
    what: &'static str,
    processes: u32,
    jobs: u64,
    answer_ms: (u64, u64),
    row: ProviderRow,
}

/// A row that only its limits and its workers slow down.
fn row(limits: &[(i64, i64)]) -> ProviderRow {
    let limit = |&(max_requests, window_ms): &(i64, i64)| LimitRow {
        name: format!("within-{window_ms}"),
        max_requests,
        window_ms,
        ..LimitRow::default()
    };
    ProviderRow {
        name: "p".to_owned(),
        url: "https://p.test/charges".to_owned(),
        limits: limits.iter().map(limit).collect(),
        bucket_capacity: 32,
        leak_per_second: Some(1_000.0),
        max_wait_ms: 60_000,
        ..ProviderRow::default()
    }
}

fn cases() -> Vec<Case> {
    let case = |what, jobs, answer_ms, row| Case { what, processes: 1, jobs, answer_ms, row };
    let second = |max| row(&[(max, 1_000)]);
    vec![
        case("20/1s", 2_010, (20, 80), second(20)),
        case("15/1s and 24/3s", 996, (20, 80), row(&[(15, 1_000), (24, 3_000)])),
        case("15/1s, slow answers", 1_500, (200, 600), second(15)),
        case("10/1s, even pacing", 1_000, (20, 80), ProviderRow { pacing: "even".to_owned(), ..second(10) }),
        case("2 workers", 400, (450, 550), ProviderRow { workers: 2, ..second(50) }),
        Case { processes: 3, ..case("60/1s, 3 processes", 6_000, (20, 80), second(60)) },
    ]
}

fn model(case: &Case) -> Model {
    let provider = case.row.validate(1).unwrap();
    let providers = [(provider.name.clone(), Arc::new(provider.clone()))].into();
    let known = LoadedSettings { version: 1, providers, invalid_rows: Vec::new() };
    let (least_ms, most_ms) = case.answer_ms;
    Model {
        spec: quota_spec(&known, &provider.name).unwrap(),
        provider,
        weights: BTreeMap::new(),
        processes: case.processes,
        start_us: 1_800_000_000_000_000,
        latency: LatencyModel::Uniform { least_us: least_ms * 1_000, most_us: most_ms * 1_000 },
        transit: LatencyModel::Constant(WAY.as_micros() as u64),
        round_trip: Duration::ZERO,
        commit: COMMIT,
        commit_of_last: None,
        faults: 0.0,
        cold: true,
    }
}

/// Arrivals at the provider.
async fn happened(case: &Case, model: &Model) -> Vec<u64> {
    let limits = model.spec.limits.iter().map(|limit| Rate::new(limit.max_requests, limit.window).unwrap()).collect();
    let options = FakeOptions { limits, on_limit: OnLimit::Count, ..FakeOptions::default() };
    let lane = Arc::new(Lane {
        started: Instant::now(),
        left: AtomicU64::new(case.jobs),
        answer_ms: case.answer_ms,
        provider: Mutex::new(StrictProvider::new(options)),
        arrivals_us: Mutex::default(),
    });
    let (limiter, stop) = (Arc::new(EmbeddedLimiter::new()), CancellationToken::new());
    let mut workers = JoinSet::new();
    for process in 1..=u64::from(case.processes) {
        let gate = open_gate(limiter.clone(), model.spec.clone(), process, &stop);
        for _ in 0..model.provider.workers {
            workers.spawn(lane.clone().work(gate.clone()));
        }
    }
    workers.join_all().await;
    stop.cancel();
    let report = lane.provider.lock().unwrap().report();
    assert!(report.limits.iter().all(|limit| limit.breaches == 0), "{}: {report:?}", case.what);
    std::mem::take(&mut *lane.arrivals_us.lock().unwrap())
}

struct Lane {
    started: Instant,
    left: AtomicU64,
    answer_ms: (u64, u64),
    provider: Mutex<StrictProvider>,
    arrivals_us: Mutex<Vec<u64>>,
}

impl Lane {
    fn next(&self) -> Option<u64> {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok()
    }

    async fn work(self: Arc<Self>, gate: Gate) {
        while let Some(job) = self.next() {
            let AcquireResult::Granted(mut permit) = gate.acquire(ask(1, Instant::now() + HOUR)).await else {
                panic!("refused")
            };
            sleep(COMMIT).await;
            permit.mark_persisted();
            sleep_until(permit.start_at).await;
            let Ok(in_flight) = permit.begin() else { panic!("late") };
            sleep(WAY).await;
            let now_us = u64::try_from(self.started.elapsed().as_micros()).unwrap();
            let _counted = self.provider.lock().unwrap().record_arrival(now_us);
            self.arrivals_us.lock().unwrap().push(now_us);
            let (least_ms, most_ms) = self.answer_ms;
            let answer_ms = StdRng::seed_from_u64(job).random_range(least_ms..=most_ms);
            sleep(Duration::from_millis(answer_ms) + WAY).await;
            in_flight.release_used(Instant::now());
            sleep(COMMIT).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn simulation_matches_the_real_gate() {
    let mut off = Vec::new();
    for case in cases() {
        let model = model(&case);
        let tightest = model.provider.tightest_rate().unwrap();
        let figures = simulate(&model, &JobArrivals::burst(case.jobs as usize), &mut StdRng::seed_from_u64(1));
        assert!(figures.holds() && figures.unfinished == 0, "{}: {:?}", case.what, figures.windows);
        let seen = |arrivals_us: &[u64]| {
            let drain_us = arrivals_us[arrivals_us.len() - 1] - arrivals_us[0];
            (drain_us as f64 / 1e6, steady_rate(arrivals_us, tightest).unwrap())
        };
        let (real, simulated) = (seen(&happened(&case, &model).await), seen(&figures.arrivals_us));
        let (drain, rate) = (simulated.0 / real.0 - 1.0, simulated.1 / real.1 - 1.0);
        println!(
            "| {} | {} | {:.2} s | {:.2} s | {:+.2} % | {:.2}/s | {:.2}/s | {:+.2} % |",
            case.what,
            case.jobs,
            real.0,
            simulated.0,
            drain * 100.0,
            real.1,
            simulated.1,
            rate * 100.0,
        );
        if drain.abs() > OFF_MAX || rate.abs() > OFF_MAX {
            off.push(format!("{}: real {real:?}, simulated {simulated:?}", case.what));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}
