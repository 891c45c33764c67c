//! Group commit: writes of the same kind that arrive during a commit are committed in one batch.
//!
//! A write waits at most its batch delay. A write without delay starts a commit at once, with all that wait. Writes
//! that arrive meanwhile are in the next batch. After a large batch there is a pause of a few milliseconds, because a
//! statement costs as much as ten rows. A caller gets its answer after the commit of its write. If a batch is rolled
//! back, each write runs alone. If a commit hangs, the next batch starts. See `docs/decisions/0026-group-commit.md`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::dialect::{Dialect, JobWrite, WriteTemplate};
use super::engine::{Args, Batch, Engine, WORK_TIMEOUT, job_of};
use super::result::SqlRow;
use crate::ledger::LedgerError;

/// Most jobs in one commit, which then takes a few milliseconds.
const BATCH_JOBS_MAX: usize = 128;
/// From this size on, a batch is large.
const LARGE_BATCH: usize = 4;
/// Pause after a large batch, in which the next one collects.
const LARGE_BATCH_PAUSE: Duration = Duration::from_millis(2);
/// The next batch does not wait longer for a commit: another session holds a row lock, or the network hangs.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// The batchers of one database, one for each job write that is batched, by the address of its template.
#[derive(Default)]
pub struct Batchers(Mutex<HashMap<usize, Batcher>>);

impl Batchers {
    pub fn of(&self, template: &'static WriteTemplate, dialect: Dialect) -> Batcher {
        let new = || Batcher::new(template.write(dialect), template.order);
        self.0.lock().entry(std::ptr::from_ref(template).addr()).or_insert_with(new).clone()
    }
}

/// Runs one kind of job write for many jobs at the same time.
#[derive(Clone)]
pub struct Batcher(Arc<BatchQueue>);

/// The order of the jobs of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchOrder {
    /// So the batches of two workers cannot deadlock on each other's rows.
    ById,
    /// New jobs get their place in the backlog in this order. Two batches deadlock only if two workers record the same
    /// two messages at the same moment; each write then runs alone.
    ByArrival,
}

struct BatchQueue {
    write: &'static JobWrite,
    order: BatchOrder,
    state: Mutex<BatchState>,
    /// A request came that may not wait as long as the others, or that completes a full batch.
    flush_now: Notify,
}

#[derive(Default)]
struct BatchState {
    waiting: VecDeque<BatchRequest>,
    /// A task runs batches until no request waits.
    running: bool,
}

struct BatchRequest {
    args: Args,
    /// End of the request's batch delay.
    flush_at: Instant,
    reply: oneshot::Sender<Result<Option<SqlRow>, LedgerError>>,
}

impl Batcher {
    fn new(write: &'static JobWrite, order: BatchOrder) -> Self {
        Self(Arc::new(BatchQueue { write, order, state: Mutex::default(), flush_now: Notify::new() }))
    }

    /// Writes one job, committed when this returns: the row that the write returned, `None` if it found none.
    /// `max_batch_delay`: how long it may wait for others before it begins.
    ///
    /// # Errors
    /// As of a statement. After [`LedgerError::Unavailable`], it may have been committed, or may yet be.
    pub async fn write(
        &self,
        engine: &Arc<dyn Engine>,
        args: Args,
        max_batch_delay: Duration,
    ) -> Result<Option<SqlRow>, LedgerError> {
        let (reply, answer) = oneshot::channel();
        let served = {
            let mut state = self.0.state.lock();
            let gathers_until = state.flush_deadline();
            state.waiting.push_back(BatchRequest { args, flush_at: Instant::now() + max_batch_delay, reply });
            if state.flush_deadline() < gathers_until {
                self.0.flush_now.notify_one();
            }
            std::mem::replace(&mut state.running, true)
        };
        if !served {
            tokio::spawn(run(BatchRun(Arc::clone(&self.0)), Arc::clone(engine)));
        }
        match timeout(WORK_TIMEOUT, answer).await {
            Ok(Ok(row)) => row,
            Ok(Err(_)) => Err(LedgerError::Unavailable("the batch task ended early".to_owned())),
            Err(_) => Err(LedgerError::Unavailable(format!("not written within {} s", WORK_TIMEOUT.as_secs()))),
        }
    }
}

