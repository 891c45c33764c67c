//! The idle-lane benchmark: the time from a job's publish to its request at the provider.
//!
//! Each job is published after the previous one is finished, and after a pause of random length. So the lane is idle,
//! and no timer runs in step with the jobs.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::BenchError;
use super::progress::Phase;
use super::quantile::nearest_rank;
use super::stage::{BenchEnvironment, BenchProvider};
use super::workers::BenchWorkers;
use sluicegate::cli::{CommandError, Console};

/// Jobs before the first measured one: connections are opened, and the limiter ends its cold start.
const WARM_UP: u64 = 5;
const WARM_UP_MAX: Duration = Duration::from_secs(60);
const ARRIVAL_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Pause between two jobs: this long and up to twice as long.
const QUIET: Duration = Duration::from_millis(15);

#[derive(Clone, Debug, Serialize)]
pub struct IdleLatency {
    pub jobs: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// Sends jobs one by one, up to `jobs` and within the time, and stops the workers.
pub async fn measure(
    stage: &BenchEnvironment<'_>,
    lane: &BenchProvider,
    mut workers: BenchWorkers,
    jobs: u64,
    within: Duration,
    console: &mut Console,
) -> Result<IdleLatency, CommandError> {
    let mut phase = Phase::begin("jobs sent through an idle lane", jobs, console)?;
    for number in 1..=WARM_UP {
        measure_job(stage, lane, &mut workers, number, WARM_UP_MAX).await?;
    }
    let began = Instant::now();
    let mut latencies_us = Vec::new();
    for number in WARM_UP + 1..=WARM_UP + jobs {
        if began.elapsed() >= within && !latencies_us.is_empty() {
            break;
        }
        latencies_us.push(measure_job(stage, lane, &mut workers, number, ARRIVAL_MAX).await?);
        phase.show(latencies_us.len() as u64, console)?;
    }
    drop(phase);
    workers.stop().await?;
    latencies_us.sort_unstable();
    #[allow(clippy::cast_precision_loss, reason = "microseconds of seconds")]
    let ms = |percent| nearest_rank(&latencies_us, percent) as f64 / 1_000.0;
    Ok(IdleLatency { jobs: latencies_us.len() as u64, p50_ms: ms(50), p99_ms: ms(99), max_ms: ms(100) })
}

/// Sends job `number` (from 1). Returns the µs from the start of its publish to its arrival.
async fn measure_job(
    stage: &BenchEnvironment<'_>,
    lane: &BenchProvider,
    workers: &mut BenchWorkers,
    number: u64,
    within: Duration,
) -> Result<u64, CommandError> {
    sleep(QUIET + QUIET.mul_f64(rand::random())).await;
    let (began, began_us) = (Instant::now(), lane.fake.now_us());
    stage.publish_one(lane, number).await?;
    // Each job arrives once, and only after the previous one is finished.
    while workers.finished(&lane.name) < number {
        workers.require_running()?;
        if began.elapsed() > within {
            return Err(BenchError::InvalidMeasurement(format!(
                "job {number} was not finished within {} s",
                within.as_secs()
            ))
            .into());
        }
        sleep(POLL_INTERVAL).await;
    }
    let arrival_us = lane.fake.report().last_arrival_us.unwrap_or(began_us);
    Ok(arrival_us.saturating_sub(began_us))
}
