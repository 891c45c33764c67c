//! Read-only queries for status, for readiness, and for a worker that does not know a request's outcome.
//!
//! They take no locks: their counts may be outdated when they are read.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::dialect::Dialect;
use super::engine::Sql;
use super::row::SqlRow;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::{LedgerError, StateCount};

/// All providers that have a job: steps from one to the next instead of reading all entries of the index.
pub const LANES: &str = "WITH RECURSIVE lanes (provider) AS ( \
     SELECT min(provider) FROM jobs \
     UNION ALL \
     SELECT (SELECT min(provider) FROM jobs WHERE jobs.provider > lanes.provider) FROM lanes \
     WHERE lanes.provider IS NOT NULL)";

/// All providers that have a flow, as [`LANES`].
const FLOW_LANES: &str = "WITH RECURSIVE lanes (provider) AS ( \
     SELECT min(provider) FROM flows \
     UNION ALL \
     SELECT (SELECT min(provider) FROM flows WHERE flows.provider > lanes.provider) FROM lanes \
     WHERE lanes.provider IS NOT NULL)";

pub struct ReportStatements {
    open_lanes: Sql,
    flow_lanes: Sql,
    counts: Sql,
    counts_of: Sql,
    ping: Sql,
    outcome: Sql,
}

impl ReportStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            open_lanes: dialect.render(&format!(
                "{LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL AND EXISTS (SELECT 1 FROM jobs \
                     WHERE jobs.provider = lanes.provider AND jobs.state IN ('waiting', 'sending', 'unknown'))"
            )),
            flow_lanes: dialect.render(&format!("{FLOW_LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL")),
            counts: dialect.render("SELECT provider, state, count(*) AS jobs FROM jobs GROUP BY provider, state"),
            counts_of: dialect.render(&format!(
                "{LANES} SELECT provider, $1 AS state, jobs FROM ( \
                     SELECT provider, (SELECT count(*) FROM jobs \
                         WHERE jobs.provider = lanes.provider AND jobs.state = $1) AS jobs \
                     FROM lanes WHERE provider IS NOT NULL) AS counted WHERE jobs > 0"
            )),
            ping: dialect.render("SELECT {version} AS version"),
            outcome: dialect.render("SELECT outcome FROM attempts WHERE job_id = $1 AND number = $2"),
        }
    }
}

impl Database {
    /// The lanes with a job that waits, is being sent, or has an unknown outcome. The others need no sweep of their own.
    pub async fn lanes_with_open_jobs(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.engine.query_by_index(&self.sql.reports.open_lanes, Arc::from([])).await?)
    }

    /// The lanes that have flows, with or without jobs. One statement for all lanes, since most have none.
    pub async fn lanes_with_flows(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.engine.query_by_index(&self.sql.reports.flow_lanes, Arc::from([])).await?)
    }

    pub async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError> {
        self.engine.query(&self.sql.reports.counts, Arc::from([])).await?.iter().map(count).collect()
    }

    /// Number of jobs in a state, by provider, without reading the other states.
    pub async fn job_counts(&self, state: &str) -> Result<Vec<StateCount>, LedgerError> {
        self.engine
            .query_by_index(&self.sql.reports.counts_of, Arc::from([state.into()]))
            .await?
            .iter()
            .map(count)
            .collect()
    }

    /// The outcome of a request, as its row says: `None` while it is open, and when no request has this number.
    pub async fn request_outcome(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError> {
        let rows =
            self.engine.query(&self.sql.reports.outcome, Arc::from([job.as_str().into(), number.into()])).await?;
        rows.first().map_or(Ok(None), |row| row.opt_text("outcome"))
    }

    /// Asks the database for a sign of life; returns its version.
    pub async fn ping(&self) -> Result<String, LedgerError> {
        let rows = self.engine.query(&self.sql.reports.ping, Arc::from([])).await?;
        rows.first().map(|row| row.text("version")).transpose().map(Option::unwrap_or_default)
    }
}

fn count(row: &SqlRow) -> Result<StateCount, LedgerError> {
    Ok(StateCount { provider: row.text("provider")?, state: row.text("state")?, jobs: row.int("jobs")? })
}

/// A name that no row of a provider can have is left out.
fn providers(rows: &[SqlRow]) -> Result<BTreeSet<ProviderName>, LedgerError> {
    let names = rows.iter().map(|row| Ok(ProviderName::new(&row.text("provider")?).ok()));
    names.filter_map(Result::transpose).collect()
}
