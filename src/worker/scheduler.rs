//! The scheduler of a lane: a leaky bucket in which jobs wait for a worker slot, and which lets them out at the egress
//! rate.
//!
//! It does not consume jobs; the lane's prefetch bounds how many wait. The higher priority leaves first, then the older
//! job. A worker slot is free again when it is dropped. A job that the egress rate does not count waits for a slot
//! alone.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::job::JobId;
use crate::domain::leaky_bucket::LeakyBucket;

/// Number of queued jobs from which cancelled ones are removed.
const SWEEP_FROM: usize = 64;

/// The right of one job to be processed: one of `workers`.
#[derive(Debug)]
pub struct WorkerSlot {
    scheduler: mpsc::UnboundedSender<SchedulerMessage>,
    egress_rule: EgressRule,
    is_refunded: bool,
}

impl WorkerSlot {
    /// Refunds the egress rate: the job makes no request, so the next one need not wait for it.
    pub fn refund(&mut self) {
        self.is_refunded = self.egress_rule == EgressRule::Paced;
    }
}

impl Drop for WorkerSlot {
    fn drop(&mut self) {
        // After the scheduler has stopped, nothing counts the slot.
        let _ = self.scheduler.send(SchedulerMessage::SlotReleased { is_refunded: self.is_refunded });
    }
}

/// What a job waits for besides a worker slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressRule {
    /// The egress rate, which counts it.
    Paced,
    /// Nothing: the gate applies its own limits.
    Exempt,
}

/// Position of a job that waits for its worker slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerPosition {
    /// Jobs that leave before it.
    pub jobs_ahead: u32,
    /// Wait for the egress rate; longer where all worker slots are in use.
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

/// A handle on one lane's scheduler; cheap to clone.
#[derive(Clone, Debug)]
pub struct Scheduler {
    messages: mpsc::UnboundedSender<SchedulerMessage>,
}

struct SchedulerTask {
    inbox: mpsc::UnboundedReceiver<SchedulerMessage>,
    messages: mpsc::UnboundedSender<SchedulerMessage>,
    paced: BTreeMap<(u8, u64), Waiter>,
    /// Jobs that the egress rate does not count.
    exempt: BTreeMap<(u8, u64), Waiter>,
    /// Queue length from which cancelled jobs are removed. It grows with the queue, so that not every arrival scans all
    /// jobs.
    sweep_from: usize,
    arrivals: u64,
    busy: u32,
    workers: u32,
    bucket: LeakyBucket,
    started: Instant,
}

impl Scheduler {
    /// The scheduler and the task that runs it, for the caller to spawn and track.
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

