//! `jobs cancel`: stops payments that are not on the wire.
//!
//! Refuses a payment that may have been charged, or is being sent; takes one from a worker that only holds it. One that the
//! ledger does not know yet is cancelled ahead of its message where its provider is named, or the queue lets its message be
//! found.

use super::super::connect::Engines;
use super::super::provider::parse_name;
use super::super::{CommandError, Console, Exit};
use super::ids::Source;
use super::report::{Outcome, Report};
use super::{Ids, by, list};
use crate::config::{Config, QueueUrl};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{Refusal, Verdict};
use crate::ledger::said;
use crate::queue::Search;

/// A message of it may be in a queue, where nobody sees it.
const NOT_YET_KNOWN: &str = "the ledger has no such job; if its message may still come, name its --provider: then it is \
                             cancelled ahead of it";

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ids: Ids,
    /// Their provider. Then an id that the ledger does not know is cancelled too: its message, which may still be in a queue,
    /// is acknowledged when it comes, and nothing is sent.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = said::because, allow_hyphen_values = true)]
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
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let by = by(args.because.as_deref());
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    list::known(provider.as_ref(), config, engines).await?;
    let operator = engines.operator(config).await?;
    let mut source = Source::of(&args.ids).await?;
    let cancel = |id: JobId| {
        let (operator, by, provider) = (operator.as_ref(), &by, &provider);
        async move {
            match provider {
                Some(provider) => Outcome::from(operator.cancel_ahead(&id, provider, by).await),
                None => match operator.decide(&id, &Verdict::Cancel, None, by).await {
                    Ok(Err(Refusal::NoSuchJob)) => match queued_for(&id, config, engines).await {
                        Some(provider) => Outcome::from(operator.cancel_ahead(&id, &provider, by).await),
                        None => Outcome::Refused(NOT_YET_KNOWN.to_owned()),
                    },
                    decided => Outcome::from(decided),
                },
            }
        }
    };
    Report::new(&Verdict::Cancel, false, args.json).run(&mut source, cancel, console).await
}

/// The provider in whose lane its message is. A broker lets nobody look.
async fn queued_for(id: &JobId, config: &Config, engines: &dyn Engines) -> Option<ProviderName> {
    if config.queue.url != QueueUrl::Embedded {
        return None;
    }
    let queue = engines.queue(config).await.ok()?;
    match queue.find(id).await {
        Ok(Search::Found(found)) => Some(found.lane),
        Ok(Search::Nowhere | Search::CannotLook) | Err(_) => None,
    }
}
