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
pub struct WorkerSlot {
    scheduler: mpsc::UnboundedSender<SchedulerMessage>,
    egress_rule: EgressRule,
    is_refunded: bool,
}

impl WorkerSlot {
    /// No request comes of it: the next one need not wait as if one had.
    pub fn refund(&mut self) {
        self.is_refunded = self.egress_rule == EgressRule::Paced;
    }
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        // A pool that has stopped counts nobody.
        let _ = self.scheduler.send(SchedulerMessage::SlotReleased { is_refunded: self.is_refunded });
    }
}

/// What a job waits for besides a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressRule {
    /// The steady outflow, which counts it.
    Paced,
    /// Nothing: its own limits are waited for at the gate.
    Exempt,
}

/// Where a job waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerPosition {
    /// How many go before it.
    pub jobs_ahead: u32,
    /// Until the outflow lets it go; later where all workers are busy.
    pub egress_wait: Duration,
}

enum SchedulerMessage {
    Enter { priority: u8, waiter: Waiter },
    Position { job: JobId, reply: oneshot::Sender<Option<SchedulerPosition>> },
    SlotReleased { is_refunded: bool },
    Settings { workers: u32, jobs_per_second: f64 },
}

struct Waiter {
    job: Option<JobId>,
    egress_rule: EgressRule,
    reply: oneshot::Sender<WorkerSlot>,
}

/// A handle on one lane's pool; cheap to clone.
#[derive(Clone, Debug)]
pub struct Scheduler {
    messages: mpsc::UnboundedSender<SchedulerMessage>,
}

struct SchedulerTask {
    inbox: mpsc::UnboundedReceiver<SchedulerMessage>,
    messages: mpsc::UnboundedSender<SchedulerMessage>,
    paced: BTreeMap<(u8, u64), Waiter>,
    /// Those that the outflow does not count.
    exempt: BTreeMap<(u8, u64), Waiter>,
    /// So many in line are worth a look for those who have gone: nobody looks at all of them for each who comes.
    sweep_from: usize,
    arrivals: u64,
    busy: u32,
    workers: u32,
    bucket: LeakyBucket,
    started: Instant,
}

impl Scheduler {
    /// The pool and the task that runs it, for the caller to spawn and track.
    pub fn new(workers: u32, jobs_per_second: f64, stop: CancellationToken) -> (Self, impl Future<Output = ()> + Send) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let task = SchedulerTask {
            inbox,
            messages: messages.clone(),
            paced: BTreeMap::new(),
            exempt: BTreeMap::new(),
            sweep_from: SWEEP_FROM,
            arrivals: 0,
            busy: 0,
            workers,
            bucket: LeakyBucket::new(jobs_per_second),
            started: Instant::now(),
        };
        (Self { messages }, task.run(stop))
    }

    /// Waits for a turn; `None` when the pool stops first.
    pub fn acquire(&self, priority: u8) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        self.enqueue(None, priority, EgressRule::Paced)
    }

    /// The same, for a job whose place can be asked for by its id ([`Pool::place_of`]).
    pub fn acquire_for(
        &self,
        job: JobId,
        priority: u8,
        pace: EgressRule,
    ) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        self.enqueue(Some(job), priority, pace)
    }

    /// Enters at once: what waits is the reply alone, since thousands do.
    fn enqueue(
        &self,
        job: Option<JobId>,
        priority: u8,
        pace: EgressRule,
    ) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        let (reply, turn) = oneshot::channel();
        // A pool that has stopped drops the message, and with it the reply.
        drop(
            self.messages.send(SchedulerMessage::Enter { priority, waiter: Waiter { job, egress_rule: pace, reply } }),
        );
        async move { turn.await.ok() }
    }

    /// Where this job waits; `None` when it does not. Looks at all who wait, so it is for people to ask.
    pub async fn position_of(&self, job: JobId) -> Option<SchedulerPosition> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(SchedulerMessage::Position { job, reply }).ok()?;
        answer.await.ok().flatten()
    }

    pub fn configure(&self, workers: u32, jobs_per_second: f64) {
        let _ = self.messages.send(SchedulerMessage::Settings { workers, jobs_per_second });
    }
}

