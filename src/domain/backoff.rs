//! Wait before a job's next attempt: exponential growth, with jitter in the upper half of each step.
//!
//! Only this file uses the `backoff` crate, and only its schedule: no clock, no loop, no retry. The crate is
//! unmaintained (RUSTSEC-2025-0012). To replace it, compute `base * 2^(n-1)` in [`BackoffPolicy::delay`].

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// A provider's retry schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackoffPolicy {
    pub base: Duration,
    pub max: Duration,
}

impl BackoffPolicy {
    /// Wait after the `failed`-th attempt (counted from 1): between half and all of the schedule's step. `fraction` is
    /// a random number in 0..1 from the caller.
    pub fn delay(&self, failed: u32, fraction: f64) -> Duration {
        let mut schedule = ExponentialBackoff {
            current_interval: self.base,
            initial_interval: self.base,
            randomization_factor: 0.0,
            multiplier: 2.0,
            max_interval: self.max,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        };
        let mut step = self.base;
        // The schedule is flat after its maximum; 32 doublings reach every maximum.
        for _ in 0..failed.clamp(1, 32) {
            step = schedule.next_backoff().unwrap_or(self.max);
        }
        step.min(self.max).mul_f64(0.5 + 0.5 * fraction.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_its_maximum() {
        let policy = BackoffPolicy { base: Duration::from_millis(500), max: Duration::from_secs(60) };
        let whole: Vec<u64> =
            (1..=9).map(|failed| u64::try_from(policy.delay(failed, 1.0).as_millis()).unwrap()).collect();
        assert_eq!(whole, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]);
        assert_eq!(policy.delay(3, 0.0), Duration::from_secs(1));
        assert_eq!(policy.delay(u32::MAX, 1.0), Duration::from_secs(60));
    }
}
