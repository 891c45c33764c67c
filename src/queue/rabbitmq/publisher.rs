//! The publisher, which returns only when the broker has confirmed a message, or when nothing can be known of it.
//!
//! Each exchange has a pipeline of its own: the broker ends a channel whose exchange is gone or forbidden. A confirm
//! may be late, because a queue is slow or the broker takes no publishes. A caller that was told "not confirmed" would
//! publish once more, and a slow broker would get one copy after the other. So the result is the confirm, or the end of
//! the channel.
//!
//! A returned message is attributed to its publish, when many are in flight on a channel. lapin 4.12.3 keeps returned
//! messages in a queue, and the next confirm, whichever it is, takes the oldest out of it (`acknowledgement.rs`). The
//! broker returns a message before it confirms it. So at its confirm, a message's return was taken by an earlier
//! confirm, is taken by its own, or still lies behind the one that its own takes. While the last may be so, the message
//! does not count as delivered.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::Instant;

use super::channels::{CallFailure, with_body_limit};
use super::nacks::NackRuns;
use super::pipeline::{ChannelEndCause, Pipeline, PublishRequest, PublishResult};
use super::supervisor::{Generation, SupervisedConnection};
use super::topology::{Route, Topology};
use super::wire;
use crate::domain::backend_fault::BackendFault;
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
    nacks: Mutex<NackRuns>,
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

impl Publisher {
    pub fn new(link: SupervisedConnection, topology: Topology) -> Self {
        Self { link, topology, long: Semaphore::new(1), exchanges: Mutex::default(), nacks: Mutex::default() }
    }

    pub async fn publish(&self, message: &OutgoingMessage) -> Result<(), QueueError> {
        let mut answer = self.publish_once(message).await?;
        if let BrokerAnswer::LeftConnection(number) = answer {
            self.link.await_newer(number).await;
            answer = self.publish_once(message).await?;
        }
        match answer {
            BrokerAnswer::Accepted => Ok(()),
            BrokerAnswer::Nacked | BrokerAnswer::LeftConnection(_) => {
                Err(QueueError::Rejected("a queue takes no more (nack)".to_owned()))
            }
        }
    }

    /// Why the broker takes no publishes, as far as it says.
    pub async fn fault(&self) -> Option<BackendFault> {
        let generation = self.link.generation_for_readout().await.ok()?;
        generation.publish_fault(self.topology.nowhere()).await
    }

