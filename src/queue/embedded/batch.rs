//! Group commit of single-message writes: one file sync serves all writes that arrive while another sync is under way.
//!
//! A write never waits for others to join: when no commit runs, it commits at once with all writes that are queued. A
//! caller gets its result only after the commit that holds its write.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use sqlx::SqlitePool;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio_util::task::TaskTracker;

use super::store::explain;
use crate::queue::QueueError;

/// Most writes in one commit: others wait for the same connection.
const WRITES_MAX: usize = 128;

/// One message, written.
#[derive(Clone, Debug)]
pub(super) enum MessageWrite {
    /// Answered with the new row's id.
    Insert { queue: String, body: Bytes, properties: String, visible_at_ms: i64 },
    /// Deletes what a lane holds; answered with how many rows that were.
    Finish { id: i64, lane: i64 },
}

struct QueuedWrite {
    write: MessageWrite,
    reply: oneshot::Sender<Result<i64, QueueError>>,
}

#[derive(Clone)]
pub(super) struct WriteBatcher {
    pool: SqlitePool,
    waiting: Arc<Mutex<Vec<QueuedWrite>>>,
    /// Held by the task that commits the batch.
    commit_lock: Arc<tokio::sync::Mutex<()>>,
    tasks: TaskTracker,
}

impl WriteBatcher {
    pub fn new(pool: SqlitePool, tasks: TaskTracker) -> Self {
        Self { pool, waiting: Arc::default(), commit_lock: Arc::default(), tasks }
    }

    /// Committed when this returns. Dropped before its turn it is not written, and after that it is, all the same.
    pub async fn write(&self, write: MessageWrite) -> Result<i64, QueueError> {
        let (reply, mut answer) = oneshot::channel();
        self.waiting.lock().push(QueuedWrite { write, reply });
        let _turn = self.commit_lock.lock().await;
        loop {
            match answer.try_recv() {
                Ok(answer) => return answer,
                Err(TryRecvError::Closed) => {
                    return Err(QueueError::Unavailable("queue in SQLite: a write broke off".to_owned()));
                }
                Err(TryRecvError::Empty) => {
                    let units = self.next();
                    // A task of its own: the caller that commits may be dropped, and the other writes must not be.
                    let committed = self.tasks.spawn(commit(self.pool.clone(), units)).await;
                    committed.map_err(|error| QueueError::Unavailable(format!("queue in SQLite: {error}")))?;
                }
            }
        }
    }

    fn next(&self) -> Vec<QueuedWrite> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|unit| !unit.reply.is_closed());
        let units = waiting.len().min(WRITES_MAX);
        waiting.drain(..units).collect()
    }
}

async fn commit(pool: SqlitePool, units: Vec<QueuedWrite>) {
    match write_all(&pool, &units).await {
        Ok(answers) => {
            for (unit, answer) in units.into_iter().zip(answers) {
                drop(unit.reply.send(Ok(answer)));
            }
        }
        Err(error) => {
            let error = explain(error);
            for unit in units {
                drop(unit.reply.send(Err(error.clone())));
            }
        }
    }
}

async fn write_all(pool: &SqlitePool, units: &[QueuedWrite]) -> Result<Vec<i64>, sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    let mut answers = Vec::with_capacity(units.len());
    for unit in units {
        let answer = match &unit.write {
            MessageWrite::Insert { queue, body, properties, visible_at_ms } => {
                let sql = "INSERT INTO queue_messages (queue, body, properties, visible_at_ms) VALUES (?1, ?2, ?3, ?4)";
                let query = sqlx::query(sql).bind(queue).bind(&**body).bind(properties).bind(visible_at_ms);
                query.execute(&mut *transaction).await?.last_insert_rowid()
            }
            MessageWrite::Finish { id, lane } => {
                let sql = "DELETE FROM queue_messages WHERE id = ?1 AND taken = ?2";
                let done = sqlx::query(sql).bind(id).bind(lane).execute(&mut *transaction).await?;
                i64::try_from(done.rows_affected()).unwrap_or(i64::MAX)
            }
        };
        answers.push(answer);
    }
    transaction.commit().await?;
    Ok(answers)
}
