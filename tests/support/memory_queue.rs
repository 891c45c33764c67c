//! A broker in memory for tests of the worker: what RabbitMQ promises a lane, without a server.
//!
//! Its queues have the names of the default prefix: `payments.acme`, `payments.invalid`, `payments.dead`,
//! `payments.outcomes`. A message that is published to an exchange without subscribers is kept, for tests to read.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use sluicegate::domain::provider::{ProviderName, RESERVED_NAMES};
use sluicegate::queue::{
    DeadLetter, DeathCause, Delivery, Destination, InvalidLetter, LANE_DELIVERY_LIMIT, LaneConsumer, OutgoingMessage,
    Properties, Queue, QueueError, Receipt, headers,
};
use tokio::sync::watch;

const INVALID: &str = "payments.invalid";
const DEAD: &str = "payments.dead";
const OUTCOMES: &str = "payments.outcomes";

#[derive(Clone, Default)]
pub struct MemoryQueue(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Wakes lanes that wait for a message.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    /// In the order in which they are given out.
    messages: Vec<Message>,
    lanes: BTreeMap<u64, Lane>,
    /// The numbers of messages and of those who take them.
    numbers: u64,
    /// A queue that takes no message now.
    refused: Option<String>,
}

#[derive(Clone)]
struct Message {
    number: u64,
    queue: String,
    body: Bytes,
    properties: Properties,
    /// By whom it is taken.
    taken_by: Option<u64>,
    deliveries: u16,
    is_redelivered: bool,
    /// The lane that gave it up.
    dead_of: Option<String>,
}

/// An open lane, which takes messages as places come free.
struct Lane {
    queue: String,
    places: u16,
    is_taking: bool,
    /// Taken and not given out yet.
    arrived: VecDeque<Message>,
}

fn lane_queue(provider: &ProviderName) -> Result<String, QueueError> {
    match RESERVED_NAMES.contains(&provider.as_str()) {
        true => Err(QueueError::Refused(format!("provider `{provider}`: this name is reserved"))),
        false => Ok(format!("payments.{provider}")),
    }
}

impl Shared {
    /// Changes the state. Then lanes take what is there, and wake.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap();
        let changed = change(&mut state);
        state.fill_lanes();
        drop(state);
        self.changed.send_replace(());
        changed
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Takes the oldest message of a queue.
    fn take(&mut self, queue: &str, taker: u64) -> Option<Message> {
        let message = self.messages.iter_mut().find(|message| message.queue == queue && message.taken_by.is_none())?;
        message.taken_by = Some(taker);
        message.deliveries += 1;
        Some(message.clone())
    }

    fn fill_lanes(&mut self) {
        let mut lanes = std::mem::take(&mut self.lanes);
        for (number, lane) in lanes.iter_mut().filter(|(_, lane)| lane.is_taking) {
            let taken = self.messages.iter().filter(|message| message.taken_by == Some(*number)).count();
            let free = usize::from(lane.places).saturating_sub(taken);
            let queue = lane.queue.clone();
            lane.arrived.extend((0..free).map_while(|_| self.take(&queue, *number)));
        }
        self.lanes = lanes;
    }

    fn find_taken(&mut self, number: u64, taker: u64) -> Result<usize, QueueError> {
        let place =
            self.messages.iter().position(|message| message.number == number && message.taken_by == Some(taker));
        place.ok_or_else(|| QueueError::Unavailable("the lane that took this message is closed".to_owned()))
    }

    /// Gives back what is taken so, or gives it up after too many deliveries.
    fn give_back(&mut self, is_given: impl Fn(&Message) -> bool) {
        for message in self.messages.iter_mut().filter(|message| message.taken_by.is_some() && is_given(message)) {
            message.taken_by = None;
            message.is_redelivered = true;
            if message.deliveries > LANE_DELIVERY_LIMIT && message.queue != DEAD {
                message.dead_of = Some(std::mem::replace(&mut message.queue, DEAD.to_owned()));
            }
        }
    }
}

/// What tests look at and change.
impl MemoryQueue {
    /// Messages of a queue, those that a worker has taken, too.
    pub fn count(&self, queue: &str) -> usize {
        self.messages(queue).len()
    }

    /// Messages of a queue that wait to be taken.
    pub fn ready(&self, queue: &str) -> usize {
        let state = self.0.state.lock().unwrap();
        state.messages.iter().filter(|message| message.queue == queue && message.taken_by.is_none()).count()
    }

    /// Messages that are taken, of all queues.
    pub fn taken(&self) -> usize {
        self.0.state.lock().unwrap().messages.iter().filter(|message| message.taken_by.is_some()).count()
    }

    /// Bodies and properties of a queue's messages, oldest first.
    pub fn messages(&self, queue: &str) -> Vec<(Bytes, Properties)> {
        let state = self.0.state.lock().unwrap();
        let of_queue = state.messages.iter().filter(|message| message.queue == queue);
        of_queue.map(|message| (message.body.clone(), message.properties.clone())).collect()
    }

    /// All bodies, whatever their queues.
    pub fn bodies(&self) -> Vec<Bytes> {
        self.0.state.lock().unwrap().messages.iter().map(|message| message.body.clone()).collect()
    }

    /// Loses all messages, as with the broker's data.
    pub fn lose_all(&self) {
        self.0.change(|state| state.messages.clear());
    }

    /// Publishes to this queue fail from now on; `None`: to none.
    pub fn refuse(&self, queue: Option<&str>) {
        self.0.state.lock().unwrap().refused = queue.map(str::to_owned);
    }

