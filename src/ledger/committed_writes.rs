//! The committed writes of this process: a database that answers reads alone is of no use.
//!
//! Even an idle worker commits its report every two seconds ([`crate::worker::heartbeat`]). So a process without a
//! committed write has a full disk, a read-only database, a standby that is missing, or no database. `/readyz` says so
//! after ten seconds, `status` and the page at the first report that is not committed.

use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::LedgerError;
use crate::domain::backend_fault::BackendFault;

/// Time without a committed write after which a worker is not ready.
pub const WRITES_STALLED_AFTER: Duration = Duration::from_secs(10);
/// Longest time that a commit of one small row may take.
pub const COMMIT_MAX: Duration = Duration::from_secs(3);
/// For this long after a payment's write has failed for a fault of the database, the fault is shown. A report is
/// overwritten in place, and may still be committed on a full disk.
const FAULT_SHOWN_FOR: Duration = Duration::from_secs(10);

/// When this process last committed a write, and why a later one failed.
#[derive(Debug)]
pub struct CommittedWrites(Mutex<LastWrite>);

#[derive(Debug)]
struct LastWrite {
    committed_at: Instant,
    failure: Option<String>,
    /// Of the reports.
    outage: Option<WriteOutage>,
    /// Of the payments' writes, since one of them was last committed.
    fault: Option<(Instant, BackendFault)>,
}

/// A time in which this process committed no report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteOutage {
    /// When the last write before it was committed.
    pub began_at: Instant,
    /// When the first report failed.
    pub failed_at: Instant,
    /// `None`: it continues.
    pub ended_at: Option<Instant>,
    pub cause: String,
}

/// Time without a committed write, and the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StalledWrites {
    pub silent_for: Duration,
    pub cause: Option<String>,
}

impl Default for CommittedWrites {
    /// The time counts from now on.
    fn default() -> Self {
        Self(Mutex::new(LastWrite { committed_at: Instant::now(), failure: None, outage: None, fault: None }))
    }
}

impl LastWrite {
    fn committed(&mut self) {
        (self.committed_at, self.failure) = (Instant::now(), None);
        if let Some(outage) = &mut self.outage {
            outage.ended_at.get_or_insert_with(Instant::now);
        }
    }
}

impl CommittedWrites {
    /// Records the result of a payment's write. One that found no row has written nothing: it needs no space on a full
    /// disk, and proves nothing.
    pub fn record<T>(&self, written: &Result<Option<T>, LedgerError>) {
        let mut last = self.0.lock();
        match written {
            Ok(Some(_)) => {
                last.committed();
                last.fault = None;
            }
            Ok(None) => {}
            Err(error) => {
                last.failure = Some(error.to_string());
                if let LedgerError::CannotWrite(fault) = error {
                    last.fault = Some((Instant::now(), fault.clone()));
                }
            }
        }
    }

    /// Records the result of writing a report.
    pub fn record_report(&self, written: &Result<(), LedgerError>) {
        let mut last = self.0.lock();
        let Err(error) = written else { return last.committed() };
        last.failure = Some(error.to_string());
        if error.is_outage() {
            let continuing = last.outage.as_ref().filter(|outage| outage.ended_at.is_none());
            let (began_at, failed_at) = continuing
                .map_or_else(|| (last.committed_at, Instant::now()), |outage| (outage.began_at, outage.failed_at));
            last.outage = Some(WriteOutage { began_at, failed_at, ended_at: None, cause: error.to_string() });
        }
    }

    /// Records that the database does not answer, so that no write is tried.
    pub fn record_unreachable(&self, cause: String) {
        self.0.lock().failure = Some(cause);
    }

    /// `None` if a write was committed within [`WRITES_STALLED_AFTER`].
    pub fn stalled(&self) -> Option<StalledWrites> {
        let last = self.0.lock();
        let silent_for = last.committed_at.elapsed();
        (silent_for >= WRITES_STALLED_AFTER).then(|| StalledWrites { silent_for, cause: last.failure.clone() })
    }

    /// The last time in which no report was committed.
    pub fn outage(&self) -> Option<WriteOutage> {
        self.0.lock().outage.clone()
    }

    /// The fault that payments' writes met lately.
    pub fn fault(&self) -> Option<BackendFault> {
        let last = self.0.lock();
        let lately = last.fault.as_ref().filter(|(at, _)| at.elapsed() < FAULT_SHOWN_FOR);
        lately.map(|(_, fault)| fault.clone())
    }
}

impl fmt::Display for StalledWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cause = self.cause.as_deref().unwrap_or("the database does not answer");
        write!(f, "no write was committed for {} s: {cause}", self.silent_for.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn full<T>() -> Result<T, LedgerError> {
        Err(BackendFault::DiskFull.into())
    }

    #[tokio::test(start_paused = true)]
    async fn writes_are_stalled_after_ten_seconds() {
        let writes = CommittedWrites::default();
        let text = || writes.stalled().map(|stalled| stalled.to_string());
        writes.record::<()>(&full());
        advance(Duration::from_millis(9_999)).await;
        assert_eq!(text(), None, "one failed write");
        advance(Duration::from_millis(1)).await;
        assert!(text().unwrap().ends_with("for 10 s: the database cannot write: its disk is full"), "{:?}", text());
        writes.record::<()>(&Ok(None));
        assert!(text().is_some(), "a write that found no row");
        writes.record(&Ok(Some(())));
        assert_eq!(text(), None);
        advance(WRITES_STALLED_AFTER * 2).await;
        assert_eq!(text().unwrap(), "no write was committed for 20 s: the database does not answer");
    }

    #[tokio::test(start_paused = true)]
    async fn uncommitted_reports_are_an_outage_at_once() {
        let writes = CommittedWrites::default();
        let second = Duration::from_secs(1);
        let ages = || writes.outage().map(|out| (out.began_at.elapsed(), out.ended_at.map(|at| at.elapsed())));
        writes.record_report(&Ok(()));
        advance(second).await;
        // A lock on one row, and a right that only reports need, say nothing about the database.
        writes.record::<()>(&Err(LedgerError::Unavailable("locked".to_owned())));
        writes.record_report(&Err(LedgerError::StatementFailed("no right".to_owned())));
        assert_eq!(ages(), None);
        writes.record_report(&full());
        advance(second).await;
        writes.record_report(&Err(BackendFault::ReadOnly.into()));
        assert_eq!(ages(), Some((second * 2, None)), "since the last commit");
        assert_eq!(writes.outage().unwrap().cause, "the database cannot write: it is read-only");
        writes.record_report(&Ok(()));
        advance(second).await;
        assert_eq!(ages(), Some((second * 3, Some(second))));
        writes.record_report(&full());
        assert_eq!(ages(), Some((second, None)), "another one");
    }

    /// A report may be committed on a full disk.
    #[tokio::test(start_paused = true)]
    async fn fault_of_payments_writes_outlasts_reports() {
        let writes = CommittedWrites::default();
        writes.record::<()>(&full());
        writes.record_report(&Ok(()));
        assert_eq!(writes.fault(), Some(BackendFault::DiskFull));
        writes.record(&Ok(Some(())));
        assert_eq!(writes.fault(), None);
        writes.record::<()>(&full());
        advance(FAULT_SHOWN_FOR).await;
        assert_eq!(writes.fault(), None);
    }
}
