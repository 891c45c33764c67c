//! The `jobs cancel` command: stops payments that have not been sent.
//!
//! It refuses a payment that is in flight or may have been charged, and cancels one that a worker only holds. A payment
//! that the ledger does not know is cancelled before its message arrives. For that the provider must be named, or the
//! embedded queue must contain the message.

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
use crate::ledger::operator::{JobResolution, ResolutionError, ResolutionRefusal};
use crate::queue::SearchResult;

/// Its message may be in a broker's queue, which cannot be searched.
const UNKNOWN_JOB: &str = "the ledger has no such job; if its message may still arrive, add --provider NAME to cancel the \
                             payment before that";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: IdArgs,
    /// Their provider. With it, an id that the ledger does not know is cancelled too: if its message arrives later, it
    /// is acknowledged and nothing is sent.
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
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let by = actor(args.because.as_deref());
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    list::check_provider_exists(provider.as_ref(), config, services).await?;
    let ledger = services.ledger(config).await?;
    let mut source = IdSource::from_args(&args.ids).await?;
    let cancel = |id: JobId| {
        let (ledger, by, provider) = (&ledger, &by, &provider);
        async move {
            match provider {
                Some(provider) => JobActionResult::from(ledger.precancel(&id, provider, by).await),
                None => match ledger.resolve_job(&id, &JobResolution::Cancel, None, by).await {
                    Err(ResolutionError::Refused(ResolutionRefusal::NoSuchJob)) => {
                        match find_in_queue(&id, config, services).await {
                            Some(provider) => JobActionResult::from(ledger.precancel(&id, &provider, by).await),
                            None => JobActionResult::Refused(UNKNOWN_JOB.to_owned()),
                        }
                    }
                    result => JobActionResult::from(result),
                },
            }
        }
    };
    BulkReport::new(&JobResolution::Cancel, false, args.json).run_on_all(&mut source, cancel, console).await
}

/// The provider whose embedded queue contains the job's message. A broker's queue cannot be searched.
async fn find_in_queue(id: &JobId, config: &Config, services: &dyn Services) -> Option<ProviderName> {
    if config.queue.url != QueueUrl::Embedded {
        return None;
    }
    let queue = services.queue(config).await.ok()?;
    match queue.find(id).await {
        Ok(SearchResult::Found(found)) => Some(found.lane),
        Ok(SearchResult::NotFound | SearchResult::Unsupported) | Err(_) => None,
    }
}
