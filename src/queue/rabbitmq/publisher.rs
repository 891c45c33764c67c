//! Publishes, and returns only when the broker has taken responsibility.
//!
//! Refuses to have two publishes on one channel: lapin 4.12.3 gives a returned message to whichever confirm comes next
//! (`acknowledgement.rs`), so with several in flight an unroutable message could look delivered. A channel whose
//! publish failed or timed out is thrown away, since its confirm may still be under way.

use std::sync::{Mutex, PoisonError};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation};
use tokio::sync::Semaphore;

use super::failure::{limited, limited_with_body};
use super::supervisor::{Generation, Link};
use super::topology::{Route, Topology};
use super::wire;
use crate::domain::job::BODY_BYTES_MAX;
use crate::faults::{self, Bug};
use crate::queue::{Destination, Outgoing, QueueError, headers};

/// Channels, and so publishes in flight.
const CHANNELS: usize = 8;

pub(super) struct Publisher {
    link: Link,
    topology: Topology,
    places: Semaphore,
    /// For bodies that no job has, one at a time: their frames are a second copy of them.
    long: Semaphore,
    /// Open channels in confirm mode with nothing in flight, each with the number of its generation.
    idle: Mutex<Vec<(u64, Channel)>>,
}

impl Publisher {
    pub fn new(link: Link, topology: Topology) -> Self {
        Self { link, topology, places: Semaphore::new(CHANNELS), long: Semaphore::new(1), idle: Mutex::new(Vec::new()) }
    }

    pub async fn publish(&self, message: &Outgoing) -> Result<(), QueueError> {
        let route = self.topology.route(&message.destination)?;
        // Unbounded in time, yet never for ever: each holder of a place gives it back within a few call limits.
        let ended = |_| QueueError::Away("the publisher has ended".to_owned());
        let _alone = match message.body.len() > BODY_BYTES_MAX {
            true => Some(self.long.acquire().await.map_err(ended)?),
            false => None,
        };
        let _place = self.places.acquire().await.map_err(ended)?;
        let generation = self.link.generation().await?;
        let frame_max = generation.connection.configuration().frame_max();
        let properties = wire::to_amqp(&headers::with_destination(message), frame_max)?;
        generation.unblocked().await?;
        let channel = self.take(&generation).await?;
        let options = BasicPublishOptions { mandatory: route.mandatory, immediate: false };
        let publishing = async {
            let (exchange, key) = (route.exchange.as_str().into(), route.routing_key.as_str().into());
            // This await writes, the next is the broker's confirm.
            let confirm = channel.basic_publish(exchange, key, options, &message.body, properties).await?;
            if faults::bug(Bug::AckWithoutConfirm) {
                return Ok(Confirmation::Ack(None));
            }
            confirm.await
        };
        match limited_with_body(message.body.len(), publishing).await {
            Ok(confirmation) => {
                // A dropped future never gets here, so a channel in this list has nothing in flight.
                self.idle().push((generation.number, channel));
                judge(confirmation, &message.destination, &route)
            }
            Err(failure) => Err(QueueError::NotConfirmed(failure.describe("publish"))),
        }
    }

    async fn take(&self, generation: &Generation) -> Result<Channel, QueueError> {
        let found = {
            let mut idle = self.idle();
            idle.retain(|(number, channel)| *number == generation.number && channel.status().connected());
            idle.pop()
        };
        if let Some((_, channel)) = found {
            return Ok(channel);
        }
        let opening = async {
            let channel = generation.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions { nowait: false }).await?;
            Ok(channel)
        };
        limited(opening).await.map_err(|failure| failure.into_error("open a channel for publishing"))
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<(u64, Channel)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Only an acknowledgement without a returned message means that a queue has it.
fn judge(confirmation: Confirmation, destination: &Destination, route: &Route) -> Result<(), QueueError> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_)) => Err(QueueError::Unroutable(match destination {
            Destination::Lane(provider) | Destination::Delay { provider, .. } => provider.to_string(),
            Destination::Invalid { .. } | Destination::Outcomes { .. } => route.routing_key.clone(),
        })),
        Confirmation::Nack(None) => Err(QueueError::NotConfirmed("the broker refused the message (nack)".to_owned())),
        Confirmation::NotRequested => Err(QueueError::Refused("publisher confirms are off on this channel".to_owned())),
    }
}
