//! `check`: says what is wrong or unsafe before a payment finds out.
//!
//! Refuses to change anything, and to stop at the first finding.

use std::path::PathBuf;
use std::time::Duration;

use super::connect::{Engines, Probe};
use super::{CommandError, Console, Exit};
use crate::config::{Config, Problems};

mod finding;
mod judge;

pub use finding::{Finding, Level};

use finding::print;

/// Longest time that one dependency may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Judge the configuration alone, and reach for nothing.
    #[arg(long)]
    no_connect: bool,
    /// Judge this provider file as well.
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    #[arg(long)]
    json: bool,
}

/// Reports a configuration that cannot be meant.
///
/// # Errors
/// When the output is closed.
pub fn misconfigured(args: &Args, problems: &Problems, console: &mut Console) -> Result<Exit, CommandError> {
    let findings: Vec<Finding> = problems
        .0
        .iter()
        .map(|problem| {
            let what = format!("{} ({})", problem.what, problem.origin);
            Finding::error(format!("configuration {}", problem.key), what, &problem.mend)
        })
        .collect();
    print(&findings, args.json, console)?;
    Ok(Exit::BadConfiguration)
}

/// Runs the command.
///
/// # Errors
/// When the provider file cannot be read or the output is closed. Findings are no errors; they make the exit code.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let mut findings = judge::configuration(config);
    let mut misconfigured = false;
    if let Some(file) = &args.providers {
        let judged = provider_file(file, config, engines);
        misconfigured = judged.iter().any(|finding| finding.level == Level::Error);
        findings.extend(judged);
    }
    if !args.no_connect {
        findings.extend(database(config, engines).await);
        findings.extend(queue(config, engines).await);
        for probe in engines.probes(config) {
            findings.extend(in_time(probe.as_ref()).await);
        }
    }
    print(&findings, args.json, console)?;
    let failed = findings.iter().any(|finding| finding.level == Level::Error);
    Ok(match (misconfigured, failed) {
        (true, _) => Exit::BadConfiguration,
        (false, true) => Exit::Failed,
        (false, false) => Exit::Fine,
    })
}

fn provider_file(file: &std::path::Path, config: &Config, engines: &dyn Engines) -> Vec<Finding> {
    let subject = format!("file {}", file.display());
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return vec![Finding::error(subject, error.to_string(), "Check the path")],
    };
    match super::provider::checked_rows(&text, file, engines) {
        Err(error) => vec![Finding::error(subject, error.to_string(), "Mend the rows that are named")],
        Ok(rows) => {
            let meant = rows.iter().filter_map(|row| engines.meant(row).ok());
            let mut findings = vec![Finding::ok(subject, format!("{} providers", rows.len()))];
            findings.extend(meant.flat_map(|provider| judge::provider(&provider, config)));
            findings
        }
    }
}

async fn database(config: &Config, engines: &dyn Engines) -> Vec<Finding> {
    let subject = format!("database {}", config.database.url);
    let reached = async {
        let started = tokio::time::Instant::now();
        let settings = engines.settings(config).await?;
        settings.version().await?;
        let answered = started.elapsed();
        let snapshot = settings.load().await?;
        Ok::<_, CommandError>((answered, snapshot))
    };
    match tokio::time::timeout(PROBE_TIMEOUT, reached).await {
        Err(_) => vec![silent(subject)],
        Ok(Err(error)) => {
            vec![Finding::error(subject, error.to_string(), "Do what it says, or check that it runs and database.url")]
        }
        Ok(Ok((answered, snapshot))) => {
            let mut findings = vec![Finding::ok(subject, format!("answers in {} ms", answered.as_millis()))];
            findings.extend(judge::snapshot(&snapshot, config));
            findings
        }
    }
}

async fn queue(config: &Config, engines: &dyn Engines) -> Vec<Finding> {
    let subject = format!("queue {}", config.queue.url);
    let reached = async { Ok::<_, CommandError>(engines.queue(config).await?.ping().await?) };
    match tokio::time::timeout(PROBE_TIMEOUT, reached).await {
        Err(_) => vec![silent(subject)],
        Ok(Err(error)) => vec![Finding::error(subject, error.to_string(), "Check that it runs and queue.url")],
        Ok(Ok(())) => vec![Finding::ok(subject, "answers".to_owned())],
    }
}

async fn in_time(probe: &dyn Probe) -> Vec<Finding> {
    match tokio::time::timeout(PROBE_TIMEOUT, probe.look()).await {
        Ok(findings) => findings,
        Err(_) => vec![silent(probe.subject())],
    }
}

fn silent(subject: String) -> Finding {
    let what = format!("did not answer within {} s", PROBE_TIMEOUT.as_secs());
    Finding::error(subject, what, "Check that it runs and that the network lets us through")
}
