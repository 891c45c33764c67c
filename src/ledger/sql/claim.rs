//! The claim of a job: recording it if it is new, and leasing it. A new job may begin its first request at once.
//!
//! A new job costs one statement, a returning one two, a refused claim three, and a job of unknown outcome one more.
//! The first two statements are batched with those of other jobs. A job found `sending` belonged to a lost worker: the
//! claim closes its attempt as unknown. A look-up in flight is closed in the same way; its job was unknown before and
//! still is.
//!
//! On the fast path, a new job and its first request are recorded in one commit. If the id or the key exists, it writes
//! nothing, and the caller claims instead. See `docs/decisions/0029-fast-path-for-new-payments.md`.

use std::time::Duration;

use super::attempt::{CLOSE_LEFT_OPEN, OPEN_ATTEMPT, WRITTEN_COLUMNS, request_args};
use super::dialect::{JobWriteText, Returning, Template, WriteTemplate};
use super::engine::{Args, Value, args};
use super::fenced_write;
use super::result::{FromRow, SqlRow, from_row, read};
use crate::domain::job::{ContentHash, InvalidMessage, InvalidReason, Job};
use crate::domain::sum::SentSum;
use crate::domain::wait_reason::WaitReason;
use crate::ledger::copies::{Claimant, DeliveredCopy};
use crate::ledger::database::Database;
use crate::ledger::{BatchOptions, Claim, Claimed, FencedWrite, LeaseToken, LedgerError, NewJobAttempt};
use crate::provider::FrozenRequest;

/// How often a claim retries when the row changed between its statements.
const LOOKS_MAX: u32 = 4;

/// Consecutive workers that were lost before they began a request, including one whose lease has expired. A request
/// that began shows that the job itself does no harm.
pub const LOST_HOLDERS: &str = "CASE WHEN state = 'sending' THEN 0 \
     WHEN lease_until <= {now} THEN lost_holders + 1 ELSE lost_holders END";

/// A new job has no history: only the values that the database's clock determines.
const RECORDED_COLUMNS: &str = "fence, {until:CASE WHEN not_before > wake_at THEN not_before ELSE wake_at END} AS wait_ms, \
     {since:CASE WHEN not_before > created_at THEN not_before ELSE created_at END} AS age_ms, \
     {until:expires_at} AS expires_in_ms";

/// The row's columns that a claim returns.
pub const CLAIMED_COLUMNS: &str = "fence, attempts, lost_holders, maybe_charged, \
     {until:CASE WHEN not_before > wake_at THEN not_before ELSE wake_at END} AS wait_ms, \
     {since:CASE WHEN not_before > COALESCE(revived_at, created_at) THEN not_before \
         ELSE COALESCE(revived_at, created_at) END} AS age_ms, \
     {until:expires_at} AS expires_in_ms, last_attempt, lookups, resend, \
     frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, \
     frozen_units, frozen_decimals, copy, \
     {since:first_sent_at} AS sent_age_ms";

/// Releases a job whose row cannot be read. Nothing else of the row changes: an operator repairs it by SQL.
pub static ABANDON: Template = Template::new(
    "UPDATE jobs SET lease_owner = NULL, lease_until = NULL \
     WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL RETURNING id",
);

static RECORD: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
         reference, cost, priority, not_before, expires_at, payload, state, wake_at, fence, lease_owner, \
         lease_until, created_at, updated_at) \
     SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'waiting', \
         CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, 1, $15, {after:$16}, {now}, \
         {now} {from} \
     WHERE true ON CONFLICT DO NOTHING"
        .into(),
    written_columns: "jobs.id, fence, not_before, wake_at, created_at, expires_at".into(),
    effects: vec![],
    returning: Returning::Job(RECORDED_COLUMNS),
});

/// Whether no delay queue is known to hold the delayed copy any more: it is the message that arrived, or its time is
/// over. Or its worker may have died before the publish: the message is redelivered, and the copy is a later one.
const FORGOTTEN: &str = "($8 AND delayed_copy > $7) OR delayed_copy = $7 OR delayed_until <= {now}";

