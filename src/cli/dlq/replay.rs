//! The `dlq replay` command: sends dead payments again: one, those of a provider, or all.
//!
//! At a terminal it asks before it replays all payments of all providers, unless `--yes` is given. It goes through the
//! ids once, so it replays no payment twice in one run.

use std::collections::{BTreeMap, VecDeque};

use super::super::connect::Services;
use super::super::jobs::bulk::BulkReport;
use super::super::jobs::ids::IdSource;
use super::super::jobs::resend::{self, ResendArgs, ResendRequest};
use super::super::jobs::{actor, list, parse_id};
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::DEAD;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::operator::{JobFilter, JobResolution};

#[derive(Debug, clap::Args)]
pub struct Args {
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
pub async fn run(
    args: &Args,
    config: &Config,
    services: &dyn Services,
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
    let request = ResendRequest { resolution: JobResolution::Replay, actor: by, args: &args.resend, json: args.json };
    resend::run(request, source, ledger, config, services, console).await
}

/// Dead payments, by provider.
async fn count_dead(ledger: &Database, provider: Option<&ProviderName>) -> Result<BTreeMap<String, i64>, CommandError> {
    let counts = ledger.job_counts(DEAD).await?.into_iter();
    let dead = counts.filter(|count| provider.is_none_or(|name| name.as_str() == count.provider));
    Ok(dead.map(|count| (count.provider, count.jobs)).collect())
}

/// Reports that there is nothing to replay: a success, unless the provider does not exist.
async fn report_no_dead_jobs(
    args: &Args,
    provider: Option<&ProviderName>,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    list::check_provider_exists(provider, config, services).await?;
    console.message("no dead payments: nothing to replay")?;
    print_empty_report(args, console)?;
    Ok(Exit::Success)
}

fn print_empty_report(args: &Args, console: &mut Console) -> Result<(), CommandError> {
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
