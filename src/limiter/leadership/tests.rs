use std::sync::Mutex as StdMutex;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::*;
use crate::domain::clock_comparison::{LeaderRow, QuotaAttestation};
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::{
    CallKind, CostByKind, PastUse, PermitRequest, RebuildData, RefusalReason, SubjectLimit,
};
use crate::domain::quota_spec::{LimitSpec, Lookback};
use crate::limiter::gate::{AcquireRequest, AcquireResult, BlockReason, Gate, GateContext, RefusalScope};
use crate::limiter::{RecentAttempts, StoreConnection};

mod single_process;

const SECOND: Duration = Duration::from_secs(1);
const TWO_WORKERS: StoreDown = StoreDown::Share { workers: 2 };
const FOUR_WORKERS: StoreDown = StoreDown::Share { workers: 4 };

fn spec(store_down: StoreDown) -> QuotaSpec {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 6, SECOND) };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: vec![LimitSpec::sliding_log("all", 10, SECOND), own],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: 5 * SECOND,
        send_budget: Duration::from_millis(500),
        store_down,
        members: Vec::new(),
        resumed_at: 0,
        handover: LeadershipTiming::with_poll_interval(SECOND).handover(),
    }
}

/// A store whose connection can be cut, or led to another server.
struct FakeStore {
    store: EmbeddedLimiter,
    connection: StdMutex<Option<StoreConnection>>,
    disconnects: StdMutex<u32>,
    /// Whether disconnecting hangs.
    hangs: StdMutex<bool>,
}

impl FakeStore {
    fn connect_to(&self, run_id: Option<&str>) {
        let made_at = Instant::now();
        *self.connection.lock().unwrap() =
            run_id.map(|run_id| StoreConnection { run_id: run_id.to_owned(), connected_at: made_at });
    }

    fn current_connection(&self) -> Result<StoreConnection, LimiterError> {
        self.connection.lock().unwrap().clone().ok_or_else(|| LimiterError::Unavailable("cut".to_owned()))
    }
}

#[async_trait]
impl Limiter for FakeStore {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok(self.current_connection()?.run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        let connection = self.current_connection()?;
        assert_eq!(call.run_id.split('/').next(), Some(connection.run_id.as_str()));
        self.store.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.store.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.current_connection().map(|_| None)
    }
}

#[async_trait]
impl RemoteLimiter for FakeStore {
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)> {
        quotas.iter().map(|quota| (quota.clone(), self.current_connection())).collect()
    }

    async fn disconnect(&self, _: &ProviderName, connection: &StoreConnection) {
        *self.disconnects.lock().unwrap() += 1;
        let hangs = *self.hangs.lock().unwrap();
        if hangs {
            std::future::pending::<()>().await;
        }
        // The same name leads to the same server.
        self.connect_to(Some(&connection.run_id));
    }
}

/// The table with one row, and whether the database is unreachable.
#[derive(Default)]
struct FakeLeaderTable(StdMutex<(Option<FakeLeaderRow>, bool)>);

/// Holder, term, and since when.
type FakeLeaderRow = (String, i64, Option<Instant>);

impl FakeLeaderTable {
    fn write(&self, holder: &str) {
        let mut table = self.0.lock().unwrap();
        let term = table.0.as_ref().map_or(1, |row| row.1 + 1);
        table.0 = Some((holder.to_owned(), term, Some(Instant::now())));
    }

    fn holder(&self) -> Option<String> {
        self.0.lock().unwrap().0.as_ref().map(|row| row.0.clone())
    }

    fn set_unavailable(&self, is_cut: bool) {
        self.0.lock().unwrap().1 = is_cut;
    }

    fn row(&self) -> Result<Option<LeaderRow>, String> {
        let table = self.0.lock().unwrap();
        if table.1 {
            return Err("cut".to_owned());
        }
        let age = |since: &Option<Instant>| since.map_or(Duration::ZERO, |since| since.elapsed());
        Ok(table.0.as_ref().map(|(holder, term, since)| LeaderRow {
            holder: holder.clone(),
            term: *term,
            age: age(since),
            now: Micros(0),
            attestation: None,
        }))
    }
}

