use std::sync::Mutex as StdMutex;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::*;
use crate::domain::clock_witness::Word;
use crate::domain::decision::{ByKind, CallKind, Rebuild, Refusal, SubjectLimit, Want};
use crate::domain::limit::Scope;
use crate::domain::quota_spec::LimitSpec;
use crate::limiter::{AuthorityRow, Linked};

mod alone;
mod share;

const SECOND: Duration = Duration::from_secs(1);
const OF_TWO: StoreDown = StoreDown::Share { of: 2 };

fn spec(store_down: StoreDown) -> QuotaSpec {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 6, SECOND) };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: vec![LimitSpec::sliding_log("all", 10, SECOND), own],
        account_rules: Vec::new(),
        even: false,
        grant_jitter: None,
        hold_max: 5 * SECOND,
        send_budget: Duration::from_millis(500),
        store_down,
        members: Vec::new(),
        resumed_at: 0,
        handover: Timing::polled_every(SECOND).settled(),
    }
}

/// A store behind a link that can be cut and turned.
struct Links {
    store: EmbeddedLimiter,
    to: StdMutex<Option<Linked>>,
    unlinked: StdMutex<u32>,
    /// Whether it lets those wait who unlink.
    hangs: StdMutex<bool>,
}

impl Links {
    fn turn(&self, run_id: Option<&str>) {
        let made_at = Instant::now();
        *self.to.lock().unwrap() = run_id.map(|run_id| Linked { run_id: run_id.to_owned(), made_at });
    }

    fn link(&self) -> Result<Linked, LimiterError> {
        self.to.lock().unwrap().clone().ok_or_else(|| LimiterError::Away("cut".to_owned()))
    }
}

#[async_trait]
impl Limiter for Links {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok(self.link()?.run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        let link = self.link()?;
        assert_eq!(call.run_id.split('/').next(), Some(link.run_id.as_str()));
        self.store.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
        self.store.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.link().map(|_| None)
    }
}

#[async_trait]
impl LinkedLimiter for Links {
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<Linked, LimiterError>)> {
        quotas.iter().map(|quota| (quota.clone(), self.link())).collect()
    }

    async fn unlink(&self, _: &ProviderName, link: &Linked) {
        *self.unlinked.lock().unwrap() += 1;
        let hangs = *self.hangs.lock().unwrap();
        if hangs {
            std::future::pending::<()>().await;
        }
        // The same name leads to the same server.
        self.turn(Some(&link.run_id));
    }
}

/// The table, with one row, and whether the database is there.
#[derive(Default)]
struct Table(StdMutex<(Option<Kept>, bool)>);

/// Holder, term, and since when.
type Kept = (String, i64, Option<Instant>);

impl Table {
    fn write(&self, holder: &str) {
        let mut table = self.0.lock().unwrap();
        let term = table.0.as_ref().map_or(1, |row| row.1 + 1);
        table.0 = Some((holder.to_owned(), term, Some(Instant::now())));
    }

    fn holder(&self) -> Option<String> {
        self.0.lock().unwrap().0.as_ref().map(|row| row.0.clone())
    }

    fn cut(&self, is_cut: bool) {
        self.0.lock().unwrap().1 = is_cut;
    }

    fn row(&self) -> Result<Option<AuthorityRow>, String> {
        let table = self.0.lock().unwrap();
        if table.1 {
            return Err("cut".to_owned());
        }
        let age = |since: &Option<Instant>| since.map_or(Duration::ZERO, |since| since.elapsed());
        Ok(table.0.as_ref().map(|(holder, term, since)| AuthorityRow {
            holder: holder.clone(),
            term: *term,
            age: age(since),
            now: Micros(0),
            word: None,
        }))
    }
}

#[async_trait]
impl AuthorityRows for Table {
    async fn authority(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, AuthorityRow>, String> {
        let row = self.row()?;
        Ok(quotas.iter().filter_map(|quota| Some((quota.clone(), row.clone()?))).collect())
    }

    async fn take(&self, _: &ProviderName, from: Option<&str>, to: &str) -> Result<AuthorityRow, String> {
        if self.row()?.map(|row| row.holder).as_deref() == from {
            self.write(to);
        }
        self.row()?.ok_or_else(|| "no row".to_owned())
    }

    async fn note_clock(&self, _: &ProviderName, _: i64, _: &Word) -> Result<(), String> {
        self.row().map(drop)
    }
}

struct Bench {
    links: Arc<Links>,
    table: Arc<Table>,
    authorised: Arc<Authorised>,
    spec: QuotaSpec,
    calls: u64,
}

impl Bench {
    /// A process that has just opened the quota, with a link to this server.
    fn open(store_down: StoreDown, run_id: Option<&str>) -> Self {
        let links = Arc::new(Links {
            store: EmbeddedLimiter::new(),
            to: StdMutex::default(),
            unlinked: StdMutex::default(),
            hangs: StdMutex::default(),
        });
        links.turn(run_id);
        let table = Arc::new(Table::default());
        let authorised = Arc::new(Authorised::new(links.clone(), table.clone(), Timing::polled_every(SECOND)));
        let spec = spec(store_down);
        authorised.opened(&spec);
        let tended = Arc::clone(&authorised);
        tokio::spawn(async move { tended.tend(CancellationToken::new()).await });
        Self { links, table, authorised, spec, calls: 0 }
    }

