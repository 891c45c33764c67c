//! A payment whose message has not come: where the message may be, and how it is cancelled before that.

use crate::app::Services;
use crate::config::{Config, QueueUrl};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::queue::SearchResult;

/// The message of such a job may be in a broker's queue, which cannot be searched.
pub const UNKNOWN_JOB: &str = "if the message of a job that the ledger does not know may still arrive, add \
                               --provider NAME to cancel the payment before that";

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
