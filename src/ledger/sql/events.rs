//! Events in SQL: their record, pages of the one order, the cursor of their publisher, and events to publish again.
//!
//! An event is written with the state that it reports, and never marked. The publisher's cursor says how far the broker
//! has them. An event that leaves the order has a row of `event_retries` instead. See
//! `docs/decisions/0053-one-order-of-events.md`.

use std::time::Duration;

use super::dialect::{Dialect, Template};
use super::engine::{Value, args};
use super::no_row;
use super::result::{FromRow, SqlRow, from_row, read_or_log};
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::events::{EventCursor, EventPage, EventsAfter, OutcomeEvent, PublishResults, UnpublishedEvents};

/// One event for each final state, in the statement that makes it final. Not its first write, so that on PostgreSQL the
/// transaction is older than the event's sequence.
pub const WRITE_EVENT: &str = "INSERT INTO events \
         (job_id, n, provider, state, provider_reference, charged_amount, reason, attempts, at) \
     SELECT job.id, (SELECT count(*) + 1 FROM events WHERE events.job_id = job.id), job.provider, job.state, \
         job.provider_reference, job.charged_amount, job.reason, job.attempts, job.updated_at FROM {job}";

/// An event's columns, as [`OutcomeEvent`] is read.
const COLUMNS: &str = "event.sequence, CAST(event.event_id AS text) AS event_id, event.n, event.job_id AS id, \
     event.provider, event.state, event.provider_reference, event.charged_amount, event.reason, event.attempts, \
     {ms:event.at} AS at_ms";

/// The cursor of the publisher to `payments.outcomes`.
const CURSOR: &str = "event_cursors WHERE name = 'amqp'";

/// Events up to this position may be deleted.
const KEPT_AFTER: &str = "(SELECT kept_after FROM event_order)";

/// Most events of one page. Batches are at most as large, so a page has at least one.
const PAGE: u32 = 500;
/// In milliseconds: doubles with each time that a queue rejected the event, up to ten minutes.
const RETRY_DELAYS_MS: [u32; 7] = [10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000];
/// An event with a late confirm is published again after this time.
const UNCONFIRMED_FOR: Duration = Duration::from_secs(60);

/// Whether the broker has confirmed the row `event`.
pub fn is_published(dialect: Dialect) -> String {
    match dialect {
        Dialect::Postgres => "event_is_published(event.sequence)".to_owned(),
        Dialect::Sqlite => format!(
            "(event.sequence <= (SELECT position FROM {CURSOR}) \
             AND NOT EXISTS (SELECT 1 FROM event_retries AS retry WHERE retry.sequence = event.sequence))"
        ),
    }
}

/// Positions have no gaps, so the batches of a page are those whose position is near. Each event is read by its key.
static PAGE_AFTER: Template = Template::made(|dialect| match dialect {
    Dialect::Postgres => format!(
        "SELECT batch.position AS upto, {KEPT_AFTER} AS kept_after, {COLUMNS} FROM event_batches AS batch \
         CROSS JOIN LATERAL unnest(batch.events) WITH ORDINALITY AS placed (sequence, place) \
         CROSS JOIN LATERAL (SELECT * FROM events WHERE events.sequence = placed.sequence LIMIT 1) AS event \
         WHERE batch.position > $1 AND batch.position <= $1 + $2 ORDER BY batch.position, placed.place"
    ),
    Dialect::Sqlite => format!(
        "SELECT event.sequence AS upto, {KEPT_AFTER} AS kept_after, {COLUMNS} FROM events AS event \
         WHERE event.sequence > $1 ORDER BY event.sequence LIMIT $2"
    ),
});

static WITHOUT_PAGE: Template = Template::made(|_| format!("SELECT {KEPT_AFTER} AS kept_after"));

static CURSOR_STATE: Template = Template::made(|_| format!("SELECT position, turn, holder FROM {CURSOR}"));

static TAKE_TURN: Template = Template::made(|_| {
    format!("UPDATE {} AND turn = $1 RETURNING position, turn, holder", change_cursor("holder = $2"))
});

static LEAVE_TURN: Template = Template::made(|_| format!("UPDATE {} AND turn = $1", change_cursor("holder = NULL")));

static MOVE_CURSOR: Template = Template::made(|_| format!("UPDATE {} AND turn = $1", change_cursor("position = $2")));

fn change_cursor(set: &str) -> String {
    CURSOR.replace(" WHERE", &format!(" SET turn = turn + 1, {set} WHERE"))
}

static REJECTED: Template = Template::made(|_| {
    let (last, others) = RETRY_DELAYS_MS.split_last().unwrap_or((&0, &[]));
    let cases: Vec<String> = others.iter().enumerate().map(|(tries, ms)| format!("WHEN {tries} THEN {ms}")).collect();
    let first = RETRY_DELAYS_MS[0];
    format!(
        "INSERT INTO event_retries (sequence, tries, next_try_at) \
         SELECT CAST(value AS bigint), 1, {{after:{first}}} FROM ({{texts:$1}}) AS events WHERE true \
         ON CONFLICT (sequence) DO UPDATE SET tries = event_retries.tries + 1, \
             next_try_at = {{after:(CASE event_retries.tries {} ELSE {last} END)}}",
        cases.join(" ")
    )
});

