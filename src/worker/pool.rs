//! The leaky bucket as a pool: a bounded place where jobs wait for a worker, and a steady outflow.
//!
//! Refuses to take jobs by itself: the lane bounds how many are in hand. Among those that wait, the higher priority
//! leaves first, then the older. A turn is one worker; dropping it frees the worker. A job that the outflow does not count
//! waits for a worker alone.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::job::JobId;
use crate::domain::leaky_bucket::LeakyBucket;

const SWEEP_FROM: usize = 64;

/// The right of one job to be worked on.
#[derive(Debug)]
pub struct Turn {
    pool: mpsc::UnboundedSender<Message>,
    pace: Pace,
    unused: bool,
}

impl Turn {
    /// No request comes of it: the next one need not wait as if one had.
    pub fn unused(&mut self) {
        self.unused = self.pace == Pace::Outflow;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A pool that has stopped counts nobody.
        let _ = self.pool.send(Message::Left { unused: self.unused });
    }
}

/// What a job waits for besides a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The steady outflow, which counts it.
    Outflow,
    /// Nothing: its own limits are waited for at the gate.
    Free,
}

/// Where a job waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPlace {
    /// How many go before it.
    pub before: u32,
    /// Until the outflow lets it go; later where all workers are busy.
    pub leaves_in: Duration,
}

enum Message {
    Enter { priority: u8, waiter: Waiter },
    Where { job: JobId, reply: oneshot::Sender<Option<PoolPlace>> },
    Left { unused: bool },
    Settings { workers: u32, jobs_per_second: f64 },
}

struct Waiter {
    job: Option<JobId>,
    pace: Pace,
    reply: oneshot::Sender<Turn>,
}

/// A handle on one lane's pool; cheap to clone.
#[derive(Clone, Debug)]
pub struct Pool {
    messages: mpsc::UnboundedSender<Message>,
}

struct PoolTask {
    inbox: mpsc::UnboundedReceiver<Message>,
    messages: mpsc::UnboundedSender<Message>,
    waiting: BTreeMap<(u8, u64), Waiter>,
    /// Those that the outflow does not count.
    free: BTreeMap<(u8, u64), Waiter>,
    /// So many in line are worth a look for those who have gone: nobody looks at all of them for each who comes.
    sweep_from: usize,
    arrivals: u64,
    working: u32,
    workers: u32,
    bucket: LeakyBucket,
    started: Instant,
}

impl Pool {
    /// The pool and the task that runs it, for the caller to spawn and track.
    pub fn new(workers: u32, jobs_per_second: f64, stop: CancellationToken) -> (Self, impl Future<Output = ()> + Send) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let task = PoolTask {
            inbox,
            messages: messages.clone(),
            waiting: BTreeMap::new(),
            free: BTreeMap::new(),
            sweep_from: SWEEP_FROM,
            arrivals: 0,
            working: 0,
            workers,
            bucket: LeakyBucket::new(jobs_per_second),
            started: Instant::now(),
        };
        (Self { messages }, task.run(stop))
    }

    /// Waits for a turn; `None` when the pool stops first.
    pub fn turn(&self, priority: u8) -> impl Future<Output = Option<Turn>> + Send + use<> {
        self.enter(None, priority, Pace::Outflow)
    }

    /// The same, for a job whose place can be asked for by its id ([`Pool::place_of`]).
    pub fn turn_for(&self, job: JobId, priority: u8, pace: Pace) -> impl Future<Output = Option<Turn>> + Send + use<> {
        self.enter(Some(job), priority, pace)
    }

    /// Enters at once: what waits is the reply alone, since thousands do.
    fn enter(&self, job: Option<JobId>, priority: u8, pace: Pace) -> impl Future<Output = Option<Turn>> + Send + use<> {
        let (reply, turn) = oneshot::channel();
        // A pool that has stopped drops the message, and with it the reply.
        drop(self.messages.send(Message::Enter { priority, waiter: Waiter { job, pace, reply } }));
        async move { turn.await.ok() }
    }

    /// Where this job waits; `None` when it does not. Looks at all who wait, so it is for people to ask.
    pub async fn place_of(&self, job: JobId) -> Option<PoolPlace> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(Message::Where { job, reply }).ok()?;
        answer.await.ok().flatten()
    }

    pub fn set(&self, workers: u32, jobs_per_second: f64) {
        let _ = self.messages.send(Message::Settings { workers, jobs_per_second });
    }
}