    /// A message that a lane has given up.
    pub fn put_dead(&self, body: &str, dead_of: &str, properties: Properties) {
        self.0.change(|state| {
            let number = state.number();
            state.messages.push(Message {
                number,
                queue: DEAD.to_owned(),
                body: Bytes::copy_from_slice(body.as_bytes()),
                properties,
                taken_by: None,
                deliveries: LANE_DELIVERY_LIMIT + 1,
                is_redelivered: true,
                dead_of: Some(dead_of.to_owned()),
            });
        });
    }

    /// Gives back all messages, each after one delivery too many.
    pub fn exhaust_deliveries(&self) {
        self.0.change(|state| {
            for message in &mut state.messages {
                (message.deliveries, message.taken_by) = (LANE_DELIVERY_LIMIT + 1, Some(0));
            }
            state.give_back(|_| true);
        });
    }

    fn taken_from(&self, queue: &str) -> Option<(Message, Box<dyn Receipt>)> {
        let mut state = self.0.state.lock().unwrap();
        let taker = state.number();
        let message = state.take(queue, taker)?;
        let receipt = MemoryReceipt { shared: Arc::clone(&self.0), message: message.number, taker };
        Some((message, Box::new(receipt)))
    }
}

#[async_trait]
impl Queue for MemoryQueue {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        providers.iter().try_for_each(|provider| lane_queue(provider).map(drop))
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        let queue = lane_queue(provider)?;
        let changed = self.0.changed.subscribe();
        let number = self.0.change(|state| {
            let number = state.number();
            state.lanes.insert(number, Lane { queue, places, is_taking: true, arrived: VecDeque::new() });
            number
        });
        Ok(Box::new(MemoryLane { shared: Arc::clone(&self.0), changed, number }))
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        let OutgoingMessage { destination, body, mut properties } = message;
        let queue = match destination {
            Destination::Lane(provider) => lane_queue(&provider)?,
            Destination::Outcomes { .. } => OUTCOMES.to_owned(),
            Destination::Invalid { lane, reason, detail } => {
                let added =
                    [(headers::LANE, lane.as_str()), (headers::REASON, reason.code()), (headers::DETAIL, &detail)];
                properties.headers.extend(added.map(|(name, value)| (name.to_owned(), value.to_owned())));
                INVALID.to_owned()
            }
        };
        self.0.change(|state| {
            if state.refused.as_ref() == Some(&queue) {
                return Err(QueueError::Unavailable("not now".to_owned()));
            }
            let number = state.number();
            state.messages.push(Message {
                number,
                queue,
                body,
                properties,
                taken_by: None,
                deliveries: 0,
                is_redelivered: false,
                dead_of: None,
            });
            Ok(())
        })
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        let Some((message, receipt)) = self.taken_from(DEAD) else { return Ok(None) };
        let lane = message.dead_of.as_deref().and_then(|queue| queue.strip_prefix("payments."));
        Ok(Some(DeadLetter {
            lane: lane.and_then(|lane| ProviderName::new(lane).ok()),
            cause: DeathCause::DeliveryLimit,
            body: message.body,
            properties: message.properties,
            receipt,
        }))
    }

    async fn take_invalid(&self) -> Result<Option<InvalidLetter>, QueueError> {
        let taken = self.taken_from(INVALID);
        Ok(taken.map(|(Message { body, properties, .. }, receipt)| InvalidLetter { body, properties, receipt }))
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        Ok(Some(self.ready(&lane_queue(provider)?) as u64))
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        Ok(None)
    }
}

struct MemoryLane {
    shared: Arc<Shared>,
    changed: watch::Receiver<()>,
    number: u64,
}

impl MemoryLane {
    fn change(&self, change: impl FnOnce(&mut Lane)) {
        self.shared.change(|state| change(state.lanes.get_mut(&self.number).unwrap()));
    }

    fn delivery(&self, message: Message) -> Delivery {
        let receipt = MemoryReceipt { shared: Arc::clone(&self.shared), message: message.number, taker: self.number };
        Delivery {
            body: message.body,
            properties: message.properties,
            redelivered: message.is_redelivered,
            receipt: Box::new(receipt),
        }
    }
}

#[async_trait]
impl LaneConsumer for MemoryLane {
    async fn next(&mut self) -> Result<Option<Delivery>, QueueError> {
        loop {
            self.changed.mark_unchanged();
            let (arrived, is_taking) = {
                let mut state = self.shared.state.lock().unwrap();
                let lane = state.lanes.get_mut(&self.number).unwrap();
                (lane.arrived.pop_front(), lane.is_taking)
            };
            match arrived {
                Some(message) => return Ok(Some(self.delivery(message))),
                None if !is_taking => return Ok(None),
                // The sender lives in `shared`.
                None => self.changed.changed().await.unwrap(),
            }
        }
    }

    async fn stop(&mut self) -> Result<(), QueueError> {
        self.change(|lane| lane.is_taking = false);
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), QueueError> {
        self.change(|lane| lane.is_taking = true);
        Ok(())
    }

    async fn resize(&mut self, places: u16) -> Result<(), QueueError> {
        self.change(|lane| lane.places = places);
        Ok(())
    }
}

impl Drop for MemoryLane {
    fn drop(&mut self) {
        self.shared.change(|state| {
            state.lanes.remove(&self.number);
            state.give_back(|message| message.taken_by == Some(self.number));
        });
    }
}

struct MemoryReceipt {
    shared: Arc<Shared>,
    message: u64,
    taker: u64,
}

#[async_trait]
impl Receipt for MemoryReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        self.shared.change(|state| {
            let place = state.find_taken(self.message, self.taker)?;
            state.messages.remove(place);
            Ok(())
        })
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        self.shared.change(|state| {
            state.find_taken(self.message, self.taker)?;
            state.give_back(|message| message.number == self.message);
            Ok(())
        })
    }
}