    async fn run_id(&self) -> Result<String, String> {
        self.authorised.run_id(&self.spec.quota).await.map_err(|error| error.to_string())
    }

    async fn may_rebuild(&self) -> bool {
        self.authorised.may_rebuild(&self.spec.quota).await
    }

    async fn call(&mut self, wants: Vec<Want>, run_id: &str, rebuild: Option<Rebuild>) -> Result<Reply, LimiterError> {
        self.calls += 1;
        let call = Call {
            incarnation: 1,
            number: self.calls,
            wants,
            settlements: Vec::new(),
            pause: None,
            rebuild,
            seeds: None,
            distrust: None,
            run_id: run_id.to_owned(),
        };
        self.authorised.call(&self.spec, &call).await
    }

    /// What a ledger without recent requests lets the state grant.
    async fn warm(&mut self, run_id: &str) {
        let cold = self.call(Vec::new(), run_id, None).await.unwrap();
        assert_eq!(cold.refused.map(|refused| refused.by), Some(Refusal::Cold));
        let rebuild = Rebuild { born: cold.born, ended: Vec::new(), open: ByKind::default() };
        assert_eq!(self.call(Vec::new(), run_id, Some(rebuild)).await.unwrap().refused, None);
    }

    async fn until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let so = async {
            while !is_so().await {
                sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(timeout(300 * SECOND, so).await.is_ok(), "not so: {what}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_to_come_takes_the_row_and_waits_until_all_have_seen_it() {
    let mut bench = Bench::open(StoreDown::Wait, Some("a"));
    assert!(bench.run_id().await.unwrap_err().contains("has not said yet"));
    bench.until("taken", async || bench.run_id().await.is_ok()).await;
    assert_eq!((bench.table.holder().unwrap().as_str(), bench.run_id().await.unwrap().as_str()), ("redis:a", "a/1"));
    let since = Instant::now();
    assert!(!bench.may_rebuild().await);
    bench.until("settled", async || bench.may_rebuild().await).await;
    // Three polls, booking horizon and send budget.
    assert!(since.elapsed() >= Duration::from_millis(3_750) && since.elapsed() < 5 * SECOND, "{:?}", since.elapsed());
    bench.warm("a/1").await;
    assert_eq!(bench.call(vec![Want::charges(20, 1)], "a/1", None).await.unwrap().permits(), 10);
}

#[tokio::test(start_paused = true)]
async fn another_term_is_another_state() {
    let mut bench = Bench::open(StoreDown::Wait, Some("a"));
    bench.until("settled", async || bench.may_rebuild().await).await;
    bench.warm("a/1").await;
    // Somebody else held the row in between.
    bench.table.write("redis:b");
    bench.table.write("redis:a");
    bench.until("seen", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
    let error = bench.call(vec![Want::charges(1, 1)], "a/1", None).await.unwrap_err();
    assert!(error.to_string().contains("another holder"), "{error}");
    let reply = bench.call(vec![Want::charges(1, 1)], "a/3", None).await.unwrap();
    assert_eq!(reply.refused.map(|refused| refused.by), Some(Refusal::Cold));
    assert!(!bench.may_rebuild().await);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_leads_elsewhere_is_made_anew_and_then_believed() {
    let bench = Bench::open(StoreDown::Wait, Some("a"));
    bench.until("settled", async || bench.may_rebuild().await).await;
    bench.table.write("redis:b");
    bench.until("made anew", async || *bench.links.unlinked.lock().unwrap() >= 1).await;
    bench.until("taken", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
    assert_eq!(bench.table.holder().unwrap(), "redis:a");
}

#[tokio::test(start_paused = true)]
async fn a_link_that_cannot_be_dropped_hides_no_row_and_grants_nothing() {
    let mut bench = Bench::open(StoreDown::Wait, Some("a"));
    bench.until("settled", async || bench.may_rebuild().await).await;
    bench.warm("a/1").await;
    *bench.links.hangs.lock().unwrap() = true;
    bench.table.write("redis:b");
    bench.until("told to unlink", async || *bench.links.unlinked.lock().unwrap() >= 1).await;
    for _ in 0..10 {
        let error = bench.call(vec![Want::charges(1, 1)], "a/1", None).await.unwrap_err();
        assert!(error.to_string().contains("another limiter store grants"), "{error}");
        sleep(SECOND).await;
    }
    bench.table.write("redis:a");
    bench.until("seen", async || bench.run_id().await.is_ok_and(|id| id == "a/3")).await;
}

#[tokio::test(start_paused = true)]
async fn a_row_that_cannot_be_read_ends_the_grants() {
    let mut bench = Bench::open(StoreDown::Wait, Some("a"));
    bench.until("settled", async || bench.may_rebuild().await).await;
    bench.warm("a/1").await;
    bench.table.cut(true);
    let since = Instant::now();
    bench.until("nobody", async || bench.run_id().await.is_err()).await;
    assert!(since.elapsed() <= Duration::from_millis(3_100), "{:?}", since.elapsed());
    let error = bench.call(vec![Want::charges(1, 1)], "a/1", None).await.unwrap_err();
    assert!(error.to_string().contains("the database cannot be asked"), "{error}");
    bench.table.cut(false);
    bench.until("again", async || bench.run_id().await.is_ok()).await;
    // Nobody else has granted meanwhile.
    assert_eq!(bench.call(vec![Want::charges(1, 1)], "a/1", None).await.unwrap().permits(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_share_is_what_the_limits_allow_divided() {
    let mut bench = Bench::open(OF_TWO, None);
    assert!(bench.run_id().await.is_err());
    bench.until("shared", async || bench.run_id().await.is_ok()).await;
    assert_eq!((bench.table.holder().unwrap().as_str(), bench.run_id().await.unwrap().as_str()), ("share", "share/1"));
    assert!(bench.may_rebuild().await);
    bench.warm("share/1").await;
    let subject = |index, max_requests| Subject {
        key: "account:a".to_owned(),
        limits: vec![SubjectLimit { index, max_requests, window: SECOND, burst: None, exempt: false }],
    };
    let own = Want { subjects: vec![subject(1, 6)], ..Want::charges(4, 1) };
    // Costs more than a share, own account's share, what is left.
    let reply = bench.call(vec![Want::charges(1, 6), own, Want::charges(9, 1)], "share/1", None).await.unwrap();
    let granted: Vec<(usize, u32)> = reply.granted.iter().map(|run| (run.want, run.permits)).collect();
    assert_eq!(granted, [(1, 3), (2, 2)], "{reply:?}");
    let passed: Vec<usize> = reply.passed_over.iter().map(|passed| passed.want).collect();
    assert_eq!(passed, [1, 0], "{reply:?}");
    assert_eq!(reply.refused.map(|refused| refused.by), Some(Refusal::Limit { index: 0 }));
    let peeked = bench.authorised.peek(&bench.spec, None).await.unwrap();
    assert_eq!((peeked[0].max_requests, peeked[0].used), (5, 5));
    let peeked = bench.authorised.peek(&bench.spec, Some(&subject(1, 6))).await.unwrap();
    assert_eq!((peeked[1].max_requests, peeked[1].used), (3, 3), "its share as well: {peeked:?}");
    // The store is back: for a minute nobody trusts it, then it holds again and begins cold.
    bench.links.turn(Some("b"));
    let since = Instant::now();
    bench.until("the store's", async || bench.run_id().await.is_ok_and(|id| id == "b/2")).await;
    assert!(since.elapsed() >= 50 * SECOND, "{:?}", since.elapsed());
    let reply = bench.call(vec![Want { kind: CallKind::Charge, ..Want::charges(1, 1) }], "b/2", None).await.unwrap();
    assert_eq!(reply.refused.map(|refused| refused.by), Some(Refusal::Cold));
}

#[tokio::test(start_paused = true)]
async fn who_waits_takes_no_share() {
    let bench = Bench::open(StoreDown::Wait, None);
    sleep(120 * SECOND).await;
    assert_eq!(bench.table.holder(), None);
    assert!(bench.run_id().await.unwrap_err().contains("cut"), "says why");
}

#[tokio::test(start_paused = true)]
async fn a_quota_that_is_closed_is_nobodys() {
    let bench = Bench::open(StoreDown::Wait, Some("a"));
    bench.until("held", async || bench.run_id().await.is_ok()).await;
    bench.authorised.closed(&bench.spec.quota);
    assert!(bench.run_id().await.unwrap_err().contains("not open"));
}