#[async_trait]
impl LeaderRows for FakeLeaderTable {
    async fn leader_rows(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, LeaderRow>, String> {
        let row = self.row()?;
        Ok(quotas.iter().filter_map(|quota| Some((quota.clone(), row.clone()?))).collect())
    }

    async fn take_over(&self, _: &ProviderName, from: Option<&str>, to: &str) -> Result<LeaderRow, String> {
        if self.row()?.map(|row| row.holder).as_deref() == from {
            self.write(to);
        }
        self.row()?.ok_or_else(|| "no row".to_owned())
    }

    async fn record_attestations(&self, _: &[QuotaAttestation]) -> Result<(), String> {
        self.row().map(drop)
    }
}

struct Harness {
    store: Arc<FakeStore>,
    table: Arc<FakeLeaderTable>,
    limiter: Arc<LeaderGuardedLimiter>,
    spec: QuotaSpec,
    calls: u64,
}

impl Harness {
    /// A process that has just opened the quota, connected to this server.
    fn open(store_down: StoreDown, run_id: Option<&str>) -> Self {
        let store = Arc::new(FakeStore {
            store: EmbeddedLimiter::new(),
            connection: StdMutex::default(),
            disconnects: StdMutex::default(),
            hangs: StdMutex::default(),
        });
        store.connect_to(run_id);
        let table = Arc::new(FakeLeaderTable::default());
        let limiter = Arc::new(LeaderGuardedLimiter::new(
            store.clone(),
            table.clone(),
            LeadershipTiming::with_poll_interval(SECOND),
        ));
        let spec = spec(store_down);
        limiter.open_quota(&spec);
        let background = Arc::clone(&limiter);
        tokio::spawn(async move { background.run_background(CancellationToken::new()).await });
        Self { store, table, limiter, spec, calls: 0 }
    }

    async fn run_id(&self) -> Result<String, String> {
        self.limiter.run_id(&self.spec.quota).await.map_err(|error| error.to_string())
    }

    async fn may_rebuild(&self) -> bool {
        self.limiter.may_rebuild(&self.spec.quota).await
    }

