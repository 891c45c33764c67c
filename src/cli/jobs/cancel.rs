//! `jobs cancel`: stops payments that are not on the wire.
//!
//! Refuses a payment that may have been charged, or is being sent; takes one from a worker that only holds it. One that the
//! ledger does not know yet is cancelled ahead of its message where its provider is named, or the queue lets its message be
//! found.

use super::super::connect::Services;
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::bulk::{BulkReport, JobActionResult};
use super::ids::IdSource;
use super::{IdArgs, actor, list};
use crate::config::{Config, QueueUrl};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::decision_input;
use crate::ledger::operator::{JobResolution, ResolutionRefusal};
use crate::queue::SearchResult;

/// A message of it may be in a queue, where nobody sees it.
const UNKNOWN_JOB: &str = "the ledger has no such job; if its message may still come, name its --provider: then it is \
                             cancelled ahead of it";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: IdArgs,
    /// Their provider. Then an id that the ledger does not know is cancelled too: its message, which may still be in a queue,
    /// is acknowledged when it comes, and nothing is sent.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Print JSON.
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
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let by = actor(args.because.as_deref());
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    list::check_provider_exists(provider.as_ref(), config, engines).await?;
    let operator = engines.operator(config).await?;
    let mut source = IdSource::from_args(&args.ids).await?;
    let cancel = |id: JobId| {
        let (operator, by, provider) = (operator.as_ref(), &by, &provider);
        async move {
            match provider {
                Some(provider) => JobActionResult::from(operator.precancel(&id, provider, by).await),
                None => match operator.resolve(&id, &JobResolution::Cancel, None, by).await {
                    Ok(Err(ResolutionRefusal::NoSuchJob)) => match find_in_queue(&id, config, engines).await {
                        Some(provider) => JobActionResult::from(operator.precancel(&id, &provider, by).await),
                        None => JobActionResult::Refused(UNKNOWN_JOB.to_owned()),
                    },
                    decided => JobActionResult::from(decided),
                },
            }
        }
    };
    BulkReport::new(&JobResolution::Cancel, false, args.json).run_on_all(&mut source, cancel, console).await
}

/// The provider in whose lane its message is. A broker lets nobody look.
async fn find_in_queue(id: &JobId, config: &Config, engines: &dyn Services) -> Option<ProviderName> {
    if config.queue.url != QueueUrl::Embedded {
        return None;
    }
    let queue = engines.queue(config).await.ok()?;
    match queue.find(id).await {
        Ok(SearchResult::Found(found)) => Some(found.lane),
        Ok(SearchResult::NotFound | SearchResult::Unsupported) | Err(_) => None,
    }
}
