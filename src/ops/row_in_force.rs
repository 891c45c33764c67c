//! A provider's row that no worker can start with, and what is in force meanwhile.
//!
//! The row is invalid, or an invalid row of its quota may hold limits that no worker knows. Workers that loaded a valid row
//! keep it, so what is in force follows from their reports.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::domain::format::count;
use crate::domain::provider::ProviderName;
use crate::fleet::workers::{WorkerProcess, has_live_lane, visible_workers};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::worker::settings_sync::LoadedSettings;

/// A row that a worker which starts now cannot use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnusableRow {
    #[serde(skip)]
    pub provider: String,
    /// What is wrong and how to fix it, one line each.
    pub problems: Vec<String>,
    /// As a sentence.
    pub in_force: String,
}

impl fmt::Display for UnusableRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { provider, problems, in_force } = self;
        write!(f, "the row of {provider} cannot be used: {}. {in_force}", problems.join("; "))
    }
}

/// The rows that a worker which starts now cannot use, by name.
///
/// # Errors
/// When the database fails.
pub async fn unusable_rows(ledger: &Database) -> Result<Vec<UnusableRow>, LedgerError> {
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let unusable = |provider: &str, problems: Vec<String>| UnusableRow {
        provider: provider.to_owned(),
        problems,
        in_force: String::new(),
    };
    let invalid = known.invalid_rows.iter().map(|bad| unusable(&bad.provider, bad.problems.clone()));
    let valid = known.providers.values().filter(|row| row.enabled);
    let closed = valid.map(|row| unusable(row.name.as_str(), known.unknown_limits(&row.quota)));
    let mut found: Vec<UnusableRow> = invalid.chain(closed.filter(|row| !row.problems.is_empty())).collect();
    if found.is_empty() {
        return Ok(found);
    }
    found.sort_by(|a, b| a.provider.cmp(&b.provider));
    let workers = visible_workers(ledger.worker_reports().await?, Duration::ZERO, None);
    for row in &mut found {
        row.in_force = in_force(&workers, &row.provider);
    }
    Ok(found)
}

/// The same for one provider.
///
/// # Errors
/// When the database fails.
pub async fn unusable_row(ledger: &Database, provider: &ProviderName) -> Result<Option<UnusableRow>, LedgerError> {
    Ok(unusable_rows(ledger).await?.into_iter().find(|row| row.provider == provider.as_str()))
}

fn in_force(workers: &[WorkerProcess], provider: &str) -> String {
    let live = workers.iter().filter(|worker| worker.is_live()).count();
    let with_lane = workers.iter().filter(|worker| has_live_lane(worker, provider)).count();
    match with_lane {
        0 if live == 0 => "In force: nothing, because no worker runs".to_owned(),
        0 => "In force: nothing, because no worker has a lane for it".to_owned(),
        _ => format!(
            "In force: its last valid row, in {with_lane} of {}; a worker that starts now has no lane for it",
            count(live as u64, "worker")
        ),
    }
}
