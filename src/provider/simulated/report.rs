//! Report of the strict provider, and the exact count of arrivals in every sliding window of every limit.
//!
//! The report has counts and times, as they are printed and served. It does not compare them with a promise. The reader
//! knows the limits that the worker was given.
//!
//! A window of length W that ends at t covers (t − W, t]: an arrival exactly W earlier is outside. A count can only
//! peak at an arrival, so the windows that end at an arrival are enough. An arrival costs constant time.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::domain::limit::Rate;
use crate::domain::time::micros_up;

/// Report of all requests, as `GET /_report` returns it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// All arrivals so far, and the current window of each limit.
#[derive(Debug)]
pub struct ArrivalWindows {
    /// Times in microseconds, ascending.
    arrivals: Vec<u64>,
    counts: Vec<LimitCount>,
}

/// Counts of one limit.
#[derive(Debug)]
pub struct LimitCount {
    pub limit: Rate,
    pub largest: u64,
    pub breaches: u64,
    /// Index of the oldest arrival in the current window.
    oldest: usize,
}

impl ArrivalWindows {
    pub fn new(limits: &[Rate]) -> Self {
        let counts = limits.iter().map(|limit| LimitCount { limit: *limit, largest: 0, breaches: 0, oldest: 0 });
        Self { arrivals: Vec::new(), counts: counts.collect() }
    }

    pub fn arrivals(&self) -> &[u64] {
        &self.arrivals
    }

    pub fn counts(&self) -> &[LimitCount] {
        &self.counts
    }

    /// Records an arrival, which must not be earlier than the last. If it breached a limit, returns the wait until the
    /// next one would fit within all limits.
    pub fn record_arrival(&mut self, at_us: u64) -> Option<Duration> {
        debug_assert!(self.arrivals.last().is_none_or(|last| *last <= at_us), "arrivals must be recorded in order");
        self.arrivals.push(at_us);
        let breached_before: u64 = self.counts.iter().map(|count| count.breaches).sum();
        for count in &mut self.counts {
            count.record_arrival(&self.arrivals, at_us);
        }
        let breached: u64 = self.counts.iter().map(|count| count.breaches).sum();
        // The next arrival may have to wait for a limit that this arrival only filled.
        let free_at_us = self.counts.iter().map(|count| count.free_at_us(&self.arrivals, at_us)).max()?;
        (breached > breached_before).then(|| Duration::from_micros(free_at_us.saturating_sub(at_us)))
    }
}

impl LimitCount {
    fn record_arrival(&mut self, arrivals: &[u64], at_us: u64) {
        let window_us = micros_up(self.limit.window());
        while arrivals[self.oldest] + window_us <= at_us {
            self.oldest += 1;
        }
        let in_window = (arrivals.len() - self.oldest) as u64;
        self.largest = self.largest.max(in_window);
        self.breaches += u64::from(in_window > u64::from(self.limit.max_requests()));
    }

    /// When the arrival that is `max_requests` from the end leaves the window. A closed limit never frees a slot; its
    /// wait is one window.
    fn free_at_us(&self, arrivals: &[u64], at_us: u64) -> u64 {
        let window_us = micros_up(self.limit.window());
        match usize::try_from(self.limit.max_requests()) {
            Ok(0) | Err(_) => at_us + window_us,
            Ok(slots) => arrivals.len().checked_sub(slots).map_or(0, |index| arrivals[index] + window_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let times = ResponseTimes::from_durations((1..=200).rev().map(|ms| ms * 1_000).collect()).unwrap();
        assert_eq!(times, ResponseTimes { mean: 100.5, p50: 100.0, p99: 198.0, max: 200.0 });
        assert_eq!(ResponseTimes::from_durations(vec![]), None);
        assert_eq!(ResponseTimes::from_durations(vec![7_000]).unwrap().p99, 7.0);
    }

    /// Breaches and the largest count, by looking at all arrivals for each arrival.
    fn recount(arrivals: &[u64], allowed: u64, window_us: u64) -> (u64, u64) {
        let in_window =
            |end: usize| arrivals[..=end].iter().filter(|arrival| arrivals[end] - **arrival < window_us).count() as u64;
        let counts = (0..arrivals.len()).map(in_window);
        counts.fold((0, 0), |(breaches, largest), count| (breaches + u64::from(count > allowed), largest.max(count)))
    }

    fn breaches(arrivals: &[u64], rates: &[Rate]) -> u64 {
        rates.iter().map(|rate| recount(arrivals, rate.max_requests().into(), micros_up(rate.window())).0).sum()
    }

    proptest! {
        #[test]
        fn the_books_agree_with_a_recount(
            gaps in prop::collection::vec(prop_oneof![Just(0_u64), Just(1_000), 0..3_000_u64], 1..120),
            limits in prop::collection::vec((0..6_u32, 1..8_u64), 1..4),
        ) {
            let rates: Vec<Rate> =
                limits.iter().map(|(n, ms)| Rate::new(*n, Duration::from_millis(*ms)).unwrap()).collect();
            let closed = rates.iter().any(|rate| rate.max_requests() == 0);
            let mut windows = ArrivalWindows::new(&rates);
            let mut now = 0;
            for gap in gaps {
                now += gap;
                let before = breaches(windows.arrivals(), &rates);
                let wait = windows.record_arrival(now);
                let after = breaches(windows.arrivals(), &rates);
                prop_assert_eq!(wait.is_some(), after > before);
                // After the named wait one more fits, unless a limit is closed; a microsecond sooner it would not.
                let fits = |at: u64| breaches(&[windows.arrivals(), &[at]].concat(), &rates) == after;
                if let Some(wait) = wait {
                    prop_assert!(closed || fits(now + micros_up(wait)));
                    prop_assert!(!fits(now + micros_up(wait) - 1));
                }
            }
            for count in windows.counts() {
                let wanted =
                    recount(windows.arrivals(), count.limit.max_requests().into(), micros_up(count.limit.window()));
                prop_assert_eq!((count.breaches, count.largest), wanted);
            }
        }
    }

    #[test]
    fn a_window_is_half_open() {
        let mut windows = ArrivalWindows::new(&["2/1s".parse().unwrap()]);
        for (at_us, wait_us) in
            [(0, None), (400_000, None), (999_999, Some(400_001)), (1_400_000, None), (1_999_999, None)]
        {
            assert_eq!(windows.record_arrival(at_us), wait_us.map(Duration::from_micros), "{at_us}");
        }
        assert_eq!((windows.counts()[0].breaches, windows.counts()[0].largest), (1, 3));
    }
}