static TAKE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET fence = fence + 1, lease_owner = $4, lease_until = {{after:$5}}, \
             lost_holders = {LOST_HOLDERS}, \
             attempts = attempts + CASE WHEN state = 'sending' THEN 1 ELSE 0 END, \
             maybe_charged = maybe_charged OR state = 'sending', \
             resend = CASE WHEN state = 'sending' AND resend = 'granted' THEN 'used' ELSE resend END, \
             reason = CASE WHEN state = 'sending' THEN NULL ELSE reason END, \
             wait_reason = CASE WHEN state = 'sending' THEN $6 ELSE wait_reason END, \
             wait_limit = CASE WHEN state = 'sending' THEN NULL ELSE wait_limit END, \
             wait_detail = CASE WHEN state = 'sending' THEN NULL ELSE wait_detail END, \
             wait_since = CASE WHEN state = 'sending' THEN NULL ELSE wait_since END, \
             wait_until = CASE WHEN state = 'sending' THEN NULL ELSE wait_until END, \
             wait_request = CASE WHEN state = 'sending' THEN NULL ELSE wait_request END, \
             state = CASE WHEN state = 'sending' THEN 'unknown' ELSE state END, \
             delayed_copy = CASE WHEN $9 THEN $7 \
                 WHEN {FORGOTTEN} THEN NULL ELSE delayed_copy END, \
             delayed_until = CASE WHEN $9 THEN created_at \
                 WHEN {FORGOTTEN} THEN NULL ELSE delayed_until END, \
             updated_at = {{now}} {{from}} \
         WHERE id = $1 AND jobs.provider || '' = $2 AND content_hash = $3 \
             AND jobs.state || '' IN ('waiting', 'sending', 'unknown') AND NOT backlog \
             AND ($8 OR copy <= $7 OR delayed_copy = $7 OR wake_at <= {{after:1000}}) \
             AND (lease_until IS NULL OR lease_until <= {{now}})"
    )
    .into(),
    written_columns: "jobs.*".into(),
    effects: vec![CLOSE_LEFT_OPEN.into()],
    returning: Returning::Job(CLAIMED_COLUMNS),
});

static LOOK: Template = Template::new(
    "SELECT provider, content_hash, state, backlog, copy, delayed_copy, {until:lease_until} AS lease_left_ms, \
         CASE WHEN wake_at <= {after:1000} THEN 1 ELSE 0 END AS is_due, \
         CASE WHEN delayed_until <= created_at THEN delayed_copy END AS left_copy \
     FROM jobs WHERE id = $1",
);

static DONE_WITH: Template = Template::new(
    "UPDATE jobs SET delayed_copy = NULL, delayed_until = NULL \
     WHERE id = $1 AND delayed_copy = $2 AND jobs.state || '' NOT IN ('waiting', 'sending', 'unknown') \
     RETURNING id",
);

/// A separate statement after the claim: a claim that waited for the row does not see an attempt that began
/// meanwhile.
static UNKNOWN_AGE: Template = Template::new(
    "SELECT {since:max(began_at)} AS unknown_age_ms FROM attempts WHERE job_id = $1 AND kind = 'charge' \
         AND COALESCE(outcome, 'unknown') IN ('unknown', 'in_progress')",
);

impl Database {
    async fn claimed_job(&self, job: &Job, row: &SqlRow) -> Result<Claim, LedgerError> {
        let mut claimed = match claimed(job, row) {
            Ok(claimed) => claimed,
            // Or the lease would run out, and the next claim would count a worker that was lost.
            Err(error) => {
                self.query(&ABANDON, args![&job.id, row.get::<i64>("fence")?]).await?;
                return Err(error);
            }
        };
        if claimed.maybe_charged {
            claimed.unknown_age = self.query_row(&UNKNOWN_AGE, args![&job.id]).await?.get("unknown_age")?;
        }
        Ok(Claim::Claimed(Box::new(claimed)))
    }

    /// The row of a job, with its `provider` and `content_hash`, or the payment that is in its way.
    pub(super) async fn recorded_row(
        &self,
        look: &Template,
        job: &Job,
        hash: ContentHash,
    ) -> Result<Recorded, LedgerError> {
        if let Some(row) = self.query_one(look, args![&job.id]).await? {
            return Ok(recorded_conflict(&row, job, hash)?.map_or(Recorded::Row(row), Recorded::Conflict));
        }
        let holder = self.query_one(&KEY_HOLDER, args![&job.provider, job.effective_key()]).await?;
        let detail = "idempotency_key: another payment of this provider uses it; give each payment its own";
        Ok(holder.map_or(Recorded::Nothing, |_| Recorded::Conflict(conflicting(detail))))
    }

    /// Why the job could be neither recorded nor claimed; `None` when it could be by now.
    async fn claim_refusal(
        &self,
        job: &Job,
        hash: ContentHash,
        arrived: DeliveredCopy,
    ) -> Result<Option<Claim>, LedgerError> {
        let row = match self.recorded_row(&LOOK, job, hash).await? {
            Recorded::Row(row) => row,
            Recorded::Conflict(conflict) => return Ok(Some(Claim::Conflict(conflict))),
            Recorded::Nothing => return Ok(None),
        };
        if !matches!(row.get::<String>("state")?.as_str(), "waiting" | "sending" | "unknown") {
            // The message that stayed in the queue when the job finished without it. It is removed now, so the row
            // forgets it.
            if !arrived.stays_queued && row.get::<Option<i64>>("left_copy")? == Some(arrived.copy) {
                self.query(&DONE_WITH, args![&job.id, arrived.copy]).await?;
            }
            return Ok(Some(Claim::Finished));
        }
        // The ledger alone brings it back.
        if row.get::<bool>("backlog")? {
            return Ok(Some(Claim::Superseded));
        }
        let counts =
            row.get::<i64>("copy")? <= arrived.copy || row.get::<Option<i64>>("delayed_copy")? == Some(arrived.copy);
        let lease_left = row.get::<Option<Duration>>("lease_left")?.filter(|left| !left.is_zero());
        // An older copy counts for a job that is due: the newer one may be lost, or far behind.
        let is_needed = lease_left.is_none() && row.get::<i64>("is_due")? != 0;
        if !counts && !arrived.redelivered && !is_needed {
            return Ok(Some(Claim::Superseded));
        }
        Ok(lease_left.map(|lease_left| Claim::LeasedElsewhere { lease_left }))
    }

