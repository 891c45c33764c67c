//! The record of a new job together with its first request, and what all records and claims share.
//!
//! On the fast path, a new job and its first request are recorded in one commit. If the id or the key exists, it writes
//! nothing, and the caller asks what there is. See `docs/decisions/0029-fast-path-for-new-payments.md`.

use super::attempt::{OPEN_ATTEMPT, WRITTEN_COLUMNS, request_args};
use super::dialect::{JobWriteText, Template, WriteTemplate};
use super::engine::{Args, Value, args};
use super::fenced_write;
use super::result::{FromRow, SqlRow, from_row, read};
use crate::domain::job::{ContentHash, InvalidMessage, InvalidReason, Job};
use crate::domain::sum::SentSum;
use crate::ledger::database::Database;
use crate::ledger::{Claimed, FencedWrite, LeaseToken, LedgerError, NewJobAttempt};
use crate::provider::FrozenRequest;

/// A worker has the job, and its row of `workers` is gone.
pub const IS_LOST: &str =
    "(jobs.holder IS NOT NULL AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = jobs.holder))";

/// No living worker has the job.
pub const IS_UNHELD: &str =
    "(jobs.holder IS NULL OR NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = jobs.holder))";

/// The row's columns that a claim returns.
pub const CLAIMED_COLUMNS: &str = "fence, attempts, lost_holders, maybe_charged, \
     {since:CASE WHEN not_before > COALESCE(revived_at, created_at) THEN not_before \
         ELSE COALESCE(revived_at, created_at) END} AS age_ms, \
     {until:expires_at} AS expires_in_ms, last_attempt, lookups, resend, \
     frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, \
     frozen_units, frozen_decimals, \
     {since:first_sent_at} AS sent_age_ms";

/// Puts a job whose row cannot be read to sleep for half an hour. An operator repairs it by SQL meanwhile.
pub static ABANDON: Template = Template::new(
    "UPDATE jobs SET holder = NULL, response_by = NULL, wake_at = {after:1800000} \
     WHERE id = $1 AND fence = $2 AND holder IS NOT NULL RETURNING id",
);

impl Database {
    /// What the ledger has in the place of a job.
    pub(super) async fn recorded(&self, job: &Job, hash: ContentHash) -> Result<Recorded, LedgerError> {
        if let Some(row) = self.query_one(&LOOK, args![&job.id]).await? {
            return Ok(recorded_conflict(&row, job, hash)?.map_or(Recorded::Same, Recorded::Conflict));
        }
        let holder = self.query_one(&KEY_HOLDER, args![&job.provider, job.effective_key()]).await?;
        let detail = "idempotency_key: another payment of this provider uses it; give each payment its own";
        Ok(holder.map_or(Recorded::Nothing, |_| Recorded::Conflict(conflicting(detail))))
    }
}

/// What the ledger has in the place of a job that could not be recorded.
pub enum Recorded {
    /// The same job.
    Same,
    Conflict(InvalidMessage),
    /// It could be recorded by now.
    Nothing,
}

static LOOK: Template = Template::new("SELECT provider, content_hash FROM jobs WHERE id = $1");

static KEY_HOLDER: Template = Template::new("SELECT id FROM jobs WHERE provider = $1 AND idempotency_key = $2");

/// The conflict with the payment of this id in a row with `provider` and `content_hash`, if there is one.
fn recorded_conflict(row: &SqlRow, job: &Job, hash: ContentHash) -> Result<Option<InvalidMessage>, LedgerError> {
    if row.get::<String>("provider")? != job.provider.as_str() {
        return Ok(Some(conflicting("id: a payment of another provider has it; ids are unique over all providers")));
    }
    let recorded = row.get::<Vec<u8>>("content_hash")?;
    // Cancelled before its message came: the message is finished, whatever its content.
    if recorded != hash.0 && recorded != ContentHash::UNSEEN.0 {
        return Ok(Some(conflicting("id: recorded before with other content; a changed payment needs a new id")));
    }
    Ok(None)
}

fn conflicting(detail: &str) -> InvalidMessage {
    InvalidMessage::new(InvalidReason::Conflict, detail)
}

/// `$1` to `$14` of a statement that records a job.
pub fn record_args(job: &Job, hash: ContentHash) -> [Value; 14] {
    let (not_before, expires_at) = (job.not_before.map(|at| at.0), job.expires_at.map(|at| at.0));
    let (cost, priority) = (u32::from(job.cost), u32::from(job.priority));
    args![
        &job.id,
        &job.provider,
        job.effective_key(),
        job.idempotency_key.is_some(),
        hash,
        job.amount,
        &job.currency,
        job.account.as_ref(),
        job.reference.as_ref(),
        cost,
        priority,
        not_before,
        expires_at,
        job.payload.as_ref()
    ]
}

/// The claimed job without the age of the last unknown outcome.
pub fn claimed(job: &Job, row: &SqlRow) -> Result<Claimed, LedgerError> {
    // The age is zero when every attempt so far certainly stayed unsent. Only unknown outcomes use it, and those always
    // have one.
    let frozen_request = match row.get::<Option<String>>("frozen_method")? {
        Some(_) => Some((FrozenRequest::from_row(row)?, row.get::<Option<_>>("sent_age")?.unwrap_or_default())),
        None => None,
    };
    Ok(read!(row => Claimed {
        attempts, lost_holders, maybe_charged, age, expires_in, last_attempt, lookups, resend;
        lease: LeaseToken { id: job.id.clone(), fence: row.get("fence")? },
        unknown_age: None,
        frozen_request: frozen_request,
    }))
}

from_row!(row => FrozenRequest {
    ;
    method: row.get("frozen_method")?,
    url: row.get("frozen_url")?,
    idempotency_key: row.get("frozen_key")?,
    content_type: row.get("frozen_content_type")?,
    body: row.get("frozen_body")?,
    account: row.get("frozen_account")?,
    sum: SentSum { units: row.get("frozen_units")?, decimals: row.get("frozen_decimals")? },
    credential_fingerprint: row.get("frozen_fingerprint")?,
});

static RECORD_AND_BEGIN: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
         reference, cost, priority, not_before, expires_at, payload, state, wake_at, fence, holder, \
         response_by, created_at, updated_at, last_attempt, first_sent_at, first_sent_number, frozen_method, \
         frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, \
         frozen_units, frozen_decimals) \
     SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'sending', \
         CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, $17, $15, {after:$16}, {now}, \
         {now}, 1, {now}, 1, $18, $19, $20, $21, $22, $23, $24, $25, $26 {from} \
     WHERE true ON CONFLICT DO NOTHING"
        .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![OPEN_ATTEMPT.into()],
    returning: "last_attempt",
});

impl Database {
    /// Records a new job and begins its first attempt in one commit, as `sending`, before the first byte is sent.
    /// [`FencedWrite::Stale`]: the id or the key exists; nothing was written. [`Database::record_backlog`] tells what exists.
    pub async fn record_and_begin(&self, first: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError> {
        let NewJobAttempt { job, hash, lease, holder, timing, request } = first;
        let lease = args![holder, timing.response_within, lease.fence];
        let args: Args = record_args(job, hash).into_iter().chain(lease).chain(request_args(request)).collect();
        Ok(fenced_write(self.write(&RECORD_AND_BEGIN, args, timing.max_batch_delay).await?.is_some()))
    }
}
