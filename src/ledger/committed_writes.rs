//! The last committed write of this process, for `/readyz`: a database that answers reads alone is of no use.
//!
//! Even an idle worker writes its report every two seconds ([`crate::worker::heartbeat`]). So a process without a
//! committed write for longer has a full disk, a read-only database, a standby that is missing, or no database.

use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::LedgerError;

/// Time without a committed write after which a worker is not ready.
pub const WRITES_STALLED_AFTER: Duration = Duration::from_secs(10);

/// When this process last committed a write, and why a later one failed.
#[derive(Debug)]
pub struct CommittedWrites(Mutex<LastWrite>);

#[derive(Debug)]
struct LastWrite {
    committed_at: Instant,
    failure: Option<String>,
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
        Self(Mutex::new(LastWrite { committed_at: Instant::now(), failure: None }))
    }
}

impl CommittedWrites {
    /// Records the result of a write. One that found no row has written nothing: it needs no space on a full disk, and
    /// proves nothing.
    pub fn record<T>(&self, written: &Result<Option<T>, LedgerError>) {
        match written {
            Ok(Some(_)) => self.record_commit(),
            Ok(None) => {}
            Err(error) => self.record_failure(error.to_string()),
        }
    }

    pub fn record_commit(&self) {
        *self.0.lock() = LastWrite { committed_at: Instant::now(), failure: None };
    }

    /// Records why a write failed, or was not tried.
    pub fn record_failure(&self, cause: String) {
        self.0.lock().failure = Some(cause);
    }

    /// `None` if a write was committed within [`WRITES_STALLED_AFTER`].
    pub fn stalled(&self) -> Option<StalledWrites> {
        let last = self.0.lock();
        let silent_for = last.committed_at.elapsed();
        (silent_for >= WRITES_STALLED_AFTER).then(|| StalledWrites { silent_for, cause: last.failure.clone() })
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

    #[tokio::test(start_paused = true)]
    async fn writes_are_stalled_after_ten_seconds() {
        let writes = CommittedWrites::default();
        let text = || writes.stalled().map(|stalled| stalled.to_string());
        writes.record::<()>(&Err(LedgerError::Unavailable("the disk is full".to_owned())));
        advance(Duration::from_millis(9_999)).await;
        assert_eq!(text(), None, "one failed write");
        advance(Duration::from_millis(1)).await;
        assert!(text().unwrap().ends_with("for 10 s: database unavailable: the disk is full"), "{:?}", text());
        writes.record::<()>(&Ok(None));
        assert!(text().is_some(), "a write that found no row");
        writes.record(&Ok(Some(())));
        assert_eq!(text(), None);
        advance(WRITES_STALLED_AFTER * 2).await;
        assert_eq!(text().unwrap(), "no write was committed for 20 s: the database does not answer");
    }
}
