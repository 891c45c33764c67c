//! The publisher, which returns only when the broker has confirmed a message, or when nothing can be known of it.
//!
//! Each exchange has a pipeline of its own: the broker ends a channel whose exchange is gone or forbidden. A confirm
//! may be late, because a queue is slow or the broker takes no publishes. A caller that was told "not confirmed" would
//! publish once more, and a slow broker would get one copy after the other. So the result is the confirm, or the end of
//! the channel.

use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

use super::channels::{CallFailure, with_body_limit};
use super::pipeline::{ChannelEndCause, Pipeline, PublishRequest, PublishResult};
use super::returns::PublishOutcome;
use super::supervisor::{Generation, SupervisedConnection};
use super::topology::{Route, Topology};
use super::wire;
use crate::domain::job::BODY_BYTES_MAX;
use crate::queue::{Destination, OutgoingMessage, QueueError, headers};

/// Publishes in flight to one exchange with one routing key: what memory they take, against how many confirms the broker can
/// give at once. Apart for each key, so that a queue that confirms nothing holds up no other.
const IN_FLIGHT: usize = 256;
/// Channels of one exchange that wait for late confirms alone. With more, later publishes share the newest.
const LATE_CHANNELS: usize = 8;
/// How often a publish with a late confirm looks whether its channel is still open.
const CHANNEL_CHECK_EVERY: Duration = Duration::from_secs(1);
/// After this a confirm is held to be lost, and its channel is closed.
const CONFIRM_MAX: Duration = Duration::from_secs(15 * 60);

pub struct Publisher {
    link: SupervisedConnection,
    topology: Topology,
    /// For bodies that no job has, one at a time: their frames are a second copy of them.
    long: Semaphore,
    /// By exchange, and apart for long bodies, which others should not wait behind.
    exchanges: Mutex<HashMap<(String, bool), Arc<ExchangePublisher>>>,
}

#[derive(Default)]
struct ExchangePublisher {
    /// By routing key.
    places: Mutex<HashMap<String, Arc<Semaphore>>>,
    pipelines: AsyncMutex<Pipelines>,
}

#[derive(Default)]
struct Pipelines {
    newest: Option<Arc<Pipeline>>,
    /// Given up for what comes later, and kept by those whose confirms are late.
    late: Vec<Weak<Pipeline>>,
}

impl Publisher {
    pub fn new(link: SupervisedConnection, topology: Topology) -> Self {
        Self { link, topology, long: Semaphore::new(1), exchanges: Mutex::default() }
    }

    pub async fn publish(&self, message: &OutgoingMessage) -> Result<(), QueueError> {
        let route = self.topology.route(&message.destination)?;
        let is_long = message.body.len() > BODY_BYTES_MAX;
        let way = self.exchange(&route.exchange, is_long);
        let places = way.places(&route.routing_key);
        // Never for ever: each holder of a place gives it back when its message is confirmed or its channel ends.
        let ended = |_| QueueError::Unavailable("the publisher has ended".to_owned());
        let _alone = match is_long {
            true => Some(self.long.acquire().await.map_err(ended)?),
            false => None,
        };
        let _place = places.acquire().await.map_err(ended)?;
        let generation = self.link.generation().await?;
        let frame_max = generation.connection.configuration().frame_max();
        let properties = wire::to_amqp(&headers::with_destination_headers(message), frame_max)?;
        generation.unblocked().await?;
        let pipeline = way.pipeline(&generation).await?;
        let parcel = PublishRequest { route: route.clone(), body: message.body.clone(), properties };
        let mut publishing = pin!(pipeline.publish(parcel));
        let in_time = async { Ok(publishing.as_mut().await) };
        let answer = match with_body_limit(message.body.len(), in_time).await {
            Ok(answer) => answer,
            Err(_) => {
                pipeline.mark_late();
                tracing::warn!(exchange = route.exchange, key = route.routing_key, "confirm is late; waiting for it");
                wait_late_confirm(&pipeline, publishing).await
            }
        };
        match answer {
            Ok(verdict) => check_outcome(verdict, &message.destination, &route),
            Err(ChannelEndCause::NoExchange) => Err(unroutable(&message.destination, &route)),
            Err(ChannelEndCause::Other(why)) => Err(QueueError::NotConfirmed(why)),
        }
    }

    fn exchange(&self, exchange: &str, is_long: bool) -> Arc<ExchangePublisher> {
        let mut ways = self.exchanges.lock();
        Arc::clone(ways.entry((exchange.to_owned(), is_long)).or_default())
    }
}

/// Waits for a late confirm, or for the end of its channel.
async fn wait_late_confirm(pipeline: &Pipeline, publishing: impl Future<Output = PublishResult>) -> PublishResult {
    let ended = async {
        let looks = (0..).take_while(|look| CHANNEL_CHECK_EVERY * *look < CONFIRM_MAX);
        for _ in looks {
            tokio::time::sleep(CHANNEL_CHECK_EVERY).await;
            if !pipeline.is_open() {
                // Publishes in flight get the reason.
                tokio::time::sleep(CHANNEL_CHECK_EVERY).await;
                return "publish: the channel is gone";
            }
        }
        "publish: no confirm came, and the channel was closed"
    };
    tokio::select! {
        answer = publishing => answer,
        why = ended => {
            pipeline.close().await;
            Err(ChannelEndCause::Other(why.to_owned()))
        }
    }
}

impl ExchangePublisher {
    fn places(&self, key: &str) -> Arc<Semaphore> {
        let mut places = self.places.lock();
        if let Some(places) = places.get(key) {
            return Arc::clone(places);
        }
        Arc::clone(places.entry(key.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(IN_FLIGHT))))
    }

    /// The pipeline of this generation. The first caller opens it; none waits longer for that than for any call.
    async fn pipeline(&self, generation: &Generation) -> Result<Arc<Pipeline>, QueueError> {
        let having = async {
            let mut pipelines = self.pipelines.lock().await;
            pipelines.late.retain(|late| late.strong_count() > 0);
            let full = pipelines.late.len() >= LATE_CHANNELS;
            let newest = pipelines.newest.as_ref();
            let good = newest.filter(|pipeline| pipeline.is_open_in(generation) && (full || !pipeline.is_late()));
            if let Some(pipeline) = good {
                return Ok(Ok(Arc::clone(pipeline)));
            }
            let opened = Pipeline::open(generation).await.map(Arc::new);
            let before = std::mem::replace(&mut pipelines.newest, opened.as_ref().ok().cloned());
            pipelines.late.extend(before.as_ref().map(Arc::downgrade));
            Ok(opened)
        };
        let late = |failure: CallFailure| failure.into_error("open a channel for publishing");
        with_body_limit(0, having).await.map_err(late)?
    }
}

/// Only an acknowledgement without a returned message means that a queue has it.
fn check_outcome(verdict: PublishOutcome, destination: &Destination, route: &Route) -> Result<(), QueueError> {
    match verdict {
        PublishOutcome::Delivered => Ok(()),
        PublishOutcome::Returned => Err(unroutable(destination, route)),
        PublishOutcome::Nacked => Err(QueueError::Rejected("a queue takes no more (nack)".to_owned())),
    }
}

fn unroutable(destination: &Destination, route: &Route) -> QueueError {
    QueueError::Unroutable(match destination {
        Destination::Lane(provider) | Destination::Delay { provider, .. } => provider.to_string(),
        Destination::Invalid { .. } | Destination::Outcomes { .. } => route.routing_key.clone(),
    })
}
