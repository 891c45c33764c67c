//! The `jobs list` and `dlq list` commands: payments by state and provider, one page at a time.
//!
//! Each page is bounded. If there are more payments, a message names the id for the next page.

use super::super::connect::Services;
use super::super::console::TableShape;
use super::super::provider::{parse_name, unknown_provider};
use super::super::{CommandError, Console, Exit};
use super::{StateArg, parse_id};
use crate::amount::display_amount;
use crate::config::Config;
use crate::domain::job::{Identifier, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{DatabaseTime, JobFilter, JobPage, JobSummary};
use crate::ops::unix_ms;

/// Filters and the page; without a filter all payments are listed.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    state: Option<StateArg>,
    #[command(flatten)]
    page: PageArgs,
}

/// The page and its format.
#[derive(Debug, clap::Args)]
pub struct PageArgs {
    #[arg(long)]
    provider: Option<String>,
    /// Payments of this account.
    #[arg(long, value_parser = parse_id, allow_hyphen_values = true)]
    account: Option<Identifier>,
    /// Payments per page, 1 to 1000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// The page after this id.
    #[arg(long, value_name = "ID", value_parser = parse_id, allow_hyphen_values = true)]
    after: Option<JobId>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `jobs list`.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    print_page(args.state.map(|state| state.0), &args.page, config, services, console).await
}

/// Prints one page.
pub async fn print_page(
    state: Option<&'static str>,
    page: &PageArgs,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let provider = page.provider.as_deref().map(parse_name).transpose()?;
    let filter = JobFilter { state, provider: provider.clone(), account: page.account.clone(), id: None };
    let listed = services.ledger(config).await?.list_jobs(&filter, page.after.as_ref(), page.limit).await?;
    if listed.jobs.is_empty() && listed.unreadable.is_empty() {
        check_provider_exists(provider.as_ref(), config, services).await?;
    }
    for row in &listed.unreadable {
        console.message(&format!("warning: {row}"))?;
    }
    if page.json {
        console.json(&listed)?;
        return Ok(Exit::Success);
    }
    let JobPage { jobs, unreadable, next } = listed;
    if jobs.is_empty() && unreadable.is_empty() {
        console.message("no such payments")?;
        return Ok(Exit::Success);
    }
    let header = ["id", "provider", "state", "amount", "attempts", "wake at", "reason"];
    let (now, shape) = (DatabaseTime(unix_ms()), console.shape());
    if !jobs.is_empty() {
        console.table(&header, &jobs.iter().map(|job| cells(job, now, shape)).collect::<Vec<_>>())?;
    }
    if let Some(next) = next {
        console.message(&format!("next page: `--after {next}`"))?;
    }
    Ok(Exit::Success)
}

/// Checks that a provider without payments exists, so that a typo in its name is reported.
///
/// # Errors
/// When the provider does not exist, or the database fails.
pub async fn check_provider_exists(
    provider: Option<&ProviderName>,
    config: &Config,
    services: &dyn Services,
) -> Result<(), CommandError> {
    let Some(name) = provider else { return Ok(()) };
    match services.ledger(config).await?.raw_rows(Some(name)).await?.is_empty() {
        true => Err(unknown_provider(name.as_str())),
        false => Ok(()),
    }
}

fn cells(job: &JobSummary, now: DatabaseTime, shape: TableShape) -> Vec<String> {
    // The wake-up time matters only for an open job that is delayed.
    let is_delayed = ["waiting", "sending", "unknown"].contains(&job.state.as_str()) && job.wake_at > now;
    let wake_at = match shape {
        TableShape::Plain => job.wake_at.to_string(),
        TableShape::Terminal { .. } => short_time(job.wake_at),
    };
    vec![
        job.id.clone(),
        job.provider.clone(),
        job.state.clone(),
        display_amount(job.amount, &job.currency),
        job.attempts.to_string(),
        if is_delayed { wake_at } else { String::new() },
        job.reason.clone().unwrap_or_default(),
    ]
}

/// UTC, short enough for a column.
fn short_time(at: DatabaseTime) -> String {
    match jiff::Timestamp::from_millisecond(at.0) {
        Ok(at) => at.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
        Err(_) => at.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_job_shows_no_wake_time() {
        let at = DatabaseTime(1_795_000_000_123);
        let job = JobSummary {
            id: "p1".to_owned(),
            provider: "acme".to_owned(),
            state: "waiting".to_owned(),
            amount: 1,
            currency: "EUR".to_owned(),
            account: None,
            attempts: 0,
            wake_at: at,
            reason: None,
            wait_reason: None,
            wait_limit: None,
            provider_reference: None,
            created_at: at,
            updated_at: at,
        };
        let wakes = |job: &JobSummary, now: i64, shape| cells(job, DatabaseTime(now), shape)[5].clone();
        let terminal = TableShape::Terminal { width: None };
        assert_eq!(wakes(&job, at.0, TableShape::Plain), "");
        assert_eq!(wakes(&job, at.0 - 1, TableShape::Plain), "2026-11-18T11:06:40.123Z");
        assert_eq!(wakes(&job, at.0 - 1, terminal), "2026-11-18 11:06:40Z");
        let dead = JobSummary { state: "dead".to_owned(), ..job };
        assert_eq!(wakes(&dead, at.0 - 1, terminal), "");
    }
}
