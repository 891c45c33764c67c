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
use crate::ledger::{Hold, Ledger};

/// How long a claim lasts without being prolonged. Too short and a slow database costs jobs their hold; too long and a
/// dead worker's jobs wait for it.
pub const LEASE: Duration = Duration::from_secs(30);
const RENEW_EVERY: Duration = Duration::from_secs(8);

#[derive(Debug, Default)]
pub struct InHand {
    holds: Mutex<HashMap<JobId, i64>>,
    on_wire: AtomicUsize,
}

/// Keeps a job among those in hand until it is dropped.
#[derive(Debug)]
pub struct Held {
    pub hold: Hold,
    in_hand: Arc<InHand>,
}

/// Counts one request on the wire until it is dropped.
#[derive(Debug)]
pub struct OnWire(Arc<InHand>);

impl InHand {
    #[must_use]
    pub fn hold(self: &Arc<Self>, hold: Hold) -> Held {
        self.lock().insert(hold.id.clone(), hold.fence);
        Held { hold, in_hand: Arc::clone(self) }
    }

    /// The same, unless this process has another hold of the job: that one is not to be forgotten.
    pub fn hold_new(self: &Arc<Self>, hold: &Hold) -> Option<Held> {
        match self.lock().entry(hold.id.clone()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(free) => free.insert(hold.fence),
        };
        Some(Held { hold: hold.clone(), in_hand: Arc::clone(self) })
    }

    #[must_use]
    pub fn on_wire(self: &Arc<Self>) -> OnWire {
        self.on_wire.fetch_add(1, Ordering::Relaxed);
        OnWire(Arc::clone(self))
    }

    /// Requests whose answer has not been written down.
    #[must_use]
    pub fn requests_on_wire(&self) -> usize {
        self.on_wire.load(Ordering::Relaxed)
    }

    /// Whether this process has the job in hand.
    #[must_use]
    pub fn has(&self, job: &JobId) -> bool {
        self.lock().contains_key(job)
    }

    #[must_use]
    pub fn jobs(&self) -> usize {
        self.lock().len()
    }

    /// Prolongs all leases until the token fires.
    pub async fn keep(self: Arc<Self>, ledger: Arc<dyn Ledger>, stop: CancellationToken) {
        let mut tick = interval(RENEW_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = stop.cancelled() => return,
            }
            let holds: Vec<Hold> =
                self.lock().iter().map(|(id, fence)| Hold { id: id.clone(), fence: *fence }).collect();
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
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut holds = self.in_hand.lock();
        if holds.get(&self.hold.id) == Some(&self.hold.fence) {
            holds.remove(&self.hold.id);
        }
    }
}

impl Drop for OnWire {
    fn drop(&mut self) {
        self.0.on_wire.fetch_sub(1, Ordering::Relaxed);
    }
}
