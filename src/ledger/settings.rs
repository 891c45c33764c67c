//! The interface to operators' settings: provider rows, their limits and account rules, raw and validated.
//!
//! An invalid row becomes an [`InvalidRow`] that names each column and how to fix it. It stops only its own provider.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::LedgerError;
use super::operator::Actor;
use super::provider_row::{LimitRow, ProviderRow, format_rate};
use super::settings_audit::AuditedChange;
use crate::domain::limit::Rate;
use crate::domain::provider::{Provider, ProviderName};

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
        let Some(window_ms) = self.window_ms else { return Rate::at_once(max_requests) };
        let window_ms = u64::try_from(window_ms).map_err(|_| "window_ms is out of range".to_owned())?;
        Rate::new(max_requests, Duration::from_millis(window_ms))
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

/// A hint that settings may have changed. It is not reliable: it may come without a change, and a change may come
/// without it.
#[async_trait]
pub trait SettingsHints: Send {
    /// Returns when settings may have changed. Never fails; a lost connection is replaced meanwhile.
    async fn next(&mut self);
}

/// Hints of a database that sends none: callers poll.
pub struct NoHints;

#[async_trait]
impl SettingsHints for NoHints {
    async fn next(&mut self) {
        std::future::pending().await
    }
}

#[async_trait]
pub trait Settings: Send + Sync {
    /// The current settings version; cheap, for polling.
    async fn version(&self) -> Result<i64, LedgerError>;

    /// Makes the version at least one higher than `above`, with an audit row; returns the version. For a database that
    /// was restored from a backup: until then, stores with a newer version reject its limits.
    async fn raise_version(&self, above: i64) -> Result<i64, LedgerError>;

    async fn load(&self) -> Result<SettingsSnapshot, LedgerError>;

    /// The names of all provider rows, readable or not.
    async fn provider_names(&self) -> Result<Vec<String>, LedgerError>;

    /// Raw rows for `list`, `show` and diffs; of one provider, or all. A row that cannot be read is an [`InvalidRow`].
    async fn raw_rows(
        &self,
        provider: Option<&ProviderName>,
    ) -> Result<Vec<Result<ProviderRow, InvalidRow>>, LedgerError>;

    /// Raw rows for callers that need all of them.
    ///
    /// # Errors
    /// [`LedgerError::Corrupt`] names the first row that cannot be read.
    async fn readable_rows(&self, provider: Option<&ProviderName>) -> Result<Vec<ProviderRow>, LedgerError> {
        let unreadable = |bad: InvalidRow| {
            let InvalidRow { provider, problems, .. } = bad;
            LedgerError::Corrupt(format!("provider `{provider}`: {}", problems.join("; ")))
        };
        self.raw_rows(provider).await?.into_iter().map(|row| row.map_err(unreadable)).collect()
    }

    /// Applies the rows in one transaction: inserts, updates, and deletes limits and account rules that a row no longer
    /// lists. Providers that are not named stay. So does a pause that a row does not mention (`pause_unmentioned`).
    /// Returns the changes, also in a dry run.
    async fn apply(&self, rows: &[ProviderRow], dry_run: bool) -> Result<Vec<SettingsChange>, LedgerError>;

    /// Changes a limit's rate and nothing else; returns the former rate. `None` when the limit does not exist.
    async fn set_rate(&self, provider: &ProviderName, limit: &str, rate: Rate) -> Result<Option<RawRate>, LedgerError> {
        self.set_rate_as(provider, limit, rate, None).await
    }

    /// Changes the rate; with `by`, the audit names the author and the reason in the same transaction.
    async fn set_rate_as(
        &self,
        provider: &ProviderName,
        limit: &str,
        rate: Rate,
        by: Option<&Actor>,
    ) -> Result<Option<RawRate>, LedgerError>;

    /// Returns whether the provider exists.
    async fn set_paused(&self, provider: &ProviderName, paused: bool) -> Result<bool, LedgerError> {
        self.set_paused_as(provider, paused, None).await
    }

    /// Sets the pause; with `by`, the audit names the author and the reason in the same transaction.
    async fn set_paused_as(
        &self,
        provider: &ProviderName,
        paused: bool,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError>;

    /// Applies rows like [`Settings::apply`], with author and reason in the audit.
    async fn apply_as(&self, rows: &[ProviderRow], by: &Actor) -> Result<Vec<SettingsChange>, LedgerError>;

    /// The last changes of a provider's rows (row, limits, account rules), or of all settings; newest first, at most
    /// `at_most`. Changes by SQL are listed like those by commands.
    async fn audit(&self, provider: Option<&ProviderName>, at_most: u32) -> Result<Vec<AuditedChange>, LedgerError>;

    /// Hints for one follower.
    fn hints(&self) -> Box<dyn SettingsHints> {
        Box::new(NoHints)
    }
}
