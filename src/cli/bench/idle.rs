//! An idle lane: how long one job takes from its publish to its request on the wire.
//!
//! Refuses to load the lane: the next job is published only when the last has been settled and the lane was quiet for a
//! while that differs from job to job, so that no timer is met in step.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::BenchError;
use super::progress::Phase;
use super::quantile::nearest_rank;
use super::stage::{BenchEnvironment, BenchProvider};
use super::workers::BenchWorkers;
use crate::cli::{CommandError, Console};

/// Jobs before the first that counts: connections are opened, and a limiter warms up.
const WARM_UP: u64 = 5;
const WARM_UP_MAX: Duration = Duration::from_secs(60);
const ARRIVAL_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Quiet between two jobs: this long and up to as long again.
const QUIET: Duration = Duration::from_millis(15);

#[derive(Clone, Debug, Serialize)]
pub struct IdleLatency {
    pub jobs: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// Sends jobs one by one, as many as the time allows, and stops the workers.
///
/// # Errors
/// When a job does not arrive.
pub async fn measure(
    stage: &BenchEnvironment<'_>,
    lane: &BenchProvider,
    mut crew: BenchWorkers,
    jobs: u64,
    within: Duration,
    console: &mut Console,
) -> Result<IdleLatency, CommandError> {
    let mut phase = Phase::begin("jobs sent through an idle lane", jobs, console)?;
    for number in 1..=WARM_UP {
        measure_job(stage, lane, &mut crew, number, WARM_UP_MAX).await?;
    }
    let began = Instant::now();
    let mut latencies_us = Vec::new();
    for number in WARM_UP + 1..=WARM_UP + jobs {
        if began.elapsed() >= within && !latencies_us.is_empty() {
            break;
        }
        latencies_us.push(measure_job(stage, lane, &mut crew, number, ARRIVAL_MAX).await?);
        phase.show(latencies_us.len() as u64, console)?;
    }
    drop(phase);
    crew.stop().await?;
    latencies_us.sort_unstable();
    #[allow(clippy::cast_precision_loss, reason = "microseconds of seconds")]
    let ms = |percent| nearest_rank(&latencies_us, percent) as f64 / 1_000.0;
    Ok(IdleLatency { jobs: latencies_us.len() as u64, p50_ms: ms(50), p99_ms: ms(99), max_ms: ms(100) })
}

/// Sends the job of this number, the first being 1; µs from the beginning of its publish to its arrival.
async fn measure_job(
    stage: &BenchEnvironment<'_>,
    lane: &BenchProvider,
    crew: &mut BenchWorkers,
    number: u64,
    within: Duration,
) -> Result<u64, CommandError> {
    sleep(QUIET + QUIET.mul_f64(rand::random())).await;
    let (began, began_us) = (Instant::now(), lane.fake.now_us());
    stage.publish_one(lane, number).await?;
    // Each job arrives once, and none before the one before it was settled.
    while crew.finished(&lane.name) < number {
        crew.require_running()?;
        if began.elapsed() > within {
            return Err(BenchError::InvalidMeasurement(format!(
                "job {number} was not settled within {} s",
                within.as_secs()
            ))
            .into());
        }
        sleep(POLL_INTERVAL).await;
    }
    let arrival_us = lane.fake.report().last_arrival_us.unwrap_or(began_us);
    Ok(arrival_us.saturating_sub(began_us))
}
