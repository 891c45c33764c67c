//! `jobs resolve`: what a person found out about a payment in `review`.
//!
//! Refuses every other state: only there has the program given up knowing.

use clap::ValueEnum;

use super::super::connect::Engines;
use super::super::{CommandError, Console, Exit};
use super::again::{self, Order, Pace};
use super::ids::Source;
use super::report::{Outcome, Report};
use super::{Ids, by};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::Verdict;
use crate::ledger::said;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: Ids,
    /// What the provider's own records say of it.
    #[arg(long = "as", value_name = "FINDING")]
    finding: Finding,
    /// With `--as succeeded`: the provider's reference of the charge.
    #[arg(long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    reference: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    pace: Pace,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Finding {
    /// It was charged.
    Succeeded,
    /// It was not charged, and shall not be.
    Declined,
    /// It was surely not charged, and shall be: same key, same request, through every gate.
    Resend,
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
    let verdict = match args.finding {
        Finding::Succeeded => Verdict::Succeeded { reference: None },
        Finding::Declined => Verdict::Declined,
        Finding::Resend => Verdict::Resend,
    };
    let verdict = said::with_reference(verdict, args.reference.clone(), config.worker.card_numbers)
        .map_err(|why| CommandError::Usage(format!("--reference: {why}")))?;
    let by = by(args.because.as_deref());
    let operator = engines.operator(config).await?;
    let operator = operator.as_ref();
    let mut source = Source::of(&args.ids).await?;
    if verdict.sends_again() {
        let order = Order { verdict, by, pace: &args.pace, json: args.json };
        return again::run(order, source, operator, config, engines, console).await;
    }
    let report = Report::new(&verdict, args.pace.dry_run, args.json);
    let settle = |id: JobId| {
        let (verdict, by) = (&verdict, &by);
        async move {
            if !args.pace.dry_run {
                return Outcome::from(operator.decide(&id, verdict, None, by).await);
            }
            match operator.recall(&id, verdict).await {
                Ok(Ok(recalled)) => Outcome::Would(recalled.job.provider.to_string()),
                Ok(Err(refusal)) => Outcome::from(Ok(Err(refusal))),
                Err(error) => Outcome::from(Err(error)),
            }
        }
    };
    report.run(&mut source, settle, console).await
}
