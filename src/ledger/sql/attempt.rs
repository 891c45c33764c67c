//! The two commits of a request, charge or look-up: that it begins, before the first byte is sent, and what came of it.
//!
//! The request of the first attempt is frozen: a later attempt with another request is an error. A job that may have
//! been charged never returns to `waiting`, whatever the caller says. Beginning and end of an attempt are written as long
//! as the fencing token is current. See `docs/decisions/0033-frozen-requests.md`.
//!
//! A look-up begins only from state `unknown`, and the job stays `unknown` until a response or an operator decides.
//! Only one request of a job is in flight at a time. See `docs/decisions/0034-look-ups-of-unknown-outcomes.md`.

use std::time::Duration;

use super::dialect::{JobWriteText, Template, WriteTemplate};
use super::engine::{Args, Value, args};
use super::events::WRITE_EVENT;
use super::lease::{WaitParameters, next_args};
use super::result::SqlRow;
use super::storable;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::ledger::database::Database;
use crate::ledger::{
    AttemptEnd, BeginResult, FencedWrite, JobState, LeaseToken, LedgerError, LookupEnd, RequestTiming,
};
use crate::provider::FrozenRequest;

/// Another payment of this provider that succeeded by the same charge, if there is one. The charge is the one that $10
/// names, or the row's own. By the index there is at most one such payment. The condition fits that index alone:
/// PostgreSQL would choose one of (provider, state) while the table is small, and keep that plan for millions of rows.
pub const SAME_CHARGE: &str = "(SELECT other.id FROM jobs AS other \
     WHERE other.provider_reference = COALESCE($10, jobs.provider_reference) AND other.state = 'succeeded' \
     AND other.provider || '' = jobs.provider AND other.id <> jobs.id LIMIT 1)";

/// One charge pays one payment: the second payment becomes `review`. Two at the same moment are detected by the index
/// `jobs_one_payment_per_charge`.
pub fn conflict_checked_state(state: &str) -> String {
    format!("CASE WHEN {state} = 'succeeded' AND {SAME_CHARGE} IS NOT NULL THEN 'review' ELSE {state} END")
}

/// The other payment by its id alone: its account may be erased, and this text is this payment's.
pub fn conflict_checked_reason(state: &str, reason: &str) -> String {
    format!(
        "CASE WHEN {state} = 'succeeded' AND {SAME_CHARGE} IS NOT NULL THEN \
             'the provider''s reference is that of payment ' || {SAME_CHARGE} || ' too: see both at the provider; if references are not unique there, let request.reference (lookup.reference) point elsewhere' \
         ELSE {reason} END"
    )
}

/// Columns of the job that the statements for its side effects need.
pub const WRITTEN_COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.provider_reference, jobs.charged_amount, \
     jobs.reason, jobs.attempts, jobs.last_attempt, jobs.updated_at, jobs.account, jobs.reference";

pub const OPEN_ATTEMPT: &str = "INSERT INTO attempts (job_id, number, provider, began_at, account, reference) \
     SELECT job.id, job.last_attempt, job.provider, job.updated_at, job.account, job.reference FROM {job}";

/// Closes attempt `$3`; an earlier attempt that is still open gets an unknown outcome.
pub const CLOSE_ATTEMPT: &str = "UPDATE attempts SET ended_at = {now}, \
         outcome = CASE WHEN attempts.number = $3 THEN $4 ELSE 'unknown' END, \
         status = CASE WHEN attempts.number = $3 THEN $5 END, \
         detail = CASE WHEN attempts.number = $3 THEN $6 END, \
         counted = CASE WHEN attempts.number = $3 THEN $7 ELSE attempts.kind = 'charge' END \
     FROM {job} WHERE attempts.job_id = job.id AND (attempts.number = $3 OR attempts.ended_at IS NULL)";

/// Closes the last attempt as unknown, if it is open: for each write that takes a lease from its worker, or releases
/// it.
///
/// On PostgreSQL, an `UPDATE` sees attempts by the statement's snapshot. If the write had to wait for the row, the
/// attempt may have begun after that snapshot, and an update would not find it. `ON CONFLICT` finds every committed
/// row. A job that is `waiting` has no open attempt.
pub const CLOSE_LEFT_OPEN: &str = "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, detail, counted) \
     SELECT job.id, job.last_attempt, job.provider, job.updated_at, {now}, 'unknown', \
         'a worker was lost while the request was in flight', true \
     FROM {job} WHERE job.last_attempt > 0 AND job.state <> 'waiting' \
     ON CONFLICT (job_id, number) DO UPDATE SET ended_at = excluded.ended_at, outcome = excluded.outcome, \
         detail = excluded.detail, counted = (attempts.kind = 'charge') WHERE attempts.ended_at IS NULL";

