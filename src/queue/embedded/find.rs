//! Search for one job's message: the lane that has it, and how many messages that lane delivers before it.
//!
//! It reads every message of every lane, so it serves operators' questions and stays off a worker's path.

use std::time::Duration;

use serde::Deserialize;
use sqlx::Row as _;

use super::store::{Store, explain, now_ms};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::queue::names::lane_queue;
use crate::queue::{FoundMessage, QueueError, SearchResult};

/// Others may name the id in a payload or a reference; so many are looked at.
const CANDIDATES_MAX: i64 = 1_000;

/// What is read of a message.
#[derive(Deserialize)]
struct CandidateRow {
    id: String,
}

impl Store {
    /// The job's message in a lane; of several, the one that comes first.
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
            let (id, visible_at_ms) = (row.try_get("id").map_err(explain)?, row.try_get("visible_at_ms"));
            let visible_at_ms: i64 = visible_at_ms.map_err(explain)?;
            let taken = row.try_get::<i64, _>("taken").map_err(explain)? != 0;
            let before = if taken { 0 } else { self.messages_ahead(&queue, visible_at_ms, id).await? };
            let ready_in = u64::try_from(visible_at_ms.saturating_sub(now_ms())).unwrap_or(0);
            let ready_in = Duration::from_millis(ready_in);
            return Ok(SearchResult::Found(FoundMessage {
                lane,
                body: body.into(),
                is_delivered: taken,
                messages_ahead: before,
                ready_in,
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
