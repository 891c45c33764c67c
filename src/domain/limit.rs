//! Limits of a provider: rates, algorithms, and which calls each limit covers.
//!
//! An invalid limit cannot be built (no window, or more than the limiter can count). No value means "unlimited", and
//! zero requests means closed.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::names::named_enum;
use super::time::{InvalidDuration, format_duration, parse_duration};

/// Most permits that one limit may allow per window: the limiter counts exactly up to this.
pub const MAX_REQUESTS: u32 = 1_000_000;
/// How a number of requests in flight is written behind the number.
const AT_ONCE: &str = "at once";
/// Longest window: 31 days.
pub const MAX_WINDOW: Duration = Duration::from_secs(31 * 86_400);

/// Why a rate cannot be built, and the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRate {
    #[error("max_requests is {0}: at most {MAX_REQUESTS} can be counted exactly")]
    TooManyRequests(u32),
    #[error("window_ms must lie between 1 ms and 31 days")]
    WindowOutOfRange,
    #[error("window_ms must be whole milliseconds")]
    WindowNotWhole,
    #[error("`{0}` is not a limit: write N/DURATION, like 100/1s")]
    NoWindow(String),
    #[error("`{0}` is not a number of requests")]
    NoCount(String),
    #[error(transparent)]
    Duration(#[from] InvalidDuration),
}

/// `max_requests` per `window`, written `N/DURATION` (`100/1s`); `100/s` is accepted too. Without a window, at most
/// `max_requests` in flight, written `N at once`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    max_requests: u32,
    window: Duration,
}

impl Rate {
    /// # Errors
    /// If the window is zero, not whole milliseconds or longer than 31 days, or the count is above [`MAX_REQUESTS`].
    pub fn new(max_requests: u32, window: Duration) -> Result<Self, InvalidRate> {
        if max_requests > MAX_REQUESTS {
            return Err(InvalidRate::TooManyRequests(max_requests));
        }
        if window.is_zero() || window > MAX_WINDOW {
            return Err(InvalidRate::WindowOutOfRange);
        }
        if !window.as_nanos().is_multiple_of(1_000_000) {
            return Err(InvalidRate::WindowNotWhole);
        }
        Ok(Self { max_requests, window })
    }

    /// At most so many requests in flight, whatever their rate.
    pub fn at_once(max_requests: u32) -> Result<Self, InvalidRate> {
        let counted = Self::new(max_requests, MAX_WINDOW)?;
        Ok(Self { window: Duration::ZERO, ..counted })
    }

    /// Reads `N/DURATION`, or `N at once`. A number alone is neither: it may be a rate whose window was forgotten.
    pub fn parse_limit(text: &str) -> Result<Self, InvalidRate> {
        let Some(count) = text.strip_suffix(AT_ONCE).map(str::trim_end) else { return text.parse() };
        Self::at_once(parse_count(count)?)
    }

    /// The same with another number, of which the rate's own is the most.
    pub fn lowered_to(self, max_requests: u32) -> Self {
        Self { max_requests: self.max_requests.min(max_requests), ..self }
    }

    /// Whether it counts requests in flight. Then it has no window, and says nothing of a rate.
    pub fn is_at_once(self) -> bool {
        self.window.is_zero()
    }

    /// Requests per window, or in flight; 0 means closed.
    pub fn max_requests(self) -> u32 {
        self.max_requests
    }

    /// Zero for requests in flight.
    pub fn window(self) -> Duration {
        self.window
    }

    /// `None` for requests in flight.
    pub fn window_ms(self) -> Option<i64> {
        (!self.is_at_once()).then(|| i64::try_from(self.window.as_millis()).unwrap_or(i64::MAX))
    }

    /// Infinite for requests in flight.
    pub fn per_second(self) -> f64 {
        f64::from(self.max_requests) / self.window.as_secs_f64()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_at_once() {
            return write!(f, "{} {AT_ONCE}", self.max_requests);
        }
        write!(f, "{}/{}", self.max_requests, format_duration(self.window))
    }
}

impl FromStr for Rate {
    type Err = InvalidRate;

