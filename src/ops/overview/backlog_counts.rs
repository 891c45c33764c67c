//! The counts of the backlog: the jobs of the ledger, and the messages in the lanes' queues, in one snapshot.
//!
//! A count reads all open jobs, about two seconds per million on two cores. So it runs only on request, and at most an
//! eighth of the time; readers get the last snapshot meanwhile. With a longer pause, a lane with ten thousands of jobs
//! would send more than a hundredth of them before the next count.
//!
//! Queue depths are cheap: while a snapshot is kept, they are queried every two seconds, and a queue that does not respond
//! is missing from then on. While one is missing, all queues are queried twice a second, and the ledger is counted again
//! once all respond. After an outage of the database it is counted immediately.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::sources::{FAILURE_TTL, QueryCost, QueryResult};
use crate::fleet::{UsageByQuota, by_provider};
use crate::ledger::upkeep::{CheckScope, ProviderReconciliation};
use crate::worker::sweeper::CHECKED_JOBS;

/// A count is kept for at least this time, and for [`COST_FACTOR`] times its duration.
const TTL_MIN: Duration = Duration::from_secs(1);
const COST_FACTOR: u32 = 8;
const TTL_MAX: Duration = Duration::from_secs(4 * 60);
/// How often the queues are queried while all of them respond and a count is kept.
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// An older count is not shown.
const STALE_AFTER: Duration = Duration::from_secs(5 * 60);
/// How long a reader waits for a count that is due.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// A count that takes longer than that, and so many times as long as usual, is logged.
const LOGGED_FACTOR: u32 = 4;

/// Time after which a count compares the finished jobs of the last minutes with their events and attempts again. That
/// costs more than all else of a count, and the sweeper does it as often.
const FINISHED_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Messages ready in queues, by provider.
pub type QueueDepths = BTreeMap<String, u64>;

type CountQuery<'a, T> = &'a (dyn Fn() -> BoxFuture<'a, T> + Send + Sync);

/// The jobs of the ledger, and the usage of the limits at the same moment.
#[derive(Clone, Debug, Default)]
pub struct CountedJobs {
    pub reconciliations: Vec<ProviderReconciliation>,
    /// Empty: the limiter did not answer in time.
    pub limit_usage: UsageByQuota,
}

/// The faults of finished jobs that the last comparison found. Counts take them from there until the next one.
#[derive(Default)]
pub struct FinishedChecks(Mutex<Option<(Instant, BTreeMap<String, ProviderReconciliation>)>>);

impl FinishedChecks {
    /// The jobs of the ledger, by `reconcile`. Faults of finished jobs are older by at most [`FINISHED_CHECK_INTERVAL`].
    pub async fn count<E>(
        &self,
        reconcile: impl AsyncFnOnce(CheckScope) -> Result<Vec<ProviderReconciliation>, E>,
    ) -> Result<Vec<ProviderReconciliation>, E> {
        let began = Instant::now();
        let is_due = self.0.lock().as_ref().is_none_or(|(at, _)| began - *at >= FINISHED_CHECK_INTERVAL);
        let mut counted = reconcile(if is_due { CHECKED_JOBS } else { CheckScope::CountsOnly }).await?;
        let mut checked = self.0.lock();
        match checked.as_ref().filter(|_| !is_due) {
            None => *checked = Some((began, by_provider(counted.iter().cloned()))),
            Some((_, earlier)) => {
                for account in &mut counted {
                    if let Some(earlier) = earlier.get(&account.provider) {
                        account.take_checks_of(earlier);
                    }
                }
            }
        }
        Ok(counted)
    }
}

/// The queries of a snapshot.
#[derive(Clone, Copy)]
pub struct CountQueries<'a> {
    pub jobs: CountQuery<'a, Result<CountedJobs, String>>,
    pub depths: CountQuery<'a, QueryResult<QueueDepths>>,
}

/// The last snapshot.
#[derive(Clone, Debug, Default)]
pub struct BacklogCounts {
    pub jobs: Option<Arc<CountedJobs>>,
    /// Without queues that did not respond.
    pub depths: QueueDepths,
    /// Why the last count failed.
    pub problem: Option<String>,
    /// Why a queue is missing.
    pub queue_problem: Option<String>,
    /// Start of the last snapshot; later changes are not in it.
    pub started_at: Option<Instant>,
    pub due_at: Option<Instant>,
}

pub struct BacklogCounter {
    latest: watch::Sender<BacklogCounts>,
    requested: Notify,
    database_recovered: Notify,
}