    async fn call(
        &mut self,
        wants: Vec<PermitRequest>,
        run_id: &str,
        rebuild: Option<RebuildData>,
    ) -> Result<LimiterReply, LimiterError> {
        self.calls += 1;
        let call = LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests: wants,
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

    /// Rebuilds the state from a ledger without recent requests.
    async fn rebuild(&mut self, run_id: &str) {
        let cold = self.call(Vec::new(), run_id, None).await.unwrap();
        assert_eq!(cold.refused.map(|refused| refused.reason), Some(RefusalReason::Cold));
        let rebuild =
            RebuildData { state_epoch: cold.state_epoch, ended: Vec::new(), in_flight: CostByKind::default() };
        assert_eq!(self.call(Vec::new(), run_id, Some(rebuild)).await.unwrap().refused, None);
    }

    async fn wait_until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let so = async {
            while !is_so().await {
                sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(timeout(300 * SECOND, so).await.is_ok(), "not so: {what}");
    }
}

#[tokio::test(start_paused = true)]
async fn first_leader_waits_until_all_have_seen_it() {
    let mut bench = Harness::open(StoreDown::Wait, Some("a"));
    assert!(bench.run_id().await.unwrap_err().contains("has not been read"));
    bench.wait_until("taken", async || bench.run_id().await.is_ok()).await;
    assert_eq!((bench.table.holder().unwrap().as_str(), bench.run_id().await.unwrap().as_str()), ("redis:a", "a/1"));
    let since = Instant::now();
    assert!(!bench.may_rebuild().await);
    bench.wait_until("rebuildable", async || bench.may_rebuild().await).await;
    // Three polls, booking horizon and send budget.
    assert!(since.elapsed() >= Duration::from_millis(3_750) && since.elapsed() < 5 * SECOND, "{:?}", since.elapsed());
    bench.rebuild("a/1").await;
    assert_eq!(bench.call(vec![PermitRequest::charges(20, 1)], "a/1", None).await.unwrap().permits(), 10);
}

#[tokio::test(start_paused = true)]
async fn new_term_starts_a_new_state() {
    let mut bench = Harness::open(StoreDown::Wait, Some("a"));
    bench.wait_until("rebuildable", async || bench.may_rebuild().await).await;
    bench.rebuild("a/1").await;
    // Another holder had the row in between.
    bench.table.write("redis:b");
    bench.table.write("redis:a");
    bench.wait_until("seen", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
    let error = bench.call(vec![PermitRequest::charges(1, 1)], "a/1", None).await.unwrap_err();
    assert!(error.to_string().contains("another limiter leader"), "{error}");
    let reply = bench.call(vec![PermitRequest::charges(1, 1)], "a/3", None).await.unwrap();
    assert_eq!(reply.refused.map(|refused| refused.reason), Some(RefusalReason::Cold));
    assert!(!bench.may_rebuild().await);
}

#[tokio::test(start_paused = true)]
async fn stale_connection_is_replaced_and_then_used() {
    let bench = Harness::open(StoreDown::Wait, Some("a"));
    bench.wait_until("rebuildable", async || bench.may_rebuild().await).await;
    bench.table.write("redis:b");
    bench.wait_until("reconnected", async || *bench.store.disconnects.lock().unwrap() >= 1).await;
    bench.wait_until("taken", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
    assert_eq!(bench.table.holder().unwrap(), "redis:a");
}

#[tokio::test(start_paused = true)]
async fn hanging_disconnect_neither_grants_nor_hides_rows() {
    let mut bench = Harness::open(StoreDown::Wait, Some("a"));
    bench.wait_until("rebuildable", async || bench.may_rebuild().await).await;
    bench.rebuild("a/1").await;
    *bench.store.hangs.lock().unwrap() = true;
    bench.table.write("redis:b");
    bench.wait_until("disconnected", async || *bench.store.disconnects.lock().unwrap() >= 1).await;
    for _ in 0..10 {
        let error = bench.call(vec![PermitRequest::charges(1, 1)], "a/1", None).await.unwrap_err();
        assert!(error.to_string().contains("another limiter store is leader"), "{error}");
        sleep(SECOND).await;
    }
    bench.table.write("redis:a");
    bench.wait_until("seen", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
}

#[tokio::test(start_paused = true)]
async fn unreadable_leader_row_ends_grants() {
    let mut bench = Harness::open(StoreDown::Wait, Some("a"));
    bench.wait_until("rebuildable", async || bench.may_rebuild().await).await;
    bench.rebuild("a/1").await;
    bench.table.set_unavailable(true);
    let since = Instant::now();
    bench.wait_until("no leader", async || bench.run_id().await.is_err()).await;
    assert!(since.elapsed() <= Duration::from_millis(3_100), "{:?}", since.elapsed());
    let error = bench.call(vec![PermitRequest::charges(1, 1)], "a/1", None).await.unwrap_err();
    assert!(error.to_string().contains("the leader row cannot be read"), "{error}");
    bench.table.set_unavailable(false);
    bench.wait_until("again", async || bench.run_id().await.is_ok()).await;
    // No other limiter has granted meanwhile.
    assert_eq!(bench.call(vec![PermitRequest::charges(1, 1)], "a/1", None).await.unwrap().permits(), 1);
}

#[tokio::test(start_paused = true)]
async fn share_is_the_limits_divided() {
    let mut bench = Harness::open(TWO_WORKERS, None);
    assert!(bench.run_id().await.is_err());
    bench.wait_until("shared", async || bench.run_id().await.is_ok()).await;
    assert_eq!((bench.table.holder().unwrap().as_str(), bench.run_id().await.unwrap().as_str()), ("share", "share/1"));
    assert!(bench.may_rebuild().await);
    bench.rebuild("share/1").await;
    let subject = |index, max_requests| Subject {
        key: "account:a".to_owned(),
        limits: vec![SubjectLimit { index, max_requests, window: SECOND, burst: None, exempt: false }],
    };
    let own = PermitRequest { subjects: vec![subject(1, 6)], ..PermitRequest::charges(4, 1) };
    // One that costs more than a share, one limited by its account's share, and one that gets what is left.
    let reply = bench
        .call(vec![PermitRequest::charges(1, 6), own, PermitRequest::charges(9, 1)], "share/1", None)
        .await
        .unwrap();
    let granted: Vec<(usize, u32)> = reply.grants.iter().map(|run| (run.request_index, run.permits)).collect();
    assert_eq!(granted, [(1, 3), (2, 2)], "{reply:?}");
    let passed: Vec<usize> = reply.skipped.iter().map(|passed| passed.request_index).collect();
    assert_eq!(passed, [1, 0], "{reply:?}");
    assert_eq!(reply.refused.map(|refused| refused.reason), Some(RefusalReason::Limit { index: 0 }));
    let peeked = bench.limiter.peek(&bench.spec, None).await.unwrap();
    assert_eq!((peeked[0].max_requests, peeked[0].used), (5, 5));
    let peeked = bench.limiter.peek(&bench.spec, Some(&subject(1, 6))).await.unwrap();
    assert_eq!((peeked[1].max_requests, peeked[1].used), (3, 3), "its share as well: {peeked:?}");
    // The store is available again. Shares last for a minute, then the store becomes leader and begins cold.
    bench.store.connect_to(Some("b"));
    let since = Instant::now();
    bench.wait_until("the store's", async || bench.run_id().await.is_ok_and(|id| id == "b/2")).await;
    assert!(since.elapsed() >= 50 * SECOND, "{:?}", since.elapsed());
    let reply = bench
        .call(vec![PermitRequest { kind: CallKind::Charge, ..PermitRequest::charges(1, 1) }], "b/2", None)
        .await
        .unwrap();
    assert_eq!(reply.refused.map(|refused| refused.reason), Some(RefusalReason::Cold));
}

#[tokio::test(start_paused = true)]
async fn wait_policy_never_takes_a_share() {
    let bench = Harness::open(StoreDown::Wait, None);
    sleep(120 * SECOND).await;
    assert_eq!(bench.table.holder(), None);
    assert!(bench.run_id().await.unwrap_err().contains("cut"), "says why");
}

#[tokio::test(start_paused = true)]
async fn closed_quota_has_no_leader() {
    let bench = Harness::open(StoreDown::Wait, Some("a"));
    bench.wait_until("held", async || bench.run_id().await.is_ok()).await;
    bench.limiter.close_quota(&bench.spec.quota);
    assert!(bench.run_id().await.unwrap_err().contains("not open"));
}

struct NoAttempts;

#[async_trait]
impl RecentAttempts for NoAttempts {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

/// A gate of a worker whose store is unavailable, once shares are in use.
async fn gate_over_a_share(limits: Vec<LimitSpec>) -> Gate {
    let bench = Harness::open(FOUR_WORKERS, None);
    let spec = QuotaSpec { limits, ..bench.spec.clone() };
    let limiter: Arc<dyn Limiter> = bench.limiter.clone();
    let (settings, spec) = watch::channel(Arc::new(spec));
    let (recent, newer, stop) = (Arc::new(NoAttempts), Arc::new(|_| {}), CancellationToken::new());
    let (gate, task) = Gate::new(GateContext { limiter, recent, spec, incarnation: 1, stop, on_newer_version: newer });
    tokio::spawn(async move {
        task.await;
        drop(settings);
    });
    bench.wait_until("shared", async || bench.run_id().await.is_ok()).await;
    use_one(&gate, charge(1, 60 * SECOND)).await;
    sleep(2 * SECOND).await;
    gate
}

fn charge(cost: u32, patience: Duration) -> AcquireRequest {
    let wait_until = Instant::now() + patience;
    AcquireRequest::new(cost, CallKind::Charge, wait_until)
}

async fn use_one(gate: &Gate, ask: AcquireRequest) {
    match gate.acquire(ask).await {
        AcquireResult::Granted(permit) => permit.begin().unwrap().release_used(Instant::now()),
        refused => panic!("{refused:?}"),
    }
}

/// Three cases: a limit on everything; one on charges alone; one on everything beside a tighter one of accounts.
#[tokio::test(start_paused = true)]
async fn job_above_a_share_delays_no_other() {
    let all = LimitSpec::sliding_log("all", 100, SECOND);
    let charges = LimitSpec { applies_to: AppliesTo::Charge, ..all.clone() };
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 8, SECOND) };
    for limits in [vec![all.clone()], vec![charges], vec![all, own]] {
        let gate = gate_over_a_share(limits).await;
        let waiting = gate.clone();
        let costly = tokio::spawn(async move { waiting.acquire(charge(30, 60 * SECOND)).await });
        for _ in 0..200 {
            sleep(Duration::from_millis(50)).await;
            use_one(&gate, charge(1, Duration::from_millis(20))).await;
            assert!(gate.is_open(), "{:?}", gate.view().borrow());
        }
        assert!(!costly.is_finished());
        costly.abort();
        // In requeue mode it gets a wait of its own, so that its lane continues.
        let AcquireResult::Refused(refusal) = gate.acquire(charge(30, Duration::ZERO)).await else { panic!("granted") };
        assert_eq!((refusal.reason, refusal.scope), (BlockReason::Limit("all".to_owned()), RefusalScope::Job));
        use_one(&gate, charge(1, Duration::from_millis(20))).await;
    }
}