impl BatchState {
    /// The earliest end of a batch delay; `None` when no request waits, and when a full batch does.
    fn flush_deadline(&self) -> Option<Instant> {
        if self.waiting.len() >= BATCH_JOBS_MAX {
            return None;
        }
        self.waiting.iter().map(|unit| unit.flush_at).min()
    }
}

/// The right to run batches. After its end, the next request starts a new run.
struct BatchRun(Arc<BatchQueue>);

impl BatchRun {
    /// Returns when the next batch is due.
    async fn wait_for_flush(&self) {
        loop {
            let until = self.0.state.lock().flush_deadline();
            let Some(until) = until.filter(|until| *until > Instant::now()) else { return };
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.0.flush_now.notified() => {}
            }
        }
    }

    /// The next batch, each job once.
    fn next_batch(&self) -> Vec<BatchRequest> {
        let mut state = self.0.state.lock();
        let (mut units, mut left, mut jobs) = (Vec::new(), VecDeque::new(), HashSet::new());
        while units.len() < BATCH_JOBS_MAX
            && let Some(unit) = state.waiting.pop_front()
        {
            // Two writes on one job are two steps and cannot be merged.
            if jobs.insert(job_of(&unit.args).map(str::to_owned)) {
                units.push(unit);
            } else {
                left.push_back(unit);
            }
        }
        left.append(&mut state.waiting);
        state.waiting = left;
        // Under the same lock: the next request finds `running` unset and starts a new run.
        state.running = !units.is_empty();
        drop(state);
        if self.0.order == BatchOrder::ById {
            units.sort_by(|a, b| job_of(&a.args).cmp(&job_of(&b.args)));
        }
        units
    }
}

impl Drop for BatchRun {
    /// Only after a panic do requests still wait here: dropping them gives their callers an error.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.state.lock();
            state.running = false;
            state.waiting.clear();
        }
    }
}

async fn run(run: BatchRun, engine: Arc<dyn Engine>) {
    loop {
        run.wait_for_flush().await;
        let units = run.next_batch();
        if units.is_empty() {
            return;
        }
        let is_large = units.len() >= LARGE_BATCH;
        let committing = tokio::spawn(commit(Arc::clone(&run.0), Arc::clone(&engine), units));
        if timeout(STUCK_AFTER, committing).await.is_err() {
            tracing::debug!("a commit takes long; starting the next one");
        }
        if is_large {
            sleep(LARGE_BATCH_PAUSE).await;
        }
    }
}

async fn commit(queue: Arc<BatchQueue>, engine: Arc<dyn Engine>, units: Vec<BatchRequest>) {
    if units.len() == 1 {
        return commit_each(&*engine, queue.write, units).await;
    }
    match engine.execute_batch(queue.write, units.iter().map(|unit| unit.args.clone()).collect()).await {
        Ok(Batch::Committed(rows)) => {
            for (unit, row) in units.into_iter().zip(rows) {
                unit.send_result(Ok(row));
            }
        }
        Ok(Batch::RolledBack(error)) => {
            tracing::debug!(%error, jobs = units.len(), "a batch was rolled back; writing each job alone");
            commit_each(&*engine, queue.write, units).await;
        }
        Err(error) => {
            for unit in units {
                unit.send_result(Err(error.clone()));
            }
        }
    }
}

async fn commit_each(engine: &dyn Engine, job_write: &JobWrite, units: Vec<BatchRequest>) {
    let write = async |unit: BatchRequest| {
        let row = engine.execute_one(job_write, &unit.args).await;
        unit.send_result(row);
    };
    join_all(units.into_iter().map(write)).await;
}

