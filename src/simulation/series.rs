//! Time series of a run for plots: waiting jobs, and the rate of requests.
//!
//! It has no more points than a picture can show.

use serde::Serialize;

use super::JobArrivals;
use super::world::RunRecord;

/// Points of one line.
const POINTS: usize = 480;
/// Shortest step: below it a rate is mostly noise.
const STEP_MIN_US: u64 = 100_000;

/// Lines over the time from the start, in steps of the same length.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    pub step_ms: u64,
    pub points: Vec<SeriesPoint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SeriesPoint {
    /// End of the step, since the start.
    pub at_s: f64,
    /// Jobs that have arrived and have not ended.
    pub waiting: u64,
    /// Uses that the provider counted during the step, per second.
    pub rate_per_s: f64,
}

#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub(super) fn build(arrivals: &JobArrivals, record: &RunRecord, start_us: u64) -> Series {
    let ends = || record.jobs.iter().filter_map(|job| job.end.map(|(at_us, _)| at_us.saturating_sub(start_us)));
    let last_come = arrivals.jobs().last().map_or(0, |job| job.at_us);
    let last_us = ends().max().unwrap_or(0).max(last_come).max(1);
    let step_us = last_us.div_ceil(POINTS as u64).max(STEP_MIN_US).next_multiple_of(1_000);
    let steps = usize::try_from(last_us / step_us).unwrap_or(POINTS) + 1;
    let index = |at_us: u64| usize::try_from(at_us / step_us).unwrap_or(usize::MAX).min(steps - 1);
    let mut counts = vec![(0_u64, 0_u64, 0_u64); steps];
    arrivals.jobs().iter().for_each(|job| counts[index(job.at_us)].0 += 1);
    ends().for_each(|at_us| counts[index(at_us)].1 += 1);
    record.uses.iter().for_each(|provider_use| {
        counts[index(provider_use.at_us.saturating_sub(start_us))].2 += u64::from(provider_use.cost)
    });
    let mut waiting = 0_u64;
    let points = counts.into_iter().enumerate().map(|(step, (come, ended, uses))| {
        waiting = (waiting + come).saturating_sub(ended);
        let at_s = (step as u64 + 1) as f64 * step_us as f64 / 1e6;
        SeriesPoint { at_s, waiting, rate_per_s: uses as f64 * 1e6 / step_us as f64 }
    });
    Series { step_ms: step_us / 1_000, points: points.collect() }
}
