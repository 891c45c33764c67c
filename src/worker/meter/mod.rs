//! The counters of this process: per lane how often, how long and why, and how its settings were read.
//!
//! There is one meter per process, passed in with its status. Counters are atomics; only the ring of decisions takes a
//! short lock. The meter knows no job and no account, so it cannot show any.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::domain::provider::ProviderName;
use crate::ledger::outcomes::UnpublishedEvents;

mod buckets;
mod counts;
mod decisions;
mod labelled_counter;
mod lane;

pub use buckets::Distribution;
pub use counts::{Histogram, LaneCounts, LaneFigures};
pub use decisions::{DecisionKind, LaneDecision, RecordedDecision};
pub use lane::{GaugeGuard, LaneMeter, RefusalLabels, ReturnReason};

/// All counters of one process.
#[derive(Debug)]
pub struct Meter {
    lanes: RwLock<BTreeMap<ProviderName, Arc<LaneMeter>>>,
    reloads: AtomicU64,
    failed_reloads: AtomicU64,
    /// 0: never.
    reloaded_at_ms: AtomicU64,
    started_at_ms: u64,
    unpublished: RwLock<Option<UnpublishedEvents>>,
    missing_topology: AtomicU64,
}

/// Counts of settings reloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reloads {
    pub succeeded: u64,
    pub failed: u64,
    /// Unix time in milliseconds of the last success.
    pub last_success_ms: Option<u64>,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            lanes: RwLock::default(),
            reloads: AtomicU64::new(0),
            failed_reloads: AtomicU64::new(0),
            reloaded_at_ms: AtomicU64::new(0),
            started_at_ms: decisions::unix_ms(),
            unpublished: RwLock::default(),
            missing_topology: AtomicU64::new(0),
        }
    }
}

impl Meter {
    /// The counters of a lane, created at their first use. Only for providers with a row: each becomes a label.
    pub fn lane(&self, provider: &ProviderName) -> Arc<LaneMeter> {
        if let Some(lane) = self.find_lane(provider) {
            return lane;
        }
        let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lanes.entry(provider.clone()).or_default())
    }

    /// The counters of a lane, if it has any.
    pub fn find_lane(&self, provider: &ProviderName) -> Option<Arc<LaneMeter>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).get(provider).cloned()
    }

    /// All lanes that ran since the process started.
    pub fn lanes(&self) -> BTreeMap<ProviderName, Arc<LaneMeter>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts settings that were loaded and are in force.
    pub fn record_reload(&self) {
        self.reloads.fetch_add(1, Ordering::Relaxed);
        self.reloaded_at_ms.store(decisions::unix_ms(), Ordering::Relaxed);
    }

    /// Counts settings that could not be read; the last ones stay in force.
    pub fn record_failed_reload(&self) {
        self.failed_reloads.fetch_add(1, Ordering::Relaxed);
    }

    pub fn reloads(&self) -> Reloads {
        let last = self.reloaded_at_ms.load(Ordering::Relaxed);
        Reloads {
            succeeded: self.reloads.load(Ordering::Relaxed),
            failed: self.failed_reloads.load(Ordering::Relaxed),
            last_success_ms: (last > 0).then_some(last),
        }
    }

    /// Sets the count of outcome events that wait to be published, in the whole cluster; `None` while it is unknown.
    pub fn set_unpublished(&self, unpublished: Option<UnpublishedEvents>) {
        *self.unpublished.write().unwrap_or_else(PoisonError::into_inner) = unpublished;
    }

    pub fn unpublished(&self) -> Option<UnpublishedEvents> {
        *self.unpublished.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a declared queue or exchange that no longer exists.
    pub fn record_missing_topology(&self) {
        self.missing_topology.fetch_add(1, Ordering::Relaxed);
    }

    pub fn missing_topology_total(&self) -> u64 {
        self.missing_topology.load(Ordering::Relaxed)
    }

    /// Unix time in milliseconds.
    pub fn started_at_ms(&self) -> u64 {
        self.started_at_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lane_counters_are_kept() {
        let (meter, acme) = (Meter::default(), ProviderName::new("acme").unwrap());
        assert!(meter.find_lane(&acme).is_none());
        meter.lane(&acme).record_throttle();
        meter.lane(&acme).record_throttle();
        assert_eq!(meter.lanes()[&acme].figures().throttled_total, 2);
        assert_eq!(meter.reloads(), Reloads::default());
        meter.record_failed_reload();
        meter.record_reload();
        let reloads = meter.reloads();
        assert_eq!((reloads.succeeded, reloads.failed), (1, 1));
        assert!(reloads.last_success_ms >= Some(meter.started_at_ms()));
    }
}
