//! Utilisation of a saturated lane: it uses its whole limit, in virtual time.
//!
//! Cases: a slow ledger, right after the start, after a changed limit, after an outage of the store, slow and lost
//! responses. Each task runs one job after another: permit, a write to a serial ledger, start, arrival at the provider,
//! response. The provider's list of arrivals decides.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use sluicegate::domain::limit::Rate;
use sluicegate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::quota_spec::QuotaSpec;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{AcquireResult, Gate, GateContext};
use sluicegate::limiter::{LimitStatus, Limiter, LimiterError};
use sluicegate::provider::simulated::{FakeOptions, OnLimit, StrictProvider};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{NoAttempts, ask, spec};

const SECOND: Duration = Duration::from_secs(1);
/// Longest hold of the row in `spec`.
const HOLD_MAX: Duration = Duration::from_millis(2_500);

/// A store that can be unavailable and keeps its state.
#[derive(Default)]
struct Store {
    inner: EmbeddedLimiter,
    unavailable: AtomicBool,
}

impl Store {
    fn there(&self) -> Result<(), LimiterError> {
        if self.unavailable.load(Ordering::Relaxed) { Err(LimiterError::Unavailable("cut off".into())) } else { Ok(()) }
    }
}

#[async_trait]
impl Limiter for Store {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.there()?;
        self.inner.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.there()?;
        self.inner.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.inner.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.there().map(|()| None)
    }
}

/// A ledger that serves one write after another.
struct OneByOne {
    each: Duration,
    free_at: Mutex<Instant>,
}

impl OneByOne {
    async fn write(&self) {
        let written = {
            let mut free_at = self.free_at.lock().unwrap();
            *free_at = (*free_at).max(Instant::now()) + self.each;
            *free_at
        };
        sleep_until(written).await;
    }
}

#[derive(Clone, Copy)]
struct Plan {
    limit: u32,
    jitter: Option<Duration>,
    processes: u64,
    /// Concurrent jobs of each process.
    jobs: u64,
    /// Time of one ledger write.
    write: Duration,
    /// Shortest and longest response time.
    answer_ms: (u64, u64),
    /// Share of responses that take two seconds.
    slow: f64,
    /// Share of responses that never arrive.
    lost: f64,
}

const PLAN: Plan = Plan {
    limit: 100,
    jitter: None,
    processes: 2,
    jobs: 120,
    write: Duration::from_micros(200),
    answer_ms: (20, 80),
    slow: 0.0,
    lost: 0.0,
};

