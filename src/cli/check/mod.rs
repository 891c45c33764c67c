//! The `check` command: reports what is wrong or unsafe before a worker starts, as a list in a terminal, a table in a
//! pipe, or JSON.
//!
//! It changes nothing, and it reports every finding, not only the first.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;

use crate::app::outbound_policy;
use crate::cli::check::commits::{commit_finding, standby_finding};
use crate::cli::console::{TableShape, width, wrap_words};
use crate::cli::input::{self, PROVIDER_FILE_BYTES_MAX};
use crate::cli::provider::{check_callable, checked_rows, unreadable_secrets};
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::config::{Config, ConfigProblems, DatabaseUrl};
use crate::domain::format::count;
use crate::domain::provider::Provider;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::SettingsSnapshot;
use crate::ops::throttling::{ThrottlingHint, throttling_hint};
use crate::provider::http::HttpProvider;
use crate::provider::secret_grants::SecretUse;

mod account_rules;
mod backends;
mod commits;
mod static_checks;
mod text_order;

const FIX_PERMISSIONS: &str =
    "It contains payments: `chmod 600` it, and the files beside it whose names begin with its name";
const FIX_NOT_WRITABLE: &str = "Give the user of the workers a folder and a file that it may write, or set database.url; run check \
                    as that user";

const FIX_POSTGRES_UNREACHABLE: &str = "Check that PostgreSQL runs and `database.url` is right";
const FIX_DATABASE_ERROR: &str = "Do what the finding says, or correct `database.url`";

/// Longest time that one backend may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Check the configuration alone, without connecting to anything.
    #[arg(long)]
    no_connect: bool,
    /// Check this provider file as well.
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Reports an invalid configuration.
pub fn report_invalid_configuration(
    args: &Args,
    problems: &ConfigProblems,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let findings: Vec<Finding> = problems
        .0
        .iter()
        .map(|problem| {
            let what = format!("{} ({})", problem.message, problem.origin);
            Finding::error(format!("configuration {}", problem.key), what, &problem.fix)
        })
        .collect();
    print_findings(&findings, args.json, console)?;
    Ok(Exit::BadConfiguration)
}

/// Runs the command.
///
/// # Errors
/// When the output is closed. Findings are no errors; they decide the exit code.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let mut findings = static_checks::check_configuration(cx.config);
    let mut misconfigured = false;
    let (mut senders, mut all_senders) = (Vec::new(), false);
    if let Some(file) = &args.providers {
        let (found, file_providers) = check_provider_file(file, cx.config).await;
        senders.extend(file_providers);
        misconfigured = found.iter().any(|finding| finding.level == FindingLevel::Error);
        findings.extend(found);
    }
    if !args.no_connect {
        let (found, snapshot) = check_database(cx).await;
        findings.extend(found);
        let providers: Vec<&Provider> =
            snapshot.iter().flat_map(|snapshot| &snapshot.providers).filter_map(|row| row.as_ref().ok()).collect();
        findings.extend(backends::check_queue(cx, &providers).await);
        findings.extend(static_checks::check_delivery_timeout(&providers, cx.config));
        all_senders = snapshot.as_ref().is_some_and(|snapshot| snapshot.providers.iter().all(Result::is_ok));
        senders.extend(providers.into_iter().cloned());
        findings.extend(backends::check_postgres(cx.config).await);
        findings.extend(backends::check_redis(cx.config).await);
    }
    let outbound = outbound_policy(cx.config).ok();
    let uses = |row: &Provider| outbound.as_ref().map(|outbound| HttpProvider::secret_uses(row, outbound));
    let sent: Vec<(String, SecretUse)> = senders
        .iter()
        .flat_map(|row| uses(row).unwrap_or_default().into_iter().map(|used| (row.name.to_string(), used)))
        .collect();
    findings.extend(static_checks::check_secrets(cx.config, &sent, all_senders));
    findings.extend(static_checks::exposed_secrets(&sent, &cx.config.outbound_secrets).await);
    print_findings(&findings, args.json, cx.console)?;
    let failed = findings.iter().any(|finding| finding.level == FindingLevel::Error);
    Ok(match (misconfigured, failed) {
        (true, _) => Exit::BadConfiguration,
        (false, true) => Exit::Failed,
        (false, false) => Exit::Success,
    })
}

