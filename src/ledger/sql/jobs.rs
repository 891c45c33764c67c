//! The operators' queries for single jobs: the details of one payment, and the arrival times of past jobs. Lists are in
//! `job_search`.
//!
//! Details show payload and request body as size and digest, and the URL without the values of its parameters.
//!
//! Arrivals, for rehearsals, are read page by page in the order of idempotency keys: no statement blocks the database
//! for long. A page is a number of the provider's jobs, and jobs of other times are filtered out of it.

use sha2::{Digest as _, Sha256};

use super::backlog::{account_of, class_of};
use super::dialect::{Dialect, Template};
use super::engine::args;
use super::events::is_published;
use super::lease::StoredWait;
use super::result::{FromRow, SqlRow, from_row, read_or_log};
use crate::domain::job::JobId;
use crate::domain::printable::redact_url;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{
    AttemptSummary, AuditEntry, DatabaseTime, Digest, EventSummary, JobDetails, JobSummary, LIST_MAX, PastArrival,
    RequestSummary, WaitDetails,
};

/// The columns of a [`JobSummary`], of rows `jobs` that are joined with [`blocked_flow_of`] them. A job of a blocked flow
/// waits for the end of its block, whatever it waited for before.
pub fn summary_columns(jobs: &str) -> String {
    let columns = "jobs.id, jobs.provider, jobs.state, jobs.amount, jobs.currency, jobs.account, jobs.reference, \
         jobs.attempts, {ms:COALESCE(flows.blocked_until, jobs.wake_at)} AS wake_at_ms, jobs.reason, \
         COALESCE(flows.blocked_reason, jobs.wait_reason) AS wait_reason, \
         CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_limit ELSE flows.blocked_limit END AS wait_limit, \
         CASE WHEN flows.blocked_reason IS NULL THEN jobs.wait_detail END AS wait_detail, \
         jobs.provider_reference, jobs.charged_amount, \
         {ms:jobs.created_at} AS created_at_ms, {ms:jobs.updated_at} AS updated_at_ms";
    columns.replace("jobs.", &format!("{jobs}."))
}

/// Joins rows `jobs` with `flows`, if the job is in the backlog and its flow is blocked. PostgreSQL looks the flow up by
/// key for each row, whatever the statistics say: with `LIMIT`, it cannot turn the join around.
pub fn blocked_flow_of(jobs: &str, dialect: Dialect) -> String {
    let is_blocked = format!(
        "{jobs}.backlog AND flows.provider = {jobs}.provider AND flows.class = {} AND flows.account = {} \
         AND flows.blocked_until > {{now}}",
        class_of(jobs),
        account_of(jobs),
    );
    match dialect {
        Dialect::Postgres => {
            format!("LEFT JOIN LATERAL (SELECT * FROM flows WHERE {is_blocked} LIMIT 1) AS flows ON true")
        }
        Dialect::Sqlite => format!("LEFT JOIN flows ON {is_blocked}"),
    }
}

/// The jobs after this one in the order of providers and keys, as many as a list holds, by the index of both. They may
/// belong to the next provider. The condition is a comparison of both columns: with `provider = $1`, any index that
/// begins with the provider would fit. PostgreSQL would then read and sort all the provider's jobs when it expects few.
fn cursor_args(provider: &str, key: &str) -> String {
    format!(
        "SELECT * FROM jobs WHERE (jobs.provider, jobs.idempotency_key) > ({provider}, {key}) \
         ORDER BY jobs.provider, jobs.idempotency_key LIMIT {LIST_MAX}"
    )
}

from_row!(row => JobSummary {
    id, provider, state, amount, currency, account, reference, attempts, wake_at, provider_reference, charged_amount,
    created_at, updated_at;
    reason: reason(row)?,
    wait_reason: StoredWait::present(row)?.and_then(|wait| wait.wait_reason),
    wait_limit: StoredWait::present(row)?.and_then(|wait| wait.wait_limit),
});

fn reason(row: &SqlRow) -> Result<Option<String>, LedgerError> {
    let (state, text): (String, Option<String>) = (row.get("state")?, row.get("reason")?);
    Ok(match (StoredWait::present(row)?.and_then(|wait| wait.sentence()), text) {
        // An operator has sent the job again, and it came before its time.
        (Some(sentence), Some(decision)) => Some(format!("{sentence}; {decision}")),
        (Some(sentence), None) => Some(sentence),
        (None, _) if state == "sending" => None,
        (None, text) => text,
    })
}

