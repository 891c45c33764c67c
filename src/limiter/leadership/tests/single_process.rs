//! Tests of processes with embedded limiters on one database, each of which has or had the session lock.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::limiter::embedded::{SessionLock, SingleProcessLimiter};

#[derive(Default)]
struct FakeSessionLock(AtomicBool);

impl FakeSessionLock {
    fn new(is_held: bool) -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(is_held)))
    }
}

#[async_trait]
impl SessionLock for FakeSessionLock {
    async fn check_held(&self) -> Result<(), String> {
        if self.0.load(Ordering::Relaxed) { Ok(()) } else { Err("another run".to_owned()) }
    }
}

/// A process that has just opened the quota.
struct Process {
    limiter: Arc<LeaderGuardedLimiter>,
    spec: QuotaSpec,
    calls: u64,
    rebuilt_in: Option<String>,
}

impl Process {
    fn start(run_id: &str, right: Arc<FakeSessionLock>, table: &Arc<FakeLeaderTable>) -> Self {
        let store = Arc::new(SingleProcessLimiter::new(run_id.to_owned(), right));
        let limiter =
            Arc::new(LeaderGuardedLimiter::new(store, table.clone(), LeadershipTiming::with_poll_interval(SECOND)));
        let spec = spec(StoreDown::Wait);
        limiter.open_quota(&spec);
        let background = Arc::clone(&limiter);
        tokio::spawn(async move { background.run_background(CancellationToken::new()).await });
        Self { limiter, spec, calls: 0, rebuilt_in: None }
    }

    /// Asks for one permit; `true` if it is granted now. Rebuilds the state as soon as that is allowed.
    async fn grants(&mut self) -> bool {
        let Ok(run_id) = self.limiter.run_id(&self.spec.quota).await else { return false };
        let Ok(reply) = self.call(&run_id, None).await else { return false };
        if self.rebuilt_in.as_ref() == Some(&run_id) {
            return reply.permits() == 1;
        }
        if self.limiter.may_rebuild(&self.spec.quota).await {
            let rebuild =
                RebuildData { state_epoch: reply.state_epoch, ended: Vec::new(), in_flight: CostByKind::default() };
            self.call(&run_id, Some(rebuild)).await.unwrap();
            self.rebuilt_in = Some(run_id);
        }
        false
    }

    async fn call(&mut self, run_id: &str, rebuild: Option<RebuildData>) -> Result<LimiterReply, LimiterError> {
        self.calls += 1;
        let call = LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests: vec![PermitRequest::charges(1, 1)],
            releases: Vec::new(),
            pause: None,
            rebuild,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: crate::domain::provider::BOOKING_HORIZON,
            run_id: run_id.to_owned(),
        };
        self.limiter.call(&self.spec, &call).await
    }
}

/// When each process granted last. Each grants the limit's ten permits at once, every few seconds, because no permit is
/// released. A process may only begin when no permit of the other can start any more.
async fn last_grants(processes: &mut [Process; 2], seconds: u64) -> [Option<Duration>; 2] {
    let started = Instant::now();
    let mut last: [Option<Instant>; 2] = [None; 2];
    while started.elapsed() < Duration::from_secs(seconds) {
        for index in 0..2 {
            if !processes[index].grants().await {
                continue;
            }
            let now = Instant::now();
            if let Some(other) = last[1 - index] {
                assert!(now - other >= Duration::from_millis(750), "both grant within {:?}", now - other);
            }
            last[index] = Some(now);
        }
        sleep(Duration::from_millis(50)).await;
    }
    last.map(|at| at.map(|at| at - started))
}

#[tokio::test(start_paused = true)]
async fn lost_lock_ends_grants_before_the_next_begin() {
    let (table, rights) =
        (Arc::new(FakeLeaderTable::default()), [FakeSessionLock::new(true), FakeSessionLock::new(false)]);
    let mut both = ["a", "b"].map(|id| Process::start(id, rights[usize::from(id == "b")].clone(), &table));
    let [first, second] = last_grants(&mut both, 20).await;
    assert!(first.is_some_and(|at| at > 10 * SECOND) && second.is_none(), "{first:?} {second:?}");
    rights[0].0.store(false, Ordering::Relaxed);
    rights[1].0.store(true, Ordering::Relaxed);
    let [first, second] = last_grants(&mut both, 20).await;
    assert!(first.is_none_or(|at| at < 3 * SECOND), "{first:?}");
    assert!(second.is_some_and(|at| at > 10 * SECOND), "{second:?}");
    assert_eq!(table.holder().unwrap(), "redis:b");
}

/// As when the database restarts and all sessions end: for a while both processes believe that they have the lock.
#[tokio::test(start_paused = true)]
async fn two_believed_lock_holders_never_grant_together() {
    let table = Arc::new(FakeLeaderTable::default());
    let right = FakeSessionLock::new(true);
    let mut both = ["a", "b"].map(|id| Process::start(id, right.clone(), &table));
    let lasts = last_grants(&mut both, 60).await;
    assert_ne!(table.holder(), None, "{lasts:?}");
}

#[tokio::test(start_paused = true)]
async fn regained_lock_needs_no_cold_start() {
    let (table, right) = (Arc::new(FakeLeaderTable::default()), FakeSessionLock::new(true));
    let other = Process::start("b", FakeSessionLock::new(false), &table);
    let mut both = [Process::start("a", right.clone(), &table), other];
    last_grants(&mut both, 20).await;
    right.0.store(false, Ordering::Relaxed);
    let [first, _] = last_grants(&mut both, 5).await;
    assert!(first.is_none_or(|at| at <= 2 * SECOND), "{first:?}");
    right.0.store(true, Ordering::Relaxed);
    let [first, second] = last_grants(&mut both, 3).await;
    assert!(first.is_some() && second.is_none(), "{first:?} {second:?}");
    assert_eq!(both[0].rebuilt_in.as_deref(), Some("a/1"));
}
