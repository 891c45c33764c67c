//! One channel with many publishes in flight, written by one task.
//!
//! One task alone publishes on a channel: lapin numbers a publish and queues its frames in two steps, so two tasks
//! could each get the other's confirm. It queues the frames of a group at once, so that few writes carry them. A caller
//! that waits too long abandons the pipeline: publishes in flight on it wait on, and later ones go through another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, ErrorKind, PublisherConfirm};
use tokio::sync::mpsc;

use super::channels::{CallFailure, OpenChannel, with_call_limit};
use super::confirms::AwaitedConfirms;
use super::returns::{PublishOutcome, ReturnTracker};
use super::supervisor::Generation;
use super::topology::Route;
use crate::queue::QueueError;

/// A message as it goes out.
#[derive(Clone, Debug)]
pub struct PublishRequest {
    pub route: Arc<Route>,
    pub body: Bytes,
    pub properties: BasicProperties,
}

impl PublishRequest {
    /// The broker returns what it was given; should one change a header on the way, the rest still tells.
    fn similarity(&self, returned: &BasicReturnMessage) -> u8 {
        let (route, back) = (&self.route, &returned.delivery);
        let same = (route.exchange.as_str(), route.routing_key.as_str())
            == (back.exchange.as_str(), back.routing_key.as_str())
            && self.properties.message_id() == back.properties.message_id()
            && self.body == back.data;
        u8::from(same) + u8::from(same && self.properties == back.properties)
    }
}

/// Why nothing is known of a message.
#[derive(Clone, Debug)]
pub enum ChannelEndCause {
    /// There is no such exchange: the broker ends the channel of its publisher.
    NoExchange,
    Other(String),
}

impl From<lapin::Error> for ChannelEndCause {
    fn from(error: lapin::Error) -> Self {
        match CallFailure::Broker(error) {
            failure if failure.is_not_found() => Self::NoExchange,
            failure => Self::Other(failure.describe("publish")),
        }
    }
}

/// What ended a channel, as its publishes tell it.
#[derive(Default)]
struct ChannelEnd {
    why: Option<ChannelEndCause>,
    /// Of one that came when the channel was closing already: it says that, and not why.
    shut: Option<ChannelEndCause>,
}

impl ChannelEnd {
    fn record(&mut self, error: lapin::Error) {
        let place = match error.kind() {
            ErrorKind::InvalidChannelState(..) => &mut self.shut,
            _ => &mut self.why,
        };
        place.get_or_insert_with(|| error.into());
    }

    /// Publishes that were in flight when the channel closed get the reason, perhaps later than ones that came after them.
    fn cause(&self, others_in_flight: bool) -> Option<&ChannelEndCause> {
        self.why.as_ref().or_else(|| self.shut.as_ref().filter(|_| !others_in_flight))
    }
}

pub type PublishResult = Result<PublishOutcome, ChannelEndCause>;

/// The results of a group of publishes: of each, its place in the group, and what became of it.
pub type PublishResults = mpsc::UnboundedReceiver<(usize, PublishResult)>;

struct QueuedGroup {
    requests: Vec<PublishRequest>,
    results: mpsc::UnboundedSender<(usize, PublishResult)>,
}

pub struct Pipeline {
    generation: u64,
    channel: OpenChannel,
    late: AtomicBool,
    groups: mpsc::UnboundedSender<QueuedGroup>,
}

