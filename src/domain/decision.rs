//! What one call to the limiter says and what it is told: the same words for the Lua script, its Rust twin and the gate.
//!
//! Refuses to decide anything but the padding of a window; [`super::sliding_log`] decides.

use std::time::Duration;

use super::provider::{BOOKING_HORIZON, ProviderName};
use super::time::{Micros, micros_up};

/// Most permits, and most settlements, in one call.
pub const BATCH_MAX: usize = 1_000;

/// One limit as the limiter counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    pub name: String,
    /// Requests per window, after what is kept in reserve; 0 means closed.
    pub max_requests: u32,
    pub window: Duration,
}

impl LimitSpec {
    /// The window in microseconds, with 2 ms and 0.05 % added: covers what the comparison of clocks cannot see.
    #[must_use]
    pub fn padded_window_us(&self) -> u64 {
        let window_us = micros_up(self.window);
        window_us + 2_000 + window_us.div_ceil(2_000)
    }
}

/// What a quota allows, as of one settings version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSpec {
    pub quota: ProviderName,
    pub version: i64,
    /// In the order of names; never empty.
    pub limits: Vec<LimitSpec>,
    /// `None`: a slot is held until the answer. `Some(jitter)`: it is freed by the start plus this allowance.
    pub grant_jitter: Option<Duration>,
    /// Longest time from start to the last instant at which the provider may count the request.
    pub hold_max: Duration,
    /// How long after its start a permit may still be used.
    pub send_budget: Duration,
}

impl QuotaSpec {
    /// How long after its state was lost a limiter must grant nothing: a permit granted the moment before may start at
    /// the end of the booking horizon, is counted within the longest hold, and counts for the longest window.
    #[must_use]
    pub fn cold_us(&self) -> u64 {
        let longest = self.limits.iter().map(LimitSpec::padded_window_us).max().unwrap_or(0);
        micros_up(BOOKING_HORIZON) + micros_up(self.hold_max) + longest
    }

    /// The largest cost that could ever be granted.
    #[must_use]
    pub fn cost_max(&self) -> u32 {
        self.limits.iter().map(|limit| limit.max_requests).min().unwrap_or(0)
    }
}

/// Who calls: one process's gate, for as long as it lives.
pub type Incarnation = u64;

/// What became of permits granted by an earlier call of the same incarnation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// Number of the call that granted them.
    pub call: u64,
    pub cost: u32,
    pub fate: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The answer was read this long before the call departed.
    Used { age: Duration },
    /// No request left. Each slot goes back with the instant it had, one per limit of the call's spec.
    NotSent { origins: Vec<SlotInstant> },
}

/// When a slot was last answered, in milliseconds of the limiter's clock; 0 for a slot that needs no wait.
pub type SlotInstant = u64;

/// One call: take permits, settle earlier ones, both or neither.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub incarnation: Incarnation,
    /// From 1, one higher for each new call. A repeat carries the number of the call whose reply was lost.
    pub number: u64,
    /// Costs of the permits wanted, first in line first. A prefix of them is granted.
    pub wants: Vec<u32>,
    pub settlements: Vec<Settlement>,
    /// The provider named a wait: nobody starts before it has passed.
    pub pause: Option<Duration>,
    /// The ledger knows of no recent attempts since the limiter that was born at this instant lost its state.
    pub warm: Option<Micros>,
    /// Identity of the store's process; another one than before means that the state cannot be trusted.
    pub run_id: String,
}

/// Permits of one call with the same start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// How many of the wants, in their order.
    pub permits: usize,
    /// Start, counted from the reply's arrival.
    pub wait_us: u64,
    /// Per limit, the youngest instant among the slots taken, for giving them back unused.
    pub origins: Vec<SlotInstant>,
}

/// Why the rest of the wants was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit at this index of the spec has no slot within the booking horizon.
    Limit { index: usize },
    /// State was lost: nothing is granted until the wait has passed or the ledger vouches.
    Cold,
    /// A provider named a wait.
    Paused,
    /// The caller's settings are older than the store's: reload them.
    StaleVersion,
    /// A later call of the same incarnation has been seen.
    StaleCall,
}

/// The answer to one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The limiter's clock.
    pub now: Micros,
    /// The newest settings version that the limiter knows.
    pub version: i64,
    /// When the limiter's state began.
    pub born: Micros,
    pub granted: Vec<Run>,
    /// Slots that are left unused under the tightest limit after this call; used ones that are due again come on top.
    pub remaining: u64,
    /// Present when not everything was granted.
    pub refused: Option<Refused>,
}

/// A refusal with its wait, in microseconds from the reply, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub by: Refusal,
    pub wait_us: u64,
    /// Whether the next permit starts exactly then; otherwise it is the earliest that it can be.
    pub exact: bool,
}

impl Reply {
    #[must_use]
    pub fn permits(&self) -> usize {
        self.granted.iter().map(|run| run.permits).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_padded_up() {
        let limit = |window| LimitSpec { name: String::new(), max_requests: 1, window };
        assert_eq!(limit(Duration::from_secs(1)).padded_window_us(), 1_002_500);
        assert_eq!(limit(Duration::from_millis(1)).padded_window_us(), 3_001);
    }
}
