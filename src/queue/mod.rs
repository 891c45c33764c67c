//! The interface to the broker: one lane per provider in, confirmed messages out.
//!
//! It moves bytes; [`message`] alone knows the format of a job. Every publish returns only once the broker has
//! confirmed it. An acknowledgement consumes its receipt, so a second one cannot be written.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{BoxStream, FuturesUnordered};
use futures_util::{FutureExt as _, StreamExt as _};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::domain::backend_fault::BackendFault;
use crate::domain::job::InvalidReason;
use crate::domain::provider::{ProviderName, RESERVED_NAMES};

pub mod message;
pub mod rabbitmq;

#[derive(Clone, Debug, thiserror::Error)]
pub enum QueueError {
    /// The broker cannot be reached or the connection ended. Work resumes when the supervisor has rebuilt it.
    #[error("broker unavailable: {0}")]
    Unavailable(String),
    /// The broker took the message but no queue did, or has no such exchange: the topology is incomplete.
    #[error("no queue takes messages for `{0}`: run `sluicegate provider apply` or restart `run`")]
    Unroutable(String),
    /// Nothing is known of the message: its channel ended before a confirm came, or it was never sent.
    #[error("publish not confirmed: {0}")]
    NotConfirmed(String),
    /// A queue that the message was for rejected it (nack); others may have it.
    #[error("publish rejected: {0}")]
    Rejected(String),
    /// An error that a retry does not fix (a declaration that differs, missing permission).
    #[error("broker refuses: {0}")]
    Refused(String),
}

/// Where a message goes. Names of exchanges and queues are the implementation's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    Lane(ProviderName),
    Invalid {
        lane: ProviderName,
        reason: InvalidReason,
        detail: String,
    },
    /// An outcome event, routing key `<provider>.<state>`.
    Outcomes {
        provider: ProviderName,
        state: &'static str,
    },
}

/// The parts of a message's properties that we keep when we pass it on. Rows of rejected and held messages have them as
/// JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Properties {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<String>,
    /// AMQP's `type`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub app_id: Option<String>,
    /// When the producer says that it was made, in seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp_s: Option<u64>,
    /// Values that were no strings are text: numbers and booleans as such, tables and arrays as JSON, bytes in
    /// hexadecimal. The broker's own headers (`x-death`, `x-delivery-count`, …) are left behind.
    pub headers: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingMessage {
    pub destination: Destination,
    pub body: Bytes,
    pub properties: Properties,
}

/// One delivered message that is not acknowledged yet.
pub struct Delivery {
    pub body: Bytes,
    pub properties: Properties,
    /// A hint for logs and metrics, never for decisions.
    pub redelivered: bool,
    pub receipt: Box<dyn Receipt>,
}

/// A queue or an exchange that is not as it must be, as far as can be seen; a line for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub enum TopologyProblem {
    Missing(String),
    /// It exists with another type or other arguments: declaring it again fails until it is deleted.
    Mismatch(String),
    /// The broker refuses the inspection, in its own words.
    Refused(String),
}

/// Deliveries of a lane's message before it is given up. The limit is high, because each lost worker costs every message
/// in its hands one delivery. It is finite, because a message that crashes workers must end somewhere.
pub const LANE_DELIVERY_LIMIT: u16 = 1_000;

/// Why a message is in no lane any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeathCause {
    /// It was delivered [`LANE_DELIVERY_LIMIT`] times, and no worker acknowledged it.
    DeliveryLimit,
    /// Its producer's `expiration` passed while it was in its lane.
    Expired,
}

/// A message that is in no lane any more.
pub struct DeadLetter {
    /// The lane that it was given up in, or is for, if the broker says so.
    pub lane: Option<ProviderName>,
    pub cause: DeathCause,
    pub body: Bytes,
    pub properties: Properties,
    /// Dropped, it comes back once this process has ended, at the latest.
    pub receipt: Box<dyn Receipt>,
}

/// A message that could not be a job, in the queue of these.
pub struct InvalidLetter {
    pub body: Bytes,
    pub properties: Properties,
    /// Acknowledged, the message is gone. Dropped, it stays.
    pub receipt: Box<dyn Receipt>,
}

/// The right to finish one delivery, once.
#[async_trait]
pub trait Receipt: Send + Sync {
    /// The message is done with. An error means that it will be delivered again, which the ledger absorbs; where the
    /// broker may still count it as out, the lane ends ([`LaneConsumer::next`] says so).
    async fn ack(self: Box<Self>) -> Result<(), QueueError>;

    /// Gives the message back to the lane, for another worker to take at once. Dropping a receipt keeps the message
    /// unacknowledged until the lane closes.
    async fn requeue(self: Box<Self>) -> Result<(), QueueError>;
}

/// One open lane. The broker never has more than `places` unacknowledged messages out to it.
#[async_trait]
pub trait LaneConsumer: Send {
    /// The next message; waits for one. After [`LaneConsumer::stop`] it returns what had already arrived, then `Ok(None)`.
    ///
    /// # Errors
    /// The lane is gone with its connection, or a receipt could not be finished; open another. What is unacknowledged is
    /// delivered again, and its receipts can no longer acknowledge once the lane is dropped.
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError>;

