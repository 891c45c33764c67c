//! The operators' queries for jobs: lists page by page, the details of one payment, and the arrival times of past jobs.
//!
//! Pages are in the order of ids. A state is searched provider by provider, because its index begins with the provider;
//! an account has an index of its own. The jobs of a provider alone are in the order of their idempotency keys, which
//! are the ids unless messages name others. An index by provider and id would be written at every step of every
//! payment.
//!
//! Details show payload and request body as size and digest, and the URL without the values of its parameters.
//!
//! Arrivals, for rehearsals, are read page by page in the order of idempotency keys: no statement blocks the database
//! for long. There is no index by arrival time, because each would cost every payment. So a page is a number of the
//! provider's jobs, and jobs of other times are filtered out of it.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::backlog::{account_of, class_of};
use super::dialect::Template;
use super::engine::Args;
use super::fleet::LANES;
use super::lease::StoredWait;
use super::result::{ReadRows, SqlRow, read_each, read_or_log};
use crate::domain::job::{Identifier, JobId};
use crate::domain::printable::redact_url;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{
    AttemptSummary, AuditEntry, DatabaseTime, Digest, EventSummary, JobDetails, JobFilter, JobPage, JobSummary,
    LIST_MAX, PastArrival, RequestSummary, WaitDetails,
};

/// The columns that [`job_summary`] reads.
pub const SUMMARY_COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.amount, jobs.currency, jobs.account, \
     jobs.attempts, {ms:jobs.wake_at} AS wake_at_ms, jobs.reason, jobs.wait_reason, jobs.wait_limit, \
     jobs.wait_detail, jobs.provider_reference, \
     {ms:jobs.created_at} AS created_at_ms, {ms:jobs.updated_at} AS updated_at_ms";

static ALL: Template =
    Template::made(|_| format!("SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.id > $1 ORDER BY jobs.id LIMIT $2"));

static OF_A_PROVIDER: Template = Template::made(|_| {
    // An id that the ledger does not have is used as a key, as in the other lists.
    let key = "COALESCE((SELECT last.idempotency_key FROM jobs AS last WHERE last.id = $1), $1)";
    format!(
        "SELECT {} FROM ({}) AS page WHERE page.provider = $3 ORDER BY page.provider, page.idempotency_key LIMIT $2",
        SUMMARY_COLUMNS.replace("jobs.", "page."),
        cursor_args("$3", key)
    )
});

static OF_A_STATE: Template = Template::made(|_| {
    format!(
        "{LANES} SELECT {SUMMARY_COLUMNS} FROM lanes \
         JOIN jobs ON jobs.provider = lanes.provider AND jobs.state = $4 \
         WHERE ($3 IS NULL OR lanes.provider = $3) AND jobs.id > $1 \
         ORDER BY jobs.id LIMIT $2"
    )
});

static OF_AN_ACCOUNT: Template = Template::made(|_| {
    format!(
        "SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.account = $4 AND jobs.id > $1 \
         AND ($3 IS NULL OR jobs.provider = $3) AND ($5 IS NULL OR jobs.state = $5) ORDER BY jobs.id LIMIT $2"
    )
});

static BY_ID: Template = Template::made(|_| format!("SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.id = $1"));

