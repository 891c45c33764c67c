//! The sequencer's SQL: gives new events their places in the one order.
//!
//! Any process may call it, and several at once: a batch follows exactly one other, so the slower one of two, or one
//! that was frozen meanwhile, places nothing. On SQLite there is nothing to do, because an event's sequence is its place.
//! See [`crate::domain::event_order`].

use std::ops::RangeInclusive;

use super::dialect::{Dialect, Template};
use super::engine::args;
use super::no_row;
use super::result::{SqlRow, corrupt};
use crate::domain::event_order::{EventBatch, EventLook, EventOrder, OrderEnd};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// Most events of one batch.
const BATCH: u32 = 500;

/// The end of the order, and the number of this transaction, which begins after the end was read.
static END: Template = Template::new(
    "SELECT COALESCE(last.position, 0) AS position, COALESCE(last.highest, 0) AS highest, \
         (SELECT COALESCE(jsonb_agg(jsonb_build_array(lower(gap), upper(gap) - 1)), '[]')::text \
          FROM unnest(last.gaps) AS gaps (gap)) AS gaps, \
         pg_current_xact_id()::text::bigint AS writer \
     FROM (SELECT 1) AS always \
     LEFT JOIN (SELECT position, highest, gaps FROM event_batches ORDER BY position DESC LIMIT 1) AS last ON true",
);

/// Above `$1` and in the gaps `$2`, all in one snapshot: it has all earlier events of a payment if it has a later one.
static LOOK: Template = Template::new(
    "SELECT pg_snapshot_xmin(snapshot.taken)::text::bigint AS oldest_writer, found.sequence \
     FROM (SELECT pg_current_snapshot() AS taken) AS snapshot \
     LEFT JOIN (SELECT sequence FROM (\
             (SELECT inside.sequence FROM unnest($2::int8multirange) AS gaps (gap) \
              CROSS JOIN LATERAL (SELECT sequence FROM events WHERE sequence >= lower(gap) AND sequence < upper(gap) \
                  ORDER BY sequence LIMIT $3) AS inside \
              ORDER BY inside.sequence LIMIT $3) \
             UNION ALL (SELECT sequence FROM events WHERE sequence > $1 ORDER BY sequence LIMIT $3)) AS unplaced \
         ORDER BY sequence LIMIT $3) AS found ON true \
     ORDER BY found.sequence",
);

/// Waits for another sequencer's batch at the same place, and then writes nothing. Nor does it if the last batch is not
/// there: the database went back, and the batch would leave places without events.
static APPEND: Template = Template::new(
    "INSERT INTO event_batches (previous, position, highest, gaps, events) \
     SELECT $1, $2, $3, $4::int8multirange, ARRAY(SELECT value::bigint FROM jsonb_array_elements_text($5::jsonb)) \
     WHERE $1 = COALESCE((SELECT position FROM event_batches ORDER BY position DESC LIMIT 1), 0) \
     ON CONFLICT DO NOTHING RETURNING pg_current_xact_id()::text::bigint AS writer",
);

static LAST_SEQUENCE: Template = Template::new("SELECT COALESCE(max(sequence), 0) AS position FROM events");

impl Database {
    /// Places events that are new, at most a batch. Returns the place of the last event. The caller keeps `order` for its
    /// next call; `None` reads it from the ledger.
    pub async fn place_events(&self, order: &mut Option<EventOrder>) -> Result<i64, LedgerError> {
        if self.dialect() == Dialect::Sqlite {
            return self.query_row(&LAST_SEQUENCE, []).await?.get("position");
        }
        // Until a batch is certainly written, the caller has no order.
        let mut next = match order.take() {
            Some(order) => order,
            None => self.event_order().await?,
        };
        let placed = next.position();
        let look = self.look_for_events(&next).await?;
        if let Some(batch) = next.place(&look) {
            let Some(writer) = self.append_events(&batch).await? else { return Ok(placed) };
            next.record_written(writer);
        }
        Ok(order.insert(next).position())
    }

    async fn event_order(&self) -> Result<EventOrder, LedgerError> {
        let row = self.query_by_index(&END, []).await?.into_iter().next().ok_or_else(no_row)?;
        let end = OrderEnd { position: row.get("position")?, highest: row.get("highest")?, gaps: gaps_of(&row)? };
        Ok(EventOrder::continued(end, row.get("writer")?))
    }

    async fn look_for_events(&self, order: &EventOrder) -> Result<EventLook, LedgerError> {
        let rows = self.query_by_index(&LOOK, args![order.highest(), gaps_text(&order.gaps()), BATCH]).await?;
        let oldest_writer = rows.first().ok_or_else(no_row)?.get("oldest_writer")?;
        let found: Vec<Option<i64>> = rows.iter().map(|row| row.get("sequence")).collect::<Result<_, _>>()?;
        let found: Vec<i64> = found.into_iter().flatten().collect();
        Ok(EventLook { is_complete: found.len() < BATCH as usize, found, oldest_writer })
    }

    /// The number of the transaction that wrote the batch; `None`: another batch is at its place.
    async fn append_events(&self, batch: &EventBatch) -> Result<Option<i64>, LedgerError> {
        let EventBatch { previous, events, end } = batch;
        let events = serde_json::Value::from(events.as_slice()).to_string();
        let batch = args![*previous, end.position, end.highest, gaps_text(&end.gaps), events];
        self.query_one(&APPEND, batch).await?.map(|row| row.get("writer")).transpose()
    }
}

/// As PostgreSQL writes a multirange.
fn gaps_text(gaps: &[RangeInclusive<i64>]) -> String {
    let gaps: Vec<String> = gaps.iter().map(|gap| format!("[{},{}]", gap.start(), gap.end())).collect();
    format!("{{{}}}", gaps.join(","))
}

fn gaps_of(row: &SqlRow) -> Result<Vec<RangeInclusive<i64>>, LedgerError> {
    let text: String = row.get("gaps")?;
    let gaps: Vec<[i64; 2]> = serde_json::from_str(&text).map_err(|_| corrupt("gaps", "is not a list of ranges"))?;
    Ok(gaps.into_iter().map(|[first, last]| first..=last).collect())
}
