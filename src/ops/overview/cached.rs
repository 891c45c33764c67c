//! One answer for everybody who asks within a while.
//!
//! Refuses to ask twice at once, and refuses to ask again soon what was slow or failed: a source costs at most a twentieth
//! of its time, however many pages are open.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// An answer is kept for so many times as long as it took.
const COST_FACTOR: u32 = 20;
/// Longest time that an answer is kept for its cost.
const KEPT_MAX: Duration = Duration::from_secs(120);
/// A failure is kept for so long.
const FAILURE_KEPT: Duration = Duration::from_secs(2);

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
    problem: Option<String>,
}

/// What a source says: its last good answer, that answer's age, and why there is none newer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer<T> {
    pub value: Option<T>,
    pub age: Duration,
    pub problem: Option<String>,
}

impl<T: Clone> Cached<T> {
    /// `patience`: the longest time that somebody waits for the source.
    pub fn new(patience: Duration) -> Self {
        let last = Last { value: None, had_at: None, ask_from: Instant::now(), problem: None };
        Self { last: Mutex::new(last), patience }
    }

    /// The last answer if it is younger than `age_max` or was costly, else a new one.
    pub async fn get(&self, age_max: Duration, ask: impl Future<Output = Result<T, String>>) -> Answer<T> {
        let mut last = self.last.lock().await;
        let began = Instant::now();
        let stale = last.had_at.is_none_or(|at| at.elapsed() >= age_max) || last.problem.is_some();
        if stale && began >= last.ask_from {
            let answer = timeout(self.patience, ask).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            let (now, cost) = (Instant::now(), began.elapsed());
            let kept = (cost * COST_FACTOR).min(KEPT_MAX);
            match answer {
                Ok(value) => {
                    (last.value, last.had_at, last.problem) = (Some(value), Some(now), None);
                    last.ask_from = now + kept;
                }
                Err(problem) => {
                    last.problem = Some(problem);
                    last.ask_from = now + kept.max(FAILURE_KEPT);
                }
            }
        }
        let age = last.had_at.map(|at| at.elapsed()).unwrap_or_default();
        Answer { value: last.value.clone(), age, problem: last.problem.clone() }
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
        let answer = self.0.get(age_max, async { Ok((version, ask.await?)) }).await;
        Answer { value: answer.value.map(|(_, value)| value), age: answer.age, problem: answer.problem }
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
            Ok(asked.fetch_add(1, Ordering::Relaxed))
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
            Ok(asked.fetch_add(1, Ordering::Relaxed))
        };
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(0));
        advance(SECOND * 19).await;
        let answer = cached.get(SECOND * 2, ask()).await;
        assert_eq!((answer.value, answer.age), (Some(0), SECOND * 19));
        advance(SECOND * 2).await;
        assert_eq!(cached.get(SECOND * 2, ask()).await.value, Some(1));
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
        assert_eq!(cached.get(SECOND, async { Ok(7) }).await.value, Some(7));
        advance(SECOND * 2).await;
        let away = cached.get(SECOND, async { Err("away".to_owned()) }).await;
        assert_eq!((away.value, away.problem.as_deref()), (Some(7), Some("away")));
        // Not asked again at once; and one that hangs is given up.
        let still = cached.get(SECOND, async { Ok(8) }).await;
        assert_eq!((still.value, still.problem.is_some()), (Some(7), true));
        advance(SECOND * 3).await;
        let hangs = cached.get(SECOND, std::future::pending()).await;
        assert_eq!((hangs.value, hangs.problem.as_deref()), (Some(7), Some("no answer in time")));
        advance(SECOND * 30).await;
        let back = cached.get(SECOND, async { Ok(9) }).await;
        assert_eq!((back.value, back.problem), (Some(9), None));
    }
}