impl Database {
    /// Jobs by id, after `after`; at most `at_most`, and never more than [`LIST_MAX`]. If only a provider is given, by
    /// idempotency key.
    pub async fn list_jobs(
        &self,
        filter: &JobFilter,
        after: Option<&JobId>,
        at_most: u32,
    ) -> Result<JobPage, LedgerError> {
        if let Some(id) = &filter.id {
            let mut page = job_page(&self.query(&BY_ID, id_args(id)).await?, at_most);
            let is_behind = |id: &str| at_most > 0 && after.is_none_or(|after| id > after.as_str());
            page.jobs.retain(|line| filter.matches(line) && is_behind(&line.id));
            page.unreadable.retain(|row| is_behind(&row.id));
            return Ok(JobPage { next: None, ..page });
        }
        let at_most = at_most.min(LIST_MAX);
        let provider = filter.provider.as_ref().map(ProviderName::as_str);
        let account = filter.account.as_ref().map(Identifier::as_str);
        let after = after.map_or("", JobId::as_str);
        let mut args = vec![after.into(), at_most.into()];
        let sql = match (account, filter.state) {
            (Some(account), state) => {
                args.extend([provider.into(), account.into(), state.into()]);
                &OF_AN_ACCOUNT
            }
            (None, Some(state)) => {
                args.extend([provider.into(), state.into()]);
                &OF_A_STATE
            }
            (None, None) if provider.is_some() => {
                args.push(provider.into());
                &OF_A_PROVIDER
            }
            (None, None) => &ALL,
        };
        Ok(job_page(&self.query(sql, args).await?, at_most))
    }
}

/// If the page has as many jobs as asked for, there may be a next one.
fn job_page(rows: &[SqlRow], at_most: u32) -> JobPage {
    let last = rows.last().filter(|_| rows.len() == at_most as usize);
    let next = last.and_then(|row| row.text("id").ok());
    let ReadRows { rows: jobs, unreadable } = read_each(rows, "id", job_summary);
    JobPage { jobs, unreadable, next }
}

/// The jobs after this one in the order of providers and keys, as many as a list holds, by the index of both. They may
/// belong to the next provider. The condition is a comparison of both columns: with `provider = $1`, any index that
/// begins with the provider would fit. PostgreSQL would then read and sort all the provider's jobs when it expects few.
pub fn cursor_args(provider: &str, key: &str) -> String {
    format!(
        "SELECT * FROM jobs WHERE (jobs.provider, jobs.idempotency_key) > ({provider}, {key}) \
         ORDER BY jobs.provider, jobs.idempotency_key LIMIT {LIST_MAX}"
    )
}

pub fn job_summary(row: &SqlRow) -> Result<JobSummary, LedgerError> {
    let (state, text) = (row.text("state")?, row.opt_text("reason")?);
    let waits = matches!(state.as_str(), "waiting" | "unknown");
    let wait = StoredWait::read(row)?;
    let reason = match (wait.sentence().filter(|_| waits), text) {
        // An operator has sent the job again, and it came before its time.
        (Some(sentence), Some(decision)) => Some(format!("{sentence}; {decision}")),
        (Some(sentence), None) => Some(sentence),
        (None, _) if state == "sending" => None,
        (None, text) => text,
    };
    Ok(JobSummary {
        id: row.text("id")?,
        provider: row.text("provider")?,
        state,
        amount: row.int("amount")?,
        currency: row.text("currency")?,
        account: row.opt_text("account")?,
        attempts: row.count("attempts")?,
        wake_at: at(row, "wake_at_ms")?,
        reason,
        wait_reason: wait.code.filter(|_| waits),
        wait_limit: wait.limit.filter(|_| waits),
        provider_reference: row.opt_text("provider_reference")?,
        created_at: at(row, "created_at_ms")?,
        updated_at: at(row, "updated_at_ms")?,
    })
}

pub fn at(row: &SqlRow, column: &str) -> Result<DatabaseTime, LedgerError> {
    row.instant(column).map(|at| DatabaseTime(at.0))
}

pub fn opt_at(row: &SqlRow, column: &str) -> Result<Option<DatabaseTime>, LedgerError> {
    Ok(row.opt_instant(column)?.map(|at| DatabaseTime(at.0)))
}

/// Arguments of a query about one job.
pub fn id_args(id: &JobId) -> Args {
    Arc::from([id.as_str().into()])
}