    /// Waits for a worker slot; `None` when the scheduler stops first.
    pub fn acquire(&self, priority: u8) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        self.enqueue(None, priority, EgressRule::Paced)
    }

    /// Waits for a worker slot with a job id, by which [`Scheduler::position_of`] finds the job.
    pub fn acquire_for(
        &self,
        job: JobId,
        priority: u8,
        pace: EgressRule,
    ) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        self.enqueue(Some(job), priority, pace)
    }

    /// Queues the job at once: only the reply is awaited, since thousands of jobs wait.
    fn enqueue(
        &self,
        job: Option<JobId>,
        priority: u8,
        pace: EgressRule,
    ) -> impl Future<Output = Option<WorkerSlot>> + Send + use<> {
        let (reply, slot) = oneshot::channel();
        // After the scheduler has stopped, the message is dropped, and with it the reply.
        drop(
            self.messages.send(SchedulerMessage::Enter { priority, waiter: Waiter { job, egress_rule: pace, reply } }),
        );
        async move { slot.await.ok() }
    }

    /// Position of a waiting job; `None` when it does not wait. Scans all waiting jobs, so it serves operators' queries
    /// only.
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
                let position = (u8::MAX - priority, self.arrivals);
                self.queue(waiter.egress_rule).insert(position, waiter);
            }
            // The caller may have stopped waiting.
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
        [&self.paced, &self.exempt].into_iter().find_map(|queue| {
            let mut waiting = queue.values().filter(|waiter| !waiter.reply.is_closed());
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

    /// Grants slots while some are free and the egress rate allows; returns when the egress rate allows the next.
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
            // If the job was cancelled, the slot is dropped and comes back as `SlotReleased`.
            let _ = reply.send(WorkerSlot { scheduler: self.messages.clone(), egress_rule: pace, is_refunded: false });
        }
        None
    }

    /// Key of the first job that was not cancelled.
    fn first(&mut self, pace: EgressRule) -> Option<(u8, u64)> {
        let queue = self.queue(pace);
        while let Some(first) = queue.first_entry() {
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
        let (scheduler, task) = Scheduler::new(1, 10.0, stop.clone());
        let running = tokio::spawn(task);
        let first = scheduler.acquire(0).await.unwrap();
        let (order, mut left) = mpsc::unbounded_channel();
        for (name, priority) in [("low", 0), ("high", 9), ("middle", 5)] {
            let (scheduler, order) = (scheduler.clone(), order.clone());
            tokio::spawn(async move {
                let slot = scheduler.acquire(priority).await;
                order.send((name, Instant::now())).unwrap();
                drop(slot);
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
        assert!(scheduler.acquire(0).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn refused_job_refunds_its_egress_tick() {
        let (scheduler, task) = Scheduler::new(32, 2.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let begun = Instant::now();
        let mut slot = scheduler.acquire(0).await.unwrap();
        slot.refund();
        drop(slot);
        drop(scheduler.acquire(0).await.unwrap());
        assert!(begun.elapsed() <= Duration::from_secs(2), "{:?}", begun.elapsed());
        // That one was used.
        drop(scheduler.acquire(0).await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(1_800), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn worker_slots_are_bounded() {
        let stop = CancellationToken::new();
        let (scheduler, task) = Scheduler::new(2, 1_000.0, stop.clone());
        tokio::spawn(task);
        let (first_slot, second_slot) = (scheduler.acquire(0).await, scheduler.acquire(0).await);
        let third = tokio::time::timeout(Duration::from_secs(60), scheduler.acquire(0)).await;
        assert!(third.is_err(), "two workers, three slots");
        drop(first_slot);
        assert!(scheduler.acquire(0).await.is_some());
        drop(second_slot);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_job_has_a_position_and_egress_wait() {
        let (scheduler, task) = Scheduler::new(9, 0.5, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let _first = scheduler.acquire_for(id("first"), 0, EgressRule::Paced).await.unwrap();
        for name in ["second", "third", "fourth"] {
            let scheduler = scheduler.clone();
            tokio::spawn(async move { scheduler.acquire_for(id(name), 0, EgressRule::Paced).await });
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        let position = scheduler.position_of(id("third")).await.unwrap();
        assert_eq!((position.jobs_ahead, position.egress_wait), (1, Duration::from_millis(3_500)));
        assert_eq!(scheduler.position_of(id("first")).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn exempt_job_waits_only_for_a_worker_slot() {
        let (scheduler, task) = Scheduler::new(2, 1.0 / 3_600.0, CancellationToken::new());
        tokio::spawn(task);
        let id = |id: &str| JobId::new(id).unwrap();
        let begun = Instant::now();
        drop(scheduler.acquire(9).await);
        let paced = tokio::spawn(scheduler.acquire(9));
        let mut free = scheduler.acquire_for(id("free"), 0, EgressRule::Exempt).await.unwrap();
        let _other = scheduler.acquire_for(id("other"), 0, EgressRule::Exempt).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let third = tokio::spawn(scheduler.acquire_for(id("third"), 0, EgressRule::Exempt));
        tokio::task::yield_now().await;
        assert_eq!(
            scheduler.position_of(id("third")).await,
            Some(SchedulerPosition { jobs_ahead: 0, egress_wait: Duration::ZERO })
        );
        free.refund();
        drop(free);
        drop(third.await.unwrap());
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // A job that did not use the egress rate refunds none of it.
        drop(paced.await.unwrap());
        assert!(begun.elapsed() >= Duration::from_secs(3_000), "{:?}", begun.elapsed());
    }
}
