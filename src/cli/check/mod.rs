//! The `check` command: reports what is wrong or unsafe before a worker starts.
//!
//! It changes nothing, and it reports every finding, not only the first.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::connect::{Probe, Services};
use super::input::{self, PROVIDER_FILE_BYTES_MAX};
use super::{CommandError, Console, Exit};
use crate::config::{Config, ConfigProblems, DatabaseUrl};
use crate::domain::format::count;
use crate::domain::provider::Provider;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::SettingsSnapshot;
use crate::provider::secret_grants::SecretUse;

mod file;
mod finding;
mod queue;
mod static_checks;

pub use finding::{Finding, FindingLevel};

use finding::print_findings;

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
pub async fn run(
    args: &Args,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let mut findings = static_checks::check_configuration(config);
    let mut misconfigured = false;
    let (mut senders, mut all_senders) = (Vec::new(), false);
    if let Some(file) = &args.providers {
        let (found, file_providers) = check_provider_file(file, config, services).await;
        senders.extend(file_providers);
        misconfigured = found.iter().any(|finding| finding.level == FindingLevel::Error);
        findings.extend(found);
    }
    if !args.no_connect {
        let (found, snapshot) = check_database(config, services).await;
        findings.extend(found);
        let providers: Vec<&Provider> =
            snapshot.iter().flat_map(|snapshot| &snapshot.providers).filter_map(|row| row.as_ref().ok()).collect();
        findings.extend(queue::check_queue(config, services, &providers).await);
        findings.extend(static_checks::check_delivery_timeout(&providers, config));
        all_senders = snapshot.as_ref().is_some_and(|snapshot| snapshot.providers.iter().all(Result::is_ok));
        senders.extend(providers.into_iter().cloned());
        for probe in services.probes(config) {
            findings.extend(run_probe(probe.as_ref()).await);
        }
    }
    let sent: Vec<(String, SecretUse)> = senders
        .iter()
        .flat_map(|row| services.secret_uses(row, config).into_iter().map(|used| (row.name.to_string(), used)))
        .collect();
    findings.extend(static_checks::check_secrets(config, &sent, all_senders));
    findings.extend(file::exposed_secrets(&sent, &config.outbound_secrets).await);
    print_findings(&findings, args.json, console)?;
    let failed = findings.iter().any(|finding| finding.level == FindingLevel::Error);
    Ok(match (misconfigured, failed) {
        (true, _) => Exit::BadConfiguration,
        (false, true) => Exit::Failed,
        (false, false) => Exit::Success,
    })
}

/// Findings, and the valid providers of the file.
async fn check_provider_file(file: &Path, config: &Config, services: &dyn Services) -> (Vec<Finding>, Vec<Provider>) {
    let subject = format!("file {}", file.display());
    let text = match input::read_text(file, PROVIDER_FILE_BYTES_MAX).await {
        Ok(text) => text,
        Err(error) => {
            return (vec![Finding::error(subject, error.to_string(), "Check the path and the file")], Vec::new());
        }
    };
    match super::provider::checked_rows(&text, file, services) {
        Err(error) => {
            let lines = error.lines();
            // After the title, each line is one problem.
            let problems = if lines.len() > 1 { &lines[1..] } else { &lines };
            let finding = |problem: &String| Finding::error(&subject, problem.trim(), "Correct the file");
            (problems.iter().map(finding).collect(), Vec::new())
        }
        Ok(rows) => {
            let mut findings = vec![Finding::ok(subject, count(rows.len() as u64, "provider"))];
            let providers: Vec<Provider> = rows.iter().filter_map(|row| services.validate(row).ok()).collect();
            let all: Vec<&Provider> = providers.iter().collect();
            for provider in &providers {
                // A file may be checked on another machine, with another configuration than the workers'.
                let unusable = not_callable(provider, config, services).map(|(subject, problem)| {
                    let fix = "Nothing, if the workers' configuration allows it";
                    Finding::warning(subject, problem, fix)
                });
                findings.extend(static_checks::check_provider(provider, &all, config).into_iter().chain(unusable));
                findings.extend(unreadable_secrets(provider, config, services, Finding::warning).await);
            }
            (findings, providers)
        }
    }
}