/// Several processes at full load.
struct Lane {
    plan: Plan,
    test_start: Instant,
    store: Arc<Store>,
    settings: watch::Sender<Arc<QuotaSpec>>,
    provider: Arc<Mutex<StrictProvider>>,
    arrivals: Arc<Mutex<Vec<Duration>>>,
    held: Arc<Mutex<Vec<Duration>>>,
    late: Arc<AtomicU64>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Lane {
    fn start(plan: Plan) -> Self {
        let spec = QuotaSpec { grant_jitter: plan.jitter, ..spec(&[("second", plan.limit, 1_000)]) };
        let rate = Rate::new(plan.limit, SECOND).unwrap();
        let options = FakeOptions { limits: vec![rate], on_limit: OnLimit::Count, ..FakeOptions::default() };
        let mut lane = Self {
            plan,
            test_start: Instant::now(),
            store: Arc::default(),
            settings: watch::Sender::new(Arc::new(spec)),
            provider: Arc::new(Mutex::new(StrictProvider::new(options))),
            arrivals: Arc::default(),
            held: Arc::default(),
            late: Arc::default(),
            stop: CancellationToken::new(),
            tasks: JoinSet::new(),
        };
        let ledger = Arc::new(OneByOne { each: plan.write, free_at: Mutex::new(Instant::now()) });
        for incarnation in 1..=plan.processes {
            let (gate, run) = Gate::new(GateContext {
                limiter: lane.store.clone(),
                recent: Arc::new(NoAttempts),
                spec: lane.settings.subscribe(),
                incarnation,
                stop: lane.stop.clone(),
                on_newer_version: Arc::new(|_| {}),
            });
            lane.tasks.spawn(run);
            for job in 0..plan.jobs {
                lane.start_jobs(gate.clone(), ledger.clone(), incarnation * 10_000 + job);
            }
        }
        lane
    }

    fn start_jobs(&mut self, gate: Gate, ledger: Arc<OneByOne>, seed: u64) {
        let (plan, test_start, stop) = (self.plan, self.test_start, self.stop.clone());
        let (provider, arrivals, held) = (self.provider.clone(), self.arrivals.clone(), self.held.clone());
        let late = self.late.clone();
        let mut random = StdRng::seed_from_u64(seed);
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                let AcquireResult::Granted(mut permit) = gate.acquire(ask(1, Instant::now() + 3_600 * SECOND)).await
                else {
                    break;
                };
                ledger.write().await;
                permit.mark_persisted();
                sleep_until(permit.start_at).await;
                let Ok(in_flight) = permit.begin() else {
                    late.fetch_add(1, Ordering::Relaxed);
                    // The job is delayed and comes again.
                    sleep(Duration::from_millis(250)).await;
                    continue;
                };
                let started = Instant::now();
                let _counted = provider.lock().unwrap().record_arrival(test_start.elapsed().as_micros() as u64);
                arrivals.lock().unwrap().push(test_start.elapsed());
                if random.random_bool(plan.lost) {
                    sleep_until(in_flight.answer_before).await;
                    in_flight.release_unknown();
                    held.lock().unwrap().push(HOLD_MAX);
                    continue;
                }
                let (least, most) = plan.answer_ms;
                let answer_ms = if random.random_bool(plan.slow) { 2_000 } else { random.random_range(least..=most) };
                sleep(Duration::from_millis(answer_ms)).await;
                in_flight.release_used(Instant::now());
                held.lock().unwrap().push(started.elapsed());
            }
        });
    }

    fn set_limit(&self, limit: u32) {
        self.settings.send_modify(|spec| {
            let mut changed = QuotaSpec::clone(spec);
            changed.version += 1;
            changed.limits[0].max_requests = limit;
            *spec = Arc::new(changed);
        });
    }

    fn turn(&self) -> f64 {
        let held = self.held.lock().unwrap();
        let mean = held.iter().map(Duration::as_secs_f64).sum::<f64>() / held.len() as f64;
        1.0 + self.plan.jitter.map_or(mean, |jitter| jitter.as_secs_f64())
    }

    fn calls(&self, from: Duration, until: Duration) -> Vec<Duration> {
        self.arrivals.lock().unwrap().iter().copied().filter(|at| (from..until).contains(at)).collect()
    }

    /// Rate relative to the possible rate of these slots. It is measured from the middle of the first whole turn after
    /// `from` to the middle of the last.
    fn utilisation(&self, slots: u32, from: Duration) -> f64 {
        let (calls, slots) = (self.calls(from, Duration::MAX), slots as usize);
        let turns = (calls.len() - slots / 2 - 1) / slots;
        assert!(turns >= 2, "{} calls after {from:?}", calls.len());
        let span = calls[slots / 2 + turns * slots] - calls[slots / 2];
        turns as f64 / span.as_secs_f64() * self.turn()
    }

    async fn runs(&self, seconds: f64) -> Duration {
        sleep(Duration::from_secs_f64(seconds)).await;
        self.test_start.elapsed()
    }

    fn breaches(&self) -> u64 {
        self.provider.lock().unwrap().report().limits[0].breaches
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A thousand slots are free at once. At 667 µs a write, the ledger records seventy-five requests in the 50 ms that
/// their permits have.
#[tokio::test(start_paused = true)]
async fn slow_ledger_delays_but_wastes_no_slots() {
    for (write_us, what) in [(667, "1,500 a second"), (250, "4,000 a second"), (20, "50,000 a second")] {
        let jitter = Some(Duration::from_millis(50));
        let write = Duration::from_micros(write_us);
        let lane = Lane::start(Plan { limit: 1_000, jitter, jobs: 500, write, ..PLAN });
        lane.runs(20.0).await;
        let (utilisation, late) = (lane.utilisation(1_000, SECOND), lane.late.load(Ordering::Relaxed));
        assert!(utilisation >= 0.97, "{what}: {utilisation:.4}, {late} late");
        assert!(utilisation <= 1.0, "{what}: {utilisation:.4}");
        let calls = lane.calls(Duration::ZERO, Duration::MAX).len() as u64;
        assert!(late * 200 <= calls, "{what}: {late} of {calls} permits started too late");
        assert_eq!(lane.breaches(), 0, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_slot_is_used_from_the_first_window() {
    let lane = Lane::start(PLAN);
    lane.runs(10.0).await;
    // After a cold start, the limiter waits until earlier requests have aged out. From the first call on, all slots are
    // used.
    let (first, turn) = (lane.calls(Duration::ZERO, Duration::MAX)[0], lane.turn());
    assert!(first <= SECOND, "{first:?} to the first call");
    for turns in 1..=5_u32 {
        let until = first + Duration::from_secs_f64((f64::from(turns) - 0.5) * turn);
        let calls = lane.calls(first, until).len();
        assert!(calls >= 99 * turns as usize, "{calls} in the first {turns} turns");
    }
    let utilisation = lane.utilisation(100, Duration::ZERO);
    assert!(utilisation >= 0.99, "{utilisation:.4}");
    assert_eq!(lane.breaches(), 0);
}

#[tokio::test(start_paused = true)]
async fn changed_limit_is_fully_used_immediately() {
    let lane = Lane::start(PLAN);
    let raised = lane.runs(5.3).await;
    lane.set_limit(200);
    let lowered = lane.runs(8.0).await;
    let utilisation = lane.utilisation(200, raised);
    assert!(utilisation >= 0.99, "raised: {utilisation:.4}");
    let first = lane.calls(raised, raised + Duration::from_secs_f64(lane.turn())).len();
    assert!(first >= 198, "raised: {first} calls in the first turn");
    lane.set_limit(100);
    lane.runs(8.0).await;
    // Requests under the higher limit count for one more window.
    let utilisation = lane.utilisation(100, lowered + SECOND + Duration::from_millis(100));
    assert!(utilisation >= 0.99, "lowered: {utilisation:.4}");
}

#[tokio::test(start_paused = true)]
async fn recovered_store_is_fully_used_immediately() {
    for outage_s in [0.2, 3.0, 20.0] {
        let lane = Lane::start(PLAN);
        lane.runs(5.0).await;
        lane.store.unavailable.store(true, Ordering::Relaxed);
        let back = lane.runs(outage_s).await;
        lane.store.unavailable.store(false, Ordering::Relaxed);
        lane.runs(10.0).await;
        let first = lane.calls(back, Duration::MAX)[0] - back;
        assert!(
            first <= Duration::from_millis(1_010),
            "unavailable for {outage_s} s: first call {first:?} after recovery"
        );
        let utilisation = lane.utilisation(100, back);
        assert!(utilisation >= 0.99, "unavailable for {outage_s} s: {utilisation:.4}");
        assert_eq!(lane.breaches(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn slow_or_lost_responses_do_not_stall_others() {
    for (slow, lost) in [(0.1, 0.0), (0.0, 0.1), (0.2, 0.2)] {
        let lane = Lane::start(Plan { slow, lost, jobs: 200, ..PLAN });
        let ended = lane.runs(60.0).await;
        // The slot of a lost response is held until its lease ends.
        let possible = 100.0 / lane.turn() * ended.as_secs_f64();
        let calls = lane.calls(Duration::ZERO, Duration::MAX).len() as f64;
        assert!(calls >= 0.97 * possible, "slow {slow}, lost {lost}: {calls} of {possible:.0}");
        assert_eq!(lane.breaches(), 0);
    }
}