    fn from_str(text: &str) -> Result<Self, InvalidRate> {
        let (count, window) = text.split_once('/').ok_or_else(|| InvalidRate::NoWindow(text.to_owned()))?;
        let count = parse_count(count)?;
        let is_unit = window.starts_with(|c: char| c.is_ascii_alphabetic());
        let window = if is_unit { parse_duration(&format!("1{window}")) } else { parse_duration(window) };
        Self::new(count, window?)
    }
}

fn parse_count(text: &str) -> Result<u32, InvalidRate> {
    text.parse().map_err(|_| InvalidRate::NoCount(text.to_owned()))
}

/// A limit in words: `100/1s`, or `5 at once` without a window.
pub fn limit_text(max_requests: u32, window: Duration) -> String {
    Rate { max_requests, window }.to_string()
}

named_enum! {
    /// Algorithm by which the provider counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Algorithm {
        SlidingLog = "sliding_log",
        SlidingWindow = "sliding_window",
        FixedWindow = "fixed_window",
        TokenBucket = "token_bucket",
        Gcra = "gcra",
        /// Requests in flight, without a window.
        Concurrency = "concurrency",
    }
    /// The name in the database.
    pub fn name(self);
}

impl Algorithm {
    /// Those that count in a window.
    pub const WITH_WINDOW: [Self; 5] =
        [Self::SlidingLog, Self::SlidingWindow, Self::FixedWindow, Self::TokenBucket, Self::Gcra];

    /// Most requests that may come at once. Token bucket: its size (`burst`, or else `max_requests`). GCRA: one more
    /// than `burst` (0 unless given). The others: `max_requests`. A closed limit: 0.
    pub fn burst_capacity(self, max_requests: u32, burst: Option<u32>) -> u32 {
        match self {
            _ if max_requests == 0 => 0,
            Self::TokenBucket => burst.unwrap_or(max_requests),
            Self::Gcra => burst.unwrap_or(0).saturating_add(1),
            Self::SlidingLog | Self::SlidingWindow | Self::FixedWindow | Self::Concurrency => max_requests,
        }
    }

    /// The `burst` with which this many requests may come at once; for token bucket and GCRA only.
    pub fn burst_for_capacity(self, at_once: u32) -> u32 {
        at_once.saturating_sub(u32::from(self == Self::Gcra))
    }
}

named_enum! {
    /// Which calls a limit counts together.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Scope {
        Provider = "provider",
        Account = "account",
        Reference = "reference",
    }
    /// The name in the database.
    pub fn name(self);
}

named_enum! {
    /// Which calls a limit counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum AppliesTo {
        All = "all",
        Charge = "charge",
        Lookup = "lookup",
    }
    /// The name in the database.
    pub fn name(self);
}

/// One validated row of `provider_limits`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub name: String,
    pub algorithm: Algorithm,
    /// For [`Algorithm::Concurrency`] without a window, for the others with one.
    pub rate: Rate,
    /// Start of fixed windows relative to the Unix epoch; below the window, and zero for the other algorithms.
    pub offset: Duration,
    /// Only for [`Algorithm::TokenBucket`] and [`Algorithm::Gcra`]; see [`Limit::capacity`].
    pub burst: Option<u32>,
    pub scope: Scope,
    pub applies_to: AppliesTo,
    /// The limit counts and reports, and never refuses.
    pub shadow: bool,
}

impl Limit {
    /// Most requests that may come at once ([`Algorithm::burst_capacity`]).
    pub fn capacity(&self) -> u32 {
        self.algorithm.burst_capacity(self.rate.max_requests(), self.burst)
    }

    /// Whether every charge counts against the limit and can be refused by it.
    pub fn applies_to_every_charge(&self) -> bool {
        self.scope == Scope::Provider && self.applies_to != AppliesTo::Lookup && !self.shadow
    }
}

/// Name of the limit that counts accounts by their rules alone, in a row without account limits. It contains a blank, which
/// no row's limit can have.
pub const RULE_LIMIT: &str = "account rule";

/// One validated row of `account_overrides`. Of two rules for one account, the one that names a limit takes precedence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountRule {
    pub account: String,
    /// A limit of scope [`Scope::Account`], which may be disabled now; `None`: all of them, or [`RULE_LIMIT`].
    pub limit: Option<String>,
    pub rule: Rule,
}

