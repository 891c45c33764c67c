//! Predictions of `simulate`, compared with the worker over HTTP at a provider that counts.
//!
//! The same rows run in virtual time and in real time. Every payment is made within every limit, and no backlog is
//! cleared sooner than simulated. A busy machine may take longer. `gate/simulated.rs` compares the gate in virtual
//! time, in both directions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::provider::http::OutboundPolicy;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use sluicegate::simulation::{JobArrivals, LatencyModel, Model, simulate, steady_rate};
use sluicegate::worker::quotas::quota_spec;
use sluicegate::worker::settings_sync::LoadedSettings;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::bench::{Bench, limit, name, row};
use super::lookups_over_http::Http;

/// Share by which a backlog may clear sooner than simulated: response times are drawn separately.
const SOONER_MAX: f64 = 0.05;

struct Case {
    what: &'static str,
    jobs: usize,
    latency_ms: (u64, u64),
    row: ProviderRow,
}

/// Figures of one run, simulated or real.
#[derive(Debug)]
struct Seen {
    /// Time from the first request to the last, by arrival at the provider.
    drain_s: f64,
    /// Rate over whole turns of the tightest limit, relative to L / (W + hold). `None`: fewer than two turns of the
    /// limit.
    utilisation: Option<f64>,
}

impl Seen {
    fn of(arrivals_us: &[u64], hold: Duration, tightest: Rate) -> Self {
        let possible = f64::from(tightest.max_requests()) / (tightest.window() + hold).as_secs_f64();
        let drain_us = arrivals_us[arrivals_us.len() - 1] - arrivals_us[0];
        let utilisation = steady_rate(arrivals_us, tightest).map(|rate| rate / possible);
        Self { drain_s: Duration::from_micros(drain_us).as_secs_f64(), utilisation }
    }
}

/// Slow enough for a busy machine, so that only limits, response times and workers decide.
fn cases() -> Vec<Case> {
    let acme = |limits: Vec<LimitRow>| ProviderRow {
        limits,
        timeout_ms: 2_000,
        send_budget_ms: 500,
        max_wait_ms: 5_000,
        ..row("acme")
    };
    let second = |max| limit(max, 1_000);
    let named = |name: &str, limit: LimitRow| LimitRow { name: name.to_owned(), ..limit };
    vec![
        Case { what: "20/1s", jobs: 210, latency_ms: (20, 80), row: acme(vec![second(20)]) },
        Case {
            what: "15/1s and 24/3s",
            jobs: 96,
            latency_ms: (20, 80),
            row: acme(vec![named("a", second(15)), named("b", limit(24, 3_000))]),
        },
        Case {
            what: "10/1s, requeue",
            jobs: 105,
            latency_ms: (20, 80),
            row: ProviderRow { mode: "requeue".to_owned(), ..acme(vec![second(10)]) },
        },
        Case { what: "15/1s, slow answers", jobs: 120, latency_ms: (200, 600), row: acme(vec![second(15)]) },
        Case {
            what: "10/1s, even pacing",
            jobs: 100,
            latency_ms: (20, 80),
            row: ProviderRow { pacing: "even".to_owned(), ..acme(vec![second(10)]) },
        },
        Case {
            what: "2 workers, answers of 0.5 s",
            jobs: 40,
            latency_ms: (450, 550),
            row: ProviderRow { workers: 2, max_wait_ms: 30_000, ..acme(vec![second(50)]) },
        },
    ]
}

async fn happened(case: &Case) -> Seen {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let rates = case.row.limits.iter().map(|limit| format!("{}/{}ms", limit.max_requests, limit.window_ms));
    let (least_ms, most_ms) = case.latency_ms;
    let fake = FakeProvider::new(FakeOptions {
        limits: rates.map(|rate| rate.parse().unwrap()).collect(),
        latency: (Duration::from_millis(least_ms), Duration::from_millis(most_ms)),
        ..FakeOptions::default()
    });
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    let _stop = stop.clone().drop_guard();
    tokio::spawn(fake.serve(listener, stop));
    let mut bench = Bench::prepared(&[ProviderRow { url, ..case.row.clone() }]).await;
    bench.providers = Some(Arc::new(Http(OutboundPolicy::parse(&["loopback".to_owned()]).unwrap())));
    for n in 0..case.jobs {
        bench.pay("acme", &format!("pay-{n}")).await;
    }
    bench.run();
    let succeeded = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    bench.until("all jobs have succeeded", async || bench.count(succeeded).await == case.jobs as i64).await;
    let report = handle.report();
    assert!(report.limits.iter().all(|limit| limit.breaches == 0), "{report:?}");
    let hold = Duration::from_secs_f64(report.answer_ms.unwrap().mean / 1_000.0);
    Seen::of(&handle.arrivals_us(), hold, tightest(case))
}

fn tightest(case: &Case) -> Rate {
    case.row.validate(1).unwrap().tightest_rate().unwrap()
}

fn predicted(case: &Case) -> Seen {
    let provider = case.row.validate(1).unwrap();
    let known = LoadedSettings {
        version: 1,
        providers: [(name("acme"), Arc::new(provider.clone()))].into(),
        invalid_rows: Vec::new(),
    };
    let (least_ms, most_ms) = case.latency_ms;
    let model = Model {
        spec: quota_spec(&known, &name("acme")).unwrap(),
        provider,
        weights: BTreeMap::new(),
        processes: 1,
        start_us: 1_800_000_000_000_000,
        latency: LatencyModel::Uniform { least_us: least_ms * 1_000, most_us: most_ms * 1_000 },
        transit: LatencyModel::Constant(500),
        round_trip: Duration::ZERO,
        commit: Duration::from_millis(1),
        commit_of_last: None,
        faults: 0.0,
        // Like the embedded limiter of a worker that has just started.
        cold: true,
    };
    let figures = simulate(&model, &JobArrivals::burst(case.jobs), &mut StdRng::seed_from_u64(1));
    assert!(figures.holds() && figures.unfinished == 0, "{:?}", figures.windows);
    let hold = Duration::from_secs_f64(figures.hold_ms / 1_000.0);
    Seen::of(&figures.arrivals_us, hold, tightest(case))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_runs_are_not_faster_than_simulated() {
    let cases = cases();
    let happened = futures_util::future::join_all(cases.iter().map(happened)).await;
    let mut sooner = Vec::new();
    for (case, real) in cases.iter().zip(happened) {
        let simulated = predicted(case);
        let ratio = |real: f64, simulated: f64| simulated / real - 1.0;
        let drain = ratio(real.drain_s, simulated.drain_s);
        let off = real.utilisation.zip(simulated.utilisation).map(|(real, simulated)| ratio(real, simulated));
        let percent = |share: Option<f64>| share.map_or("–".to_owned(), |share| format!("{:.1} %", share * 100.0));
        println!(
            "| {} | {} | {:.2} s | {:.2} s | {:+.1} % | {} | {} | {} |",
            case.what,
            case.jobs,
            real.drain_s,
            simulated.drain_s,
            drain * 100.0,
            percent(real.utilisation),
            percent(simulated.utilisation),
            percent(off),
        );
        if drain > SOONER_MAX {
            sooner.push(format!("{}: real {real:?}, simulated {simulated:?}", case.what));
        }
    }
    assert!(sooner.is_empty(), "{sooner:#?}");
}
