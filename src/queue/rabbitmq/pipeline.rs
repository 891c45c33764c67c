//! One channel with many publishes in flight, written by one task and judged by it.
//!
//! Refuses to let two tasks publish on one channel: lapin numbers a publish and queues its frames in two steps, so that
//! of two at once each could be given the other's confirm. Refuses to mend: whoever waits too long gives the pipeline up,
//! those in flight on it wait on, and what comes later goes through another.

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

use super::accounts::{Accounts, Verdict};
use super::channels::OpenChannel;
use super::failure::{Failure, limited};
use super::supervisor::Generation;
use super::topology::Route;
use crate::faults::{self, Bug};
use crate::queue::QueueError;

/// Most publishes that are taken up between two looks at the confirms.
const TAKEN_AT_ONCE: usize = 64;

/// A message as it goes out.
#[derive(Clone, Debug)]
pub(super) struct Parcel {
    pub route: Route,
    pub body: Bytes,
    pub properties: BasicProperties,
}

impl Parcel {
    /// The broker returns what it was given; should one change a header on the way, the rest still tells.
    fn alike(&self, returned: &BasicReturnMessage) -> u8 {
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
pub(super) enum Ended {
    /// There is no such exchange: the broker ends the channel of whoever publishes to it.
    NoExchange,
    Otherwise(String),
}

impl From<lapin::Error> for Ended {
    fn from(error: lapin::Error) -> Self {
        match Failure::Broker(error) {
            failure if failure.is_not_found() => Self::NoExchange,
            failure => Self::Otherwise(failure.describe("publish")),
        }
    }
}

/// What ended a channel, as its publishes tell it.
#[derive(Default)]
struct End {
    why: Option<Ended>,
    /// Of one that came when the channel was closing already: it says that, and not why.
    shut: Option<Ended>,
}

impl End {
    fn told(&mut self, error: lapin::Error) {
        let place = match error.kind() {
            ErrorKind::InvalidChannelState(..) => &mut self.shut,
            _ => &mut self.why,
        };
        place.get_or_insert_with(|| error.into());
    }

    /// Whoever was in flight when the channel closed is told why, though perhaps later than one that came after it.
    fn known(&self, others_in_flight: bool) -> Option<&Ended> {
        self.why.as_ref().or_else(|| self.shut.as_ref().filter(|_| !others_in_flight))
    }
}

pub(super) type Answer = Result<Verdict, Ended>;

struct Wanted {
    parcel: Parcel,
    answer: oneshot::Sender<Answer>,
}

pub(super) struct Pipeline {
    generation: u64,
    channel: OpenChannel,
    given_up: AtomicBool,
    wanted: mpsc::UnboundedSender<Wanted>,
}

impl Pipeline {
    /// # Errors
    /// As of opening a channel.
    pub async fn open(generation: &Generation) -> Result<Self, QueueError> {
        let channel = generation.open_channel().await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions { nowait: false });
        limited(confirming).await.map_err(|failure| failure.into_error("ask for publisher confirms"))?;
        // Bounded by the places of those who publish.
        let (wanted, queue) = mpsc::unbounded_channel();
        tokio::spawn(run(Channel::clone(&channel), queue));
        Ok(Self { generation: generation.number, channel, given_up: AtomicBool::new(false), wanted })
    }

    /// Whether a message can go through here.
    pub fn is_open_in(&self, generation: &Generation) -> bool {
        !self.wanted.is_closed() && self.generation == generation.number && self.is_open()
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Some confirm here is late.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Ends the channel; whoever is in flight is told so.
    pub async fn close(&self) {
        self.give_up();
        if let Err(failure) = limited(self.channel.close(200, "no confirm".into())).await {
            tracing::debug!(error = failure.describe("close a channel"), "channel of a lost confirm not closed");
        }
    }

    /// Some confirm is late: what comes later is not to be late with it.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// Why nothing is known of the message.
    pub async fn publish(&self, parcel: Parcel) -> Answer {
        let gone = || Ended::Otherwise("publish: the channel is gone".to_owned());
        let (answer, judged) = oneshot::channel();
        self.wanted.send(Wanted { parcel, answer }).map_err(|_| gone())?;
        judged.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// Ends when nobody waits for an answer any more, or when none can be given.
async fn run(channel: Channel, mut wanted: mpsc::UnboundedReceiver<Wanted>) {
    let (mut flight, mut batch) = (Flight::default(), Vec::new());
    loop {
        let idle = flight.sent.is_empty();
        tokio::select! {
            biased;
            taken = wanted.recv_many(&mut batch, TAKEN_AT_ONCE) => match taken {
                0 => return,
                _ => batch.drain(..).for_each(|wanted| flight.send(&channel, wanted)),
            },
            told = flight.confirms(), if !idle => if let Err(why) = told {
                // Nobody comes after this, and whoever came too late to be sent is told the same.
                wanted.close();
                while let Ok(late) = wanted.try_recv() {
                    late.answer.send(Err(why.clone())).unwrap_or_default();
                }
                return flight.give_up(&why);
            },
        }
    }
}

/// What was published and is not confirmed, and what is confirmed and not judged.
#[derive(Default)]
struct Flight {
    sent: Vec<(u64, BoxFuture<'static, lapin::Result<Confirmation>>)>,
    accounts: Accounts<Option<Parcel>>,
    answers: BTreeMap<u64, oneshot::Sender<Answer>>,
    end: End,
    last: u64,
}

impl Flight {
    fn send(&mut self, channel: &Channel, Wanted { parcel, answer }: Wanted) {
        self.last += 1;
        // What is not mandatory does not come back.
        self.accounts.published(self.last, parcel.route.mandatory.then(|| parcel.clone()));
        self.answers.insert(self.last, answer);
        self.sent.push((self.last, publish(channel.clone(), parcel).boxed()));
    }

    /// Waits until there are confirms, and answers those whose publish can be judged by now.
    ///
    /// # Errors
    /// Why nothing can be told any more.
    async fn confirms(&mut self) -> Result<(), Ended> {
        let mut came = Vec::new();
        std::future::poll_fn(|context| {
            // Polled again until nothing is new: whoever was confirmed before any that we know of is known then.
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
                    return Err(Ended::Otherwise("publish: publisher confirms are off".to_owned()));
                }
                // The others of its time may be certain all the same.
                Err(error) => {
                    self.end.told(error);
                    continue;
                }
            };
            self.accounts.confirmed(id, accepted, returned.is_some());
            if let Some(returned) = returned {
                let alike = |parcel: &Option<Parcel>| parcel.as_ref().map_or(0, |parcel| parcel.alike(&returned));
                if !self.accounts.returned(alike) {
                    let stranger = "publish: a message came back that is none of those in flight";
                    return Err(Ended::Otherwise(stranger.to_owned()));
                }
            }
        }
        for (id, verdict) in self.accounts.judge() {
            self.answer(id, Ok(verdict));
        }
        self.end.known(!self.sent.is_empty()).map_or(Ok(()), |why| Err(why.clone()))
    }

    fn give_up(self, why: &Ended) {
        for answer in self.answers.into_values() {
            answer.send(Err(why.clone())).unwrap_or_default();
        }
    }

    fn answer(&mut self, id: u64, answer: Answer) {
        if let Some(waiting) = self.answers.remove(&id) {
            // Who no longer waits was told that nothing is known.
            waiting.send(answer).unwrap_or_default();
        }
    }
}

async fn publish(channel: Channel, parcel: Parcel) -> lapin::Result<Confirmation> {
    let Parcel { route, body, properties } = parcel;
    let options = BasicPublishOptions { mandatory: route.mandatory, immediate: false };
    let (exchange, key) = (route.exchange.as_str().into(), route.routing_key.as_str().into());
    // Its first poll numbers the message and queues it; this await writes, the next is the broker's confirm.
    let confirm = channel.basic_publish(exchange, key, options, &body, properties).await?;
    if faults::bug(Bug::AckWithoutConfirm) {
        return Ok(Confirmation::Ack(None));
    }
    confirm.await
}

#[cfg(test)]
mod tests {
    use lapin::ChannelState;
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPSoftError};

    use super::*;

    #[test]
    fn the_cause_is_told_whoever_is_told_first() {
        let shut = || lapin::Error::from(ErrorKind::InvalidChannelState(ChannelState::Closing, "basic.publish"));
        let gone = || {
            let error = AMQPError::new(AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND), "no exchange".into());
            lapin::Error::from(ErrorKind::ProtocolError(error))
        };
        for order in [[gone(), shut()], [shut(), gone()]] {
            let mut end = End::default();
            order.into_iter().for_each(|error| end.told(error));
            assert!(matches!(end.known(false), Some(Ended::NoExchange)));
        }
        let mut end = End::default();
        assert!(end.known(false).is_none());
        end.told(shut());
        assert!(end.known(true).is_none(), "those in flight know better");
        assert!(matches!(end.known(false), Some(Ended::Otherwise(_))), "nobody knows better");
        end.told(gone());
        assert!(matches!(end.known(true), Some(Ended::NoExchange)));
    }
}
