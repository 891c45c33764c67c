//! Tests of the backlog counts while the ledger or the queues fail or hang, in virtual time.

use std::sync::Mutex;
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

    async fn jobs(&self) -> Result<Vec<ProviderReconciliation>, String> {
        self.counts.fetch_add(1, Ordering::Relaxed);
        let does = *self.ledger.lock().unwrap();
        sleep(self.count_duration).await;
        match does {
            SourceBehaviour::Answers => Ok(vec![ProviderReconciliation::default()]),
            SourceBehaviour::Fails => Err("gone".to_owned()),
            SourceBehaviour::Hangs => std::future::pending().await,
        }
    }

    async fn queue_depths(&self) -> QueryResult<QueueDepths> {
        self.depths.fetch_add(1, Ordering::Relaxed);
        let does = *self.queue.lock().unwrap();
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
            *sources.queue.lock().unwrap() = outage;
            sources.read_until(&counts, 60, |_| false).await;
            let snapshot = counts.current().await;
            assert!(
                snapshot.depths.is_empty() && snapshot.queue_problem.is_some() && snapshot.reconciliations.is_some()
            );
            let (counted, asked) = (sources.counts.load(Ordering::Relaxed), sources.depths.load(Ordering::Relaxed));
            assert!(counted <= 61 && asked <= 190, "{counted} counts and {asked} questions in a minute");
            *sources.queue.lock().unwrap() = SourceBehaviour::Answers;
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
            *sources.queue.lock().unwrap() = outage;
            let took = sources.read_until(&counts, 20, |snapshot| snapshot.queue_problem.is_some()).await;
            assert!(took <= SECOND * 4, "{took:?}");
            assert!(counts.last().depths.is_empty(), "an old depth of a queue that does not respond");
            assert_eq!(sources.counts.load(Ordering::Relaxed), 4, "the count of the ledger is kept");
            *sources.queue.lock().unwrap() = SourceBehaviour::Answers;
            let took = sources.read_until(&counts, 20, |snapshot| snapshot.queue_problem.is_none()).await;
            assert!(took <= SECOND * 4, "{took:?}");
            assert_eq!(counts.last().depths.get("acme"), Some(&7));
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn hanging_count_restarts_after_recovery() {
    let (sources, counts) = (FakeSources::all_available(), BacklogCounter::new());
    while_counting(&sources, &counts, async {
        *sources.ledger.lock().unwrap() = SourceBehaviour::Hangs;
        sources.read_until(&counts, 40, |_| false).await;
        assert_eq!(sources.counts.load(Ordering::Relaxed), 1, "one question at a time");
        *sources.ledger.lock().unwrap() = SourceBehaviour::Answers;
        counts.notify_database_recovered();
        let took = sources.read_until(&counts, 60, |snapshot| snapshot.reconciliations.is_some()).await;
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
        *sources.ledger.lock().unwrap() = SourceBehaviour::Fails;
        sources.read_until(&counts, 10, |_| false).await;
        let snapshot = counts.current().await;
        assert!(
            snapshot.problem.is_some() && snapshot.reconciliations.is_some(),
            "the last snapshot is kept, with its age"
        );
        assert!(snapshot.started_at.is_some_and(|at| at.elapsed() >= SECOND * 8));
        sleep(STALE_AFTER).await;
        assert!(counts.current().await.reconciliations.is_none(), "an old count is not shown");
    })
    .await;
}
