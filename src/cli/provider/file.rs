//! A provider file before it is applied: it is read, validated as a whole and compared with the database.
//!
//! A file with an invalid row is rejected. The error lists every problem of the file.

use std::collections::BTreeSet;
use std::path::Path;

use super::parse_name;
use crate::cli::connect::Services;
use crate::cli::input::{self, PROVIDER_FILE_BYTES_MAX};
use crate::cli::{CommandError, Exit};
use crate::config::Config;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::provider_row::ProviderRow;

pub(super) async fn read_file(file: &Path) -> Result<String, CommandError> {
    input::read_text(file, PROVIDER_FILE_BYTES_MAX).await
}

/// The rows of a file, if every row is valid.
pub fn checked_rows(text: &str, file: &Path, services: &dyn Services) -> Result<Vec<ProviderRow>, CommandError> {
    let rows = services.parse_provider_file(text).map_err(|problems| invalid_file(file, &problems))?;
    let mut problems = Vec::new();
    let mut names = BTreeSet::new();
    for row in &rows {
        if !names.insert(row.name.as_str()) {
            problems.push(format!("provider `{}`: is in the file twice", row.name));
        }
        let found =
            services.validate(row).map_or_else(|bad| bad.problems, |provider| services.provider_problems(&provider));
        let found = row.literal_credentials().into_iter().chain(row.redaction_problems()).chain(found);
        problems.extend(found.map(|problem| format!("provider `{}`: {problem}", row.name)));
    }
    if rows.is_empty() {
        problems.push("has no provider: write [[provider]] tables".to_owned());
    }
    if problems.is_empty() { Ok(rows) } else { Err(invalid_file(file, &problems)) }
}

/// Paused providers for which the file does not set `paused`.
pub(super) async fn unmentioned_pauses(
    rows: &[ProviderRow],
    ledger: &Database,
) -> Result<Vec<ProviderName>, CommandError> {
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
pub(super) async fn warnings(rows: &[ProviderRow], config: &Config, services: &dyn Services) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let Some(provider) = services.validate(row).ok().filter(|provider| provider.enabled) else { continue };
        let unreachable = services.check_callable(&provider, config).err();
        let unreachable =
            unreachable.map(|problem| format!("{problem}; a worker with this configuration has no lane for it"));
        let unreadable = services.unreadable_secrets(&provider, config).await.into_iter();
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
