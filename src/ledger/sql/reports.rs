//! Questions that change nothing: for status, for readiness, and for a limiter that lost its account.

use std::sync::Arc;
use std::time::Duration;

use super::dialect::Dialect;
use super::engine::{Engine, Sql};
use super::row::Row;
use crate::domain::provider::ProviderName;
use crate::ledger::{LedgerError, StateCount};

pub struct Statements {
    youngest: Sql,
    counts: Sql,
    ping: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            // An attempt's end is never before its begin, so ends alone decide once nothing is on the wire.
            youngest: dialect.sql(
                "SELECT EXISTS (SELECT 1 FROM jobs WHERE state = 'sending' AND provider IN \
                     (SELECT name FROM providers WHERE COALESCE(quota, name) = $1)) AS sending, \
                 {since:SELECT max((SELECT max(ended_at) FROM attempts WHERE attempts.provider = providers.name)) \
                     FROM providers WHERE COALESCE(quota, name) = $1} AS age_ms",
            ),
            counts: dialect.sql("SELECT provider, state, count(*) AS jobs FROM jobs GROUP BY provider, state"),
            ping: dialect.sql("SELECT 1 AS one"),
        }
    }

    pub async fn youngest_attempt_age(
        &self,
        engine: &dyn Engine,
        quota: &ProviderName,
        within: Duration,
    ) -> Result<Option<Duration>, LedgerError> {
        let rows = engine.query(&self.youngest, Arc::from([quota.as_str().into()])).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        if row.bool("sending")? {
            return Ok(Some(Duration::ZERO));
        }
        Ok(row.opt_ms("age_ms")?.filter(|age| *age < within))
    }

    pub async fn state_counts(&self, engine: &dyn Engine) -> Result<Vec<StateCount>, LedgerError> {
        let count = |row: &Row| {
            Ok(StateCount { provider: row.text("provider")?, state: row.text("state")?, jobs: row.int("jobs")? })
        };
        engine.query(&self.counts, Arc::from([])).await?.iter().map(count).collect()
    }

    pub async fn ping(&self, engine: &dyn Engine) -> Result<(), LedgerError> {
        engine.query(&self.ping, Arc::from([])).await?;
        Ok(())
    }
}
