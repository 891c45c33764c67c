//! A provider file on its way into the database: read, checked as a whole, and held against what stands there.
//!
//! Refuses a file of which one row cannot be used, with every problem of it.

use std::collections::BTreeSet;
use std::path::Path;

use super::parse_name;
use crate::cli::connect::Engines;
use crate::cli::input::{self, ROWS_BYTES_MAX};
use crate::cli::{CommandError, Exit};
use crate::config::Config;
use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::Settings;

pub(super) async fn read(file: &Path) -> Result<String, CommandError> {
    input::text(file, ROWS_BYTES_MAX).await
}

/// Rows of a file in which every row can be meant.
pub fn checked_rows(text: &str, file: &Path, engines: &dyn Engines) -> Result<Vec<ProviderRow>, CommandError> {
    let rows = engines.parse_provider_file(text).map_err(|problems| unmeant(file, &problems))?;
    let mut problems = Vec::new();
    let mut names = BTreeSet::new();
    for row in &rows {
        if !names.insert(row.name.as_str()) {
            problems.push(format!("provider `{}`: stands in the file twice", row.name));
        }
        let found = engines.meant(row).map_or_else(|bad| bad.problems, |provider| engines.problems(&provider));
        let found = row.literal_credentials().into_iter().chain(row.left_out_values()).chain(found);
        problems.extend(found.map(|problem| format!("provider `{}`: {problem}", row.name)));
    }
    if rows.is_empty() {
        problems.push("names no provider: write [[provider]] tables".to_owned());
    }
    if problems.is_empty() { Ok(rows) } else { Err(unmeant(file, &problems)) }
}

/// Providers that somebody paused, of which the file does not say that they shall go on.
pub(super) async fn still_paused(
    rows: &[ProviderRow],
    settings: &dyn Settings,
) -> Result<Vec<ProviderName>, CommandError> {
    let mut paused = Vec::new();
    for row in rows.iter().filter(|row| row.pause_unsaid) {
        let name = parse_name(&row.name)?;
        if settings.rows(Some(&name)).await?.iter().any(|there| there.paused) {
            paused.push(name);
        }
    }
    Ok(paused)
}

/// What may be otherwise where the workers run: what this configuration lets requests reach, and secrets.
pub(super) async fn warnings(rows: &[ProviderRow], config: &Config, engines: &dyn Engines) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let Some(provider) = engines.meant(row).ok().filter(|provider| provider.enabled) else { continue };
        let unreachable = engines.usable(&provider, config).err();
        let unreachable = unreachable.map(|it| format!("{it}; a worker with this configuration has no lane for it"));
        let unreadable = engines.unreadable(&provider, config).await.into_iter();
        let unreadable = unreadable.map(|it| format!("not readable here: {it}; its workers must be able to read it"));
        let all = unreachable.into_iter().chain(unreadable);
        warnings.extend(all.map(|warning| format!("provider `{}`: {warning}", row.name)));
    }
    warnings
}

fn unmeant(file: &Path, problems: &[String]) -> CommandError {
    let title = format!("{}: nothing was applied:", file.display());
    let lines = [title].into_iter().chain(problems.iter().map(|problem| format!("  {problem}"))).collect();
    CommandError::Problems { exit: Exit::BadConfiguration, lines }
}
