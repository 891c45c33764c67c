//! The publisher, whose result for a message is the broker's confirm, or that nothing can be known of it.
//!
//! Each exchange has a pipeline of its own: the broker ends a channel whose exchange is gone or forbidden. A confirm
//! may be late, because a queue is slow or the broker takes no publishes. A caller that was told "not confirmed" would
//! publish once more, and a slow broker would get one copy after the other. So the result is the confirm, or the end of
//! the channel.
//!
//! Messages are published in groups: those of one route share a look at the connection, a timer and a few writes. Each
//! has its own result and its own place, so a late confirm holds up no other message.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, join_all};
use futures_util::stream::{self, BoxStream, FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore, SemaphorePermit, mpsc};
use tokio::time::{Instant, sleep, timeout};

use super::channels::{CALL_LIMIT, CallFailure, body_limit};
use super::nacks::NackRuns;
use super::pipeline::{ChannelEndCause, Pipeline, PublishRequest, PublishResult};
use super::returns::PublishOutcome;
use super::supervisor::{Generation, SupervisedConnection};
use super::topology::{Route, Topology};
use super::wire;
use crate::domain::backend_fault::BackendFault;
use crate::domain::job::BODY_BYTES_MAX;
use crate::queue::{OutgoingMessage, QueueError, headers};

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
    nacks: Mutex<NackRuns>,
}

type Results = mpsc::UnboundedSender<(usize, Result<(), QueueError>)>;

/// The messages of one route that are still to be published, each with its place among all messages.
struct RouteGroup {
    route: Arc<Route>,
    is_long: bool,
    messages: VecDeque<(usize, OutgoingMessage)>,
}

/// Messages of one route that have places, and are published together.
struct Part<'p> {
    route: Arc<Route>,
    /// `None`: it has its result.
    messages: Vec<Option<(usize, OutgoingMessage)>>,
    /// One for each message without a result.
    places: OwnedSemaphorePermit,
    _alone: Option<SemaphorePermit<'p>>,
    results: Results,
}

/// Whether a nack that makes the publisher leave its connection is the last word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    First,
    ThroughAnotherConnection,
}

/// The broker's answer to a publish that was not returned.
enum BrokerAnswer {
    Accepted,
    Nacked,
    /// Nacked, and the connection of this number is left: another one may do better.
    LeftConnection(u64),
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

impl RouteGroup {
    /// Whether a message may be published with those of the group.
    fn takes(&self, message: &OutgoingMessage) -> bool {
        let is_same = |(_, first): &(usize, OutgoingMessage)| first.destination == message.destination;
        self.is_long == is_long(message) && self.messages.front().is_some_and(is_same)
    }
}

/// Whether a message is longer than any that is a job.
fn is_long(message: &OutgoingMessage) -> bool {
    message.body.len() > BODY_BYTES_MAX
}

impl Part<'_> {
    /// Whether a message has no result.
    fn is_open(&self) -> bool {
        self.places.num_permits() > 0
    }

    fn finish(&mut self, index: usize, result: Result<(), QueueError>) {
        if let Some((place, _)) = self.messages[index].take() {
            drop(self.places.split(1));
            // If the caller no longer waits, it takes the message for not confirmed.
            self.results.send((place, result)).unwrap_or_default();
        }
    }

    fn fail_all(&mut self, error: &QueueError) {
        (0..self.messages.len()).for_each(|index| self.finish(index, Err(error.clone())));
    }

    /// Takes out one message, with its place.
    fn split(&mut self, index: usize) -> Option<Self> {
        let message = self.messages[index].take()?;
        let places = self.places.split(1)?;
        let route = Arc::clone(&self.route);
        let results = self.results.clone();
        Some(Self { route, messages: vec![Some(message)], places, _alone: None, results })
    }
}

impl Publisher {
    pub fn new(link: SupervisedConnection, topology: Topology) -> Self {
        Self { link, topology, long: Semaphore::new(1), exchanges: Mutex::default(), nacks: Mutex::default() }
    }

