//! The check whether the loops of this worker respond, for a watchdog that restarts a stuck process.
//!
//! A timer of its own would only show that timers run. So the check asks the gates, through which each request passes,
//! and looks at the heartbeat's last round. Both loops have timeouts for their backends, so an unavailable backend does
//! not look like a stuck worker. The ops server is not asked: clients that hold all its connections must not end a
//! worker that pays.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::supervisor::WorkerStatus;
use crate::domain::provider::ProviderName;
use crate::limiter::gate::Gate;

/// A loop that does not respond.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StuckLoop {
    #[error("the gate of provider {0} does not respond")]
    Gate(ProviderName),
    #[error("no heartbeat for {} s", .0.as_secs())]
    Heartbeat(Duration),
}

/// Checks the loops of the worker with this status.
///
/// # Errors
/// When one of them does not respond within the time.
pub async fn check(status: &watch::Receiver<WorkerStatus>, within: Duration) -> Result<(), StuckLoop> {
    let (meter, gates) = {
        let status = status.borrow();
        (status.meter.clone(), status.gates.clone())
    };
    // None before the first: a worker that waits for its database has no heartbeat yet.
    if let Some(silent) = meter.since_backends_checked().filter(|silent| *silent > within) {
        return Err(StuckLoop::Heartbeat(silent));
    }
    let deadline = Instant::now() + within;
    // Providers of one quota share a gate, which is asked once.
    let mut asked: Vec<&Gate> = Vec::new();
    for (provider, gate) in gates.iter() {
        if asked.iter().any(|other| other.same_queue(gate)) {
            continue;
        }
        timeout_at(deadline, gate.ping()).await.map_err(|_| StuckLoop::Gate(provider.clone()))?;
        asked.push(gate);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use async_trait::async_trait;
    use parking_lot::Mutex;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::domain::permit_protocol::{CallKind, CostByKind, LimiterCall, LimiterReply, PastUse, Subject};
    use crate::domain::quota_spec::{Lookback, QuotaSpec};
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::limiter::embedded::EmbeddedLimiter;
    use crate::limiter::gate::{AcquireRequest, GateContext};
    use crate::limiter::{LimitStatus, Limiter, LimiterError, RecentAttempts};
    use crate::worker::quotas::quota_specs;
    use crate::worker::settings_sync::LoadedSettings;

    const WITHIN: Duration = Duration::from_millis(300);

    struct NoAttempts;

    #[async_trait]
    impl RecentAttempts for NoAttempts {
        async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
            Ok((Vec::new(), CostByKind::default()))
        }
    }

    /// A limiter whose calls block their thread while the lock is held, as a deadlock would.
    struct Deadlocked {
        inner: EmbeddedLimiter,
        lock: Arc<Mutex<()>>,
    }

    #[async_trait]
    impl Limiter for Deadlocked {
        async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
            self.inner.run_id(quota).await
        }

        async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
            drop(self.lock.lock());
            self.inner.call(spec, call).await
        }

        async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
            self.inner.peek(spec, subject).await
        }
    }

    fn spec() -> QuotaSpec {
        let limits =
            vec![LimitRow { name: "all".to_owned(), max_requests: 9, window_ms: 1_000, ..LimitRow::default() }];
        let (name, url) = ("acme".to_owned(), "https://pay.example/".to_owned());
        let provider = Arc::new(ProviderRow { name, url, limits, ..ProviderRow::default() }.validate(1).unwrap());
        let providers = BTreeMap::from([(provider.name.clone(), provider)]);
        let settings = LoadedSettings { version: 1, providers, ..LoadedSettings::default() };
        quota_specs(&settings).into_iter().find_map(|rows| rows.spec).unwrap()
    }

    /// A gate on that limiter, which lives as long as the sender of its settings.
    fn gate(lock: &Arc<Mutex<()>>) -> (Gate, watch::Sender<Arc<QuotaSpec>>) {
        let (sender, spec) = watch::channel(Arc::new(spec()));
        let limiter = Arc::new(Deadlocked { inner: EmbeddedLimiter::new(), lock: Arc::clone(lock) });
        let (recent, stop) = (Arc::new(NoAttempts), CancellationToken::new());
        let context = GateContext { limiter, recent, spec, incarnation: 1, stop, on_newer_version: Arc::new(|_| {}) };
        let (gate, task) = Gate::new(context);
        tokio::spawn(task);
        (gate, sender)
    }

    fn status(gate: Gate) -> watch::Receiver<WorkerStatus> {
        let gates = BTreeMap::from([(ProviderName::new("acme").unwrap(), gate)]);
        watch::channel(WorkerStatus { gates: Arc::new(gates), ..WorkerStatus::default() }).1
    }

    /// The watchdog's timer runs, so it would notice nothing. It has a runtime of its own here: the thread that is
    /// blocked may be the one that was to wait for the timers of its runtime next, and then none of them fires.
    #[test]
    fn a_stuck_gate_is_found_though_timers_run() {
        let workers = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let watchdog = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let lock = Arc::new(Mutex::new(()));
        let (gate, _settings) = workers.block_on(async { gate(&lock) });
        let status = status(gate.clone());
        let is_alive = |within| watchdog.block_on(check(&status, within));
        assert_eq!(is_alive(Duration::from_secs(30)), Ok(()));
        let held = lock.lock();
        let request = AcquireRequest::new(1, CallKind::Charge, Instant::now() + Duration::from_secs(30));
        let waiting = workers.spawn(async move { gate.acquire(request).await });
        // The gate calls its limiter for the request, at once or within its batch delay.
        let deadline = Instant::now() + Duration::from_secs(30);
        while is_alive(WITHIN).is_ok() {
            assert!(Instant::now() < deadline, "the gate does not call its limiter");
        }
        assert_eq!(is_alive(WITHIN), Err(StuckLoop::Gate(ProviderName::new("acme").unwrap())));
        drop(held);
        workers.block_on(waiting).unwrap();
        assert_eq!(is_alive(Duration::from_secs(30)), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_heartbeat_is_found() {
        let (_, status) = watch::channel(WorkerStatus::default());
        let meter = Arc::clone(&status.borrow().meter);
        assert_eq!(check(&status, WITHIN).await, Ok(()), "the worker starts");
        meter.record_backends(&BTreeMap::new());
        assert_eq!(check(&status, WITHIN).await, Ok(()));
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(check(&status, WITHIN).await, Err(StuckLoop::Heartbeat(Duration::from_secs(7))));
    }
}
