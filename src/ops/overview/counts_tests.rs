//! Snapshots while ledger or queues fail, in virtual time.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::FutureExt as _;
use tokio::time::advance;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    Answers,
    Fails,
    Hangs,
}

/// Ledger and queue, as they are at the moment, and how often they were asked.
struct Sources {
    ledger: Mutex<Does>,
    queue: Mutex<Does>,
    counts: AtomicU32,
    depths: AtomicU32,
}

impl Sources {
    fn all_answer() -> Self {
        let [ledger, queue] = [Does::Answers, Does::Answers].map(Mutex::new);
        Self { ledger, queue, counts: AtomicU32::default(), depths: AtomicU32::default() }
    }

    async fn jobs(&self) -> Result<Vec<Conserved>, String> {
        self.counts.fetch_add(1, Ordering::Relaxed);
        let does = *self.ledger.lock().unwrap();
        match does {
            Does::Answers => Ok(vec![Conserved::default()]),
            Does::Fails => Err("gone".to_owned()),
            Does::Hangs => std::future::pending().await,
        }
    }

    async fn ready(&self) -> Asked<Depths> {
        self.depths.fetch_add(1, Ordering::Relaxed);
        let does = *self.queue.lock().unwrap();
        if does == Does::Answers {
            return Asked { value: Some([("acme".to_owned(), 7)].into()), problem: None };
        }
        if does == Does::Hangs {
            sleep(SECOND * 3 / 2).await;
        }
        Asked { value: Some(Depths::new()), problem: Some("gone".to_owned()) }
    }

    /// Someone asks each second, for so many seconds or until `enough`.
    async fn watched(&self, counts: &Counts, seconds: u32, enough: impl Fn(&Counted) -> bool) -> Duration {
        let began = Instant::now();
        while began.elapsed() < SECOND * seconds {
            if enough(&counts.wanted().await) {
                break;
            }
            sleep(SECOND / 10).await;
        }
        began.elapsed()
    }
}

/// Counts until `watch` is through.
async fn kept(sources: &Sources, counts: &Counts, watch: impl Future<Output = ()>) {
    let (jobs, depths) = (|| sources.jobs().boxed(), || sources.ready().boxed());
    let stop = CancellationToken::new();
    let watch = async {
        watch.await;
        stop.cancel();
    };
    tokio::join!(counts.keep(Asks { jobs: &jobs, depths: &depths }, &stop), watch);
}

#[tokio::test(start_paused = true)]
async fn queues_that_answer_again_are_counted_within_three_seconds_and_are_not_hammered() {
    for outage in [Does::Fails, Does::Hangs] {
        let (sources, counts) = (Sources::all_answer(), Counts::new());
        kept(&sources, &counts, async {
            *sources.queue.lock().unwrap() = outage;
            sources.watched(&counts, 60, |_| false).await;
            let told = counts.wanted().await;
            assert!(told.depths.is_empty() && told.queue_problem.is_some() && told.accounts.is_some());
            let (counted, asked) = (sources.counts.load(Ordering::Relaxed), sources.depths.load(Ordering::Relaxed));
            assert!(counted <= 31 && asked <= 160, "{counted} counts and {asked} questions in a minute");
            *sources.queue.lock().unwrap() = Does::Answers;
            let took = sources.watched(&counts, 60, |told| told.depths.get("acme") == Some(&7)).await;
            assert!(took <= SECOND * 3, "{took:?}");
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_count_that_hangs_is_begun_anew_when_the_database_is_back() {
    let (sources, counts) = (Sources::all_answer(), Counts::new());
    kept(&sources, &counts, async {
        *sources.ledger.lock().unwrap() = Does::Hangs;
        sources.watched(&counts, 40, |_| false).await;
        assert_eq!(sources.counts.load(Ordering::Relaxed), 1, "one question at a time");
        *sources.ledger.lock().unwrap() = Does::Answers;
        counts.recovered();
        let took = sources.watched(&counts, 60, |told| told.accounts.is_some()).await;
        assert!(took <= SECOND * 3, "{took:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn ledger_and_queues_are_read_together_and_only_while_someone_asks() {
    let (sources, counts) = (Sources::all_answer(), Counts::new());
    kept(&sources, &counts, async {
        advance(SECOND * 60).await;
        assert_eq!(sources.counts.load(Ordering::Relaxed), 0);
        sources.watched(&counts, 20, |_| false).await;
        let (counted, asked) = (sources.counts.load(Ordering::Relaxed), sources.depths.load(Ordering::Relaxed));
        assert!((9..=11).contains(&counted) && counted == asked, "{counted} counts, {asked} questions");
        *sources.ledger.lock().unwrap() = Does::Fails;
        sources.watched(&counts, 10, |_| false).await;
        let told = counts.wanted().await;
        assert!(told.problem.is_some() && told.accounts.is_some(), "the last snapshot, with its age");
        assert!(told.had_at.is_some_and(|at| at.elapsed() >= SECOND * 8));
        sleep(OLD).await;
        assert!(counts.wanted().await.accounts.is_none(), "it says nothing of now");
    })
    .await;
}
