//! The statements on table `queue_messages`, and the one place where this queue reads the clock.
//!
//! Writes of single messages share commits: one file sync serves all that arrive while another is under way. None waits
//! for others to join. All state is in the table. Column `taken` is 0, or the number of the lane that holds the message, so a receipt of a
//! closed lane finds nothing to finish.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::Deserialize;
use sqlx::{AssertSqlSafe, Row as _, SqlitePool};
use tokio_util::task::TaskTracker;

use crate::batcher::{BatchBounds, BatchRequest, BatchWork, Batcher, answer_all};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::queue::{FoundMessage, Properties, QueueError, SearchResult, lane_queue};

/// Outcome events kept.
const OUTCOMES_KEPT: i64 = 100_000;
/// Older ones are deleted once in so many inserts.
const TRIM_EVERY: i64 = 500;

/// Where messages go that were taken too often.
pub const DEAD: &str = "payments.dead";
/// How often a message is taken before it is given up, as in RabbitMQ's lanes.
const DELIVERY_LIMIT: i64 = 1_000;
/// Gives a message back, or gives it up. Both columns are as they were before the statement.
const GIVE_BACK: &str = "UPDATE queue_messages SET taken = 0, redelivered = 1, \
     dead_of = CASE WHEN deliveries > ?1 AND queue <> ?2 THEN queue ELSE dead_of END, \
     queue = CASE WHEN deliveries > ?1 THEN ?2 ELSE queue END";

#[derive(Clone)]
pub struct Store {
    pub pool: SqlitePool,
    batcher: Arc<Batcher<MessageBatches>>,
}

/// One message, written.
enum MessageWrite {
    /// Answered with the new row's id.
    Insert { queue: String, body: Bytes, properties: String, visible_at_ms: i64 },
    /// Deletes what a lane holds; answered with how many rows that were.
    Finish { id: i64, lane: i64 },
}

struct MessageBatches(SqlitePool);

impl BatchWork for MessageBatches {
    type Item = MessageWrite;
    type Answer = Result<i64, QueueError>;

    /// SQLite has one writer, so a second commit would only wait.
    const BOUNDS: BatchBounds = BatchBounds { items: 128, pause: |_| Duration::ZERO, stuck_after: None };
    const SKIPS_ABANDONED: bool = true;

    async fn commit(&self, batch: Vec<BatchRequest<Self>>) {
        let answers = write_all(&self.0, &batch).await.map_err(explain);
        answer_all(batch, answers);
    }
}

/// One message, taken.
pub struct TakenMessage {
    pub id: i64,
    visible_at_ms: i64,
    pub body: Vec<u8>,
    pub properties: Properties,
    pub redelivered: bool,
}

impl Store {
    pub fn new(pool: SqlitePool, tasks: TaskTracker) -> Self {
        Self { batcher: Batcher::new(MessageBatches(pool.clone()), tasks), pool }
    }

    /// SQLite's version, if there is a queue.
    pub async fn ping(&self) -> Result<String, QueueError> {
        let version = sqlx::query_scalar(
            "SELECT sqlite_version() FROM (SELECT count(*) FROM (SELECT id FROM queue_messages LIMIT 1))",
        );
        version.fetch_one(&self.pool).await.map_err(explain)
    }

    /// Committed when this returns. Dropped before its turn it is not written, and after that it is, all the same.
    async fn write(&self, write: MessageWrite) -> Result<i64, QueueError> {
        let broke_off = || Err(QueueError::Unavailable("queue in SQLite: a write broke off".to_owned()));
        self.batcher.submit(write, Duration::ZERO).await.unwrap_or_else(broke_off)
    }

    /// Returns the new row's id once it is committed.
    pub async fn insert(
        &self,
        queue: &str,
        body: Bytes,
        properties: &Properties,
        delay_ms: u64,
    ) -> Result<i64, QueueError> {
        let properties =
            serde_json::to_string(properties).map_err(|error| QueueError::Refused(format!("properties: {error}")))?;
        // One more, because the clock's reading is rounded down and a delay must not be short.
        let delay_ms = if delay_ms == 0 { 0 } else { delay_ms.saturating_add(1) };
        let visible_at_ms = now_ms().saturating_add(i64::try_from(delay_ms).unwrap_or(i64::MAX));
        self.write(MessageWrite::Insert { queue: queue.to_owned(), body, properties, visible_at_ms }).await
    }

    /// Deletes the oldest messages of a queue beyond [`OUTCOMES_KEPT`], now and then.
    pub async fn trim(&self, queue: &str, id: i64) -> Result<(), QueueError> {
        if id % TRIM_EVERY != 0 {
            return Ok(());
        }
        let sql = "DELETE FROM queue_messages WHERE queue = ?1 AND taken = 0 AND visible_at_ms < (SELECT visible_at_ms \
                   FROM queue_messages WHERE queue = ?1 AND taken = 0 ORDER BY visible_at_ms DESC LIMIT 1 OFFSET ?2)";
        sqlx::query(sql).bind(queue).bind(OUTCOMES_KEPT).execute(&self.pool).await.map(drop).map_err(explain)
    }