static UNCONFIRMED: Template = Template::new(
    "INSERT INTO event_retries (sequence, tries, next_try_at) \
     SELECT CAST(value AS bigint), 0, {after:$2} FROM ({texts:$1}) AS events WHERE true \
     ON CONFLICT (sequence) DO UPDATE SET next_try_at = excluded.next_try_at",
);

static PUBLISHED: Template = Template::new("DELETE FROM event_retries WHERE sequence {among:$1}");

static DUE: Template = Template::made(|dialect| {
    let due = "SELECT sequence FROM event_retries WHERE next_try_at <= {now} ORDER BY next_try_at, sequence LIMIT $1";
    let among = match dialect {
        Dialect::Postgres => format!("= ANY (ARRAY({due}))"),
        Dialect::Sqlite => format!("IN ({due})"),
    };
    format!("SELECT {COLUMNS} FROM events AS event WHERE event.sequence {among} ORDER BY event.sequence")
});

/// The oldest one is the first in the order, the first without a place, or the first that left the order.
static UNPUBLISHED: Template = Template::made(|dialect| {
    let cursor = format!("(SELECT position FROM {CURSOR})");
    let in_order = match dialect {
        Dialect::Postgres => format!(
            "SELECT (SELECT COALESCE(max(position), 0) FROM event_batches) - {cursor} AS many, \
                 (SELECT events[1] FROM event_batches WHERE position > {cursor} ORDER BY position LIMIT 1) AS lowest \
             UNION ALL SELECT count(*), min(sequence) FROM events WHERE sequence > \
                 COALESCE((SELECT highest FROM event_batches ORDER BY position DESC LIMIT 1), 0)"
        ),
        Dialect::Sqlite => {
            format!("SELECT count(*) AS many, min(sequence) AS lowest FROM events WHERE sequence > {cursor}")
        }
    };
    format!(
        "SELECT CAST(sum(many) AS bigint) AS events, {{since:min(at)}} AS oldest_ms, \
             (SELECT count(*) FROM event_retries WHERE tries > 0) AS rejected \
         FROM (SELECT many, (SELECT CASE WHEN {{readable:at}} THEN at END FROM events \
                             WHERE sequence = unpublished.lowest) AS at \
             FROM ({in_order} UNION ALL SELECT count(*), min(sequence) FROM event_retries) AS unpublished) AS waiting"
    )
});

/// The oldest events that may be deleted, up to a position. The publisher's own batch stays.
static OLD: Template = Template::made(|dialect| {
    let (places, table) = match dialect {
        Dialect::Postgres => ("position", "event_batches"),
        Dialect::Sqlite => ("sequence", "events"),
    };
    format!(
        "SELECT max({places}) AS upto FROM {table} \
         WHERE {places} > {KEPT_AFTER} AND {places} <= {KEPT_AFTER} + $2 \
             AND {places} < (SELECT position FROM {CURSOR}) AND at <= {{after:(0 - $1)}}"
    )
});

/// The events of a payment are deleted together with its last one, because their count numbers the next one.
static FORGET_EVENTS: Template = Template::made(|dialect| {
    let [old, finished] = match dialect {
        Dialect::Postgres => [
            "= ANY (ARRAY(SELECT unnest(events) FROM event_batches WHERE position <= $1))",
            "= ANY (ARRAY(SELECT job_id FROM old))",
        ],
        Dialect::Sqlite => ["<= $1 AND sequence > (SELECT kept_after FROM event_order)", "IN (SELECT job_id FROM old)"],
    };
    format!(
        "WITH old AS (SELECT job_id FROM events WHERE sequence {old} \
             AND state IN ('succeeded', 'declined', 'expired', 'cancelled')) \
         DELETE FROM events WHERE job_id {finished} AND sequence NOT IN (SELECT sequence FROM event_retries)"
    )
});

static FORGET_BATCHES: Template = Template::new("DELETE FROM event_batches WHERE position <= $1");

static KEEP_AFTER: Template = Template::new("UPDATE event_order SET kept_after = $1 WHERE kept_after < $1");

/// Never an era that was before, also in a database that was restored twice from one backup.
static BEGIN_ERA: Template =
    Template::new("UPDATE event_order SET era = CASE WHEN era < {now_ms} THEN {now_ms} ELSE era + 1 END RETURNING era");

