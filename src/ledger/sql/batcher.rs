//! Group commit: writes of the same kind that come while one is being committed are committed together, as one.
//!
//! Refuses to let anybody wait for company longer than they may: who may not wait goes at once, with all who are there,
//! and those who come meanwhile go next; only between two crowds there is a pause of a few milliseconds, because a
//! statement costs as much as ten rows. Nobody is answered before the commit that holds their write, and nobody pays for
//! another: a group that a write of it has undone is taken apart, and behind a commit that hangs the next is begun.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::columns::job_of;
use super::dialect::JobWrite;
use super::engine::{Args, Batch, Engine, WORK_TIMEOUT};
use super::row::SqlRow;
use crate::ledger::LedgerError;

/// Most jobs in one commit: it takes a few milliseconds then.
const BATCH_JOBS_MAX: usize = 128;
/// So many at once are a crowd.
const LARGE_BATCH: usize = 4;
/// How long a crowd gathers after one has gone.
const LARGE_BATCH_PAUSE: Duration = Duration::from_millis(2);
/// A commit that takes longer is not waited for: somebody holds a row of it, or the network hangs.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// A chain, for any number of jobs at the same time.
#[derive(Clone)]
pub struct Batcher(Arc<BatchQueue>);

struct BatchQueue {
    write: JobWrite,
    state: Mutex<BatchState>,
    /// Somebody came who may not wait as long as the others, or who makes the group a full one.
    flush_now: Notify,
}

#[derive(Default)]
struct BatchState {
    waiting: VecDeque<BatchRequest>,
    /// A task takes from the line, until it finds nobody waiting.
    running: bool,
}

struct BatchRequest {
    args: Args,
    /// It waits for company until then.
    flush_at: Instant,
    reply: oneshot::Sender<Result<Option<SqlRow>, LedgerError>>,
}

impl Batcher {
    #[must_use]
    pub fn new(chain: JobWrite) -> Self {
        Self(Arc::new(BatchQueue { write: chain, state: Mutex::default(), flush_now: Notify::new() }))
    }

    /// Writes one job, committed when this returns: the row that the write answered, `None` if it found nothing. `may_wait`:
    /// for company, before it is begun.
    ///
    /// # Errors
    /// As of a statement. After [`LedgerError::Away`] it may have been committed all the same, or may yet be.
    pub async fn write(
        &self,
        engine: &Arc<dyn Engine>,
        args: Args,
        may_wait: Duration,
    ) -> Result<Option<SqlRow>, LedgerError> {
        let (reply, answer) = oneshot::channel();
        let served = {
            let mut state = self.0.state();
            let gathers_until = state.flush_deadline();
            state.waiting.push_back(BatchRequest { args, flush_at: Instant::now() + may_wait, reply });
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
            Ok(Err(_)) => Err(LedgerError::Unavailable("the group's task ended early".to_owned())),
            Err(_) => Err(LedgerError::Unavailable(format!("not written within {} s", WORK_TIMEOUT.as_secs()))),
        }
    }
}

impl BatchQueue {
    fn state(&self) -> MutexGuard<'_, BatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BatchState {
    /// When the first of those who wait will wait no longer; `None` for nobody, and for more than one group holds.
    fn flush_deadline(&self) -> Option<Instant> {
        if self.waiting.len() >= BATCH_JOBS_MAX {
            return None;
        }
        self.waiting.iter().map(|unit| unit.flush_at).min()
    }
}

/// The right to take from the line. Who comes after its end begins anew.
struct BatchRun(Arc<BatchQueue>);

impl BatchRun {
    /// Returns when the next group is to go.
    async fn wait_for_flush(&self) {
        loop {
            let until = self.0.state().flush_deadline();
            let Some(until) = until.filter(|until| *until > Instant::now()) else { return };
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.0.flush_now.notified() => {}
            }
        }
    }

    /// Those who go next, each job once, by id: two workers' groups never wait for each other's rows crosswise.
    fn next_batch(&self) -> Vec<BatchRequest> {
        let mut state = self.0.state();
        let (mut units, mut left, mut jobs) = (Vec::new(), VecDeque::new(), HashSet::new());
        while units.len() < BATCH_JOBS_MAX
            && let Some(unit) = state.waiting.pop_front()
        {
            // Two writes on one job are two steps of its story.
            if jobs.insert(job_of(&unit.args).map(str::to_owned)) {
                units.push(unit);
            } else {
                left.push_back(unit);
            }
        }
        left.append(&mut state.waiting);
        state.waiting = left;
        // Under the same lock: who comes next finds nobody serving.
        state.running = !units.is_empty();
        drop(state);
        units.sort_by(|a, b| job_of(&a.args).cmp(&job_of(&b.args)));
        units
    }
}

impl Drop for BatchRun {
    /// Only a panic leaves somebody waiting; they are told so.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.state();
            state.running = false;
            state.waiting.clear();
        }
    }
}

async fn run(serving: BatchRun, engine: Arc<dyn Engine>) {
    loop {
        serving.wait_for_flush().await;
        let units = serving.next_batch();
        if units.is_empty() {
            return;
        }
        let is_crowd = units.len() >= LARGE_BATCH;
        let committing = tokio::spawn(commit(Arc::clone(&serving.0), Arc::clone(&engine), units));
        if timeout(STUCK_AFTER, committing).await.is_err() {
            tracing::debug!("a commit takes long; the next is begun beside it");
        }
        if is_crowd {
            sleep(LARGE_BATCH_PAUSE).await;
        }
    }
}

async fn commit(line: Arc<BatchQueue>, engine: Arc<dyn Engine>, units: Vec<BatchRequest>) {
    if units.len() == 1 {
        return commit_each(&*engine, &line.write, units).await;
    }
    match engine.execute_batch(&line.write, units.iter().map(|unit| unit.args.clone()).collect()).await {
        Ok(Batch::Committed(rows)) => {
            for (unit, row) in units.into_iter().zip(rows) {
                unit.send_result(Ok(row));
            }
        }
        Ok(Batch::RolledBack(error)) => {
            tracing::debug!(%error, jobs = units.len(), "a group was undone; each is written for itself");
            commit_each(&*engine, &line.write, units).await;
        }
        Err(error) => {
            for unit in units {
                unit.send_result(Err(error.clone()));
            }
        }
    }
}

async fn commit_each(engine: &dyn Engine, chain: &JobWrite, units: Vec<BatchRequest>) {
    let write = async |unit: BatchRequest| {
        let row = engine.execute_one(chain, &unit.args).await;
        unit.send_result(row);
    };
    join_all(units.into_iter().map(write)).await;
}

impl BatchRequest {
    /// Who has gone meanwhile need not know: the ledger does.
    fn send_result(self, row: Result<Option<SqlRow>, LedgerError>) {
        drop(self.reply.send(row));
    }
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;
