//! Egress of a lane: how many charges the limits of its row allow within a time, the egress rate that follows, and the
//! leaky bucket that lets jobs out at this rate.
//!
//! The default egress rate is what the limits allow within one second, so that the limiter alone decides. The mean of
//! the slowest limit would hold back what they allow: 100/1s beside 100000/1d has a mean of 1.16 a second.
//!
//! The bucket is a function of time: it holds no jobs and does not sleep. Idle time allows no burst, apart from what
//! makes up for late timers: [`TIMER_LATENESS`], or one interval if that is longer.

use std::time::Duration;

use super::limit::{Algorithm, AppliesTo, Limit, Rate};
use super::provider::{Pacing, Provider};

/// Time for which the default egress rate counts what the limits allow.
pub const EGRESS_SPAN: Duration = Duration::from_secs(1);

/// Egress rate where no limit has a window, so that none says a rate: the limiter and the worker slots decide.
const EGRESS_UNPACED: f64 = 1_000_000.0;

/// Part of a long window's requests that one process holds at once.
const HELD_DIVISOR: u32 = 4;

/// Numbers of one limit with a window that applies to every charge, without the reserve. A concurrency limit says
/// nothing of a rate, so it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    pub algorithm: Algorithm,
    /// Requests per window; 0: closed.
    pub max_requests: u32,
    /// Requests that may come at once.
    pub at_once: u32,
    pub window: Duration,
    /// Whether the limit counts look-ups, too.
    pub counts_lookups: bool,
}

impl Allowance {
    fn of_row(row: &Provider, limit: &Limit) -> Self {
        let max_requests = row.after_reserve(limit.rate.max_requests());
        let burst = limit.burst.map(|burst| row.burst_after_reserve(burst));
        Self {
            algorithm: limit.algorithm,
            max_requests,
            at_once: limit.algorithm.burst_capacity(max_requests, burst),
            window: limit.rate.window(),
            counts_lookups: limit.applies_to == AppliesTo::All,
        }
    }

    /// Most requests that can start within a time (without its last instant), wherever it begins and whatever was used
    /// before. The limiter pads its windows, so it never allows more.
    pub fn most_within(&self, span: Duration) -> u32 {
        if self.max_requests == 0 {
            return 0;
        }
        let max_requests = u128::from(self.max_requests);
        let (span_us, window_us) = (span.as_micros().max(1), self.window.as_micros().max(1));
        let most = match self.algorithm {
            // A window's worth at the beginning, and another one after each window.
            Algorithm::SlidingLog | Algorithm::SlidingWindow => max_requests * span_us.div_ceil(window_us),
            // The end of one calendar window and the beginning of the next may both lie within the time.
            Algorithm::FixedWindow => max_requests * (span_us.div_ceil(window_us) + 1),
            // A full bucket at the beginning, and what comes back before the end.
            Algorithm::TokenBucket | Algorithm::Gcra => {
                u128::from(self.at_once) + (span_us * max_requests).div_ceil(window_us) - 1
            }
            // Not built of such a limit.
            Algorithm::Concurrency => u128::from(u32::MAX),
        };
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Mean rate over a long time; 0: closed.
    pub fn mean_per_second(&self) -> f64 {
        f64::from(self.max_requests) / self.window.as_secs_f64()
    }
}

/// The limit that allows the fewest requests within [`EGRESS_SPAN`], and their number; the first of equal ones.
pub(super) fn tightest_at_once<T>(limits: impl Iterator<Item = (T, Allowance)>) -> Option<(T, Allowance, u32)> {
    let counted = limits.map(|(limit, allowance)| (limit, allowance, allowance.most_within(EGRESS_SPAN)));
    counted.min_by_key(|(.., most)| *most)
}

/// The limit with the lowest mean rate; the first of equal ones.
pub(super) fn slowest<T>(limits: impl Iterator<Item = (T, Allowance)>) -> Option<(T, Allowance)> {
    limits.min_by(|(_, a), (_, b)| a.mean_per_second().total_cmp(&b.mean_per_second()))
}

impl Provider {
    fn allowances(&self) -> impl Iterator<Item = (&Limit, Allowance)> {
        let charges = self.limits.iter().filter(|limit| limit.applies_to_every_charge() && !limit.rate.is_at_once());
        charges.map(|limit| (limit, Allowance::of_row(self, limit)))
    }

    /// Most charges in flight by the limits that apply to every charge, with the reserve; `None`: no limit says.
    pub fn in_flight_max(&self) -> Option<u32> {
        let limits = self.limits.iter().filter(|limit| limit.applies_to_every_charge() && limit.rate.is_at_once());
        limits.map(|limit| self.after_reserve(limit.rate.max_requests())).min()
    }