/// The update of a job at every end of an attempt. If this attempt alone set `first_sent_at` and sent nothing, that is
/// reset. An earlier value stays, because the provider may have remembered the key since then.
const END_ATTEMPT: &str = "attempts = attempts + CASE WHEN $7 THEN 1 ELSE 0 END, \
     first_sent_at = CASE WHEN $8 AND NOT maybe_charged AND first_sent_number = $3 THEN NULL ELSE first_sent_at END, \
     first_sent_number = \
         CASE WHEN $8 AND NOT maybe_charged AND first_sent_number = $3 THEN NULL ELSE first_sent_number END, \
     resend = CASE WHEN resend = 'granted' AND $4 IN ('unknown', 'in_progress') THEN 'used' ELSE resend END, \
     holder = NULL, response_by = NULL, updated_at = {now}";

/// Sticky: true when this attempt's outcome, or an earlier one's, is or was unknown, or another sum was charged.
const MAYBE_CHARGED: &str = "maybe_charged OR $4 IN ('unknown', 'in_progress', 'differs')";

const HELD_AND_SENDING: &str =
    "id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' = 'sending' AND last_attempt = $3";

static BEGIN: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: "UPDATE jobs SET state = 'sending', last_attempt = last_attempt + 1, lost_holders = 0, \
         first_sent_at = COALESCE(first_sent_at, {now}), \
         first_sent_number = COALESCE(first_sent_number, last_attempt + 1), \
         frozen_method = $3, frozen_url = $4, frozen_key = $5, frozen_content_type = $6, \
         frozen_body = $7, frozen_account = $8, frozen_fingerprint = $9, frozen_units = $10, \
         frozen_decimals = $11, response_by = {after:$12}, updated_at = {now} {from} \
     WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND response_by IS NULL \
         AND jobs.state || '' IN ('waiting', 'unknown') \
         AND (frozen_method IS NULL \
              OR (frozen_method = $3 AND frozen_url = $4 AND frozen_key = $5 \
                  AND frozen_content_type = $6 AND frozen_body = $7 \
                  AND frozen_account IS NOT DISTINCT FROM $8 \
                  AND frozen_units = $10 AND frozen_decimals = $11 \
                  AND (frozen_fingerprint = $9 OR NOT maybe_charged)))"
        .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![OPEN_ATTEMPT.into()],
    returning: "last_attempt",
});

static HELD_LEASE: Template = Template::new(
    "SELECT 1 AS held FROM jobs WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND response_by IS NULL \
         AND state IN ('waiting', 'unknown')",
);

static WAIT: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = CASE WHEN {MAYBE_CHARGED} OR $9 THEN 'unknown' ELSE 'waiting' END, \
             maybe_charged = ({MAYBE_CHARGED} OR $9), {}, {END_ATTEMPT} {{from}} \
         WHERE {HELD_AND_SENDING}",
        WaitParameters { detail: "$11", code: "$12", limit: "$13" }.begin("{after:$10}"),
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_ATTEMPT.into()],
    returning: "id",
});

static FINALIZE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = {}, maybe_charged = ({MAYBE_CHARGED}), \
             provider_reference = COALESCE($10, provider_reference), charged_amount = $12, reason = {}, \
             {END_ATTEMPT} {{from}} \
         WHERE {HELD_AND_SENDING}",
        conflict_checked_state("$9"),
        conflict_checked_reason("$9", "$11")
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_ATTEMPT.into(), WRITE_EVENT.into()],
    returning: "id, state, reason",
});

impl Database {
    /// Commits `sending` with the request, before the first byte is sent. A later attempt must bring the frozen request
    /// of the first.
    pub async fn begin_attempt(
        &self,
        lease: &LeaseToken,
        request: &FrozenRequest,
        timing: RequestTiming,
    ) -> Result<BeginResult, LedgerError> {
        let args = args![&lease.id, lease.fence].into_iter().chain(request_args(request));
        let args: Args = args.chain([timing.response_within.into()]).collect();
        if let Some(row) = self.write(&BEGIN, args, timing.max_batch_delay).await? {
            return Ok(BeginResult::Attempt(row.get("last_attempt")?));
        }
        if self.query(&HELD_LEASE, args![&lease.id, lease.fence]).await?.is_empty() {
            return Ok(BeginResult::Stale);
        }
        Err(LedgerError::StatementFailed("the request differs from the frozen request of the first attempt".to_owned()))
    }

    /// Commits the result of an attempt and the job's next state, with an outcome event if that is final. If another
    /// payment of the provider succeeded by the same charge, the job becomes `review` and names that payment.
    pub async fn finish_attempt(
        &self,
        lease: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
    ) -> Result<FencedWrite, LedgerError> {
        Ok(self.finish_attempt_batched(lease, end, next, Duration::ZERO).await?.0)
    }

    /// Finishes like [`Database::finish_attempt`]; the write may wait this long for others to be committed with. Returns
    /// the final state, if one was written (`review` for another payment's charge).
    pub async fn finish_attempt_batched(
        &self,
        token: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
        max_batch_delay: Duration,
    ) -> Result<(FencedWrite, Option<FinalState>), LedgerError> {
        let unsent = end.outcome == NOT_SENT && !matches!(next, JobState::Unknown { .. });
        let (status, is_final) = (end.status.map(i64::from), next.wait().is_none());
        let end =
            args![&token.id, token.fence, end.number, end.outcome, status, storable(&end.detail), end.counts, unsent];
        let args: Args = end.into_iter().chain(next_args(next)).collect();
        let written = self.write(if is_final { &FINALIZE } else { &WAIT }, args, max_batch_delay).await?;
        written_end(token, next, written.as_ref())
    }
}

