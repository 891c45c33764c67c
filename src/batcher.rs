//! Group commit: items that arrive while a batch is committed go together into the next one.
//!
//! An item waits at most its batch delay. An item without delay starts a batch at once, with all that wait. A caller
//! gets its answer after the commit of its item. One task runs batch after batch and ends when no item waits. See
//! `docs/decisions/0026-group-commit.md`.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::task::TaskTracker;

/// Bounds of the batches of one kind of work.
#[derive(Clone, Copy, Debug)]
pub struct BatchBounds {
    /// Most items in one batch.
    pub items: usize,
    /// Pause after a batch of so many items, in which the next one collects.
    pub pause: fn(usize) -> Duration,
    /// The next batch does not wait longer for a commit.
    pub stuck_after: Duration,
}

/// What a batcher does with its batches.
pub trait BatchWork: Send + Sync + Sized + 'static {
    type Item: Send + Sync;
    type Answer: Send;

    const BOUNDS: BatchBounds;

    /// Items with the same key cannot be merged and go into different batches.
    fn key(_item: &Self::Item) -> Option<&Arc<str>> {
        None
    }

    /// Commits a batch, which is not empty, and answers each request.
    fn commit(&self, batch: Vec<BatchRequest<Self>>) -> impl Future<Output = ()> + Send;
}

/// An item, and the caller that waits for its commit.
pub struct BatchRequest<W: BatchWork> {
    pub item: W::Item,
    /// End of the item's batch delay.
    flush_at: Instant,
    reply: oneshot::Sender<W::Answer>,
}

impl<W: BatchWork> BatchRequest<W> {
    /// A caller that is gone misses nothing: the store has the result.
    pub fn answer(self, answer: W::Answer) {
        drop(self.reply.send(answer));
    }
}

/// Answers a batch that was committed as a whole, in the order of its requests, or failed as a whole.
pub fn answer_all<W, T, E: Clone>(batch: Vec<BatchRequest<W>>, result: Result<Vec<T>, E>)
where
    W: BatchWork<Answer = Result<T, E>>,
{
    match result {
        Ok(answers) => batch.into_iter().zip(answers).for_each(|(request, answer)| request.answer(Ok(answer))),
        Err(error) => batch.into_iter().for_each(|request| request.answer(Err(error.clone()))),
    }
}

/// Commits items of one kind for many callers at the same time.
pub struct Batcher<W: BatchWork> {
    work: W,
    queue: Mutex<BatchQueue<W>>,
    /// An item came that may not wait as long as the others, or that completes a full batch.
    flush_now: Notify,
    tasks: TaskTracker,
}

/// The items that wait, and when their batch is due.
struct BatchQueue<W: BatchWork> {
    waiting: VecDeque<BatchRequest<W>>,
    /// Earliest end of a batch delay.
    flush_at: Option<Instant>,
    /// A task runs batches until no item waits.
    running: bool,
}

impl<W: BatchWork> BatchQueue<W> {
    /// Whether the next batch is due earlier than before.
    fn push(&mut self, request: BatchRequest<W>) -> bool {
        let before = self.due_at();
        self.flush_at = Some(self.flush_at.map_or(request.flush_at, |at| at.min(request.flush_at)));
        self.waiting.push_back(request);
        self.due_at() < before
    }

    /// When the next batch is due; `None` when no item waits, and when a full batch does.
    fn due_at(&self) -> Option<Instant> {
        self.flush_at.filter(|_| self.waiting.len() < W::BOUNDS.items)
    }

    /// The next batch in order of arrival, each key once. It is empty only if no item waits, and then the run ends.
    fn take_batch(&mut self) -> Vec<BatchRequest<W>> {
        let (mut batch, mut left, mut keys) = (Vec::new(), VecDeque::new(), HashSet::new());
        while batch.len() < W::BOUNDS.items
            && let Some(request) = self.waiting.pop_front()
        {
            if W::key(&request.item).is_none_or(|key| keys.insert(Arc::clone(key))) {
                batch.push(request);
            } else {
                left.push_back(request);
            }
        }
        left.append(&mut self.waiting);
        self.waiting = left;
        self.flush_at = self.waiting.iter().map(|request| request.flush_at).min();
        self.running = !batch.is_empty();
        batch
    }
}

impl<W: BatchWork> Batcher<W> {
    /// A caller that waits for `tasks` waits until every accepted item is committed.
    pub fn new(work: W, tasks: TaskTracker) -> Arc<Self> {
        let queue = BatchQueue { waiting: VecDeque::new(), flush_at: None, running: false };
        Arc::new(Self { work, queue: Mutex::new(queue), flush_now: Notify::new(), tasks })
    }

