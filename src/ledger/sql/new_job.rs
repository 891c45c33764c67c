//! A new job and its first request, recorded in one commit.
//!
//! If the id or the key exists, it writes nothing, and the caller asks [`super::claim`] instead. See
//! `docs/decisions/0029-fast-path-for-new-payments.md`.

use super::attempt::{OPEN_ATTEMPT, WRITTEN_COLUMNS};
use super::batcher::Batcher;
use super::claim::record_args;
use super::dialect::{Dialect, JobWriteText, Returning};
use super::engine::Value;
use super::fenced_write;
use crate::ledger::database::Database;
use crate::ledger::{FencedWrite, LedgerError, NewJobAttempt};

pub struct NewJobStatements {
    first: Batcher,
}

impl NewJobStatements {
    pub fn new(dialect: Dialect) -> Self {
        let write = "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
             reference, cost, priority, not_before, expires_at, payload, state, wake_at, fence, lease_owner, \
             lease_until, created_at, updated_at, last_attempt, first_sent_at, first_sent_number, frozen_method, \
             frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint) \
         SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'sending', \
             CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, $17, $15, {after:$16}, {now}, \
             {now}, 1, {now}, 1, $18, $19, $20, $21, $22, $23, $24 {from} \
         WHERE true ON CONFLICT DO NOTHING";
        let returning = Returning::Job("last_attempt");
        Self {
            first: Batcher::new(dialect.job_write(&JobWriteText {
                update: write,
                written_columns: WRITTEN_COLUMNS,
                effects: &[OPEN_ATTEMPT],
                returning,
            })),
        }
    }
}

impl Database {
    /// Records a new job and begins its first attempt in one commit, as `sending`, before the first byte is sent.
    /// [`FencedWrite::Stale`]: the id or the key exists; nothing was written. [`Database::claim`] tells what exists.
    pub async fn record_and_begin(&self, first: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError> {
        let NewJobAttempt { job, hash, lease, owner, options, request } = first;
        let request: [Value; 8] = [
            lease.fence.into(),
            request.method.as_str().into(),
            request.url.as_str().into(),
            request.idempotency_key.as_str().into(),
            request.content_type.as_str().into(),
            request.body.as_slice().into(),
            request.account.as_deref().into(),
            request.credential_fingerprint.as_str().into(),
        ];
        let args = record_args(job, hash, owner, options.lease).into_iter().chain(request).collect();
        Ok(fenced_write(self.sql.new_job.first.write(&self.engine, args, options.max_batch_delay).await?.is_some()))
    }
}