static JOB: Template = Template::made(|_| {
    // A job of a blocked flow waits for the end of its block.
    let columns = SUMMARY_COLUMNS
        .replace("{ms:jobs.wake_at}", "{ms:COALESCE(flows.blocked_until, jobs.wake_at)}")
        .replace("jobs.wait_reason", "COALESCE(flows.blocked_reason, jobs.wait_reason) AS wait_reason")
        .replace(
            "jobs.wait_limit",
            "CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_limit ELSE flows.blocked_limit END AS wait_limit",
        )
        .replace("jobs.wait_detail", "CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_detail END AS wait_detail");
    format!(
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
    )
});

static ATTEMPTS: Template = Template::new(
    "SELECT number, {ms:began_at} AS began_at_ms, {ms:ended_at} AS ended_at_ms, outcome, status, detail, \
         CASE WHEN counted THEN 1 WHEN NOT counted THEN 0 END AS counted_or_not \
     FROM attempts WHERE job_id = $1 ORDER BY number",
);

static EVENTS: Template = Template::new(
    "SELECT state, {ms:at} AS at_ms, {ms:published_at} AS published_at_ms \
     FROM outcome_events WHERE job_id = $1 ORDER BY sequence",
);

static AUDIT: Template = Template::new(
    "SELECT {ms:at} AS at_ms, who, os_user, program, old_state, new_state, cleared_maybe_charged, erased, because \
     FROM job_audit WHERE job_id = $1 ORDER BY id",
);

impl Database {
    /// `None`: the ledger has no such job.
    pub async fn job_details(&self, id: &JobId) -> Result<Option<JobDetails>, LedgerError> {
        let rows = self.query(&JOB, id_args(id)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut story = job_details(row)?;
        let attempts = self.query(&ATTEMPTS, id_args(id)).await?;
        story.attempts = attempts.iter().map(attempt).collect::<Result<_, _>>()?;
        let events = self.query(&EVENTS, id_args(id)).await?;
        story.events = events.iter().map(event).collect::<Result<_, _>>()?;
        let audit = self.query(&AUDIT, id_args(id)).await?;
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

/// The last of the provider's jobs on a page is always returned: the next page begins after it.
static PAGE: Template = Template::made(|_| {
    format!(
        "WITH page AS MATERIALIZED ({}), \
         within AS (SELECT *, created_at >= {{at:$3}} AND created_at < {{at:$4}} AS wanted FROM page \
             WHERE provider = $1) \
         SELECT idempotency_key, wanted, {{ms:created_at}} AS created_at_ms, {{ms:expires_at}} AS expires_at_ms, \
             account, cost, priority FROM within \
         WHERE wanted OR idempotency_key = (SELECT max(idempotency_key) FROM within) ORDER BY idempotency_key",
        cursor_args("$1", "$2")
    )
});

impl Database {
    /// Jobs of a provider that the ledger recorded from `from` until before `to`, in any order; at most `at_most`.
    pub async fn arrivals(
        &self,
        provider: &ProviderName,
        from: DatabaseTime,
        to: DatabaseTime,
        at_most: usize,
    ) -> Result<Vec<PastArrival>, LedgerError> {
        let mut found = Vec::new();
        let mut after = String::new();
        while found.len() < at_most {
            let args = [provider.as_str().into(), after.as_str().into(), from.0.into(), to.0.into()];
            let rows = self.query(&PAGE, args).await?;
            let wanted = read_or_log(&rows, "jobs", "idempotency_key", |row| match row.bool("wanted")? {
                true => arrival(row).map(Some),
                false => Ok(None),
            });
            found.extend(wanted.into_iter().flatten());
            // The rows do not show whether the page was full: only a page without a row is the end.
            let Some(last) = rows.last() else { break };
            after = last.text("idempotency_key")?;
        }
        found.truncate(at_most);
        Ok(found)
    }
}

fn arrival(row: &SqlRow) -> Result<PastArrival, LedgerError> {
    Ok(PastArrival {
        created_at: at(row, "created_at_ms")?,
        expires_at: opt_at(row, "expires_at_ms")?,
        account: row.opt_text("account")?,
        cost: row.count("cost")?,
        priority: row.count("priority")?,
    })
}