/// When the next count starts.
enum NextCount {
    OnRequest,
    Immediately,
}

impl BacklogCounter {
    pub fn new() -> Self {
        Self { latest: watch::Sender::default(), requested: Notify::new(), database_recovered: Notify::new() }
    }

    /// Counts until `stop` fires.
    pub async fn run(&self, asks: CountQueries<'_>, stop: &CancellationToken) {
        stop.run_until_cancelled(async {
            let (mut next, mut cost) = (NextCount::OnRequest, QueryCost::default());
            loop {
                if matches!(next, NextCount::OnRequest) {
                    self.requested.notified().await;
                }
                next = self.count_once(asks, &mut cost).await;
            }
        })
        .await;
    }

    async fn count_once(&self, CountQueries { jobs, depths }: CountQueries<'_>, cost: &mut QueryCost) -> NextCount {
        let began = Instant::now();
        let counting = async {
            let counted = jobs().await;
            (counted, began.elapsed())
        };
        // A count that started during an outage may hang long after its end.
        let ((counted, took), asked) = tokio::select! {
            // The ledger first: a message that is taken meanwhile is then in neither count, and never in both.
            both = async { (counting.await, depths().await) } => both,
            () = self.database_recovered.notified() => return NextCount::Immediately,
        };
        let usual = if counted.is_ok() { cost.record(took) } else { took };
        let queues_took = began.elapsed() - took;
        if took + queues_took > COUNT_TIMEOUT.max(usual * LOGGED_FACTOR) {
            let [took_ms, queues_took_ms, usual_ms] = [took, queues_took, usual].map(|time| time.as_millis());
            let text = "a count of the backlog was slow; readouts show the one before for longer";
            tracing::info!(took_ms, queues_took_ms, usual_ms, "{text}");
        }
        let kept = usual * COST_FACTOR;
        let kept = kept.clamp(TTL_MIN, TTL_MAX);
        let due_at = Instant::now() + kept;
        let queues_missing = asked.problem.is_some();
        self.latest.send_modify(|latest| {
            latest.due_at = Some(due_at);
            match counted {
                Ok(jobs) => {
                    latest.jobs = Some(Arc::new(jobs));
                    (latest.depths, latest.queue_problem) = (asked.value.unwrap_or_default(), asked.problem);
                    (latest.problem, latest.started_at) = (None, Some(began));
                }
                Err(error) => latest.problem = Some(error),
            }
        });
        tokio::select! {
            () = sleep(kept) => NextCount::OnRequest,
            () = self.database_recovered.notified() => NextCount::Immediately,
            () = self.watch_queues(depths, queues_missing) => NextCount::Immediately,
        }
    }

    /// Ends when a queue was missing and all queues respond. One that stops responding is missing in the snapshot.
    async fn watch_queues(&self, depths: CountQuery<'_, QueryResult<QueueDepths>>, mut missing: bool) {
        loop {
            sleep(if missing { FAILURE_TTL } else { QUEUE_CHECK_INTERVAL }).await;
            let asked = depths().await;
            match asked.problem {
                None if missing => return,
                None => {}
                Some(problem) => {
                    missing = true;
                    let responding = asked.value.unwrap_or_default();
                    self.latest.send_modify(|latest| {
                        // A newer depth next to an older count of the ledger could count a job twice.
                        latest.depths.retain(|provider, _| responding.contains_key(provider));
                        latest.queue_problem = Some(problem);
                    });
                }
            }
        }
    }

    /// The last snapshot, or the next one if it is due and ready within [`COUNT_TIMEOUT`].
    pub async fn current(&self) -> BacklogCounts {
        let mut latest = self.latest.subscribe();
        let due = latest.borrow_and_update().due_at.is_none_or(|at| at <= Instant::now());
        if due {
            self.requested.notify_one();
            // A later result is shown to the next reader.
            if timeout(COUNT_TIMEOUT, latest.changed()).await.is_err() {
                tracing::debug!("the count of jobs takes longer; the last count is shown");
            }
        }
        self.last()
    }

    /// The last snapshot. If it is older than `age`, requests the next one without waiting for it.
    pub fn last_and_request(&self, age: Duration) -> BacklogCounts {
        let latest = self.latest.borrow().clone();
        let due = latest.due_at.is_none_or(|at| at <= Instant::now());
        if due && latest.started_at.is_none_or(|at| at.elapsed() >= age) {
            self.requested.notify_one();
        }
        self.last()
    }

