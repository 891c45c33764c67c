//! The metrics of the backends: availability, round-trip time, and the usage of the limits.
//!
//! A result is cached for five seconds, a failure for one. A backend that does not respond within the timeout is
//! unavailable.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::write::{Labels, MetricsWriter, float};
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::limiter::{LimitStatus, Limiter};
use crate::queue::Queue;
use crate::worker::quotas::{QuotaRows, quota_specs};
use crate::worker::settings_sync::LoadedSettings;

/// How long a result with all backends available is cached.
const HEALTH_TTL: Duration = Duration::from_secs(5);
/// A backend that does not respond within this time is unavailable.
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a result with an unavailable backend is cached.
const UNAVAILABLE_TTL: Duration = Duration::from_secs(1);

pub(super) struct BackendMonitor {
    settings: Database,
    queue: Arc<dyn Queue>,
    limiter: Arc<dyn Limiter>,
    last: Mutex<Option<(Instant, Arc<BackendHealth>)>>,
}

#[derive(Debug)]
pub(super) struct BackendHealth {
    /// Round-trip time by name; `None` if the backend is unavailable.
    dependencies: [(&'static str, Option<Duration>); 3],
}

/// One limit of a quota, for each provider of that quota.
#[derive(Debug)]
struct LimitMetrics {
    provider: String,
    limit: String,
    /// Scope, kind of calls and shadow mode are labels: without them the tightest limit of a provider could be one that
    /// applies to no charge.
    scope: Scope,
    applies_to: AppliesTo,
    shadow: bool,
    max_requests: u32,
    capacity: u32,
    window: Duration,
    /// `None` if it counts accounts or references separately, or the store did not respond.
    used: Option<LimitStatus>,
}

impl BackendMonitor {
    pub fn new(settings: Database, queue: Arc<dyn Queue>, limiter: Arc<dyn Limiter>) -> Self {
        Self { settings, queue, limiter, last: Mutex::default() }
    }

    /// The cached result, or a new one. Concurrent callers wait for the same check.
    pub async fn health(&self) -> Arc<BackendHealth> {
        let mut last = self.last.lock().await;
        let fresh = |seen: &BackendHealth| {
            let all_answer = seen.dependencies.iter().all(|(_, took)| took.is_some());
            if all_answer { HEALTH_TTL } else { UNAVAILABLE_TTL }
        };
        if let Some((at, seen)) = &*last
            && at.elapsed() < fresh(seen)
        {
            return Arc::clone(seen);
        }
        let seen = Arc::new(self.check_health().await);
        *last = Some((Instant::now(), Arc::clone(&seen)));
        seen
    }

    async fn check_health(&self) -> BackendHealth {
        let until = Instant::now() + PING_TIMEOUT;
        let (database, queue, limiter) = tokio::join!(
            round_trip(until, async { self.settings.settings_version().await.is_ok() }),
            round_trip(until, async { self.queue.ping().await.is_ok() }),
            round_trip(until, async { self.limiter.ping().await.is_ok() }),
        );
        BackendHealth { dependencies: [("database", database), ("queue", queue), ("limiter", limiter)] }
    }
}

/// The time of a successful response; `None` without one.
async fn round_trip(until: Instant, answers: impl Future<Output = bool>) -> Option<Duration> {
    let asked = Instant::now();
    timeout_at(until, answers).await.unwrap_or(false).then(|| asked.elapsed())
}

fn limit_metrics(known: &LoadedSettings, used: &BTreeMap<ProviderName, Vec<LimitStatus>>) -> Vec<LimitMetrics> {
    let mut seen = Vec::new();
    for QuotaRows { quota, rows, spec } in quota_specs(known) {
        let Some(spec) = spec else { continue };
        let used = used.get(quota).map(Vec::as_slice).unwrap_or_default();
        for row in rows {
            seen.extend(spec.limits.iter().map(|limit| LimitMetrics {
                provider: row.name.to_string(),
                limit: limit.name.clone(),
                scope: limit.scope,
                applies_to: limit.applies_to,
                shadow: limit.shadow,
                max_requests: limit.max_requests,
                capacity: limit.cost_max(),
                window: limit.window,
                used: used.iter().find(|used| used.name == limit.name).cloned(),
            }));
        }
    }
    seen
}

pub(super) fn write(writer: &mut MetricsWriter<'_>, seen: &BackendHealth) -> Result<(), fmt::Error> {
    let of = |dependency: &str| vec![("dependency", dependency.to_owned())];
    writer.gauge(
        "dependency_up",
        "1 if the backend responded to the last check; checked at most every 5 seconds.",
        seen.dependencies.iter().map(|(name, took)| (of(name), f64::from(u8::from(took.is_some())))),
    )?;
    writer.gauge(
        "dependency_rtt_seconds",
        "Round-trip time to the backend; absent while it does not respond.",
        seen.dependencies.iter().filter_map(|(name, took)| Some((of(name), took.as_ref()?.as_secs_f64()))),
    )?;
    Ok(())
}

/// Writes the capacity and the usage of each limit.
pub(super) fn write_limits(
    writer: &mut MetricsWriter<'_>,
    known: &LoadedSettings,
    used: &BTreeMap<ProviderName, Vec<LimitStatus>>,
) -> Result<(), fmt::Error> {
    let limits = limit_metrics(known, used);
    let labels = |seen: &LimitMetrics| -> Labels {
        vec![
            ("provider", seen.provider.clone()),
            ("limit", seen.limit.clone()),
            ("scope", seen.scope.name().to_owned()),
            ("applies_to", seen.applies_to.name().to_owned()),
            ("shadow", seen.shadow.to_string()),
        ]
    };
    writer.gauge(
        "limit_requests",
        "Requests that the limit allows in its window or in flight, without the reserved share.",
        limits.iter().map(|seen| (labels(seen), float(u64::from(seen.max_requests)))),
    )?;
    writer.gauge(
        "limit_window_seconds",
        "Length of the limit's window; absent for a limit of requests in flight.",
        limits.iter().filter(|seen| !seen.window.is_zero()).map(|seen| (labels(seen), seen.window.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_capacity_requests",
        "Requests that may count against the limit at once: its maximum, or the size of its bucket.",
        limits.iter().map(|seen| (labels(seen), float(u64::from(seen.capacity)))),
    )?;
    writer.gauge(
        "limit_in_use",
        "Requests of all workers that count against the limit now; absent for limits by account or reference, and \
         while the limiter's store is unavailable.",
        limits.iter().filter_map(|seen| Some((labels(seen), float(seen.used.as_ref()?.used)))),
    )?;
    writer.gauge(
        "limit_retry_after_seconds",
        "Time until the limit lets the next request start, 0 if one may start now; absent for limits by account or reference, \
         for a limit that allows nothing, and while the limiter's store is unavailable.",
        limits.iter().filter_map(|seen| Some((labels(seen), seen.used.as_ref()?.retry_after?.as_secs_f64()))),
    )?;
    writer.gauge(
        "limit_reset_after_seconds",
        "Time until all of the limit is free again if nothing more is sent; absent for limits by account or reference, \
         and while the limiter's store is unavailable.",
        limits.iter().filter_map(|seen| {
            Some((labels(seen), seen.used.as_ref().filter(|_| !seen.window.is_zero())?.reset_after.as_secs_f64()))
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use tokio::time::advance;

    use super::*;
    use crate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
    use crate::domain::quota_spec::QuotaSpec;
    use crate::ledger::database::Database;
    use crate::limiter::LimiterError;
    use crate::ops::peek::tests::test_settings;
    use crate::queue::embedded::EmbeddedQueue;

    /// A store that never responds.
    #[derive(Default)]
    struct SilentLimiter(AtomicU32);

    #[async_trait]
    impl Limiter for SilentLimiter {
        async fn run_id(&self, _quota: &ProviderName) -> Result<String, LimiterError> {
            std::future::pending().await
        }

        async fn call(&self, _spec: &QuotaSpec, _call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
            std::future::pending().await
        }

        async fn peek(&self, _spec: &QuotaSpec, _of: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
            std::future::pending().await
        }

        async fn ping(&self) -> Result<Option<String>, LimiterError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }
    }

    #[tokio::test]
    async fn silent_backend_is_unavailable_and_checked_again() {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let queue = Arc::new(EmbeddedQueue::new(database.sqlite_pool().unwrap()));
        let limiter = Arc::new(SilentLimiter::default());
        let monitor = BackendMonitor::new(database.clone(), queue, limiter.clone());
        let (one, other) = tokio::join!(monitor.health(), monitor.health());
        assert!(Arc::ptr_eq(&one, &other), "two scrapes at once are one look");
        let up: Vec<bool> = one.dependencies.iter().map(|(_, took)| took.is_some()).collect();
        assert_eq!((up.as_slice(), limiter.0.load(Ordering::Relaxed)), ([true, true, false].as_slice(), 1));
        tokio::time::pause();
        advance(UNAVAILABLE_TTL).await;
        tokio::time::resume();
        monitor.health().await;
        assert_eq!(limiter.0.load(Ordering::Relaxed), 2);
        // The limits are known; their usage is not.
        let limits = limit_metrics(&test_settings(), &BTreeMap::new());
        let limits: Vec<_> =
            limits.iter().map(|limit| (limit.provider.as_str(), limit.limit.as_str(), limit.used.is_some())).collect();
        assert_eq!(limits, [("plain", "all", false), ("scoped", "all", false), ("scoped", "each", false)]);
    }
}
