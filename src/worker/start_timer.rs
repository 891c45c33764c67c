//! A timer for the start of requests, exact to a fraction of a millisecond: tokio's timer counts whole milliseconds and
//! rounds up.
//!
//! One thread per worker keeps all starts in order and sleeps until the first. It begins with the first sleeper and
//! ends with its owner. It never ends a sleep early, by any clock: an early start could exceed the limit. With a paused
//! clock, as in tests, tokio's timer is used alone. See `docs/decisions/0017-spread-and-time-starts.md`.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::time::{Instant, sleep_until};

/// Owner of the timer thread.
#[derive(Debug, Default)]
pub struct StartTimer {
    shared: Arc<Shared>,
    /// Begins with the first sleeper; `None`: the system grants no thread, and tokio's timer is used.
    thread: OnceLock<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<SleepQueue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SleepQueue {
    /// By instant, then in order of arrival.
    sleepers: BTreeMap<SleepKey, Waker>,
    arrivals: u64,
    ended: bool,
}

type SleepKey = (std::time::Instant, u64);

/// An entry of the queue, removed when it is dropped.
struct Sleeper<'a> {
    shared: &'a Shared,
    key: Option<SleepKey>,
}

impl StartTimer {
    /// Sleeps until this instant or shortly after it, never less.
    pub async fn sleep_until(&self, instant: Instant) {
        while Instant::now() < instant {
            if is_real_clock() && self.has_thread() {
                self.shared.sleep_until(instant.into_std()).await;
            } else {
                sleep_until(instant).await;
            }
        }
    }

    /// Times until the starts of this time ahead, in their order.
    pub fn starts_within(&self, time: Duration) -> Vec<Duration> {
        let now = std::time::Instant::now();
        let queue = self.shared.queue.lock();
        let starts = queue.sleepers.range(..(now + time, 0));
        starts.map(|((at, _), _)| at.saturating_duration_since(now)).collect()
    }

    fn has_thread(&self) -> bool {
        let start = || {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("start-timer".to_owned()).spawn(move || shared.run());
            let failed = "failed to start the timer thread; requests may start up to 2 ms late";
            spawned.inspect_err(|error| tracing::warn!(%error, "{failed}")).ok()
        };
        self.thread.get_or_init(start).is_some()
    }
}

impl Drop for StartTimer {
    fn drop(&mut self) {
        self.shared.queue.lock().ended = true;
        self.shared.changed.notify_one();
        if let Some(Some(thread)) = self.thread.take() {
            // It waits for nothing but the queue, and does nothing that panics.
            let _ = thread.join();
        }
    }
}

impl Shared {
    async fn sleep_until(&self, instant: std::time::Instant) {
        let mut sleeper = Sleeper { shared: self, key: None };
        poll_fn(|context| sleeper.poll(instant, context)).await;
    }

    /// The thread: wakes the sleepers whose instant has come, until its owner is dropped.
    fn run(&self) {
        let mut queue = self.queue.lock();
        while !queue.ended {
            let now = std::time::Instant::now();
            let due = queue.take_due(now);
            if !due.is_empty() {
                drop(queue);
                due.into_iter().for_each(Waker::wake);
                queue = self.queue.lock();
                continue;
            }
            let first = queue.sleepers.first_key_value().map(|((first, _), _)| *first);
            match first {
                Some(first) => _ = self.changed.wait_until(&mut queue, first),
                None => self.changed.wait(&mut queue),
            }
        }
    }
}

impl SleepQueue {
    fn take_due(&mut self, now: std::time::Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(first) = self.sleepers.first_entry().filter(|first| first.key().0 <= now) {
            due.push(first.remove());
        }
        due
    }
}

impl Sleeper<'_> {
    fn poll(&mut self, instant: std::time::Instant, context: &Context<'_>) -> Poll<()> {
        if std::time::Instant::now() >= instant {
            return Poll::Ready(());
        }
        let mut queue = self.shared.queue.lock();
        let key = *self.key.get_or_insert_with(|| {
            queue.arrivals += 1;
            (instant, queue.arrivals)
        });
        queue.sleepers.insert(key, context.waker().clone());
        let is_first = queue.sleepers.first_key_value().is_some_and(|(first, _)| *first == key);
        drop(queue);
        if is_first {
            self.shared.changed.notify_one();
        }
        Poll::Pending
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.shared.queue.lock().sleepers.remove(&key);
        }
    }
}

