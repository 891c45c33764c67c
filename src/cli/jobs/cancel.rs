//! `jobs cancel`: stops payments that are not on the wire.
//!
//! Refuses a payment that may have been charged, or is being sent; takes one from a worker that only holds it.

use super::super::connect::Engines;
use super::super::{CommandError, Console, Exit};
use super::ids::Source;
use super::report::{Outcome, Report};
use super::{Ids, by};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::Verdict;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: Ids,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT")]
    because: Option<String>,
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database fails or the file cannot be read.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let by = by(args.because.as_deref());
    let operator = engines.operator(config).await?;
    let mut source = Source::of(&args.ids).await?;
    let cancel = |id: JobId| {
        let (operator, by) = (operator.as_ref(), &by);
        async move { Outcome::from(operator.decide(&id, &Verdict::Cancel, None, by).await) }
    };
    Report::new(&Verdict::Cancel, false, args.json).run(&mut source, cancel, console).await
}
