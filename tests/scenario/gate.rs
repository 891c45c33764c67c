//! The gate and the limiter under saturation, judged by a provider with a clock of its own.
//!
//! A hundred tasks always want permits. Transit and processing take random times, so requests overtake each other; the
//! provider counts each at its arrival. G1: no window holds more than the limit. G4: starts reach 99 % of L / (W +
//! hold).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate::domain::limit::AppliesTo;
use sluicegate::domain::permit_protocol::{CallKind, CostByKind, LimiterCall, LimiterReply, PastUse, Subject};
use sluicegate::domain::provider::{ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{LimitSpec, Lookback, QuotaSpec};
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{AcquireRequest, AcquireResult, BlockReason, Gate, GateContext, RefusalScope};
use sluicegate::limiter::{LimitStatus, Limiter, LimiterError, RecentAttempts};
use sluicegate::provider::simulated::{FakeOptions, OnLimit, StrictProvider};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

mod altered;
mod concurrency;
mod egress;
mod order;
mod rebuild;
mod settings;
mod simulated;
mod utilisation;

/// A ledger without attempts.
struct NoAttempts;

#[async_trait]
impl RecentAttempts for NoAttempts {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

/// A limiter that loses some replies after the call has run.
struct Forgetful {
    inner: EmbeddedLimiter,
    losses: Mutex<StdRng>,
    loss_rate: f64,
    calls: std::sync::atomic::AtomicU64,
}

impl Forgetful {
    fn new(loss_rate: f64) -> Arc<Self> {
        let losses = Mutex::new(StdRng::seed_from_u64(7));
        Arc::new(Self { inner: EmbeddedLimiter::new(), losses, loss_rate, calls: Default::default() })
    }
}

#[async_trait]
impl Limiter for Forgetful {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.inner.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (out, back, lost) = {
            let mut random = self.losses.lock().unwrap();
            (random.random_range(0..3_000), random.random_range(0..3_000), random.random_bool(self.loss_rate))
        };
        sleep(Duration::from_micros(out)).await;
        let reply = self.inner.call(spec, call).await;
        sleep(Duration::from_micros(back)).await;
        if lost { Err(LimiterError::Unavailable("reply lost".into())) } else { reply }
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.inner.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}

fn spec(limits: &[(&str, u32, u64)]) -> QuotaSpec {
    let limit = |&(name, max_requests, window_ms): &(&str, u32, u64)| {
        LimitSpec::sliding_log(name, max_requests, Duration::from_millis(window_ms))
    };
    QuotaSpec {
        quota: ProviderName::new("p").unwrap(),
        version: 1,
        limits: limits.iter().map(limit).collect(),
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_millis(2_500),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn open_gate(limiter: Arc<dyn Limiter>, spec: QuotaSpec, incarnation: u64, stop: &CancellationToken) -> Gate {
    open_gate_over(Arc::new(NoAttempts), limiter, spec, incarnation, stop)
}

fn open_gate_over(
    recent: Arc<dyn RecentAttempts>,
    limiter: Arc<dyn Limiter>,
    spec: QuotaSpec,
    incarnation: u64,
    stop: &CancellationToken,
) -> Gate {
    let (spec, spec_rx) = watch::channel(Arc::new(spec));
    let (stop, newer): (_, Arc<dyn Fn(i64) + Send + Sync>) = (stop.clone(), Arc::new(|_| {}));
    let parts = GateContext { limiter, recent, spec: spec_rx, incarnation, stop, on_newer_version: newer };
    let (gate, task) = Gate::new(parts);
    tokio::spawn(async move {
        task.await;
        drop(spec);
    });
    gate
}

/// Figures of a saturated run.
struct Run {
    largest: Vec<u64>,
    breaches: u64,
    rate: f64,
    /// Mean time from start to response, in seconds.
    hold: f64,
    calls: u64,
}

/// A task's use of its permits.
#[derive(Clone, Copy)]
struct Faults {
    reply_loss: f64,
    /// Share of permits that are dropped before they begin.
    dropped: f64,
    /// Share of requests whose response never arrives.
    unanswered: f64,
}

async fn saturate(limits: &[(&str, u32, u64)], gates: u64, seconds: u64, faults: Faults) -> Run {
    let spec = spec(limits);
    let rates =
        spec.limits.iter().map(|limit| sluicegate::domain::limit::Rate::new(limit.max_requests, limit.window).unwrap());
    let options = FakeOptions { limits: rates.collect(), on_limit: OnLimit::Count, ..FakeOptions::default() };
    let provider = Arc::new(Mutex::new(StrictProvider::new(options)));
    let limiter = Forgetful::new(faults.reply_loss);
    let stop = CancellationToken::new();
    let holds = Arc::new(Mutex::new(Vec::new()));
    let begun = Instant::now();
    let end = begun + Duration::from_secs(seconds);
    let mut tasks = JoinSet::new();
    for incarnation in 1..=gates {
        let gate = open_gate(limiter.clone(), spec.clone(), incarnation, &stop);
        for task in 0..100 / gates {
            let (gate, provider, holds) = (gate.clone(), provider.clone(), holds.clone());
            let mut random = StdRng::seed_from_u64(incarnation * 1_000 + task);
            tasks.spawn(async move {
                while Instant::now() < end {
                    let permit = match gate.acquire(ask(1, end)).await {
                        AcquireResult::Granted(permit) => permit,
                        AcquireResult::Refused(refusal) => {
                            sleep(refusal.retry_after).await;
                            continue;
                        }
                        AcquireResult::NoWorkerSlot => panic!("none is needed"),
                    };
                    if random.random_bool(faults.dropped) {
                        continue;
                    }
                    sleep_until(permit.start_at).await;
                    let Ok(in_flight) = permit.begin() else { continue };
                    let start = Instant::now();
                    sleep(Duration::from_micros(random.random_range(500..60_000))).await;
                    let _ = provider.lock().unwrap().record_arrival(begun.elapsed().as_micros() as u64);
                    sleep(Duration::from_micros(random.random_range(1_000..40_000))).await;
                    if random.random_bool(faults.unanswered) {
                        in_flight.release_unknown();
                        continue;
                    }
                    in_flight.release_used(Instant::now());
                    holds.lock().unwrap().push(start.elapsed().as_secs_f64());
                }
            });
        }
    }
    while tasks.join_next().await.is_some() {}
    stop.cancel();
    let report = provider.lock().unwrap().report();
    let holds = holds.lock().unwrap();
    Run {
        largest: report.limits.iter().map(|limit| limit.largest).collect(),
        breaches: report.limits.iter().map(|limit| limit.breaches).sum(),
        rate: report.rate_per_second,
        hold: holds.iter().sum::<f64>() / holds.len() as f64,
        calls: limiter.calls.load(std::sync::atomic::Ordering::Relaxed),
    }
}

fn ask(cost: u32, wait_until: Instant) -> AcquireRequest {
    AcquireRequest::new(cost, CallKind::Charge, wait_until)
}

const NO_FAULTS: Faults = Faults { reply_loss: 0.0, dropped: 0.0, unanswered: 0.0 };

#[tokio::test(start_paused = true)]
async fn saturated_gate_uses_exactly_the_limit() {
    let run = saturate(&[("second", 100, 1_000)], 1, 60, NO_FAULTS).await;
    assert_eq!((run.breaches, run.largest[0]), (0, 100));
    let possible = 100.0 / (1.0 + run.hold);
    assert!(run.rate >= 0.99 * possible, "{:.2}/s of {possible:.2}/s", run.rate);
    assert!(run.calls < 150 * 60, "{} calls for 100 tasks in 60 s", run.calls);
}

#[tokio::test(start_paused = true)]
async fn several_processes_share_several_limits() {
    let run = saturate(&[("minute", 300, 60_000), ("second", 20, 1_000)], 4, 180, NO_FAULTS).await;
    assert_eq!(run.breaches, 0, "{:?}", run.largest);
    assert_eq!(run.largest, [300, 20]);
    assert!(run.rate >= 0.99 * 300.0 / 60.0, "{:.2}/s", run.rate);
}

#[tokio::test(start_paused = true)]
async fn lost_replies_and_permits_never_exceed_limits() {
    let faults = Faults { reply_loss: 0.05, dropped: 0.05, unanswered: 0.02 };
    let run = saturate(&[("second", 50, 1_000)], 3, 120, faults).await;
    assert_eq!(run.breaches, 0, "{:?}", run.largest);
    assert_eq!(run.largest[0], 50);
    assert!(run.rate > 20.0, "{:.2}/s", run.rate);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_names_its_exact_wait() {
    let stop = CancellationToken::new();
    let limiter: Arc<dyn Limiter> = Arc::new(EmbeddedLimiter::new());
    let gate = open_gate(limiter, spec(&[("second", 1, 1_000)]), 1, &stop);
    let patient = Instant::now() + Duration::from_secs(60);
    let AcquireResult::Granted(permit) = gate.acquire(ask(1, patient)).await else { panic!("refused") };
    sleep_until(permit.start_at).await;
    permit.begin().unwrap().release_used(Instant::now());
    sleep(Duration::from_millis(50)).await;
    let asked = Instant::now();
    let AcquireResult::Refused(refusal) = gate.acquire(ask(1, asked)).await else { panic!("granted") };
    assert!(refusal.exact, "{refusal:?}");
    assert_eq!(refusal.reason, BlockReason::Limit("second".into()));
    let promised = Instant::now() + refusal.retry_after;
    let AcquireResult::Granted(permit) = gate.acquire(ask(1, promised + Duration::from_millis(2))).await else {
        panic!("refused at the promised instant")
    };
    assert!(permit.start_at.duration_since(promised) <= Duration::from_millis(1), "later than promised");
    assert!(promised.duration_since(asked) >= Duration::from_millis(900), "{refusal:?}");
}

#[tokio::test(start_paused = true)]
async fn oversized_cost_is_rejected_immediately() {
    let stop = CancellationToken::new();
    let gate = open_gate(Arc::new(EmbeddedLimiter::new()), spec(&[("second", 5, 1_000)]), 1, &stop);
    let AcquireResult::Refused(refusal) = gate.acquire(ask(6, Instant::now() + Duration::from_secs(60))).await else {
        panic!("granted")
    };
    assert_eq!(refusal.reason, BlockReason::Oversized { limit: "second".to_owned(), max_cost: 5 });
}

/// A job that costs more than is free and does not wait is refused. It blocks no cheaper job.
#[tokio::test(start_paused = true)]
async fn withdrawn_costly_job_blocks_no_other() {
    let stop = CancellationToken::new();
    let gate = open_gate(Arc::new(EmbeddedLimiter::new()), spec(&[("ten", 10, 600_000)]), 1, &stop);
    let mut held = Vec::new();
    for _ in 0..6 {
        let AcquireResult::Granted(permit) = gate.acquire(ask(1, Instant::now() + Duration::from_secs(60))).await
        else {
            panic!("refused")
        };
        held.push(permit);
    }
    let soon = Instant::now() + Duration::from_millis(500);
    let (dear, cheap) = tokio::join!(gate.acquire(ask(5, soon)), gate.acquire(ask(1, soon)));
    let AcquireResult::Refused(refusal) = dear else { panic!("five of four") };
    assert_eq!((refusal.reason, refusal.scope), (BlockReason::Limit("ten".to_owned()), RefusalScope::Cost));
    assert!(matches!(cheap, AcquireResult::Granted(_)), "there are four");
}

/// Sixty of a hundred an hour are used. A job that needs fifty waits alone, whether it waits at the gate or leaves it, and
/// whether the limit counts all calls or charges alone. Only when nothing is free, all wait.
#[tokio::test(start_paused = true)]
async fn cheaper_jobs_pass_a_costly_one() {
    let hour = Duration::from_secs(3_600);
    for (applies_to, all) in [(AppliesTo::All, RefusalScope::All), (AppliesTo::Charge, RefusalScope::Charges)] {
        let limits = vec![LimitSpec { applies_to, ..LimitSpec::sliding_log("hundred", 100, hour) }];
        let stop = CancellationToken::new();
        let spec = QuotaSpec { limits, ..spec(&[]) };
        let gate = open_gate(Arc::new(EmbeddedLimiter::new()), spec, 1, &stop);
        let soon = || Instant::now() + Duration::from_secs(10);
        let use_one = async |cost| match gate.acquire(ask(cost, soon())).await {
            AcquireResult::Granted(permit) => permit.begin().unwrap().release_used(Instant::now()),
            AcquireResult::Refused(refusal) => panic!("{refusal:?}"),
            AcquireResult::NoWorkerSlot => panic!("no lane"),
        };
        use_one(60).await;
        let waiting = gate.clone();
        let patient = tokio::spawn(async move { waiting.acquire(ask(50, Instant::now() + hour * 2)).await });
        sleep(Duration::from_secs(1)).await;
        let AcquireResult::Refused(refusal) = gate.acquire(ask(50, soon())).await else { panic!("fifty of forty") };
        let by = (refusal.reason.clone(), refusal.scope, refusal.exact);
        assert_eq!(by, (BlockReason::Limit("hundred".to_owned()), RefusalScope::Cost, true));
        for _ in 0..30 {
            use_one(1).await;
            assert!(gate.is_open(), "{:?}", gate.view().borrow());
        }
        // One that costs less than what is left passes both, and one that costs more waits for as long as it must.
        let AcquireResult::Refused(refusal) = gate.acquire(ask(20, soon())).await else { panic!("twenty of ten") };
        assert_eq!(refusal.scope, RefusalScope::Cost);
        use_one(10).await;
        let AcquireResult::Refused(refusal) = gate.acquire(ask(1, soon())).await else { panic!("none is free") };
        assert_eq!(refusal.scope, all);
        assert!(!patient.is_finished());
        assert!(matches!(patient.await.unwrap(), AcquireResult::Granted(_)), "the hour is over");
    }
}

#[tokio::test(start_paused = true)]
async fn provider_pause_blocks_every_job() {
    let stop = CancellationToken::new();
    let gate = open_gate(Arc::new(EmbeddedLimiter::new()), spec(&[("second", 100, 1_000)]), 1, &stop);
    let patient = Instant::now() + Duration::from_secs(60);
    let AcquireResult::Granted(_first) = gate.acquire(ask(1, patient)).await else { panic!("refused") };
    let paused = Instant::now();
    gate.pause(Duration::from_secs(7), 0.5);
    sleep(Duration::from_millis(1)).await;
    let AcquireResult::Granted(next) = gate.acquire(ask(1, patient)).await else { panic!("refused") };
    assert!(next.start_at.duration_since(paused) >= Duration::from_secs(7));
}