    /// Time until the queue's next message can be taken; zero when one can be now, `None` when there is none.
    pub async fn next_in(&self, queue: &str) -> Result<Option<Duration>, QueueError> {
        let sql = "SELECT min(visible_at_ms) FROM queue_messages WHERE queue = ?1 AND taken = 0";
        let next: Option<i64> = sqlx::query_scalar(sql).bind(queue).fetch_one(&self.pool).await.map_err(explain)?;
        Ok(next.map(|at_ms| millis_between(now_ms(), at_ms)))
    }

    /// Takes up to `at_most` messages for a lane, oldest first. One statement: it happens or it does not.
    pub async fn take(&self, queue: &str, lane: i64, at_most: usize) -> Result<Vec<TakenMessage>, QueueError> {
        let sql = "UPDATE queue_messages SET taken = ?1, deliveries = deliveries + 1 \
                   WHERE id IN (SELECT id FROM queue_messages WHERE queue = ?2 AND taken = 0 AND visible_at_ms <= ?3 ORDER BY visible_at_ms, id LIMIT ?4) \
                   RETURNING id, visible_at_ms, body, properties, redelivered";
        let rows = sqlx::query(sql)
            .bind(lane)
            .bind(queue)
            .bind(now_ms())
            .bind(i64::try_from(at_most).unwrap_or(i64::MAX))
            .fetch_all(&self.pool)
            .await
            .map_err(explain)?;
        let mut taken = rows.iter().map(read).collect::<Result<Vec<_>, _>>().map_err(explain)?;
        // RETURNING promises no order.
        taken.sort_by_key(|message| (message.visible_at_ms, message.id));
        Ok(taken)
    }

    /// Deletes a message that this lane holds; false when it holds it no more.
    pub async fn finish(&self, id: i64, lane: i64) -> Result<bool, QueueError> {
        self.write(MessageWrite::Finish { id, lane }).await.map(|rows| rows > 0)
    }

    /// Gives back a message that this lane holds; false when it holds it no more.
    pub async fn release(&self, id: i64, lane: i64) -> Result<bool, QueueError> {
        let sql = AssertSqlSafe(format!("{GIVE_BACK} WHERE id = ?3 AND taken = ?4"));
        let query = sqlx::query(sql).bind(DELIVERY_LIMIT).bind(DEAD).bind(id).bind(lane);
        self.changed(query).await.map(|rows| rows > 0)
    }

    /// Gives back everything that a lane holds.
    pub async fn release_lane(&self, queue: &str, lane: i64) -> Result<u64, QueueError> {
        let sql = AssertSqlSafe(format!("{GIVE_BACK} WHERE queue = ?3 AND taken = ?4"));
        self.changed(sqlx::query(sql).bind(DELIVERY_LIMIT).bind(DEAD).bind(queue).bind(lane)).await
    }

    pub async fn release_all(&self) -> Result<u64, QueueError> {
        let sql = AssertSqlSafe(format!("{GIVE_BACK} WHERE taken <> 0"));
        self.changed(sqlx::query(sql).bind(DELIVERY_LIMIT).bind(DEAD)).await
    }

    /// Takes the oldest message of a queue that has no lane, with the queue that gave it up, if one did.
    pub async fn take_from(
        &self,
        queue: &str,
        number: i64,
    ) -> Result<Option<(TakenMessage, Option<String>)>, QueueError> {
        let sql = "UPDATE queue_messages SET taken = ?1 WHERE id = (SELECT id FROM queue_messages \
                   WHERE queue = ?2 AND taken = 0 ORDER BY visible_at_ms, id LIMIT 1) \
                   RETURNING id, visible_at_ms, body, properties, redelivered, dead_of";
        let row = sqlx::query(sql).bind(number).bind(queue).fetch_optional(&self.pool).await.map_err(explain)?;
        let taken = row.map(|row| Ok::<_, sqlx::Error>((read(&row)?, row.try_get("dead_of")?)));
        taken.transpose().map_err(explain)
    }