    /// Publishes all messages; yields the place of each in the list with its result.
    pub fn publish_all(&self, messages: Vec<OutgoingMessage>) -> BoxStream<'_, (usize, Result<(), QueueError>)> {
        let (results, mut received) = mpsc::unbounded_channel();
        let groups = self.group(messages, &results);
        let publishing = groups.into_iter().map(move |group| self.publish_group(group, results.clone()));
        // With its end, the last sender of results is dropped.
        let mut publishing = join_all(publishing.collect::<Vec<_>>()).map(drop).boxed().fuse();
        stream::poll_fn(move |context| {
            let _ = publishing.poll_unpin(context);
            received.poll_recv(context)
        })
        .boxed()
    }

    /// Why the broker takes no publishes, as far as it says.
    pub async fn fault(&self) -> Option<BackendFault> {
        let generation = self.link.generation_for_readout().await.ok()?;
        generation.publish_fault(self.topology.nowhere()).await
    }

    /// The messages by their routes, long ones apart.
    fn group(&self, messages: Vec<OutgoingMessage>, results: &Results) -> Vec<RouteGroup> {
        let mut groups: Vec<RouteGroup> = Vec::new();
        for (place, message) in messages.into_iter().enumerate() {
            if let Some(group) = groups.iter_mut().find(|group| group.takes(&message)) {
                group.messages.push_back((place, message));
                continue;
            }
            match self.topology.route(&message.destination) {
                Ok(route) => {
                    let is_long = is_long(&message);
                    groups.push(RouteGroup { route: route.into(), is_long, messages: [(place, message)].into() });
                }
                // If the caller no longer waits, it takes the message for not confirmed.
                Err(error) => results.send((place, Err(error))).unwrap_or_default(),
            }
        }
        groups
    }

    /// Publishes a group, as many messages at a time as have places.
    async fn publish_group(&self, mut group: RouteGroup, results: Results) {
        let exchange = self.exchange(&group.route.exchange, group.is_long);
        let mut parts = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some(part) = self.next_part(&mut group, &exchange, &results), if !group.messages.is_empty() => {
                    parts.push(self.publish_part(part, &exchange, Attempt::First));
                }
                Some(()) = parts.next() => {}
                else => break,
            }
        }
        for (place, _) in group.messages {
            let ended = QueueError::Unavailable("the publisher has ended".to_owned());
            results.send((place, Err(ended))).unwrap_or_default();
        }
    }

    /// The next messages that have places. Cancel-safe.
    async fn next_part(
        &self,
        group: &mut RouteGroup,
        exchange: &ExchangePublisher,
        results: &Results,
    ) -> Option<Part<'_>> {
        let free = exchange.places(&group.route.routing_key);
        // Never for ever: each holder of a place gives it back when its message is confirmed or its channel ends.
        let alone = if group.is_long { Some(self.long.acquire().await.ok()?) } else { None };
        let mut places = Arc::clone(&free).acquire_owned().await.ok()?;
        let more = if group.is_long { 0 } else { group.messages.len() - 1 };
        let more = u32::try_from(more.min(free.available_permits())).unwrap_or(u32::MAX);
        if let Ok(more) = free.try_acquire_many_owned(more) {
            places.merge(more);
        }
        let messages = group.messages.drain(..places.num_permits()).map(Some).collect();
        let route = Arc::clone(&group.route);
        let results = results.clone();
        Some(Part { route, messages, places, _alone: alone, results })
    }

    async fn publish_part(&self, mut part: Part<'_>, exchange: &ExchangePublisher, attempt: Attempt) {
        if let Err(error) = self.publish_once(&mut part, exchange, attempt).await {
            part.fail_all(&error);
        }
    }

    /// Publishes the messages of a part through the present connection, and finishes each with its result.
    ///
    /// # Errors
    /// The result of all messages that have none yet.
    async fn publish_once(
        &self,
        part: &mut Part<'_>,
        exchange: &ExchangePublisher,
        attempt: Attempt,
    ) -> Result<(), QueueError> {
        let generation = self.link.generation().await?;
        let (indices, requests) = take_requests(part, generation.connection.configuration().frame_max());
        if requests.is_empty() {
            return Ok(());
        }
        generation.unblocked().await?;
        let pipeline = exchange.pipeline(&generation).await?;
        let bytes = requests.iter().map(|request| request.body.len()).sum();
        let mut results = pipeline.publish(requests);
        let mut again: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
        let mut late = pin!(sleep(body_limit(bytes)));
        let mut ended = pin!(await_end(&pipeline));
        let (mut came, mut is_late) = (Vec::new(), false);
        while part.is_open() || !again.is_empty() {
            tokio::select! {
                received = results.recv_many(&mut came, IN_FLIGHT), if part.is_open() => {
                    if received == 0 {
                        return Err(QueueError::NotConfirmed("publish: the channel is gone".to_owned()));
                    }
                    for (number, result) in came.drain(..) {
                        let index = indices[number];
                        match self.judge(&part.route, result, &generation) {
                            Ok(BrokerAnswer::LeftConnection(left)) if attempt == Attempt::First => {
                                again.extend(part.split(index).map(|part| self.publish_again(part, exchange, left)));
                            }
                            Ok(BrokerAnswer::Accepted) => part.finish(index, Ok(())),
                            Ok(BrokerAnswer::Nacked | BrokerAnswer::LeftConnection(_)) => {
                                let full = QueueError::Rejected("a queue takes no more (nack)".to_owned());
                                part.finish(index, Err(full));
                            }
                            Err(error) => part.finish(index, Err(error)),
                        }
                    }
                }
                Some(()) = again.next() => {}
                () = &mut late, if !is_late && part.is_open() => {
                    is_late = true;
                    pipeline.mark_late();
                    let messages = part.places.num_permits();
                    let route = &part.route;
                    tracing::warn!(
                        exchange = route.exchange, key = route.routing_key, messages, "confirms are late; waiting for them"
                    );
                }
                why = &mut ended, if is_late && part.is_open() => {
                    pipeline.close().await;
                    return Err(QueueError::NotConfirmed(why.to_owned()));
                }
            }
        }
        Ok(())
    }

    /// Publishes a message through a newer connection than the one of this number.
    fn publish_again<'p>(&'p self, part: Part<'p>, exchange: &'p ExchangePublisher, left: u64) -> BoxFuture<'p, ()> {
        async move {
            self.link.await_newer(left).await;
            self.publish_part(part, exchange, Attempt::ThroughAnotherConnection).await;
        }
        .boxed()
    }

    fn judge(&self, route: &Route, result: PublishResult, generation: &Generation) -> Result<BrokerAnswer, QueueError> {
        match result {
            // Only an acknowledgement without a returned message means that a queue has it.
            Ok(PublishOutcome::Delivered) => Ok(self.judge_confirm(route, true, generation)),
            Ok(PublishOutcome::Nacked) => Ok(self.judge_confirm(route, false, generation)),
            // The routing key is the lane's provider, or else says more than the exchange.
            Ok(PublishOutcome::Returned) | Err(ChannelEndCause::NoExchange) => {
                Err(QueueError::Unroutable(route.routing_key.clone()))
            }
            Err(ChannelEndCause::Other(why)) => Err(QueueError::NotConfirmed(why)),
        }
    }

    /// After nacks in a row, later publishes take another connection.
    fn judge_confirm(&self, route: &Route, accepted: bool, generation: &Generation) -> BrokerAnswer {
        let key = &route.routing_key;
        let leaves = self.nacks.lock().record(key, accepted, generation.number, Instant::now());
        if leaves {
            let exchange = &route.exchange;
            tracing::warn!(exchange, key, "the broker nacks on this connection; publishing through another one");
            generation.leave();
        }
        match accepted {
            true => BrokerAnswer::Accepted,
            false if leaves => BrokerAnswer::LeftConnection(generation.number),
            false => BrokerAnswer::Nacked,
        }
    }

    fn exchange(&self, exchange: &str, is_long: bool) -> Arc<ExchangePublisher> {
        let mut ways = self.exchanges.lock();
        Arc::clone(ways.entry((exchange.to_owned(), is_long)).or_default())
    }
}

