//! The active jobs of this process, and the requests that it has in flight.
//!
//! A job whose lease was lost needs no handling here: its writes name a stale fencing token and are rejected.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::domain::job::JobId;
use crate::ledger::LeaseToken;

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
