//! News of recorded payments: to the lanes of this process at once, and to the workers of other processes by notices.
//!
//! No commit of a record carries a notice. On PostgreSQL a notice takes a lock of the whole cluster until its commit is
//! flushed. So a statement of its own sends it, with the names of many lanes. SQLite needs none: its workers see each
//! commit. A notice that is lost costs a worker the time until its next look.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::time::Instant;

use super::database::Database;
use crate::domain::provider::ProviderName;

/// Least time between two notices.
const NOTICE_INTERVAL: Duration = Duration::from_millis(20);
/// News that a lane may leave unread; one that leaves more looks as if the last one was for it.
const UNREAD_MAX: usize = 64;

/// Payments may have been recorded outside of the lanes of this process.
#[derive(Clone, Debug)]
pub struct RecordNews {
    /// `None`: of any lane.
    pub lane: Option<ProviderName>,
    pub heard_at: Instant,
}

/// Passes news on to all lanes of this process.
#[derive(Clone, Debug)]
pub struct RecordNewsSender(broadcast::Sender<RecordNews>);

impl Default for RecordNewsSender {
    fn default() -> Self {
        Self(broadcast::Sender::new(UNREAD_MAX))
    }
}

impl RecordNewsSender {
    pub fn subscribe(&self) -> broadcast::Receiver<RecordNews> {
        self.0.subscribe()
    }

    /// Tells that payments of this lane, or of any, may have been recorded.
    pub fn send(&self, lane: Option<ProviderName>) {
        // Without a lane nothing waits for news.
        drop(self.0.send(RecordNews { lane, heard_at: Instant::now() }));
    }
}

/// The lanes in which this process has recorded payments since its last notice.
pub struct RecordNotices {
    ledger: Database,
    lanes: BTreeSet<ProviderName>,
    /// The next notice is not sent before.
    due_at: Instant,
}

impl RecordNotices {
    pub fn new(ledger: Database) -> Self {
        Self { ledger, lanes: BTreeSet::new(), due_at: Instant::now() }
    }

    /// A payment of this lane is recorded.
    pub fn add(&mut self, lane: &ProviderName) {
        if !self.lanes.contains(lane) {
            self.lanes.insert(lane.clone());
        }
    }

    /// When [`Self::send`] is to be called; `None`: there is nothing to tell.
    pub fn due_at(&self) -> Option<Instant> {
        (!self.lanes.is_empty()).then_some(self.due_at)
    }

    /// Sends what there is to tell, at once.
    pub async fn send(&mut self) {
        let lanes = std::mem::take(&mut self.lanes);
        if lanes.is_empty() {
            return;
        }
        if let Err(error) = self.ledger.notify_of_records(&lanes).await {
            tracing::debug!(%error, "no notice of recorded payments was sent; workers find them by their next look");
        }
        self.due_at = Instant::now() + NOTICE_INTERVAL;
    }
}