impl BatchRequest {
    /// A caller that is gone misses nothing: the ledger has the result.
    fn send_result(self, row: Result<Option<SqlRow>, LedgerError>) {
        drop(self.reply.send(row));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use tokio::task::JoinSet;

    use super::super::dialect::{JobWriteText, Returning};
    use super::super::engine::{Sql, Step, Value};
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    static WRITE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
        update: "UPDATE jobs SET fence = 1 {from}".into(),
        written_columns: "id".into(),
        effects: Vec::new(),
        returning: Returning::Job("id"),
    });

    /// Records the size of each batch, and its time since the start.
    struct RecordingEngine {
        started: Instant,
        batches: Mutex<Vec<(usize, Duration)>>,
    }

    impl RecordingEngine {
        fn record(&self, units: usize) {
            self.batches.lock().unwrap().push((units, self.started.elapsed()));
        }
    }

    #[async_trait]
    impl Engine for RecordingEngine {
        fn dialect(&self) -> Dialect {
            Dialect::Postgres
        }

        async fn query(&self, _: &Sql, _: Args) -> Result<Vec<SqlRow>, LedgerError> {
            unreachable!("a job write is expected")
        }

        async fn atomically(&self, _: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
            unreachable!("a job write is expected")
        }

        async fn execute_one(&self, _: &JobWrite, _: &Args) -> Result<Option<SqlRow>, LedgerError> {
            self.record(1);
            Ok(None)
        }

        async fn execute_batch(&self, _: &JobWrite, units: Vec<Args>) -> Result<Batch, LedgerError> {
            self.record(units.len());
            Ok(Batch::Committed(units.iter().map(|_| None).collect()))
        }
    }

    struct Rig {
        engine: Arc<RecordingEngine>,
        batcher: Batcher,
        writing: JoinSet<()>,
        requests: i64,
    }

    impl Rig {
        fn new() -> Self {
            let engine = Arc::new(RecordingEngine { started: Instant::now(), batches: Mutex::default() });
            let batcher = Batchers::default().of(&WRITE, Dialect::Postgres);
            Self { engine, batcher, writing: JoinSet::new(), requests: 0 }
        }

        fn write_jobs(&mut self, number: usize, max_batch_delay: Duration) {
            for _ in 0..number {
                self.requests += 1;
                let (engine, grouped): (Arc<dyn Engine>, _) = (self.engine.clone(), self.batcher.clone());
                let args: Args = Arc::from([Value::from(format!("pay_{}", self.requests).as_str())]);
                self.writing.spawn(async move {
                    assert!(grouped.write(&engine, args, max_batch_delay).await.unwrap().is_none())
                });
            }
        }

        async fn finish(mut self) -> Vec<(usize, Duration)> {
            while let Some(ended) = self.writing.join_next().await {
                ended.unwrap();
            }
            self.engine.batches.lock().unwrap().clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn urgent_write_flushes_the_queue() {
        let mut rig = Rig::new();
        rig.write_jobs(1, Duration::ZERO);
        assert_eq!(rig.finish().await, [(1, Duration::ZERO)]);

        let mut rig = Rig::new();
        rig.write_jobs(3, 10 * MS);
        sleep(4 * MS).await;
        rig.write_jobs(1, Duration::ZERO);
        assert_eq!(rig.finish().await, [(4, 4 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn earliest_deadline_flushes_the_batch() {
        let mut rig = Rig::new();
        rig.write_jobs(1, 10 * MS);
        sleep(2 * MS).await;
        rig.write_jobs(1, 5 * MS);
        sleep(2 * MS).await;
        rig.write_jobs(2, 10 * MS);
        assert_eq!(rig.finish().await, [(4, 7 * MS)]);
    }

    #[tokio::test(start_paused = true)]
    async fn full_batch_flushes_immediately() {
        let mut rig = Rig::new();
        rig.write_jobs(BATCH_JOBS_MAX - 1, 10 * MS);
        sleep(3 * MS).await;
        rig.write_jobs(2, 10 * MS);
        assert_eq!(rig.finish().await, [(BATCH_JOBS_MAX, 3 * MS), (1, 13 * MS)]);
    }
}
