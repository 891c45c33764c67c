//! The crowd benchmark: a thousand tasks of one process that wait for a slow limit, and the calls that they cost Redis.
//!
//! It uses the worker's gate with the worker's Redis limiter.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::BenchError;
use super::contender::BenchQuota;
use super::meter::RedisMeter;
use super::ours;
use super::report::{FigureName, Median};
use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::permit_protocol::{CallKind, CostByKind, PastUse};
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::limiter::RecentAttempts;
use sluicegate::limiter::gate::{AcquireRequest, AcquireResult, Gate, GateContext};
use sluicegate::limiter::redis::client::RedisLimiter;

pub const TASKS: usize = 1_000;
pub const LIMIT: u32 = 100;
pub const WINDOW: Duration = Duration::from_secs(1);
/// Longest time to the first permit: the limiter has a cold start, and its gate waits before it reads the ledger.
const FIRST_PERMIT_MAX: Duration = Duration::from_secs(30);
/// Long enough that no task times out.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

/// A ledger without recent requests.
struct EmptyHistory;

#[async_trait]
impl RecentAttempts for EmptyHistory {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

/// Counts calls to Redis and permits while the crowd waits.
///
/// # Errors
/// When the server fails, or the crowd is granted nothing.
pub async fn measure(meter: &RedisMeter, url: &str, prefix: &str, time: Duration) -> Result<Median, BenchError> {
    let run_id = meter.run_id.clone();
    let quota = BenchQuota { prefix: prefix.to_owned(), max_requests: LIMIT, window: WINDOW, version: 1, run_id };
    let (_settings, spec) = watch::channel(Arc::new(ours::spec(Algorithm::SlidingLog, &quota)?));
    let limiter = RedisLimiter::new(url, prefix).map_err(|error| BenchError::InvalidMeasurement(error.to_string()))?;
    let stop = CancellationToken::new();
    let parts = GateContext {
        limiter: Arc::new(limiter),
        recent: Arc::new(EmptyHistory),
        spec,
        incarnation: 1,
        stop: stop.clone(),
        on_newer_version: Arc::new(|_| {}),
    };
    let (gate, running) = Gate::new(parts);
    let (granted, permits) = watch::channel(0_u64);
    let granted = Arc::new(granted);
    let mut tasks = JoinSet::new();
    tasks.spawn(running);
    for task in 0..TASKS as u64 {
        // 20 to 80 ms, different for each task: simultaneous responses would be released in one batch.
        let latency = Duration::from_millis(20 + task * 37 % 61);
        tasks.spawn(acquire_in_a_loop(gate.clone(), latency, granted.clone()));
    }
    let counted = count(meter, permits, time).await;
    stop.cancel();
    tasks.shutdown().await;
    counted
}

/// One task of the crowd: waits for a permit, starts at its time, gets a response after `latency`, and queues again.
async fn acquire_in_a_loop(gate: Gate, latency: Duration, granted: Arc<watch::Sender<u64>>) {
    let ask = || {
        let wait_until = Instant::now() + WAIT_MAX;
        AcquireRequest::new(1, CallKind::Charge, wait_until)
    };
    while let AcquireResult::Granted(permit) = gate.acquire(ask()).await {
        sleep_until(permit.start_at).await;
        if let Ok(in_flight) = permit.begin() {
            granted.send_modify(|granted| *granted += 1);
            sleep(latency).await;
            in_flight.release_used(Instant::now());
        }
    }
}

async fn count(meter: &RedisMeter, mut permits: watch::Receiver<u64>, time: Duration) -> Result<Median, BenchError> {
    let first = tokio::time::timeout(FIRST_PERMIT_MAX, permits.wait_for(|granted| *granted > 0)).await;
    if !first.is_ok_and(|first| first.is_ok()) {
        return Err(BenchError::InvalidMeasurement("the crowd was granted no permit".to_owned()));
    }
    let (before, permits_before, began) = (meter.usage("fcall").await?, *permits.borrow(), Instant::now());
    sleep(time).await;
    let (after, permits_after, elapsed) = (meter.usage("fcall").await?, *permits.borrow(), began.elapsed());
    let seconds = elapsed.as_secs_f64();
    let mut median = Median::default();
    median.add(FigureName::RedisCallsPerSecond, (after.calls - before.calls) as f64 / seconds);
    median.add(FigureName::PermitsPerSecond, (permits_after - permits_before) as f64 / seconds);
    Ok(median)
}
