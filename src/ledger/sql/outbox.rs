//! What leaves the ledger: outcome events, published at least once, and the record of messages that never became jobs.

use std::sync::Arc;
use std::time::Duration;

use super::dialect::Dialect;
use super::engine::{Engine, Sql, Value};
use super::row::{Row, corrupt};
use super::storable;
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::ledger::{LedgerError, OutcomeEvent, RejectedMessage};

/// Longest claimed id of a rejected message that is kept, in characters.
const REJECTED_ID_CHARS_MAX: usize = 255;

/// An event as [`event`] reads it.
pub(super) const EVENT_COLUMNS: &str =
    "sequence, job_id AS id, provider, state, provider_reference, reason, attempts, {ms:at} AS at_ms";

pub struct Statements {
    unpublished: Sql,
    published: Sql,
    reject: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            unpublished: dialect.sql(&format!(
                "UPDATE outcome_events SET taken_until = {{after:$2}} WHERE sequence IN (\
                     SELECT sequence FROM outcome_events \
                     WHERE published_at IS NULL AND (taken_until IS NULL OR taken_until <= {{now}}) \
                     ORDER BY sequence LIMIT $1 {{unlocked}}) \
                 RETURNING {EVENT_COLUMNS}"
            )),
            published: dialect.sql(
                "UPDATE outcome_events SET published_at = {now} \
                 WHERE published_at IS NULL AND sequence {among:$1}",
            ),
            reject: dialect.sql(
                "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes) \
                 VALUES ({now}, $1, $2, $3, $4, $5, $6)",
            ),
        }
    }

    pub async fn take(
        &self,
        engine: &dyn Engine,
        at_most: u32,
        lease: Duration,
    ) -> Result<Vec<OutcomeEvent>, LedgerError> {
        let rows = engine.query(&self.unpublished, Arc::from([at_most.into(), lease.into()])).await?;
        let mut events: Vec<OutcomeEvent> = rows.iter().map(event).collect::<Result<_, _>>()?;
        // RETURNING promises no order.
        events.sort_by_key(|event| event.sequence);
        Ok(events)
    }

    pub async fn published(&self, engine: &dyn Engine, sequences: &[i64]) -> Result<(), LedgerError> {
        if sequences.is_empty() {
            return Ok(());
        }
        let list = serde_json::Value::from(sequences).to_string();
        engine.query(&self.published, Arc::from([list.into()])).await?;
        Ok(())
    }

    pub async fn reject(&self, engine: &dyn Engine, message: &RejectedMessage) -> Result<(), LedgerError> {
        let id = message.job_id.as_deref().map(storable);
        let id = id.map(|id| id.chars().take(REJECTED_ID_CHARS_MAX).collect::<String>());
        let args: [Value; 6] = [
            message.lane.as_str().into(),
            id.into(),
            message.reason.into(),
            storable(&message.detail).into(),
            message.body_sha256.as_slice().into(),
            i64::try_from(message.body_bytes).unwrap_or(i64::MAX).into(),
        ];
        engine.query(&self.reject, Arc::from(args)).await?;
        Ok(())
    }
}

pub(super) fn event(row: &Row) -> Result<OutcomeEvent, LedgerError> {
    Ok(OutcomeEvent {
        sequence: row.int("sequence")?,
        id: row.text("id")?,
        provider: ProviderName::new(row.text("provider")?).map_err(|problem| corrupt("provider", &problem))?,
        state: final_state(row)?,
        provider_reference: row.opt_text("provider_reference")?,
        reason: row.opt_text("reason")?,
        attempts: row.count("attempts")?,
        at_ms: row.int("at_ms")?,
    })
}

pub(super) fn final_state(row: &Row) -> Result<FinalState, LedgerError> {
    FinalState::from_name(&row.text("state")?).ok_or_else(|| corrupt("state", "is not final"))
}
