//! The finding on the database's commits: a database that answers may still commit nothing.

use std::time::Duration;

use super::Finding;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

const FIX_RIGHTS: &str = "Run check as the worker's or the operator's user of docs/security.md, \"Least rights\"";

/// Commits the row of [`Database::check_commit`]. `answered`: how long the database took to answer a read.
pub async fn commit_finding(subject: &str, ledger: &Database, answered: Duration) -> Finding {
    match ledger.check_commit().await {
        Ok(()) => Finding::ok(subject, format!("answers in {} ms, and commits", answered.as_millis())),
        Err(LedgerError::CannotWrite(fault)) => Finding::error(subject, fault.to_string(), fault.fix()),
        Err(error @ LedgerError::Unavailable(_)) => {
            Finding::error(subject, error.to_string(), super::FIX_DATABASE_ERROR)
        }
        Err(error) => Finding::warning(subject, format!("answers; whether it commits is unknown: {error}"), FIX_RIGHTS),
    }
}
