//! Changes of settings by an operator while workers run: a provider's pause and a limit's rate.
//!
//! Commands and API share this code. A change that would make the row invalid is rejected before anything is written.
//! Limits are added and removed by the provider file only.

use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::RawRate;

/// A limit's rate and its provider's row, before and after the change.
#[derive(Clone, Debug, PartialEq)]
pub struct RateChange {
    pub rate_before: RawRate,
    pub rate_after: Rate,
    pub row_before: ProviderRow,
    pub row_after: ProviderRow,
}

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum SettingsChangeError {
    #[error("there is no provider `{0}`: `sluicegate provider list` shows those that exist")]
    NoProvider(String),
    #[error("provider `{provider}` has no limit `{limit}`; it has: {}", .names.join(", "))]
    NoLimit { provider: String, limit: String, names: Vec<String> },
    /// The change would make the row invalid; each problem with its fix.
    #[error("{}", .0.join("; "))]
    InvalidRow(Vec<String>),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// Changes a limit's rate; a dry run only returns what would change. The same rate again changes nothing.
///
/// # Errors
/// [`SettingsChangeError`], also in a dry run.
pub async fn set_rate(
    ledger: &Database,
    provider: &ProviderName,
    limit: &str,
    rate: Rate,
    dry_run: bool,
    by: Option<&Actor>,
) -> Result<RateChange, SettingsChangeError> {
    let row_before = load_row(ledger, provider).await?;
    let Some(place) = row_before.limits.iter().position(|row| row.name == limit) else {
        return Err(no_limit_error(&row_before, limit));
    };
    let mut row_after = row_before.clone();
    row_after.limits[place].set_rate(rate);
    let known = row_problems(&row_before);
    // A row that is already invalid may be fixed step by step: only new problems count.
    let new: Vec<String> = row_problems(&row_after).into_iter().filter(|problem| !known.contains(problem)).collect();
    if !new.is_empty() {
        return Err(SettingsChangeError::InvalidRow(new));
    }
    let from = RawRate::from(&row_before.limits[place]);
    if dry_run || from == rate.into() {
        return Ok(RateChange { rate_before: from, rate_after: rate, row_before, row_after });
    }
    match ledger.set_rate_as(provider, limit, rate, by).await? {
        Some(from) => Ok(RateChange { rate_before: from, rate_after: rate, row_before, row_after }),
        None => Err(no_limit_error(&load_row(ledger, provider).await?, limit)),
    }
}

/// Pauses or resumes a provider; returns whether that changed anything. A resume always does: it also lifts waits that
/// the provider asked for, which are not in the row.
pub async fn set_paused(
    ledger: &Database,
    provider: &ProviderName,
    paused: bool,
    by: Option<&Actor>,
) -> Result<bool, SettingsChangeError> {
    // A provider whose row cannot be read can be paused too: workers may use its last valid row.
    if let Some(Ok(row)) = ledger.raw_rows(Some(provider)).await?.first()
        && row.paused
        && paused
    {
        return Ok(false);
    }
    match ledger.set_paused_as(provider, paused, by).await? {
        true => Ok(true),
        false => Err(SettingsChangeError::NoProvider(provider.to_string())),
    }
}

async fn load_row(ledger: &Database, provider: &ProviderName) -> Result<ProviderRow, SettingsChangeError> {
    let rows = ledger.readable_rows(Some(provider)).await?;
    rows.into_iter().next().ok_or_else(|| SettingsChangeError::NoProvider(provider.to_string()))
}

fn no_limit_error(row: &ProviderRow, limit: &str) -> SettingsChangeError {
    let names = row.limits.iter().map(|limit| limit.name.clone()).collect();
    SettingsChangeError::NoLimit { provider: row.name.clone(), limit: limit.to_owned(), names }
}

fn row_problems(row: &ProviderRow) -> Vec<String> {
    row.validate(0).err().map(|bad| bad.problems).unwrap_or_default()
}