impl Database {
    /// The events after a position, at most a page.
    pub async fn events_after(&self, position: i64) -> Result<EventsAfter, LedgerError> {
        let rows = self.query_by_index(&PAGE_AFTER, args![position, PAGE]).await?;
        let kept_after = match rows.last() {
            Some(row) => row.get("kept_after")?,
            None => self.query_row(&WITHOUT_PAGE, []).await?.get("kept_after")?,
        };
        if position < kept_after {
            return Ok(EventsAfter::Deleted { kept_after });
        }
        let Some(last) = rows.last() else { return Ok(EventsAfter::End) };
        let upto = last.get("upto")?;
        let events: Vec<OutcomeEvent> = read_or_log(&rows, "events", "sequence");
        Ok(EventsAfter::Page(EventPage { unreadable: unreadable(&rows, &events), events, upto }))
    }

    /// The publisher's cursor.
    pub async fn event_cursor(&self) -> Result<EventCursor, LedgerError> {
        EventCursor::from_row(&self.query_row(&CURSOR_STATE, []).await?)
    }

    /// Takes the cursor, if no process has written it since this turn; `None`: another process was faster.
    pub async fn take_event_cursor(&self, turn: i64, holder: &str) -> Result<Option<EventCursor>, LedgerError> {
        self.query_one(&TAKE_TURN, args![turn, holder]).await?.as_ref().map(EventCursor::from_row).transpose()
    }

    /// Leaves the cursor to any other process.
    pub async fn leave_event_cursor(&self, turn: i64) -> Result<(), LedgerError> {
        self.query(&LEAVE_TURN, args![turn]).await.map(drop)
    }

    /// Moves the cursor to a position, with the events that leave the order or were tried again, all or nothing. Returns
    /// the next turn; `None`: another process has taken the cursor, and nothing is written.
    pub async fn move_event_cursor(
        &self,
        turn: i64,
        position: i64,
        results: &PublishResults,
    ) -> Result<Option<i64>, LedgerError> {
        let mut steps = vec![self.must_affect(&MOVE_CURSOR, args![turn, position])];
        let PublishResults { published, rejected, unconfirmed } = results;
        if !unconfirmed.is_empty() {
            steps.push(self.step(&UNCONFIRMED, args![list(unconfirmed), UNCONFIRMED_FOR]));
        }
        if !rejected.is_empty() {
            steps.push(self.step(&REJECTED, args![list(rejected)]));
        }
        if !published.is_empty() {
            steps.push(self.step(&PUBLISHED, args![list(published)]));
        }
        Ok(self.engine.atomically(steps).await?.map(|_| turn + 1))
    }

    /// Events that have left the order and are due again. One that cannot be read counts as rejected.
    pub async fn events_to_retry(&self, at_most: u32) -> Result<EventPage, LedgerError> {
        let rows = self.query_by_index(&DUE, args![at_most]).await?;
        let events: Vec<OutcomeEvent> = read_or_log(&rows, "events", "sequence");
        Ok(EventPage { unreadable: unreadable(&rows, &events), events, upto: 0 })
    }

    pub async fn unpublished_events(&self) -> Result<UnpublishedEvents, LedgerError> {
        UnpublishedEvents::from_row(&self.query_row(&UNPUBLISHED, []).await?)
    }

    /// Deletes a page of events that are older than this and that the publisher has passed; false: there is none.
    pub async fn forget_events(&self, older_than: Duration) -> Result<bool, LedgerError> {
        let rows = self.query_by_index(&OLD, args![older_than, PAGE]).await?;
        let upto: Option<i64> = rows.first().ok_or_else(no_row)?.get("upto")?;
        let Some(upto) = upto else { return Ok(false) };
        let mut steps = vec![self.step(&FORGET_EVENTS, args![upto])];
        if self.dialect() == Dialect::Postgres {
            steps.push(self.step(&FORGET_BATCHES, args![upto]));
        }
        steps.push(self.step(&KEEP_AFTER, args![upto]));
        self.engine.atomically(steps).await?;
        Ok(true)
    }

    /// Begins an era, for a database that went back: each position of before may now mean another event.
    pub async fn begin_event_era(&self) -> Result<i64, LedgerError> {
        self.query_row(&BEGIN_ERA, []).await?.get("era")
    }
}

fn list(sequences: &[i64]) -> Value {
    serde_json::Value::from(sequences).to_string().into()
}

/// The sequences of rows that are no events.
fn unreadable(rows: &[SqlRow], events: &[OutcomeEvent]) -> Vec<i64> {
    if rows.len() == events.len() {
        return Vec::new();
    }
    let is_read = |sequence: &i64| events.iter().any(|event| event.sequence == *sequence);
    rows.iter().filter_map(|row| row.get("sequence").ok()).filter(|sequence| !is_read(sequence)).collect()
}

from_row!(row => EventCursor { position, turn, holder });
from_row!(row => OutcomeEvent {
    sequence, event_id, n, id, provider, state, provider_reference, charged_amount, reason, attempts;
    at_ms: row.get::<EpochMs>("at")?.0,
});
from_row!(row => UnpublishedEvents { events, rejected, oldest });
