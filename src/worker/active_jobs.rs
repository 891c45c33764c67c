//! The active jobs of this process: one task renews their leases together, in a few statements.
//!
//! A job whose lease was lost needs no handling here: its writes name a stale fencing token and are rejected.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::domain::job::JobId;
use crate::ledger::LeaseToken;
use crate::ledger::database::Database;

/// Duration of a lease that is not renewed. A shorter one costs jobs their lease when the database is slow; a longer
/// one keeps the jobs of a dead worker waiting.
pub const LEASE: Duration = Duration::from_secs(30);
const RENEW_INTERVAL: Duration = Duration::from_secs(8);
/// After an outage of the database, leases are renewed before other processes take the jobs away.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Leases and requests of this process.
#[derive(Debug, Default)]
pub struct ActiveJobs {
    leases: Mutex<HashMap<JobId, i64>>,
    in_flight: AtomicUsize,
}

/// Keeps a job among the active ones until it is dropped.
#[derive(Debug)]
pub struct ActiveJob {
    pub lease: LeaseToken,
    jobs: Arc<ActiveJobs>,
}

/// Counts one request in flight until it is dropped.
#[derive(Debug)]
pub struct InFlightRequest(Arc<ActiveJobs>);

impl ActiveJobs {
    pub fn insert(self: &Arc<Self>, lease: LeaseToken) -> ActiveJob {
        self.leases.lock().insert(lease.id.clone(), lease.fence);
        ActiveJob { lease, jobs: Arc::clone(self) }
    }

    /// Inserts the lease; `None` if this process already has another lease of the job, which must be kept.
    pub fn try_insert(self: &Arc<Self>, lease: &LeaseToken) -> Option<ActiveJob> {
        match self.leases.lock().entry(lease.id.clone()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(free) => free.insert(lease.fence),
        };
        Some(ActiveJob { lease: lease.clone(), jobs: Arc::clone(self) })
    }

    pub fn begin_request(self: &Arc<Self>) -> InFlightRequest {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightRequest(Arc::clone(self))
    }

    /// Requests whose response has not been recorded.
    pub fn requests_in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether the job is active in this process.
    pub fn contains(&self, job: &JobId) -> bool {
        self.leases.lock().contains_key(job)
    }

    pub fn count(&self) -> usize {
        self.leases.lock().len()
    }

    /// Renews all leases until the token fires.
    pub async fn renew_leases(self: Arc<Self>, ledger: Database, stop: CancellationToken) {
        let mut tick = interval(RENEW_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = stop.cancelled() => return,
            }
            let leases: Vec<LeaseToken> =
                self.leases.lock().iter().map(|(id, fence)| LeaseToken { id: id.clone(), fence: *fence }).collect();
            if leases.is_empty() {
                continue;
            }
            match ledger.renew(&leases, LEASE).await {
                Ok(lost) if lost.is_empty() => {}
                // A job that finished after its lease was copied above is among them, so this is no alarm.
                Ok(lost) => {
                    tracing::debug!(jobs = lost.len(), "leases not renewed: the jobs finished or were taken over");
                }
                Err(error) => {
                    tracing::warn!(%error, jobs = leases.len(), "failed to renew all leases, retrying");
                    tick.reset_after(RETRY_INTERVAL);
                }
            }
        }
    }
}

impl Drop for ActiveJob {
    fn drop(&mut self) {
        let mut leases = self.jobs.leases.lock();
        if leases.get(&self.lease.id) == Some(&self.lease.fence) {
            leases.remove(&self.lease.id);
        }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
