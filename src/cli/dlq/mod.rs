//! `dlq`: payments that were given up, surely not charged: look at them, have them tried again, or end them.
//!
//! Refuses anything but `dead` jobs. What the broker itself gave up is not here: the sweeper judges it by the ledger.

use clap::Subcommand;

use super::connect::Engines;
use super::jobs::report::{Outcome, Report};
use super::jobs::{by, ids, list, parse_id, show};
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::Verdict;
use crate::ledger::said;

mod replay;

const DEAD: &str = "dead";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Dead payments, page by page in the order of their ids.
    List(list::Page),
    /// One dead payment: its requests, its events, and who changed it by hand.
    Show {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Try dead payments again, one or all: same key, same request, counters restarted, through every gate.
    Replay(replay::Args),
    /// End a dead payment for good: it becomes `cancelled`.
    Discard {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Needed: nothing brings it back.
        #[arg(long, required = true)]
        yes: bool,
        /// Why, for the audit; also in the job's reason and its outcome event.
        #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
        because: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// When an engine fails, or the one payment does not exist. What cannot be done with an id is reported, and exits with 1.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::List(page) => list::page(Some(DEAD), page, config, engines, console).await,
        Action::Show { id, json } => show::run(id, Some(DEAD), *json, config, engines, console).await,
        Action::Replay(args) => replay::run(args, config, engines, console).await,
        Action::Discard { id, because, json, .. } => {
            let by = by(because.as_deref());
            let operator = engines.operator(config).await?;
            let discard = |id: JobId| {
                let (operator, by) = (operator.as_ref(), &by);
                async move { Outcome::from(operator.decide(&id, &Verdict::Discard, None, by).await) }
            };
            let mut source = ids::Source::Given(Some(id.clone()));
            Report::new(&Verdict::Discard, false, *json).run(&mut source, discard, console).await
        }
    }
}
