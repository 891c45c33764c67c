//! The search for one message among those that could not be a job, by the digest of its bytes.
//!
//! The rows are read a page at a time, in the order in which they came.

use sha2::{Digest as _, Sha256};

use super::store::{Store, TakenMessage, explain, read};
use crate::queue::{INVALID_SEARCHED_MAX, QueueError, headers, too_many_invalid};

/// Messages of a page; each may be as large as a message can be.
const PAGE: usize = 100;

impl Store {
    pub async fn find_invalid(
        &self,
        queue: &str,
        sha256: [u8; 32],
        reason: &str,
    ) -> Result<Option<TakenMessage>, QueueError> {
        let sql = "SELECT id, visible_at_ms, body, properties, redelivered FROM queue_messages \
                   WHERE queue = ?1 AND taken = 0 AND (visible_at_ms, id) > (?2, ?3) ORDER BY visible_at_ms, id LIMIT ?4";
        let (mut after, page) = ((i64::MIN, i64::MIN), i64::try_from(PAGE).unwrap_or(i64::MAX));
        for _ in 0..INVALID_SEARCHED_MAX / PAGE {
            let query = sqlx::query(sql).bind(queue).bind(after.0).bind(after.1).bind(page);
            let rows = query.fetch_all(&self.pool).await.map_err(explain)?;
            let Some(last) = rows.last() else { return Ok(None) };
            after = read(last).map_err(explain)?.place();
            for row in &rows {
                let message = read(row).map_err(explain)?;
                let is_same = || <[u8; 32]>::from(Sha256::digest(&message.body)) == sha256;
                if headers::is_rejection(&message.properties, reason) && is_same() {
                    return Ok(Some(message));
                }
            }
        }
        Err(too_many_invalid(queue))
    }
}
