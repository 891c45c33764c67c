//! `dlq replay`: dead payments back on their way, one, those of a provider, or all.
//!
//! Refuses to take all of every provider without asking whoever sits at the terminal, unless `--yes` is given. Refuses to replay a payment twice in one run: it goes through the ids once, whatever becomes of those behind it.

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
use crate::ledger::decision_input;
use crate::ledger::operator::{JobFilter, JobResolution, Operator};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// One payment; without it and --provider all dead ones, which is asked about first.
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// The dead ones of this provider; with a payment, it must be this provider's.
    #[arg(long)]
    provider: Option<String>,
    /// Replay all dead payments of all providers without being asked; where nobody can be asked, nobody is.
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
///
/// # Errors
/// When an engine fails.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let operator = engines.operator(config).await?;
    let operator = operator.as_ref();
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let source = match &args.id {
        Some(id) => {
            let of = operator.show(id).await?.map(|story| story.line.provider);
            if let (Some(of), Some(wanted)) = (of, &provider)
                && of != wanted.as_str()
            {
                return Err(CommandError::Failed(format!(
                    "{id} is a payment of {of}, not of {wanted}: nothing was replayed"
                )));
            }
            IdSource::Argument(Some(id.clone()))
        }
        None => {
            let dead = count_dead(operator, provider.as_ref()).await?;
            if dead.is_empty() {
                return report_no_dead_jobs(args, provider.as_ref(), config, engines, console).await;
            }
            if provider.is_none() && !args.resend.dry_run && !args.yes && !confirm_replay(&dead, console)? {
                console.message("nothing was changed")?;
                print_empty_report(args, console)?;
                return Ok(Exit::Failed);
            }
            let filter = JobFilter { state: Some(DEAD), provider, ..JobFilter::default() };
            IdSource::Ledger { operator, filter, page: VecDeque::new(), after: None, has_more: true }
        }
    };
    let by = actor(args.because.as_deref());
    let order = ResendRequest { resolution: JobResolution::Replay, actor: by, args: &args.resend, json: args.json };
    resend::run(order, source, operator, config, engines, console).await
}

/// Dead payments, by provider.
async fn count_dead(operator: &dyn Operator, of: Option<&ProviderName>) -> Result<BTreeMap<String, i64>, CommandError> {
    let counts = operator.job_counts(DEAD).await?.into_iter();
    let dead = counts.filter(|count| of.is_none_or(|name| name.as_str() == count.provider));
    Ok(dead.map(|count| (count.provider, count.jobs)).collect())
}

/// Says that there is nothing to replay, which is fine, unless the provider is none of ours.
async fn report_no_dead_jobs(
    args: &Args,
    provider: Option<&ProviderName>,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    list::check_provider_exists(provider, config, engines).await?;
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

/// Where nobody can be asked, whoever wrote the script has decided.
fn confirm_replay(dead: &BTreeMap<String, i64>, console: &mut Console) -> Result<bool, CommandError> {
    let total: i64 = dead.values().sum();
    let by_provider: Vec<String> = dead.iter().map(|(provider, jobs)| format!("{provider} {jobs}")).collect();
    let all = if total == 1 { "the one dead payment".to_owned() } else { format!("all {total} dead payments") };
    let question = format!("Replay {all} ({})?", by_provider.join(", "));
    Ok(console.confirm(&question)?.unwrap_or(true))
}
