//! The details of one payment: the job, its requests, its events, and its changes by operators.
//!
//! Payload and request body are shown as size and digest, and the URL without the values of its parameters.

use sha2::{Digest as _, Sha256};

use super::list::{SUMMARY_COLUMNS, at, id_args, job_summary, opt_at};
use crate::domain::job::JobId;
use crate::domain::printable::redact_url;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{
    AttemptSummary, AuditEntry, Digest, EventSummary, JobDetails, RequestSummary, WaitDetails,
};
use crate::ledger::sql::backlog::{account_of, class_of};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::Sql;
use crate::ledger::sql::row::SqlRow;
use crate::ledger::sql::wait::StoredWait;

pub struct JobDetailStatements {
    job: Sql,
    attempts: Sql,
    events: Sql,
    audit: Sql,
}

impl JobDetailStatements {
    pub fn new(dialect: Dialect) -> Self {
        // A job of a blocked flow waits for the end of its block.
        let columns = SUMMARY_COLUMNS
            .replace("{ms:jobs.wake_at}", "{ms:COALESCE(flows.blocked_until, jobs.wake_at)}")
            .replace("jobs.wait_reason", "COALESCE(flows.blocked_reason, jobs.wait_reason) AS wait_reason")
            .replace(
                "jobs.wait_limit",
                "CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_limit ELSE flows.blocked_limit END AS wait_limit",
            )
            .replace(
                "jobs.wait_detail",
                "CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_detail END AS wait_detail",
            );
        let job = format!(
            "SELECT {columns}, idempotency_key, reference, cost, priority, {{ms:not_before}} AS not_before_ms, \
                 {{ms:expires_at}} AS expires_at_ms, maybe_charged, lease_owner, {{ms:lease_until}} AS lease_until_ms, \
                 {{ms:first_sent_at}} AS first_sent_at_ms, {{ms:revived_at}} AS revived_at_ms, payload, \
                 {{ms:wait_since}} AS wait_since_ms, {{ms:wait_until}} AS wait_until_ms, wait_request, \
                 frozen_method, frozen_url, frozen_content_type, frozen_body \
             FROM jobs LEFT JOIN flows ON jobs.backlog AND flows.provider = jobs.provider \
                 AND flows.class = {} AND flows.account = {} AND flows.blocked_until > {{now}} \
             WHERE jobs.id = $1",
            class_of("jobs"),
            account_of("jobs"),
        );
        Self {
            job: dialect.render(&job),
            attempts: dialect.render(
                "SELECT number, {ms:began_at} AS began_at_ms, {ms:ended_at} AS ended_at_ms, outcome, status, detail, \
                     CASE WHEN counted THEN 1 WHEN NOT counted THEN 0 END AS counted_or_not \
                 FROM attempts WHERE job_id = $1 ORDER BY number",
            ),
            events: dialect.render(
                "SELECT state, {ms:at} AS at_ms, {ms:published_at} AS published_at_ms \
                 FROM outcome_events WHERE job_id = $1 ORDER BY sequence",
            ),
            audit: dialect.render(
                "SELECT {ms:at} AS at_ms, who, os_user, program, old_state, new_state, cleared_maybe_charged, erased, because \
                 FROM job_audit WHERE job_id = $1 ORDER BY id",
            ),
        }
    }
}

impl Database {
    /// `None`: the ledger has no such job.
    pub async fn job_details(&self, id: &JobId) -> Result<Option<JobDetails>, LedgerError> {
        let rows = self.engine.query(&self.sql.operator.details.job, id_args(id)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut story = job_details(row)?;
        let attempts = self.engine.query(&self.sql.operator.details.attempts, id_args(id)).await?;
        story.attempts = attempts.iter().map(attempt).collect::<Result<_, _>>()?;
        let events = self.engine.query(&self.sql.operator.details.events, id_args(id)).await?;
        story.events = events.iter().map(event).collect::<Result<_, _>>()?;
        let audit = self.engine.query(&self.sql.operator.details.audit, id_args(id)).await?;
        story.audit = audit.iter().map(audited).collect::<Result<_, _>>()?;
        Ok(Some(story))
    }
}

fn job_details(row: &SqlRow) -> Result<JobDetails, LedgerError> {
    Ok(JobDetails {
        line: job_summary(row)?,
        idempotency_key: row.text("idempotency_key")?,
        reference: row.opt_text("reference")?,
        cost: row.count("cost")?,
        priority: row.count("priority")?,
        not_before: opt_at(row, "not_before_ms")?,
        expires_at: opt_at(row, "expires_at_ms")?,
        maybe_charged: row.bool("maybe_charged")?,
        lease_owner: row.opt_text("lease_owner")?,
        lease_until: opt_at(row, "lease_until_ms")?,
        first_sent_at: opt_at(row, "first_sent_at_ms")?,
        revived_at: opt_at(row, "revived_at_ms")?,
        payload: row.opt_text("payload")?.map(|payload| digest(payload.as_bytes())),
        request: request(row)?,
        waited: waited(row)?,
        attempts: Vec::new(),
        events: Vec::new(),
        audit: Vec::new(),
    })
}

fn request(row: &SqlRow) -> Result<Option<RequestSummary>, LedgerError> {
    let Some(method) = row.opt_text("frozen_method")? else { return Ok(None) };
    Ok(Some(RequestSummary {
        method,
        url: redact_url(&row.text("frozen_url")?),
        content_type: row.text("frozen_content_type")?,
        body: digest(&row.bytes("frozen_body")?),
    }))
}

fn waited(row: &SqlRow) -> Result<Option<WaitDetails>, LedgerError> {
    let wait = StoredWait::read(row)?;
    let (Some(reason), Some(past_reason)) = (wait.sentence(), wait.past_sentence()) else { return Ok(None) };
    if row.opt_int("wait_request")?.is_none() {
        return Ok(None);
    }
    Ok(Some(WaitDetails {
        reason,
        past_reason,
        wait_reason: wait.code.unwrap_or_default(),
        wait_limit: wait.limit,
        wait_detail: wait.detail,
        since: at(row, "wait_since_ms")?,
        until: at(row, "wait_until_ms")?,
        request: row.count("wait_request")?,
    }))
}

fn digest(bytes: &[u8]) -> Digest {
    Digest { bytes: bytes.len() as u64, sha256: hex::encode(Sha256::digest(bytes)) }
}

fn attempt(row: &SqlRow) -> Result<AttemptSummary, LedgerError> {
    Ok(AttemptSummary {
        number: row.count("number")?,
        began_at: at(row, "began_at_ms")?,
        ended_at: opt_at(row, "ended_at_ms")?,
        outcome: row.opt_text("outcome")?,
        status: row.opt_int("status")?,
        detail: row.opt_text("detail")?,
        counted: row.opt_int("counted_or_not")?.map(|counted| counted != 0),
    })
}

fn event(row: &SqlRow) -> Result<EventSummary, LedgerError> {
    Ok(EventSummary { state: row.text("state")?, at: at(row, "at_ms")?, published_at: opt_at(row, "published_at_ms")? })
}

fn audited(row: &SqlRow) -> Result<AuditEntry, LedgerError> {
    Ok(AuditEntry {
        at: at(row, "at_ms")?,
        who: row.text("who")?,
        os_user: row.opt_text("os_user")?,
        program: row.opt_text("program")?,
        old_state: row.text("old_state")?,
        new_state: row.opt_text("new_state")?,
        cleared_maybe_charged: row.bool("cleared_maybe_charged")?,
        erased: row.bool("erased")?,
        because: row.opt_text("because")?,
    })
}
