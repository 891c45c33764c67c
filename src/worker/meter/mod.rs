//! The counters of this process: per lane how often, how long and why, and how its settings were read.
//!
//! There is one meter per process, passed in with its status. It counts in metric families, which a scrape reads. Fields
//! of [`Families`] have the names of the metrics, and their comments are the help texts. Counters are never removed:
//! one that vanished would look like one that was reset. The meter knows no job and no account, so it cannot show any.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::domain::provider::ProviderName;
use crate::fleet::report::BackendStatus;
use crate::ledger::events::UnpublishedEvents;
use crate::worker::evictions::EvictionStatus;

pub use decisions::{DecisionKind, LaneDecision, unix_ms};
pub use lane::{GaugeGuard, LaneMeter, ReturnReason};

mod decisions;
mod lane;

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
    /// The last check of the backends, which each heartbeat begins with.
    backends_checked_at: RwLock<Option<Instant>>,
    unpublished: RwLock<Option<UnpublishedEvents>>,
    evictions: RwLock<EvictionStatus>,
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
            backends_checked_at: RwLock::default(),
            unpublished: RwLock::default(),
            evictions: RwLock::default(),
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
        *self.backends_checked_at.write() = Some(Instant::now());
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

    /// Time since the heartbeat's last check of the backends; `None` before the first.
    pub fn since_backends_checked(&self) -> Option<Duration> {
        self.backends_checked_at.read().map(|at| at.elapsed())
    }

    /// Sets the count of outcome events that wait to be published, in the whole cluster; `None` while it is unknown.
    pub fn set_unpublished(&self, unpublished: Option<UnpublishedEvents>) {
        *self.unpublished.write() = unpublished;
    }

    pub fn unpublished(&self) -> Option<UnpublishedEvents> {
        *self.unpublished.read()
    }

    /// Counts keys that the limiter's store has dropped.
    pub fn count_evicted_keys(&self, keys: u64) {
        self.families.limiter_evicted_keys.inc_by(keys);
    }

    /// Sets what the last look at the limiter's store found.
    pub fn set_evictions(&self, found: EvictionStatus) {
        self.families.limiter_evicting_servers.set(found.evicting.len() as u64);
        *self.evictions.write() = found;
    }

    pub fn evictions(&self) -> EvictionStatus {
        self.evictions.read().clone()
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

/// Label names and values.
pub type Labels = Vec<(&'static str, String)>;
type Counters = Family<Labels, Counter>;
type Gauges = Family<Labels, UnsignedGauge>;
type UnsignedGauge = Gauge<u64, AtomicU64>;
type Histograms = Family<Labels, Histogram>;

/// Bounds of the waits for a permit, in milliseconds.
const WAITS_MS: [u64; 16] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000];
/// Bounds of requests and of the hold of their permits, in seconds.
const REQUESTS_S: [f64; 13] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
/// Bounds of the lateness of starts, in seconds; 600 µs and 3 ms are the limits that starts are tested against.
const LATENESS_S: [f64; 14] =
    [0.0001, 0.0002, 0.0005, 0.0006, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0];
/// Bounds from the recording of a job to its end, in seconds: from a tenth of a second to a week.
const JOBS_S: [f64; 14] =
    [0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0];

macro_rules! families {
    ($($(#[doc = $help:literal])+ $name:ident: $family:ty = $new:expr,)+) => {
        #[derive(Debug)]
        struct Families {
            $($(#[doc = $help])+ $name: $family,)+
        }

        impl Families {
            fn register(registry: &mut Registry) -> Self {
                let families = Self { $($name: $new,)+ };
                // The registry ends each help text with a full stop itself.
                $(registry.register(
                    stringify!($name),
                    concat!($($help),+).trim().trim_end_matches('.'),
                    families.$name.clone(),
                );)+
                families
            }
        }
    };
}

families! {
    /// Jobs that this process has finished, by final state.
    jobs: Counters = Counters::default(),
    /// Time from the recording of a job until it is finished.
    job_duration_seconds: Histograms = Histograms::new_with_constructor(|| Histogram::new(JOBS_S)),
    /// Active jobs: taken by this process, from the queue, from the backlog or for a look-up, and not finished.
    active_jobs: Gauges = Gauges::default(),
    /// Permits granted, one for each request.
    permits_granted: Counters = Counters::default(),
    /// Permits that were requested and not granted in time, by reason; for reason limit, by the name of the limit.
    permits_refused: Counters = Counters::default(),
    /// Time from the request of a permit to its start.
    permit_wait_seconds: Histograms = Histograms::new_with_constructor(permit_waits),
    /// Permits released unused, by reason; late: the request was recorded too late for its permit.
    permit_returned: Counters = Counters::default(),
    /// Active jobs that wait for a permit.
    gate_waiting_jobs: Gauges = Gauges::default(),
    /// Delay from the start of a permit to the start of its request.
    start_lateness_seconds: Histograms = Histograms::new_with_constructor(start_lateness),
    /// How long a request holds its permit: until its response is read, or until the wait for it ends.
    hold_seconds: Histograms = Histograms::new_with_constructor(|| Histogram::new(REQUESTS_S)),
    /// Finished requests, by status class; none: no response, unsent: not sent.
    provider_requests: Counters = Counters::default(),
    /// Duration of requests.
    provider_request_duration_seconds: Histograms = Histograms::new_with_constructor(|| Histogram::new(REQUESTS_S)),
    /// Requests that had a permit, and that the provider refused for its limit. Must stay at zero.
    provider_throttled: Counters = Counters::default(),
    /// Requests that wait for their response.
    in_flight_requests: Gauges = Gauges::default(),
    /// Outcomes that the database has not accepted; this process keeps them and writes them again. Must stay at zero.
    unwritten_outcomes: Gauges = Gauges::default(),
    /// Jobs that were delayed, and messages that were requeued, by reason.
    requeues: Counters = Counters::default(),
    /// Messages that the broker marks as delivered before.
    redelivered: Counters = Counters::default(),
    /// Messages that can never be a job, kept in the ledger, by reason.
    rejected_messages: Counters = Counters::default(),
    /// Jobs sent without an account: limits and rules by account did not apply to them.
    jobs_without_account: Counters = Counters::default(),
    /// Jobs sent without a reference: limits by reference did not apply to them.
    jobs_without_reference: Counters = Counters::default(),
    /// 1 if the backend responded to the last check; checked every 2 seconds, and more often while one does not.
    dependency_up: Gauges = Gauges::default(),
    /// Round-trip time to the backend; absent while it does not respond.
    dependency_rtt_seconds: Family<Labels, Gauge<f64, AtomicU64>> = Family::default(),
    /// Reads of the settings: success if they had changed and were loaded, failure if they could not be read.
    config_reloads: Counters = Counters::default(),
    /// Declared queues and exchanges that were found missing: an operator or a policy deleted them.
    broker_objects_missed: Counter = Counter::default(),
    /// Keys that the limiter's store has dropped for lack of memory since this process started. Must stay at zero.
    limiter_evicted_keys: Counter = Counter::default(),
    /// Servers of the limiter's store that drop keys when their memory is short: maxmemory-policy is not noeviction.
    limiter_evicting_servers: UnsignedGauge = UnsignedGauge::default(),
}

fn permit_waits() -> Histogram {
    Histogram::new(WAITS_MS.map(|ms| Duration::from_millis(ms).as_secs_f64()))
}

fn start_lateness() -> Histogram {
    Histogram::new(LATENESS_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lane_counters_are_kept() {
        let (meter, acme) = (Meter::default(), ProviderName::new("acme").unwrap());
        assert!(meter.find_lane(&acme).is_none());
        meter.lane(&acme);
        assert!(meter.find_lane(&acme).is_some());
        assert_eq!(meter.reloaded_at_ms(), None);
        meter.record_failed_reload();
        meter.record_reload();
        assert_eq!(["success", "failure"].map(|result| meter.reloads(result).get()), [1, 1]);
        assert!(meter.reloaded_at_ms() >= Some(meter.started_at_ms()));
    }
}
