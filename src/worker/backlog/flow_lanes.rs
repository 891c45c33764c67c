//! The lanes that have flows, as this process has read them last, for the dispatchers of all its lanes.
//!
//! Most lanes of a deployment are idle most of the time. Each of their dispatchers looks for flows that other processes
//! have recorded. One statement for all lanes answers them.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::Backlog;

/// Age at which the lanes are read again.
const MAX_AGE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub struct FlowLanes(Mutex<Option<ReadLanes>>);

#[derive(Debug)]
struct ReadLanes {
    read_at: Instant,
    lanes: BTreeSet<ProviderName>,
}

impl FlowLanes {
    /// When the ledger was asked last, if it had no flow of this lane then. At most one query runs at a time.
    pub async fn without(&self, lane: &ProviderName, backlog: &dyn Backlog) -> Result<Option<Instant>, LedgerError> {
        let mut last = self.0.lock().await;
        let now = Instant::now();
        let is_fresh = last.as_ref().is_some_and(|read| now < read.read_at + MAX_AGE);
        if !is_fresh {
            *last = Some(ReadLanes { read_at: now, lanes: backlog.lanes_with_flows().await? });
        }
        Ok(last.as_ref().filter(|read| !read.lanes.contains(lane)).map(|read| read.read_at))
    }
}