/// `$3` to `$11` of a statement that freezes a request.
pub fn request_args(request: &FrozenRequest) -> [Value; 9] {
    let FrozenRequest { method, url, idempotency_key, content_type, body, account, sum, credential_fingerprint } =
        request;
    let decimals = u32::from(sum.decimals);
    args![
        method,
        url,
        idempotency_key,
        content_type,
        body,
        account.as_ref(),
        credential_fingerprint,
        sum.units,
        decimals
    ]
}

/// The result of the end of a request. Logs an error for the operator when two payments have the same charge.
fn written_end(
    lease: &LeaseToken,
    next: &JobState,
    row: Option<&SqlRow>,
) -> Result<(FencedWrite, Option<FinalState>), LedgerError> {
    let Some(row) = row else { return Ok((FencedWrite::Stale, None)) };
    if next.wait().is_some() {
        return Ok((FencedWrite::Applied, None));
    }
    let state: FinalState = row.get("state")?;
    let wanted = matches!(next, JobState::Final { state: FinalState::Succeeded, .. } | JobState::SucceededInPart(_));
    if wanted && state == FinalState::Review {
        tracing::error!(
            job = %lease.id, reason = row.get::<Option<String>>("reason")?,
            "two payments have the same charge; the second one is in review"
        );
    }
    Ok((FencedWrite::Applied, Some(state)))
}

const HELD_AND_UNKNOWN: &str = "id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' = 'unknown'";

static BEGIN_LOOKUP: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET last_attempt = last_attempt + 1, lookups = lookups + 1, lost_holders = 0, \
             response_by = {{after:$3}}, updated_at = {{now}} {{from}} \
         WHERE {HELD_AND_UNKNOWN} AND response_by IS NULL"
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![
        "INSERT INTO attempts (job_id, number, provider, began_at, account, reference, kind) \
             SELECT job.id, job.last_attempt, job.provider, job.updated_at, job.account, job.reference, \
                 'lookup' FROM {job}"
            .into(),
    ],
    returning: "last_attempt",
});

static WAIT_AFTER_LOOKUP: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET resend = CASE WHEN $8 THEN 'granted' ELSE resend END, {}, \
             holder = NULL, response_by = NULL, updated_at = {{now}} {{from}} \
         WHERE {HELD_AND_UNKNOWN} AND last_attempt = $3 AND response_by IS NOT NULL",
        WaitParameters { detail: "$10", code: "$11", limit: "$12" }.begin("{after:$9}"),
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_ATTEMPT.into()],
    returning: "id",
});

static FINALIZE_BY_LOOKUP: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET state = {}, provider_reference = COALESCE($10, provider_reference), reason = {}, \
             charged_amount = $12, resend = CASE WHEN $8 THEN 'granted' ELSE resend END, \
             holder = NULL, response_by = NULL, updated_at = {{now}} {{from}} \
         WHERE {HELD_AND_UNKNOWN} AND last_attempt = $3 AND response_by IS NOT NULL",
        conflict_checked_state("$9"),
        conflict_checked_reason("$9", "$11"),
    )
    .into(),
    written_columns: WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_ATTEMPT.into(), WRITE_EVENT.into()],
    returning: "id, state, reason",
});

impl Database {
    /// Commits that a look-up of an `unknown` job begins, before the first byte is sent. The job stays `unknown`. Its
    /// response comes within this time, or never.
    pub async fn begin_lookup(
        &self,
        lease: &LeaseToken,
        response_within: Duration,
    ) -> Result<BeginResult, LedgerError> {
        match self.execute(&BEGIN_LOOKUP, args![&lease.id, lease.fence, response_within]).await? {
            Some(row) => Ok(BeginResult::Attempt(row.get("last_attempt")?)),
            None => Ok(BeginResult::Stale),
        }
    }

    /// Commits the result of a look-up and the job's next state, like [`Database::finish_attempt`]. Returns the final
    /// state, if one was written (`review` for another payment's charge). Here, [`JobState::Waiting`] becomes `unknown`.
    pub async fn finish_lookup(
        &self,
        lease: &LeaseToken,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>), LedgerError> {
        let (status, is_final) = (end.status.map(i64::from), next.wait().is_none());
        let (detail, is_counted) = (storable(&end.detail), false);
        let end = args![&lease.id, lease.fence, end.number, end.outcome, status, detail, is_counted, end.grants_resend];
        // The job is unknown already.
        let next_args = next_args(next).into_iter().skip(usize::from(!is_final));
        let args: Args = end.into_iter().chain(next_args).collect();
        let row = self.execute(if is_final { &FINALIZE_BY_LOOKUP } else { &WAIT_AFTER_LOOKUP }, args).await?;
        written_end(lease, next, row.as_ref())
    }
}
