//! Publishing that a worker waits for: copies to delay queues, and publishes whose confirms may be late.
//!
//! A delayed message is published as a copy, and its confirm is waited for, before the original is acknowledged. A wait
//! below the shortest delay step is slept by the active job instead. The ledger knows the job's `wake_at` before the
//! copy exists, so the copy that arrives first finds the same wait. See `docs/decisions/0022-fixed-delay-queues.md`.
//!
//! A publish whose confirm is late continues in the background, and its lane gets no further ones until it ends.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::WorkerContext;
use super::retry::{RetryEnded, retry_while_unavailable};
use super::topology;
use super::topology::publish;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::queue::{Destination, OutgoingMessage, Properties, QueueError, copy_step, headers};

/// A confirm that takes longer is late. A healthy broker confirms within milliseconds.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
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

/// The properties of a message that is made from the ledger.
pub fn job_properties(id: &JobId) -> Properties {
    let (message_id, content_type) = (Some(id.as_str().to_owned()), Some("application/json".to_owned()));
    Properties { message_id, content_type, ..Properties::default() }
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

/// Publishes to each lane that have not ended.
#[derive(Default)]
pub struct UnconfirmedPublishes(Mutex<BTreeMap<ProviderName, Vec<JoinHandle<()>>>>);

impl UnconfirmedPublishes {
    /// Whether a publish to this lane still waits for its confirm.
    pub fn blocks(&self, lane: &ProviderName) -> bool {
        let mut late = self.0.lock();
        let Some(publishes) = late.get_mut(lane) else { return false };
        publishes.retain(|publish| !publish.is_finished());
        !publishes.is_empty()
    }

    fn add(&self, lane: &ProviderName, publish: JoinHandle<()>) {
        let mut late = self.0.lock();
        late.entry(lane.clone()).or_default().push(publish);
    }
}

/// Publishes for a caller that must not wait long, such as the sweeper, which sees to all lanes.
///
/// # Errors
/// The errors of publishing. [`QueueError::NotConfirmed`] also when the confirm is late: the lane is blocked until
/// then.
pub async fn publish_with_timeout(
    worker: &WorkerContext,
    lane: &ProviderName,
    message: OutgoingMessage,
) -> Result<(), QueueError> {
    let (answer, mut answered) = tokio::sync::oneshot::channel();
    let (sending, to) = (worker.clone(), lane.clone());
    let publish = worker.jobs.spawn(async move {
        let stop = sending.stop.clone();
        tokio::select! {
            published = topology::publish(&sending, &to, &message) => {
                // The caller may have stopped waiting.
                answer.send(published).unwrap_or_default();
            }
            () = stop.cancelled() => {}
        }
    });
    match timeout(CONFIRM_TIMEOUT, &mut answered).await {
        Ok(Ok(published)) => published,
        Ok(Err(_)) => Err(QueueError::NotConfirmed("the worker is stopping".to_owned())),
        Err(_) => {
            worker.unconfirmed.add(lane, publish);
            Err(QueueError::NotConfirmed(
                "the confirm is late; nothing more is published to its lane until then".to_owned(),
            ))
        }
    }
}