/// The subject and the problem of a valid row that a worker with this configuration cannot call.
fn not_callable(provider: &Provider, config: &Config, services: &dyn Services) -> Option<(String, String)> {
    Some((format!("provider {}", provider.name), services.check_callable(provider, config).err()?))
}

/// Secrets that an enabled provider needs and this process cannot read.
async fn unreadable_secrets(
    provider: &Provider,
    config: &Config,
    services: &dyn Services,
    finding: fn(String, String, &'static str) -> Finding,
) -> Vec<Finding> {
    let fix = "Its lane stops at the first payment until its workers can read it; run check where the workers run, \
                as the worker's user";
    let missing = if provider.enabled { services.unreadable_secrets(provider, config).await } else { Vec::new() };
    let subject = format!("provider {}", provider.name);
    missing.into_iter().map(|what| finding(subject.clone(), format!("not readable here: {what}"), fix)).collect()
}

/// Findings, and the settings if they are readable.
async fn check_database(config: &Config, services: &dyn Services) -> (Vec<Finding>, Option<SettingsSnapshot>) {
    let subject = format!("database {}", config.database.url);
    let reached = async {
        let started = tokio::time::Instant::now();
        let ledger = services.ledger(config).await?;
        ledger.settings_version().await?;
        let answered = started.elapsed();
        let snapshot = ledger.load_settings().await?;
        // The snapshot names unreadable rows.
        let rows: Vec<ProviderRow> = ledger.raw_rows(None).await?.into_iter().flatten().collect();
        Ok::<_, CommandError>((answered, snapshot, rows))
    };
    match tokio::time::timeout(PROBE_TIMEOUT, reached).await {
        Err(_) => (vec![no_response(subject)], None),
        Ok(Err(CommandError::DatabaseMissing { path })) => {
            let what = format!("{} does not exist yet", path.display());
            let fix = "`sluicegate run` creates it here; if there should be one, run this in its directory or set database.url";
            let found = match file::creation_problem(&path) {
                Some(why) => Finding::error(subject, format!("{what}, and cannot be created: {why}"), FIX_NOT_WRITABLE),
                None => Finding::warning(subject, what, fix),
            };
            (vec![found], None)
        }
        Ok(Err(error)) => {
            let fix = match (&error, &config.database.url) {
                (CommandError::BackendUnavailable(_), DatabaseUrl::Postgres(_)) => FIX_POSTGRES_UNREACHABLE,
                _ => FIX_DATABASE_ERROR,
            };
            (vec![Finding::error(subject, error.to_string(), fix)], None)
        }
        Ok(Ok((answered, snapshot, rows))) => {
            let mut findings = vec![Finding::ok(subject.clone(), format!("answers in {} ms", answered.as_millis()))];
            let file = database_file(config);
            let readable = file.and_then(file::readable_by_others);
            findings.extend(readable.map(|what| Finding::warning(subject.clone(), what, FIX_PERMISSIONS)));
            findings
                .extend(file.and_then(file::write_problem).map(|why| Finding::error(subject, why, FIX_NOT_WRITABLE)));
            findings.extend(static_checks::check_snapshot(&snapshot, config));
            findings.extend(rows.iter().flat_map(static_checks::check_raw_row));
            for provider in snapshot.providers.iter().filter_map(|row| row.as_ref().ok()) {
                let unusable = not_callable(provider, config, services);
                findings.extend(
                    unusable
                        .map(|(subject, problem)| Finding::error(subject, problem, static_checks::FIX_NOT_CALLABLE)),
                );
                findings.extend(unreadable_secrets(provider, config, services, Finding::error).await);
            }
            (findings, Some(snapshot))
        }
    }
}

/// The file of an embedded database.
fn database_file(config: &Config) -> Option<&Path> {
    match &config.database.url {
        DatabaseUrl::Sqlite { path, .. } => path.as_deref(),
        DatabaseUrl::Postgres(_) => None,
    }
}

async fn run_probe(probe: &dyn Probe) -> Vec<Finding> {
    match tokio::time::timeout(PROBE_TIMEOUT, probe.run()).await {
        Ok(findings) => findings,
        Err(_) => vec![no_response(probe.subject())],
    }
}

pub(super) fn no_response(subject: String) -> Finding {
    let what = format!("did not answer within {} s", PROBE_TIMEOUT.as_secs());
    Finding::error(subject, what, "Check that it runs and that the network allows the connection")
}
