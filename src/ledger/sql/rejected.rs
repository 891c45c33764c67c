//! Rejected messages in SQL: their record, the lists of open and of decided ones, their count, and an operator's decision.
//!
//! Each list has an index for its filter, and is read from its newest row on. A trigger writes the instant and the
//! author of a decision, and rejects a second one.

use std::collections::BTreeMap;

use serde_json::Value;

use super::claim::Recorded;
use super::dialect::Template;
use super::engine::{Args, args};
use super::result::{FromRow, ReadRows, SqlRow, from_row, read_each};
use super::{storable, texts};
use crate::domain::job::{ContentHash, Job};
use crate::domain::sensitive::{CardNumbers, REDACTED, TextContext, find_sensitive};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, LIST_MAX};
use crate::ledger::rejected::{
    COUNTED_MAX, ContentOfId, RecordedContent, RejectedCount, RejectedDecision, RejectedEvent, RejectedFilter,
    RejectedPage, RejectedRefusal, RejectedSummary, StoredSize,
};
use crate::ledger::rejected::{RejectedMessage, StoredMessage};

/// Longest stored id of a rejected message, in characters.
const REJECTED_ID_CHARS_MAX: usize = 255;

pub(super) static REJECT: Template = Template::new(
    "INSERT INTO rejected_messages \
         (at, lane, job_id, reason, detail, body_sha256, body_bytes, head, body, properties, masked) \
     VALUES ({now}, $1, $2, $3, $4, $5, $6, $7, $8, {json:$9}, $10)",
);

const COLUMNS: &str = "id, {ms:at} AS at_ms, lane, job_id, reason, detail, head, body_bytes, body_sha256, masked, decision, \
     {ms:decided_at} AS decided_at_ms, decided_by, os_user, program, because";

/// The column of the reason's code. In this table it holds no text for people.
const REASON_CODE: &str = "reason";

static ONE: Template = Template::made(|_| format!("SELECT {COLUMNS} FROM rejected_messages WHERE id = $1"));

static OPEN: Template = Template::made(|_| page_text("decision IS NULL"));
static OPEN_OF_A_LANE: Template =
    Template::made(|_| page_text(&format!("decision IS NULL AND lane = $3 AND ($4 IS NULL OR {REASON_CODE} = $4)")));
static OPEN_OF_A_REASON: Template = Template::made(|_| page_text(&format!("decision IS NULL AND {REASON_CODE} = $3")));
/// Filtered row by row: operators decide, so these are few.
static DECIDED: Template = Template::made(|_| {
    page_text(&format!("decision IS NOT NULL AND ($3 IS NULL OR lane = $3) AND ($4 IS NULL OR {REASON_CODE} = $4)"))
});

fn page_text(which: &str) -> String {
    format!("SELECT {COLUMNS} FROM rejected_messages WHERE {which} AND id < $1 ORDER BY id DESC LIMIT $2")
}

static COUNT: Template = Template::new(
    "SELECT lane, count(*) AS messages FROM \
         (SELECT lane FROM rejected_messages WHERE decision IS NULL LIMIT $1) AS open GROUP BY lane ORDER BY lane",
);

static STORED: Template = Template::new(
    "SELECT body, {text:properties} AS properties, masked FROM rejected_messages \
     WHERE id = $1 AND decision IS NULL AND body IS NOT NULL",
);

static OPEN_SIZE: Template = Template::new(
    "SELECT count(*) AS messages, CAST(COALESCE(sum(body_bytes), 0) AS bigint) AS bytes FROM \
         (SELECT CASE WHEN body_bytes > $2 THEN $2 ELSE body_bytes END AS body_bytes FROM rejected_messages \
          WHERE decision IS NULL LIMIT $1) AS open",
);

static UNANNOUNCED: Template = Template::new(
    "SELECT id, {ms:at} AS at_ms, lane, job_id, reason, {text:properties} AS properties FROM rejected_messages \
     WHERE announced_at IS NULL AND lane NOT IN ({texts:$2}) ORDER BY id LIMIT $1",
);

static ANNOUNCED: Template =
    Template::new("UPDATE rejected_messages SET announced_at = {now} WHERE announced_at IS NULL AND id {among:$1}");

static DECIDE: Template =
    Template::new("UPDATE rejected_messages SET decision = $2 WHERE id = $1 AND decision IS NULL RETURNING id");

