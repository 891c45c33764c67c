//! The findings on the database's commits: a database that answers may still commit nothing, or lose what it committed.

use std::time::Duration;

use super::Finding;
use crate::domain::format::count;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

const FIX_RIGHTS: &str = "Run check as the worker's or the operator's user of docs/security.md, \"Least rights\"";

const FIX_ASYNCHRONOUS: &str =
    "Set synchronous_standby_names, so that each commit is on a standby; without it, lanes are held after a fail-over";

/// A warning if a fail-over to a connected standby would lose commits. The sessions of workers set `synchronous_commit`
/// themselves, whatever the server's default.
pub async fn standby_finding(subject: &str, ledger: &Database) -> Result<Option<Finding>, LedgerError> {
    let standbys = ledger.asynchronous_standbys().await?;
    Ok((standbys > 0).then(|| {
        let what = format!(
            "{} without a synchronous one: a fail-over loses the last commits, and payments may be charged twice",
            count(standbys, "asynchronous standby")
        );
        Finding::warning(subject, what, FIX_ASYNCHRONOUS)
    }))
}

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
