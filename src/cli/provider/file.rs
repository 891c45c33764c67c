//! A provider file before it is applied: it is read, validated as a whole and compared with the database.
//!
//! A file with an invalid row is rejected. The error lists every problem of the file.

use std::path::Path;

use super::parse_name;
use crate::app::outbound_policy;
use crate::cli::input::{self, PROVIDER_FILE_BYTES_MAX};
use crate::cli::{CommandError, Exit};
use crate::config::Config;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::database::Database;
use crate::ledger::provider_row::{ParsedProviderFile, ProviderRow, mark_unmentioned_pauses, read_provider_file};
use crate::provider::http::HttpProvider;

pub async fn read_file(file: &Path) -> Result<String, CommandError> {
    input::read_text(file, PROVIDER_FILE_BYTES_MAX).await
}

/// Parses a provider file; each error names its place in the file.
pub fn parse_rows(text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
    let ParsedProviderFile { mut rows, mut problems } = read_provider_file(text);
    if !problems.is_empty() {
        // The problems of the readable rows are reported in the same run.
        for provider in rows.iter().filter_map(|row| row.validate(0).ok()) {
            let found = provider_problems(&provider).into_iter();
            problems.extend(found.map(|problem| format!("provider `{}`: {problem}", provider.name)));
        }
        return Err(problems);
    }
    mark_unmentioned_pauses(text, &mut rows);
    Ok(rows)
}

/// Problems of a valid row that no worker could use, one line each; the outbound policy is not checked here.
fn provider_problems(provider: &Provider) -> Vec<String> {
    HttpProvider::problems(provider).iter().map(ToString::to_string).collect()
}

/// Whether a worker of this configuration could call the provider; the error holds no secret.
pub fn check_callable(provider: &Provider, config: &Config) -> Result<(), String> {
    let outbound = outbound_policy(config).map_err(|error| error.to_string())?;
    HttpProvider::new(provider, &outbound).map(drop).map_err(|error| error.to_string())
}

/// Secrets of a usable provider that this process cannot read; each names header and source, none holds a value.
pub async fn unreadable_secrets(provider: &Provider, config: &Config) -> Vec<String> {
    let Ok(outbound) = outbound_policy(config) else { return Vec::new() };
    let Ok(usable) = HttpProvider::new(provider, &outbound) else { return Vec::new() };
    usable.unreadable_secrets().await.iter().map(ToString::to_string).collect()
}

/// The rows of a file, if every row is valid.
pub fn checked_rows(text: &str, file: &Path) -> Result<Vec<ProviderRow>, CommandError> {
    let rows = parse_rows(text).map_err(|problems| invalid_file(file, &problems))?;
    let mut problems = Vec::new();
    for row in &rows {
        let found = row.validate(0).map_or_else(|bad| bad.problems, |provider| provider_problems(&provider));
        let found = row.literal_credentials().into_iter().chain(row.redaction_problems()).chain(found);
        problems.extend(found.map(|problem| format!("provider `{}`: {problem}", row.name)));
    }
    if rows.is_empty() {
        problems.push("has no provider: write [[provider]] tables".to_owned());
    }
    if problems.is_empty() { Ok(rows) } else { Err(invalid_file(file, &problems)) }
}

/// Paused providers for which the file does not set `paused`.
pub async fn unmentioned_pauses(rows: &[ProviderRow], ledger: &Database) -> Result<Vec<ProviderName>, CommandError> {
    let mut paused = Vec::new();
    for row in rows.iter().filter(|row| row.pause_unmentioned) {
        let name = parse_name(&row.name)?;
        if ledger.readable_rows(Some(&name)).await?.iter().any(|there| there.paused) {
            paused.push(name);
        }
    }
    Ok(paused)
}

/// Warnings that may not apply where the workers run: the outbound policy, and unreadable secrets.
pub async fn warnings(rows: &[ProviderRow], config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let Some(provider) = row.validate(0).ok().filter(|provider| provider.enabled) else { continue };
        let unreachable = check_callable(&provider, config).err();
        let unreachable =
            unreachable.map(|problem| format!("{problem}; a worker with this configuration has no lane for it"));
        let unreadable = unreadable_secrets(&provider, config).await.into_iter();
        let unreadable =
            unreadable.map(|secret| format!("not readable here: {secret}; the workers must be able to read it"));
        let all = unreachable.into_iter().chain(unreadable);
        warnings.extend(all.map(|warning| format!("provider `{}`: {warning}", row.name)));
    }
    warnings
}

fn invalid_file(file: &Path, problems: &[String]) -> CommandError {
    let title = format!("{}: nothing was applied:", file.display());
    let lines = [title].into_iter().chain(problems.iter().map(|problem| format!("  {problem}"))).collect();
    CommandError::Problems { exit: Exit::BadConfiguration, lines }
}
