//! Tests of batching: which writes share a commit, and when, on an engine that only records calls.

use std::sync::Mutex;

use async_trait::async_trait;
use tokio::task::JoinSet;

use super::super::dialect::{Dialect, JobWriteText, Returning};
use super::super::engine::{Sql, Step, Value};
use super::*;

const MS: Duration = Duration::from_millis(1);

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
        let text = JobWriteText {
            update: "UPDATE jobs SET fence = 1 {from}",
            written_columns: "id",
            effects: &[],
            returning: Returning::Job("id"),
        };
        let engine = Arc::new(RecordingEngine { started: Instant::now(), batches: Mutex::default() });
        let batcher = Batcher::new(Dialect::Postgres.job_write(&text));
        Self { engine, batcher, writing: JoinSet::new(), requests: 0 }
    }

    fn write_jobs(&mut self, number: usize, max_batch_delay: Duration) {
        for _ in 0..number {
            self.requests += 1;
            let (engine, grouped): (Arc<dyn Engine>, _) = (self.engine.clone(), self.batcher.clone());
            let args: Args = Arc::from([Value::from(format!("pay_{}", self.requests).as_str())]);
            self.writing
                .spawn(async move { assert!(grouped.write(&engine, args, max_batch_delay).await.unwrap().is_none()) });
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
