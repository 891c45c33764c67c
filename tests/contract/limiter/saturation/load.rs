//! Three processes at full load on one quota, a ledger that knows their requests, and the provider that judges them.
//!
//! To the limiter, a process is a set of connections, a gate, and tasks that always request permits.

use std::sync::Mutex;

use async_trait::async_trait;
use rand::Rng as _;
use sluicegate::domain::limit::{Algorithm, Rate};
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::limiter::RecentAttempts;
use sluicegate::limiter::gate::{AcquireResult, BlockReason, Gate, GateContext, GateView};
use sluicegate::provider::simulated::{FakeOptions, FakeProviderReport, OnLimit, StrictProvider};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::super::*;

const PROCESSES: usize = 3;
const TASKS: usize = 30;
pub const LIMIT: u32 = 50;
const WINDOW: Duration = Duration::from_millis(500);
/// Longer than any fault with the cold start after it, shorter than a clock step.
const FLOWS_WITHIN: Duration = Duration::from_secs(20);

/// The quota's spec in all processes.
pub fn quota() -> QuotaSpec {
    quota_of(LIMIT)
}

/// The same with another limit.
pub fn quota_of(max_requests: u32) -> QuotaSpec {
    let limit = LimitSpec::sliding_log("half-second", max_requests, WINDOW);
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: vec![limit],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(1),
        send_budget: Duration::from_millis(200),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

/// One process's gate, and the future that runs it.
pub fn gate(
    limiter: Arc<dyn Limiter>,
    recent: &Arc<Attempts>,
    spec: QuotaSpec,
    stop: &CancellationToken,
) -> (Gate, impl Future<Output = ()> + Send + use<>) {
    let (spec_tx, spec) = watch::channel(Arc::new(spec));
    let incarnation = rand::random::<u64>() >> 1;
    let (recent, stop, newer) = (recent.clone(), stop.clone(), Arc::new(|_| {}));
    let (gate, run) = Gate::new(GateContext { limiter, recent, spec, incarnation, stop, on_newer_version: newer });
    let run = async move {
        run.await;
        drop(spec_tx);
    };
    (gate, run)
}

/// The ledger's attempts, as a rebuild needs them: the number in flight, and when the others ended.
#[derive(Default)]
pub struct Attempts(Mutex<(u32, Vec<Instant>)>);

impl Attempts {
    pub fn begin(&self) {
        self.0.lock().unwrap().0 += 1;
    }

    fn take_back(&self) {
        self.0.lock().unwrap().0 -= 1;
    }

    pub fn end(&self) {
        let mut attempts = self.0.lock().unwrap();
        attempts.0 -= 1;
        attempts.1.push(Instant::now());
    }
}

#[async_trait]
impl RecentAttempts for Attempts {
    async fn recent_uses(&self, _: &ProviderName, lookback: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        let (sending, ended) = &*self.0.lock().unwrap();
        let ages = ended.iter().map(Instant::elapsed).filter(|age| *age < lookback.count_within);
        Ok((ages.map(|age| PastUse { age, cost: CostByKind::charges(1) }).collect(), CostByKind::charges(*sending)))
    }
}

/// A provider that counts every request on arrival, by its own clock.
struct Provider {
    strict: Mutex<StrictProvider>,
    begun: Instant,
    requests: watch::Sender<u64>,
}

impl Provider {
    fn arrive(&self) {
        let mut strict = self.strict.lock().unwrap();
        // The instant is read under the lock, so that requests are recorded in the order of their instants.
        let at_us = u64::try_from(self.begun.elapsed().as_micros()).unwrap();
        let arrival = strict.record_arrival(at_us);
        let _counted = strict.begin_flight(arrival);
        self.requests.send_modify(|requests| *requests += 1);
    }

    /// Just before it answers.
    fn finish(&self) {
        self.strict.lock().unwrap().end_flight();
    }
}

pub struct Works {
    provider: Arc<Provider>,
    pub gates: Vec<Gate>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Works {
    /// `limiter` is called once per process.
    pub fn start(limiter: impl FnMut() -> Arc<dyn Limiter>) -> Self {
        Self::start_with(quota(), limiter)
    }

    /// The same with another spec of the same limit.
    pub fn start_with(spec: QuotaSpec, mut limiter: impl FnMut() -> Arc<dyn Limiter>) -> Self {
        let rate = Rate::new(LIMIT, WINDOW).unwrap();
        let slots = spec.limits.iter().find(|limit| limit.algorithm == Algorithm::Concurrency);
        let options = FakeOptions {
            limits: vec![rate],
            concurrency: slots.map(|limit| limit.max_requests),
            on_limit: OnLimit::Count,
            ..FakeOptions::default()
        };
        let strict = Mutex::new(StrictProvider::new(options));
        let provider = Arc::new(Provider { strict, begun: Instant::now(), requests: watch::Sender::new(0) });
        let mut works = Self { provider, gates: Vec::new(), stop: CancellationToken::new(), tasks: JoinSet::new() };
        let attempts = Arc::new(Attempts::default());
        for _ in 0..PROCESSES {
            works.start_process(limiter(), spec.clone(), &attempts);
        }
        works
    }

    fn start_process(&mut self, limiter: Arc<dyn Limiter>, spec: QuotaSpec, attempts: &Arc<Attempts>) {
        limiter.open_quota(&spec);
        let (tended, stop) = (limiter.clone(), self.stop.clone());
        self.tasks.spawn(async move { tended.run_background(stop).await });
        let (gate, run) = gate(limiter, attempts, spec, &self.stop);
        self.tasks.spawn(run);
        for _ in 0..TASKS {
            let (gate, attempts, provider) = (gate.clone(), attempts.clone(), self.provider.clone());
            let stop = self.stop.clone();
            self.tasks.spawn(async move {
                while !stop.is_cancelled() {
                    work(&gate, &attempts, &provider).await;
                }
            });
        }
        self.gates.push(gate);
    }

    /// Waits for this many more requests at the provider.
    pub async fn flows(&self, more: u64) {
        let mut requests = self.provider.requests.subscribe();
        let enough = *requests.borrow() + more;
        if timeout(FLOWS_WITHIN, requests.wait_for(|requests| *requests >= enough)).await.is_err() {
            let views: Vec<_> = self.gates.iter().map(|gate| gate.view().borrow().clone()).collect();
            panic!("fewer than {more} requests within {FLOWS_WITHIN:?}: {:?}\n{views:?}", self.report());
        }
    }

    /// Waits until the provider's report says so. What needs several requests at one moment comes when it comes: on a
    /// machine with other work, after more of them.
    pub async fn until(&self, says: impl Fn(&FakeProviderReport) -> bool) {
        let mut requests = self.provider.requests.subscribe();
        let said = async {
            // The report is read after the wait and not in its condition, whose lock an arriving request needs.
            while !says(&self.report()) {
                requests.changed().await.unwrap();
            }
        };
        if timeout(FLOWS_WITHIN, said).await.is_err() {
            panic!("not reported within {FLOWS_WITHIN:?}: {:?}", self.report());
        }
    }

    pub fn requests(&self) -> u64 {
        *self.provider.requests.borrow()
    }

    /// Waits until every process reports that the store is unavailable, with this cause.
    pub async fn all_say(&self, cause: &str) {
        let says = |view: &GateView| matches!(&view.block, Some((BlockReason::StoreUnavailable(why), _)) if why.contains(cause));
        for gate in &self.gates {
            let mut view = gate.view();
            if timeout(FLOWS_WITHIN, view.wait_for(says)).await.is_err() {
                panic!("no report of `{cause}`: {:?}", gate.view().borrow());
            }
        }
    }

    /// Ends all tasks and returns the provider's report.
    pub async fn end(mut self) -> FakeProviderReport {
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        self.report()
    }

    fn report(&self) -> FakeProviderReport {
        self.provider.strict.lock().unwrap().report()
    }
}

/// One request, as a worker makes it: permit, attempt, start, transit, answer.
async fn work(gate: &Gate, attempts: &Attempts, provider: &Provider) {
    let AcquireResult::Granted(permit) = gate.acquire(ask(Instant::now() + FLOWS_WITHIN)).await else {
        return sleep(Duration::from_millis(20)).await;
    };
    attempts.begin();
    sleep_until(permit.start_at).await;
    let Ok(in_flight) = permit.begin() else { return attempts.take_back() };
    let way_ms = rand::rng().random_range(2..30);
    sleep(Duration::from_millis(way_ms)).await;
    // A client that has timed out sends nothing more.
    if Instant::now() >= in_flight.answer_before {
        in_flight.release_unknown();
        return attempts.end();
    }
    provider.arrive();
    let answer_ms = rand::rng().random_range(3..30);
    sleep(Duration::from_millis(answer_ms)).await;
    provider.finish();
    if Instant::now() >= in_flight.answer_before {
        in_flight.release_unknown();
    } else {
        in_flight.release_used(Instant::now());
    }
    attempts.end();
}