/// Findings, and the valid providers of the file.
async fn check_provider_file(file: &Path, config: &Config) -> (Vec<Finding>, Vec<Provider>) {
    let subject = format!("file {}", file.display());
    let text = match input::read_text(file, PROVIDER_FILE_BYTES_MAX).await {
        Ok(text) => text,
        Err(error) => {
            return (vec![Finding::error(subject, error.to_string(), "Check the path and the file")], Vec::new());
        }
    };
    match checked_rows(&text, file) {
        Err(error) => {
            let lines = error.lines();
            // After the title, each line is one problem.
            let problems = if lines.len() > 1 { &lines[1..] } else { &lines };
            let finding = |problem: &String| Finding::error(&subject, problem.trim(), "Correct the file");
            (problems.iter().map(finding).collect(), Vec::new())
        }
        Ok(rows) => {
            let mut findings = vec![Finding::ok(subject, count(rows.len() as u64, "provider"))];
            let providers: Vec<Provider> = rows.iter().filter_map(|row| row.validate(0).ok()).collect();
            let all: Vec<&Provider> = providers.iter().collect();
            for provider in &providers {
                // A file may be checked on another machine, with another configuration than the workers'.
                let fix = "Nothing, if the workers' configuration allows it";
                let unusable = not_callable(provider, config, fix, Finding::warning);
                findings.extend(static_checks::check_provider(provider, &all, config).into_iter().chain(unusable));
                findings.extend(missing_secrets(provider, config, Finding::warning).await);
            }
            (findings, providers)
        }
    }
}

/// How a finding of this level is made.
type NewFinding = fn(String, String, &'static str) -> Finding;

/// A finding on a valid row that a worker with this configuration cannot call.
fn not_callable(provider: &Provider, config: &Config, fix: &'static str, finding: NewFinding) -> Option<Finding> {
    Some(finding(format!("provider {}", provider.name), check_callable(provider, config).err()?, fix))
}

/// Secrets that an enabled provider needs and this process cannot read.
async fn missing_secrets(provider: &Provider, config: &Config, finding: NewFinding) -> Vec<Finding> {
    let fix = "Its lane stops at the first payment until its workers can read it; run check where the workers run, \
                as the worker's user";
    let missing = if provider.enabled { unreadable_secrets(provider, config).await } else { Vec::new() };
    let subject = format!("provider {}", provider.name);
    missing.into_iter().map(|what| finding(subject.clone(), format!("not readable here: {what}"), fix)).collect()
}

/// Findings, and the settings if they are readable.
async fn check_database(cx: &CommandContext<'_>) -> (Vec<Finding>, Option<SettingsSnapshot>) {
    let subject = format!("database {}", cx.config.database.url);
    let reached = async {
        let started = tokio::time::Instant::now();
        let ledger = cx.ledger().await?;
        ledger.settings_version().await?;
        let answered = started.elapsed();
        let snapshot = ledger.load_settings().await?;
        // The snapshot names unreadable rows.
        let rows: Vec<ProviderRow> = ledger.raw_rows(None).await?.into_iter().flatten().collect();
        let mut observed = text_order::text_order_findings(&subject, &ledger.text_order().await?);
        observed.extend(standby_finding(&subject, &ledger).await?);
        observed.extend(throttling_findings(&ledger, &snapshot).await?);
        let committed = commit_finding(&subject, &ledger, answered).await;
        Ok::<_, CommandError>((committed, snapshot, rows, observed))
    };
    match probe(&subject, reached).await {
        Err(silent) => (vec![silent], None),
        Ok(Err(CommandError::DatabaseMissing { path })) => {
            let what = format!("{} does not exist yet", path.display());
            let fix = "`sluicegate run` creates it here; if there should be one, run this in its directory or set database.url";
            let found = match static_checks::creation_problem(&path) {
                Some(why) => Finding::error(subject, format!("{what}, and cannot be created: {why}"), FIX_NOT_WRITABLE),
                None => Finding::warning(subject, what, fix),
            };
            (vec![found], None)
        }
        Ok(Err(error)) => {
            let fix = match (&error, &cx.config.database.url) {
                (CommandError::BackendUnavailable(_), DatabaseUrl::Postgres(_)) => FIX_POSTGRES_UNREACHABLE,
                _ => FIX_DATABASE_ERROR,
            };
            (vec![Finding::error(subject, error.to_string(), fix)], None)
        }
        Ok(Ok((committed, snapshot, rows, observed))) => {
            let file = match &cx.config.database.url {
                DatabaseUrl::Sqlite { path, .. } => path.as_deref(),
                DatabaseUrl::Postgres(_) => None,
            };
            // It names the file or the folder, which the database does not.
            let unwritable = file.and_then(static_checks::write_problem);
            let unwritable = unwritable.map(|why| Finding::error(subject.clone(), why, FIX_NOT_WRITABLE));
            let mut findings = vec![unwritable.unwrap_or(committed)];
            let readable = file.and_then(static_checks::readable_by_others);
            findings.extend(readable.map(|what| Finding::warning(subject, what, FIX_PERMISSIONS)));
            findings.extend(static_checks::check_snapshot(&snapshot, cx.config));
            findings.extend(rows.iter().flat_map(static_checks::check_raw_row));
            for provider in snapshot.providers.iter().filter_map(|row| row.as_ref().ok()) {
                let unusable = not_callable(provider, cx.config, static_checks::FIX_NOT_CALLABLE, Finding::error);
                findings.extend(unusable);
                findings.extend(missing_secrets(provider, cx.config, Finding::error).await);
            }
            findings.extend(observed);
            (findings, Some(snapshot))
        }
    }
}

/// A warning for each provider that answers with repeated 429s.
async fn throttling_findings(ledger: &Database, snapshot: &SettingsSnapshot) -> Result<Vec<Finding>, LedgerError> {
    let mut findings = Vec::new();
    for provider in snapshot.providers.iter().flatten().filter(|provider| provider.enabled) {
        let Some(ThrottlingHint { text, rate, limit, .. }) = throttling_hint(ledger, provider).await? else { continue };
        let name = &provider.name;
        let fix = match limit.zip(rate) {
            Some((limit, rate)) => format!("Ask the provider; `sluicegate limits set {name} {limit} {rate}` would do"),
            None => "Ask the provider for its limit, and whether others use the same account".to_owned(),
        };
        findings.push(Finding::warning(format!("provider {name}"), text, &fix));
    }
    Ok(findings)
}

/// Waits for the answer of a backend, which is at fault if there is none in time.
async fn probe<T>(subject: &str, answer: impl Future<Output = T>) -> Result<T, Finding> {
    timeout(PROBE_TIMEOUT, answer).await.map_err(|_| {
        let what = format!("did not answer within {} s", PROBE_TIMEOUT.as_secs());
        Finding::error(subject, what, "Check that it runs and that the network allows the connection")
    })
}

/// Width of the column of levels, with the blanks behind it.
const LEVEL_WIDTH: usize = 9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingLevel {
    Ok,
    /// Works, with a cost or a risk that the operator should accept on purpose.
    Warning,
    /// Does not work, or breaks a guarantee.
    Error,
}

impl FindingLevel {
    fn code(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What `check` found, and the fix of a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: FindingLevel,
    /// `database postgres://…`, `provider acme`, `configuration queue.url`.
    pub subject: String,
    pub what: String,
    /// The fix; `None` when there is nothing to fix.
    pub fix: Option<String>,
}

impl Finding {
    pub fn ok(subject: impl Into<String>, what: impl Into<String>) -> Self {
        Self { level: FindingLevel::Ok, subject: subject.into(), what: what.into(), fix: None }
    }

    pub fn warning(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Warning, fix: Some(fix.into()), ..Self::ok(subject, what) }
    }

    pub fn error(subject: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level: FindingLevel::Error, fix: Some(fix.into()), ..Self::ok(subject, what) }
    }
}