    /// Commits one item and returns its answer; `None` if the commit panicked. `max_delay`: how long the item may wait
    /// for others before its commit begins. Dropped, this call does not withdraw an accepted item.
    pub async fn submit(self: &Arc<Self>, item: W::Item, max_delay: Duration) -> Option<W::Answer> {
        let (reply, answer) = oneshot::channel();
        let is_running = {
            let mut queue = self.queue.lock();
            if queue.push(BatchRequest { item, flush_at: Instant::now() + max_delay, reply }) {
                self.flush_now.notify_one();
            }
            std::mem::replace(&mut queue.running, true)
        };
        if !is_running {
            self.tasks.spawn(run(Arc::clone(self)));
        }
        answer.await.ok()
    }
}

/// Runs batches until no item waits. The next item starts a new run.
async fn run<W: BatchWork>(batcher: Arc<Batcher<W>>) {
    loop {
        batcher.wait_until_due().await;
        let batch = batcher.queue.lock().take_batch();
        if batch.is_empty() {
            return;
        }
        let pause = (W::BOUNDS.pause)(batch.len());
        let committer = Arc::clone(&batcher);
        // A panic drops the requests of its batch, which gives their callers an error. The next batches go on.
        let commit = AssertUnwindSafe(async move { committer.work.commit(batch).await }).catch_unwind();
        let mut committing = Box::pin(commit.map(drop));
        if timeout(W::BOUNDS.stuck_after, &mut committing).await.is_err() {
            tracing::debug!("a commit takes long; starting the next one");
            batcher.tasks.spawn(committing);
        }
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }
}

