//! Arrivals and latencies of a simulation: when jobs come, with their accounts, costs and priorities, and how long
//! responses take.
//!
//! Jobs come all at once, at random at a mean rate, or as recorded. A run has at most [`JOBS_MAX`] jobs, because they
//! are kept in memory. A latency is constant, uniform between two bounds, lognormal by two percentiles, or drawn from
//! observations. Invalid input is an error: a range that ends before it begins, a 95th percentile below the median, or
//! no observation.

use std::collections::HashMap;
use std::str::FromStr;
use std::time::Duration;

use rand::Rng;

use crate::domain::time::{micros_up, parse_duration};

/// Most jobs of one run.
pub const JOBS_MAX: usize = 10_000_000;

/// One job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobArrival {
    /// Time since the start.
    pub at_us: u64,
    /// Index into [`JobArrivals::accounts`].
    pub account: Option<u32>,
    pub cost: u16,
    pub priority: u8,
    /// Time since the start from which the job must not be sent.
    pub expires_us: Option<u64>,
}

impl JobArrival {
    /// A job without account, of cost 1 and priority 0.
    pub fn at(at_us: u64) -> Self {
        Self { at_us, account: None, cost: 1, priority: 0, expires_us: None }
    }
}

/// Jobs sorted by their arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobArrivals {
    jobs: Vec<JobArrival>,
    accounts: Vec<String>,
    known: HashMap<String, u32>,
}

impl JobArrivals {
    /// Arrivals from jobs in any order.
    pub fn new(mut jobs: Vec<JobArrival>) -> Self {
        jobs.sort_by_key(|job| job.at_us);
        Self { jobs, ..Self::default() }
    }

    /// `jobs` jobs at the start, at most [`JOBS_MAX`].
    pub fn burst(jobs: usize) -> Self {
        Self::new(vec![JobArrival::at(0); jobs.min(JOBS_MAX)])
    }

    /// Independent arrivals at this mean rate (a Poisson process). Generation stops at one job more than [`JOBS_MAX`].
    pub fn at_rate(per_second: f64, lasting: Duration, rng: &mut impl Rng) -> Self {
        let mut jobs = Vec::new();
        let end_us = micros_up(lasting);
        let mut at_seconds = 0.0_f64;
        while per_second > 0.0 && jobs.len() <= JOBS_MAX {
            at_seconds += -(1.0 - rng.random::<f64>()).ln() / per_second;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive; saturates")]
            let at_us = (at_seconds * 1e6) as u64;
            if at_us >= end_us {
                break;
            }
            jobs.push(JobArrival::at(at_us));
        }
        Self::new(jobs)
    }

    /// The index of an account's name, for [`JobArrival::account`].
    pub fn account(&mut self, name: &str) -> u32 {
        if let Some(index) = self.known.get(name) {
            return *index;
        }
        let index = u32::try_from(self.accounts.len()).unwrap_or(u32::MAX);
        self.accounts.push(name.to_owned());
        self.known.insert(name.to_owned(), index);
        index
    }

    /// Adds jobs in any order.
    pub fn add(&mut self, jobs: impl IntoIterator<Item = JobArrival>) {
        self.jobs.extend(jobs);
        self.jobs.sort_by_key(|job| job.at_us);
    }

    pub fn jobs(&self) -> &[JobArrival] {
        &self.jobs
    }

    pub fn accounts(&self) -> &[String] {
        &self.accounts
    }
}

/// The 95th percentile of the standard normal distribution.
const Z_95: f64 = 1.644_853_626_951_472_7;

/// Mark that spreadsheets write before the first line.
pub const BYTE_ORDER_MARK: char = '\u{feff}';

/// A distribution of durations, in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub enum LatencyModel {
    Constant(u64),
    Uniform {
        least_us: u64,
        most_us: u64,
    },
    /// Mean and deviation are those of the logarithm of microseconds.
    LogNormal {
        mean: f64,
        deviation: f64,
    },
    /// Each of these with the same probability; never empty.
    Observed(Vec<u64>),
}

impl LatencyModel {
    /// Parses measured durations: one per line in milliseconds (decimals allowed), after an optional title.
    ///
    /// # Errors
    /// If a line is invalid; the error names the first one.
    pub fn observed(csv: &str) -> Result<Self, String> {
        let mut observed = Vec::new();
        for (index, line) in csv.trim_start_matches(BYTE_ORDER_MARK).lines().enumerate() {
            let cell = line.split(',').next().unwrap_or_default().trim();
            if cell.is_empty() {
                continue;
            }
            match cell.parse::<f64>() {
                Ok(ms) if (0.0..=3_600_000.0).contains(&ms) => observed.push(rounded(ms * 1_000.0)),
                _ if index == 0 => {}
                _ => return Err(format!("line {}: `{cell}` is not a time in milliseconds", index + 1)),
            }
        }
        if observed.is_empty() {
            Err("holds no latency: write one time in milliseconds per line".to_owned())
        } else {
            Ok(Self::Observed(observed))
        }
    }

    /// Draws one duration, in microseconds.
    pub fn draw(&self, rng: &mut impl Rng) -> u64 {
        match self {
            Self::Constant(us) => *us,
            Self::Uniform { least_us, most_us } => rng.random_range(*least_us..=*most_us),
            Self::LogNormal { mean, deviation } => rounded((mean + deviation * standard_normal(rng)).exp()),
            Self::Observed(observed) => {
                observed.get(rng.random_range(0..observed.len().max(1))).copied().unwrap_or_default()
            }
        }
    }
}