/// Effect of an account's rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Counts against no account limit; the provider's own limits still apply.
    Exempt,
    /// No job of this account is sent.
    Blocked,
    /// No charge of this account is sent: a job that is confirmed not charged ends as declined. Look-ups are sent.
    Refuse,
    /// Replaces the limit's numbers; algorithm and offset stay the limit's. Without an account limit it is a
    /// [`Algorithm::SlidingLog`] over all calls of the account.
    Limit(LimitOverride),
}

/// Numbers of one account at a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitOverride {
    pub rate: Rate,
    /// As [`Limit::burst`]. `None`: the algorithm's default for this rate, never the limit's own burst.
    pub burst: Option<u32>,
}

impl From<Rate> for LimitOverride {
    fn from(rate: Rate) -> Self {
        Self { rate, burst: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(algorithm: Algorithm, rate: &str, burst: Option<u32>) -> Limit {
        Limit {
            name: "all".to_owned(),
            algorithm,
            rate: rate.parse().unwrap(),
            offset: Duration::ZERO,
            burst,
            scope: Scope::Provider,
            applies_to: AppliesTo::All,
            shadow: false,
        }
    }

    #[test]
    fn requests_in_flight_have_no_window() {
        for text in ["5 at once", "5  at once"] {
            let limit = Rate::parse_limit(text).unwrap();
            assert_eq!((limit.to_string().as_str(), limit.window_ms(), limit.is_at_once()), ("5 at once", None, true));
            assert!(text.parse::<Rate>().is_err(), "{text} is no rate");
        }
        assert_eq!(Rate::parse_limit("100/s").unwrap(), "100/1s".parse().unwrap());
        for bad in ["5", "at once", "-1", "1000001", "5 at", "100/", ""] {
            assert!(Rate::parse_limit(bad).is_err(), "{bad}");
        }
        assert_eq!(limit_text(5, Duration::ZERO), "5 at once");
        assert_eq!(limit_text(5, Duration::from_secs(1)), "5/1s");
    }

    #[test]
    fn capacity_is_the_largest_burst() {
        let table = [
            (Algorithm::SlidingLog, "100/1s", None, 100),
            (Algorithm::SlidingWindow, "100/1s", None, 100),
            (Algorithm::FixedWindow, "100/1s", None, 100),
            (Algorithm::TokenBucket, "100/1s", None, 100),
            (Algorithm::TokenBucket, "100/1s", Some(7), 7),
            (Algorithm::TokenBucket, "100/1s", Some(700), 700),
            (Algorithm::Gcra, "100/1s", None, 1),
            (Algorithm::Gcra, "100/1s", Some(15), 16),
            (Algorithm::TokenBucket, "0/1s", Some(7), 0),
            (Algorithm::Gcra, "0/1s", Some(7), 0),
        ];
        for (algorithm, rate, burst, capacity) in table {
            assert_eq!(limit(algorithm, rate, burst).capacity(), capacity, "{algorithm:?} {rate} {burst:?}");
        }
    }

    #[test]
    fn only_provider_limits_apply_to_every_charge() {
        let limit = limit(Algorithm::SlidingLog, "1/1s", None);
        assert!(limit.applies_to_every_charge());
        assert!(!Limit { scope: Scope::Account, ..limit.clone() }.applies_to_every_charge());
        assert!(!Limit { applies_to: AppliesTo::Lookup, ..limit.clone() }.applies_to_every_charge());
        assert!(!Limit { shadow: true, ..limit }.applies_to_every_charge());
    }

    #[test]
    fn rates_read_back_as_written() {
        for text in ["100/1s", "600/1m", "0/1s", "1000000/31d", "5/250ms"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        for (short, text) in [("50/s", "50/1s"), ("600/m", "600/1m"), ("5/ms", "5/1ms"), ("9/d", "9/1d")] {
            assert_eq!(short.parse::<Rate>().unwrap().to_string(), text);
        }
        for bad in
            ["100", "100/", "/1s", "-1/1s", "1.5/1s", "1000001/1s", "1/0s", "1/32d", "x/1s", "x/s", "1/y", "1/ s"]
        {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
    }
}