static JOB: Template = Template::made(|dialect| {
    format!(
        "SELECT {}, idempotency_key, cost, priority, {{ms:not_before}} AS not_before_ms, \
             {{ms:expires_at}} AS expires_at_ms, maybe_charged, holder, {{ms:response_by}} AS response_by_ms, \
             {{ms:first_sent_at}} AS first_sent_at_ms, {{ms:revived_at}} AS revived_at_ms, payload, \
             {{ms:wait_since}} AS wait_since_ms, {{ms:wait_until}} AS wait_until_ms, wait_request, \
             frozen_method, frozen_url, frozen_content_type, frozen_body \
         FROM jobs {} WHERE jobs.id = $1",
        summary_columns("jobs"),
        blocked_flow_of("jobs", dialect),
    )
});

static ATTEMPTS: Template = Template::new(
    "SELECT number, {ms:began_at} AS began_at_ms, {ms:ended_at} AS ended_at_ms, outcome, status, detail, \
         CASE WHEN counted THEN 1 WHEN NOT counted THEN 0 END AS counted_or_not \
     FROM attempts WHERE job_id = $1 ORDER BY number",
);

static EVENTS: Template = Template::made(|dialect| {
    let published = is_published(dialect);
    format!(
        "SELECT event.state, {{ms:event.at}} AS at_ms, CASE WHEN {published} THEN 1 ELSE 0 END AS published \
         FROM events AS event WHERE event.job_id = $1 ORDER BY event.sequence"
    )
});

static AUDIT: Template = Template::new(
    "SELECT {ms:at} AS at_ms, who, os_user, program, old_state, new_state, cleared_maybe_charged, charged_amount, \
         erased, because \
     FROM job_audit WHERE job_id = $1 ORDER BY id",
);

impl Database {
    /// `None`: the ledger has no such job.
    pub async fn job_details(&self, id: &JobId) -> Result<Option<JobDetails>, LedgerError> {
        let Some(row) = self.query_one(&JOB, args![id]).await? else { return Ok(None) };
        Ok(Some(JobDetails {
            attempts: self.query_as(&ATTEMPTS, args![id]).await?,
            events: self.query_as(&EVENTS, args![id]).await?,
            audit: self.query_as(&AUDIT, args![id]).await?,
            ..JobDetails::from_row(&row)?
        }))
    }
}

from_row!(row => JobDetails {
    idempotency_key, cost, priority, not_before, expires_at, maybe_charged, holder, response_by,
    first_sent_at, revived_at;
    line: JobSummary::from_row(row)?,
    payload: row.get::<Option<String>>("payload")?.map(|payload| digest(payload.as_bytes())),
    request: request(row)?,
    waited: waited(row)?,
    attempts: Vec::new(),
    events: Vec::new(),
    audit: Vec::new(),
});

fn request(row: &SqlRow) -> Result<Option<RequestSummary>, LedgerError> {
    let Some(method) = row.get("frozen_method")? else { return Ok(None) };
    Ok(Some(RequestSummary {
        method,
        url: redact_url(&row.get::<String>("frozen_url")?),
        content_type: row.get("frozen_content_type")?,
        body: digest(&row.get::<Vec<u8>>("frozen_body")?),
    }))
}

fn waited(row: &SqlRow) -> Result<Option<WaitDetails>, LedgerError> {
    let wait = StoredWait::from_row(row)?;
    let (Some(reason), Some(past_reason)) = (wait.sentence(), wait.past_sentence()) else { return Ok(None) };
    let Some(request) = row.get("wait_request")? else { return Ok(None) };
    let StoredWait { wait_reason, wait_limit, wait_detail } = wait;
    let (since, until) = (row.get("wait_since")?, row.get("wait_until")?);
    let wait_reason = wait_reason.unwrap_or_default();
    Ok(Some(WaitDetails { reason, past_reason, wait_reason, wait_limit, wait_detail, since, until, request }))
}

fn digest(bytes: &[u8]) -> Digest {
    Digest { bytes: bytes.len() as u64, sha256: hex::encode(Sha256::digest(bytes)) }
}

from_row!(row => AttemptSummary {
    number, began_at, ended_at, outcome, status, detail;
    counted: row.get("counted_or_not")?,
});
from_row!(row => EventSummary { state, at, published });
from_row!(row => AuditEntry {
    at, who, os_user, program, old_state, new_state, cleared_maybe_charged, charged_amount, erased, because,
});

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
            let rows = self.query(&PAGE, args![provider, &after, from.0, to.0]).await?;
            found.extend(
                read_or_log::<WantedArrival>(&rows, "jobs", "idempotency_key").into_iter().filter_map(|row| row.0),
            );
            // The rows do not show whether the page was full: only a page without a row is the end.
            let Some(last) = rows.last() else { break };
            after = last.get("idempotency_key")?;
        }
        found.truncate(at_most);
        Ok(found)
    }
}

from_row!(row => PastArrival { created_at, expires_at, account, cost, priority });

/// An arrival, if its row is one of those that were asked for.
struct WantedArrival(Option<PastArrival>);

impl FromRow for WantedArrival {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        row.get::<bool>("wanted")?.then(|| PastArrival::from_row(row)).transpose().map(Self)
    }
}