impl FromStr for LatencyModel {
    type Err = String;

    /// Parses `100ms`, `20ms..80ms` or `p50=80ms,p95=300ms`; µs as `us`.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((least, most)) = text.split_once("..") {
            let (least_us, most_us) = (micros(least)?, micros(most)?);
            if least_us > most_us {
                return Err(format!("`{text}` ends before it begins: write the shorter time first"));
            }
            return Ok(Self::Uniform { least_us, most_us });
        }
        if !text.contains('=') {
            return micros(text).map(Self::Constant);
        }
        let halves = text.split_once(',').and_then(|(first, second)| {
            let of = |name: &str| [first, second].into_iter().find_map(|half| half.trim().strip_prefix(name));
            Some((of("p50=")?, of("p95=")?))
        });
        let (median, high) = halves.ok_or_else(|| format!("`{text}`: write p50=80ms,p95=300ms"))?;
        let (median_us, high_us) = (micros(median)?, micros(high)?);
        if median_us == 0 || high_us < median_us {
            return Err(format!("`{text}`: p50 must be above 0 and p95 not below it"));
        }
        #[allow(clippy::cast_precision_loss, reason = "microseconds of hours stay far below 2^53")]
        let (mean, high) = ((median_us as f64).ln(), (high_us as f64).ln());
        Ok(Self::LogNormal { mean, deviation: (high - mean) / Z_95 })
    }
}

fn micros(text: &str) -> Result<u64, String> {
    match text.strip_suffix("us") {
        Some(us) => us.parse().map_err(|_| format!("`{text}` is not a duration: write 100ms or 250us")),
        None => parse_duration(text).map(micros_up).map_err(|problem| problem.to_string()),
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped; an hour is longer than any timeout"
)]
fn rounded(us: f64) -> u64 {
    us.round().clamp(0.0, 3.6e9) as u64
}

/// Standard normal variate by Box and Muller; only one of the pair is used.
fn standard_normal(rng: &mut impl Rng) -> f64 {
    let (radius, angle): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn arrival_rate_is_kept_and_reproducible() {
        let arrivals = |seed| JobArrivals::at_rate(50.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(seed));
        let jobs = arrivals(1).jobs().len();
        assert!(jobs.abs_diff(30_000) < 700, "{jobs}");
        assert_eq!(arrivals(1), arrivals(1));
        assert_ne!(arrivals(1), arrivals(2));
        assert!(arrivals(1).jobs().is_sorted_by_key(|job| job.at_us));
        assert!(JobArrivals::at_rate(0.0, Duration::from_secs(600), &mut StdRng::seed_from_u64(1)).jobs().is_empty());
    }

    fn percentiles(latency: &str) -> (u64, u64) {
        let latency: LatencyModel = latency.parse().unwrap();
        let mut rng = StdRng::seed_from_u64(3);
        let mut drawn: Vec<u64> = (0..20_000).map(|_| latency.draw(&mut rng)).collect();
        drawn.sort_unstable();
        (drawn[10_000], drawn[19_000])
    }

    #[test]
    fn lognormal_matches_the_given_percentiles() {
        let (median_us, high_us) = percentiles("p50=80ms,p95=300ms");
        assert!(median_us.abs_diff(80_000) < 2_500, "{median_us}");
        assert!(high_us.abs_diff(300_000) < 15_000, "{high_us}");
    }

    #[test]
    fn bounds_hold_and_invalid_text_is_rejected() {
        let (median_us, high_us) = percentiles("20ms..80ms");
        assert!(median_us.abs_diff(50_000) < 1_500 && high_us.abs_diff(77_000) < 1_500, "{median_us} {high_us}");
        assert_eq!(percentiles("250us"), (250, 250));
        assert_eq!(percentiles("p95=300ms,p50=80ms"), percentiles("p50=80ms,p95=300ms"));
        let error = "80..20".parse::<LatencyModel>().unwrap_err();
        assert!(error.contains("`80` has no unit: write 80ms"), "{error}");
        for bad in
            ["", "80", "80ms..20ms", "p50=80ms", "p50=80ms,p50=90ms", "p50=80ms,p95=20ms", "p50=0ms,p95=1ms", "-1ms"]
        {
            assert!(bad.parse::<LatencyModel>().is_err(), "{bad}");
        }
    }

    #[test]
    fn observations_are_read_with_optional_header() {
        assert_eq!(LatencyModel::observed("latency_ms\n1.5\n2\n").unwrap(), LatencyModel::Observed(vec![1_500, 2_000]));
        assert_eq!(LatencyModel::observed("\u{feff}1.5\n2\n").unwrap(), LatencyModel::Observed(vec![1_500, 2_000]));
        assert_eq!(LatencyModel::observed("7,ignored\n").unwrap(), LatencyModel::Observed(vec![7_000]));
        assert_eq!(LatencyModel::observed("ms\n1\nx\n").unwrap_err(), "line 3: `x` is not a time in milliseconds");
        assert!(LatencyModel::observed("ms\n").is_err());
    }
}
