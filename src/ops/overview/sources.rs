//! The queries of the overview's sources: the cache of a source's last value, and queries for each provider.
//!
//! There is one query at a time per source. A slow query's result is kept longer, so that a source is busy at most a
//! twentieth of the time, however many pages are open. A failure is kept for half a second, so that a recovered source
//! is queried again within its timeout and that. A source that hangs is queried once per timeout. Up to three slow
//! queries in a row do not make a slow source: they waited for connections, or for a backend that had just started.
//! Queries for each provider have a bound on their number, so that they do not crowd a backend that payments need.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use crate::fleet::workers::Outage;

/// A result is kept for this many times the duration of its query.
const COST_FACTOR: u32 = 20;
/// Longest time that a result is kept for its cost.
const TTL_MAX: Duration = Duration::from_secs(120);
/// How long a failure is kept.
pub const FAILURE_TTL: Duration = Duration::from_millis(500);

/// Queries of which the shortest duration counts. After an outage two in a row were seen to be slow.
const COST_QUERIES: usize = 4;

/// The cost of a query: the shortest of the last durations. Others waited for a connection or for a busy machine. A
/// source costs nothing until that many were queried.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueryCost {
    durations: [Duration; COST_QUERIES],
}

impl QueryCost {
    /// Records the duration of a query; returns the cost.
    pub fn record(&mut self, took: Duration) -> Duration {
        self.durations.rotate_right(1);
        self.durations[0] = took;
        self.durations.into_iter().fold(took, Duration::min)
    }
}

/// A source with its cached value.
pub struct CachedSource<T> {
    state: Mutex<CacheState<T>>,
    query_timeout: Duration,
}

struct CacheState<T> {
    value: Option<T>,
    /// When the value was fetched.
    fetched_at: Option<Instant>,
    next_query_at: Instant,
    cost: QueryCost,
    problem: Option<String>,
    outage: Option<(Instant, Option<Instant>)>,
}

/// The result of a query; a partial value and a problem are possible together.
pub struct QueryResult<T> {
    pub value: Option<T>,
    pub problem: Option<String>,
}

impl<T> From<Result<T, String>> for QueryResult<T> {
    fn from(answer: Result<T, String>) -> Self {
        match answer {
            Ok(value) => Self { value: Some(value), problem: None },
            Err(problem) => Self { value: None, problem: Some(problem) },
        }
    }
}

/// The last value of a source, its age, and why there is no newer one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedValue<T> {
    pub value: Option<T>,
    pub age: Duration,
    pub problem: Option<String>,
    /// The last period without a response.
    pub outage: Option<Outage>,
}

impl<T> CachedValue<T> {
    /// For a source that is not queried now.
    pub fn not_queried() -> Self {
        Self { value: None, age: Duration::ZERO, problem: None, outage: None }
    }

    /// The value, unless the last query failed.
    pub fn current(self) -> Option<T> {
        self.value.filter(|_| self.problem.is_none())
    }
}

impl<T: Clone> CachedSource<T> {
    /// `query_timeout` is the longest time that a reader waits for the source.
    pub fn new(query_timeout: Duration) -> Self {
        let last = CacheState {
            value: None,
            fetched_at: None,
            next_query_at: Instant::now(),
            cost: QueryCost::default(),
            problem: None,
            outage: None,
        };
        Self { state: Mutex::new(last), query_timeout }
    }

    /// The cached value if it is younger than `age_max` or its query was slow, else a new one.
    pub async fn get<A: Into<QueryResult<T>>>(
        &self,
        age_max: Duration,
        ask: impl Future<Output = A>,
    ) -> CachedValue<T> {
        let mut last = self.state.lock().await;
        let began = Instant::now();
        let stale = last.fetched_at.is_none_or(|at| at.elapsed() >= age_max) || last.problem.is_some();
        if stale && began >= last.next_query_at {
            let asked = match timeout(self.query_timeout, ask).await {
                Ok(answer) => answer.into(),
                Err(_) => QueryResult { value: None, problem: Some("no answer in time".to_owned()) },
            };
            last.record(asked, began);
        }
        last.current_value()
    }