    /// Takes no more messages from the broker; unfinished receipts stay valid.
    async fn stop(&mut self) -> Result<(), QueueError>;

    /// Takes messages again after [`LaneConsumer::stop`].
    async fn resume(&mut self) -> Result<(), QueueError>;

    /// Changes the number of places. Messages that are out already, or have arrived, stay.
    async fn resize(&mut self, places: u16) -> Result<(), QueueError>;
}

#[async_trait]
pub trait Queue: Send + Sync {
    /// Declares everything that these providers' messages may pass. Idempotent; nothing is ever deleted.
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError>;

    /// Opens a lane with room for `places` unacknowledged messages.
    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError>;

    /// Publishes persistently and mandatorily; returns once the broker has confirmed, however late that is, or once its channel
    /// has ended. Dropped before that, the message may have been published.
    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError>;

    /// Publishes many messages, each as [`Queue::publish`] does, and none waits for another's confirm. Yields the place
    /// of each in the list with its result.
    fn publish_all(&self, messages: Vec<OutgoingMessage>) -> BoxStream<'_, (usize, Result<(), QueueError>)> {
        let publishing = messages.into_iter().enumerate();
        let publishing = publishing.map(|(place, message)| self.publish(message).map(move |result| (place, result)));
        publishing.collect::<FuturesUnordered<_>>().boxed()
    }

    /// Takes one message that was given up, oldest first; `None` when there is none.
    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError>;

    /// Takes the oldest of the messages that could not be a job, and for which the ledger had no room; `None` when there
    /// is none.
    async fn take_invalid(&self) -> Result<Option<InvalidLetter>, QueueError> {
        Ok(None)
    }

    /// Messages ready in a lane, for status; `None` when the lane has no queue: what is published to it is lost or refused.
    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError>;

    /// What these providers' messages pass that is missing, or is not as [`Queue::declare`] makes it. Creates nothing.
    async fn topology_problems(&self, _providers: &[ProviderName]) -> Result<Vec<TopologyProblem>, QueueError> {
        Ok(Vec::new())
    }

    /// Why the broker takes no publishes from this process, where it says so. Deliveries go on meanwhile.
    async fn publish_fault(&self) -> Option<BackendFault> {
        None
    }

    /// Whether the broker answers now; its version, where it tells one.
    async fn ping(&self) -> Result<Option<String>, QueueError>;
}

/// The signal by which a receipt that could not finish its message ends its lane; the first reason counts.
///
/// A place in the prefetch that never comes free would in time stop the lane without a sign. A lane that ends is opened
/// again, and the broker delivers again what it held.
#[derive(Default)]
struct LaneFault(watch::Sender<Option<String>>);

impl LaneFault {
    pub fn record(&self, why: String) {
        self.0.send_if_modified(|reason| {
            let first = reason.is_none();
            reason.get_or_insert(why);
            first
        });
    }

    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Waits for a reason. Cancel-safe: the reason stays.
    pub async fn wait(&self) -> String {
        // The sender lives in `self`, so there is no end without a reason.
        let reason = self.0.subscribe().wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_default()
    }
}

/// The lane's queue. Names of Sluicegate's own queues are refused; all others are the domain's to judge.
///
/// # Errors
/// [`QueueError::Refused`] when the provider has the name of one of our own queues.
fn lane_queue(prefix: &str, provider: &ProviderName) -> Result<String, QueueError> {
    if RESERVED_NAMES.contains(&provider.as_str()) {
        return Err(QueueError::Refused(format!("provider `{provider}`: this name is reserved, choose another")));
    }
    Ok(format!("{prefix}.{provider}"))
}

/// Headers that Sluicegate adds to messages, the same in every implementation. Headers of a producer pass through
/// unchanged.
pub mod headers {
    use std::borrow::Cow;

    use crate::queue::{Destination, OutgoingMessage, Properties};

    /// On an invalid message: the code of its reason.
    pub const REASON: &str = "x-sluicegate-reason";
    /// On an invalid message: field and fix, for people.
    pub const DETAIL: &str = "x-sluicegate-detail";

    /// On an invalid message: the provider whose lane it came in.
    pub const LANE: &str = "x-sluicegate-lane";

    /// On an invalid message: its body is not what came, and can only be discarded.
    pub const MASKED: &str = "x-sluicegate-masked";

    /// The properties with which a message that could not be a job is published to its lane again: those that it came with.
    pub fn without_rejection(mut properties: Properties) -> Properties {
        for header in [REASON, DETAIL, LANE, MASKED] {
            properties.headers.remove(header);
        }
        properties
    }

    /// The message's properties, with the headers that its destination adds.
    pub(super) fn with_destination_headers(message: &OutgoingMessage) -> Cow<'_, Properties> {
        let mut properties = Cow::Borrowed(&message.properties);
        if let Destination::Invalid { lane, reason, detail } = &message.destination {
            let headers = &mut properties.to_mut().headers;
            headers.insert(LANE.to_owned(), lane.as_str().to_owned());
            headers.insert(REASON.to_owned(), reason.code().to_owned());
            headers.insert(DETAIL.to_owned(), detail.clone());
        }
        properties
    }
}
