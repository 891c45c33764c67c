//! The return of a limit that an operator has changed for a time: when it goes back, and to which rate.
//!
//! It is stored in the limit's row, but it is no part of a provider file. A file that is applied ends it, as every other
//! change of the limit does.

use crate::ledger::operator::DatabaseTime;

use super::format_rate;

/// When a limit goes back, and its rate from then on, as the row says it, valid or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReturn {
    pub until: DatabaseTime,
    pub max_requests: i64,
    /// `None`: requests in flight.
    pub window_ms: Option<i64>,
}

impl LimitReturn {
    /// The rate that comes back, as `N/DURATION`.
    pub fn describe_rate(&self) -> String {
        format_rate(self.max_requests, self.window_ms)
    }
}

/// `until 2026-11-28T06:00:00.000Z, then back to 100/1s`.
impl std::fmt::Display for LimitReturn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "until {}, then back to {}", self.until, self.describe_rate())
    }
}
