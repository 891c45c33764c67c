//! Report of the strict provider: its counts and times, as they are printed and served.
//!
//! It does not compare them with a promise. The reader knows the limits that the worker was given.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Report of all requests, as `GET /_report` returns it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FakeProviderReport {
    /// All requests that arrived, also refused and failed ones.
    pub requests: u64,
    /// Payments charged at least once.
    pub charges: u64,
    /// Payments charged more than once.
    pub doubles: u64,
    /// Ids of up to 20 of them.
    pub double_ids: Vec<String>,
    /// Payments charged or declined under more than one idempotency key.
    pub several_keys: u64,
    pub declines: u64,
    /// Responses repeated for a known idempotency key.
    pub replays: u64,
    /// Look-ups that were not refused, with any result.
    #[serde(default)]
    pub lookups: u64,
    /// Requests that were processed, but whose connection was dropped instead of a response.
    pub lost_answers: u64,
    pub refused_429: u64,
    /// Most requests in flight at once, with those that were refused for being too many.
    #[serde(default)]
    pub largest_in_flight: u64,
    /// Requests beyond `--concurrency`.
    #[serde(default)]
    pub in_flight_breaches: u64,
    /// Responses by HTTP status.
    pub statuses: BTreeMap<u16, u64>,
    pub limits: Vec<LimitReport>,
    /// Times from receipt to response; `None` before the first response.
    pub answer_ms: Option<ResponseTimes>,
    /// Microseconds since the provider started.
    pub first_arrival_us: Option<u64>,
    pub last_arrival_us: Option<u64>,
    /// Rate between the first arrival and the last; 0 with fewer than two.
    pub rate_per_second: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    /// The limit as configured: `100/1s`.
    pub limit: String,
    /// Most arrivals in any window.
    pub largest: u64,
    /// Arrivals that found the window full.
    pub breaches: u64,
}

/// Response times in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResponseTimes {
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl ResponseTimes {
    /// Nearest-rank percentiles over durations in microseconds.
    pub(super) fn from_durations(mut durations_us: Vec<u32>) -> Option<Self> {
        durations_us.sort_unstable();
        let max = f64::from(*durations_us.last()?) / 1_000.0;
        let total: u64 = durations_us.iter().copied().map(u64::from).sum();
        let rank = |percent: usize| {
            let index = (durations_us.len() * percent).div_ceil(100).saturating_sub(1);
            f64::from(durations_us[index]) / 1_000.0
        };
        let mean = total as f64 / durations_us.len() as f64 / 1_000.0;
        Some(Self { mean, p50: rank(50), p99: rank(99), max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let times = ResponseTimes::from_durations((1..=200).rev().map(|ms| ms * 1_000).collect()).unwrap();
        assert_eq!(times, ResponseTimes { mean: 100.5, p50: 100.0, p99: 198.0, max: 200.0 });
        assert_eq!(ResponseTimes::from_durations(vec![]), None);
        assert_eq!(ResponseTimes::from_durations(vec![7_000]).unwrap().p99, 7.0);
    }
}
