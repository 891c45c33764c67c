//! What this process has done, counted: per lane how often, how long and why, and how its settings were read.
//!
//! Refuses to be global and refuses to cost: one per process, handed in with its progress; counts are atomics, and a short
//! lock is taken for the ring of decisions alone. It knows no job and no account, so nothing of them can be shown.

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

/// Everything that is counted in one process.
#[derive(Debug)]
pub struct Meter {
    lanes: RwLock<BTreeMap<ProviderName, Arc<LaneMeter>>>,
    reloads: AtomicU64,
    failed_reloads: AtomicU64,
    /// Zero: never.
    reloaded_at_ms: AtomicU64,
    started_at_ms: u64,
    unpublished: RwLock<Option<UnpublishedEvents>>,
    missing_topology: AtomicU64,
}

/// How the settings were read.
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
    /// The meter of a lane, begun with its first use. For providers that have a row alone: each is a label.
    #[must_use]
    pub fn lane(&self, provider: &ProviderName) -> Arc<LaneMeter> {
        if let Some(lane) = self.find_lane(provider) {
            return lane;
        }
        let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lanes.entry(provider.clone()).or_default())
    }

    /// The meter of a lane that has one.
    #[must_use]
    pub fn find_lane(&self, provider: &ProviderName) -> Option<Arc<LaneMeter>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).get(provider).cloned()
    }

    /// All lanes that ran since the process began.
    #[must_use]
    pub fn lanes(&self) -> BTreeMap<ProviderName, Arc<LaneMeter>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Settings were loaded and are in force.
    pub fn record_reload(&self) {
        self.reloads.fetch_add(1, Ordering::Relaxed);
        self.reloaded_at_ms.store(decisions::unix_ms(), Ordering::Relaxed);
    }

    /// Settings could not be read; the last ones stay.
    pub fn record_failed_reload(&self) {
        self.failed_reloads.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub fn reloads(&self) -> Reloads {
        let last = self.reloaded_at_ms.load(Ordering::Relaxed);
        Reloads {
            succeeded: self.reloads.load(Ordering::Relaxed),
            failed: self.failed_reloads.load(Ordering::Relaxed),
            last_success_ms: (last > 0).then_some(last),
        }
    }

    /// Outcome events that wait for their publish, in the whole cluster; `None` while the ledger does not say.
    pub fn set_unpublished(&self, unpublished: Option<UnpublishedEvents>) {
        *self.unpublished.write().unwrap_or_else(PoisonError::into_inner) = unpublished;
    }

    #[must_use]
    pub fn unpublished(&self) -> Option<UnpublishedEvents> {
        *self.unpublished.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue or an exchange that was declared is not there any more.
    pub fn record_missing_topology(&self) {
        self.missing_topology.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub fn missing_topology_total(&self) -> u64 {
        self.missing_topology.load(Ordering::Relaxed)
    }

    /// Unix time in milliseconds.
    #[must_use]
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
