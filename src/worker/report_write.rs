//! The write of a report, of which one runs at a time.
//!
//! A commit that waits for its standby holds a connection until the standby is back, and a second one would hold
//! another. So the next write begins when the last one has ended.

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::ledger::LedgerError;
use crate::ledger::committed_writes::COMMIT_MAX;
use crate::ledger::database::Database;
use crate::ledger::fleet::WorkerReport;

#[derive(Debug, Default)]
pub(super) struct ReportWrite {
    /// At most one.
    running: JoinSet<Result<(), LedgerError>>,
    /// A commit has not returned in time, and none has been successful since.
    hangs: bool,
}

impl ReportWrite {
    /// Commits the report, unless an earlier one is still being written: then waits for that one.
    ///
    /// # Errors
    /// After [`COMMIT_MAX`] at the latest. The write goes on.
    pub async fn commit(&mut self, ledger: &Database, report: WorkerReport) -> Result<(), LedgerError> {
        if self.running.is_empty() {
            let ledger = ledger.clone();
            self.running.spawn(async move { ledger.write_report(&report).await });
        }
        let Ok(ended) = timeout(COMMIT_MAX, self.running.join_next()).await else {
            self.hangs = true;
            return Err(ledger.hanging_commit().into());
        };
        let written = ended.and_then(Result::ok);
        let written = written.unwrap_or_else(|| Err(LedgerError::Unavailable("the write ended early".to_owned())));
        // The next write waits for the row, which the commit that hangs has locked.
        if self.hangs && matches!(written, Err(LedgerError::Unavailable(_))) {
            return Err(ledger.hanging_commit().into());
        }
        self.hangs = false;
        written
    }

    /// The database does not answer at all.
    pub fn database_is_unreachable(&mut self) {
        self.hangs = false;
    }
}
