//! A gate that resets its store's state: after a rollback, after a limit was made slower, and for a settings version that
//! no database ever had.

use std::sync::Mutex;

use async_trait::async_trait;
use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::permit_protocol::PermitGrant;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::limiter::gate::{AcquireResult, BlockReason, Gate, GateContext};
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::redis::keys::provider_keys;
use sluicegate::limiter::{LimitStatus, RecentAttempts};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::captured_log::capture_log;
use crate::support::redis::Redis;

/// A ledger that knows every answered request.
#[derive(Default)]
struct Remembers(Mutex<Vec<Instant>>);

#[async_trait]
impl RecentAttempts for Remembers {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        let ended = self.0.lock().unwrap();
        Ok((
            ended.iter().map(|at| PastUse { age: at.elapsed(), cost: CostByKind::charges(1) }).collect(),
            CostByKind::default(),
        ))
    }
}

struct Worker {
    gate: Gate,
    ledger: Arc<Remembers>,
    newer_versions: Arc<Mutex<Vec<i64>>>,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<()>,
    spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Worker {
    fn start(limiter: Arc<dyn Limiter>, spec: QuotaSpec) -> Self {
        Self::with_ledger(limiter, spec, Arc::default())
    }

    fn with_ledger(limiter: Arc<dyn Limiter>, spec: QuotaSpec, ledger: Arc<Remembers>) -> Self {
        let (spec_tx, spec) = watch::channel(Arc::new(spec));
        let stop = CancellationToken::new();
        let newer_versions = Arc::<Mutex<Vec<i64>>>::default();
        let hears = Arc::clone(&newer_versions);
        let parts = GateContext {
            limiter,
            recent: ledger.clone(),
            spec,
            incarnation: rand::random::<u64>() >> 16,
            stop: stop.clone(),
            on_newer_version: Arc::new(move |version| hears.lock().unwrap().push(version)),
        };
        let (gate, run) = Gate::new(parts);
        Self { gate, ledger, newer_versions, stop, running: tokio::spawn(run), spec: spec_tx }
    }

    /// Sends payments one after the other, each answered at once, until none can start by this instant.
    async fn pay_many(&self, payments: usize, wait_until: Instant) -> usize {
        let mut paid = 0;
        while paid < payments {
            let AcquireResult::Granted(permit) = self.gate.acquire(ask(wait_until)).await else { break };
            tokio::time::sleep_until(permit.start_at).await;
            // A late permit is requested again.
            let Ok(in_flight) = permit.begin() else { continue };
            let now = Instant::now();
            self.ledger.0.lock().unwrap().push(now);
            in_flight.release_used(now);
            paid += 1;
        }
        paid
    }

    async fn end(self) {
        self.stop.cancel();
        self.running.await.unwrap();
    }
}

#[tokio::test]
async fn gate_detects_a_restored_old_state() {
    let (log, _guard) = capture_log();
    let redis = Redis::start();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), "gate").unwrap());
    let spec = QuotaSpec { send_budget: SECOND, ..spec(&[("all", 20, 60_000)]) };
    let key = provider_keys("gate", &spec)[0].clone();
    let worker = Worker::start(limiter, spec);
    let deadline = Instant::now() + 30 * SECOND;
    assert_eq!(worker.pay_many(5, deadline).await, 5);
    let mut connection = redis.connection();
    let before: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut connection).unwrap();
    assert_eq!(worker.pay_many(10, deadline).await, 10);
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&key).arg(0).arg(&before).arg("REPLACE").exec(&mut connection).unwrap();
    assert_eq!(worker.pay_many(5, deadline).await, 5, "the ledger's usage leaves five permits");
    assert_eq!(worker.pay_many(15, Instant::now() + SECOND).await, 0, "the limit is used in full");
    assert_eq!(log.lines_with("an earlier one than we have seen").len(), 1, "{}", log.text());
    worker.end().await;
}

/// Waits until the state counts no permit in flight.
async fn until_released(connection: &mut redis::Connection, key: &str) {
    let in_flight = |state: Vec<u8>| state[69..75].iter().any(|byte| *byte > 0);
    while in_flight(redis::cmd("HGET").arg(key).arg("m").query(connection).unwrap()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn rollback_shows_behind_other_workers_calls() {
    let (log, _guard) = capture_log();
    let redis = Redis::start();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), "two").unwrap());
    let spec = QuotaSpec { send_budget: SECOND, ..spec(&[("all", 20, 60_000)]) };
    let key = provider_keys("two", &spec)[0].clone();
    let first = Worker::start(limiter.clone(), spec.clone());
    let second = Worker::with_ledger(limiter, spec, first.ledger.clone());
    let deadline = Instant::now() + 30 * SECOND;
    assert_eq!(first.pay_many(2, deadline).await + second.pay_many(2, deadline).await, 4);
    let mut connection = redis.connection();
    until_released(&mut connection, &key).await;
    let before: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut connection).unwrap();
    assert_eq!(first.pay_many(1, deadline).await, 1, "a permit that the restored state will lack");
    until_released(&mut connection, &key).await;
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&key).arg(0).arg(&before).arg("REPLACE").exec(&mut connection).unwrap();
    // More calls than the restored state lacks.
    assert_eq!(second.pay_many(5, deadline).await, 5);
    assert_eq!(first.pay_many(10, deadline).await, 10, "the ledger's usage leaves ten permits");
    assert_eq!(first.pay_many(1, Instant::now() + SECOND).await, 0, "the limit is used in full");
    assert_eq!(log.lines_with("an earlier one than we have seen").len(), 1, "{}", log.text());
    first.end().await;
    second.end().await;
}

