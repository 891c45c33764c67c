//! When the next job may leave the bucket: a queue with a steady outflow, as a function of the time.
//!
//! Refuses to hold jobs, to sleep and to burst: time that passes while the bucket is empty earns nothing, apart from
//! what makes up for late timers, [`TIMER_LATENESS`] or one step's worth.

use std::time::Duration;

/// Outflow of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeakyBucket {
    interval: Duration,
    next: Duration,
}

/// Whoever sleeps until the next job may leave comes up to this much late on a busy machine: timers count milliseconds, and
/// the processor has other work. What could have left meanwhile leaves then; else a fast outflow would be as slow as timers.
const TIMER_LATENESS: Duration = Duration::from_millis(10);

/// Where the outflow is a job an hour, one that is sent back at the gate must not cost the hour; nor may all that wait be sent
/// back at once.
pub const REFUND_PAUSE: Duration = Duration::from_secs(1);

impl LeakyBucket {
    /// A rate that is not positive closes the outflow.
    #[must_use]
    pub fn new(jobs_per_second: f64) -> Self {
        Self { interval: interval(jobs_per_second), next: Duration::ZERO }
    }

    /// A changed rate counts from `now` on: nobody waits longer than its own interval.
    pub fn set_rate(&mut self, jobs_per_second: f64, now: Duration) {
        self.interval = interval(jobs_per_second);
        self.next = self.next.min(now + self.interval);
    }

    /// How long until the next job may leave, at `now` on any monotonic clock.
    #[must_use]
    pub fn wait(&self, now: Duration) -> Duration {
        self.next.saturating_sub(now)
    }

    /// The same for one that has so many before it.
    #[must_use]
    pub fn wait_behind(&self, now: Duration, before: u32) -> Duration {
        self.wait(now).saturating_add(self.interval.saturating_mul(before))
    }

    /// One that had left came to nothing, at `now`: nobody waits longer than [`UNUSED_PAUSE`] for the next.
    pub fn refund(&mut self, now: Duration) {
        self.next = self.next.min(now + REFUND_PAUSE);
    }

    /// Counts one job that leaves at `now`.
    pub fn leak(&mut self, now: Duration) {
        let latest_start = now.saturating_sub(self.interval.max(TIMER_LATENESS));
        self.next = self.next.max(latest_start) + self.interval;
    }
}

fn interval(jobs_per_second: f64) -> Duration {
    if jobs_per_second <= 0.0 || !jobs_per_second.is_finite() {
        return Duration::from_secs(3_600);
    }
    Duration::try_from_secs_f64(1.0 / jobs_per_second).unwrap_or(Duration::from_secs(3_600))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets one job out at `now` if it may leave, else says how long it must wait.
    fn try_leak(bucket: &mut LeakyBucket, now: Duration) -> Duration {
        let wait = bucket.wait(now);
        if wait.is_zero() {
            bucket.leak(now);
        }
        wait
    }

    #[test]
    fn egress_is_steady_without_burst() {
        let mut bucket = LeakyBucket::new(100.0);
        let ms = Duration::from_millis;
        assert_eq!(try_leak(&mut bucket, ms(1_000)), Duration::ZERO);
        let mut left = 0;
        let mut now = ms(1_000);
        while now < ms(2_000) {
            let wait = try_leak(&mut bucket, now);
            left += u32::from(wait.is_zero());
            now += wait.max(Duration::from_micros(1));
        }
        assert!((100..=102).contains(&left), "{left} jobs in a second at 100/s");
        // After a long pause two may leave close together, not a backlog's worth.
        assert_eq!(try_leak(&mut bucket, ms(60_000)), Duration::ZERO);
        assert_eq!(try_leak(&mut bucket, ms(60_000)), Duration::ZERO);
        assert_eq!(try_leak(&mut bucket, ms(60_000)), ms(10));
    }

    #[test]
    fn late_timers_do_not_slow_egress() {
        for (per_second, wakes_every_ms) in [(1_000.0, 3), (5_000.0, 2), (40_000.0, 2), (1_000_000.0, 9)] {
            let mut bucket = LeakyBucket::new(per_second);
            let wakes = (1..=1_000 / wakes_every_ms).map(|wake| Duration::from_millis(wake * wakes_every_ms));
            let left: u32 =
                wakes.map(|now| (0..).take_while(|_| try_leak(&mut bucket, now).is_zero()).count() as u32).sum();
            let share = f64::from(left) / per_second;
            assert!(
                (0.99..1.02).contains(&share),
                "{left} in a second at {per_second}/s, looked at every {wakes_every_ms} ms"
            );
        }
    }

    #[test]
    fn idle_bucket_burst_covers_only_late_timers() {
        let mut bucket = LeakyBucket::new(2_000.0);
        let at = Duration::from_secs(60);
        let at_once = (0..).take_while(|_| try_leak(&mut bucket, at).is_zero()).count();
        assert_eq!(at_once, 21, "those of 10 ms, and the one whose turn it is");
    }

    #[test]
    fn reopened_bucket_does_not_wait_as_closed() {
        let mut bucket = LeakyBucket::new(0.0);
        let now = Duration::from_secs(5);
        assert!(try_leak(&mut bucket, now).is_zero());
        bucket.set_rate(100.0, now);
        assert_eq!(bucket.wait(now), Duration::from_millis(10));
    }

    #[test]
    fn refund_shortens_the_wait_to_a_second() {
        let (s, ms) = (Duration::from_secs, Duration::from_millis);
        for (per_second, wait) in [(1.0 / 3_600.0, s(1)), (0.5, s(1)), (4.0, ms(150)), (100.0, Duration::ZERO)] {
            let mut bucket = LeakyBucket::new(per_second);
            let now = s(9_000);
            bucket.leak(now);
            bucket.next = now + bucket.interval;
            bucket.refund(now + ms(100));
            assert_eq!(bucket.wait(now + ms(100)), wait, "{per_second}/s");
        }
    }

    #[test]
    fn invalid_egress_rate_closes_the_bucket() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut bucket = LeakyBucket::new(rate);
            assert!(try_leak(&mut bucket, Duration::ZERO).is_zero());
            assert!(try_leak(&mut bucket, Duration::from_secs(60)) > Duration::from_secs(3_000), "{rate}");
        }
    }
}