    /// Records the job if it is new, and claims it for `owner` if no other worker holds its lease.
    pub async fn claim(
        &self,
        job: &Job,
        hash: ContentHash,
        owner: &str,
        lease: Duration,
    ) -> Result<Claim, LedgerError> {
        let claimant = Claimant { owner, delivered: DeliveredCopy::ALWAYS_CURRENT };
        self.claim_batched(job, hash, claimant, BatchOptions::immediate(lease)).await
    }

    /// Claims like [`Database::claim`]; the write may wait for others to be committed with.
    pub async fn claim_batched(
        &self,
        job: &Job,
        hash: ContentHash,
        claimant: Claimant<'_>,
        options: BatchOptions,
    ) -> Result<Claim, LedgerError> {
        let Claimant { owner, delivered: arrived } = claimant;
        let BatchOptions { lease, max_batch_delay } = options;
        let record: Args = record_args(job, hash, owner, lease).into();
        let DeliveredCopy { copy, redelivered, stays_queued } = arrived;
        let lost = WaitReason::WorkerLost.code();
        let take: Args =
            args![&job.id, &job.provider, hash, owner, lease, lost, copy, redelivered, stays_queued].into();
        for _ in 0..LOOKS_MAX {
            if let Some(row) = self.write(&RECORD, record.clone(), max_batch_delay).await? {
                return recorded(job, &row);
            }
            if let Some(row) = self.write(&TAKE, take.clone(), max_batch_delay).await? {
                return self.claimed_job(job, &row).await;
            }
            if let Some(refusal) = self.claim_refusal(job, hash, arrived).await? {
                return Ok(refusal);
            }
        }
        // Each lease was released, and another worker was faster: the job is leased, for an unknown time.
        Ok(Claim::LeasedElsewhere { lease_left: Duration::ZERO })
    }
}

/// What the ledger has in the place of a job that could not be recorded.
pub enum Recorded {
    Row(SqlRow),
    Conflict(InvalidMessage),
    /// It could be recorded by now.
    Nothing,
}

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

/// `$1` to `$16` of a statement that records a job.
pub fn record_args(job: &Job, hash: ContentHash, owner: &str, lease: Duration) -> [Value; 16] {
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
        job.reference.as_deref(),
        cost,
        priority,
        not_before,
        expires_at,
        job.payload.as_deref(),
        owner,
        lease
    ]
}

fn recorded(job: &Job, row: &SqlRow) -> Result<Claim, LedgerError> {
    Ok(Claim::Claimed(Box::new(Claimed {
        wait: row.get("wait")?,
        age: row.get("age")?,
        expires_in: row.get("expires_in")?,
        ..Claimed::new_job(LeaseToken { id: job.id.clone(), fence: row.get("fence")? })
    })))
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
        attempts, lost_holders, maybe_charged, wait, age, expires_in, last_attempt, lookups, resend, copy;
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
         reference, cost, priority, not_before, expires_at, payload, state, wake_at, fence, lease_owner, \
         lease_until, created_at, updated_at, last_attempt, first_sent_at, first_sent_number, frozen_method, \
         frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, \
         frozen_units, frozen_decimals) \
     SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'sending', \
         CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, $17, $15, {after:$16}, {now}, \
         {now}, 1, {now}, 1, $18, $19, $20, $21, $22, $23, $24, $25, $26 {from} \
     WHERE true ON CONFLICT DO NOTHING"
        .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![OPEN_ATTEMPT.into()],
    returning: Returning::Job("last_attempt"),
});

impl Database {
    /// Records a new job and begins its first attempt in one commit, as `sending`, before the first byte is sent.
    /// [`FencedWrite::Stale`]: the id or the key exists; nothing was written. [`Database::claim`] tells what exists.
    pub async fn record_and_begin(&self, first: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError> {
        let NewJobAttempt { job, hash, lease, owner, options, request } = first;
        let job = record_args(job, hash, owner, options.lease).into_iter();
        let args: Args = job.chain([lease.fence.into()]).chain(request_args(request)).collect();
        Ok(fenced_write(self.write(&RECORD_AND_BEGIN, args, options.max_batch_delay).await?.is_some()))
    }
}