static RECORDED: Template = Template::new("SELECT id, content_hash FROM jobs WHERE id IN ({texts:$1})");

impl Database {
    /// Those whose ids were recorded before with other content. A payment that was cancelled before its message came is
    /// none of these: each of its messages is acknowledged.
    pub async fn find_conflicts(&self, jobs: &[ContentOfId]) -> Result<Vec<ContentOfId>, LedgerError> {
        let ids = texts(jobs.iter().map(|job| job.id.as_str()));
        let mut recorded = BTreeMap::new();
        for row in self.query_by_index(&RECORDED, args![ids]).await? {
            let (id, hash): (String, Vec<u8>) = (row.get("id")?, row.get("content_hash")?);
            recorded.insert(id, hash);
        }
        let differs = |job: &&ContentOfId| {
            let recorded = recorded.get(job.id.as_str());
            recorded.is_some_and(|hash| *hash != job.hash.0 && *hash != ContentHash::UNSEEN.0)
        };
        Ok(jobs.iter().filter(differs).cloned().collect())
    }

    /// What the ledger has under the id of a message's job.
    pub async fn recorded_content(&self, job: &Job, hash: ContentHash) -> Result<RecordedContent, LedgerError> {
        Ok(match self.recorded(job, hash).await? {
            Recorded::Same => RecordedContent::Same,
            Recorded::Conflict(_) => RecordedContent::Other,
            Recorded::Nothing => RecordedContent::Nothing,
        })
    }

    pub async fn reject(&self, message: &RejectedMessage) -> Result<(), LedgerError> {
        self.query(&REJECT, reject_args(message)).await.map(drop)
    }

    /// Rejected messages with an id below `before`, newest first; at most `at_most`, and never more than [`LIST_MAX`].
    pub async fn list_rejected(
        &self,
        filter: &RejectedFilter,
        before: Option<i64>,
        at_most: u32,
    ) -> Result<RejectedPage, LedgerError> {
        let at_most = at_most.min(LIST_MAX);
        let (lane, reason) = (filter.provider.as_ref(), filter.reason.as_deref());
        let mut args = args![before.unwrap_or(i64::MAX), at_most].to_vec();
        let sql = match (filter.decided, lane, reason) {
            (true, lane, reason) => {
                args.extend(args![lane, reason]);
                &DECIDED
            }
            (false, Some(lane), reason) => {
                args.extend(args![lane, reason]);
                &OPEN_OF_A_LANE
            }
            (false, None, Some(reason)) => {
                args.extend(args![reason]);
                &OPEN_OF_A_REASON
            }
            (false, None, None) => &OPEN,
        };
        let rows = self.query_by_index(sql, args).await?;
        let last = rows.last().filter(|_| rows.len() == at_most as usize);
        let next = last.and_then(|row| row.get("id").ok());
        let ReadRows { rows: messages, unreadable } = read_each(&rows, "id");
        Ok(RejectedPage { messages, unreadable, next })
    }

    /// `None`: there is no such message.
    pub async fn rejected_message(&self, id: i64) -> Result<Option<RejectedSummary>, LedgerError> {
        self.query_one(&ONE, args![id]).await?.as_ref().map(RejectedSummary::from_row).transpose()
    }

    /// An open message as it is kept. `None`: it is decided, or not kept.
    pub async fn stored_rejected(&self, id: i64) -> Result<Option<StoredMessage>, LedgerError> {
        self.query_one(&STORED, args![id]).await?.as_ref().map(StoredMessage::from_row).transpose()
    }

    /// What the open messages take; counted up to `rows_max` of them.
    pub async fn open_rejected(&self, rows_max: u64, body_max: usize) -> Result<StoredSize, LedgerError> {
        let (rows, bytes) = (i64::try_from(rows_max).unwrap_or(i64::MAX), i64::try_from(body_max).unwrap_or(i64::MAX));
        let row = self.query_by_index(&OPEN_SIZE, args![rows, bytes]).await?;
        row.first().map_or_else(|| Ok(StoredSize::default()), StoredSize::from_row)
    }

    /// Messages whose events are to be published, the oldest first, without those of some lanes.
    pub async fn unannounced_rejected(
        &self,
        at_most: u32,
        without: &[&str],
    ) -> Result<Vec<RejectedEvent>, LedgerError> {
        let without = texts(without.iter().copied());
        let rows = self.query_by_index(&UNANNOUNCED, args![at_most, without]).await?;
        rows.iter().map(RejectedEvent::from_row).collect()
    }