    /// The lowest mean rate among the limits that apply to every charge, with the reserve.
    pub fn tightest_rate(&self) -> Option<Rate> {
        slowest(self.allowances()).map(|(limit, _)| limit.rate)
    }

    /// The limit from which the default egress rate follows, and this rate in jobs per second.
    fn default_egress(&self) -> Option<(Allowance, f64)> {
        match self.pacing {
            Pacing::Burst => {
                tightest_at_once(self.allowances()).map(|(_, allowance, most)| (allowance, f64::from(most)))
            }
            Pacing::Even => slowest(self.allowances()).map(|(_, allowance)| (allowance, allowance.mean_per_second())),
        }
    }

    /// Egress rate of one process' leaky bucket, in jobs per second: `leak_per_second`, or else what the limits allow
    /// within one second. With even pacing, the default is the mean of the slowest limit. 0: a limit is closed.
    pub fn egress_per_second(&self) -> f64 {
        let by_limits = || self.default_egress().map(|(_, per_second)| per_second);
        let unpaced = || self.in_flight_max().map(|most| if most == 0 { 0.0 } else { EGRESS_UNPACED });
        self.leak_per_second.or_else(by_limits).or_else(unpaced).unwrap_or(0.0)
    }

    /// Whether the row or a limit with a window says a rate.
    pub fn is_paced(&self) -> bool {
        self.leak_per_second.is_some() || self.default_egress().is_some()
    }

    /// Whether the egress rate counts look-ups, too: it is the row's own, or it follows from a limit that counts them.
    pub fn egress_counts_lookups(&self) -> bool {
        self.leak_per_second.is_some() || self.default_egress().is_none_or(|(allowance, _)| allowance.counts_lookups)
    }

    /// Jobs that one process should hold to start them within a time: by the egress rate and, where this is the default,
    /// by the limits: of those in flight, as many wait behind them. `kept_max` is the longest time that jobs are kept
    /// active. Of a longer window it is a quarter of the requests: what is held when the limit is used up is delayed
    /// behind the backlog.
    pub fn startable_within(&self, span: Duration, kept_max: Duration) -> f64 {
        let by_egress = self.egress_per_second() * span.as_secs_f64();
        let by_limits = self.leak_per_second.is_none().then(|| self.limits_startable(span, kept_max));
        let in_flight = self.in_flight_max().map(|most| f64::from(most.saturating_mul(2)));
        by_limits.into_iter().chain(in_flight).fold(by_egress, f64::min)
    }

    /// [`Self::startable_within`], by the limits and the default egress rate, too, where the row has a rate of its own.
    pub fn startable_by_limits_within(&self, span: Duration, kept_max: Duration) -> f64 {
        let by_default = self.default_egress().map_or(f64::INFINITY, |(_, rate)| rate * span.as_secs_f64());
        self.startable_within(span, kept_max).min(by_default).min(self.limits_startable(span, kept_max))
    }

    /// Infinite without a limit that counts every charge.
    fn limits_startable(&self, span: Duration, kept_max: Duration) -> f64 {
        let startable = self.allowances().map(|(_, allowance)| {
            let most = allowance.most_within(span);
            let is_kept = allowance.window <= kept_max;
            f64::from(if is_kept { most } else { most.min(allowance.max_requests.div_ceil(HELD_DIVISOR)) })
        });
        startable.fold(f64::INFINITY, f64::min)
    }

    /// Time between two bursts of the slowest limit; `None`: jobs are spaced.
    pub fn burst_window(&self) -> Option<Duration> {
        let is_spaced = self.leak_per_second.is_some() || self.pacing == Pacing::Even;
        let (_, allowance) = slowest(self.allowances()).filter(|_| !is_spaced)?;
        let is_bucket = matches!(allowance.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
        (!is_bucket).then_some(allowance.window)
    }

    /// Mean rate of a long backlog, in jobs per second: the egress rate, or the slowest limit. 0: a limit is closed.
    pub fn mean_per_second(&self) -> f64 {
        let means = self.allowances().map(|(_, allowance)| allowance.mean_per_second());
        means.fold(self.egress_per_second(), f64::min)
    }

    /// Mean rate of a long backlog at least: as [`Self::mean_per_second`], or what a concurrency limit lets through if
    /// every response takes the whole timeout.
    pub fn least_per_second(&self) -> f64 {
        let slowest = self.in_flight_max().map(|most| f64::from(most) / self.hold_max().as_secs_f64());
        slowest.map_or_else(|| self.mean_per_second(), |slowest| slowest.min(self.mean_per_second()))
    }
}

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
    /// With a rate that is not positive, one job leaves at once and then one an hour.
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
#[path = "egress_tests.rs"]
mod rate_tests;

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
