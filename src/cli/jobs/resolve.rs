//! `jobs resolve`: what a person found out about a payment in `review`.
//!
//! Refuses every other state: only there has the program given up knowing.

use clap::ValueEnum;

use super::super::connect::Services;
use super::super::{CommandError, Console, Exit};
use super::bulk::{BulkReport, JobActionResult};
use super::ids::IdSource;
use super::resend::{self, ResendArgs, ResendRequest};
use super::{IdArgs, actor};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::decision_input;
use crate::ledger::operator::JobResolution;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: IdArgs,
    /// What the provider's own records say of it.
    #[arg(long = "as", value_name = "FINDING")]
    resolve_as: ResolveAs,
    /// With `--as succeeded`: the provider's reference of the charge.
    #[arg(long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    reference: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    resend: ResendArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ResolveAs {
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
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let verdict = match args.resolve_as {
        ResolveAs::Succeeded => JobResolution::Succeeded { reference: None },
        ResolveAs::Declined => JobResolution::Declined,
        ResolveAs::Resend => JobResolution::Resend,
    };
    let verdict = decision_input::with_provider_reference(verdict, args.reference.clone(), config.worker.card_numbers)
        .map_err(|why| CommandError::Usage(format!("--reference: {why}")))?;
    let by = actor(args.because.as_deref());
    let operator = engines.operator(config).await?;
    let operator = operator.as_ref();
    let mut source = IdSource::from_args(&args.ids).await?;
    if verdict.needs_resend() {
        let order = ResendRequest { resolution: verdict, actor: by, args: &args.resend, json: args.json };
        return resend::run(order, source, operator, config, engines, console).await;
    }
    let report = BulkReport::new(&verdict, args.resend.dry_run, args.json);
    let settle = |id: JobId| {
        let (verdict, by) = (&verdict, &by);
        async move {
            if !args.resend.dry_run {
                return JobActionResult::from(operator.resolve(&id, verdict, None, by).await);
            }
            match operator.reload(&id, verdict).await {
                Ok(Ok(recalled)) => JobActionResult::WouldChange(recalled.job.provider.to_string()),
                Ok(Err(refusal)) => JobActionResult::from(Ok(Err(refusal))),
                Err(error) => JobActionResult::from(Err(error)),
            }
        }
    };
    report.run_on_all(&mut source, settle, console).await
}
