//! The leaky bucket as a pool: a bounded place where jobs wait for a worker, and a steady outflow.
//!
//! Refuses to take jobs by itself: the lane bounds how many are in hand. Among those that wait, the higher priority
//! leaves first, then the older. A turn is one worker; dropping it frees the worker.

use std::collections::BTreeMap;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::leaky_bucket::LeakyBucket;

const SWEEP_FROM: usize = 64;

/// The right of one job to be worked on.
#[derive(Debug)]
pub struct Turn {
    pool: mpsc::UnboundedSender<Message>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A pool that has stopped counts nobody.
        let _ = self.pool.send(Message::Left);
    }
}

enum Message {
    Enter { priority: u8, reply: oneshot::Sender<Turn> },
    Left,
    Settings { workers: u32, jobs_per_second: f64 },
}

/// A handle on one lane's pool; cheap to clone.
#[derive(Clone)]
pub struct Pool {
    messages: mpsc::UnboundedSender<Message>,
}

struct PoolTask {
    inbox: mpsc::UnboundedReceiver<Message>,
    messages: mpsc::UnboundedSender<Message>,
    waiting: BTreeMap<(u8, u64), oneshot::Sender<Turn>>,
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
    pub async fn turn(&self, priority: u8) -> Option<Turn> {
        let (reply, turn) = oneshot::channel();
        self.messages.send(Message::Enter { priority, reply }).ok()?;
        turn.await.ok()
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
            Message::Enter { priority, reply } => {
                self.arrivals += 1;
                self.waiting.insert((u8::MAX - priority, self.arrivals), reply);
            }
            Message::Left => self.working = self.working.saturating_sub(1),
            Message::Settings { workers, jobs_per_second } => {
                self.workers = workers;
                self.bucket.set_rate(jobs_per_second, self.started.elapsed());
            }
        }
    }

    /// Gives turns while workers are free and the outflow allows; says when the outflow allows the next.
    fn let_out(&mut self) -> Option<Instant> {
        if self.waiting.len() >= self.sweep_from {
            self.waiting.retain(|_, reply| !reply.is_closed());
            self.sweep_from = SWEEP_FROM.max(self.waiting.len() * 2);
        }
        while let Some(first) = self.waiting.first_entry()
            && first.get().is_closed()
        {
            first.remove();
        }
        while self.working < self.workers && !self.waiting.is_empty() {
            let now = self.started.elapsed();
            let wait = self.bucket.wait(now);
            if !wait.is_zero() {
                return Some(Instant::now() + wait);
            }
            let Some((_, reply)) = self.waiting.pop_first() else { break };
            if reply.is_closed() {
                continue;
            }
            self.bucket.leak(now);
            self.working += 1;
            // A turn that nobody takes drops and comes back as `Left`.
            let _ = reply.send(Turn { pool: self.messages.clone() });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
