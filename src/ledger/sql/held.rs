//! The SQL of held messages: one row per lane and body, read by the sweeper, deleted when it is recorded or rejected.

use std::collections::BTreeMap;
use std::time::Duration;

use super::dialect::Template;
use super::engine::args;
use super::rejected::{REJECT, reject_args, stored_properties};
use super::result::{FromRow as _, from_row};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::held::{HeldMessage, NewHeldMessage};
use crate::ledger::rejected::RejectedMessage;
use crate::ledger::rejected::{COUNTED_MAX, StoredSize};

static HOLD: Template = Template::new(
    "INSERT INTO held_messages (lane, body_sha256, version, body, properties, received_at) \
     VALUES ($1, $2, $3, $4, {json:$5}, {now}) ON CONFLICT (lane, body_sha256) DO NOTHING",
);

static SIZE: Template = Template::new(
    "SELECT count(*) AS messages, CAST(COALESCE(sum(bytes), 0) AS bigint) AS bytes \
     FROM (SELECT length(body) AS bytes FROM held_messages LIMIT $1) AS held",
);

static COUNT: Template = Template::new(
    "SELECT lane, count(*) AS messages FROM (SELECT lane FROM held_messages LIMIT $1) AS held \
     GROUP BY lane ORDER BY lane",
);

static LANES: Template = Template::new("SELECT DISTINCT lane FROM held_messages");

static DUE: Template = Template::new(
    "SELECT lane, body_sha256, version, body, {text:properties} AS properties, {aged:received_at} AS age_ms \
     FROM held_messages WHERE lane = $1 AND (version <= $2 OR {aged:received_at} > $3) \
     ORDER BY received_at LIMIT $4",
);

static DELETE: Template = Template::new("DELETE FROM held_messages WHERE lane = $1 AND body_sha256 = $2");

from_row!(row => HeldMessage { lane, body_sha256, version, body, properties, age });

fn version_arg(version: u64) -> i64 {
    i64::try_from(version).unwrap_or(i64::MAX)
}

impl Database {
    /// Holds a message. The same body again changes nothing.
    pub async fn hold(&self, message: &NewHeldMessage) -> Result<(), LedgerError> {
        let NewHeldMessage { lane, body_sha256, version, stored } = message;
        let properties = stored_properties(&stored.properties);
        let args = args![lane, body_sha256.as_slice(), version_arg(*version), stored.body.as_slice(), properties];
        self.query(&HOLD, args).await.map(drop)
    }

    /// Room that the held messages take; counted up to `rows_max` of them.
    pub async fn held_size(&self, rows_max: u64) -> Result<StoredSize, LedgerError> {
        let rows = self.query_by_index(&SIZE, args![i64::try_from(rows_max).unwrap_or(i64::MAX)]).await?;
        rows.first().map_or_else(|| Ok(StoredSize::default()), StoredSize::from_row)
    }

    /// Held messages by lane; together at most one more than [`COUNTED_MAX`] are counted.
    pub async fn count_held(&self) -> Result<BTreeMap<String, u64>, LedgerError> {
        let bound = i64::try_from(COUNTED_MAX + 1).unwrap_or(i64::MAX);
        let rows = self.query_by_index(&COUNT, args![bound]).await?;
        rows.iter().map(|row| Ok((row.get("lane")?, row.get("messages")?))).collect()
    }

    /// Lanes that have held messages.
    pub async fn lanes_with_held(&self) -> Result<Vec<ProviderName>, LedgerError> {
        self.query_by_index(&LANES, args![]).await?.iter().map(|row| row.get("lane")).collect()
    }

    /// A lane's held messages of at most this version, or older than `max_age`; in the order of arrival.
    pub async fn due_held(
        &self,
        lane: &ProviderName,
        version: u64,
        max_age: Duration,
        at_most: u32,
    ) -> Result<Vec<HeldMessage>, LedgerError> {
        let rows = self.query_by_index(&DUE, args![lane, version_arg(version), max_age, at_most]).await?;
        rows.iter().map(HeldMessage::from_row).collect()
    }

    /// Deletes a held message whose job is recorded.
    pub async fn delete_held(&self, message: &HeldMessage) -> Result<(), LedgerError> {
        self.query(&DELETE, args![&message.lane, message.body_sha256.as_slice()]).await.map(drop)
    }

    /// Moves a held message to the rejected ones, in one commit. If another worker has deleted it, nothing changes.
    pub async fn reject_held(&self, message: &HeldMessage, rejected: &RejectedMessage) -> Result<(), LedgerError> {
        let delete = self.must_affect(&DELETE, args![&message.lane, message.body_sha256.as_slice()]);
        self.engine.atomically(vec![delete, self.step(&REJECT, reject_args(rejected))]).await.map(drop)
    }
}