    /// The cached value, without a query.
    pub async fn cached_value(&self) -> CachedValue<T> {
        self.state.lock().await.current_value()
    }
}

impl<T: Clone> CacheState<T> {
    fn record(&mut self, asked: QueryResult<T>, began: Instant) {
        let now = Instant::now();
        self.next_query_at = now
            + match asked.problem {
                Some(_) => FAILURE_TTL,
                None => (self.cost.record(now - began) * COST_FACTOR).min(TTL_MAX),
            };
        self.outage = match (&asked.problem, self.outage) {
            (Some(_), Some((from, None))) => Some((from, None)),
            (Some(_), _) => Some((self.fetched_at.unwrap_or(began), None)),
            (None, Some((from, None))) => Some((from, Some(now))),
            (None, outage) => outage,
        };
        self.problem = asked.problem;
        if asked.value.is_some() {
            (self.value, self.fetched_at) = (asked.value, Some(now));
        }
    }

    fn current_value(&self) -> CachedValue<T> {
        let age = self.fetched_at.map(|at| at.elapsed()).unwrap_or_default();
        let outage = self.outage.map(|(from, to)| Outage { began: from.elapsed(), ended: to.map(|to| to.elapsed()) });
        CachedValue { value: self.value.clone(), age, problem: self.problem.clone(), outage }
    }
}

/// The cached value of a source whose version shows a change.
pub struct VersionedSource<T>(CachedSource<(i64, T)>);

impl<T: Clone> VersionedSource<T> {
    pub fn new(query_timeout: Duration) -> Self {
        Self(CachedSource::new(query_timeout))
    }

    /// The cached value if it has this version and is younger than `age_max`, or its query was slow, else a new one. A
    /// change soon after a slow query is read as soon as the next query is allowed.
    pub async fn get(
        &self,
        version: i64,
        age_max: Duration,
        ask: impl Future<Output = Result<T, String>>,
    ) -> CachedValue<T> {
        let had = self.0.state.lock().await.value.as_ref().map(|(version, _)| *version);
        let age_max = if had == Some(version) { age_max } else { Duration::ZERO };
        Self::without_version(self.0.get(age_max, async { Ok((version, ask.await?)) }).await)
    }

    /// The cached value, without a query.
    pub async fn cached_value(&self) -> CachedValue<T> {
        Self::without_version(self.0.cached_value().await)
    }

    fn without_version(answer: CachedValue<(i64, T)>) -> CachedValue<T> {
        let CachedValue { value, age, problem, outage } = answer;
        CachedValue { value: value.map(|(_, value)| value), age, problem, outage }
    }
}

/// A larger clock skew makes displayed times misleading; limits do not depend on it.
const CLOCK_SKEW_MAX_MS: u64 = 5_000;

/// The warning about clocks that differ.
pub fn clock_skew_warning(skew_ms: i64) -> Option<String> {
    let seconds = skew_ms.unsigned_abs() / 1_000;
    (skew_ms.unsigned_abs() > CLOCK_SKEW_MAX_MS).then(|| {
        format!(
            "the clocks of database and this machine differ by {seconds} s: displayed times are wrong, limits are not"
        )
    })
}

/// Timeout for broker and limiter: below the timeout of a source, so that partial results are shown.
const BACKEND_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Concurrent queries: each uses a channel of the broker meanwhile.
const CONCURRENCY: usize = 8;