    async fn publish_once(&self, message: &OutgoingMessage) -> Result<BrokerAnswer, QueueError> {
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
            // Only an acknowledgement without a returned message means that a queue has it.
            Ok(PublishOutcome::Delivered) => Ok(self.judge_confirm(&route, true, &generation)),
            Ok(PublishOutcome::Nacked) => Ok(self.judge_confirm(&route, false, &generation)),
            Ok(PublishOutcome::Returned) | Err(ChannelEndCause::NoExchange) => {
                Err(unroutable(&message.destination, &route))
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

fn unroutable(destination: &Destination, route: &Route) -> QueueError {
    QueueError::Unroutable(match destination {
        Destination::Lane(provider) | Destination::Delay { provider, .. } => provider.to_string(),
        Destination::Invalid { .. } | Destination::Outcomes { .. } => route.routing_key.clone(),
    })
}

/// What became of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The broker has taken responsibility.
    Delivered,
    /// No queue has it.
    Returned,
    /// The broker could not take it.
    Nacked,
}

/// The publishes of one channel that are not judged yet.
#[derive(Debug, Default)]
pub struct ReturnTracker<M> {
    open: BTreeMap<u64, PendingPublish<M>>,
}

#[derive(Debug)]
struct PendingPublish<M> {
    message: M,
    returned: bool,
    confirmed: Option<PublishConfirm>,
}

#[derive(Clone, Copy, Debug)]
struct PublishConfirm {
    accepted: bool,
    /// Took a return out of the queue, its own or another's.
    carried_return: bool,
}

impl<M> ReturnTracker<M> {
    pub fn record_publish(&mut self, id: u64, message: M) {
        self.open.insert(id, PendingPublish { message, returned: false, confirmed: None });
    }

    /// A confirm came; `took` if it brought a returned message, which [`Self::record_return`] is told of too.
    pub fn record_confirm(&mut self, id: u64, accepted: bool, took: bool) {
        if let Some(open) = self.open.get_mut(&id) {
            open.confirmed = Some(PublishConfirm { accepted, carried_return: took });
        }
    }

    /// A returned message, by how alike it is to one of ours: 0 for another, and the highest is meant. Of two that
    /// are alike in everything either will do. `false` when it is none of ours: then any of ours may have come back.
    pub fn record_return(&mut self, alike: impl Fn(&M) -> u8) -> bool {
        let candidates = self.open.iter_mut().filter(|(_, open)| !open.returned);
        let scored = candidates.map(|(id, open)| ((alike(&open.message), open.confirmed.is_none(), *id), open));
        let best = scored.filter(|((alike, ..), _)| *alike > 0).max_by_key(|(score, _)| *score);
        best.map(|(_, open)| open.returned = true).is_some()
    }

    /// What is certain, once every confirm that has come was told of.
    ///
    /// While a return lies in lapin's queue every confirm takes one out. So if one lies there whose own confirm has come,
    /// confirms have taken out fewer than have come since the queue was last empty; and unless one of those taken out is
    /// still to be confirmed, there are as many confirms of theirs alone. Hence: who took nothing is judged by
    /// what is known, and who took another's return once all that are known to be returned are confirmed.
    pub fn take_resolved(&mut self) -> Vec<(u64, PublishOutcome)> {
        let complete = self.open.values().all(|open| !open.returned || open.confirmed.is_some());
        let mut judged = Vec::new();
        self.open.retain(|id, open| {
            let Some(PublishConfirm { accepted, carried_return: took }) = open.confirmed else { return true };
            let verdict = match (open.returned, accepted) {
                (true, _) => PublishOutcome::Returned,
                (false, _) if took && !complete => return true,
                (false, true) => PublishOutcome::Delivered,
                (false, false) => PublishOutcome::Nacked,
            };
            judged.push((*id, verdict));
            false
        });
        judged
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// A publish: what it says, whether the broker has a queue for it, and when it confirms it.
    type Publish = (u8, bool, u16);

    fn alike(content: u8) -> impl Fn(&u8) -> u8 {
        move |message| u8::from(*message == content)
    }

    #[test]
    fn confirm_waits_for_its_own_return() {
        let mut accounts = ReturnTracker::default();
        for (id, content) in [(1, b'a'), (2, b'b'), (3, b'c')] {
            accounts.record_publish(id, content);
        }
        // Both b and c were returned; a's confirm takes out b's return, c's confirm takes out its own.
        accounts.record_confirm(1, true, true);
        assert!(accounts.record_return(alike(b'b')));
        assert_eq!(accounts.take_resolved(), []);
        accounts.record_confirm(3, true, true);
        assert!(accounts.record_return(alike(b'c')));
        assert_eq!(accounts.take_resolved(), [(3, PublishOutcome::Returned)], "a's own may still come");
        accounts.record_confirm(2, true, false);
        assert_eq!(accounts.take_resolved(), [(1, PublishOutcome::Delivered), (2, PublishOutcome::Returned)]);
    }

    #[test]
    fn return_matches_the_most_similar_publish() {
        let mut accounts = ReturnTracker::default();
        for (id, content) in [(1, 1_u8), (2, 2), (3, 1)] {
            accounts.record_publish(id, content);
            accounts.record_confirm(id, id != 1, false);
        }
        assert!(!accounts.record_return(|_| 0));
        assert!(accounts.record_return(|message| *message));
        assert_eq!(
            accounts.take_resolved(),
            [(1, PublishOutcome::Nacked), (2, PublishOutcome::Returned), (3, PublishOutcome::Delivered)]
        );
    }

    proptest! {
        /// The broker returns in the order of publishes and confirms in any; lapin gives the oldest return to the next
        /// confirm; we see what has come so far in any order.
        #[test]
        fn return_reaches_its_own_publish(
            publishes in prop::collection::vec((any::<u8>(), any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
            look_every in 1..6_usize,
        ) {
            let outcomes = run(&publishes, |id| id, window, look_every);
            for (id, (_, routed, _)) in publishes.iter().enumerate() {
                let expected = if *routed { PublishOutcome::Delivered } else { PublishOutcome::Returned };
                prop_assert_eq!(outcomes.get(&(id as u64)), Some(&expected), "publish {}", id);
            }
        }

        /// Twins cannot be told apart; as many of each kind come back as were returned.
        #[test]
        fn identical_publishes_match_the_return_count(
            publishes in prop::collection::vec((0..3_u8, any::<bool>(), any::<u16>()), 1..60),
            window in 1..30_usize,
        ) {
            let outcomes = run(&publishes, |id| usize::from(publishes[id].0), window, 1);
            for content in 0..3 {
                let of = |publish: &Publish| publish.0 == content;
                let returned = publishes.iter().filter(|publish| of(publish) && !publish.1).count();
                let ids = (0..publishes.len()).filter(|id| of(&publishes[*id]));
                let reported = ids.filter(|id| outcomes[&(*id as u64)] == PublishOutcome::Returned).count();
                prop_assert_eq!(reported, returned, "{}", content);
            }
        }
    }

    fn run(
        publishes: &[Publish],
        content: impl Fn(usize) -> usize,
        window: usize,
        look_every: usize,
    ) -> BTreeMap<u64, PublishOutcome> {
        let (mut accounts, mut outcomes, mut queue) = (ReturnTracker::default(), BTreeMap::new(), VecDeque::new());
        let (mut in_flight, mut unseen, mut next) = (Vec::<usize>::new(), Vec::new(), 0);
        while next < publishes.len() || !in_flight.is_empty() {
            while next < publishes.len() && in_flight.len() < window {
                accounts.record_publish(next as u64, content(next));
                if !publishes[next].1 {
                    queue.push_back(next);
                }
                in_flight.push(next);
                next += 1;
            }
            let place = usize::from(publishes[in_flight[0]].2) % in_flight.len();
            let id = in_flight.remove(place);
            unseen.push((id, queue.pop_front()));
            if unseen.len() < look_every && !in_flight.is_empty() {
                continue;
            }
            for (id, returned) in unseen.drain(..).rev() {
                accounts.record_confirm(id as u64, true, returned.is_some());
                if let Some(returned) = returned {
                    assert!(accounts.record_return(|message| u8::from(*message == content(returned))));
                }
            }
            for (id, verdict) in accounts.take_resolved() {
                assert!(outcomes.insert(id, verdict).is_none(), "{id} is judged twice");
            }
        }
        assert!(accounts.open.is_empty(), "{accounts:?}");
        outcomes
    }
}