impl Pipeline {
    pub async fn open(generation: &Generation) -> Result<Self, QueueError> {
        let channel = generation.open_channel().await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions { nowait: false });
        with_call_limit(confirming).await.map_err(|failure| failure.into_error("ask for publisher confirms"))?;
        // Bounded by the places of the publishers.
        let (groups, queue) = mpsc::unbounded_channel();
        tokio::spawn(run(Channel::clone(&channel), queue));
        Ok(Self { generation: generation.number, channel, late: AtomicBool::new(false), groups })
    }

    /// Whether a message can go through here.
    pub fn is_open_in(&self, generation: &Generation) -> bool {
        !self.groups.is_closed() && self.generation == generation.number && self.is_open()
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Some confirm here is late.
    pub fn is_late(&self) -> bool {
        self.late.load(Ordering::Relaxed)
    }

    /// Ends the channel; publishes in flight get that as their result.
    pub async fn close(&self) {
        self.mark_late();
        if let Err(failure) = with_call_limit(self.channel.close(200, "no confirm".into())).await {
            tracing::debug!(error = failure.describe("close a channel"), "channel of a lost confirm not closed");
        }
    }

    /// Some confirm is late: what comes later is not to be late with it.
    pub fn mark_late(&self) {
        self.late.store(true, Ordering::Relaxed);
    }

    /// Publishes a group. Its results end early when the channel is gone.
    pub fn publish(&self, requests: Vec<PublishRequest>) -> PublishResults {
        let (results, received) = mpsc::unbounded_channel();
        // The task of a channel that is gone takes no group: dropped, it has no results.
        let _ = self.groups.send(QueuedGroup { requests, results });
        received
    }
}

/// Ends when no publish waits for a result any more, or when none can be given.
async fn run(channel: Channel, mut groups: mpsc::UnboundedReceiver<QueuedGroup>) {
    let mut flight = InFlightPublishes::default();
    loop {
        let idle = flight.is_idle();
        tokio::select! {
            biased;
            group = groups.recv() => match group {
                Some(group) => flight.send(&channel, group),
                None => return,
            },
            confirmed = flight.confirms(), if !idle => if let Err(why) = confirmed {
                // None comes after this, and one that came too late to be sent gets the same result.
                groups.close();
                while let Ok(late) = groups.try_recv() {
                    for place in 0..late.requests.len() {
                        late.results.send((place, Err(why.clone()))).unwrap_or_default();
                    }
                }
                return flight.fail_all(&why);
            },
        }
    }
}

/// A publish that is not judged yet, and where its result goes.
struct OpenPublish {
    /// `None`: it was not mandatory, so it does not come back.
    request: Option<PublishRequest>,
    place: usize,
    results: mpsc::UnboundedSender<(usize, PublishResult)>,
}

impl OpenPublish {
    fn finish(self, result: PublishResult) {
        // If the caller no longer waits, it takes the message for not confirmed.
        self.results.send((self.place, result)).unwrap_or_default();
    }
}

/// Writes of one publish; its result is the confirm that lapin expects.
type Sending<'c> = BoxFuture<'c, lapin::Result<PublisherConfirm>>;

/// What was published and is not confirmed, and what is confirmed and not judged.
#[derive(Default)]
struct InFlightPublishes<'c> {
    /// Publishes whose frames are queued, and not written yet, in the order in which they are written.
    sending: VecDeque<(u64, Sending<'c>)>,
    confirms: AwaitedConfirms,
    /// Publishes that were refused as they were queued.
    unsent: Vec<(u64, lapin::Error)>,
    returns: ReturnTracker<OpenPublish>,
    end: ChannelEnd,
    last: u64,
}

impl<'c> InFlightPublishes<'c> {
    fn is_idle(&self) -> bool {
        self.sending.is_empty() && self.confirms.is_empty() && self.unsent.is_empty()
    }

    fn send(&mut self, channel: &'c Channel, QueuedGroup { requests, results }: QueuedGroup) {
        for (place, request) in requests.into_iter().enumerate() {
            self.last += 1;
            let open = request.route.mandatory.then(|| request.clone());
            self.returns.record_publish(self.last, OpenPublish { request: open, place, results: results.clone() });
            let mut sending = publish(channel, request).boxed();
            // The first poll numbers the message and queues its frames. Frames are written in order, so the first of all
            // that are being sent is awaited, and no other.
            match sending.poll_unpin(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => self.sending.push_back((self.last, sending)),
                Poll::Ready(Ok(confirm)) => self.confirms.add(self.last, confirm),
                Poll::Ready(Err(error)) => self.unsent.push((self.last, error)),
            }
        }
    }