impl SchedulerTask {
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let next = self.admit();
            tokio::select! {
                () = stop.cancelled() => return,
                message = self.inbox.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => return,
                },
                () = sleep_until(next.unwrap_or(self.started)), if next.is_some() => {}
            }
        }
    }

    fn handle_message(&mut self, message: SchedulerMessage) {
        match message {
            SchedulerMessage::Enter { priority, waiter } => {
                self.arrivals += 1;
                let place = (u8::MAX - priority, self.arrivals);
                self.queue(waiter.egress_rule).insert(place, waiter);
            }
            // Whoever asked may have gone.
            SchedulerMessage::Position { job, reply } => drop(reply.send(self.position_of(&job))),
            SchedulerMessage::SlotReleased { is_refunded: unused } => {
                self.busy = self.busy.saturating_sub(1);
                if unused {
                    self.bucket.refund(self.started.elapsed());
                }
            }
            SchedulerMessage::Settings { workers, jobs_per_second } => {
                self.workers = workers;
                self.bucket.set_rate(jobs_per_second, self.started.elapsed());
            }
        }
    }

    fn queue(&mut self, pace: EgressRule) -> &mut BTreeMap<(u8, u64), Waiter> {
        match pace {
            EgressRule::Paced => &mut self.paced,
            EgressRule::Exempt => &mut self.exempt,
        }
    }

    fn position_of(&self, job: &JobId) -> Option<SchedulerPosition> {
        [&self.paced, &self.exempt].into_iter().find_map(|line| {
            let mut waiting = line.values().filter(|waiter| !waiter.reply.is_closed());
            let mut before = 0;
            let waiter = waiting.find(|waiter| {
                let is_found = waiter.job.as_ref() == Some(job);
                before += u32::from(!is_found);
                is_found
            })?;
            let leaves_in = match waiter.egress_rule {
                EgressRule::Paced => self.bucket.wait_behind(self.started.elapsed(), before),
                EgressRule::Exempt => Duration::ZERO,
            };
            Some(SchedulerPosition { jobs_ahead: before, egress_wait: leaves_in })
        })
    }

    /// Gives turns while workers are free and the outflow allows; says when the outflow allows the next.
    fn admit(&mut self) -> Option<Instant> {
        if self.paced.len() + self.exempt.len() >= self.sweep_from {
            self.paced.retain(|_, waiter| !waiter.reply.is_closed());
            self.exempt.retain(|_, waiter| !waiter.reply.is_closed());
            self.sweep_from = SWEEP_FROM.max((self.paced.len() + self.exempt.len()) * 2);
        }
        while self.busy < self.workers {
            let [paced, free] = [EgressRule::Paced, EgressRule::Exempt].map(|pace| self.first(pace));
            let now = self.started.elapsed();
            let wait = self.bucket.wait(now);
            let flowing = paced.filter(|_| wait.is_zero());
            let pace = match (flowing, free) {
                (Some(paced), Some(free)) if free < paced => EgressRule::Exempt,
                (Some(_), _) => EgressRule::Paced,
                (None, Some(_)) => EgressRule::Exempt,
                (None, None) => return paced.map(|_| Instant::now() + wait),
            };
            let Some((_, Waiter { reply, .. })) = self.queue(pace).pop_first() else { break };
            if pace == EgressRule::Paced {
                self.bucket.leak(now);
            }
            self.busy += 1;
            // A turn that nobody takes drops and comes back as `Left`.
            let _ = reply.send(WorkerSlot { scheduler: self.messages.clone(), egress_rule: pace, is_refunded: false });
        }
        None
    }

    /// The place of the first who waits and has not gone.
    fn first(&mut self, pace: EgressRule) -> Option<(u8, u64)> {
        let line = self.queue(pace);
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
        let (pool, task) = Scheduler::new(1, 10.0, stop.clone());
        let running = tokio::spawn(task);
        let first = pool.acquire(0).await.unwrap();
        let (order, mut left) = mpsc::unbounded_channel();
        for (name, priority) in [("low", 0), ("high", 9), ("middle", 5)] {
            let (pool, order) = (pool.clone(), order.clone());
            tokio::spawn(async move {
                let turn = pool.acquire(priority).await;
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
        assert!(pool.acquire(0).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn refused_job_refunds_its_egress_tick() {
        let (pool, task) = Scheduler::new(32, 2.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let begun = Instant::now();
        let mut turn = pool.acquire(0).await.unwrap();
        turn.refund();
        drop(turn);
        drop(pool.acquire(0).await.unwrap());
        assert!(begun.elapsed() <= Duration::from_secs(2), "{:?}", begun.elapsed());
        // That one was used.
        drop(pool.acquire(0).await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(1_800), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn worker_slots_are_bounded() {
        let stop = CancellationToken::new();
        let (pool, task) = Scheduler::new(2, 1_000.0, stop.clone());
        tokio::spawn(task);
        let (one, two) = (pool.acquire(0).await, pool.acquire(0).await);
        let third = tokio::time::timeout(Duration::from_secs(60), pool.acquire(0)).await;
        assert!(third.is_err(), "two workers, three turns");
        drop(one);
        assert!(pool.acquire(0).await.is_some());
        drop(two);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_job_has_a_position_and_egress_wait() {
        let (pool, task) = Scheduler::new(9, 0.5, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let _first = pool.acquire_for(id("first"), 0, EgressRule::Paced).await.unwrap();
        for name in ["second", "third", "fourth"] {
            let pool = pool.clone();
            tokio::spawn(async move { pool.acquire_for(id(name), 0, EgressRule::Paced).await });
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        let told = pool.position_of(id("third")).await.unwrap();
        assert_eq!((told.jobs_ahead, told.egress_wait), (1, Duration::from_millis(3_500)));
        assert_eq!(pool.position_of(id("first")).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn exempt_job_waits_only_for_a_worker_slot() {
        let (pool, task) = Scheduler::new(2, 1.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let begun = Instant::now();
        drop(pool.acquire(9).await);
        let paced = tokio::spawn(pool.acquire(9));
        let mut free = pool.acquire_for(id("free"), 0, EgressRule::Exempt).await.unwrap();
        let _other = pool.acquire_for(id("other"), 0, EgressRule::Exempt).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let third = tokio::spawn(pool.acquire_for(id("third"), 0, EgressRule::Exempt));
        tokio::task::yield_now().await;
        assert_eq!(
            pool.position_of(id("third")).await,
            Some(SchedulerPosition { jobs_ahead: 0, egress_wait: Duration::ZERO })
        );
        free.refund();
        drop(free);
        drop(third.await.unwrap());
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // No use of the outflow, and so no unused one either.
        drop(paced.await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(3_000), "{:?}", begun.elapsed());
    }
}