    /// Messages that could be taken now.
    pub async fn ready(&self, queue: &str) -> Result<u64, QueueError> {
        let sql = "SELECT count(*) FROM queue_messages WHERE queue = ?1 AND taken = 0 AND visible_at_ms <= ?2";
        let count: i64 =
            sqlx::query_scalar(sql).bind(queue).bind(now_ms()).fetch_one(&self.pool).await.map_err(explain)?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    /// For how long the message that could be taken first could have been.
    pub async fn oldest_ready(&self, queue: &str) -> Result<Option<Duration>, QueueError> {
        let sql =
            "SELECT min(visible_at_ms) FROM queue_messages WHERE queue = ?1 AND taken = 0 AND visible_at_ms <= ?2";
        let now_ms = now_ms();
        let oldest: Option<i64> =
            sqlx::query_scalar(sql).bind(queue).bind(now_ms).fetch_one(&self.pool).await.map_err(explain)?;
        Ok(oldest.map(|at_ms| millis_between(at_ms, now_ms)))
    }

    async fn changed(
        &self,
        query: sqlx::query::Query<'_, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>,
    ) -> Result<u64, QueueError> {
        query.execute(&self.pool).await.map(|done| done.rows_affected()).map_err(explain)
    }
}

async fn write_all(pool: &SqlitePool, batch: &[BatchRequest<MessageBatches>]) -> Result<Vec<i64>, sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    let mut answers = Vec::with_capacity(batch.len());
    for request in batch {
        let answer = match &request.item {
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

pub fn read(row: &sqlx::sqlite::SqliteRow) -> Result<TakenMessage, sqlx::Error> {
    let id = row.try_get("id")?;
    let properties: String = row.try_get("properties")?;
    let properties = serde_json::from_str(&properties).unwrap_or_else(|error| {
        tracing::warn!(id, %error, "queue message has unreadable properties; going on without");
        Properties::default()
    });
    Ok(TakenMessage {
        id,
        visible_at_ms: row.try_get("visible_at_ms")?,
        body: row.try_get("body")?,
        properties,
        redelivered: row.try_get::<i64, _>("redelivered")? != 0,
    })
}

/// Milliseconds since the Unix epoch. The wall clock, because a delay must outlive the process.
fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Zero when the end is not later.
fn millis_between(from_ms: i64, to_ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(to_ms.saturating_sub(from_ms)).unwrap_or(0))
}

pub fn explain(error: sqlx::Error) -> QueueError {
    let missing = error.as_database_error().is_some_and(|error| error.message().starts_with("no such table"));
    if missing {
        return QueueError::Refused("table `queue_messages` is missing: run `sluicegate migrate`".to_owned());
    }
    QueueError::Unavailable(format!("queue in SQLite: {error}"))
}

/// Others may name the id in a payload or a reference; so many are looked at.
const CANDIDATES_MAX: i64 = 1_000;

/// What is read of a message.
#[derive(Deserialize)]
struct CandidateRow {
    id: String,
}

impl Store {
    /// The job's message in a lane; of several, the one that comes first. Reads every message of every lane, so it serves
    /// operators' questions and stays off a worker's path.
    pub async fn find(&self, prefix: &str, job: &JobId) -> Result<SearchResult, QueueError> {
        let sql = "SELECT id, queue, body, taken, visible_at_ms FROM queue_messages WHERE instr(body, ?1) > 0 \
                   ORDER BY taken DESC, visible_at_ms, id LIMIT ?2";
        let named = format!("\"{job}\"").into_bytes();
        let rows = sqlx::query(sql).bind(named).bind(CANDIDATES_MAX).fetch_all(&self.pool).await.map_err(explain)?;
        for row in rows {
            let queue: String = row.try_get("queue").map_err(explain)?;
            // Names of our own queues are none that a provider can have.
            let lane = queue.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.'));
            let Some(lane) = lane.and_then(|lane| ProviderName::new(lane).ok()) else { continue };
            if lane_queue(prefix, &lane).is_err() {
                continue;
            }
            let body: Vec<u8> = row.try_get("body").map_err(explain)?;
            if !serde_json::from_slice::<CandidateRow>(&body).is_ok_and(|named| named.id == job.as_str()) {
                continue;
            }
            let id = row.try_get("id").map_err(explain)?;
            let visible_at_ms = row.try_get("visible_at_ms").map_err(explain)?;
            let taken = row.try_get::<i64, _>("taken").map_err(explain)? != 0;
            return Ok(SearchResult::Found(FoundMessage {
                lane,
                body: body.into(),
                is_delivered: taken,
                messages_ahead: if taken { 0 } else { self.messages_ahead(&queue, visible_at_ms, id).await? },
                ready_in: millis_between(now_ms(), visible_at_ms),
            }));
        }
        Ok(SearchResult::NotFound)
    }

    async fn messages_ahead(&self, queue: &str, visible_at_ms: i64, id: i64) -> Result<u64, QueueError> {
        let sql = "SELECT count(*) FROM queue_messages \
                   WHERE queue = ?1 AND taken = 0 AND (visible_at_ms, id) < (?2, ?3)";
        let count = sqlx::query_scalar(sql).bind(queue).bind(visible_at_ms).bind(id);
        let count: i64 = count.fetch_one(&self.pool).await.map_err(explain)?;
        Ok(u64::try_from(count).unwrap_or(0))
    }
}
