//! The selection of jobs for a decision: the ids of all jobs that a filter matches, in one statement.
//!
//! It searches a bounded number of jobs, like the totals do. A filter that would search more selects nothing: a decision
//! about a part of the matches would be a surprise.

use super::{Dialect, PAGE_TIME, Statement};
use crate::domain::job::JobId;
use crate::domain::job_filter::JobFilter;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// Most jobs that a selection searches. SQLite has one connection, for which workers wait.
const fn selection_max(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Postgres => 100_000,
        Dialect::Sqlite => 20_000,
    }
}

impl Database {
    /// Most jobs that a selection by a filter searches.
    pub fn selection_max(&self) -> u32 {
        selection_max(self.dialect())
    }

    /// The ids of all jobs that match; `None`: more jobs would have to be searched than a selection may search.
    pub async fn selected_jobs(&self, filter: &JobFilter) -> Result<Option<Vec<JobId>>, LedgerError> {
        let Some(search) = self.job_search(filter, None).await? else { return Ok(Some(Vec::new())) };
        let at_most = self.selection_max();
        let mut statement = Statement { dialect: self.dialect(), args: Vec::new() };
        let jobs = search.jobs(&mut statement, at_most + 1)?;
        let matches = search.conditions(&mut statement).unwrap_or_else(|| "1 = 1".to_owned());
        let text = format!(
            "SELECT page.id, CASE WHEN {matches} THEN 1 ELSE 0 END AS is_selected FROM ({jobs}) AS page {}",
            search.joined(self.dialect())
        );
        let rows = self.search(&search.source, text, statement, PAGE_TIME).await?;
        if rows.len() > at_most as usize {
            return Ok(None);
        }
        let mut ids = Vec::new();
        for row in rows {
            if row.get::<bool>("is_selected")? {
                ids.push(row.get("id")?);
            }
        }
        Ok(Some(ids))
    }
}
