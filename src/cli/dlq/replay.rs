//! `dlq replay`: dead payments back on their way, one, those of a provider, or all.
//!
//! Refuses to take all of every provider without asking whoever sits at the terminal, unless `--yes` is given. Refuses to replay a payment twice in one run: it goes through the ids once, whatever becomes of those behind it.

use std::collections::{BTreeMap, VecDeque};

use super::super::connect::Engines;
use super::super::jobs::again::{self, Order, Pace};
use super::super::jobs::ids::Source;
use super::super::jobs::report::Report;
use super::super::jobs::{by, list, parse_id};
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::DEAD;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{Filter, Operator, Verdict};
use crate::ledger::said;

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
    #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    pace: Pace,
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
    engines: &dyn Engines,
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
            Source::Given(Some(id.clone()))
        }
        None => {
            let dead = dead(operator, provider.as_ref()).await?;
            if dead.is_empty() {
                return nothing(args, provider.as_ref(), config, engines, console).await;
            }
            if provider.is_none() && !args.pace.dry_run && !args.yes && !is_wanted(&dead, console)? {
                console.message("nothing was changed")?;
                print_none(args, console)?;
                return Ok(Exit::Failed);
            }
            let filter = Filter { state: Some(DEAD), provider, ..Filter::default() };
            Source::Listed { operator, filter, page: VecDeque::new(), after: None, more: true }
        }
    };
    let by = by(args.because.as_deref());
    let order = Order { verdict: Verdict::Replay, by, pace: &args.pace, json: args.json };
    again::run(order, source, operator, config, engines, console).await
}

/// Dead payments, by provider.
async fn dead(operator: &dyn Operator, of: Option<&ProviderName>) -> Result<BTreeMap<String, i64>, CommandError> {
    let counts = operator.counts(DEAD).await?.into_iter();
    let dead = counts.filter(|count| of.is_none_or(|name| name.as_str() == count.provider));
    Ok(dead.map(|count| (count.provider, count.jobs)).collect())
}

/// Says that there is nothing to replay, which is fine, unless the provider is none of ours.
async fn nothing(
    args: &Args,
    provider: Option<&ProviderName>,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    list::known(provider, config, engines).await?;
    console.message("no dead payments: nothing to replay")?;
    print_none(args, console)?;
    Ok(Exit::Fine)
}

fn print_none(args: &Args, console: &mut Console) -> Result<(), CommandError> {
    if args.json {
        console.json(&Report::new(&Verdict::Replay, args.pace.dry_run, true))?;
    }
    Ok(())
}

/// Where nobody can be asked, whoever wrote the script has decided.
fn is_wanted(dead: &BTreeMap<String, i64>, console: &mut Console) -> Result<bool, CommandError> {
    let total: i64 = dead.values().sum();
    let by_provider: Vec<String> = dead.iter().map(|(provider, jobs)| format!("{provider} {jobs}")).collect();
    let all = if total == 1 { "the one dead payment".to_owned() } else { format!("all {total} dead payments") };
    let question = format!("Replay {all} ({})?", by_provider.join(", "));
    Ok(console.confirm(&question)?.unwrap_or(true))
}
