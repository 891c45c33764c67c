//! The arrival times of a provider's past jobs, for rehearsals.
//!
//! Jobs are read page by page in the order of idempotency keys, which have an index by provider: no statement blocks
//! the database for long. There is no index by arrival time, because each would cost every payment. So a page is a
//! number of the provider's jobs, and jobs of other times are filtered out of it.

use super::list::{at, cursor_args, opt_at};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{DatabaseTime, PastArrival};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Sql};
use crate::ledger::sql::row::{SqlRow, read_or_log};

pub struct ArrivalStatements {
    page: Sql,
}

impl ArrivalStatements {
    pub fn new(dialect: Dialect) -> Self {
        // The last of the provider's jobs on a page is always returned: the next page begins after it.
        let page = format!(
            "WITH page AS MATERIALIZED ({}), \
             within AS (SELECT *, created_at >= {{at:$3}} AND created_at < {{at:$4}} AS wanted FROM page \
                 WHERE provider = $1) \
             SELECT idempotency_key, wanted, {{ms:created_at}} AS created_at_ms, {{ms:expires_at}} AS expires_at_ms, \
                 account, cost, priority FROM within \
             WHERE wanted OR idempotency_key = (SELECT max(idempotency_key) FROM within) ORDER BY idempotency_key",
            cursor_args("$1", "$2")
        );
        Self { page: dialect.render(&page) }
    }
}

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
            let args = vec![provider.as_str().into(), after.as_str().into(), from.0.into(), to.0.into()];
            let rows = self.engine.query(&self.sql.operator.history.page, Args::from(args)).await?;
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
