//! The `jobs resolve` command: records what an operator found out about a payment in `review`.
//!
//! It accepts no other state: only in `review` is an operator's decision needed.

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
    /// What the provider's records say about the payment.
    #[arg(long = "as", value_name = "FINDING")]
    resolve_as: ResolveAs,
    /// With `--as succeeded`: the provider's reference for the charge.
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
    /// Charged.
    Succeeded,
    /// Not charged, do not retry.
    Declined,
    /// Confirmed not charged: charge again, with the same key and request, within the limits.
    Resend,
}

/// Runs the command.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let resolution = match args.resolve_as {
        ResolveAs::Succeeded => JobResolution::Succeeded { reference: None },
        ResolveAs::Declined => JobResolution::Declined,
        ResolveAs::Resend => JobResolution::Resend,
    };
    let resolution =
        decision_input::with_provider_reference(resolution, args.reference.clone(), config.worker.card_numbers)
            .map_err(|why| CommandError::Usage(format!("--reference: {why}")))?;
    let by = actor(args.because.as_deref());
    let ledger = &services.ledger(config).await?;
    let mut source = IdSource::from_args(&args.ids).await?;
    if resolution.needs_resend() {
        let request = ResendRequest { resolution, actor: by, args: &args.resend, json: args.json };
        return resend::run(request, source, ledger, config, services, console).await;
    }
    let report = BulkReport::new(&resolution, args.resend.dry_run, args.json);
    let resolve = |id: JobId| {
        let (resolution, by) = (&resolution, &by);
        async move {
            if !args.resend.dry_run {
                return JobActionResult::from(ledger.resolve_job(&id, resolution, None, by).await);
            }
            match ledger.reload_job(&id, resolution).await {
                Ok(reloaded) => JobActionResult::WouldChange(reloaded.job.provider.to_string()),
                Err(error) => JobActionResult::from(Err(error)),
            }
        }
    };
    report.run_on_all(&mut source, resolve, console).await
}
