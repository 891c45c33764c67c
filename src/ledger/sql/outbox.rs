//! The ledger's outbox: outcome events, which are leased, published at least once, and retried when a queue rejects them.
//!
//! See `docs/decisions/0023-transactional-outbox.md`.

use std::time::Duration;

use super::dialect::Template;
use super::engine::{Args, Value, args};
use super::result::{FromRow, SqlRow, from_row, read_or_log};
use crate::domain::time::EpochMs;
use crate::ledger::database::Database;
use crate::ledger::{EventSelection, LedgerError, OutcomeEvent, UnpublishedEvents};

/// An event's columns, as [`OutcomeEvent`] is read.
pub const EVENT_COLUMNS: &str =
    "sequence, job_id AS id, provider, state, provider_reference, charged_amount, reason, attempts, {ms:at} AS at_ms";

/// In milliseconds: doubles with each time that a queue rejected the event, up to ten minutes.
const RETRY_DELAYS_MS: [u32; 7] = [10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000];

/// `{{now}}` plus the wait after one more rejection.
fn next_try() -> String {
    let (last, others) = RETRY_DELAYS_MS.split_last().unwrap_or((&0, &[]));
    let cases: Vec<String> = others.iter().enumerate().map(|(tries, ms)| format!("WHEN {tries} THEN {ms}")).collect();
    format!("{{after:(CASE tries {} ELSE {last} END)}}", cases.join(" "))
}

static UNPUBLISHED: Template = Template::made(|_| lease_text("next_try_at IS NULL"));
static RETRY: Template = Template::made(|_| lease_text("next_try_at <= {now}"));

fn lease_text(which: &str) -> String {
    format!(
        "UPDATE outcome_events SET taken_until = {{after:$2}} WHERE sequence IN (\
             SELECT sequence FROM outcome_events \
             WHERE published_at IS NULL AND {which} AND (taken_until IS NULL OR taken_until <= {{now}}) \
             ORDER BY next_try_at, sequence LIMIT $1 {{unlocked}}) \
         RETURNING {EVENT_COLUMNS}"
    )
}

static RENEWED: Template = Template::new(
    "UPDATE outcome_events SET taken_until = {after:$2} WHERE published_at IS NULL AND sequence {among:$1}",
);

static REJECTED: Template = Template::made(|_| {
    format!(
        "UPDATE outcome_events SET tries = tries + 1, next_try_at = {}, taken_until = NULL \
         WHERE published_at IS NULL AND sequence {{among:$1}}",
        next_try()
    )
});

static WAITING: Template = Template::new(
    "SELECT count(*) AS events, {since:min(since)} AS oldest_ms, \
         COALESCE(sum(CASE WHEN tries > 0 THEN 1 ELSE 0 END), 0) AS rejected \
     FROM (SELECT CASE WHEN {readable:at} THEN at END AS since, tries FROM outcome_events \
         WHERE published_at IS NULL) AS waiting",
);

static PUBLISHED: Template = Template::new(
    "UPDATE outcome_events SET published_at = {now} \
     WHERE published_at IS NULL AND sequence {among:$1}",
);

impl Database {
    /// Leases the oldest unpublished events that were never rejected: no other worker gets them while the lease lasts.
    pub async fn lease_events(&self, at_most: u32, lease: Duration) -> Result<Vec<OutcomeEvent>, LedgerError> {
        self.lease_selected_events(EventSelection::NeverRejected, at_most, lease).await
    }

    pub async fn lease_selected_events(
        &self,
        which: EventSelection,
        at_most: u32,
        lease: Duration,
    ) -> Result<Vec<OutcomeEvent>, LedgerError> {
        let sql = match which {
            EventSelection::NeverRejected => &UNPUBLISHED,
            EventSelection::RejectedBefore => &RETRY,
        };
        let rows = self.query(sql, args![at_most, lease]).await?;
        let mut events = read_or_log::<OutcomeEvent>(&rows, "outcome_events", "sequence");
        if events.len() < rows.len() {
            // Otherwise they would stay first in the order and be leased before all others forever.
            let unread = |row: &SqlRow| {
                row.get("sequence").ok().filter(|sequence| events.iter().all(|event| event.sequence != *sequence))
            };
            self.mark_events_rejected(&rows.iter().filter_map(unread).collect::<Vec<_>>()).await?;
        }
        // RETURNING promises no order.
        events.sort_by_key(|event| event.sequence);
        Ok(events)
    }

    /// Prolongs the leases of events whose confirms are late.
    pub async fn renew_event_leases(&self, sequences: &[i64], lease: Duration) -> Result<(), LedgerError> {
        self.update_events(&RENEWED, sequences, Some(lease)).await
    }

    /// Records that a queue rejected these events. The retry delay grows to ten minutes at most.
    pub async fn mark_events_rejected(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.update_events(&REJECTED, sequences, None).await
    }

    pub async fn mark_events_published(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.update_events(&PUBLISHED, sequences, None).await
    }

    pub async fn unpublished_events(&self) -> Result<UnpublishedEvents, LedgerError> {
        UnpublishedEvents::from_row(&self.query_row(&WAITING, []).await?)
    }

    async fn update_events(
        &self,
        sql: &Template,
        sequences: &[i64],
        lease: Option<Duration>,
    ) -> Result<(), LedgerError> {
        if sequences.is_empty() {
            return Ok(());
        }
        let list: Value = serde_json::Value::from(sequences).to_string().into();
        let args: Args = std::iter::once(list).chain(lease.map(Value::from)).collect();
        self.query(sql, args).await.map(drop)
    }
}

from_row!(row => OutcomeEvent {
    sequence, id, provider, state, provider_reference, charged_amount, reason, attempts;
    at_ms: row.get::<EpochMs>("at")?.0,
});

from_row!(row => UnpublishedEvents { events, rejected, oldest });
