//! Which jobs this process holds: their leases are prolonged together, in a few statements, while they are in hand.
//!
//! Refuses to end a job whose lease is lost: every write on it names its fence and comes to nothing by itself.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::domain::job::JobId;
use crate::ledger::{LeaseToken, Ledger};

/// How long a claim lasts without being prolonged. Too short and a slow database costs jobs their hold; too long and a
/// dead worker's jobs wait for it.
pub const LEASE: Duration = Duration::from_secs(30);
const RENEW_INTERVAL: Duration = Duration::from_secs(8);

#[derive(Debug, Default)]
pub struct ActiveJobs {
    leases: Mutex<HashMap<JobId, i64>>,
    in_flight: AtomicUsize,
}

/// Keeps a job among those in hand until it is dropped.
#[derive(Debug)]
pub struct ActiveJob {
    pub lease: LeaseToken,
    jobs: Arc<ActiveJobs>,
}

/// Counts one request on the wire until it is dropped.
#[derive(Debug)]
pub struct InFlightRequest(Arc<ActiveJobs>);

impl ActiveJobs {
    #[must_use]
    pub fn insert(self: &Arc<Self>, hold: LeaseToken) -> ActiveJob {
        self.lock().insert(hold.id.clone(), hold.fence);
        ActiveJob { lease: hold, jobs: Arc::clone(self) }
    }

    /// The same, unless this process has another hold of the job: that one is not to be forgotten.
    pub fn try_insert(self: &Arc<Self>, hold: &LeaseToken) -> Option<ActiveJob> {
        match self.lock().entry(hold.id.clone()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(free) => free.insert(hold.fence),
        };
        Some(ActiveJob { lease: hold.clone(), jobs: Arc::clone(self) })
    }

    #[must_use]
    pub fn begin_request(self: &Arc<Self>) -> InFlightRequest {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightRequest(Arc::clone(self))
    }

    /// Requests whose answer has not been written down.
    #[must_use]
    pub fn requests_in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether this process has the job in hand.
    #[must_use]
    pub fn contains(&self, job: &JobId) -> bool {
        self.lock().contains_key(job)
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Prolongs all leases until the token fires.
    pub async fn renew_leases(self: Arc<Self>, ledger: Arc<dyn Ledger>, stop: CancellationToken) {
        let mut tick = interval(RENEW_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = stop.cancelled() => return,
            }
            let holds: Vec<LeaseToken> =
                self.lock().iter().map(|(id, fence)| LeaseToken { id: id.clone(), fence: *fence }).collect();
            if holds.is_empty() {
                continue;
            }
            match ledger.renew(&holds, LEASE).await {
                Ok(lost) if lost.is_empty() => {}
                // A job that was settled between the two looks is not lost, so this is no alarm.
                Ok(lost) => tracing::debug!(jobs = lost.len(), "leases not prolonged: no longer ours"),
                Err(error) => tracing::warn!(%error, jobs = holds.len(), "not all leases prolonged"),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, i64>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ActiveJob {
    fn drop(&mut self) {
        let mut holds = self.jobs.lock();
        if holds.get(&self.lease.id) == Some(&self.lease.fence) {
            holds.remove(&self.lease.id);
        }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
