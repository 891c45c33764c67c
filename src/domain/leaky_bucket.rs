//! Leaky bucket of one lane: when the next job may leave, at a steady egress rate, as a function of time.
//!
//! It holds no jobs and does not sleep. Idle time allows no burst, apart from what makes up for late timers:
//! [`TIMER_LATENESS`], or one interval if that is longer.

use std::time::Duration;

/// Egress schedule of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeakyBucket {
    interval: Duration,
    next: Duration,
    /// Jobs that could leave if the bucket alone decided.
    waiting: u32,
    /// Waiting jobs whose turn has come: they leave once what else they wait for lets them.
    held: u32,
}

/// Latest wake-up after a timer on a busy machine: timers count milliseconds, and the processor has other work. Jobs
/// that could have left meanwhile leave then. Otherwise a fast egress rate would be as slow as the timers.
const TIMER_LATENESS: Duration = Duration::from_millis(10);

/// Longest wait after a refund. With an egress rate of one job an hour, a job that the gate returns must not cost the
/// hour. And the jobs that wait must not all be returned at once.
pub const REFUND_PAUSE: Duration = Duration::from_secs(1);

impl LeakyBucket {
    /// A rate that is not positive closes the bucket.
    pub fn new(jobs_per_second: f64) -> Self {
        Self { interval: interval(jobs_per_second), next: Duration::ZERO, waiting: 0, held: 0 }
    }

    /// Sets a new rate, which counts from `now` on: no job waits longer than the new interval.
    pub fn set_rate(&mut self, jobs_per_second: f64, now: Duration) {
        self.interval = interval(jobs_per_second);
        self.next = self.next.min(now + self.interval);
    }

    /// Time until the next job may leave, at `now` on any monotonic clock.
    pub fn wait(&self, now: Duration) -> Duration {
        self.wait_behind(now, 0)
    }

    /// Number of jobs that may leave at `now`, one after the other.
    pub fn ready(&self, now: Duration) -> u32 {
        self.held.saturating_add(self.turns_since(self.next.max(self.earliest_counted(now)), now))
    }

    /// Sets how many jobs wait for something else than the bucket. A job whose turn comes meanwhile keeps it: with the
    /// bucket and a limit in series, what the limit holds back would be lost otherwise.
    pub fn set_waiting(&mut self, now: Duration, jobs: u32) {
        self.hold_turns(now);
        if self.held >= self.waiting {
            // No further job could have left.
            self.next = self.next.max(self.earliest_counted(now));
        }
        let returned = self.held.saturating_sub(jobs);
        self.next = self.next.saturating_sub(self.interval.saturating_mul(returned));
        (self.held, self.waiting) = (self.held - returned, jobs);
        self.hold_turns(now);
    }

    /// Time until a job with `before` jobs ahead of it may leave.
    pub fn wait_behind(&self, now: Duration, before: u32) -> Duration {
        match before.checked_sub(self.held) {
            Some(further) => self.next.saturating_sub(now).saturating_add(self.interval.saturating_mul(further)),
            None => Duration::ZERO,
        }
    }

    /// Takes back one leak at `now`, because its job was not sent: the next waits at most [`REFUND_PAUSE`].
    pub fn refund(&mut self, now: Duration) {
        self.next = self.next.min(now + REFUND_PAUSE);
    }

    /// Counts one job that leaves at `now`.
    pub fn leak(&mut self, now: Duration) {
        match self.held.checked_sub(1) {
            Some(held) => (self.held, self.waiting) = (held, self.waiting - 1),
            None => self.next = self.next.max(self.earliest_counted(now)) + self.interval,
        }
    }

    /// Gives waiting jobs the turns that have come until now.
    fn hold_turns(&mut self, now: Duration) {
        let turns = self.turns_since(self.next, now).min(self.waiting.saturating_sub(self.held));
        self.next += self.interval.saturating_mul(turns);
        self.held += turns;
    }

    /// Number of turns until now, of which the first is due at `first`.
    fn turns_since(&self, first: Duration, now: Duration) -> u32 {
        let Some(since_first) = now.checked_sub(first) else { return 0 };
        let further = since_first.as_nanos() / self.interval.as_nanos().max(1);
        u32::try_from(further).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Idle time before this instant counts for nothing.
    fn earliest_counted(&self, now: Duration) -> Duration {
        now.saturating_sub(self.interval.max(TIMER_LATENESS))
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

    /// Lets one job out at `now` if it may leave; returns how long it must wait.
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
    fn jobs_that_waited_leave_together() {
        let ms = Duration::from_millis;
        // Nothing else let them leave for 200 ms: twenty turns have come, and each waiting job keeps at most one. Two
        // more may leave as after any idle time.
        for (waiting, expected) in [(32, 20), (8, 10), (1, 3), (0, 2)] {
            let mut bucket = LeakyBucket::new(100.0);
            (0..2).for_each(|_| bucket.leak(ms(1_000)));
            bucket.set_waiting(ms(1_000), waiting);
            bucket.set_waiting(ms(1_200), waiting);
            assert_eq!(bucket.ready(ms(1_200)), expected, "{waiting}");
            (0..expected).for_each(|_| bucket.leak(ms(1_200)));
            assert_eq!(bucket.ready(ms(1_200)), 0, "{waiting}");
        }
    }

    #[test]
    fn jobs_that_come_later_keep_no_earlier_turn() {
        let (s, mut bucket) = (Duration::from_secs, LeakyBucket::new(1.0));
        bucket.leak(s(0));
        bucket.set_waiting(s(0), 1);
        bucket.set_waiting(s(60), 33);
        assert_eq!(bucket.ready(s(60)), 3, "the first one's turn, and those after any idle time");
    }

    #[test]
    fn turn_of_a_job_that_leaves_is_returned() {
        let (ms, mut bucket) = (Duration::from_millis, LeakyBucket::new(100.0));
        bucket.leak(ms(1_000));
        bucket.set_waiting(ms(1_000), 20);
        bucket.set_waiting(ms(1_200), 0);
        assert_eq!(bucket.ready(ms(1_200)), 2, "as after any idle time");
        // Whether a job that leaves stops waiting first or last.
        for stops_first in [true, false] {
            let mut bucket = LeakyBucket::new(100.0);
            bucket.set_waiting(ms(1_000), 1);
            let wait = bucket.wait(ms(1_000));
            if stops_first {
                bucket.set_waiting(ms(1_000), 0);
            }
            bucket.leak(ms(1_000));
            bucket.set_waiting(ms(1_000), 0);
            assert_eq!((wait, bucket.ready(ms(1_000))), (Duration::ZERO, 1), "{stops_first}");
        }
    }

    #[test]
    fn ready_jobs_are_those_that_leave_at_once() {
        let ms = Duration::from_millis;
        for per_second in [0.5, 3.0, 100.0, 2_000.0, 1_000_000.0] {
            let mut bucket = LeakyBucket::new(per_second);
            for now in [ms(0), ms(1), ms(7), ms(500), ms(501), ms(60_000), ms(60_002)] {
                let ready = bucket.ready(now);
                let left = (0..).take_while(|_| try_leak(&mut bucket, now).is_zero()).count();
                assert_eq!(usize::try_from(ready).unwrap(), left, "{per_second}/s at {now:?}");
                assert_eq!(bucket.ready(now), 0);
            }
        }
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
        assert_eq!(at_once, 21, "those of 10 ms, and the one that is due");
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
