//! `provider`: what the database says about payment providers, and a file that says it anew.
//!
//! Refuses to apply half a file: every row is checked before the first is written, and the write is one transaction.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;

use super::connect::{Engines, MissingDatabase};
use super::jobs::by;
use super::rows::{PROVIDER_HEADER, provider_cells};
use super::{CommandError, Console, Exit, declared};
use crate::config::Config;
use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::{ProviderRow, ShownRow};
use crate::ledger::said;
use crate::ledger::settings::{Change, Settings};
use crate::ops::{NotChanged, change};
pub(super) use crate::worker::send_again::lanes as names;

mod as_file;
mod file;

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
            Action::Apply { dry_run: false, .. } => MissingDatabase::IsMade,
            Action::Apply { dry_run: true, .. } => MissingDatabase::IsImagined,
            _ => MissingDatabase::IsAnError,
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
        #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
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
    Pause(Which),
    /// Start requests to a provider again, and lift the waits that it has named (429, Retry-After), in every worker.
    Resume(Which),
}

#[derive(Debug, clap::Args)]
struct Which {
    name: String,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
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
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Apply { file, dry_run, because, json } => {
            let rows = checked_rows(&file::read(file).await?, file, engines)?;
            for warning in file::warnings(&rows, config, engines).await {
                console.message(&format!("warning: {warning}"))?;
            }
            let settings = engines.settings(config).await?;
            let paused = file::still_paused(&rows, settings.as_ref()).await?;
            let changes = match dry_run {
                true => settings.apply(&rows, true).await?,
                false => settings.apply_by(&rows, &by(because.as_deref())).await?,
            };
            print_changes(&changes, *dry_run, *json, console)?;
            for name in paused {
                console.message(&format!(
                    "{name} stays paused, of which the file says nothing: `sluicegate provider resume {name}` resumes it"
                ))?;
            }
            if !dry_run {
                declare(config, engines, settings.as_ref()).await?;
            }
            Ok(Exit::Fine)
        }
        Action::List { json } => list(engines.settings(config).await?.as_ref(), *json, console).await,
        Action::Show { name, reveal, json } => {
            let name = parse_name(name)?;
            let row = row(engines.settings(config).await?.as_ref(), &name).await?;
            let row = if *reveal { ShownRow::revealed(&row) } else { ShownRow::from(&row) };
            if *json {
                console.json(&row)?;
            } else {
                console.lines(&as_file::as_file(&row)?)?;
            }
            Ok(Exit::Fine)
        }
        Action::Pause(which) => set_paused(engines.settings(config).await?.as_ref(), which, true, console).await,
        Action::Resume(which) => set_paused(engines.settings(config).await?.as_ref(), which, false, console).await,
    }
}

fn print_changes(changes: &[Change], dry_run: bool, json: bool, console: &mut Console) -> Result<(), CommandError> {
    if json {
        let changes: Vec<_> =
            changes.iter().map(|change| json!({ "provider": change.provider, "what": change.what })).collect();
        console.json(&json!({ "dry_run": dry_run, "changes": changes }))?;
        return Ok(());
    }
    for change in changes {
        console.line(&format!("{}: {}", change.provider, change.what))?;
    }
    match (changes.len(), dry_run) {
        (0, _) => console.message("nothing to change")?,
        (_, true) => console.message("dry run: nothing was applied")?,
        (_, false) => console.message("applied; workers follow within 2 s")?,
    }
    Ok(())
}

/// Lanes must exist before a producer publishes to them, even while no worker runs.
async fn declare(config: &Config, engines: &dyn Engines, settings: &dyn Settings) -> Result<(), CommandError> {
    let names = names(settings).await?;
    let declared = async {
        let queue = engines.queue(config).await?;
        Ok::<_, CommandError>(declared::declare(queue.as_ref(), &names, &names).await?)
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
    let (rows, exit) = readable(settings, console).await?;
    if json {
        console.json(&rows.iter().map(ShownRow::from).collect::<Vec<_>>())?;
    } else if !rows.is_empty() {
        console.table(&PROVIDER_HEADER, &rows.iter().map(provider_cells).collect::<Vec<_>>())?;
    } else if exit == Exit::Fine {
        console.message("no providers yet: `sluicegate provider apply FILE` adds some")?;
    }
    Ok(exit)
}

/// All rows as written, for a list; of one that cannot be read it is said, and the list is not whole.
pub(super) async fn readable(
    settings: &dyn Settings,
    console: &mut Console,
) -> Result<(Vec<ProviderRow>, Exit), CommandError> {
    let (mut rows, mut exit) = (Vec::new(), Exit::Fine);
    for row in settings.written(None).await? {
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

async fn row(settings: &dyn Settings, name: &ProviderName) -> Result<ProviderRow, CommandError> {
    settings.rows(Some(name)).await?.into_iter().next().ok_or_else(|| unknown(name.as_str()))
}

async fn set_paused(
    settings: &dyn Settings,
    Which { name, because, json }: &Which,
    paused: bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let changed = change::set_paused(settings, &parse_name(name)?, paused, Some(&by(because.as_deref()))).await?;
    if *json {
        console.json(&json!({ "provider": name, "paused": paused, "changed": changed }))?;
        return Ok(Exit::Fine);
    }
    let state = match paused {
        true => "is paused: its queue keeps collecting",
        false => "is resumed, and waits that it had named are lifted",
    };
    console.message(&format!("{name} {state}; workers follow within 2 s"))?;
    Ok(Exit::Fine)
}

/// A provider's name as it stands on the command line.
pub(super) fn parse_name(name: &str) -> Result<ProviderName, CommandError> {
    ProviderName::new(name).map_err(CommandError::Usage)
}

pub(super) fn unknown(name: &str) -> CommandError {
    NotChanged::NoProvider(name.to_owned()).into()
}

impl From<NotChanged> for CommandError {
    fn from(error: NotChanged) -> Self {
        Self::Failed(error.to_string())
    }
}