/// The requests for the messages of a part that have no result, and the indices of these messages. One that cannot be
/// a request has that as its result.
fn take_requests(part: &mut Part<'_>, frame_max: u32) -> (Vec<usize>, Vec<PublishRequest>) {
    let (mut indices, mut requests) = (Vec::new(), Vec::new());
    for index in 0..part.messages.len() {
        let Some((_, message)) = &part.messages[index] else { continue };
        match wire::to_amqp(&headers::with_destination_headers(message), frame_max) {
            Ok(properties) => {
                indices.push(index);
                requests.push(PublishRequest {
                    route: Arc::clone(&part.route),
                    body: message.body.clone(),
                    properties,
                });
            }
            Err(error) => part.finish(index, Err(error)),
        }
    }
    (indices, requests)
}

/// Waits for the end of the channel, or until a confirm that has not come is held to be lost; says which.
async fn await_end(pipeline: &Pipeline) -> &'static str {
    let looks = (0..).take_while(|look| CHANNEL_CHECK_EVERY * *look < CONFIRM_MAX);
    for _ in looks {
        sleep(CHANNEL_CHECK_EVERY).await;
        if !pipeline.is_open() {
            // Publishes in flight get the reason.
            sleep(CHANNEL_CHECK_EVERY).await;
            return "publish: the channel is gone";
        }
    }
    "publish: no confirm came, and the channel was closed"
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
        let opening = async {
            let mut pipelines = self.pipelines.lock().await;
            pipelines.late.retain(|late| late.strong_count() > 0);
            let full = pipelines.late.len() >= LATE_CHANNELS;
            let newest = pipelines.newest.as_ref();
            let good = newest.filter(|pipeline| pipeline.is_open_in(generation) && (full || !pipeline.is_late()));
            if let Some(pipeline) = good {
                return Ok(Arc::clone(pipeline));
            }
            let opened = Pipeline::open(generation).await.map(Arc::new);
            let before = std::mem::replace(&mut pipelines.newest, opened.as_ref().ok().cloned());
            pipelines.late.extend(before.as_ref().map(Arc::downgrade));
            opened
        };
        let late = |_| Err(CallFailure::TimedOut.into_error("open a channel for publishing"));
        timeout(CALL_LIMIT, opening).await.unwrap_or_else(late)
    }
}