/// Shows findings as data.
pub fn print_findings(findings: &[Finding], json: bool, console: &mut Console) -> Result<(), CommandError> {
    if json {
        console.json(&findings)?;
        return Ok(());
    }
    match console.shape() {
        TableShape::Plain => {
            let cells = findings.iter().map(|Finding { level, subject, what, fix }| {
                vec![level.code().to_owned(), subject.clone(), what.clone(), fix.clone().unwrap_or_default()]
            });
            console.table(&["", "what", "finding", "fix"], &cells.collect::<Vec<_>>())?;
        }
        shape @ TableShape::Terminal { .. } => {
            let width = width(shape);
            findings.iter().try_for_each(|finding| console.lines(&entry(finding, width)))?;
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    console.message(&format!("errors: {}, warnings: {}", count(FindingLevel::Error), count(FindingLevel::Warning)))?;
    Ok(())
}

/// One entry of the list: the finding, and its fix below it.
fn entry(finding: &Finding, width: Option<usize>) -> String {
    let level = format!("{:<LEVEL_WIDTH$}", finding.level.code());
    let what = wrap_words(&level, &format!("{}: {}", finding.subject, finding.what), width);
    let fix = finding.fix.iter().map(|fix| wrap_words(&format!("{:LEVEL_WIDTH$}fix: ", ""), fix, width));
    [what].into_iter().chain(fix).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_shows_each_fix_below_its_finding() {
        let finding = Finding::warning(
            "provider stripe",
            "limit per-account does not count a message without account",
            "Set require = [\"account\"] to reject such a message",
        );
        assert_eq!(
            entry(&finding, Some(60)),
            "warning  provider stripe: limit per-account does not count\n         a message without account\n         \
             fix: Set require = [\"account\"] to reject such a\n              message"
        );
        let fine = Finding::ok("queue amqp://localhost/%2f", "answers");
        assert_eq!(entry(&fine, None), "ok       queue amqp://localhost/%2f: answers");
    }
}
