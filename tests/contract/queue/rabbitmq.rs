//! The RabbitMQ queue: the promises of all queues, and what a real broker adds, such as refusals, alarms and crashes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock};

use lapin::options::{BasicGetOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use secrecy::SecretString;
use sluicegate::queue::rabbitmq::{RabbitMq, RabbitSettings};
use sluicegate::queue::{DeathCause, Destination, Queue, QueueError};

use super::{
    PATIENCE, assert_invalid_headers, conformance, invalid_message, message, provider, publish_all, take, to_lane,
};
use crate::support::rabbitmq::RabbitNode;

mod counting;
mod nested;
mod pipelined;
mod properties;
mod receipts;
mod refused;
mod topology_check;

struct Bench {
    queue: Arc<dyn Queue>,
    url: String,
}

fn connect(url: &str) -> Arc<dyn Queue> {
    Arc::new(RabbitMq::connect(RabbitSettings::new(&SecretString::from(url), "payments").unwrap()))
}

async fn bench(name: &'static str) -> Bench {
    let url = tokio::task::spawn_blocking(move || RabbitNode::shared().create_vhost(name)).await.unwrap();
    Bench { queue: connect(&url), url }
}

async fn raw_channel(url: &str) -> (lapin::Connection, lapin::Channel) {
    let connection = lapin::Connection::connect(url, lapin::ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

conformance!(bench);

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_are_kept_with_their_reason() {
    let bench = bench("invalid_messages_are_kept_with_their_reason").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    bench.queue.publish(invalid_message()).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let kept = channel.basic_get("payments.invalid".into(), BasicGetOptions { no_ack: true }).await.unwrap().unwrap();
    assert_eq!(kept.delivery.data, b"not a job");
    assert_invalid_headers(&string_headers(&kept.delivery.properties));
    assert_eq!(kept.delivery.properties.delivery_mode(), &Some(2));
}

fn string_headers(properties: &lapin::BasicProperties) -> std::collections::BTreeMap<String, String> {
    let headers = properties.headers().as_ref().unwrap();
    // The broker adds numeric headers of its own.
    let strings = headers.inner().iter().filter_map(|(key, value)| match value {
        AMQPValue::LongString(text) => Some((key.as_str().to_owned(), text.to_string())),
        _ => None,
    });
    strings.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_reach_every_bound_queue() {
    let bench = bench("outcomes_reach_every_bound_queue").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let options = QueueDeclareOptions::exclusive();
    channel.queue_declare("mine".into(), options, FieldTable::default()).await.unwrap();
    let (bind, none) = (lapin::options::QueueBindOptions::default(), FieldTable::default());
    channel.queue_bind("mine".into(), "payments.outcomes".into(), "*.succeeded".into(), bind, none).await.unwrap();
    for state in ["succeeded", "dead"] {
        let destination = Destination::Outcomes { provider: provider("stripe"), state };
        bench.queue.publish(message(destination, state)).await.unwrap();
    }
    let get = || channel.basic_get("mine".into(), BasicGetOptions { no_ack: true });
    assert_eq!(get().await.unwrap().unwrap().delivery.data, b"succeeded");
    assert!(get().await.unwrap().is_none());
}

/// The broker rejects the publish for all queues, though the other queues have the message.
#[tokio::test(flavor = "multi_thread")]
async fn event_rejected_by_one_queue_is_rejected() {
    let bench = bench("event_rejected_by_one_queue_is_rejected").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(1));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    for (queue, arguments) in [("full", full), ("free", FieldTable::default())] {
        channel.queue_declare(queue.into(), QueueDeclareOptions::exclusive(), arguments).await.unwrap();
        let (bind, none) = (lapin::options::QueueBindOptions::default(), FieldTable::default());
        channel.queue_bind(queue.into(), "payments.outcomes".into(), "stripe.*".into(), bind, none).await.unwrap();
    }
    let event = || message(Destination::Outcomes { provider: provider("stripe"), state: "succeeded" }, "event");
    let deadline = std::time::Instant::now() + PATIENCE;
    let error = loop {
        match bench.queue.publish(event()).await {
            Ok(()) => assert!(std::time::Instant::now() < deadline, "the queue is never full"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, QueueError::Rejected(_)), "{error}");
    // Events of other routing keys are not affected.
    let other = message(Destination::Outcomes { provider: provider("adyen"), state: "succeeded" }, "other");
    bench.queue.publish(other).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn undeclared_lane_is_an_error() {
    let bench = bench("undeclared_lane_is_an_error").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let error = bench.queue.publish(to_lane("adyen", "x")).await.unwrap_err();
    assert!(matches!(&error, QueueError::Unroutable(name) if name == "adyen"), "{error}");
    let error = bench.queue.open_lane(&provider("adyen"), 1).await.err().unwrap();
    assert!(matches!(&error, QueueError::Unroutable(name) if name == "adyen"), "{error}");
    assert_eq!(bench.queue.depth(&provider("adyen")).await.unwrap(), None);
    // None of these errors closes the connection.
    bench.queue.publish(to_lane("stripe", "x")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_different_declaration_is_refused_by_name() {
    let bench = bench("a_different_declaration_is_refused_by_name").await;
    let (_connection, channel) = raw_channel(&bench.url).await;
    let options = QueueDeclareOptions::durable();
    channel.queue_declare("payments.stripe".into(), options, FieldTable::default()).await.unwrap();
    let error = bench.queue.declare(&[provider("stripe")]).await.unwrap_err();
    let names_it = |text: &str| text.contains("queue `payments.stripe`") && text.contains("delete it");
    assert!(matches!(&error, QueueError::Refused(text) if names_it(text)), "{error}");
    // Another lane is not affected.
    bench.queue.declare(&[provider("adyen")]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_refused_and_not_repeated() {
    let bench = bench("wrong_credentials_are_refused_and_not_repeated").await;
    let error = connect(&bench.url.replace("guest:guest", "guest:hunter2")).ping().await.unwrap_err();
    assert!(matches!(error, QueueError::Refused(_)), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_after_first_connection_is_temporary() {
    const VHOST: &str = "refusal_after_first_connection_is_temporary";
    let ctl = async |args: &'static [&'static str]| {
        tokio::task::spawn_blocking(move || RabbitNode::shared().ctl(args)).await.unwrap();
    };
    let bench = bench(VHOST).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*bench.queue, "stripe", &["before"]).await;
    ctl(&["set_vhost_limits", "-p", VHOST, r#"{"max-connections":0}"#]).await;
    ctl(&["close_all_connections", "--vhost", VHOST, "test"]).await;
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let publish = bench.queue.publish(to_lane("stripe", "during")).await.unwrap_err();
        let ping = bench.queue.ping().await.unwrap_err();
        // Only temporary errors are returned, whatever the broker answers to reconnects.
        assert!(matches!(publish, QueueError::Unavailable(_) | QueueError::NotConfirmed(_)), "{publish}");
        assert!(matches!(ping, QueueError::Unavailable(_)), "{ping}");
        if [&publish, &ping].into_iter().all(|error| error.to_string().contains("NOT_ALLOWED")) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{publish}; {ping}");
    }
    ctl(&["clear_vhost_limits", "-p", VHOST]).await;
    let deadline = std::time::Instant::now() + PATIENCE;
    while let Err(error) = bench.queue.publish(to_lane("stripe", "after")).await {
        assert!(matches!(error, QueueError::Unavailable(_)) && std::time::Instant::now() < deadline, "{error}");
    }
}

/// Each connection declares the same topology again, and a mismatched lane does not affect others.
#[tokio::test(flavor = "multi_thread")]
async fn mismatched_lane_does_not_block_other_lanes() {
    const VHOST: &str = "mismatched_lane_does_not_block_other_lanes";
    let bench = bench(VHOST).await;
    bench.queue.declare(&[provider("adyen"), provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    channel.queue_delete("payments.adyen".into(), QueueDeleteOptions::default()).await.unwrap();
    channel
        .queue_declare("payments.adyen".into(), QueueDeclareOptions::durable(), FieldTable::default())
        .await
        .unwrap();
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let close = || RabbitNode::shared().ctl(&["close_all_connections", "--vhost", VHOST, "test"]);
    tokio::task::spawn_blocking(close).await.unwrap();
    assert!(lane.next().await.is_err());
    let deadline = std::time::Instant::now() + PATIENCE;
    let mut lane = loop {
        match bench.queue.open_lane(&provider("stripe"), 1).await {
            Ok(lane) => break lane,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
    };
    publish_all(&*bench.queue, "stripe", &["paid"]).await;
    assert_eq!(super::take(&mut *lane).await.body, "paid");
    assert!(matches!(bench.queue.declare(&[provider("adyen")]).await, Err(QueueError::Refused(_))));
}

/// The broker names the lane in which the message expired, so it is still a job.
#[tokio::test(flavor = "multi_thread")]
async fn expired_message_keeps_its_lane() {
    let bench = bench("expired_message_keeps_its_lane").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let options = lapin::options::BasicPublishOptions::default();
    let properties = lapin::BasicProperties::default().with_expiration("1".into());
    channel.basic_publish("payments".into(), "stripe".into(), options, b"late", properties).await.unwrap();
    let letter = super::await_dead(&*bench.queue).await;
    assert_eq!((letter.lane.as_ref(), &letter.body[..]), (Some(&provider("stripe")), &b"late"[..]));
    assert_eq!(letter.cause, DeathCause::Expired);
    letter.receipt.ack().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn return_fails_its_own_publish() {
    let bench = bench("return_fails_its_own_publish").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let queue = Arc::clone(&bench.queue);
            tokio::spawn(async move {
                let name = if task % 2 == 0 { "stripe" } else { "nowhere" };
                for number in 0..10 {
                    let answer = queue.publish(to_lane(name, &format!("{task}-{number}"))).await;
                    match (task % 2, &answer) {
                        (0, Ok(())) => {}
                        (1, Err(QueueError::Unroutable(lane))) if lane == "nowhere" => {}
                        _ => panic!("{task} to {name}: {answer:?}"),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let mut lane = bench.queue.open_lane(&provider("stripe"), 400).await.unwrap();
    let arrived = super::bodies(&super::take_many(&mut *lane, 320).await);
    assert_eq!(arrived.len(), 320);
    super::assert_quiet(&mut *lane).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_queue_ends_its_lane() {
    let bench = bench("deleted_queue_ends_its_lane").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    channel.queue_delete("payments.stripe".into(), lapin::options::QueueDeleteOptions::default()).await.unwrap();
    for _ in 0..2 {
        let ended = tokio::time::timeout(PATIENCE, lane.next()).await.unwrap();
        assert!(matches!(ended, Err(QueueError::Unavailable(_))));
    }
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_peer_is_disconnected() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://127.0.0.1:{}/?connection_timeout=300", listener.local_addr().unwrap().port());
    let queue = connect(&url);
    let (mut peer, _) = listener.accept().await.unwrap();
    let mut sent = Vec::new();
    // Reading ends only when the client closes the connection: no connection attempt is left open.
    let reading = tokio::io::AsyncReadExt::read_to_end(&mut peer, &mut sent);
    tokio::time::timeout(PATIENCE, reading).await.expect("the connection was left open").unwrap();
    assert_eq!(sent, b"AMQP\x00\x00\x09\x01");
    assert!(matches!(queue.ping().await, Err(QueueError::Unavailable(_))));
}

/// Runs a fault on a node of its own, for one test at a time.
fn hurt(fault: impl FnOnce(&RabbitNode)) {
    static NODE: OnceLock<Mutex<RabbitNode>> = OnceLock::new();
    let node = NODE.get_or_init(|| Mutex::new(RabbitNode::start()));
    fault(&node.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

#[test]
fn confirmed_messages_survive_a_killed_broker() {
    hurt(|node| {
        let runtime = runtime();
        let queue = runtime.block_on(async { connect(&node.create_vhost("killed")) });
        let confirmed: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let mut lane = runtime.block_on(async {
            queue.declare(&[provider("stripe")]).await.unwrap();
            queue.open_lane(&provider("stripe"), 1).await.unwrap()
        });
        let publishers: Vec<_> = (0..16)
            .map(|task| {
                let (queue, confirmed) = (Arc::clone(&queue), Arc::clone(&confirmed));
                runtime.spawn(async move {
                    for number in 0.. {
                        let name = format!("{task}-{number}");
                        match queue.publish(to_lane("stripe", &name)).await {
                            Ok(()) => confirmed.lock().unwrap().insert(name),
                            Err(_) => break,
                        };
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            let deadline = std::time::Instant::now() + PATIENCE;
            while confirmed.lock().unwrap().len() < 200 {
                assert!(std::time::Instant::now() < deadline, "too few are confirmed");
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        });
        node.kill();
        runtime.block_on(async {
            // One delivery may have arrived already. The next call ends the lane.
            let delivery = tokio::time::timeout(PATIENCE, lane.next()).await.unwrap();
            let ended = tokio::time::timeout(PATIENCE, lane.next()).await.unwrap();
            assert!(matches!(ended, Err(QueueError::Unavailable(_))));
            if let Ok(Some(delivery)) = delivery {
                assert!(matches!(delivery.receipt.ack().await, Err(QueueError::Unavailable(_))));
            }
            for publisher in publishers {
                publisher.await.unwrap();
            }
            assert!(matches!(queue.ping().await, Err(QueueError::Unavailable(_))));
        });
        node.restart();
        runtime.block_on(async {
            let deadline = std::time::Instant::now() + PATIENCE;
            let mut lane = loop {
                match queue.open_lane(&provider("stripe"), 1_000).await {
                    Ok(lane) => break lane,
                    Err(error) => {
                        let unavailable =
                            matches!(error, QueueError::Unavailable(_)) && std::time::Instant::now() < deadline;
                        assert!(unavailable, "{error}");
                    }
                }
            };
            let mut missing = confirmed.lock().unwrap().clone();
            while !missing.is_empty() {
                let delivery = take(&mut *lane).await;
                missing.remove(std::str::from_utf8(&delivery.body).unwrap());
                delivery.receipt.ack().await.unwrap();
            }
            publish_all(&*queue, "stripe", &["after"]).await;
        });
    });
}

#[test]
fn blocked_broker_still_accepts_acknowledgements() {
    hurt(|node| {
        let runtime = runtime();
        let queue = runtime.block_on(async { connect(&node.create_vhost("blocked")) });
        let delivery = runtime.block_on(async {
            queue.declare(&[provider("stripe")]).await.unwrap();
            publish_all(&*queue, "stripe", &["one"]).await;
            let mut lane = queue.open_lane(&provider("stripe"), 1).await.unwrap();
            (take(&mut *lane).await, lane)
        });
        node.ctl(&["set_vm_memory_high_watermark", "absolute", "1MB"]);
        // A broker blocks a connection at its next publish. So the first publish is in flight then, and the others are
        // not.
        let publishing = Arc::clone(&queue);
        let in_flight = runtime.spawn(async move { publishing.publish(to_lane("stripe", "two")).await });
        runtime.block_on(async {
            let deadline = std::time::Instant::now() + PATIENCE;
            while !node.ctl(&["list_connections", "state"]).contains("blocked") {
                assert!(std::time::Instant::now() < deadline, "the broker blocks no connection");
            }
            for _ in 0..2 {
                let publishing = queue.publish(to_lane("stripe", "not sent"));
                let answer = tokio::time::timeout(PATIENCE, publishing).await.expect("publish hangs");
                assert!(matches!(answer, Err(QueueError::NotConfirmed(_))), "{answer:?}");
            }
            let (delivery, lane) = delivery;
            delivery.receipt.ack().await.unwrap();
            drop(lane);
        });
        node.ctl(&["set_vm_memory_high_watermark", "absolute", "1GB"]);
        runtime.block_on(async {
            // The publisher got no error, however late the confirm came, so it published no second copy.
            let answer = tokio::time::timeout(PATIENCE, in_flight).await.expect("no confirm").unwrap();
            assert!(answer.is_ok(), "{answer:?}");
            let deadline = std::time::Instant::now() + PATIENCE;
            while let Err(error) = queue.publish(to_lane("stripe", "three")).await {
                assert!(matches!(error, QueueError::NotConfirmed(_)), "{error}");
                assert!(std::time::Instant::now() < deadline, "no publish succeeds again");
            }
            let mut lane = queue.open_lane(&provider("stripe"), 9).await.unwrap();
            assert_eq!(super::bodies(&super::take_many(&mut *lane, 2).await), super::set(&["two", "three"]));
            super::assert_quiet(&mut *lane).await;
        });
    });
}
