//! Publishes of messages that could not be a job, for callers that wait for the broker's confirm, but not for long.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use super::WorkerContext;
use super::retry::RetryEnded;
use super::topology;
use crate::domain::provider::ProviderName;
use crate::queue::{OutgoingMessage, Properties, QueueError};

/// A confirm that takes longer is late. A healthy broker confirms within milliseconds.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for confirms after the drain timeout.
const FINAL_CONFIRM_WAIT: Duration = Duration::from_secs(5);

/// Body and properties of a message, to be kept or published unchanged.
#[derive(Clone, Debug)]
pub struct MessageCopy {
    pub provider: ProviderName,
    pub body: Bytes,
    pub properties: Properties,
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

/// Publishes for a caller that must not wait long, such as the sweeper, which sees to all lanes.
///
/// # Errors
/// The errors of publishing. [`QueueError::NotConfirmed`] also when the confirm is late.
pub async fn publish_with_timeout(
    worker: &WorkerContext,
    lane: &ProviderName,
    message: OutgoingMessage,
) -> Result<(), QueueError> {
    let late = || Err(QueueError::NotConfirmed("the confirm is late".to_owned()));
    timeout(CONFIRM_TIMEOUT, topology::publish(worker, lane, &message)).await.unwrap_or_else(|_| late())
}