impl PoolTask {
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let next = self.let_out();
            tokio::select! {
                () = stop.cancelled() => return,
                message = self.inbox.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                () = sleep_until(next.unwrap_or(self.started)), if next.is_some() => {}
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Enter { priority, waiter } => {
                self.arrivals += 1;
                let place = (u8::MAX - priority, self.arrivals);
                self.line(waiter.pace).insert(place, waiter);
            }
            // Whoever asked may have gone.
            Message::Where { job, reply } => drop(reply.send(self.place_of(&job))),
            Message::Left { unused } => {
                self.working = self.working.saturating_sub(1);
                if unused {
                    self.bucket.unused(self.started.elapsed());
                }
            }
            Message::Settings { workers, jobs_per_second } => {
                self.workers = workers;
                self.bucket.set_rate(jobs_per_second, self.started.elapsed());
            }
        }
    }

    fn line(&mut self, pace: Pace) -> &mut BTreeMap<(u8, u64), Waiter> {
        match pace {
            Pace::Outflow => &mut self.waiting,
            Pace::Free => &mut self.free,
        }
    }

    fn place_of(&self, job: &JobId) -> Option<PoolPlace> {
        [&self.waiting, &self.free].into_iter().find_map(|line| {
            let mut waiting = line.values().filter(|waiter| !waiter.reply.is_closed());
            let mut before = 0;
            let waiter = waiting.find(|waiter| {
                let is_found = waiter.job.as_ref() == Some(job);
                before += u32::from(!is_found);
                is_found
            })?;
            let leaves_in = match waiter.pace {
                Pace::Outflow => self.bucket.wait_behind(self.started.elapsed(), before),
                Pace::Free => Duration::ZERO,
            };
            Some(PoolPlace { before, leaves_in })
        })
    }

    /// Gives turns while workers are free and the outflow allows; says when the outflow allows the next.
    fn let_out(&mut self) -> Option<Instant> {
        if self.waiting.len() + self.free.len() >= self.sweep_from {
            self.waiting.retain(|_, waiter| !waiter.reply.is_closed());
            self.free.retain(|_, waiter| !waiter.reply.is_closed());
            self.sweep_from = SWEEP_FROM.max((self.waiting.len() + self.free.len()) * 2);
        }
        while self.working < self.workers {
            let [paced, free] = [Pace::Outflow, Pace::Free].map(|pace| self.first(pace));
            let now = self.started.elapsed();
            let wait = self.bucket.wait(now);
            let flowing = paced.filter(|_| wait.is_zero());
            let pace = match (flowing, free) {
                (Some(paced), Some(free)) if free < paced => Pace::Free,
                (Some(_), _) => Pace::Outflow,
                (None, Some(_)) => Pace::Free,
                (None, None) => return paced.map(|_| Instant::now() + wait),
            };
            let Some((_, Waiter { reply, .. })) = self.line(pace).pop_first() else { break };
            if pace == Pace::Outflow {
                self.bucket.leak(now);
            }
            self.working += 1;
            // A turn that nobody takes drops and comes back as `Left`.
            let _ = reply.send(Turn { pool: self.messages.clone(), pace, unused: false });
        }
        None
    }

    /// The place of the first who waits and has not gone.
    fn first(&mut self, pace: Pace) -> Option<(u8, u64)> {
        let line = self.line(pace);
        while let Some(first) = line.first_entry() {
            if !first.get().reply.is_closed() {
                return Some(*first.key());
            }
            first.remove();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn higher_priority_leaves_first_at_the_steady_rate() {
        let stop = CancellationToken::new();
        let (pool, task) = Pool::new(1, 10.0, stop.clone());
        let running = tokio::spawn(task);
        let first = pool.turn(0).await.unwrap();
        let (order, mut left) = mpsc::unbounded_channel();
        for (name, priority) in [("low", 0), ("high", 9), ("middle", 5)] {
            let (pool, order) = (pool.clone(), order.clone());
            tokio::spawn(async move {
                let turn = pool.turn(priority).await;
                order.send((name, Instant::now())).unwrap();
                drop(turn);
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(first);
        let mut names = Vec::new();
        let mut instants = Vec::new();
        for _ in 0..3 {
            let (name, at) = left.recv().await.unwrap();
            names.push(name);
            instants.push(at);
        }
        assert_eq!(names, ["high", "middle", "low"]);
        assert!(instants[2] - instants[0] >= Duration::from_millis(100), "{instants:?}");
        stop.cancel();
        running.await.unwrap();
        assert!(pool.turn(0).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_sent_back_at_the_gate_does_not_cost_the_next_one_an_hour() {
        let (pool, task) = Pool::new(32, 2.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let begun = Instant::now();
        let mut turn = pool.turn(0).await.unwrap();
        turn.unused();
        drop(turn);
        drop(pool.turn(0).await.unwrap());
        assert!(begun.elapsed() <= Duration::from_secs(2), "{:?}", begun.elapsed());
        // That one was used.
        drop(pool.turn(0).await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(1_800), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_its_workers_have_a_turn() {
        let stop = CancellationToken::new();
        let (pool, task) = Pool::new(2, 1_000.0, stop.clone());
        tokio::spawn(task);
        let (one, two) = (pool.turn(0).await, pool.turn(0).await);
        let third = tokio::time::timeout(Duration::from_secs(60), pool.turn(0)).await;
        assert!(third.is_err(), "two workers, three turns");
        drop(one);
        assert!(pool.turn(0).await.is_some());
        drop(two);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waits_has_a_place_and_the_instant_that_it_leaves_at() {
        let (pool, task) = Pool::new(9, 0.5, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let _first = pool.turn_for(id("first"), 0, Pace::Outflow).await.unwrap();
        for name in ["second", "third", "fourth"] {
            let pool = pool.clone();
            tokio::spawn(async move { pool.turn_for(id(name), 0, Pace::Outflow).await });
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        let told = pool.place_of(id("third")).await.unwrap();
        assert_eq!((told.before, told.leaves_in), (1, Duration::from_millis(3_500)));
        assert_eq!(pool.place_of(id("first")).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_outflow_does_not_count_waits_for_a_worker_alone() {
        let (pool, task) = Pool::new(2, 1.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let begun = Instant::now();
        drop(pool.turn(9).await);
        let paced = tokio::spawn(pool.turn(9));
        let mut free = pool.turn_for(id("free"), 0, Pace::Free).await.unwrap();
        let _other = pool.turn_for(id("other"), 0, Pace::Free).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let third = tokio::spawn(pool.turn_for(id("third"), 0, Pace::Free));
        tokio::task::yield_now().await;
        assert_eq!(pool.place_of(id("third")).await, Some(PoolPlace { before: 0, leaves_in: Duration::ZERO }));
        free.unused();
        drop(free);
        drop(third.await.unwrap());
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // No use of the outflow, and so no unused one either.
        drop(paced.await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(3_000), "{:?}", begun.elapsed());
    }
}
