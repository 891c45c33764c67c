//! One answer for everybody who asks within a while.
//!
//! A source has one question at a time. A slow answer is kept for longer, so that a source costs at most a twentieth of its
//! time, however many pages are open. A failure is kept for half a second, however long it took: a source that works again
//! is asked again within its patience and that. One that hangs is asked once per patience. An answer that is slow only once
//! is not costly: it had to wait for a connection, as the first one does after an outage.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::fleet::workers::Outage;

/// An answer is kept for so many times as long as it took.
const COST_FACTOR: u32 = 20;
/// Longest time that an answer is kept for its cost.
const KEPT_MAX: Duration = Duration::from_secs(120);
/// A failure is kept for so long.
pub(super) const FAILURE_KEPT: Duration = Duration::from_millis(500);

/// What an answer costs: the less of the last two, of which one may have waited for a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    last: Option<Duration>,
}

impl Cost {
    /// After an answer that took so long.
    pub fn after(&mut self, took: Duration) -> Duration {
        let before = self.last.replace(took);
        before.map_or(took, |before| before.min(took))
    }
}

/// The last answer of one source.
pub(super) struct Cached<T> {
    last: Mutex<Last<T>>,
    patience: Duration,
}

struct Last<T> {
    value: Option<T>,
    /// Since the value was had.
    had_at: Option<Instant>,
    ask_from: Instant,
    cost: Cost,
    problem: Option<String>,
    outage: Option<(Instant, Option<Instant>)>,
}

/// What one question came to: an answer may be there in part.
pub(super) struct Asked<T> {
    pub value: Option<T>,
    pub problem: Option<String>,
}

impl<T> From<Result<T, String>> for Asked<T> {
    fn from(answer: Result<T, String>) -> Self {
        match answer {
            Ok(value) => Self { value: Some(value), problem: None },
            Err(problem) => Self { value: None, problem: Some(problem) },
        }
    }
}

/// What a source says: its last good answer, that answer's age, and why there is none newer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer<T> {
    pub value: Option<T>,
    pub age: Duration,
    pub problem: Option<String>,
    /// The last time in which it did not answer.
    pub outage: Option<Outage>,
}

impl<T> Answer<T> {
    /// Of a source that is not asked now.
    pub fn none() -> Self {
        Self { value: None, age: Duration::ZERO, problem: None, outage: None }
    }

    /// The answer, unless the last question failed.
    pub fn current(self) -> Option<T> {
        self.value.filter(|_| self.problem.is_none())
    }
}

impl<T: Clone> Cached<T> {
    /// `patience`: the longest time that somebody waits for the source.
    pub fn new(patience: Duration) -> Self {
        let last = Last {
            value: None,
            had_at: None,
            ask_from: Instant::now(),
            cost: Cost::default(),
            problem: None,
            outage: None,
        };
        Self { last: Mutex::new(last), patience }
    }

    /// The last answer if it is younger than `age_max` or was costly, else a new one.
    pub async fn get<A: Into<Asked<T>>>(&self, age_max: Duration, ask: impl Future<Output = A>) -> Answer<T> {
        let mut last = self.last.lock().await;
        let began = Instant::now();
        let stale = last.had_at.is_none_or(|at| at.elapsed() >= age_max) || last.problem.is_some();
        if stale && began >= last.ask_from {
            let asked = match timeout(self.patience, ask).await {
                Ok(answer) => answer.into(),
                Err(_) => Asked { value: None, problem: Some("no answer in time".to_owned()) },
            };
            last.take(asked, began);
        }
        last.told()
    }

    /// The last answer; asks nothing.
    pub async fn last(&self) -> Answer<T> {
        self.last.lock().await.told()
    }
}

impl<T: Clone> Last<T> {
    fn take(&mut self, asked: Asked<T>, began: Instant) {
        let now = Instant::now();
        self.ask_from = now
            + match asked.problem {
                Some(_) => FAILURE_KEPT,
                None => (self.cost.after(now - began) * COST_FACTOR).min(KEPT_MAX),
            };
        self.outage = match (&asked.problem, self.outage) {
            (Some(_), Some((from, None))) => Some((from, None)),
            (Some(_), _) => Some((self.had_at.unwrap_or(began), None)),
            (None, Some((from, None))) => Some((from, Some(now))),
            (None, outage) => outage,
        };
        self.problem = asked.problem;
        if asked.value.is_some() {
            (self.value, self.had_at) = (asked.value, Some(now));
        }
    }

    fn told(&self) -> Answer<T> {
        let age = self.had_at.map(|at| at.elapsed()).unwrap_or_default();
        let outage = self.outage.map(|(from, to)| Outage { began: from.elapsed(), ended: to.map(|to| to.elapsed()) });
        Answer { value: self.value.clone(), age, problem: self.problem.clone(), outage }
    }
}

