//! Group commit of job writes: writes of one kind are one statement, or run alone if that is rolled back.
//!
//! A statement costs as much as ten rows. So a pause follows each batch of several rows, in which the next one collects,
//! and it grows with the load. If a commit hangs, the next batch starts. See `docs/decisions/0026-group-commit.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::dialect::{Dialect, JobWrite, WriteTemplate};
use super::engine::{Args, Batch, Engine, WORK_TIMEOUT, job_of};
use super::result::SqlRow;
use crate::batcher::{self, BatchBounds, BatchRequest, BatchWork, answer_all};
use crate::ledger::LedgerError;

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
pub struct Batcher(Arc<batcher::Batcher<JobBatches>>);

/// The order of the jobs of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchOrder {
    /// So the batches of two workers cannot deadlock on each other's rows.
    ById,
    /// New jobs get their place in the backlog in this order. Two batches deadlock only if two workers record the same
    /// two messages at the same moment; each write then runs alone.
    ByArrival,
}

struct JobBatches {
    write: &'static JobWrite,
    order: BatchOrder,
}

struct JobArgs {
    engine: Arc<dyn Engine>,
    args: Args,
}

impl Batcher {
    fn new(write: &'static JobWrite, order: BatchOrder) -> Self {
        Self(batcher::Batcher::new(JobBatches { write, order }, TaskTracker::new()))
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
        let item = JobArgs { engine: Arc::clone(engine), args };
        match timeout(WORK_TIMEOUT, self.0.submit(item, max_batch_delay)).await {
            Ok(Some(row)) => row,
            Ok(None) => Err(LedgerError::Unavailable("the batch task ended early".to_owned())),
            Err(_) => Err(LedgerError::Unavailable(format!("not written within {} s", WORK_TIMEOUT.as_secs()))),
        }
    }
}

/// The pause after a batch of so many rows: none while writes come one by one, and the longer, the more of them come.
/// Full groups save more than the wait costs, because with so many writes at once the processor is what they wait for.
fn collecting_pause(rows: usize) -> Duration {
    match rows {
        0..4 => Duration::ZERO,
        4..32 => Duration::from_millis(2),
        32..128 => Duration::from_millis(4),
        _ => Duration::from_millis(8),
    }
}

impl BatchWork for JobBatches {
    type Item = JobArgs;
    type Answer = Result<Option<SqlRow>, LedgerError>;

    const BOUNDS: BatchBounds = BatchBounds {
        // Then a commit takes some tens of milliseconds, less than `stuck_after`.
        items: 512,
        pause: collecting_pause,
        // Another session holds a row lock, or the network hangs.
        stuck_after: Duration::from_millis(100),
    };

    /// Two writes on one job are two steps.
    fn key(item: &JobArgs) -> Option<&Arc<str>> {
        job_of(&item.args)
    }

    async fn commit(&self, mut batch: Vec<BatchRequest<Self>>) {
        if self.order == BatchOrder::ById {
            batch.sort_by(|a, b| job_of(&a.item.args).cmp(&job_of(&b.item.args)));
        }
        if let [first, _, ..] = &*batch {
            let args = batch.iter().map(|request| request.item.args.clone()).collect();
            match first.item.engine.execute_batch(self.write, args).await {
                Ok(Batch::Committed(rows)) => return answer_all(batch, Ok(rows)),
                Ok(Batch::RolledBack(error)) => {
                    tracing::debug!(%error, jobs = batch.len(), "a batch was rolled back; writing each job alone");
                }
                Err(error) => return answer_all(batch, Err(error)),
            }
        }
        let write_one = async |request: BatchRequest<Self>| {
            let row = request.item.engine.execute_one(self.write, &request.item.args).await;
            request.answer(row);
        };
        join_all(batch.into_iter().map(write_one)).await;
    }
}