/// Whether tokio's clock is the system's. A paused clock lies outside of the two values that are read around it.
fn is_real_clock() -> bool {
    let (before, now, after) = (Instant::now(), std::time::Instant::now(), Instant::now());
    before.into_std() <= now && now <= after.into_std()
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};
    use tokio::task::JoinSet;

    use super::*;

    fn sleepers(timer: &StartTimer) -> usize {
        timer.shared.queue.lock().sleepers.len()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn start_timer_never_fires_early() {
        let timer = Arc::new(StartTimer::default());
        let mut rng = StdRng::seed_from_u64(1);
        let mut sleeping = JoinSet::new();
        for _ in 0..1_000 {
            let (timer, instant) =
                (timer.clone(), Instant::now() + Duration::from_micros(rng.random_range(0..250_000)));
            sleeping.spawn(async move {
                timer.sleep_until(instant).await;
                let now = Instant::now();
                assert!(now >= instant, "{:?} early", instant - now);
            });
        }
        while let Some(ended) = sleeping.join_next().await {
            ended.unwrap();
        }
        assert_eq!(sleepers(&timer), 0);
    }

    #[tokio::test]
    async fn cancelled_sleepers_are_removed() {
        let timer = StartTimer::default();
        let far = Instant::now() + Duration::from_secs(3_600);
        for _ in 0..10 {
            let woken = tokio::time::timeout(Duration::from_millis(2), timer.sleep_until(far)).await;
            assert!(woken.is_err());
        }
        assert_eq!(sleepers(&timer), 0);
        // A later sleeper is woken nevertheless.
        timer.sleep_until(Instant::now() + Duration::from_millis(3)).await;
    }

    #[tokio::test]
    async fn next_starts_are_told_in_order() {
        let timer = Arc::new(StartTimer::default());
        let mut sleeping = JoinSet::new();
        for seconds in [90, 30, 60, 3_600] {
            let (timer, at) = (timer.clone(), Instant::now() + Duration::from_secs(seconds));
            sleeping.spawn(async move { timer.sleep_until(at).await });
        }
        while sleepers(&timer) < 4 {
            tokio::task::yield_now().await;
        }
        let starts = timer.starts_within(Duration::from_secs(600));
        let wanted = [30, 60, 90].map(Duration::from_secs);
        assert_eq!(starts.len(), wanted.len());
        let is_near =
            |(start, wanted): (&Duration, Duration)| *start <= wanted && *start > wanted - Duration::from_secs(25);
        assert!(starts.iter().zip(wanted).all(is_near), "{starts:?}");
        assert!(timer.starts_within(Duration::ZERO).is_empty());
    }

    #[tokio::test]
    async fn nearer_start_does_not_wait_for_later_one() {
        let timer = Arc::new(StartTimer::default());
        let far = tokio::spawn({
            let timer = timer.clone();
            async move { timer.sleep_until(Instant::now() + Duration::from_secs(3_600)).await }
        });
        while sleepers(&timer) == 0 {
            tokio::task::yield_now().await;
        }
        timer.sleep_until(Instant::now() + Duration::from_millis(5)).await;
        far.abort();
        assert!(far.await.unwrap_err().is_cancelled());
        assert_eq!(sleepers(&timer), 0);
    }

    #[tokio::test]
    async fn the_thread_ends_with_its_owner() {
        let timer = StartTimer::default();
        assert!(timer.thread.get().is_none());
        timer.sleep_until(Instant::now() + Duration::from_millis(1)).await;
        assert!(matches!(timer.thread.get(), Some(Some(_))));
        let shared = Arc::downgrade(&timer.shared);
        drop(timer);
        assert_eq!(shared.strong_count(), 0, "the thread still holds the queue");
    }

    #[tokio::test(start_paused = true)]
    async fn paused_clock_uses_tokios_timer() {
        let (timer, started) = (StartTimer::default(), std::time::Instant::now());
        for seconds in [0, 1, 3_600] {
            let instant = Instant::now() + Duration::from_secs(seconds);
            timer.sleep_until(instant).await;
            assert!((instant..=instant + Duration::from_millis(2)).contains(&Instant::now()));
        }
        assert!(started.elapsed() < Duration::from_secs(3_600));
        assert!(timer.thread.get().is_none(), "no thread for virtual time");
    }
}
