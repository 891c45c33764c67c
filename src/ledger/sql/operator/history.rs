//! When a provider's jobs came, for rehearsals.
//!
//! Refuses to read them at once: page by page in the order of ids, so that no question holds the database for long.

use super::list::{at, opt_at};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::operator::{At, LIST_MAX, PastArrival};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Engine, Sql};
use crate::ledger::sql::row::Row;

pub struct Statements {
    page: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        let page = "SELECT jobs.id, {ms:jobs.created_at} AS created_at_ms, {ms:jobs.expires_at} AS expires_at_ms, \
             jobs.account, jobs.cost, jobs.priority FROM jobs \
             WHERE jobs.provider = $1 AND jobs.id > $2 \
             AND {ms:jobs.created_at} >= $3 AND {ms:jobs.created_at} < $4 ORDER BY jobs.id LIMIT $5";
        Self { page: dialect.sql(page) }
    }

    pub async fn of(
        &self,
        engine: &dyn Engine,
        provider: &ProviderName,
        (from, to): (At, At),
        at_most: usize,
    ) -> Result<Vec<PastArrival>, LedgerError> {
        let mut found = Vec::new();
        let mut after = String::new();
        while found.len() < at_most {
            let args =
                vec![provider.as_str().into(), after.as_str().into(), from.0.into(), to.0.into(), LIST_MAX.into()];
            let rows = engine.query(&self.page, Args::from(args)).await?;
            for row in &rows {
                found.push(arrival(row)?);
            }
            match rows.last() {
                Some(last) if rows.len() >= usize::try_from(LIST_MAX).unwrap_or(usize::MAX) => {
                    after = last.text("id")?
                }
                _ => break,
            }
        }
        found.truncate(at_most);
        Ok(found)
    }
}

fn arrival(row: &Row) -> Result<PastArrival, LedgerError> {
    Ok(PastArrival {
        created_at: at(row, "created_at_ms")?,
        expires_at: opt_at(row, "expires_at_ms")?,
        account: row.opt_text("account")?,
        cost: row.count("cost")?,
        priority: row.count("priority")?,
    })
}
