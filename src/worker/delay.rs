//! Delaying of messages: publishes a copy to a delay queue and waits for its confirm, before the original is
//! acknowledged.
//!
//! A wait below the shortest delay step is slept by the active job instead. The ledger knows the job's `wake_at` before
//! the copy exists, so the copy that arrives first finds the same wait. See
//! `docs/decisions/0022-fixed-delay-queues.md`.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use super::WorkerContext;
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology::publish;
use crate::domain::provider::ProviderName;
use crate::queue::{Destination, OutgoingMessage, Properties, QueueError, copy_step, headers};

/// Longest wait for confirms after the drain timeout.
const FINAL_CONFIRM_WAIT: Duration = Duration::from_secs(5);

/// Body and properties of a message, to be published unchanged.
#[derive(Clone, Debug)]
pub struct MessageCopy {
    pub provider: ProviderName,
    pub body: Bytes,
    pub properties: Properties,
}

impl MessageCopy {
    /// The message with this copy number, as the newest of its job; without a number, unchanged.
    pub fn with_number(&self, number: Option<i64>) -> Self {
        let properties = headers::with_copy_number(self.properties.clone(), number.unwrap_or_default());
        Self { properties, ..self.clone() }
    }
}

/// Publishes the copy to a delay queue: the longest step of at most `wait`, or the shortest step.
///
/// # Errors
/// [`RetryEnded`]: the original must not be acknowledged.
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
        retry_while_unavailable("delay a job", &worker.abandon, || publish(worker, &copy.provider, &message));
    unless_abandoned(worker, publishing).await
}

/// Waits for a publish, but not beyond the drain timeout and [`FINAL_CONFIRM_WAIT`].
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