/// A bucket that was used in full counts its uses at the slower rate: an hour each, instead of one hour in all.
#[tokio::test]
async fn slowed_limit_waits_no_longer_than_its_window() {
    let (log, _guard) = capture_log();
    let redis = Redis::start();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), "slowed").unwrap());
    let mut spec = QuotaSpec { send_budget: SECOND, ..spec(&[("all", 20, 60_000)]) };
    spec.limits[0].algorithm = Algorithm::TokenBucket;
    let worker = Worker::start(limiter, spec.clone());
    assert_eq!(worker.pay_many(20, Instant::now() + 30 * SECOND).await, 20);
    let slower = Duration::from_secs(3_600);
    let limits = vec![LimitSpec { max_requests: 1, window: slower, ..spec.limits[0].clone() }];
    worker.spec.send_replace(Arc::new(QuotaSpec { version: spec.version + 1, limits, ..spec }));
    let deadline = Instant::now() + 30 * SECOND;
    let wait = loop {
        assert!(Instant::now() < deadline, "no limit refuses");
        match worker.gate.acquire(ask(Instant::now())).await {
            AcquireResult::Refused(refusal) if refusal.reason == BlockReason::Limit("all".to_owned()) => {
                if log.text().contains("slower settings") {
                    break refusal.retry_after;
                }
            }
            AcquireResult::Refused(_) => {}
            AcquireResult::Granted(_) | AcquireResult::NoWorkerSlot => panic!("granted"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(wait > slower / 2 && wait < slower + slower / 50, "{wait:?}");
    worker.end().await;
}

/// A limiter that refuses every call with one reason, or grants all; it keeps the calls.
struct Scripted {
    refused: Option<LimiterRefusal>,
    version: i64,
    latency: Duration,
    began: Instant,
    calls: Mutex<Vec<LimiterCall>>,
}

#[async_trait]
impl Limiter for Scripted {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok("run".to_owned())
    }

    async fn call(&self, _: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        tokio::time::sleep(self.latency).await;
        let mut calls = self.calls.lock().unwrap();
        calls.push(call.clone());
        let is_counted = self.refused.is_none_or(|refused| refused.reason != RefusalReason::StaleVersion);
        let granted = call.requests.iter().enumerate().filter(|_| self.refused.is_none());
        let grant = |(request_index, request): (usize, &PermitRequest)| PermitGrant {
            request_index,
            permits: request.permits,
            wait_us: 0,
            origins: vec![0],
        };
        Ok(LimiterReply {
            now: Micros(1_800_000_000_000_000 + u64::try_from(self.began.elapsed().as_micros()).unwrap()),
            version: self.version,
            state_epoch: Micros(1_800_000_000_000_000),
            calls: calls.len() as u64,
            previous_call: if is_counted { call.number - 1 } else { 0 },
            grants: granted.map(grant).collect(),
            skipped: Vec::new(),
            remaining: 0,
            deciding_limit: 0,
            reset_us: 0,
            refused: self.refused,
        })
    }

    async fn peek(&self, _: &QuotaSpec, _: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        Ok(Vec::new())
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}

#[tokio::test(start_paused = true)]
async fn implausible_version_is_ignored() {
    for (version, is_believed) in [(1_000_001, true), (1_000_002, false), ((1 << 48) - 1, false)] {
        let refused = Some(LimiterRefusal { reason: RefusalReason::StaleVersion, wait_us: 0, exact: true });
        let latency = Duration::from_millis(1);
        let limiter = Arc::new(Scripted { refused, version, latency, began: Instant::now(), calls: Mutex::default() });
        let worker = Worker::start(limiter.clone(), spec(&[("all", 9, 1_000)]));
        let AcquireResult::Refused(refusal) = worker.gate.acquire(ask(Instant::now() + SECOND)).await else {
            panic!("granted")
        };
        assert_eq!(refusal.reason == BlockReason::StaleSettings, is_believed, "{version}: {refusal:?}");
        let newer_versions = worker.newer_versions.lock().unwrap().clone();
        assert_eq!(newer_versions.first().copied(), is_believed.then_some(version), "{newer_versions:?}");
        let distrusts = limiter.calls.lock().unwrap().iter().any(|call| call.invalidate_epoch.is_some());
        assert_eq!(distrusts, !is_believed, "{version}");
        worker.end().await;
    }
}

/// Every call is granted, and its reply takes longer than the send budget.
#[tokio::test(start_paused = true)]
async fn late_permits_are_logged_as_a_stall() {
    let (log, _guard) = capture_log();
    let latency = Duration::from_millis(500);
    let late = Scripted { refused: None, version: 1, latency, began: Instant::now(), calls: Mutex::default() };
    let worker = Worker::start(Arc::new(late), spec(&[("all", 9, 1_000)]));
    let paid = tokio::time::timeout(30 * SECOND, worker.pay_many(1, Instant::now() + 60 * SECOND)).await;
    assert!(paid.is_err(), "no permit arrives within its send budget: {paid:?}");
    assert_eq!(log.lines_with("permits arrive too late").len(), 1, "{}", log.text());
    worker.end().await;
}
