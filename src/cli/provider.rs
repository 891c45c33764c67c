//! The `provider` command: lists, shows, pauses and resumes providers, and applies a provider file to the database.
//!
//! `apply` checks every row before it writes the first one, and writes in one transaction.

use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;
use serde_json::json;

use super::enqueue::declare_lanes;
use super::jobs::actor;
use super::{CommandError, Console, Exit};
use crate::app::{MissingDatabase, Services};
use crate::config::Config;
use crate::domain::format::count;
use crate::domain::provider::ProviderName;
use crate::fleet::pace::PaceOverview;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::provider_row::{ProviderRow, RedactedRow};
use crate::ledger::settings::SettingsChange;
use crate::ops::{SettingsChangeError, change};
use crate::worker::resend::provider_names;

mod file;
mod views;

pub use file::{check_callable, checked_rows, parse_rows, unreadable_secrets};
pub use views::{LIMIT_HEADER, drop_default_columns, limit_cells};

use views::{PROVIDER_HEADER, provider_cells};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

impl Args {
    /// `apply` needs a database, and a dry run needs none.
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
    /// Apply a provider file to the database, and print what changed. Providers that are not in the file stay.
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
    /// List all providers.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one provider with its limits and account rules, as a file that `apply` reads.
    Show(ShowArgs),
    /// List the accounts whose payments wait in the ledger, and what blocks them; most payments first.
    Flows(views::FlowsArgs),
    /// Stop sending requests to a provider, in every worker; its queue keeps collecting.
    Pause(PauseArgs),
    /// Send requests to a provider again, and clear the waits that it named (429, Retry-After), in every worker.
    Resume(PauseArgs),
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    name: String,
    /// Print the values of URL parameters (`?sig=…`) too: `apply` needs them.
    #[arg(long)]
    reveal: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A row as JSON, with its pace if the row is valid.
#[derive(Serialize)]
struct ShownRow<'a> {
    #[serde(flatten)]
    row: &'a RedactedRow,
    #[serde(skip_serializing_if = "Option::is_none")]
    pace: Option<PaceOverview>,
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
/// 78 when the file is invalid; 1 when a backend fails or a provider does not exist.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Apply { file, dry_run, because, json } => {
            let rows = checked_rows(&file::read_file(file).await?, file)?;
            for warning in file::warnings(&rows, config).await {
                console.message(&format!("warning: {warning}"))?;
            }
            let ledger = services.ledger(config).await?;
            let paused = file::unmentioned_pauses(&rows, &ledger).await?;
            let changes = match dry_run {
                true => ledger.apply_settings(&rows, true).await?,
                false => ledger.apply_settings_as(&rows, &actor(because.as_deref())).await?,
            };
            print_changes(&changes, *dry_run, *json, console)?;
            for name in paused {
                console.message(&format!(
                    "{name} stays paused, because the file does not set `paused`: `sluicegate provider resume {name}` resumes it"
                ))?;
            }
            if !dry_run {
                declare_all_lanes(config, services, &ledger).await?;
            }
            Ok(Exit::Success)
        }
        Action::List { json } => list(&services.ledger(config).await?, *json, console).await,
        Action::Show(which) => {
            let name = parse_name(&which.name)?;
            show(&services.ledger(config).await?, &name, which, console).await
        }
        Action::Flows(which) => {
            let name = parse_name(&which.name)?;
            find_row(&services.ledger(config).await?, &name).await?;
            views::list_flows(&services.ledger(config).await?, &name, which, console).await
        }
        Action::Pause(which) => set_paused(&services.ledger(config).await?, which, true, console).await,
        Action::Resume(which) => set_paused(&services.ledger(config).await?, which, false, console).await,
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
async fn declare_all_lanes(config: &Config, services: &Services, ledger: &Database) -> Result<(), CommandError> {
    let names = provider_names(ledger).await?;
    let declared = async {
        let queue = services.queue(config).await?;
        Ok::<_, CommandError>(declare_lanes(queue.as_ref(), &names, &names).await?)
    };
    let undeclared = declared.await.map_err(|error| {
        CommandError::Failed(format!(
            "the rows are applied, but the queues could not be declared: {error}. Fix that and run this again, or start a worker"
        ))
    })?;
    if undeclared.is_empty() {
        return Ok(());
    }
    let problems: Vec<String> = undeclared.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    let others = names.len() - undeclared.len();
    Err(CommandError::Failed(format!(
        "the rows are applied and the queues of {} declared, but not those of {}; fix that and run this again",
        count(others as u64, "provider"),
        problems.join("; ")
    )))
}

