//! Conformance suite of the queue, on a real RabbitMQ and on the tests' broker in memory, and the tests of RabbitMQ alone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt as _;
use sluicegate::domain::job::InvalidReason;
use sluicegate::domain::provider::ProviderName;
use sluicegate::queue::{
    DeadLetter, DeathCause, Delivery, Destination, LaneConsumer, OutgoingMessage, Properties, Queue, QueueError,
    headers,
};

mod memory;
mod places;
mod rabbitmq;

use places::{
    lane_grows_and_shrinks_with_open_receipts, lane_stops_and_resumes_with_open_receipts, prefetch_is_never_exceeded,
};

/// Long enough for any response that is going to come.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time without a message after which none is expected any more.
const QUIET: Duration = Duration::from_millis(600);

fn provider(name: &str) -> ProviderName {
    ProviderName::new(name).unwrap()
}

fn message(destination: Destination, body: &str) -> OutgoingMessage {
    let properties = Properties { message_id: Some(body.to_owned()), ..Properties::default() };
    OutgoingMessage { destination, body: Bytes::copy_from_slice(body.as_bytes()), properties }
}

fn to_lane(name: &str, body: &str) -> OutgoingMessage {
    message(Destination::Lane(provider(name)), body)
}

async fn publish_all(queue: &dyn Queue, name: &str, bodies: &[&str]) {
    for body in bodies {
        queue.publish(to_lane(name, body)).await.unwrap();
    }
}

async fn take(lane: &mut dyn LaneConsumer) -> Delivery {
    tokio::time::timeout(PATIENCE, lane.next())
        .await
        .expect("no message in time")
        .unwrap()
        .expect("the lane is stopped")
}

async fn take_many(lane: &mut dyn LaneConsumer, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        deliveries.push(take(lane).await);
    }
    deliveries
}

async fn assert_quiet(lane: &mut dyn LaneConsumer) {
    assert!(tokio::time::timeout(QUIET, lane.next()).await.is_err(), "an unexpected message");
}

fn bodies(deliveries: &[Delivery]) -> BTreeSet<String> {
    deliveries.iter().map(|delivery| String::from_utf8(delivery.body.to_vec()).unwrap()).collect()
}

fn set(bodies: &[&str]) -> BTreeSet<String> {
    bodies.iter().map(|body| (*body).to_owned()).collect()
}

/// Waits until the lane has this many messages ready.
async fn await_depth(queue: &dyn Queue, name: &str, expected: u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let depth = queue.depth(&provider(name)).await.unwrap();
        if depth == Some(expected) {
            return;
        }
        assert!(Instant::now() < deadline, "depth is {depth:?} and not {expected}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn published_received_acknowledged(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe"), provider("adyen")]).await.unwrap();
    queue.declare(&[provider("stripe")]).await.unwrap();
    queue.ping().await.unwrap();
    let mut outgoing = to_lane("stripe", "one");
    outgoing.properties = invalid_with_all_properties().properties;
    let sent = outgoing.properties.clone();
    queue.publish(outgoing).await.unwrap();
    publish_all(&*queue, "stripe", &["two", "three"]).await;

    let mut lane = queue.open_lane(&provider("stripe"), 10).await.unwrap();
    let first = take(&mut *lane).await;
    assert_eq!((&first.body[..], first.redelivered), (&b"one"[..], false));
    assert_eq!(first.properties, sent);
    let rest = take_many(&mut *lane, 2).await;
    assert_eq!(bodies(&rest), set(&["two", "three"]));
    for delivery in rest.into_iter().chain([first]) {
        delivery.receipt.ack().await.unwrap();
    }
    drop(lane);
    await_depth(&*queue, "stripe", 0).await;
    let mut again = queue.open_lane(&provider("stripe"), 10).await.unwrap();
    assert_quiet(&mut *again).await;
    let mut other = queue.open_lane(&provider("adyen"), 10).await.unwrap();
    assert_quiet(&mut *other).await;
}

async fn unacknowledged_messages_are_redelivered(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*queue, "stripe", &["kept", "done", "dropped"]).await;
    let mut lane = queue.open_lane(&provider("stripe"), 10).await.unwrap();
    let mut kept = None;
    for delivery in take_many(&mut *lane, 3).await {
        match &delivery.body[..] {
            b"done" => delivery.receipt.ack().await.unwrap(),
            b"kept" => kept = Some(delivery.receipt),
            _ => drop(delivery),
        }
    }
    drop(lane);
    let mut next = queue.open_lane(&provider("stripe"), 10).await.unwrap();
    let back = take_many(&mut *next, 2).await;
    assert_eq!(bodies(&back), set(&["kept", "dropped"]));
    assert!(back.iter().all(|delivery| delivery.redelivered));
    // The receipt of the closed lane is void: the message belongs to the second lane now.
    assert!(matches!(kept.unwrap().ack().await, Err(QueueError::Unavailable(_))));
    for delivery in back {
        delivery.receipt.ack().await.unwrap();
    }
}

