//! One channel with many publishes in flight, written by one task.
//!
//! One task alone publishes on a channel: lapin numbers a publish and queues its frames in two steps, so two tasks
//! could each get the other's confirm. A caller that waits too long abandons the pipeline: publishes in flight on it
//! wait on, and later ones go through another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, ErrorKind};
use tokio::sync::{mpsc, oneshot};

use super::channels::{CallFailure, OpenChannel, with_call_limit};
use super::publisher::{PublishOutcome, ReturnTracker};
use super::supervisor::Generation;
use super::topology::Route;
use crate::queue::QueueError;

/// Most publishes that are taken up between two looks at the confirms.
const DRAIN_MAX: usize = 64;

/// A message as it goes out.
#[derive(Clone, Debug)]
pub struct PublishRequest {
    pub route: Route,
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

struct QueuedPublish {
    parcel: PublishRequest,
    answer: oneshot::Sender<PublishResult>,
}

pub struct Pipeline {
    generation: u64,
    channel: OpenChannel,
    late: AtomicBool,
    requests: mpsc::UnboundedSender<QueuedPublish>,
}

impl Pipeline {
    pub async fn open(generation: &Generation) -> Result<Self, QueueError> {
        let channel = generation.open_channel().await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions { nowait: false });
        with_call_limit(confirming).await.map_err(|failure| failure.into_error("ask for publisher confirms"))?;
        // Bounded by the places of the publishers.
        let (wanted, queue) = mpsc::unbounded_channel();
        tokio::spawn(run(Channel::clone(&channel), queue));
        Ok(Self { generation: generation.number, channel, late: AtomicBool::new(false), requests: wanted })
    }

    /// Whether a message can go through here.
    pub fn is_open_in(&self, generation: &Generation) -> bool {
        !self.requests.is_closed() && self.generation == generation.number && self.is_open()
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

    pub async fn publish(&self, parcel: PublishRequest) -> PublishResult {
        let closed = || ChannelEndCause::Other("publish: the channel is gone".to_owned());
        let (answer, judged) = oneshot::channel();
        self.requests.send(QueuedPublish { parcel, answer }).map_err(|_| closed())?;
        judged.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// Ends when no publish waits for a result any more, or when none can be given.
async fn run(channel: Channel, mut wanted: mpsc::UnboundedReceiver<QueuedPublish>) {
    let (mut flight, mut batch) = (InFlightPublishes::default(), Vec::new());
    loop {
        let idle = flight.sent.is_empty();
        tokio::select! {
            biased;
            taken = wanted.recv_many(&mut batch, DRAIN_MAX) => match taken {
                0 => return,
                _ => batch.drain(..).for_each(|wanted| flight.send(&channel, wanted)),
            },
            confirmed = flight.confirms(), if !idle => if let Err(why) = confirmed {
                // None comes after this, and one that came too late to be sent gets the same result.
                wanted.close();
                while let Ok(late) = wanted.try_recv() {
                    late.answer.send(Err(why.clone())).unwrap_or_default();
                }
                return flight.fail_all(&why);
            },
        }
    }
}

/// What was published and is not confirmed, and what is confirmed and not judged.
#[derive(Default)]
struct InFlightPublishes {
    sent: Vec<(u64, BoxFuture<'static, lapin::Result<Confirmation>>)>,
    returns: ReturnTracker<Option<PublishRequest>>,
    answers: BTreeMap<u64, oneshot::Sender<PublishResult>>,
    end: ChannelEnd,
    last: u64,
}

impl InFlightPublishes {
    fn send(&mut self, channel: &Channel, QueuedPublish { parcel, answer }: QueuedPublish) {
        self.last += 1;
        // What is not mandatory does not come back.
        self.returns.record_publish(self.last, parcel.route.mandatory.then(|| parcel.clone()));
        self.answers.insert(self.last, answer);
        self.sent.push((self.last, publish(channel.clone(), parcel).boxed()));
    }

    /// Waits until there are confirms, and answers those whose publish can be judged by now.
    async fn confirms(&mut self) -> Result<(), ChannelEndCause> {
        let mut came = Vec::new();
        std::future::poll_fn(|context| {
            // Polled again until nothing is new: a publish that was confirmed before any known one is known then.
            loop {
                let before = came.len();
                self.sent.retain_mut(|(id, confirming)| match confirming.poll_unpin(context) {
                    Poll::Ready(confirmation) => {
                        came.push((*id, confirmation));
                        false
                    }
                    Poll::Pending => true,
                });
                if came.len() == before {
                    return if came.is_empty() { Poll::Pending } else { Poll::Ready(()) };
                }
            }
        })
        .await;
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
                    |parcel: &Option<PublishRequest>| parcel.as_ref().map_or(0, |parcel| parcel.similarity(&returned));
                if !self.returns.record_return(alike) {
                    let stranger = "publish: a message came back that is none of those in flight";
                    return Err(ChannelEndCause::Other(stranger.to_owned()));
                }
            }
        }
        for (id, verdict) in self.returns.take_resolved() {
            self.answer(id, Ok(verdict));
        }
        self.end.cause(!self.sent.is_empty()).map_or(Ok(()), |why| Err(why.clone()))
    }

    fn fail_all(self, why: &ChannelEndCause) {
        for answer in self.answers.into_values() {
            answer.send(Err(why.clone())).unwrap_or_default();
        }
    }

    fn answer(&mut self, id: u64, answer: PublishResult) {
        if let Some(waiting) = self.answers.remove(&id) {
            // Who no longer waits was told that nothing is known.
            waiting.send(answer).unwrap_or_default();
        }
    }
}

async fn publish(channel: Channel, parcel: PublishRequest) -> lapin::Result<Confirmation> {
    let PublishRequest { route, body, properties } = parcel;
    let options = BasicPublishOptions { mandatory: route.mandatory, immediate: false };
    let (exchange, key) = (route.exchange.as_str().into(), route.routing_key.as_str().into());
    // Its first poll numbers the message and queues it; this await writes, the next is the broker's confirm.
    let confirm = channel.basic_publish(exchange, key, options, &body, properties).await?;
    confirm.await
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