/// The last answer of a source that tells by a version when it has changed.
pub(super) struct Versioned<T>(Cached<(i64, T)>);

impl<T: Clone> Versioned<T> {
    pub fn new(patience: Duration) -> Self {
        Self(Cached::new(patience))
    }

    /// The last answer if it was asked for at this version and is younger than `age_max`, or was costly, else a new one. A
    /// change that comes too soon after a costly answer is followed as soon as that may be asked for again.
    pub async fn get(
        &self,
        version: i64,
        age_max: Duration,
        ask: impl Future<Output = Result<T, String>>,
    ) -> Answer<T> {
        let had = self.0.last.lock().await.value.as_ref().map(|(version, _)| *version);
        let age_max = if had == Some(version) { age_max } else { Duration::ZERO };
        Self::plain(self.0.get(age_max, async { Ok((version, ask.await?)) }).await)
    }

    /// The last answer; asks nothing.
    pub async fn last(&self) -> Answer<T> {
        Self::plain(self.0.last().await)
    }

    fn plain(answer: Answer<(i64, T)>) -> Answer<T> {
        let Answer { value, age, problem, outage } = answer;
        Answer { value: value.map(|(_, value)| value), age, problem, outage }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::time::{advance, sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn many_who_ask_cost_one() {
        let (cached, asked) = (Cached::new(SECOND * 5), AtomicU32::new(0));
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
    async fn what_is_slow_is_asked_seldom() {
        let (cached, asked) = (Cached::new(SECOND * 5), AtomicU32::new(0));
        let ask = || async {
            sleep(SECOND).await;
            Ok::<_, String>(asked.fetch_add(1, Ordering::Relaxed))
        };
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(0));
        advance(SECOND * 19).await;
        let answer = cached.get(SECOND * 2, ask()).await;
        assert_eq!((answer.value, answer.age), (Some(0), SECOND * 19));
        advance(SECOND * 2).await;
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(1));
    }

    /// The first question after an outage waits for a connection.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_slow_once_is_not_kept_for_long() {
        let (cached, asked) = (Cached::new(SECOND * 5), AtomicU32::new(0));
        let ask = |takes: Duration| {
            let asked = &asked;
            async move {
                sleep(takes).await;
                Ok(asked.fetch_add(1, Ordering::Relaxed))
            }
        };
        assert_eq!(cached.get(SECOND, ask(SECOND / 100)).await.value, Some(0));
        advance(SECOND).await;
        assert_eq!(cached.get(SECOND, ask(SECOND)).await.value, Some(1));
        advance(SECOND).await;
        assert_eq!(cached.get(SECOND, ask(SECOND)).await.value, Some(2), "slow once");
        advance(SECOND * 15).await;
        assert_eq!(cached.get(SECOND, ask(SECOND)).await.value, Some(2), "slow twice is costly");
    }

    /// Paused and resumed within a few seconds, by somebody whose database is slow.
    #[tokio::test(start_paused = true)]
    async fn a_change_that_comes_too_soon_after_a_costly_answer_is_not_forgotten() {
        let rows = Versioned::new(SECOND * 5);
        let ask = |said: &'static str| async move {
            sleep(SECOND / 10).await;
            Ok(said)
        };
        let minute = SECOND * 60;
        assert_eq!(rows.get(1, minute, ask("running")).await.value, Some("running"));
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
    async fn the_last_answer_stays_with_what_went_wrong() {
        let cached = Cached::new(SECOND);
        assert_eq!(cached.get(SECOND, async { Ok::<_, String>(7) }).await.value, Some(7));
        advance(SECOND * 2).await;
        let away = cached.get(SECOND, async { Err::<i32, _>("away".to_owned()) }).await;
        assert_eq!((away.value, away.problem.as_deref()), (Some(7), Some("away")));
        // Not asked again at once; and one that hangs is given up.
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

    /// A source that answers nothing for its patience, time after time; then it works. How soon is it asked again, and how
    /// often was it asked meanwhile?
    #[tokio::test(start_paused = true)]
    async fn a_source_that_works_again_is_asked_within_three_seconds_and_one_that_hangs_is_not_hammered() {
        for (what, part) in [("no answer", None), ("an answer in part", Some(1))] {
            let (cached, asked) = (Cached::new(SECOND * 2), AtomicU32::new(0));
            let works = std::cell::Cell::new(false);
            let ask = || async {
                asked.fetch_add(1, Ordering::Relaxed);
                if works.get() {
                    return Asked { value: Some(7), problem: None };
                }
                sleep(Duration::from_millis(1_900)).await;
                Asked { value: part, problem: Some("away".to_owned()) }
            };
            let began = Instant::now();
            while began.elapsed() < SECOND * 60 {
                let told = cached.get(SECOND, ask()).await;
                assert_eq!((told.value, told.problem.is_some()), (part, true), "{what}");
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
}
