//! Whether the engines answer, how fast, and what the limits hold now.
//!
//! Refuses to ask more often than every few seconds, and to wait longer than a bound: what has not answered by then is
//! away. Takes nothing from any limit.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::write::{Labels, Writer, float};
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::ledger::settings::Settings;
use crate::limiter::{LimitUse, Limiter};
use crate::queue::Queue;
use crate::worker::quotas::{QuotaRows, quota_specs};
use crate::worker::settings_watch::Known;

/// A look is shown for so long.
const FRESH: Duration = Duration::from_secs(5);
/// An engine that has not answered by then is away.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Quotas looked at at once.
const AT_ONCE: usize = 4;

pub(super) struct Engines {
    settings: Arc<dyn Settings>,
    queue: Arc<dyn Queue>,
    limiter: Arc<dyn Limiter>,
    last: Mutex<Option<(Instant, Arc<EnginesSeen>)>>,
}

#[derive(Debug)]
pub(super) struct EnginesSeen {
    /// By name; with the time that an answer took, if there was one.
    dependencies: [(&'static str, Option<Duration>); 3],
    queues: Vec<QueueSeen>,
    limits: Vec<LimitSeen>,
}

/// One provider's queue, which fills while its lane is paused, disabled or full, and the ledger knows nothing of it.
#[derive(Debug)]
struct QueueSeen {
    provider: String,
    /// `None`: the broker did not say, or there is no such queue.
    ready: Option<u64>,
    /// `None`: none is ready, or the broker does not say.
    oldest: Option<Duration>,
}

/// One limit of a quota, for each provider that counts under it.
#[derive(Debug)]
struct LimitSeen {
    provider: String,
    limit: String,
    /// Whose calls it counts together, which calls, and whether it only watches: without them the tightest limit of a
    /// provider could be one that no charge ever meets.
    scope: Scope,
    applies_to: AppliesTo,
    shadow: bool,
    max_requests: u32,
    capacity: u32,
    window: Duration,
    /// `None`: it counts accounts or references apart, or the store did not say.
    used: Option<u64>,
}

impl Engines {
    pub fn new(settings: Arc<dyn Settings>, queue: Arc<dyn Queue>, limiter: Arc<dyn Limiter>) -> Self {
        Self { settings, queue, limiter, last: Mutex::default() }
    }

    /// The last look, or a new one; who comes meanwhile waits for it.
    pub async fn look(&self, known: &Known) -> Arc<EnginesSeen> {
        let mut last = self.last.lock().await;
        if let Some((at, seen)) = &*last
            && at.elapsed() < FRESH
        {
            return Arc::clone(seen);
        }
        let seen = Arc::new(self.look_now(known).await);
        *last = Some((Instant::now(), Arc::clone(&seen)));
        seen
    }

    async fn look_now(&self, known: &Known) -> EnginesSeen {
        let until = Instant::now() + ANSWER_MAX;
        let (database, queue, limiter, used, queues) = tokio::join!(
            round_trip(until, async { self.settings.version().await.is_ok() }),
            round_trip(until, async { self.queue.ping().await.is_ok() }),
            round_trip(until, async { self.limiter.ping().await.is_ok() }),
            self.used(known, until),
            self.queues(known, until),
        );
        EnginesSeen {
            dependencies: [("database", database), ("queue", queue), ("limiter", limiter)],
            queues,
            limits: limits(known, &used),
        }
    }

    /// What lies in each provider's queue, also of those that are disabled.
    async fn queues(&self, known: &Known, until: Instant) -> Vec<QueueSeen> {
        let look = |name: ProviderName| async move {
            let ready = timeout_at(until, self.queue.depth(&name)).await.ok().and_then(Result::ok).flatten();
            let oldest = timeout_at(until, self.queue.oldest_ready(&name)).await.ok().and_then(Result::ok).flatten();
            QueueSeen { provider: name.to_string(), ready, oldest }
        };
        let names: Vec<ProviderName> = known.providers.keys().cloned().collect();
        stream::iter(names).map(look).buffered(AT_ONCE).collect().await
    }

    /// What each limit of each quota holds; quotas that do not answer in time are left out.
    async fn used(&self, known: &Known, until: Instant) -> BTreeMap<ProviderName, Vec<LimitUse>> {
        let look = |spec: QuotaSpec| async move {
            let used = timeout_at(until, self.limiter.peek(&spec, None)).await.ok()?.ok()?;
            Some((spec.quota, used))
        };
        let specs: Vec<QuotaSpec> = quota_specs(known).into_iter().filter_map(|quota| quota.spec).collect();
        stream::iter(specs).map(look).buffer_unordered(AT_ONCE).filter_map(async |used| used).collect().await
    }
}

/// How long an answer took; `None` when there was none, or a bad one.
async fn round_trip(until: Instant, answers: impl Future<Output = bool>) -> Option<Duration> {
    let asked = Instant::now();
    timeout_at(until, answers).await.unwrap_or(false).then(|| asked.elapsed())
}

fn limits(known: &Known, used: &BTreeMap<ProviderName, Vec<LimitUse>>) -> Vec<LimitSeen> {
    let mut seen = Vec::new();
    for QuotaRows { quota, rows, spec } in quota_specs(known) {
        let Some(spec) = spec else { continue };
        let used = used.get(quota).map(Vec::as_slice).unwrap_or_default();
        for row in rows {
            seen.extend(spec.limits.iter().map(|limit| LimitSeen {
                provider: row.name.to_string(),
                limit: limit.name.clone(),
                scope: limit.scope,
                applies_to: limit.applies_to,
                shadow: limit.shadow,
                max_requests: limit.max_requests,
                capacity: limit.cost_max(),
                window: limit.window,
                used: used.iter().find(|used| used.name == limit.name).map(|used| used.used),
            }));
        }
    }
    seen
}

pub(super) fn write(writer: &mut Writer<'_>, seen: &EnginesSeen) -> Result<(), fmt::Error> {
    let of = |dependency: &str| vec![("dependency", dependency.to_owned())];
    writer.gauge(
        "dependency_up",
        "1 if the engine answered when it was last asked; asked at most every 5 seconds.",
        seen.dependencies.iter().map(|(name, took)| (of(name), f64::from(u8::from(took.is_some())))),
    )?;
    writer.gauge(
        "dependency_rtt_seconds",
        "How long the engine took to answer; absent while it does not.",
        seen.dependencies.iter().filter_map(|(name, took)| Some((of(name), took.as_ref()?.as_secs_f64()))),
    )?;
    let of = |seen: &QueueSeen| vec![("provider", seen.provider.clone())];
    writer.gauge(
        "queue_ready_messages",
        "Messages in the provider's queue that no worker has taken; absent while the broker does not say.",
        seen.queues.iter().filter_map(|seen| Some((of(seen), float(seen.ready?)))),
    )?;
    // Zero where nothing is ready: an age that goes away would leave an alert without its end.
    let oldest = |seen: &QueueSeen| seen.oldest.or((seen.ready == Some(0)).then_some(Duration::ZERO));
    writer.gauge(
        "queue_oldest_ready_age_seconds",
        "How long the message that has been ready longest has been so; 0 if none is, absent where the queue does not say.",
        seen.queues.iter().filter_map(|seen| Some((of(seen), oldest(seen)?.as_secs_f64()))),
    )?;
    let labels = |seen: &LimitSeen| -> Labels {
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
        "Requests that the limit allows in its window, after what is kept in reserve.",
        seen.limits.iter().map(|seen| (labels(seen), float(u64::from(seen.max_requests)))),
    )?;
    writer.gauge(
        "limit_window_seconds",
        "Length of the limit's window.",
        seen.limits.iter().map(|seen| (labels(seen), seen.window.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_capacity_requests",
        "Requests that may count under the limit at once: what it allows, or what its bucket holds.",
        seen.limits.iter().map(|seen| (labels(seen), float(u64::from(seen.capacity)))),
    )?;
    writer.gauge(
        "limit_in_use",
        "Requests that count under the limit now, of all workers; absent for limits by account or reference, and \
         while the limiter's store is away.",
        seen.limits.iter().filter_map(|seen| Some((labels(seen), float(seen.used?)))),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::domain::decision::{Call, Reply, Subject};
    use crate::ledger::database::Database;
    use crate::limiter::LimiterError;
    use crate::ops::peek::tests::known;
    use crate::queue::embedded::EmbeddedQueue;

    /// A store that never answers.
    #[derive(Default)]
    struct Silent(AtomicU32);

    #[async_trait]
    impl Limiter for Silent {
        async fn run_id(&self, _quota: &ProviderName) -> Result<String, LimiterError> {
            std::future::pending().await
        }

        async fn call(&self, _spec: &QuotaSpec, _call: &Call) -> Result<Reply, LimiterError> {
            std::future::pending().await
        }

        async fn peek(&self, _spec: &QuotaSpec, _of: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
            std::future::pending().await
        }

        async fn ping(&self) -> Result<Option<String>, LimiterError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }
    }

    #[tokio::test]
    async fn an_engine_that_does_not_answer_is_away_and_is_not_asked_again_at_once() {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let queue = Arc::new(EmbeddedQueue::new(database.sqlite_pool().unwrap()));
        let limiter = Arc::new(Silent::default());
        let engines = Engines::new(database.settings(), queue, limiter.clone());
        let rows = known();
        let (one, other) = tokio::join!(engines.look(&rows), engines.look(&rows));
        assert!(Arc::ptr_eq(&one, &other), "two scrapes at once are one look");
        let up: Vec<bool> = one.dependencies.iter().map(|(_, took)| took.is_some()).collect();
        assert_eq!((up.as_slice(), limiter.0.load(Ordering::Relaxed)), ([true, true, false].as_slice(), 1));
        // The limits are known all the same; what they hold is not.
        let queues: Vec<_> = one.queues.iter().map(|it| (it.provider.as_str(), it.ready, it.oldest)).collect();
        assert_eq!(queues, [("off", Some(0), None), ("plain", Some(0), None), ("scoped", Some(0), None)]);
        let limits: Vec<_> = one.limits.iter().map(|it| (it.provider.as_str(), it.limit.as_str(), it.used)).collect();
        assert_eq!(limits, [("plain", "all", None), ("scoped", "all", None), ("scoped", "each", None)]);
    }
}
