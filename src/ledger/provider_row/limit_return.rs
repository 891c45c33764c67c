//! The return of a limit or an account's rule that an operator has changed for a time: when it goes back, and to what.
//!
//! It is stored in the row, but it is no part of a provider file. A file that changes the row ends it, as every other
//! change of the row does.

use crate::ledger::operator::DatabaseTime;

use super::{AccountRow, format_rate};

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

/// When an account's rule ends, and the row from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct AccountReturn {
    pub until: DatabaseTime,
    /// `None`: the account has no row any more.
    pub then: Option<Box<AccountRow>>,
}

impl AccountReturn {
    /// The rule that comes back.
    pub fn describe_then(&self) -> String {
        self.then.as_ref().map_or_else(|| "no rule".to_owned(), |row| row.describe())
    }
}

/// `until 2026-11-28T06:00:00.000Z, then blocked`.
impl std::fmt::Display for AccountReturn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "until {}, then {}", self.until, self.describe_then())
    }
}

/// `until 2026-11-28T06:00:00.000Z, then back to 100/1s`.
impl std::fmt::Display for LimitReturn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "until {}, then back to {}", self.until, self.describe_rate())
    }
}
