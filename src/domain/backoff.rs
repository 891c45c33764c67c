//! Retry policy of a provider: the wait before a job's next attempt, and the streak of consecutive 429s that lengthens
//! the wait where the provider names none.
//!
//! Only this file uses the `backoff` crate, and only its schedule: no clock, no loop, no retry. The crate is
//! unmaintained (RUSTSEC-2025-0012). To replace it, compute `base * 2^(n-1)` in [`BackoffPolicy::delay`].
//!
//! All requests that were under way when a 429 came are one generation. A hundred requests that are throttled together
//! ask for one wait, not for a hundred doublings. No limit is learned from 429s: the row belongs to the operator.

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

/// Settings of the provider row for look-ups of payments with unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupPolicy {
    /// Measured from the last charge of unknown outcome.
    pub give_up_after: Duration,
    pub resend_if_not_found: bool,
}

/// Settings of the provider row for retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub max_attempts: u32,
    pub max_age: Duration,
    pub backoff: BackoffPolicy,
    /// Time for which the provider remembers an idempotency key; `None`: it does not deduplicate.
    pub idempotency_retention: Option<Duration>,
    /// `None`: the provider has no look-up.
    pub lookup: Option<LookupPolicy>,
}

/// Generations of 429s for one kind of request at one provider. Instants are durations since any one origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleStreak {
    generations: u32,
    /// Requests that began earlier belong to a generation before the last.
    since: Duration,
    /// Requests that began earlier belong to the last generation.
    until: Duration,
}

impl ThrottleStreak {
    /// The generation, counted from 1 in a row, of a 429 whose request began then.
    pub fn generation(&self, began: Duration) -> u32 {
        if began < self.until { self.generations.max(1) } else { self.generations.saturating_add(1) }
    }

    /// Records that the wait for this generation ends at `until`.
    pub fn record_throttled(&mut self, generation: u32, until: Duration) {
        if generation > self.generations {
            self.since = self.until;
        }
        self.generations = self.generations.max(generation);
        self.until = self.until.max(until);
    }

    /// Records a request that began then and was let through: the next 429 is the first in a row. A charge takes longer
    /// than a 429, so this is known only after its generation was throttled.
    pub fn record_passed(&mut self, began: Duration) {
        if began >= self.since {
            self.generations = 0;
        }
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

    /// Instants are whole seconds. The wait for a 429 is one second per generation.
    #[derive(Clone, Copy, Debug)]
    enum ProviderAnswer {
        Throttled { began_s: u64, now_s: u64 },
        Passed { began_s: u64 },
    }

    fn generations(answers: &[ProviderAnswer]) -> Vec<u32> {
        let mut streak = ThrottleStreak::default();
        let mut generations = Vec::new();
        for answer in answers {
            match *answer {
                ProviderAnswer::Throttled { began_s, now_s } => {
                    let generation = streak.generation(Duration::from_secs(began_s));
                    streak.record_throttled(generation, Duration::from_secs(now_s + u64::from(generation)));
                    generations.push(generation);
                }
                ProviderAnswer::Passed { began_s } => streak.record_passed(Duration::from_secs(began_s)),
            }
        }
        generations
    }

    #[test]
    fn generations_are_counted_not_requests() {
        let refused = |began_s, now_s| ProviderAnswer::Throttled { began_s, now_s };
        let let_through = |began_s| ProviderAnswer::Passed { began_s };
        for (answers, expected, why) in [
            (&[refused(0, 1)][..], &[1][..], "the first"),
            (&[refused(0, 1), refused(0, 1), refused(1, 1)], &[1, 1, 1], "under way together"),
            (&[refused(0, 1), refused(2, 3), refused(5, 6)], &[1, 2, 3], "each after the wait for the one before"),
            (&[refused(0, 1), refused(2, 3), refused(2, 4), refused(5, 5)], &[1, 2, 2, 2], "the later wait holds"),
            (&[refused(0, 1), refused(2, 3), let_through(5), refused(5, 6)], &[1, 2, 1], "one was let through"),
            (&[refused(0, 1), let_through(0), refused(2, 3)], &[1, 1], "some of a round were let through"),
            (
                &[refused(0, 1), refused(2, 3), let_through(2), refused(5, 6)],
                &[1, 2, 1],
                "the answer came after the refusal",
            ),
            (&[refused(0, 1), refused(2, 3), let_through(0), refused(5, 6)], &[1, 2, 3], "of a round before"),
            (&[refused(0, 1), let_through(0), refused(0, 1), refused(2, 3)], &[1, 1, 2], "refused together"),
        ] {
            assert_eq!(generations(answers), expected, "{why}");
        }
    }
}
