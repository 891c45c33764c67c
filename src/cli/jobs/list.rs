//! `jobs list` and `dlq list`: payments by state and provider, a page at a time.
//!
//! Refuses to read everything: a page is bounded, and says with which id the next one begins.

use super::super::connect::Engines;
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::{State, parse_id};
use crate::config::Config;
use crate::domain::job::{JobId, Token};
use crate::ledger::operator::{Filter, JobLine, JobPage};

/// What is left out is not asked for.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    state: Option<State>,
    #[command(flatten)]
    page: Page,
}

/// Which page, and how.
#[derive(Debug, clap::Args)]
pub struct Page {
    #[arg(long)]
    provider: Option<String>,
    /// Payments of this account.
    #[arg(long, value_parser = parse_id)]
    account: Option<Token>,
    /// Payments on a page, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// The page behind this id.
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    after: Option<JobId>,
    #[arg(long)]
    json: bool,
}

/// Runs `jobs list`.
///
/// # Errors
/// When the database fails.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    page(args.state.map(|state| state.0), &args.page, config, engines, console).await
}

/// Prints one page.
///
/// # Errors
/// When the database fails.
pub async fn page(
    state: Option<&'static str>,
    page: &Page,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let provider = page.provider.as_deref().map(parse_name).transpose()?;
    let filter = Filter { state, provider, account: page.account.clone(), id: None };
    let jobs = engines.operator(config).await?.list(&filter, page.after.as_ref(), page.limit).await?;
    let JobPage { jobs, next } = JobPage::of(jobs, page.limit);
    if page.json {
        console.json(&JobPage { jobs, next })?;
        return Ok(Exit::Fine);
    }
    if jobs.is_empty() {
        console.message("no such payments")?;
        return Ok(Exit::Fine);
    }
    let header = ["id", "provider", "state", "amount", "attempts", "wake at", "reason"];
    console.table(&header, &jobs.iter().map(cells).collect::<Vec<_>>())?;
    if let Some(next) = next {
        console.message(&format!("more behind `--after {next}`"))?;
    }
    Ok(Exit::Fine)
}

fn cells(job: &JobLine) -> Vec<String> {
    // When it wakes says nothing of a job that sleeps for ever.
    let open = ["waiting", "sending", "unknown"].contains(&job.state.as_str());
    vec![
        job.id.clone(),
        job.provider.clone(),
        job.state.clone(),
        format!("{} {}", job.amount, job.currency),
        job.attempts.to_string(),
        if open { job.wake_at.to_string() } else { String::new() },
        job.reason.clone().unwrap_or_default(),
    ]
}
