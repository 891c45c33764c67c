//! Exact count of arrivals in every sliding window of every limit, at a constant cost per arrival.
//!
//! A window of length W that ends at t covers (t − W, t]: an arrival exactly W earlier is outside. A count can only
//! peak at an arrival, so the windows that end at an arrival are enough.

use std::time::Duration;

use crate::domain::limit::Rate;
use crate::domain::time::micros_up;

/// All arrivals so far, and the current window of each limit.
#[derive(Debug)]
pub(super) struct ArrivalWindows {
    /// Times in microseconds, ascending.
    arrivals: Vec<u64>,
    counts: Vec<LimitCount>,
}

/// Counts of one limit.
#[derive(Debug)]
pub(super) struct LimitCount {
    pub(super) limit: Rate,
    pub(super) largest: u64,
    pub(super) breaches: u64,
    /// Index of the oldest arrival in the current window.
    oldest: usize,
}

impl ArrivalWindows {
    pub(super) fn new(limits: &[Rate]) -> Self {
        let counts = limits.iter().map(|limit| LimitCount { limit: *limit, largest: 0, breaches: 0, oldest: 0 });
        Self { arrivals: Vec::new(), counts: counts.collect() }
    }

    pub(super) fn arrivals(&self) -> &[u64] {
        &self.arrivals
    }

    pub(super) fn counts(&self) -> &[LimitCount] {
        &self.counts
    }

    /// Records an arrival, which must not be earlier than the last. If it breached a limit, returns the wait until the
    /// next one would fit within all limits.
    pub(super) fn record_arrival(&mut self, at_us: u64) -> Option<Duration> {
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
