//! Lists of jobs, page by page.
//!
//! Refuses to sort what it would have to read in full: pages are in the order of ids. A state is looked for provider by
//! provider, because the index begins with the provider; an account has an index of its own.

use std::sync::Arc;

use crate::domain::job::{JobId, Token};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::operator::{At, Filter, JobLine, LIST_MAX};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Engine, Sql};
use crate::ledger::sql::reports::LANES;
use crate::ledger::sql::row::Row;

/// What [`line`] reads.
pub const LINE_COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.amount, jobs.currency, jobs.account, \
     jobs.attempts, {ms:jobs.wake_at} AS wake_at_ms, jobs.reason, jobs.provider_reference, \
     {ms:jobs.created_at} AS created_at_ms, {ms:jobs.updated_at} AS updated_at_ms";

pub struct Statements {
    of_any_state: Sql,
    of_a_state: Sql,
    of_an_account: Sql,
    one: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        let of_any_state = format!(
            "SELECT {LINE_COLUMNS} FROM jobs \
             WHERE ($1 IS NULL OR jobs.provider = $1) AND jobs.id > $2 ORDER BY jobs.id LIMIT $3"
        );
        let of_an_account = format!(
            "SELECT {LINE_COLUMNS} FROM jobs WHERE jobs.account = $4 AND jobs.id > $2 \
             AND ($1 IS NULL OR jobs.provider = $1) AND ($5 IS NULL OR jobs.state = $5) ORDER BY jobs.id LIMIT $3"
        );
        let of_a_state = format!(
            "{LANES} SELECT {LINE_COLUMNS} FROM lanes JOIN jobs ON jobs.provider = lanes.provider AND jobs.state = $4 \
             WHERE ($1 IS NULL OR lanes.provider = $1) AND jobs.id > $2 \
             ORDER BY jobs.id LIMIT $3"
        );
        Self {
            of_any_state: dialect.sql(&of_any_state),
            of_a_state: dialect.sql(&of_a_state),
            of_an_account: dialect.sql(&of_an_account),
            one: dialect.sql(&format!("SELECT {LINE_COLUMNS} FROM jobs WHERE jobs.id = $1")),
        }
    }

    pub async fn page(
        &self,
        engine: &dyn Engine,
        filter: &Filter,
        after: Option<&JobId>,
        at_most: u32,
    ) -> Result<Vec<JobLine>, LedgerError> {
        if let Some(id) = &filter.id {
            let found = engine.query(&self.one, of(id)).await?;
            let found = found.iter().map(line).collect::<Result<Vec<_>, _>>()?;
            let wanted =
                |line: &JobLine| filter.holds(line) && after.is_none_or(|after| line.id.as_str() > after.as_str());
            return Ok(found.into_iter().filter(wanted).take(at_most as usize).collect());
        }
        let provider = filter.provider.as_ref().map(ProviderName::as_str);
        let account = filter.account.as_ref().map(Token::as_str);
        let after = after.map_or("", JobId::as_str);
        let mut args = vec![provider.into(), after.into(), at_most.min(LIST_MAX).into()];
        let sql = match (account, filter.state) {
            (Some(account), state) => {
                args.extend([account.into(), state.into()]);
                &self.of_an_account
            }
            (None, Some(state)) => {
                args.push(state.into());
                &self.of_a_state
            }
            (None, None) => &self.of_any_state,
        };
        engine.query(sql, Args::from(args)).await?.iter().map(line).collect()
    }
}

pub fn line(row: &Row) -> Result<JobLine, LedgerError> {
    Ok(JobLine {
        id: row.text("id")?,
        provider: row.text("provider")?,
        state: row.text("state")?,
        amount: row.int("amount")?,
        currency: row.text("currency")?,
        account: row.opt_text("account")?,
        attempts: row.count("attempts")?,
        wake_at: at(row, "wake_at_ms")?,
        reason: row.opt_text("reason")?,
        provider_reference: row.opt_text("provider_reference")?,
        created_at: at(row, "created_at_ms")?,
        updated_at: at(row, "updated_at_ms")?,
    })
}

pub fn at(row: &Row, column: &str) -> Result<At, LedgerError> {
    row.int(column).map(At)
}

pub fn opt_at(row: &Row, column: &str) -> Result<Option<At>, LedgerError> {
    Ok(row.opt_int(column)?.map(At))
}

/// Arguments of a question about one job.
pub fn of(id: &JobId) -> Args {
    Arc::from([id.as_str().into()])
}