    /// The database is available again: starts a new count, so that no older one is shown.
    pub fn notify_database_recovered(&self) {
        self.database_recovered.notify_one();
    }

    /// The last snapshot, without counts that are too old.
    pub fn last(&self) -> BacklogCounts {
        let last = self.latest.borrow().clone();
        let old = last.started_at.is_none_or(|at| at.elapsed() > STALE_AFTER);
        if old { BacklogCounts { jobs: None, depths: QueueDepths::new(), ..last } } else { last }
    }
}

/// The ledger or the queues fail or hang, in virtual time.
#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum SourceBehaviour {
        Answers,
        Fails,
        Hangs,
    }

    /// A fake ledger and queue with a settable behaviour, and counts of their queries.
    struct FakeSources {
        ledger: Mutex<SourceBehaviour>,
        queue: Mutex<SourceBehaviour>,
        count_duration: Duration,
        counts: AtomicU32,
        depths: AtomicU32,
    }

    impl FakeSources {
        fn all_available() -> Self {
            let [ledger, queue] = [SourceBehaviour::Answers, SourceBehaviour::Answers].map(Mutex::new);
            let [counts, depths] = [0, 0].map(AtomicU32::new);
            Self { ledger, queue, count_duration: Duration::ZERO, counts, depths }
        }

        async fn jobs(&self) -> Result<CountedJobs, String> {
            self.counts.fetch_add(1, Ordering::Relaxed);
            let does = *self.ledger.lock();
            sleep(self.count_duration).await;
            match does {
                SourceBehaviour::Answers => Ok(CountedJobs::default()),
                SourceBehaviour::Fails => Err("gone".to_owned()),
                SourceBehaviour::Hangs => std::future::pending().await,
            }
        }

        async fn queue_depths(&self) -> QueryResult<QueueDepths> {
            self.depths.fetch_add(1, Ordering::Relaxed);
            let does = *self.queue.lock();
            if does == SourceBehaviour::Answers {
                return QueryResult { value: Some([("acme".to_owned(), 7)].into()), problem: None };
            }
            if does == SourceBehaviour::Hangs {
                sleep(SECOND * 3 / 2).await;
            }
            QueryResult { value: Some(QueueDepths::new()), problem: Some("gone".to_owned()) }
        }

        /// Reads repeatedly for `seconds`, or until `enough` is true.
        async fn read_until(
            &self,
            counts: &BacklogCounter,
            seconds: u32,
            enough: impl Fn(&BacklogCounts) -> bool,
        ) -> Duration {
            let began = Instant::now();
            while began.elapsed() < SECOND * seconds {
                if enough(&counts.current().await) {
                    break;
                }
                sleep(SECOND / 10).await;
            }
            began.elapsed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn finished_jobs_are_checked_once_a_minute() {
        let checks = FinishedChecks::default();
        let (mut scopes, mut faults) = (Vec::new(), Vec::new());
        for second in 0..90_u64 {
            // One more job of no event at each comparison.
            let counted = checks.count(async |scope| {
                scopes.push(scope);
                let without_event = if scope == CheckScope::CountsOnly { 0 } else { second + 1 };
                let acme = ProviderReconciliation { provider: "acme".to_owned(), without_event, ..Default::default() };
                Ok::<_, ()>(vec![acme])
            });
            faults.push(counted.await.unwrap().remove(0).without_event);
            advance(SECOND).await;
        }
        assert_eq!(scopes.iter().filter(|scope| **scope == CHECKED_JOBS).count(), 2, "{scopes:?}");
        assert_eq!((faults[59], faults[60], faults[89]), (1, 61, 61), "{faults:?}");
    }

    /// Runs the counter until `watch` ends.
    async fn while_counting(sources: &FakeSources, counts: &BacklogCounter, watch: impl Future<Output = ()>) {
        let (jobs, depths) = (|| sources.jobs().boxed(), || sources.queue_depths().boxed());
        let stop = CancellationToken::new();
        let watch = async {
            watch.await;
            stop.cancel();
        };
        tokio::join!(counts.run(CountQueries { jobs: &jobs, depths: &depths }, &stop), watch);
    }

    #[tokio::test(start_paused = true)]
    async fn recovered_queues_are_counted_within_three_seconds() {
        for outage in [SourceBehaviour::Fails, SourceBehaviour::Hangs] {
            let (sources, counts) = (FakeSources::all_available(), BacklogCounter::new());
            while_counting(&sources, &counts, async {
                *sources.queue.lock() = outage;
                sources.read_until(&counts, 60, |_| false).await;
                let snapshot = counts.current().await;
                assert!(snapshot.depths.is_empty() && snapshot.queue_problem.is_some() && snapshot.jobs.is_some());
                let (counted, asked) = (sources.counts.load(Ordering::Relaxed), sources.depths.load(Ordering::Relaxed));
                assert!(counted <= 61 && asked <= 190, "{counted} counts and {asked} questions in a minute");
                *sources.queue.lock() = SourceBehaviour::Answers;
                let took = sources.read_until(&counts, 60, |snapshot| snapshot.depths.get("acme") == Some(&7)).await;
                assert!(took <= SECOND * 3, "{took:?}");
            })
            .await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn queue_that_fails_is_missing_in_a_kept_count() {
        for outage in [SourceBehaviour::Fails, SourceBehaviour::Hangs] {
            let sources = FakeSources { count_duration: SECOND * 3 / 2, ..FakeSources::all_available() };
            let counts = BacklogCounter::new();
            while_counting(&sources, &counts, async {
                // A source is slow after four slow counts.
                sources.read_until(&counts, 20, |_| sources.counts.load(Ordering::Relaxed) == 4).await;
                sources.read_until(&counts, 2, |_| false).await;
                assert_eq!(counts.last().depths.get("acme"), Some(&7));
                *sources.queue.lock() = outage;
                let took = sources.read_until(&counts, 20, |snapshot| snapshot.queue_problem.is_some()).await;
                assert!(took <= SECOND * 4, "{took:?}");
                assert!(counts.last().depths.is_empty(), "an old depth of a queue that does not respond");
                assert_eq!(sources.counts.load(Ordering::Relaxed), 4, "the count of the ledger is kept");
                *sources.queue.lock() = SourceBehaviour::Answers;
                let took = sources.read_until(&counts, 20, |snapshot| snapshot.queue_problem.is_none()).await;
                assert!(took <= SECOND * 4, "{took:?}");
                assert_eq!(counts.last().depths.get("acme"), Some(&7));
            })
            .await;
        }
    }

    /// A quarter of a second each: half a minute has a count every two seconds.
    #[tokio::test(start_paused = true)]
    async fn slow_count_takes_an_eighth_of_the_time() {
        let sources = FakeSources { count_duration: SECOND / 4, ..FakeSources::all_available() };
        let counts = BacklogCounter::new();
        while_counting(&sources, &counts, async {
            // A source is slow after four slow counts.
            sources.read_until(&counts, 20, |_| sources.counts.load(Ordering::Relaxed) == 4).await;
            sources.read_until(&counts, 30, |_| false).await;
            let counted = sources.counts.load(Ordering::Relaxed) - 4;
            assert!((12..=14).contains(&counted), "{counted} counts");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_count_restarts_after_recovery() {
        let (sources, counts) = (FakeSources::all_available(), BacklogCounter::new());
        while_counting(&sources, &counts, async {
            *sources.ledger.lock() = SourceBehaviour::Hangs;
            sources.read_until(&counts, 40, |_| false).await;
            assert_eq!(sources.counts.load(Ordering::Relaxed), 1, "one question at a time");
            *sources.ledger.lock() = SourceBehaviour::Answers;
            counts.notify_database_recovered();
            let took = sources.read_until(&counts, 60, |snapshot| snapshot.jobs.is_some()).await;
            assert!(took <= SECOND * 3, "{took:?}");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn ledger_and_queues_are_counted_on_request() {
        let (sources, counts) = (FakeSources::all_available(), BacklogCounter::new());
        while_counting(&sources, &counts, async {
            advance(SECOND * 60).await;
            assert_eq!(sources.counts.load(Ordering::Relaxed), 0);
            sources.read_until(&counts, 20, |_| false).await;
            let (counted, asked) = (sources.counts.load(Ordering::Relaxed), sources.depths.load(Ordering::Relaxed));
            assert!((18..=21).contains(&counted) && counted == asked, "{counted} counts, {asked} questions");
            *sources.ledger.lock() = SourceBehaviour::Fails;
            sources.read_until(&counts, 10, |_| false).await;
            let snapshot = counts.current().await;
            assert!(snapshot.problem.is_some() && snapshot.jobs.is_some(), "the last snapshot is kept, with its age");
            assert!(snapshot.started_at.is_some_and(|at| at.elapsed() >= SECOND * 8));
            sleep(STALE_AFTER).await;
            assert!(counts.current().await.jobs.is_none(), "an old count is not shown");
        })
        .await;
    }
}
