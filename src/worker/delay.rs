//! Parking: a copy of the message into a delay queue, confirmed, before the original is acknowledged.
//!
//! Refuses a wait below the shortest step: that is slept in hand. The ledger knows the job's `wake_at` before the copy
//! exists, so whichever of the two arrives first finds the same wait.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use super::WorkerContext;
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology::publish;
use crate::domain::provider::ProviderName;
use crate::queue::{Destination, OutgoingMessage, Properties, QueueError, copy_step, headers};

/// How long confirms are waited for when the drain's time is over.
const FINAL_CONFIRM_WAIT: Duration = Duration::from_secs(5);

/// A message's body and properties, to be published again as they are.
#[derive(Clone, Debug)]
pub struct MessageCopy {
    pub provider: ProviderName,
    pub body: Bytes,
    pub properties: Properties,
}

impl MessageCopy {
    /// The same message as the newest copy of its job, or as it is.
    #[must_use]
    pub fn with_number(&self, number: Option<i64>) -> Self {
        let properties = headers::with_copy_number(self.properties.clone(), number.unwrap_or_default());
        Self { properties, ..self.clone() }
    }
}

/// Publishes the copy so that it comes back after at most `wait`: the longest step that fits, or the shortest.
///
/// # Errors
/// [`GivenUp`]: the original must not be acknowledged.
pub async fn publish_delayed(
    worker: &WorkerContext,
    copy: &MessageCopy,
    wait: Duration,
) -> Result<(), RetryEnded<QueueError>> {
    let step = copy_step(wait);
    let message = OutgoingMessage {
        destination: Destination::Delay { provider: copy.provider.clone(), step },
        body: copy.body.clone(),
        properties: copy.properties.clone(),
    };
    let publishing =
        retry_while_unavailable("park a job", &worker.abandon, || publish(worker, &copy.provider, &message));
    unless_abandoned(worker, publishing).await
}

/// A publish may wait long for its confirm, and no longer than the drain lasts.
pub async fn unless_abandoned<T>(
    worker: &WorkerContext,
    publishing: impl Future<Output = Result<T, RetryEnded<QueueError>>>,
) -> Result<T, RetryEnded<QueueError>> {
    let abandoned = async {
        worker.abandon.cancelled().await;
        sleep(FINAL_CONFIRM_WAIT).await;
    };
    tokio::select! {
        published = publishing => published,
        () = abandoned => Err(RetryEnded::Stopped),
    }
}
