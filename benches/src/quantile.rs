//! Percentiles of single values, and of counts in buckets.
//!
//! Between two bounds it interpolates linearly; beyond the last bound it returns that bound.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Values by their size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Upper bounds in microseconds, ascending.
    pub bounds_us: Vec<u64>,
    /// One count per bound, and one of what exceeds the last; not cumulative.
    pub counts: Vec<u64>,
}

impl Distribution {
    /// Reads a histogram of seconds from its text, which alone has its buckets.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounds are microseconds to seconds")]
    pub fn read(histogram: &Histogram) -> Self {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("h", "", histogram.clone());
        // Only a writer can fail, and this one is a string.
        let _ = encode(&mut text, &registry);
        let (mut read, mut below) = (Self::default(), 0);
        let buckets = text.lines().filter_map(|line| line.strip_prefix("h_bucket{le=\"")?.split_once("\"} "));
        for (bound_s, cumulative) in buckets {
            let bound_s: f64 = bound_s.parse().unwrap_or(f64::INFINITY);
            read.bounds_us.extend(bound_s.is_finite().then(|| (bound_s * 1e6).round() as u64));
            let cumulative: u64 = cumulative.parse().unwrap_or(below);
            read.counts.push(cumulative - below);
            below = cumulative;
        }
        read
    }
}

/// The nearest-rank percentile of sorted values; 0 if there are none.
pub fn nearest_rank(sorted: &[u64], percent: usize) -> u64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(0)
}

/// The sum of several distributions with the same bounds.
pub fn sum(all: impl IntoIterator<Item = Distribution>) -> Distribution {
    all.into_iter().fold(Distribution::default(), |mut sum, part| {
        if sum.counts.is_empty() {
            return part;
        }
        sum.counts.iter_mut().zip(&part.counts).for_each(|(count, more)| *count += more);
        sum
    })
}

/// A distribution without a part of it that was counted at the same time or earlier.
pub fn subtract(all: &Distribution, part: &Distribution) -> Distribution {
    let counts = all.counts.iter().zip(part.counts.iter().chain(std::iter::repeat(&0)));
    let counts = counts.map(|(all, part)| all.saturating_sub(*part)).collect();
    Distribution { bounds_us: all.bounds_us.clone(), counts }
}

/// The value in µs below which this share (0 to 1) of the values is.
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn quantile_us(counted: &Distribution, share: f64) -> f64 {
    let total: u64 = counted.counts.iter().sum();
    let wanted = total as f64 * share;
    let (mut below, mut lower_us) = (0.0, 0.0);
    for (bound_us, count) in counted.bounds_us.iter().zip(&counted.counts) {
        let (upper_us, here) = (*bound_us as f64, *count as f64);
        if below + here >= wanted && here > 0.0 {
            return lower_us + (upper_us - lower_us) * ((wanted - below) / here);
        }
        (below, lower_us) = (below + here, upper_us);
    }
    lower_us
}

/// The share (0 to 1) of values up to a bound; exact if the bound is one of the distribution's.
#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
pub fn share_within(counted: &Distribution, most_us: u64) -> f64 {
    let total: u64 = counted.counts.iter().sum();
    let counted = counted.bounds_us.iter().zip(&counted.counts).filter(|(bound_us, _)| **bound_us <= most_us);
    let within: u64 = counted.map(|(_, count)| *count).sum();
    if total == 0 { 0.0 } else { within as f64 / total as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_where_the_counts_do() {
        let one = Distribution { bounds_us: vec![100, 200, 400], counts: vec![50, 40, 9, 1] };
        assert!((quantile_us(&one, 0.5) - 100.0).abs() < 1e-9);
        assert!((quantile_us(&one, 0.7) - 150.0).abs() < 1e-9);
        assert!((quantile_us(&one, 0.99) - 400.0).abs() < 1e-9);
        assert!((quantile_us(&one, 1.0) - 400.0).abs() < 1e-9, "beyond the last bound nothing is known");
        assert!((share_within(&one, 200) - 0.9).abs() < 1e-9);
        let two = sum([one.clone(), one.clone()]);
        assert_eq!(two.counts, [100, 80, 18, 2]);
        assert_eq!((subtract(&two, &one), subtract(&one, &Distribution::default())), (one.clone(), one.clone()));
        assert!(quantile_us(&Distribution::default(), 0.5).abs() < 1e-9 && share_within(&sum([]), 1).abs() < 1e-9);
    }

    #[test]
    fn histogram_is_read_by_its_buckets() {
        let histogram = Histogram::new([0.0001, 0.0006, 1.0]);
        [0.0001, 0.00011, 0.0006, 1.1].into_iter().for_each(|value| histogram.observe(value));
        let expected = Distribution { bounds_us: vec![100, 600, 1_000_000], counts: vec![1, 2, 0, 1] };
        assert_eq!(Distribution::read(&histogram), expected);
    }

    #[test]
    fn ranks_are_nearest() {
        let values: Vec<u64> = (1..=200).collect();
        assert_eq!([50, 99, 100].map(|percent| nearest_rank(&values, percent)), [100, 198, 200]);
        assert_eq!(nearest_rank(&[], 50), 0);
    }
}