async fn show(
    ledger: &Database,
    name: &ProviderName,
    ShowArgs { reveal, json, .. }: &ShowArgs,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let row = find_row(ledger, name).await?;
    let row = if *reveal { RedactedRow::unredacted(&row) } else { RedactedRow::from(&row) };
    let pace = pace(ledger, name).await?;
    if *json {
        console.json(&ShownRow { row: &row, pace })?;
        return Ok(Exit::Success);
    }
    if let Some(pace) = pace {
        console.line(&format!("# pace: {}", pace.text))?;
    }
    console.lines(&views::to_provider_file(&row)?)?;
    Ok(Exit::Success)
}

/// The pace of a provider by its valid row; `None`: it has none.
async fn pace(ledger: &Database, name: &ProviderName) -> Result<Option<PaceOverview>, CommandError> {
    let snapshot = ledger.load_settings().await?;
    let rows = || snapshot.providers.iter().filter_map(|row| row.as_ref().ok());
    Ok(rows().find(|row| row.name == *name).and_then(|row| PaceOverview::new(row, rows())))
}

async fn list(ledger: &Database, json: bool, console: &mut Console) -> Result<Exit, CommandError> {
    let (rows, exit) = load_readable_rows(ledger, console).await?;
    if json {
        console.json(&rows.iter().map(RedactedRow::from).collect::<Vec<_>>())?;
    } else if !rows.is_empty() {
        console.table(&PROVIDER_HEADER, &rows.iter().map(provider_cells).collect::<Vec<_>>())?;
    } else if exit == Exit::Success {
        console.message("no providers yet: `sluicegate provider apply FILE` adds some")?;
    }
    Ok(exit)
}

/// All rows as written, for a list. An unreadable row is reported and left out, and the exit code is then 1.
pub(super) async fn load_readable_rows(
    ledger: &Database,
    console: &mut Console,
) -> Result<(Vec<ProviderRow>, Exit), CommandError> {
    let (mut rows, mut exit) = (Vec::new(), Exit::Success);
    for row in ledger.raw_rows(None).await? {
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

async fn find_row(ledger: &Database, name: &ProviderName) -> Result<ProviderRow, CommandError> {
    ledger.readable_rows(Some(name)).await?.into_iter().next().ok_or_else(|| unknown_provider(name.as_str()))
}

async fn set_paused(
    ledger: &Database,
    PauseArgs { name, because, json }: &PauseArgs,
    paused: bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let changed = change::set_paused(ledger, &parse_name(name)?, paused, Some(&actor(because.as_deref()))).await?;
    if *json {
        console.json(&json!({ "provider": name, "paused": paused, "changed": changed }))?;
        return Ok(Exit::Success);
    }
    let state = match paused {
        true => "is paused: its queue keeps collecting",
        false => "is resumed, and the waits that it named are cleared",
    };
    console.message(&format!("{name} {state}; workers follow within 2 s"))?;
    Ok(Exit::Success)
}

/// Parses a provider's name from the command line.
pub(super) fn parse_name(name: &str) -> Result<ProviderName, CommandError> {
    ProviderName::new(name).map_err(|problem| CommandError::Usage(problem.to_string()))
}

pub(super) fn unknown_provider(name: &str) -> CommandError {
    SettingsChangeError::NoProvider(name.to_owned()).into()
}

impl From<SettingsChangeError> for CommandError {
    fn from(error: SettingsChangeError) -> Self {
        Self::Failed(error.to_string())
    }
}
