//! Processes with embedded limiters on one database, each of which has, or had, the one right to run.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::limiter::alone::{Alone, SoleRight};

#[derive(Default)]
struct Right(AtomicBool);

impl Right {
    fn held(is_held: bool) -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(is_held)))
    }
}

#[async_trait]
impl SoleRight for Right {
    async fn is_held(&self) -> Result<(), String> {
        if self.0.load(Ordering::Relaxed) { Ok(()) } else { Err("another run".to_owned()) }
    }
}

/// A process that has just opened the quota.
struct Process {
    authorised: Arc<Authorised>,
    spec: QuotaSpec,
    calls: u64,
    warm: Option<String>,
}

impl Process {
    fn start(run_id: &str, right: Arc<Right>, table: &Arc<Table>) -> Self {
        let store = Arc::new(Alone::new(run_id.to_owned(), right));
        let authorised = Arc::new(Authorised::new(store, table.clone(), Timing::polled_every(SECOND)));
        let spec = spec(StoreDown::Wait);
        authorised.opened(&spec);
        let tended = Arc::clone(&authorised);
        tokio::spawn(async move { tended.tend(CancellationToken::new()).await });
        Self { authorised, spec, calls: 0, warm: None }
    }

    /// One permit, if it is granted now; the state is warmed as soon as it may be.
    async fn grants(&mut self) -> bool {
        let Ok(run_id) = self.authorised.run_id(&self.spec.quota).await else { return false };
        let Ok(reply) = self.call(&run_id, None).await else { return false };
        if self.warm.as_ref() == Some(&run_id) {
            return reply.permits() == 1;
        }
        if self.authorised.may_rebuild(&self.spec.quota).await {
            let rebuild = Rebuild { born: reply.born, ended: Vec::new(), open: ByKind::default() };
            self.call(&run_id, Some(rebuild)).await.unwrap();
            self.warm = Some(run_id);
        }
        false
    }

    async fn call(&mut self, run_id: &str, rebuild: Option<Rebuild>) -> Result<Reply, LimiterError> {
        self.calls += 1;
        let call = Call {
            incarnation: 1,
            number: self.calls,
            wants: vec![Want::charges(1, 1)],
            settlements: Vec::new(),
            pause: None,
            rebuild,
            seeds: None,
            distrust: None,
            run_id: run_id.to_owned(),
        };
        self.authorised.call(&self.spec, &call).await
    }
}

/// When each granted last: the limit's ten at once, every few seconds, because nobody settles. One may only begin when what
/// the other was granted can start no more.
async fn watch(processes: &mut [Process; 2], seconds: u64) -> [Option<Duration>; 2] {
    let begun = Instant::now();
    let mut last: [Option<Instant>; 2] = [None; 2];
    while begun.elapsed() < Duration::from_secs(seconds) {
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
    last.map(|at| at.map(|at| at - begun))
}

#[tokio::test(start_paused = true)]
async fn who_has_lost_the_right_grants_nothing_before_the_next_one_does() {
    let (table, rights) = (Arc::new(Table::default()), [Right::held(true), Right::held(false)]);
    let mut both = ["a", "b"].map(|id| Process::start(id, rights[usize::from(id == "b")].clone(), &table));
    let [first, second] = watch(&mut both, 20).await;
    assert!(first.is_some_and(|at| at > 10 * SECOND) && second.is_none(), "{first:?} {second:?}");
    rights[0].0.store(false, Ordering::Relaxed);
    rights[1].0.store(true, Ordering::Relaxed);
    let [first, second] = watch(&mut both, 20).await;
    assert!(first.is_none_or(|at| at < 3 * SECOND), "{first:?}");
    assert!(second.is_some_and(|at| at > 10 * SECOND), "{second:?}");
    assert_eq!(table.holder().unwrap(), "redis:b");
}

/// As when the database restarts, and everybody's session ends: nobody's right is what it seems for a while.
#[tokio::test(start_paused = true)]
async fn two_that_both_think_they_have_the_right_never_grant_at_once() {
    let table = Arc::new(Table::default());
    let right = Right::held(true);
    let mut both = ["a", "b"].map(|id| Process::start(id, right.clone(), &table));
    let lasts = watch(&mut both, 60).await;
    assert_ne!(table.holder(), None, "{lasts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_right_that_comes_back_to_its_holder_costs_no_cold_start() {
    let (table, right) = (Arc::new(Table::default()), Right::held(true));
    let other = Process::start("b", Right::held(false), &table);
    let mut both = [Process::start("a", right.clone(), &table), other];
    watch(&mut both, 20).await;
    right.0.store(false, Ordering::Relaxed);
    let [first, _] = watch(&mut both, 5).await;
    assert!(first.is_none_or(|at| at <= 2 * SECOND), "{first:?}");
    right.0.store(true, Ordering::Relaxed);
    let [first, second] = watch(&mut both, 3).await;
    assert!(first.is_some() && second.is_none(), "{first:?} {second:?}");
    assert_eq!(both[0].warm.as_deref(), Some("a/1"));
}
