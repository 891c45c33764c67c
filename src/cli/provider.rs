//! `provider`: what the database says about payment providers, and a file that says it anew.
//!
//! Refuses to apply half a file: every row is checked before the first is written, and the write is one transaction.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;

use super::connect::{MissingDatabase, Services};
use super::jobs::actor;
use super::rows::{PROVIDER_HEADER, provider_cells};
use super::{CommandError, Console, Exit, lane_declaration};
use crate::config::Config;
use crate::domain::provider::ProviderName;
use crate::ledger::decision_input;
use crate::ledger::provider_row::{ProviderRow, RedactedRow};
use crate::ledger::settings::{Settings, SettingsChange};
use crate::ops::{SettingsChangeError, change};
pub(super) use crate::worker::resend::provider_names as names;

mod file;
mod toml_export;

pub(super) use file::checked_rows;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

impl Args {
    /// Rows that are written need a database; those that would be written need none.
    #[must_use]
    pub fn missing_database(&self) -> MissingDatabase {
        match self.action {
            Action::Apply { dry_run: false, .. } => MissingDatabase::Create,
            Action::Apply { dry_run: true, .. } => MissingDatabase::InMemory,
            _ => MissingDatabase::Fail,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make the database say what a provider file says; prints what changed. Providers not in the file stay.
    Apply {
        /// TOML with `[[provider]]` tables; `-` is stdin.
        file: PathBuf,
        /// Print what would change, and change nothing.
        #[arg(long)]
        dry_run: bool,
        /// Why, for the audit.
        #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
        because: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// All providers, one line each.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// One provider with everything that hangs on it, in the form that `apply` reads.
    Show {
        name: String,
        /// Print the values of the addresses' parameters (`?sig=…`) too: what `apply` reads must hold them.
        #[arg(long)]
        reveal: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Start no more requests to a provider, in every worker; its queue keeps collecting.
    Pause(PauseArgs),
    /// Start requests to a provider again, and lift the waits that it has named (429, Retry-After), in every worker.
    Resume(PauseArgs),
}

#[derive(Debug, clap::Args)]
struct PauseArgs {
    name: String,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// 78 when the file cannot be meant; 1 when an engine fails or a provider does not exist.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Apply { file, dry_run, because, json } => {
            let rows = checked_rows(&file::read_file(file).await?, file, engines)?;
            for warning in file::warnings(&rows, config, engines).await {
                console.message(&format!("warning: {warning}"))?;
            }
            let settings = engines.settings(config).await?;
            let paused = file::unmentioned_pauses(&rows, settings.as_ref()).await?;
            let changes = match dry_run {
                true => settings.apply(&rows, true).await?,
                false => settings.apply_as(&rows, &actor(because.as_deref())).await?,
            };
            print_changes(&changes, *dry_run, *json, console)?;
            for name in paused {
                console.message(&format!(
                    "{name} stays paused, of which the file says nothing: `sluicegate provider resume {name}` resumes it"
                ))?;
            }
            if !dry_run {
                declare_all_lanes(config, engines, settings.as_ref()).await?;
            }
            Ok(Exit::Success)
        }
        Action::List { json } => list(engines.settings(config).await?.as_ref(), *json, console).await,
        Action::Show { name, reveal, json } => {
            let name = parse_name(name)?;
            let row = find_row(engines.settings(config).await?.as_ref(), &name).await?;
            let row = if *reveal { RedactedRow::unredacted(&row) } else { RedactedRow::from(&row) };
            if *json {
                console.json(&row)?;
            } else {
                console.lines(&toml_export::to_provider_file(&row)?)?;
            }
            Ok(Exit::Success)
        }
        Action::Pause(which) => set_paused(engines.settings(config).await?.as_ref(), which, true, console).await,
        Action::Resume(which) => set_paused(engines.settings(config).await?.as_ref(), which, false, console).await,
    }
}

fn print_changes(
    changes: &[SettingsChange],
    dry_run: bool,
    json: bool,
    console: &mut Console,
) -> Result<(), CommandError> {
    if json {
        let changes: Vec<_> =
            changes.iter().map(|change| json!({ "provider": change.provider, "what": change.description })).collect();
        console.json(&json!({ "dry_run": dry_run, "changes": changes }))?;
        return Ok(());
    }
    for change in changes {
        console.line(&format!("{}: {}", change.provider, change.description))?;
    }
    match (changes.len(), dry_run) {
        (0, _) => console.message("nothing to change")?,
        (_, true) => console.message("dry run: nothing was applied")?,
        (_, false) => console.message("applied; workers follow within 2 s")?,
    }
    Ok(())
}

/// Lanes must exist before a producer publishes to them, even while no worker runs.
async fn declare_all_lanes(
    config: &Config,
    engines: &dyn Services,
    settings: &dyn Settings,
) -> Result<(), CommandError> {
    let names = names(settings).await?;
    let declared = async {
        let queue = engines.queue(config).await?;
        Ok::<_, CommandError>(lane_declaration::declare_lanes(queue.as_ref(), &names, &names).await?)
    };
    let undeclared = declared.await.map_err(|error| {
        CommandError::Failed(format!(
            "the rows are applied, but the queues could not be declared: {error}. Run this again, or start a worker"
        ))
    })?;
    if undeclared.is_empty() {
        return Ok(());
    }
    let complaints: Vec<String> = undeclared.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    let others = names.len() - undeclared.len();
    Err(CommandError::Failed(format!(
        "the rows are applied and the queues of {others} declared, but not those of {}; run this again once that is mended",
        complaints.join("; ")
    )))
}

async fn list(settings: &dyn Settings, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let (rows, exit) = load_readable_rows(settings, console).await?;
    if json {
        console.json(&rows.iter().map(RedactedRow::from).collect::<Vec<_>>())?;
    } else if !rows.is_empty() {
        console.table(&PROVIDER_HEADER, &rows.iter().map(provider_cells).collect::<Vec<_>>())?;
    } else if exit == Exit::Success {
        console.message("no providers yet: `sluicegate provider apply FILE` adds some")?;
    }
    Ok(exit)
}

/// All rows as written, for a list; of one that cannot be read it is said, and the list is not whole.
pub(super) async fn load_readable_rows(
    settings: &dyn Settings,
    console: &mut Console,
) -> Result<(Vec<ProviderRow>, Exit), CommandError> {
    let (mut rows, mut exit) = (Vec::new(), Exit::Success);
    for row in settings.raw_rows(None).await? {
        match row {
            Ok(row) => rows.push(row),
            Err(bad) => {
                exit = Exit::Failed;
                console.message(&format!("provider `{}` is left out: {}", bad.provider, bad.problems.join("; ")))?;
            }
        }
    }
    Ok((rows, exit))
}

async fn find_row(settings: &dyn Settings, name: &ProviderName) -> Result<ProviderRow, CommandError> {
    settings.readable_rows(Some(name)).await?.into_iter().next().ok_or_else(|| unknown_provider(name.as_str()))
}

async fn set_paused(
    settings: &dyn Settings,
    PauseArgs { name, because, json }: &PauseArgs,
    paused: bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let changed = change::set_paused(settings, &parse_name(name)?, paused, Some(&actor(because.as_deref()))).await?;
    if *json {
        console.json(&json!({ "provider": name, "paused": paused, "changed": changed }))?;
        return Ok(Exit::Success);
    }
    let state = match paused {
        true => "is paused: its queue keeps collecting",
        false => "is resumed, and waits that it had named are lifted",
    };
    console.message(&format!("{name} {state}; workers follow within 2 s"))?;
    Ok(Exit::Success)
}

/// A provider's name as it stands on the command line.
pub(super) fn parse_name(name: &str) -> Result<ProviderName, CommandError> {
    ProviderName::new(name).map_err(CommandError::Usage)
}

pub(super) fn unknown_provider(name: &str) -> CommandError {
    SettingsChangeError::NoProvider(name.to_owned()).into()
}

impl From<SettingsChangeError> for CommandError {
    fn from(error: SettingsChangeError) -> Self {
        Self::Failed(error.to_string())
    }
}