    /// Marks the events of these messages as published.
    pub async fn mark_announced(&self, ids: &[i64]) -> Result<(), LedgerError> {
        self.query(&ANNOUNCED, args![serde_json::json!(ids).to_string()]).await.map(drop)
    }

    /// Open messages by lane; together at most one more than [`COUNTED_MAX`] are counted.
    pub async fn count_rejected(&self) -> Result<Vec<RejectedCount>, LedgerError> {
        let bound = i64::try_from(COUNTED_MAX + 1).unwrap_or(i64::MAX);
        self.query_by_index(&COUNT, args![bound]).await?.iter().map(RejectedCount::from_row).collect()
    }

    /// Records a decision; `Some` is why it was refused.
    pub async fn decide_rejected(
        &self,
        id: i64,
        decision: RejectedDecision,
        by: &Actor,
    ) -> Result<Option<RejectedRefusal>, LedgerError> {
        let change = self.must_affect(&DECIDE, args![id, decision.name()]);
        if self.engine.atomically(self.settings_change_by(by, vec![change])).await?.is_some() {
            return Ok(None);
        }
        Ok(Some(match self.rejected_message(id).await? {
            Some(RejectedSummary { decision, .. }) => {
                RejectedRefusal::Decided { id, decision: decision.unwrap_or_default() }
            }
            None => RejectedRefusal::NoSuchMessage(id),
        }))
    }
}

/// The arguments of [`REJECT`].
pub(super) fn reject_args(message: &RejectedMessage) -> Args {
    let id = message.job_id.as_deref().map(storable);
    let id = id.map(|id| id.chars().take(REJECTED_ID_CHARS_MAX).collect::<String>());
    let detail = storable(&message.detail);
    let bytes = i64::try_from(message.body_bytes).unwrap_or(i64::MAX);
    let digest = message.body_sha256.as_slice();
    let head = storable(&message.head);
    let StoredMessage { body, properties, is_masked } = &message.stored;
    let properties = stored_properties(properties);
    args![&message.lane, id, message.reason, detail, digest, bytes, head, body.as_slice(), properties, *is_masked]
        .into()
}

/// Properties as a JSON object that a column can hold: without U+0000, which PostgreSQL rejects in `jsonb`.
pub(super) fn stored_properties(properties: &str) -> String {
    if properties.is_empty() {
        return "{}".to_owned();
    }
    if !properties.contains("\\u0000") {
        return properties.to_owned();
    }
    without_nul(serde_json::from_str(properties).unwrap_or_else(|_| serde_json::json!({}))).to_string()
}

fn without_nul(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace('\0', "")),
        Value::Array(values) => values.into_iter().map(without_nul).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name.replace('\0', ""), without_nul(value))).collect()
        }
        other => other,
    }
}

from_row!(row => RejectedSummary {
    id, at, reason, detail, head, body_bytes, masked, decision, decided_at, decided_by, os_user, program, because;
    provider: row.get("lane")?,
    job_id: shown_id(row)?,
    body_sha256: hex::encode(row.get::<Vec<u8>>("body_sha256")?),
});

/// The id, unless it is one that must not be shown: older programs stored it as it was claimed.
fn shown_id(row: &SqlRow) -> Result<Option<String>, LedgerError> {
    let is_sensitive = |id: &str| find_sensitive(id, TextContext::Identifier, CardNumbers::Refuse).is_some();
    let id: Option<String> = row.get("job_id")?;
    Ok(id.map(|id| if is_sensitive(&id) { REDACTED.to_owned() } else { id }))
}

from_row!(row => StoredMessage { body, properties; is_masked: row.get("masked")?, });
from_row!(row => StoredSize { messages, bytes });
from_row!(row => RejectedEvent {
    id, at, reason;
    provider: row.get("lane")?,
    job_id: shown_id(row)?,
    message_id: message_id(row.get::<Option<String>>("properties")?.as_deref()),
});

/// The producer's message id, if it set one.
fn message_id(properties: Option<&str>) -> Option<String> {
    let properties: serde_json::Value = serde_json::from_str(properties?).ok()?;
    properties.get("message_id")?.as_str().map(str::to_owned)
}

from_row!(row => RejectedCount { messages; provider: row.get("lane")?, });
