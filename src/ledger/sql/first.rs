//! A new job and its first request, written down in one commit.
//!
//! Refuses a job that is known, by its id or by its key: it writes nothing then, and leaves the judging to [`super::claim`].

use std::sync::Arc;

use super::attempt::{KEPT, OPEN_ATTEMPT};
use super::claim::record_args;
use super::dialect::{ChainText, Dialect, Returning};
use super::engine::{Engine, Value};
use super::group::Grouped;
use super::written;
use crate::ledger::{First, LedgerError, Written};

pub struct Statements {
    first: Grouped,
}

impl Statements {
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
        Self { first: Grouped::new(dialect.chain(&ChainText { write, kept: KEPT, then: &[OPEN_ATTEMPT], returning })) }
    }

    pub async fn write(&self, engine: &Arc<dyn Engine>, first: First<'_>) -> Result<Written, LedgerError> {
        let First { job, hash, hold, owner, timing, request } = first;
        let request: [Value; 8] = [
            hold.fence.into(),
            request.method.as_str().into(),
            request.url.as_str().into(),
            request.idempotency_key.as_str().into(),
            request.content_type.as_str().into(),
            request.body.as_slice().into(),
            request.account.as_deref().into(),
            request.credential_fingerprint.as_str().into(),
        ];
        let args = record_args(job, hash, owner, timing.lease).into_iter().chain(request).collect();
        Ok(written(self.first.write(engine, args, timing.may_wait).await?.is_some()))
    }
}
