//! Lists of jobs, page by page, in an order that an index has.
//!
//! Pages are in the order of ids. A state is searched provider by provider, because its index begins with the provider;
//! an account has an index of its own. The jobs of a provider alone are in the order of their idempotency keys, which
//! are the ids unless messages name others. An index by provider and id would be written at every step of every
//! payment.

use std::sync::Arc;

use crate::domain::job::{Identifier, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{DatabaseTime, JobFilter, JobPage, JobSummary, LIST_MAX};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Sql};
use crate::ledger::sql::reports::LANES;
use crate::ledger::sql::row::{ReadRows, SqlRow, read_each};
use crate::ledger::sql::wait::StoredWait;

/// The columns that [`job_summary`] reads.
pub const SUMMARY_COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.amount, jobs.currency, jobs.account, \
     jobs.attempts, {ms:jobs.wake_at} AS wake_at_ms, jobs.reason, jobs.wait_reason, jobs.wait_limit, \
     jobs.wait_detail, jobs.provider_reference, \
     {ms:jobs.created_at} AS created_at_ms, {ms:jobs.updated_at} AS updated_at_ms";

pub struct JobListStatements {
    all: Sql,
    of_a_provider: Sql,
    of_a_state: Sql,
    of_an_account: Sql,
    one: Sql,
}

impl JobListStatements {
    pub fn new(dialect: Dialect) -> Self {
        let all = format!("SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.id > $1 ORDER BY jobs.id LIMIT $2");
        // An id that the ledger does not have is used as a key, as in the other lists.
        let key = "COALESCE((SELECT last.idempotency_key FROM jobs AS last WHERE last.id = $1), $1)";
        let of_a_provider = format!(
            "SELECT {} FROM ({}) AS page WHERE page.provider = $3 ORDER BY page.provider, page.idempotency_key LIMIT $2",
            SUMMARY_COLUMNS.replace("jobs.", "page."),
            cursor_args("$3", key)
        );
        let of_an_account = format!(
            "SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.account = $4 AND jobs.id > $1 \
             AND ($3 IS NULL OR jobs.provider = $3) AND ($5 IS NULL OR jobs.state = $5) ORDER BY jobs.id LIMIT $2"
        );
        let of_a_state = format!(
            "{LANES} SELECT {SUMMARY_COLUMNS} FROM lanes \
             JOIN jobs ON jobs.provider = lanes.provider AND jobs.state = $4 \
             WHERE ($3 IS NULL OR lanes.provider = $3) AND jobs.id > $1 \
             ORDER BY jobs.id LIMIT $2"
        );
        Self {
            all: dialect.render(&all),
            of_a_provider: dialect.render(&of_a_provider),
            of_a_state: dialect.render(&of_a_state),
            of_an_account: dialect.render(&of_an_account),
            one: dialect.render(&format!("SELECT {SUMMARY_COLUMNS} FROM jobs WHERE jobs.id = $1")),
        }
    }
}

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
            let mut page = job_page(&self.engine.query(&self.sql.operator.list.one, id_args(id)).await?, at_most);
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
                &self.sql.operator.list.of_an_account
            }
            (None, Some(state)) => {
                args.extend([provider.into(), state.into()]);
                &self.sql.operator.list.of_a_state
            }
            (None, None) if provider.is_some() => {
                args.push(provider.into());
                &self.sql.operator.list.of_a_provider
            }
            (None, None) => &self.sql.operator.list.all,
        };
        Ok(job_page(&self.engine.query(sql, Args::from(args)).await?, at_most))
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
