//! Parking: a copy of the message into a delay queue, confirmed, before the original is acknowledged.
//!
//! Refuses a wait below the shortest step: that is slept in hand. The ledger knows the job's `wake_at` before the copy
//! exists, so whichever of the two arrives first finds the same wait.

use std::time::Duration;

use bytes::Bytes;

use super::Worker;
use super::patience::{GivenUp, until_back};
use super::topology::publish;
use crate::domain::provider::ProviderName;
use crate::queue::{Destination, Outgoing, Properties, QueueError, delay_step};

/// A message's body and properties, to be published again as they are.
#[derive(Clone, Debug)]
pub struct Copy {
    pub provider: ProviderName,
    pub body: Bytes,
    pub properties: Properties,
}

/// Publishes the copy so that it comes back after at most `wait`: the longest step that fits, or the shortest.
///
/// # Errors
/// [`GivenUp`]: the original must not be acknowledged.
pub async fn publish_copy(worker: &Worker, copy: &Copy, wait: Duration) -> Result<(), GivenUp<QueueError>> {
    let step = delay_step(wait).unwrap_or(crate::queue::DELAY_STEPS[0]);
    let message = Outgoing {
        destination: Destination::Delay { provider: copy.provider.clone(), step },
        body: copy.body.clone(),
        properties: copy.properties.clone(),
    };
    until_back("park a job", &worker.abandon, || publish(worker, &copy.provider, &message)).await
}