/// Each of many messages has its own result, under its place.
async fn many_publishes_have_their_own_results(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe"), provider("adyen")]).await.unwrap();
    let messages = (0..300).map(|number| {
        let body = number.to_string();
        match number % 4 {
            0 => to_lane("stripe", &body),
            1 => to_lane("adyen", &body),
            2 => to_lane("invalid", &body),
            _ => message(Destination::Outcomes { provider: provider("stripe"), state: "succeeded" }, &body),
        }
    });
    let published: Vec<_> = queue.publish_all(messages.collect()).collect().await;
    let places: BTreeSet<usize> = published.iter().map(|(place, _)| *place).collect();
    assert_eq!((published.len(), places), (300, (0..300).collect()));
    for (place, result) in published {
        match (place % 4, result) {
            (0 | 1 | 3, Ok(())) | (2, Err(QueueError::Refused(_))) => {}
            (_, result) => panic!("{place}: {result:?}"),
        }
    }
    await_depth(&*queue, "stripe", 75).await;
    await_depth(&*queue, "adyen", 75).await;
    assert_eq!(queue.publish_all(Vec::new()).count().await, 0);
}

async fn requeued_message_returns_at_once(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*queue, "stripe", &["one"]).await;
    let mut lane = queue.open_lane(&provider("stripe"), 1).await.unwrap();
    for _ in 0..3 {
        let delivery = take(&mut *lane).await;
        delivery.receipt.requeue().await.unwrap();
    }
    let delivery = take(&mut *lane).await;
    assert!(delivery.redelivered);
    delivery.receipt.ack().await.unwrap();
    assert_quiet(&mut *lane).await;
}

async fn dropping_next_loses_nothing(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    let mut lane = queue.open_lane(&provider("stripe"), 50).await.unwrap();
    let names: Vec<String> = (0..50).map(|number| number.to_string()).collect();
    let publishing = async {
        for name in &names {
            queue.publish(to_lane("stripe", name)).await.unwrap();
        }
    };
    let taking = async {
        let deadline = Instant::now() + PATIENCE;
        let mut taken = Vec::new();
        while taken.len() < names.len() {
            assert!(Instant::now() < deadline, "{} of {} arrived", taken.len(), names.len());
            // As in a lane's `select!`, the future is dropped again and again.
            if let Ok(delivery) = tokio::time::timeout(Duration::from_micros(300), lane.next()).await {
                taken.push(delivery.unwrap().unwrap());
            }
        }
        taken
    };
    let ((), taken) = tokio::join!(publishing, taking);
    assert_eq!(bodies(&taken), names.into_iter().collect());
}

async fn reserved_names_are_no_lanes(queue: Arc<dyn Queue>) {
    for name in ["invalid", "dead", "outcomes"] {
        assert!(matches!(queue.declare(&[provider(name)]).await, Err(QueueError::Refused(_))), "{name}");
        assert!(matches!(queue.open_lane(&provider(name), 1).await, Err(QueueError::Refused(_))), "{name}");
        assert!(matches!(queue.publish(to_lane(name, "x")).await, Err(QueueError::Refused(_))), "{name}");
    }
}

async fn outcomes_need_no_listener(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    let destination = Destination::Outcomes { provider: provider("stripe"), state: "succeeded" };
    queue.publish(message(destination, "p-1")).await.unwrap();
}

/// Requeues a message until the broker dead-letters it.
async fn give_up(queue: &dyn Queue, lane: &mut dyn LaneConsumer) -> DeadLetter {
    let mut deliveries = 0;
    let deadline = Instant::now() + 4 * PATIENCE;
    loop {
        if let Ok(delivery) = tokio::time::timeout(Duration::from_millis(300), lane.next()).await {
            delivery.unwrap().unwrap().receipt.requeue().await.unwrap();
            deliveries += 1;
        } else if let Some(letter) = queue.take_dead_letter().await.unwrap() {
            assert!((1_000..=1_002).contains(&deliveries), "dead-lettered after {deliveries} deliveries");
            return letter;
        }
        assert!(Instant::now() < deadline, "not dead-lettered after {deliveries} deliveries");
    }
}