    /// Waits until there are confirms, and answers those whose publish can be judged by now.
    async fn confirms(&mut self) -> Result<(), ChannelEndCause> {
        let came = std::future::poll_fn(|context| self.poll_confirms(context)).await;
        for (id, confirmation) in came {
            let (accepted, returned) = match confirmation {
                Ok(Confirmation::Ack(returned)) => (true, returned),
                Ok(Confirmation::Nack(returned)) => (false, returned),
                Ok(Confirmation::NotRequested) => {
                    return Err(ChannelEndCause::Other("publish: publisher confirms are off".to_owned()));
                }
                // The others of its time may be certain all the same.
                Err(error) => {
                    self.end.record(error);
                    continue;
                }
            };
            self.returns.record_confirm(id, accepted, returned.is_some());
            if let Some(returned) = returned {
                let alike =
                    |open: &OpenPublish| open.request.as_ref().map_or(0, |request| request.similarity(&returned));
                if !self.returns.record_return(alike) {
                    let stranger = "publish: a message came back that is none of those in flight";
                    return Err(ChannelEndCause::Other(stranger.to_owned()));
                }
            }
        }
        for (_, open, outcome) in self.returns.take_resolved() {
            open.finish(Ok(outcome));
        }
        let others_in_flight = !self.sending.is_empty() || !self.confirms.is_empty();
        self.end.cause(others_in_flight).map_or(Ok(()), |why| Err(why.clone()))
    }

    /// The confirms and errors that have come. A publish that was confirmed before any of them is among them.
    fn poll_confirms(&mut self, context: &mut Context<'_>) -> Poll<Vec<(u64, lapin::Result<Confirmation>)>> {
        let mut came: Vec<_> = self.unsent.drain(..).map(|(id, error)| (id, Err(error))).collect();
        self.confirms.register(context.waker());
        loop {
            let mut has_written = false;
            while let Some((id, sending)) = self.sending.front_mut()
                && let Poll::Ready(written) = sending.poll_unpin(context)
            {
                match written {
                    Ok(confirm) => self.confirms.add(*id, confirm),
                    Err(error) => came.push((*id, Err(error))),
                }
                self.sending.pop_front();
                has_written = true;
            }
            // Again until nothing is new: whatever was confirmed before the last one that came has been woken by then.
            if !self.confirms.poll_woken(&mut came) && !has_written {
                return if came.is_empty() { Poll::Pending } else { Poll::Ready(came) };
            }
        }
    }

    fn fail_all(self, why: &ChannelEndCause) {
        self.returns.into_open().for_each(|open| open.finish(Err(why.clone())));
    }
}

async fn publish(channel: &Channel, request: PublishRequest) -> lapin::Result<PublisherConfirm> {
    let PublishRequest { route, body, properties } = request;
    let options = BasicPublishOptions { mandatory: route.mandatory, immediate: false };
    let (exchange, key) = (route.exchange.as_str().into(), route.routing_key.as_str().into());
    channel.basic_publish(exchange, key, options, &body, properties).await
}

#[cfg(test)]
mod tests {
    use lapin::ChannelState;
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPSoftError};

    use super::*;

    #[test]
    fn channel_end_cause_reaches_every_publish() {
        let shut = || lapin::Error::from(ErrorKind::InvalidChannelState(ChannelState::Closing, "basic.publish"));
        let closed = || {
            let error = AMQPError::new(AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND), "no exchange".into());
            lapin::Error::from(ErrorKind::ProtocolError(error))
        };
        for order in [[closed(), shut()], [shut(), closed()]] {
            let mut end = ChannelEnd::default();
            order.into_iter().for_each(|error| end.record(error));
            assert!(matches!(end.cause(false), Some(ChannelEndCause::NoExchange)));
        }
        let mut end = ChannelEnd::default();
        assert!(end.cause(false).is_none());
        end.record(shut());
        assert!(end.cause(true).is_none(), "those in flight know better");
        assert!(matches!(end.cause(false), Some(ChannelEndCause::Other(_))), "no better cause is known");
        end.record(closed());
        assert!(matches!(end.cause(true), Some(ChannelEndCause::NoExchange)));
    }
}
