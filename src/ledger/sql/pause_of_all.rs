//! The pause of all providers in SQL: it pauses in one transaction, and a resume finds what it has paused.
//!
//! Both statements run under the lock of the settings' version, so no provider changes between the read and the write.
//! Triggers write author and instants, and end the pause for a provider that something else resumes or deletes.

use super::dialect::Template;
use super::engine::args;
use super::result::from_row;
use super::settings::{SET_PAUSED, TRIES_MAX};
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::pause_of_all::{PauseAllResult, PauseOfAll, ResumeAllResult};

static IN_FORCE: Template = Template::new(
    "SELECT pause, provider, {ms:at} AS at_ms, COALESCE(os_user, who) AS author, because \
     FROM pauses_of_all WHERE ended IS NULL ORDER BY id",
);

/// Extends the pause that is in force; else begins one.
static HOLD: Template = Template::new(
    "INSERT INTO pauses_of_all (pause, provider) \
     SELECT COALESCE(min(CASE WHEN ended IS NULL THEN pause END), max(pause) + 1, 1), CAST($1 AS text) FROM pauses_of_all",
);

static RESUMED: Template = Template::new(
    "SELECT DISTINCT provider FROM pauses_of_all WHERE pause = $1 AND ended = 'resumed' ORDER BY provider",
);

static END: Template = Template::new("UPDATE pauses_of_all SET ended = 'resumed' WHERE ended IS NULL");

/// The pause no longer holds a provider that is paused by itself.
pub(super) static KEEP: Template =
    Template::new("UPDATE pauses_of_all SET ended = 'kept' WHERE provider = $1 AND ended IS NULL");

/// A provider that a pause of all holds.
struct HeldRow {
    pause: i64,
    provider: String,
    at: EpochMs,
    author: String,
    because: Option<String>,
}

from_row!(row => HeldRow { pause, provider, at, author, because });

/// Names of all providers at one version of the settings, by whether they are paused.
struct PausedNames {
    version: i64,
    paused: Vec<String>,
    running: Vec<String>,
}

impl Database {
    /// The pause of all providers that is in force.
    pub async fn pause_of_all(&self) -> Result<Option<PauseOfAll>, LedgerError> {
        let held: Vec<HeldRow> = self.query_as(&IN_FORCE, []).await?;
        Ok(pause_of_all(held))
    }

    /// Pauses every provider that is not paused, in one transaction. A pause of all that is in force is extended.
    pub async fn pause_all(&self, by: &Actor) -> Result<PauseAllResult, LedgerError> {
        for _ in 0..TRIES_MAX {
            let PausedNames { version, paused, running } = self.names_by_pause().await?;
            let before = self.pause_of_all().await?;
            let is_held = |name: &String| before.iter().any(|pause| pause.providers.contains(name));
            let (held, paused_before): (Vec<_>, Vec<_>) = paused.into_iter().partition(is_held);
            if running.is_empty() {
                let id = before.map(|pause| pause.id);
                return Ok(PauseAllResult { id, paused: running, held, paused_before });
            }
            let mut steps = vec![self.unless_changed_since(version)];
            for name in &running {
                steps.push(self.must_affect(&SET_PAUSED, args![name, true]));
                steps.push(self.must_affect(&HOLD, args![name]));
            }
            let last = steps.len();
            steps.push(self.step(&IN_FORCE, []));
            if let Some(rows) = self.atomically_by(steps, Some(by)).await? {
                let rows = rows.into_iter().nth(last).unwrap_or_default();
                let id = rows.first().map(|row| row.get("pause")).transpose()?;
                return Ok(PauseAllResult { id, paused: running, held, paused_before });
            }
        }
        Err(changes_too_fast("paused"))
    }

    /// Resumes the providers that the pause of all in force has paused, and no others. Waits that providers asked for
    /// stay.
    pub async fn resume_all(&self, by: &Actor) -> Result<ResumeAllResult, LedgerError> {
        for _ in 0..TRIES_MAX {
            let PausedNames { version, paused, running } = self.names_by_pause().await?;
            let Some(pause) = self.pause_of_all().await? else {
                return Ok(ResumeAllResult { still_paused: paused, ..ResumeAllResult::default() });
            };
            let (resumed, still_paused): (Vec<_>, Vec<_>) =
                paused.into_iter().partition(|name| pause.providers.contains(name));
            let earlier = self.query(&RESUMED, args![pause.id]).await?;
            let earlier: Vec<String> = earlier.iter().map(|row| row.get("provider")).collect::<Result<_, _>>()?;
            let mut steps = vec![self.unless_changed_since(version)];
            steps.extend(resumed.iter().map(|name| self.must_affect(&SET_PAUSED, args![name, false])));
            // Its triggers may have been off while a provider was changed.
            steps.push(self.step(&END, []));
            if self.atomically_by(steps, Some(by)).await?.is_some() {
                let resumed_before = earlier.into_iter().filter(|name| running.contains(name)).collect();
                return Ok(ResumeAllResult { id: Some(pause.id), resumed, resumed_before, still_paused });
            }
        }
        Err(changes_too_fast("resumed"))
    }

    /// Whether the pause of all in force holds the provider.
    pub async fn is_held_by_pause_of_all(&self, provider: &ProviderName) -> Result<bool, LedgerError> {
        Ok(self.pause_of_all().await?.is_some_and(|pause| pause.providers.iter().any(|name| name == provider.as_str())))
    }

    async fn names_by_pause(&self) -> Result<PausedNames, LedgerError> {
        let (version, rows) = self.read_settings(None).await?;
        let mut names = PausedNames { version, paused: Vec::new(), running: Vec::new() };
        for (name, row) in rows {
            // Workers may use the last valid version of a row that cannot be read.
            let paused = row.map_or_else(|invalid| invalid.paused, |(row, _)| row.paused);
            if paused { names.paused.push(name) } else { names.running.push(name) }
        }
        Ok(names)
    }
}

fn pause_of_all(held: Vec<HeldRow>) -> Option<PauseOfAll> {
    let first = held.first()?;
    let (id, since) = (first.pause, DatabaseTime(first.at.0).to_string());
    let (by, because) = (first.author.clone(), first.because.clone());
    let mut providers: Vec<String> = held.into_iter().map(|row| row.provider).collect();
    providers.sort();
    Some(PauseOfAll { id, since, by, because, providers })
}

fn changes_too_fast(done: &str) -> LedgerError {
    LedgerError::Unavailable(format!("settings change faster than all providers can be {done}: try again"))
}
