//! The `provider` command: lists, shows, pauses and resumes providers, and applies a provider file to the database.
//!
//! A file is read and validated as a whole. One with an invalid row is rejected, and the error lists every problem of the
//! file.

use std::path::Path;

use clap::Subcommand;
use serde::Serialize;

use super::{CommandContext, CommandError, Console, Exit};
use crate::app::{MissingDatabase, outbound_policy};
use crate::config::Config;
use crate::domain::provider::{Provider, ProviderName};
use crate::fleet::pace::PaceOverview;
use crate::ledger::database::Database;
use crate::ledger::provider_row::{ParsedProviderFile, ProviderRow, RedactedRow, mark_unmentioned, read_provider_file};
use crate::ops::SettingsChangeError;
use crate::ops::row_in_force::{UnusableRow, unusable_row, unusable_rows};
use crate::ops::throttling::{ThrottlingHint, throttling_hint};
use crate::provider::http::HttpProvider;

mod apply;
mod pause;
mod views;

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
            Action::Apply(apply::ApplyArgs { dry_run: false, .. }) => MissingDatabase::Create,
            Action::Apply(apply::ApplyArgs { dry_run: true, .. }) => MissingDatabase::InMemory,
            _ => MissingDatabase::Fail,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Apply a provider file to the database, and print what changed. Providers that are not in the file stay, and so do
    /// changes by hand. If the file changes the same values, nothing is applied.
    Apply(apply::ApplyArgs),
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
    /// Stop sending requests to a provider, in every worker; its payments are recorded and wait. With --all, to every provider.
    Pause(pause::PauseArgs),
    /// Send requests to a provider again, and clear the waits that it named (429, Retry-After), in every worker. With
    /// --all, to the providers that `pause --all` has paused; their waits stay. A held lane starts no charge until
    /// --release-hold.
    Resume(pause::ResumeArgs),
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
    /// What the provider seems to allow, after repeated 429s.
    #[serde(skip_serializing_if = "Option::is_none")]
    throttling: Option<ThrottlingHint>,
    /// Why the row cannot be used, and what is in force; absent for a row in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    unusable: Option<UnusableRow>,
}

/// Runs the command.
///
/// # Errors
/// 78 when the file is invalid; 1 when a backend fails or a provider does not exist.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Apply(args) => apply::run(args, cx).await,
        Action::List { json } => list(&cx.ledger().await?, *json, cx.console).await,
        Action::Show(which) => {
            let name = parse_name(&which.name)?;
            show(&cx.ledger().await?, &name, which, cx.console).await
        }
        Action::Flows(which) => {
            let name = parse_name(&which.name)?;
            let ledger = cx.ledger().await?;
            find_row(&ledger, &name).await?;
            views::list_flows(&ledger, &name, which, cx.console).await
        }
        Action::Pause(which) => pause::pause(&cx.ledger().await?, which, cx.console).await,
        Action::Resume(which) => pause::resume(&cx.ledger().await?, which, cx.console).await,
    }
}

async fn show(
    ledger: &Database,
    name: &ProviderName,
    ShowArgs { reveal, json, .. }: &ShowArgs,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let unusable = unusable_row(ledger, name).await?;
    let raw = match (find_row(ledger, name).await, &unusable) {
        (Err(CommandError::Failed(_)), Some(unusable)) => return Err(CommandError::Failed(unusable.to_string())),
        (found, _) => found?,
    };
    let exit = if unusable.is_some() { Exit::Failed } else { Exit::Success };
    let row = if *reveal { RedactedRow::unredacted(&raw) } else { RedactedRow::from(&raw) };
    let (pace, throttling) = (pace(ledger, name).await?, throttling(ledger, &raw).await?);
    if *json {
        console.json(&ShownRow { row: &row, pace, throttling, unusable })?;
        return Ok(exit);
    }
    if let Some(unusable) = &unusable {
        console.message(&unusable.to_string())?;
    }
    if let Some(pace) = pace {
        console.line(&format!("# pace: {}", pace.text))?;
    }
    for limit in &raw.limits {
        if let Some(returns) = limit.returns {
            console.line(&format!("# limit {}: {} {returns}", limit.name, limit.describe_rate()))?;
        }
    }
    if let Some(hint) = throttling {
        console.line(&format!("# 429s: {}", hint.text))?;
    }
    console.lines(&views::to_provider_file(&row)?)?;
    Ok(exit)
}

/// The pace of a provider by its valid row; `None`: it has none.
async fn pace(ledger: &Database, name: &ProviderName) -> Result<Option<PaceOverview>, CommandError> {
    let snapshot = ledger.load_settings().await?;
    let rows = || snapshot.providers.iter().filter_map(|row| row.as_ref().ok());
    Ok(rows().find(|row| row.name == *name).and_then(|row| PaceOverview::new(row, rows())))
}

/// The hint after repeated 429s; `None` also for an invalid row.
async fn throttling(ledger: &Database, row: &ProviderRow) -> Result<Option<ThrottlingHint>, CommandError> {
    let Ok(provider) = row.validate(0) else { return Ok(None) };
    Ok(throttling_hint(ledger, &provider).await?)
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

/// All rows as written, for a list. A row that cannot be used is reported, and the exit code is then 1. An unreadable one
/// is left out.
pub(super) async fn load_readable_rows(
    ledger: &Database,
    console: &mut Console,
) -> Result<(Vec<ProviderRow>, Exit), CommandError> {
    let rows = ledger.raw_rows(None).await?.into_iter().flatten().collect();
    let exit = report_unusable(ledger, |_| true, console).await?;
    Ok((rows, exit))
}

/// Reports the rows of these names that no worker can start with, each with what is in force. The exit code is then 1.
async fn report_unusable(
    ledger: &Database,
    concerns: impl Fn(&str) -> bool,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let mut exit = Exit::Success;
    for row in unusable_rows(ledger).await?.iter().filter(|row| concerns(&row.provider)) {
        console.message(&row.to_string())?;
        exit = Exit::Failed;
    }
    Ok(exit)
}

/// The same for one provider whose row was changed.
pub(super) async fn report_if_unusable(
    ledger: &Database,
    name: &ProviderName,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    report_unusable(ledger, |row| row == name.as_str(), console).await
}

async fn find_row(ledger: &Database, name: &ProviderName) -> Result<ProviderRow, CommandError> {
    ledger.readable_rows(Some(name)).await?.into_iter().next().ok_or_else(|| unknown_provider(name.as_str()))
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
    mark_unmentioned(text, &mut rows);
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

fn invalid_file(file: &Path, problems: &[String]) -> CommandError {
    let title = format!("{}: nothing was applied:", file.display());
    let lines = [title].into_iter().chain(problems.iter().map(|problem| format!("  {problem}"))).collect();
    CommandError::Problems { exit: Exit::BadConfiguration, lines }
}
