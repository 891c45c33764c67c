//! Parking: a copy of the message into a delay queue, confirmed, before the original is acknowledged.
//!
//! Refuses a wait below the shortest step: that is slept in hand. The ledger knows the job's `wake_at` before the copy
//! exists, so whichever of the two arrives first finds the same wait.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use super::Worker;
use super::patience::{GivenUp, until_back};
use super::topology::publish;
use crate::domain::provider::ProviderName;
use crate::queue::{Destination, Outgoing, Properties, QueueError, copy_step, headers};

/// How long confirms are waited for when the drain's time is over.
const LAST_CONFIRMS: Duration = Duration::from_secs(5);

/// A message's body and properties, to be published again as they are.
#[derive(Clone, Debug)]
pub struct Copy {
    pub provider: ProviderName,
    pub body: Bytes,
    pub properties: Properties,
}

impl Copy {
    /// The same message as the newest copy of its job, or as it is.
    #[must_use]
    pub fn numbered(&self, number: Option<i64>) -> Self {
        let properties = headers::with_copy_number(self.properties.clone(), number.unwrap_or_default());
        Self { properties, ..self.clone() }
    }
}

/// Publishes the copy so that it comes back after at most `wait`: the longest step that fits, or the shortest.
///
/// # Errors
/// [`GivenUp`]: the original must not be acknowledged.
pub async fn publish_copy(worker: &Worker, copy: &Copy, wait: Duration) -> Result<(), GivenUp<QueueError>> {
    let step = copy_step(wait);
    let message = Outgoing {
        destination: Destination::Delay { provider: copy.provider.clone(), step },
        body: copy.body.clone(),
        properties: copy.properties.clone(),
    };
    let publishing = until_back("park a job", &worker.abandon, || publish(worker, &copy.provider, &message));
    unless_abandoned(worker, publishing).await
}

/// A publish may wait long for its confirm, and no longer than the drain lasts.
pub async fn unless_abandoned<T>(
    worker: &Worker,
    publishing: impl Future<Output = Result<T, GivenUp<QueueError>>>,
) -> Result<T, GivenUp<QueueError>> {
    let abandoned = async {
        worker.abandon.cancelled().await;
        sleep(LAST_CONFIRMS).await;
    };
    tokio::select! {
        published = publishing => published,
        () = abandoned => Err(GivenUp::Stopped),
    }
}
