//! Rebuild of lost limiter state from a ledger that takes long to read a month of attempts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;

/// A ledger that answers slowly and counts its reads.
#[derive(Default)]
struct Slow {
    asked: AtomicU64,
}

const TAKES: Duration = Duration::from_secs(90);

#[async_trait]
impl RecentAttempts for Slow {
    async fn recent_uses(&self, _: &ProviderName, lookback: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        sleep(TAKES).await;
        let once = PastUse { age: lookback.count_within, cost: CostByKind::charges(1) };
        Ok((vec![once], CostByKind::default()))
    }
}

#[tokio::test(start_paused = true)]
async fn slow_rebuild_does_not_block_the_gate() {
    let (ledger, limiter, stop) = (Arc::new(Slow::default()), Forgetful::new(0.0), CancellationToken::new());
    let spec = spec(&[("month", 5, 31 * 86_400_000)]);
    let gate = open_gate_over(ledger.clone(), limiter.clone(), spec, 1, &stop);
    let started = Instant::now();
    // A job that does not wait is refused soon, and the gate keeps calling the store.
    for _ in 0..20 {
        let asked = Instant::now();
        let AcquireResult::Refused(refusal) = gate.acquire(ask(1, asked + Duration::from_secs(1))).await else {
            panic!("granted after {:?}", started.elapsed());
        };
        assert_eq!(refusal.reason, BlockReason::Cold);
        assert!(asked.elapsed() <= Duration::from_secs(2), "{:?}", asked.elapsed());
        sleep(Duration::from_secs(1)).await;
    }
    let calls = limiter.calls.load(Ordering::Relaxed);
    assert!((20..=400).contains(&calls), "{calls} calls in {:?}", started.elapsed());
    let last = gate.acquire(ask(1, started + 2 * TAKES)).await;
    assert!(matches!(last, AcquireResult::Granted(_)), "{last:?} after {:?}", started.elapsed());
    assert!(started.elapsed() < TAKES + Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(ledger.asked.load(Ordering::Relaxed), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn gate_stops_during_a_slow_rebuild() {
    let (ledger, stop) = (Arc::new(Slow::default()), CancellationToken::new());
    let gate = open_gate_over(ledger.clone(), Forgetful::new(0.0), spec(&[("month", 5, 31 * 86_400_000)]), 1, &stop);
    while ledger.asked.load(Ordering::Relaxed) == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    let started = Instant::now();
    stop.cancel();
    assert!(matches!(gate.acquire(ask(1, started + TAKES)).await, AcquireResult::Refused(_)));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// A limiter that stops being leader: its further calls cannot be trusted.
struct Overtaken {
    inner: Arc<Forgetful>,
    overtaken: AtomicBool,
}

#[async_trait]
impl Limiter for Overtaken {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.inner.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.inner.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.inner.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.inner.ping().await
    }

    async fn may_rebuild(&self, _: &ProviderName) -> bool {
        !self.overtaken.load(Ordering::Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn superseded_rebuild_keeps_the_store_call_rate() {
    let (ledger, inner, stop) = (Arc::new(Slow::default()), Forgetful::new(0.0), CancellationToken::new());
    let limiter = Arc::new(Overtaken { inner: inner.clone(), overtaken: AtomicBool::new(false) });
    let spec = spec(&[("month", 5, 31 * 86_400_000)]);
    let _gate = open_gate_over(ledger.clone(), limiter.clone(), spec, 1, &stop);
    while ledger.asked.load(Ordering::Relaxed) == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    limiter.overtaken.store(true, Ordering::Relaxed);
    let before = inner.calls.load(Ordering::Relaxed);
    sleep(Duration::from_secs(10)).await;
    let calls = inner.calls.load(Ordering::Relaxed) - before;
    assert!((20..=100).contains(&calls), "{calls} calls in ten seconds");
    stop.cancel();
}
