//! The sweeper's SQL: republishing, retention, reconciliation, and the totals of finished jobs, one file each.
//!
//! Each statement finds its rows by a partial index of `migrations/*/0002_ledger.sql`. It repeats the index's
//! expression and condition exactly, because SQLite uses such an index for nothing else. See
//! `docs/decisions/0028-query-plans-are-pinned.md`.

use std::sync::Arc;
use std::time::Duration;

use super::dialect::Dialect;
use super::engine::Sql;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

mod finished_totals;
mod reconciliation;
pub(in crate::ledger::sql) mod republish;
mod retention;

pub(in crate::ledger::sql) use retention::LIMIT_WINDOW_MAX;

/// The states in which a job is not final.
pub(in crate::ledger::sql) const OPEN: &str = "state IN ('waiting', 'sending', 'unknown')";

/// What every list and every sweep reads of a row.
pub(in crate::ledger::sql) const READABLE: &str = "{readable:wake_at} AND {readable:created_at} AND {readable:updated_at} \
     AND (not_before IS NULL OR {readable:not_before}) AND (expires_at IS NULL OR {readable:expires_at}) AND attempts >= 0";

pub struct UpkeepStatements {
    republish: republish::RepublishStatements,
    ending: retention::RetentionStatements,
    reconciliation: reconciliation::ReconciliationStatements,
    finished_totals: finished_totals::FinishedTotalsStatements,
    duty: Sql,
}

impl UpkeepStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            republish: republish::RepublishStatements::new(dialect),
            ending: retention::RetentionStatements::new(dialect),
            reconciliation: reconciliation::ReconciliationStatements::new(dialect),
            finished_totals: finished_totals::FinishedTotalsStatements::new(dialect),
            duty: dialect.render(
                "INSERT INTO upkeep_turns (duty, taken_until) VALUES ($1, {after:$2}) \
                 ON CONFLICT (duty) DO UPDATE SET taken_until = excluded.taken_until \
                     WHERE upkeep_turns.taken_until <= {now} \
                 RETURNING duty",
            ),
        }
    }
}

impl Database {
    /// Leases a duty for this long; false when another worker has it.
    pub async fn lease_duty(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        let args = Arc::from([duty.into(), lasts.into()]);
        Ok(!self.engine.query(&self.sql.upkeep.duty, args).await?.is_empty())
    }
}
