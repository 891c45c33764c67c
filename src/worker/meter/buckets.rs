//! A histogram of durations over fixed bounds.
//!
//! It keeps counts alone, no single values. Its bounds never change, so counts of different times can be compared.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Durations, each counted at the first bound that it does not exceed.
#[derive(Debug)]
pub(super) struct Buckets {
    bounds_us: &'static [u64],
    counts: Box<[AtomicU64]>,
    sum_us: AtomicU64,
}

/// Counts until now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Upper bounds in microseconds, ascending.
    pub bounds_us: &'static [u64],
    /// One count per bound, and one of what exceeds the last; not cumulative.
    pub counts: Vec<u64>,
    pub sum_us: u64,
}

impl Buckets {
    pub fn new(bounds_us: &'static [u64]) -> Self {
        let counts = (0..=bounds_us.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds_us, counts, sum_us: AtomicU64::new(0) }
    }

    pub fn observe(&self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds_us.partition_point(|bound| *bound < us);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
            self.sum_us.fetch_add(us, Ordering::Relaxed);
        }
    }

    pub fn read(&self) -> Distribution {
        Distribution {
            bounds_us: self.bounds_us,
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

/// Bounds in microseconds from bounds in milliseconds.
pub(super) const fn ms<const N: usize>(bounds: [u64; N]) -> [u64; N] {
    let mut us = bounds;
    let mut at = 0;
    while at < N {
        us[at] = bounds[at] * 1_000;
        at += 1;
    }
    us
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_counts_in_its_first_bound() {
        const BOUNDS: [u64; 3] = ms([1, 10, 100]);
        let buckets = Buckets::new(&BOUNDS);
        for us in [0, 1_000, 1_001, 10_000, 100_000, 100_001, 5_000_000] {
            buckets.observe(Duration::from_micros(us));
        }
        let read = buckets.read();
        assert_eq!((read.counts.as_slice(), read.sum_us), ([2, 2, 1, 2].as_slice(), 5_212_002));
    }
}
