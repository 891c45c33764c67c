//! The face of the limits that operators set: provider rows, their limits and account rules, as written and as meant.
//!
//! Refuses to guess: a row that cannot be meant is a [`BadRow`] that names each column and the mend, and stops only its
//! own provider.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::LedgerError;
use super::operator::Actor;
use super::provider_row::{LimitRow, ProviderRow};
use super::settings_audit::AuditedChange;
use crate::domain::limit::Rate;
use crate::domain::provider::{Provider, ProviderName};

/// A provider whose rows cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRow {
    pub provider: String,
    /// What it counts on; nothing may be granted there without its limits.
    pub quota: String,
    /// What the row says of these, bad as it is. That nothing shall be sent is always obeyed.
    pub enabled: bool,
    pub paused: bool,
    /// One line per problem: column, what is wrong, the mend.
    pub problems: Vec<String>,
}

/// All providers at one settings version.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsSnapshot {
    /// From one sequence that triggers bump on every change of any settings table.
    pub version: i64,
    pub providers: Vec<Result<Provider, InvalidRow>>,
}

/// One difference that an apply makes, in words for the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsChange {
    pub provider: String,
    /// `created`, `changed max_wait_ms 5000 → 8000`, `limit per-second added 100/1s`, …
    pub description: String,
}

/// A limit's rate as its row says it, whether that can be meant or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRate {
    pub max_requests: i64,
    pub window_ms: i64,
}

impl RawRate {
    /// # Errors
    /// Why it cannot be meant.
    pub fn validate(self) -> Result<Rate, String> {
        let max_requests = u32::try_from(self.max_requests).map_err(|_| "max_requests is out of range".to_owned())?;
        let window_ms = u64::try_from(self.window_ms).map_err(|_| "window_ms is out of range".to_owned())?;
        Rate::new(max_requests, Duration::from_millis(window_ms))
    }
}

impl From<Rate> for RawRate {
    fn from(rate: Rate) -> Self {
        let window_ms = i64::try_from(rate.window().as_millis()).unwrap_or(i64::MAX);
        Self { max_requests: rate.max_requests().into(), window_ms }
    }
}

impl From<&LimitRow> for RawRate {
    fn from(row: &LimitRow) -> Self {
        Self { max_requests: row.max_requests, window_ms: row.window_ms }
    }
}

impl fmt::Display for RawRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { max_requests, window_ms } = *self;
        f.write_str(&LimitRow { max_requests, window_ms, ..LimitRow::default() }.describe_rate())
    }
}

/// Wakes whoever follows the settings. A hint, never a promise: it may come without a change and stay away with one.
#[async_trait]
pub trait SettingsHints: Send {
    /// Returns when somebody may have changed the settings. Never fails; what it stands on is mended meanwhile.
    async fn next(&mut self);
}

/// Where the database tells nobody anything: followers poll.
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

    /// Makes the version at least one higher than `above`, and writes that into the audit; returns what it is now. For a
    /// database that was restored from a backup: stores that have heard newer versions refuse its limits until then.
    async fn raise_version(&self, above: i64) -> Result<i64, LedgerError>;

    async fn load(&self) -> Result<SettingsSnapshot, LedgerError>;

    /// What all provider rows are called, whether they can be read or not.
    async fn provider_names(&self) -> Result<Vec<String>, LedgerError>;

    /// Rows as written, for `list`, `show` and diffs; one provider, or all. One that cannot even be read is a bad row.
    async fn raw_rows(
        &self,
        provider: Option<&ProviderName>,
    ) -> Result<Vec<Result<ProviderRow, InvalidRow>>, LedgerError>;

    /// The same, for whoever needs them all.
    ///
    /// # Errors
    /// [`LedgerError::Corrupt`] names the first that cannot be read.
    async fn readable_rows(&self, provider: Option<&ProviderName>) -> Result<Vec<ProviderRow>, LedgerError> {
        let unreadable = |bad: InvalidRow| {
            let InvalidRow { provider, problems, .. } = bad;
            LedgerError::Corrupt(format!("provider `{provider}`: {}", problems.join("; ")))
        };
        self.raw_rows(provider).await?.into_iter().map(|row| row.map_err(unreadable)).collect()
    }

    /// Makes the database say what the rows say, in one transaction: inserts, updates, and deletes limits and account
    /// rules that the row no longer lists. Providers that are not named stay, and so does a pause of which a row says nothing
    /// (`pause_unsaid`). Returns what changed (or would, in a dry run).
    async fn apply(&self, rows: &[ProviderRow], dry_run: bool) -> Result<Vec<SettingsChange>, LedgerError>;

    /// Changes a limit's rate, keeping everything else; returns what it was. `None` when the limit does not exist.
    async fn set_rate(&self, provider: &ProviderName, limit: &str, rate: Rate) -> Result<Option<RawRate>, LedgerError> {
        self.set_rate_as(provider, limit, rate, None).await
    }

    /// The same; with `by`, the audit says in the same transaction who did it and why.
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

    /// The same; with `by`, the audit says in the same transaction who did it and why.
    async fn set_paused_as(
        &self,
        provider: &ProviderName,
        paused: bool,
        by: Option<&Actor>,
    ) -> Result<bool, LedgerError>;

    /// As [`Settings::apply`], with a name and a reason in the audit.
    async fn apply_as(&self, rows: &[ProviderRow], by: &Actor) -> Result<Vec<SettingsChange>, LedgerError>;

    /// The last changes of a provider's rows (row, limits, account rules), or of all settings; newest first, at most
    /// `at_most`. Those made by SQL stand there like those made by commands.
    async fn audit(&self, provider: Option<&ProviderName>, at_most: u32) -> Result<Vec<AuditedChange>, LedgerError>;

    /// Hints for one follower, for as long as it keeps them.
    fn hints(&self) -> Box<dyn SettingsHints> {
        Box::new(NoHints)
    }
}
