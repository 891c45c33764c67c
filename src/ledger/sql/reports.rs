//! Read-only queries for status, for readiness, and for a worker that does not know a request's outcome.
//!
//! They take no locks: their counts may be outdated when they are read.

use crate::domain::provider::ProviderName;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::dialect::Dialect;
use super::engine::{Engine, Sql};
use super::row::SqlRow;
use crate::domain::job::JobId;
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

    pub async fn open_lanes(&self, engine: &dyn Engine) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&engine.query_by_index(&self.open_lanes, Arc::from([])).await?)
    }

    pub async fn flow_lanes(&self, engine: &dyn Engine) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&engine.query_by_index(&self.flow_lanes, Arc::from([])).await?)
    }

    pub async fn state_counts(&self, engine: &dyn Engine) -> Result<Vec<StateCount>, LedgerError> {
        engine.query(&self.counts, Arc::from([])).await?.iter().map(count).collect()
    }

    pub async fn counts_of(&self, engine: &dyn Engine, state: &str) -> Result<Vec<StateCount>, LedgerError> {
        engine.query_by_index(&self.counts_of, Arc::from([state.into()])).await?.iter().map(count).collect()
    }

    pub async fn outcome_of(
        &self,
        engine: &dyn Engine,
        job: &JobId,
        number: u32,
    ) -> Result<Option<String>, LedgerError> {
        let rows = engine.query(&self.outcome, Arc::from([job.as_str().into(), number.into()])).await?;
        rows.first().map_or(Ok(None), |row| row.opt_text("outcome"))
    }

    pub async fn ping(&self, engine: &dyn Engine) -> Result<String, LedgerError> {
        let rows = engine.query(&self.ping, Arc::from([])).await?;
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
