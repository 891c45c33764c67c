//! The operators' settings: provider rows, their limits and account rules, raw and validated.
//!
//! An invalid row becomes an [`InvalidRow`] that names each column and how to fix it. It stops only its own provider.

use std::fmt;
use std::time::Duration;

use super::provider_row::{LimitRow, format_rate};
pub use super::sql::hints::SettingsHints;
use crate::domain::limit::Rate;
use crate::domain::provider::Provider;

/// A provider whose rows are invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRow {
    pub provider: String,
    /// The row's quota: without the row's limits, no permit of this quota may be granted.
    pub quota: String,
    /// `enabled` and `paused` of the row, invalid as it is: disabling and pausing always work.
    pub enabled: bool,
    pub paused: bool,
    /// One line for each problem: column, what is wrong, and how to fix it.
    pub problems: Vec<String>,
}

/// All providers at one settings version.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsSnapshot {
    /// From one sequence that triggers increase on every change of any settings table.
    pub version: i64,
    pub providers: Vec<Result<Provider, InvalidRow>>,
}

/// One change that `apply` makes, described for the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsChange {
    pub provider: String,
    /// `created`, `changed max_wait_ms 5000 → 8000`, `limit per-second added 100/1s`, …
    pub description: String,
}

/// A limit's rate as its row says it, valid or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRate {
    pub max_requests: i64,
    /// `None`: requests in flight.
    pub window_ms: Option<i64>,
}

impl RawRate {
    pub fn validate(self) -> Result<Rate, String> {
        let max_requests = u32::try_from(self.max_requests).map_err(|_| "max_requests is out of range".to_owned())?;
        let rate = match self.window_ms.map(u64::try_from) {
            None => Rate::at_once(max_requests),
            Some(Ok(window_ms)) => Rate::new(max_requests, Duration::from_millis(window_ms)),
            Some(Err(_)) => return Err("window_ms is out of range".to_owned()),
        };
        rate.map_err(|problem| problem.to_string())
    }
}

impl From<Rate> for RawRate {
    fn from(rate: Rate) -> Self {
        Self { max_requests: rate.max_requests().into(), window_ms: rate.window_ms() }
    }
}

impl From<&LimitRow> for RawRate {
    fn from(row: &LimitRow) -> Self {
        Self { max_requests: row.max_requests, window_ms: row.given_window_ms() }
    }
}

impl fmt::Display for RawRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_rate(self.max_requests, self.window_ms))
    }
}