/// The results in order; `None` for a query without a response when [`BACKEND_TIMEOUT`] ends for all of them.
pub async fn query_concurrently<T>(asks: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<Option<T>> {
    let (places, until) = (&Semaphore::new(CONCURRENCY), Instant::now() + BACKEND_TIMEOUT);
    let each = asks.into_iter().map(|ask| async move {
        let in_turn = async {
            let _place = places.acquire().await;
            ask.await
        };
        timeout_at(until, in_turn).await.ok()
    });
    join_all(each).await
}

/// Splits the results into values and the last problem.
pub fn split_results<T>(answers: Vec<Option<Result<T, String>>>) -> (Vec<T>, Option<String>) {
    let (mut values, mut problem) = (Vec::new(), None);
    for answer in answers {
        match answer.unwrap_or_else(|| Err("no answer in time".to_owned())) {
            Ok(value) => values.push(value),
            Err(error) => problem = Some(error),
        }
    }
    (values, problem)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    use tokio::time::{advance, sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn concurrent_readers_share_one_query() {
        let (cached, asked) = (CachedSource::new(SECOND * 5), AtomicU32::new(0));
        let ask = || async {
            sleep(Duration::from_millis(10)).await;
            Ok::<_, String>(asked.fetch_add(1, Ordering::Relaxed))
        };
        let all = futures_util::future::join_all((0..10).map(|_| cached.get(SECOND * 2, ask()))).await;
        assert!(all.iter().all(|answer| answer.value == Some(0)), "{all:?}");
        advance(SECOND).await;
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(0));
        advance(SECOND).await;
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_sources_are_cached_longer() {
        let (cached, asked) = (CachedSource::new(SECOND * 5), AtomicU32::new(0));
        let ask = || async {
            sleep(SECOND).await;
            Ok::<_, String>(asked.fetch_add(1, Ordering::Relaxed))
        };
        for nth in 0..4 {
            assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(nth), "slow {nth} times before");
            advance(SECOND * 2).await;
        }
        advance(SECOND * 17).await;
        let answer = cached.get(SECOND * 2, ask()).await;
        assert_eq!((answer.value, answer.age), (Some(3), SECOND * 19));
        advance(SECOND * 2).await;
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(4));
    }

    /// The first queries after an outage wait for connections, and for a backend that has just started.
    #[tokio::test(start_paused = true)]
    async fn few_slow_queries_keep_a_short_ttl() {
        let (cached, asked) = (CachedSource::new(SECOND * 5), AtomicU32::new(0));
        let ask = |takes: Duration| {
            let asked = &asked;
            async move {
                sleep(takes).await;
                Ok(asked.fetch_add(1, Ordering::Relaxed))
            }
        };
        assert_eq!(cached.get(SECOND, ask(SECOND / 100)).await.value, Some(0));
        advance(SECOND).await;
        for nth in 1..=4 {
            assert_eq!(cached.get(SECOND, ask(SECOND)).await.value, Some(nth), "slow {} times before", nth - 1);
            advance(SECOND).await;
        }
        advance(SECOND * 15).await;
        assert_eq!(cached.get(SECOND, ask(SECOND)).await.value, Some(4), "slow four times is costly");
    }

    /// An operator pauses and resumes within a few seconds, on a slow database.
    #[tokio::test(start_paused = true)]
    async fn early_change_is_read_after_the_ttl() {
        let rows = VersionedSource::new(SECOND * 5);
        let ask = |value: &'static str| async move {
            sleep(SECOND / 10).await;
            Ok(value)
        };
        let minute = SECOND * 60;
        for _ in 0..4 {
            advance(minute).await;
            assert_eq!(rows.get(1, minute, ask("running")).await.value, Some("running"));
        }
        advance(SECOND * 30).await;
        assert_eq!(rows.get(1, minute, ask("not asked")).await.value, Some("running"));
        assert_eq!(rows.get(2, minute, ask("paused")).await.value, Some("paused"));
        advance(SECOND).await;
        assert_eq!(rows.get(3, minute, ask("resumed")).await.value, Some("paused"));
        advance(SECOND * 2).await;
        assert_eq!(rows.get(3, minute, ask("resumed")).await.value, Some("resumed"));
        assert_eq!(rows.get(3, minute, ask("not asked")).await.value, Some("resumed"));
    }

    #[tokio::test(start_paused = true)]
    async fn failure_keeps_the_last_value() {
        let cached = CachedSource::new(SECOND);
        assert_eq!(cached.get(SECOND, async { Ok::<_, String>(7) }).await.value, Some(7));
        advance(SECOND * 2).await;
        let unavailable = cached.get(SECOND, async { Err::<i32, _>("away".to_owned()) }).await;
        assert_eq!((unavailable.value, unavailable.problem.as_deref()), (Some(7), Some("away")));
        // Not queried again immediately; a hanging query times out.
        let still = cached.get(SECOND, async { Ok::<_, String>(8) }).await;
        assert_eq!((still.value, still.problem.is_some()), (Some(7), true));
        advance(SECOND * 3).await;
        let hangs = cached.get(SECOND, std::future::pending::<Result<i32, String>>()).await;
        assert_eq!((hangs.value, hangs.problem.as_deref()), (Some(7), Some("no answer in time")));
        advance(SECOND * 30).await;
        let back = cached.get(SECOND, async { Ok::<_, String>(9) }).await;
        assert_eq!((back.value, back.problem), (Some(9), None));
        assert_eq!(back.outage.map(|outage| outage.ended), Some(Some(Duration::ZERO)));
    }

    /// A source fails shortly before its timeout, again and again, and then recovers. The test bounds the queries
    /// meanwhile and the time until the new value.
    #[tokio::test(start_paused = true)]
    async fn recovered_source_is_queried_within_three_seconds() {
        for (what, part) in [("no answer", None), ("an answer in part", Some(1))] {
            let (cached, asked) = (CachedSource::new(SECOND * 2), AtomicU32::new(0));
            let works = std::cell::Cell::new(false);
            let ask = || async {
                asked.fetch_add(1, Ordering::Relaxed);
                if works.get() {
                    return QueryResult { value: Some(7), problem: None };
                }
                sleep(Duration::from_millis(1_900)).await;
                QueryResult { value: part, problem: Some("away".to_owned()) }
            };
            let began = Instant::now();
            while began.elapsed() < SECOND * 60 {
                let result = cached.get(SECOND, ask()).await;
                assert_eq!((result.value, result.problem.is_some()), (part, true), "{what}");
                advance(Duration::from_millis(50)).await;
            }
            let questions = asked.load(Ordering::Relaxed);
            assert!((20..=30).contains(&questions), "{what}: {questions} questions in a minute");
            works.set(true);
            let works_since = Instant::now();
            while cached.get(SECOND, ask()).await.current() != Some(7) {
                advance(Duration::from_millis(50)).await;
            }
            assert!(works_since.elapsed() <= SECOND * 3, "{what}: {:?}", works_since.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn queries_run_with_bounded_concurrency() {
        let (under_way, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ask = async |number: usize| {
            most.fetch_max(under_way.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            sleep(Duration::from_millis(1)).await;
            under_way.fetch_sub(1, Ordering::Relaxed);
            number
        };
        let results = query_concurrently((0..500).map(ask)).await;
        assert_eq!(results, (0..500).map(Some).collect::<Vec<_>>());
        assert_eq!(most.into_inner(), CONCURRENCY);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_query_does_not_block_others() {
        let began = Instant::now();
        let ask = async |number: usize| match number % 20 {
            0 => std::future::pending().await,
            3 => Err("away".to_owned()),
            _ => Ok(number),
        };
        let (results, problem) = split_results(query_concurrently((0..100).map(ask)).await);
        assert_eq!((results.len(), problem.as_deref()), (90, Some("away")));
        assert_eq!(began.elapsed(), BACKEND_TIMEOUT, "for all of them together");
        let hang = query_concurrently((0..20).map(|_| std::future::pending::<Result<(), String>>())).await;
        assert_eq!(split_results(hang), (Vec::new(), Some("no answer in time".to_owned())));
    }
}