impl<W: BatchWork> Batcher<W> {
    async fn wait_until_due(&self) {
        loop {
            let due_at = self.queue.lock().due_at();
            let Some(due_at) = due_at.filter(|due_at| *due_at > Instant::now()) else { return };
            tokio::select! {
                () = sleep_until(due_at) => return,
                () = self.flush_now.notified() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Items of each batch, and its time since the start.
    type Batches = Arc<Mutex<Vec<(Vec<u32>, Duration)>>>;

    /// Records the items of each batch and its time since the start. Item 0 hangs, item 13 fails its batch, item 666
    /// panics.
    struct Recorder {
        started: Instant,
        batches: Batches,
    }

    impl BatchWork for Recorder {
        type Item = (u32, Arc<str>);
        type Answer = Result<u32, &'static str>;

        const BOUNDS: BatchBounds = BatchBounds { items: 8, pause, stuck_after: STUCK_AFTER };

        fn key((_, key): &Self::Item) -> Option<&Arc<str>> {
            Some(key)
        }

        async fn commit(&self, batch: Vec<BatchRequest<Self>>) {
            let items: Vec<u32> = batch.iter().map(|request| request.item.0).collect();
            self.batches.lock().push((items.clone(), self.started.elapsed()));
            assert!(!items.contains(&666), "a commit panics");
            if items.contains(&0) {
                std::future::pending::<()>().await;
            }
            sleep(MS).await;
            answer_all(batch, if items.contains(&13) { Err("13") } else { Ok(items) });
        }
    }

    const STUCK_AFTER: Duration = Duration::from_millis(100);

    fn pause(items: usize) -> Duration {
        if items < 4 { Duration::ZERO } else { 2 * MS }
    }

    struct Rig {
        batcher: Arc<Batcher<Recorder>>,
        batches: Batches,
        tasks: TaskTracker,
        writing: JoinSet<(u32, Option<Result<u32, &'static str>>)>,
    }

    impl Rig {
        fn new() -> Self {
            let (batches, tasks) = (Arc::default(), TaskTracker::new());
            let work = Recorder { started: Instant::now(), batches: Arc::clone(&batches) };
            Self { batcher: Batcher::new(work, tasks.clone()), batches, tasks, writing: JoinSet::new() }
        }

        /// Submits these items, each with a key of its own, and lets them arrive.
        async fn submit(&mut self, items: impl IntoIterator<Item = u32>, max_delay: Duration) {
            for item in items {
                self.submit_keyed(item, &item.to_string(), max_delay);
            }
            tokio::task::yield_now().await;
        }

        fn submit_keyed(&mut self, item: u32, key: &str, max_delay: Duration) {
            let batcher = Arc::clone(&self.batcher);
            let key = Arc::from(key);
            self.writing.spawn(async move { (item, batcher.submit((item, key), max_delay).await) });
        }

        /// The items without success and the error of each, `None` without an answer, once every caller has ended.
        async fn failed(&mut self) -> Vec<(u32, Option<&'static str>)> {
            let mut failed = Vec::new();
            while let Some(ended) = self.writing.join_next().await {
                let (item, answer) = ended.unwrap();
                if answer != Some(Ok(item)) {
                    failed.push((item, answer.and_then(Result::err)));
                }
            }
            failed.sort_unstable();
            failed
        }

        fn batches(&self) -> Vec<(Vec<u32>, Duration)> {
            self.batches.lock().clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn urgent_write_flushes_the_queue() {
        let mut rig = Rig::new();
        rig.submit([1, 2, 3], 10 * MS).await;
        sleep(4 * MS).await;
        rig.submit([4], Duration::ZERO).await;
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [(vec![1, 2, 3, 4], 4 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn earliest_deadline_flushes_the_batch() {
        let mut rig = Rig::new();
        rig.submit([1], 10 * MS).await;
        sleep(2 * MS).await;
        rig.submit([2], 5 * MS).await;
        sleep(2 * MS).await;
        rig.submit([3], 10 * MS).await;
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [(vec![1, 2, 3], 7 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn full_batch_flushes_immediately() {
        let mut rig = Rig::new();
        rig.submit(1..8, 10 * MS).await;
        sleep(3 * MS).await;
        rig.submit([8, 9], 10 * MS).await;
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [((1..9).collect(), 3 * MS), (vec![9], 13 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn items_that_arrive_during_a_commit_share_the_next() {
        let mut rig = Rig::new();
        rig.submit([1], Duration::ZERO).await;
        rig.submit(2..6, Duration::ZERO).await;
        // A pause follows the large batch.
        sleep(MS * 3 / 2).await;
        rig.submit([6], Duration::ZERO).await;
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [(vec![1], Duration::ZERO), ((2..6).collect(), MS), (vec![6], 4 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn one_key_is_in_a_batch_once() {
        let mut rig = Rig::new();
        for item in [1, 2] {
            rig.submit_keyed(item, "a", Duration::ZERO);
        }
        rig.submit_keyed(3, "b", Duration::ZERO);
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [(vec![1, 3], Duration::ZERO), (vec![2], MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_batch_fails_its_items_alone() {
        let mut rig = Rig::new();
        rig.submit([1], Duration::ZERO).await;
        rig.submit([2, 13], Duration::ZERO).await;
        sleep(MS * 3 / 2).await;
        rig.submit([3], Duration::ZERO).await;
        assert_eq!(rig.failed().await, [(2, Some("13")), (13, Some("13"))]);
        assert_eq!(rig.batches().len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_commit_fails_its_batch_alone() {
        let mut rig = Rig::new();
        rig.submit([1], Duration::ZERO).await;
        rig.submit([666, 2], Duration::ZERO).await;
        rig.submit_keyed(3, "2", Duration::ZERO);
        assert_eq!(rig.failed().await, [(2, None), (666, None)]);
        rig.submit([4], Duration::ZERO).await;
        assert!(rig.failed().await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_commit_does_not_hold_the_next() {
        let mut rig = Rig::new();
        rig.submit([0], Duration::ZERO).await;
        rig.submit([1, 2], Duration::ZERO).await;
        while rig.writing.len() > 1 {
            rig.writing.join_next().await.unwrap().unwrap();
        }
        assert_eq!(rig.batches(), [(vec![0], Duration::ZERO), (vec![1, 2], STUCK_AFTER)]);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_caller_loses_no_item() {
        let mut rig = Rig::new();
        rig.submit([1], Duration::ZERO).await;
        rig.submit([2, 3], Duration::ZERO).await;
        rig.writing.shutdown().await;
        rig.submit([4], Duration::ZERO).await;
        assert!(rig.failed().await.is_empty());
        assert_eq!(rig.batches(), [(vec![1], Duration::ZERO), (vec![2, 3, 4], MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_waits_for_accepted_items() {
        let mut rig = Rig::new();
        rig.submit(1..12, 10 * MS).await;
        rig.tasks.close();
        rig.tasks.wait().await;
        let written: Vec<u32> = rig.batches().into_iter().flat_map(|(items, _)| items).collect();
        assert_eq!(written, (1..12).collect::<Vec<_>>());
        assert!(rig.failed().await.is_empty());
    }
}
