//! The `dlq` command: lists, shows, replays and discards payments whose retries are exhausted and that are confirmed
//! not charged.
//!
//! It handles `dead` jobs only. The sweeper handles messages that the broker itself dead-lettered.

use clap::Subcommand;

use super::connect::Services;
use super::jobs::bulk::{BulkReport, JobActionResult};
use super::jobs::{actor, ids, list, parse_id, show};
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::decision_input;
use crate::ledger::operator::JobResolution;

mod replay;

const DEAD: &str = "dead";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List dead payments, page by page in the order of their ids.
    List(list::PageArgs),
    /// Show one dead payment: its requests, its events, and manual changes.
    Show {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Try dead payments again, one or all: same key, same request, attempts reset, within the limits.
    Replay(replay::Args),
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
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::List(page) => list::print_page(Some(DEAD), page, config, services, console).await,
        Action::Show { id, json } => show::run(id, Some(DEAD), *json, config, services, console).await,
        Action::Replay(args) => replay::run(args, config, services, console).await,
        Action::Discard { id, because, json, .. } => {
            let by = actor(because.as_deref());
            let ledger = services.ledger(config).await?;
            let discard = |id: JobId| {
                let (ledger, by) = (&ledger, &by);
                async move { JobActionResult::from(ledger.resolve_job(&id, &JobResolution::Discard, None, by).await) }
            };
            let mut source = ids::IdSource::Argument(Some(id.clone()));
            BulkReport::new(&JobResolution::Discard, false, *json).run_on_all(&mut source, discard, console).await
        }
    }
}