async fn delivery_limit_dead_letters_the_message(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe"), provider("adyen")]).await.unwrap();
    assert!(queue.take_dead_letter().await.unwrap().is_none());
    let mut lane = queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let mut poison = to_lane("stripe", "poison");
    poison.properties.headers.insert("tenant".to_owned(), "a".to_owned());
    let properties = Properties { content_type: None, ..poison.properties.clone() };
    queue.publish(poison).await.unwrap();
    let letter = give_up(&*queue, &mut *lane).await;
    assert_eq!(letter.cause, DeathCause::DeliveryLimit);
    assert_eq!((letter.lane.as_ref().map(ProviderName::as_str), &letter.body[..]), (Some("stripe"), &b"poison"[..]));
    assert_eq!(Properties { content_type: None, ..letter.properties.clone() }, properties);
    assert!(queue.take_dead_letter().await.unwrap().is_none(), "no other consumer gets it meanwhile");
    letter.receipt.requeue().await.unwrap();
    let letter = await_dead(&*queue).await;
    // A message that is published again has a fresh count.
    queue.publish(to_lane("stripe", "poison")).await.unwrap();
    letter.receipt.ack().await.unwrap();
    for _ in 0..5 {
        take(&mut *lane).await.receipt.requeue().await.unwrap();
    }
    take(&mut *lane).await.receipt.ack().await.unwrap();
    assert!(queue.take_dead_letter().await.unwrap().is_none());
}

/// The oldest is taken first, and one that is not acknowledged comes back.
async fn invalid_messages_are_taken_in_order(queue: Arc<dyn Queue>) {
    // Nothing is declared yet.
    assert!(queue.take_invalid().await.unwrap().is_none());
    queue.declare(&[provider("stripe")]).await.unwrap();
    let long = "x".repeat(200_000);
    for body in ["first", &long] {
        let invalid = invalid_with_all_properties();
        queue.publish(OutgoingMessage { body: body.as_bytes().to_vec().into(), ..invalid }).await.unwrap();
    }
    let patient = async || {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = queue.take_invalid().await.unwrap() {
                return found;
            }
            assert!(Instant::now() < deadline, "not found");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let first = patient().await;
    assert_eq!(first.body, "first");
    first.receipt.requeue().await.unwrap();
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let found = patient().await;
        assert_invalid_headers(&found.properties.headers);
        assert_eq!(headers::without_rejection(found.properties), invalid_with_all_properties().properties);
        bodies.push(found.body);
        found.receipt.ack().await.unwrap();
    }
    bodies.sort_by_key(|body| body.len());
    assert_eq!(bodies, ["first".as_bytes(), long.as_bytes()]);
    assert!(queue.take_invalid().await.unwrap().is_none());
}

async fn await_dead(queue: &dyn Queue) -> DeadLetter {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(letter) = queue.take_dead_letter().await.unwrap() {
            return letter;
        }
        assert!(Instant::now() < deadline, "no dead letter");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn invalid_message() -> OutgoingMessage {
    let detail = "amount: must be an integer".to_owned();
    message(Destination::Invalid { lane: provider("stripe"), reason: InvalidReason::BadAmount, detail }, "not a job")
}

/// The invalid message with every property that a message keeps on its way.
fn invalid_with_all_properties() -> OutgoingMessage {
    let text = |text: &str| Some(text.to_owned());
    let properties = Properties {
        message_id: text("p-1"),
        content_type: text("text/plain"),
        content_encoding: text("utf-8"),
        correlation_id: text("c-1"),
        reply_to: text("answers"),
        kind: text("charge"),
        app_id: text("billing"),
        timestamp_s: Some(1_800_000_000),
        headers: [("tenant".to_owned(), "a".to_owned())].into(),
    };
    OutgoingMessage { properties, ..invalid_message() }
}

fn assert_invalid_headers(headers: &std::collections::BTreeMap<String, String>) {
    assert_eq!(headers.get(headers::REASON).map(String::as_str), Some("bad_amount"));
    assert_eq!(headers.get(headers::DETAIL).map(String::as_str), Some("amount: must be an integer"));
}

/// The promises of every queue, each a test of one implementation.
macro_rules! conformance {
    ($bench:path) => {
        crate::queue::conformance!($bench:
            published_received_acknowledged,
            unacknowledged_messages_are_redelivered,
            prefetch_is_never_exceeded,
            lane_grows_and_shrinks_with_open_receipts,
            many_publishes_have_their_own_results,
            lane_stops_and_resumes_with_open_receipts,
            requeued_message_returns_at_once,
            dropping_next_loses_nothing,
            reserved_names_are_no_lanes,
            outcomes_need_no_listener,
            delivery_limit_dead_letters_the_message,
            invalid_messages_are_taken_in_order
        );
    };
    ($bench:path: $($promise:ident),+) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $promise() {
                let bench = $bench(stringify!($promise)).await;
                crate::queue::$promise(bench.queue.clone()).await;
            }
        )+
    };
}
use conformance;
