//! Egress of a lane: how many charges the limits of its row allow within a time, and the egress rate that follows.
//!
//! The default egress rate is what the limits allow within one second, so that the limiter alone decides. The mean of
//! the slowest limit would hold back what they allow: 100/1s beside 100000/1d has a mean of 1.16 a second.

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
    /// active: of a longer window it is a quarter of the requests, since what is held when the limit is used up is delayed behind the backlog.
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

#[cfg(test)]
#[path = "egress_tests.rs"]
mod tests;
