//! The counters of this process: per lane how often, how long and why, and how its settings were read.
//!
//! There is one meter per process, passed in with its status. It counts in metric families, which a scrape reads. The
//! meter knows no job and no account, so it cannot show any.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use self::families::Families;
use crate::domain::provider::ProviderName;
use crate::fleet::report::BackendStatus;
use crate::ledger::UnpublishedEvents;

mod decisions;
mod families;
mod lane;

pub use decisions::{DecisionKind, LaneDecision};
pub use families::Labels;
pub use lane::{GaugeGuard, LaneMeter, RefusalLabels, ReturnReason};

/// Prefix of all metrics.
pub const PREFIX: &str = "sluicegate";

/// All counters of one process.
#[derive(Debug)]
pub struct Meter {
    registry: Registry,
    families: Arc<Families>,
    lanes: RwLock<BTreeMap<ProviderName, Arc<LaneMeter>>>,
    /// 0: never.
    reloaded_at_ms: AtomicU64,
    started_at_ms: u64,
    unpublished: RwLock<Option<UnpublishedEvents>>,
}

impl Default for Meter {
    fn default() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let meter = Self {
            families: Arc::new(Families::register(&mut registry)),
            registry,
            lanes: RwLock::default(),
            reloaded_at_ms: AtomicU64::new(0),
            started_at_ms: decisions::unix_ms(),
            unpublished: RwLock::default(),
        };
        ["success", "failure"].into_iter().for_each(|result| drop(meter.reloads(result)));
        meter
    }
}

impl Meter {
    /// The counters of a lane, created at their first use. Only for providers with a row: each becomes a label.
    pub fn lane(&self, provider: &ProviderName) -> Arc<LaneMeter> {
        if let Some(lane) = self.find_lane(provider) {
            return lane;
        }
        let mut lanes = self.lanes.write();
        let new = || Arc::new(LaneMeter::new(provider, Arc::clone(&self.families)));
        Arc::clone(lanes.entry(provider.clone()).or_insert_with(new))
    }

    /// The counters of a lane, if it has any.
    pub fn find_lane(&self, provider: &ProviderName) -> Option<Arc<LaneMeter>> {
        self.lanes.read().get(provider).cloned()
    }

    /// What this process counts itself, for a scrape.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    fn reloads(&self, result: &str) -> Counter {
        self.families.config_reloads.get_or_create_owned(&vec![("result", result.to_owned())])
    }

    /// Counts settings that were loaded and are in force.
    pub fn record_reload(&self) {
        self.reloads("success").inc();
        self.reloaded_at_ms.store(decisions::unix_ms(), Ordering::Relaxed);
    }

    /// Counts settings that could not be read; the last ones stay in force.
    pub fn record_failed_reload(&self) {
        self.reloads("failure").inc();
    }

    /// Unix time in milliseconds at which the settings in force were loaded.
    pub fn reloaded_at_ms(&self) -> Option<u64> {
        Some(self.reloaded_at_ms.load(Ordering::Relaxed)).filter(|at_ms| *at_ms > 0)
    }

    /// Records the last check of each backend.
    pub fn record_backends(&self, backends: &BTreeMap<String, BackendStatus>) {
        let Families { dependency_up, dependency_rtt_seconds, .. } = self.families.as_ref();
        for (name, status) in backends {
            let labels = vec![("dependency", name.clone())];
            dependency_up.get_or_create(&labels).set(u64::from(status.ok));
            if let Some(rtt_ms) = status.rtt_ms {
                dependency_rtt_seconds.get_or_create(&labels).set(rtt_ms / 1_000.0);
            } else {
                dependency_rtt_seconds.remove(&labels);
            }
        }
    }

    /// Sets the count of outcome events that wait to be published, in the whole cluster; `None` while it is unknown.
    pub fn set_unpublished(&self, unpublished: Option<UnpublishedEvents>) {
        *self.unpublished.write() = unpublished;
    }

    pub fn unpublished(&self) -> Option<UnpublishedEvents> {
        *self.unpublished.read()
    }

    /// Counts a declared queue or exchange that no longer exists.
    pub fn record_missing_topology(&self) {
        self.families.broker_objects_missed.inc();
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
        assert_eq!(meter.lane(&acme).figures().throttled_total, 2);
        assert_eq!(meter.reloaded_at_ms(), None);
        meter.record_failed_reload();
        meter.record_reload();
        assert_eq!(["success", "failure"].map(|result| meter.reloads(result).get()), [1, 1]);
        assert!(meter.reloaded_at_ms() >= Some(meter.started_at_ms()));
    }
}
