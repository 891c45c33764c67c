//! `dlq replay`: dead payments back on their way, one, those of a provider, or all.
//!
//! Refuses to replay a payment twice in one run: it goes through the ids once, whatever becomes of those behind it.

use std::collections::VecDeque;

use super::super::connect::Engines;
use super::super::jobs::again::{self, Order, Pace};
use super::super::jobs::ids::Source;
use super::super::jobs::{by, parse_id};
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::DEAD;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::{Filter, Verdict};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// One payment; without it all dead ones.
    #[arg(value_parser = parse_id, conflicts_with = "provider")]
    id: Option<JobId>,
    /// The dead ones of this provider.
    #[arg(long)]
    provider: Option<String>,
    /// Why, for the audit; also in the job's reason.
    #[arg(long, value_name = "TEXT")]
    because: Option<String>,
    #[command(flatten)]
    pace: Pace,
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
    let source = match &args.id {
        Some(id) => Source::Given(Some(id.clone())),
        None => {
            let provider = args.provider.as_deref().map(parse_name).transpose()?;
            let filter = Filter { state: Some(DEAD), provider, ..Filter::default() };
            Source::Listed { operator, filter, page: VecDeque::new(), after: None, more: true }
        }
    };
    let by = by(args.because.as_deref());
    let order = Order { verdict: Verdict::Replay, by, pace: &args.pace, json: args.json };
    again::run(order, source, operator, config, engines, console).await
}
