//! The cancellation of a payment whose message has not come: where the message may be, and the gate before it.
//!
//! The content of such a payment is unknown, so its amount counts as reaching every threshold of `approvals.require`.

use crate::app::Services;
use crate::cli::approvals::gate;
use crate::cli::{CommandContext, CommandError};
use crate::config::{Config, QueueUrl};
use crate::domain::approval::GatedAction;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use crate::ops::approval::{ApprovalError, AwaitedApproval};
use crate::queue::SearchResult;
use crate::worker::resend::ResendError;

/// The message of such a job may be in a broker's queue, which cannot be searched.
pub const UNKNOWN_JOB: &str = "if the message of a job that the ledger does not know may still arrive, add \
                               --provider NAME to cancel the payment before that";

/// The gate before the cancellation of one payment. `None`: it passes.
///
/// # Errors
/// Why the cancellation would be refused, or why it was not stored.
pub async fn gate_cancel(
    id: &JobId,
    provider: Option<&ProviderName>,
    by: &Actor,
    cx: &CommandContext<'_>,
) -> Result<Option<AwaitedApproval>, CommandError> {
    let ledger = cx.ledger().await?;
    let gate = gate(&ledger, cx.config, by.clone());
    if !gate.concerns(GatedAction::Cancel) {
        return Ok(None);
    }
    if let Some(provider) = provider {
        return Ok(gate.precancel(id, provider).await?);
    }
    match gate.job(id, &JobResolution::Cancel).await {
        Err(ApprovalError::Resend(ResendError::Refused(ResolutionRefusal::NoSuchJob))) => {
            let provider = find_in_queue(id, cx.config, cx.services).await;
            let provider = provider
                .ok_or_else(|| CommandError::Failed(format!("{}; {UNKNOWN_JOB}", ResolutionRefusal::NoSuchJob)))?;
            Ok(gate.precancel(id, &provider).await?)
        }
        gated => Ok(gated?),
    }
}

/// The provider whose embedded queue contains the job's message. A broker's queue cannot be searched.
pub async fn find_in_queue(id: &JobId, config: &Config, services: &Services) -> Option<ProviderName> {
    if config.queue.url != QueueUrl::Embedded {
        return None;
    }
    let queue = services.queue(config).await.ok()?;
    match queue.find(id).await {
        Ok(SearchResult::Found(found)) => Some(found.lane),
        Ok(SearchResult::NotFound | SearchResult::Unsupported) | Err(_) => None,
    }
}
