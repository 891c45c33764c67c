//! The `dlq` command: lists, shows, replays and discards payments whose retries are exhausted and that are confirmed
//! not charged.
//!
//! It handles `dead` jobs only. The sweeper handles messages that the broker itself dead-lettered. At a terminal,
//! `replay` asks before it replays all payments of all providers, unless `--yes` is given. It goes through the ids once,
//! so it replays no payment twice in one run.

use std::collections::{BTreeMap, VecDeque};

use clap::Subcommand;

use crate::app::Services;
use crate::cli::jobs::bulk::{BulkReport, IdSource};
use crate::cli::jobs::decide::{DecisionRequest, ResendArgs, decide};
use crate::cli::jobs::{actor, parse_id, show};
use crate::cli::provider::parse_name;
use crate::cli::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::{JobFilter, JobResolution};

const DEAD: &str = "dead";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List dead payments, page by page in the order of their ids.
    List(show::PageArgs),
    /// Show one dead payment: its requests, its events, and manual changes.
    Show {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Try dead payments again, one or all: same key, same request, attempts reset, within the limits.
    Replay(ReplayArgs),
    /// End a dead payment for good: it becomes `cancelled`.
    Discard {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Required: a discarded payment cannot be restored.
        #[arg(long, required = true)]
        yes: bool,
        /// Why, for the audit; also in the job's reason and its outcome event.
        #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
        because: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or the one payment does not exist. An id that is refused is reported and gives exit code 1.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::List(page) => show::print_page(Some(DEAD), page, config, services, console).await,
        Action::Show { id, json } => show::show(id, Some(DEAD), *json, config, services, console).await,
        Action::Replay(args) => replay(args, config, services, console).await,
        Action::Discard { id, because, json, .. } => {
            let (resolution, actor) = (JobResolution::Discard, actor(because.as_deref()));
            let request = DecisionRequest { resolution, actor, args: None, json: *json };
            let source = IdSource::Argument(Some(id.clone()));
            decide(request, source, config, services, console).await
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct ReplayArgs {
    /// One payment; without it and without --provider, all dead payments, after a confirmation.
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// The dead payments of this provider; with an id, the payment must be this provider's.
    #[arg(long)]
    provider: Option<String>,
    /// Replay all dead payments of all providers without a confirmation; without a terminal there is none.
    #[arg(long, conflicts_with_all = ["id", "provider"])]
    yes: bool,
    /// Why, for the audit; also in the job's reason.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    resend: ResendArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub async fn replay(
    args: &ReplayArgs,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let ledger = &services.ledger(config).await?;
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let source = match &args.id {
        Some(id) => {
            let actual = ledger.job_details(id).await?.map(|details| details.line.provider);
            if let (Some(actual), Some(wanted)) = (actual, &provider)
                && actual != wanted.as_str()
            {
                return Err(CommandError::Failed(format!(
                    "{id} is a payment of {actual}, not of {wanted}: nothing was replayed"
                )));
            }
            IdSource::Argument(Some(id.clone()))
        }
        None => {
            let dead = count_dead(ledger, provider.as_ref()).await?;
            if dead.is_empty() {
                return report_no_dead_jobs(args, provider.as_ref(), config, services, console).await;
            }
            if provider.is_none() && !args.resend.dry_run && !args.yes && !confirm_replay(&dead, console)? {
                console.message("nothing was changed")?;
                print_empty_report(args, console)?;
                return Ok(Exit::Failed);
            }
            let filter = JobFilter { state: Some(DEAD), provider, ..JobFilter::default() };
            IdSource::Ledger { ledger, filter, page: VecDeque::new(), after: None, has_more: true }
        }
    };
    let by = actor(args.because.as_deref());
    let (resolution, args, json) = (JobResolution::Replay, Some(&args.resend), args.json);
    let request = DecisionRequest { resolution, actor: by, args, json };
    decide(request, source, config, services, console).await
}

/// Dead payments, by provider.
async fn count_dead(ledger: &Database, provider: Option<&ProviderName>) -> Result<BTreeMap<String, i64>, CommandError> {
    let counts = ledger.job_counts(DEAD).await?.into_iter();
    let dead = counts.filter(|count| provider.is_none_or(|name| name.as_str() == count.provider));
    Ok(dead.map(|count| (count.provider, count.jobs)).collect())
}

/// Reports that there is nothing to replay: a success, unless the provider does not exist.
async fn report_no_dead_jobs(
    args: &ReplayArgs,
    provider: Option<&ProviderName>,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    show::check_provider_exists(provider, config, services).await?;
    console.message("no dead payments: nothing to replay")?;
    print_empty_report(args, console)?;
    Ok(Exit::Success)
}

fn print_empty_report(args: &ReplayArgs, console: &mut Console) -> Result<(), CommandError> {
    if args.json {
        console.json(&BulkReport::new(&JobResolution::Replay, args.resend.dry_run, true))?;
    }
    Ok(())
}

/// Asks for a confirmation; without a terminal the script has decided.
fn confirm_replay(dead: &BTreeMap<String, i64>, console: &mut Console) -> Result<bool, CommandError> {
    let total: i64 = dead.values().sum();
    let by_provider: Vec<String> = dead.iter().map(|(provider, jobs)| format!("{provider} {jobs}")).collect();
    let all = if total == 1 { "the one dead payment".to_owned() } else { format!("all {total} dead payments") };
    let question = format!("Replay {all} ({})?", by_provider.join(", "));
    Ok(console.confirm(&question)?.unwrap_or(true))
}
