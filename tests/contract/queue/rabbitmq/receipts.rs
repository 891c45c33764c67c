//! Acknowledgements of many messages in one frame: they cover the acknowledged messages and no others.

use std::collections::BTreeMap;

use futures_util::future::join_all;

use super::counting::{ACK, Counting};
use super::*;
use crate::queue::{Delivery, LaneConsumer, assert_quiet, bodies, take_many};

const MESSAGES: usize = 60;

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Held,
    Requeued,
    Acknowledged,
}

fn fate(number: usize) -> Fate {
    match number {
        _ if number % 13 == 5 => Fate::Held,
        _ if number % 9 == 7 => Fate::Requeued,
        _ => Fate::Acknowledged,
    }
}

/// The orders in which a lane's messages are finished, and whether all are finished at once.
fn orders() -> BTreeMap<&'static str, (Vec<usize>, bool)> {
    let ascending: Vec<usize> = (0..MESSAGES).collect();
    let descending: Vec<usize> = ascending.iter().rev().copied().collect();
    // 7 and 60 have no common divisor, so each number comes once.
    let scattered: Vec<usize> = (0..MESSAGES).map(|number| number * 7 % MESSAGES).collect();
    [
        ("ascending", (ascending.clone(), false)),
        ("descending", (descending.clone(), false)),
        ("scattered", (scattered.clone(), false)),
        ("ascending-at-once", (ascending, true)),
        ("descending-at-once", (descending, true)),
        ("scattered-at-once", (scattered, true)),
    ]
    .into()
}

async fn finish(number: usize, delivery: Delivery) -> Option<Delivery> {
    match fate(number) {
        Fate::Held => return Some(delivery),
        Fate::Requeued => delivery.receipt.requeue().await.unwrap(),
        Fate::Acknowledged => delivery.receipt.ack().await.unwrap(),
    }
    None
}

/// Finishes a lane's messages. Returns the unacknowledged ones: those that were held, and those that came back.
async fn finish_all(lane: &mut dyn LaneConsumer, order: &[usize], at_once: bool) -> Vec<Delivery> {
    let deliveries = take_many(lane, MESSAGES).await;
    let mut by_number: BTreeMap<usize, Delivery> = deliveries
        .into_iter()
        .map(|delivery| (String::from_utf8_lossy(&delivery.body).parse().unwrap(), delivery))
        .collect();
    let mut in_order: Vec<_> = Vec::new();
    for number in order {
        in_order.push(finish(*number, by_number.remove(number).unwrap()));
    }
    let mut held = Vec::new();
    if at_once {
        held.extend(join_all(in_order).await.into_iter().flatten());
    } else {
        for finishing in in_order {
            held.extend(finishing.await);
        }
    }
    let requeued = (0..MESSAGES).filter(|number| fate(*number) == Fate::Requeued).count();
    let back = take_many(lane, requeued).await;
    assert!(back.iter().all(|delivery| delivery.redelivered));
    // The broker processes the frames of a channel in order. The message that comes back last shows that it processed
    // the others.
    let sentinel = held.pop().unwrap();
    let body = sentinel.body.clone();
    sentinel.receipt.requeue().await.unwrap();
    let sentinel = take(lane).await;
    assert_eq!(sentinel.body, body);
    held.into_iter().chain(back).chain([sentinel]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_connection_removes_only_acknowledged_messages() {
    const VHOST: &str = "only_what_was_acknowledged_is_gone";
    let bench = bench(VHOST).await;
    let numbers: Vec<String> = (0..MESSAGES).map(|number| number.to_string()).collect();
    let left: BTreeSet<String> =
        (0..MESSAGES).filter(|number| fate(*number) != Fate::Acknowledged).map(|number| number.to_string()).collect();
    let mut open = Vec::new();
    for (name, (order, at_once)) in orders() {
        bench.queue.declare(&[provider(name)]).await.unwrap();
        join_all(numbers.iter().map(|number| bench.queue.publish(to_lane(name, number)))).await;
        let mut lane = bench.queue.open_lane(&provider(name), 100).await.unwrap();
        let deliveries = finish_all(&mut *lane, &order, at_once).await;
        assert_eq!(bodies(&deliveries), left, "{name}");
        open.push((lane, deliveries));
    }
    let close = || RabbitNode::shared().ctl(&["close_all_connections", "--vhost", VHOST, "test"]);
    tokio::task::spawn_blocking(close).await.unwrap();
    for (mut lane, deliveries) in open {
        assert!(tokio::time::timeout(PATIENCE, lane.next()).await.unwrap().is_err());
        let late = deliveries.into_iter().next().unwrap().receipt.ack().await;
        assert!(matches!(late, Err(QueueError::Unavailable(_))), "{late:?}");
    }
    for name in orders().into_keys() {
        let deadline = std::time::Instant::now() + PATIENCE;
        let mut lane = loop {
            match bench.queue.open_lane(&provider(name), 100).await {
                Ok(lane) => break lane,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
            }
        };
        let back = take_many(&mut *lane, left.len()).await;
        assert_eq!(bodies(&back), left, "{name}");
        assert_quiet(&mut *lane).await;
    }
}

/// Runs on one thread, so that all are acknowledged before the first frame is written.
#[tokio::test]
async fn batched_acknowledgements_use_one_frame() {
    let bench = bench("batched_acknowledgements_use_one_frame").await;
    let between = Counting::before(&bench.url, ACK).await;
    let queue = connect(&between.url);
    queue.declare(&[provider("stripe")]).await.unwrap();
    join_all((0..100).map(|number| queue.publish(to_lane("stripe", &number.to_string())))).await;
    let mut lane = queue.open_lane(&provider("stripe"), 100).await.unwrap();
    let deliveries = take_many(&mut *lane, 100).await;
    for answer in join_all(deliveries.into_iter().map(|delivery| delivery.receipt.ack())).await {
        answer.unwrap();
    }
    // A single acknowledgement does not wait for another one.
    queue.publish(to_lane("stripe", "last")).await.unwrap();
    take(&mut *lane).await.receipt.ack().await.unwrap();
    drop(lane);
    // The ping uses the same connection, so its response comes after everything that was written before it.
    queue.ping().await.unwrap();
    assert_eq!(*between.counted.borrow(), 2);
    crate::queue::await_depth(&*bench.queue, "stripe", 0).await;
}
