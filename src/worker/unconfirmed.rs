//! Publishes whose confirms are late: they continue in the background, and their lane gets no further ones until they
//! end.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{WorkerContext, topology};
use crate::domain::provider::ProviderName;
use crate::queue::{OutgoingMessage, QueueError};

/// A confirm that takes longer is late. A healthy broker confirms within milliseconds.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

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
