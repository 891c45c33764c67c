//! A gate whose store was written to by somebody else: it notices a state that was put back, and waits no longer than settings
//! allow.

use std::sync::Mutex;

use async_trait::async_trait;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::limiter::gate::{AcquireResult, BlockReason, Gate, GateContext};
use sluicegate::limiter::{LimitStatus, RecentAttempts};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;

/// A ledger that knows all that was answered.
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
    told: Arc<Mutex<Vec<i64>>>,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<()>,
    _spec: watch::Sender<Arc<QuotaSpec>>,
}

impl Worker {
    fn start(limiter: Arc<dyn Limiter>, spec: QuotaSpec) -> Self {
        let (spec_tx, spec) = watch::channel(Arc::new(spec));
        let (ledger, stop) = (Arc::new(Remembers::default()), CancellationToken::new());
        let told = Arc::<Mutex<Vec<i64>>>::default();
        let hears = Arc::clone(&told);
        let parts = GateContext {
            limiter,
            recent: ledger.clone(),
            spec,
            incarnation: rand::random::<u64>() >> 16,
            stop: stop.clone(),
            on_newer_version: Arc::new(move |version| hears.lock().unwrap().push(version)),
        };
        let (gate, run) = Gate::new(parts);
        Self { gate, ledger, told, stop, running: tokio::spawn(run), _spec: spec_tx }
    }

    /// Sends payments one after the other, each with its answer at once, until one may not start by then.
    async fn pay_many(&self, payments: usize, wait_until: Instant) -> usize {
        let mut paid = 0;
        while paid < payments {
            let AcquireResult::Granted(permit) = self.gate.acquire(ask(wait_until)).await else { break };
            tokio::time::sleep_until(permit.start_at).await;
            // One that comes too late is asked for again.
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

/// What the log says, as long as this is kept.
fn log() -> (Arc<Mutex<Vec<u8>>>, tracing::subscriber::DefaultGuard) {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let kept = Arc::clone(&lines.0);
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || lines.clone()).finish();
    (kept, tracing::subscriber::set_default(subscriber))
}

#[tokio::test]
async fn gate_detects_a_restored_old_state() {
    let (lines, _guard) = log();
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
    // With a replica of it the functions are loaded anew.
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&key).arg(0).arg(&before).arg("REPLACE");
    redis::pipe().atomic().add_command(restore).add_command(LIBRARY.load()).exec(&mut connection).unwrap();
    assert_eq!(worker.pay_many(5, deadline).await, 5, "what the ledger knows leaves five");
    assert_eq!(worker.pay_many(15, Instant::now() + SECOND).await, 0, "the limit is used");
    let said = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    assert_eq!(said.matches("an earlier one than we have seen").count(), 1, "{said}");
    worker.end().await;
}

#[tokio::test]
async fn forged_long_pause_ends_in_seconds() {
    let (lines, _guard) = log();
    let redis = Redis::start();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), "paused").unwrap());
    let spec = QuotaSpec { send_budget: SECOND, ..spec(&[("all", 20, 60_000)]) };
    let key = provider_keys("paused", &spec)[0].clone();
    let worker = Worker::start(limiter, spec);
    let deadline = Instant::now() + 60 * SECOND;
    assert_eq!(worker.pay_many(5, deadline).await, 5);
    let mut connection = redis.connection();
    for is_remembered in [true, false] {
        let mut state: Vec<u8> = redis::cmd("HGET").arg(&key).arg("m").query(&mut connection).unwrap();
        let now = u64::from_le_bytes([&state[38..45], &[0]].concat().try_into().unwrap());
        state[51..58].copy_from_slice(&(now + 30 * 86_400 * 1_000_000).to_le_bytes()[..7]);
        let mut tampering = redis::pipe();
        tampering.atomic().cmd("HSET").arg(&key).arg("m").arg(state);
        if !is_remembered {
            tampering.add_command(LIBRARY.load());
        }
        tampering.exec(&mut connection).unwrap();
        assert_eq!(worker.pay_many(5, deadline).await, 5);
    }
    let said = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    let refusals = said.lines().filter(|line| line.contains("the limiter cannot be asked") && line.contains("DAMAGED"));
    assert!(refusals.count() >= 2, "{said}");
    worker.end().await;
}

/// Refuses every call for the same reason, as somebody may have written it; keeps what it was told.
struct Forged {
    refused: LimiterRefusal,
    version: i64,
    began: Instant,
    calls: Mutex<Vec<LimiterCall>>,
}

#[async_trait]
impl Limiter for Forged {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok("run".to_owned())
    }

    async fn call(&self, _: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        let mut calls = self.calls.lock().unwrap();
        calls.push(call.clone());
        Ok(LimiterReply {
            now: Micros(1_800_000_000_000_000 + u64::try_from(self.began.elapsed().as_micros()).unwrap()),
            version: self.version,
            state_epoch: Micros(1_800_000_000_000_000),
            calls: calls.len() as u64,
            grants: Vec::new(),
            skipped: Vec::new(),
            remaining: 0,
            deciding_limit: 0,
            reset_us: 0,
            refused: Some(self.refused),
        })
    }

    async fn peek(&self, _: &QuotaSpec, _: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        Ok(Vec::new())
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}

fn forged(by: RefusalReason, version: i64) -> Arc<Forged> {
    let refused = LimiterRefusal { reason: by, wait_us: 30 * 86_400 * 1_000_000, exact: true };
    Arc::new(Forged { refused, version, began: Instant::now(), calls: Mutex::default() })
}

#[tokio::test(start_paused = true)]
async fn no_wait_is_longer_than_settings_allow() {
    let second = spec(&[("all", 9, 1_000)]);
    let longest = Duration::from_micros(second.cold_start_us() + second.longest_window_us());
    for (by, most) in [
        (RefusalReason::Limit { index: 0 }, longest),
        (RefusalReason::Cold, longest),
        (RefusalReason::Paused, Duration::from_secs(901)),
        (RefusalReason::NeedsHistory { index: 0, readable_in_us: 1 << 31 }, longest),
    ] {
        let worker = Worker::start(forged(by, 1), second.clone());
        let AcquireResult::Refused(refusal) = worker.gate.acquire(ask(Instant::now())).await else { panic!("granted") };
        assert!(refusal.retry_after <= most && !refusal.exact, "{by:?}: {refusal:?}");
        worker.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn implausible_version_is_ignored() {
    for (version, is_believed) in [(1_000_001, true), (1_000_002, false), ((1 << 48) - 1, false)] {
        let limiter = forged(RefusalReason::StaleVersion, version);
        let worker = Worker::start(limiter.clone(), spec(&[("all", 9, 1_000)]));
        let AcquireResult::Refused(refusal) = worker.gate.acquire(ask(Instant::now() + SECOND)).await else {
            panic!("granted")
        };
        assert_eq!(refusal.reason == BlockReason::StaleSettings, is_believed, "{version}: {refusal:?}");
        let told = worker.told.lock().unwrap().clone();
        assert_eq!(told.first().copied(), is_believed.then_some(version), "{told:?}");
        let distrusts = limiter.calls.lock().unwrap().iter().any(|call| call.invalidate_epoch.is_some());
        assert_eq!(distrusts, !is_believed, "{version}");
        worker.end().await;
    }
}
