//! Publishes, and returns only when the broker has taken responsibility.
//!
//! Refuses to let one exchange hold up another, or take it along: the broker ends a channel whose exchange is gone or
//! forbidden, so each exchange has a pipeline of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use tokio::sync::{Mutex, Semaphore};

use super::accounts::Verdict;
use super::failure::{Failure, limited_with_body};
use super::pipeline::{Ended, Parcel, Pipeline};
use super::supervisor::{Generation, Link};
use super::topology::{Route, Topology};
use super::wire;
use crate::domain::job::BODY_BYTES_MAX;
use crate::queue::{Destination, Outgoing, QueueError, headers};

/// Publishes in flight to one exchange: what memory they take, against how many confirms the broker can give at once.
const IN_FLIGHT: usize = 256;

pub(super) struct Publisher {
    link: Link,
    topology: Topology,
    /// For bodies that no job has, one at a time: their frames are a second copy of them.
    long: Semaphore,
    /// By exchange, and apart for long bodies, which others should not wait behind.
    ways: StdMutex<HashMap<(String, bool), Arc<Way>>>,
}

struct Way {
    places: Semaphore,
    pipeline: Mutex<Option<Arc<Pipeline>>>,
}

impl Publisher {
    pub fn new(link: Link, topology: Topology) -> Self {
        Self { link, topology, long: Semaphore::new(1), ways: StdMutex::default() }
    }

    pub async fn publish(&self, message: &Outgoing) -> Result<(), QueueError> {
        let route = self.topology.route(&message.destination)?;
        let is_long = message.body.len() > BODY_BYTES_MAX;
        let way = self.way(&route.exchange, is_long);
        // Unbounded in time, yet never for ever: each holder of a place gives it back within a few call limits.
        let ended = |_| QueueError::Away("the publisher has ended".to_owned());
        let _alone = match is_long {
            true => Some(self.long.acquire().await.map_err(ended)?),
            false => None,
        };
        let _place = way.places.acquire().await.map_err(ended)?;
        let generation = self.link.generation().await?;
        let frame_max = generation.connection.configuration().frame_max();
        let properties = wire::to_amqp(&headers::with_destination(message), frame_max)?;
        generation.unblocked().await?;
        let pipeline = way.pipeline(&generation).await?;
        let parcel = Parcel { route: route.clone(), body: message.body.clone(), properties };
        let publishing = async { Ok(pipeline.publish(parcel).await) };
        match limited_with_body(message.body.len(), publishing).await {
            Ok(Ok(verdict)) => judge(verdict, &message.destination, &route),
            Ok(Err(Ended::NoExchange)) => Err(unroutable(&message.destination, &route)),
            Ok(Err(Ended::Otherwise(why))) => Err(QueueError::NotConfirmed(why)),
            Err(failure) => {
                pipeline.give_up();
                Err(QueueError::NotConfirmed(failure.describe("publish")))
            }
        }
    }

    fn way(&self, exchange: &str, is_long: bool) -> Arc<Way> {
        let mut ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || Arc::new(Way { places: Semaphore::new(IN_FLIGHT), pipeline: Mutex::default() });
        Arc::clone(ways.entry((exchange.to_owned(), is_long)).or_insert_with(fresh))
    }
}

impl Way {
    /// The pipeline of this generation. Whoever comes first opens it; nobody waits longer for that than for any call.
    async fn pipeline(&self, generation: &Generation) -> Result<Arc<Pipeline>, QueueError> {
        let having = async {
            let mut place = self.pipeline.lock().await;
            if let Some(pipeline) = place.as_ref().filter(|pipeline| pipeline.is_good_for(generation)) {
                return Ok(Ok(Arc::clone(pipeline)));
            }
            let opened = Pipeline::open(generation).await.map(Arc::new);
            *place = opened.as_ref().ok().cloned();
            Ok(opened)
        };
        limited_with_body(0, having)
            .await
            .and_then(|opened| opened)
            .map_err(|failure: Failure| failure.into_error("open a channel for publishing"))
    }
}

/// Only an acknowledgement without a returned message means that a queue has it.
fn judge(verdict: Verdict, destination: &Destination, route: &Route) -> Result<(), QueueError> {
    match verdict {
        Verdict::Delivered => Ok(()),
        Verdict::Returned => Err(unroutable(destination, route)),
        Verdict::Refused => Err(QueueError::NotConfirmed("the broker refused the message (nack)".to_owned())),
    }
}

fn unroutable(destination: &Destination, route: &Route) -> QueueError {
    QueueError::Unroutable(match destination {
        Destination::Lane(provider) | Destination::Delay { provider, .. } => provider.to_string(),
        Destination::Invalid { .. } | Destination::Outcomes { .. } => route.routing_key.clone(),
    })
}
