//! Pipelined publishes: none waits for another's confirm, and each gets its own result alone.

use futures_util::future::join_all;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::ExchangeDeleteOptions;

use super::counting::{CONFIRM_SELECT, Counting, PUBLISH};
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn publishes_do_not_wait_for_confirms() {
    const EACH: usize = 80;
    let bench = bench("publishes_do_not_wait_for_confirms").await;
    let mut between = Counting::before(&bench.url, PUBLISH).await;
    let queue = connect(&between.url);
    queue.declare(&[provider("stripe")]).await.unwrap();
    let outcome = || Destination::Outcomes { provider: provider("stripe"), state: "succeeded" };
    // Channels are opened by the first publish to each exchange.
    queue.publish(to_lane("stripe", "first")).await.unwrap();
    queue.publish(message(outcome(), "first")).await.unwrap();
    let before = *between.counted.borrow();
    between.held.send_replace(true);
    let publishing: Vec<_> = (0..3 * EACH)
        .map(|number| {
            let body = number.to_string();
            let message = match number % 3 {
                0 => to_lane("stripe", &body),
                1 => to_lane("nowhere", &body),
                _ => message(outcome(), &body),
            };
            let queue = Arc::clone(&queue);
            tokio::spawn(async move { queue.publish(message).await })
        })
        .collect();
    let all = between.counted.wait_for(|count| *count == before + 3 * EACH);
    tokio::time::timeout(PATIENCE, all).await.expect("publishes wait for confirms").unwrap();
    assert!(publishing.iter().all(|publish| !publish.is_finished()), "a publish ended without its confirm");
    between.held.send_replace(false);
    for (number, publish) in publishing.into_iter().enumerate() {
        match (number % 3, publish.await.unwrap()) {
            (0 | 2, Ok(())) => {}
            (1, Err(QueueError::Unroutable(lane))) if lane == "nowhere" => {}
            (_, answer) => panic!("{number}: {answer:?}"),
        }
    }
    super::super::await_depth(&*queue, "stripe", EACH as u64 + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_exchange_does_not_affect_others() {
    let bench = bench("deleted_exchange_does_not_affect_others").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    channel.exchange_delete("payments.outcomes".into(), ExchangeDeleteOptions::default()).await.unwrap();
    let outcome = || Destination::Outcomes { provider: provider("stripe"), state: "succeeded" };
    let lost = join_all((0..20).map(|_| bench.queue.publish(message(outcome(), "lost"))));
    let kept = join_all((0..20).map(|number| bench.queue.publish(to_lane("stripe", &number.to_string()))));
    let (lost, kept) = tokio::join!(lost, kept);
    assert!(lost.iter().all(|answer| matches!(answer, Err(QueueError::Unroutable(_)))), "{lost:?}");
    assert!(kept.iter().all(Result::is_ok), "{kept:?}");
    // Once the exchange is declared again, publishing succeeds.
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    bench.queue.publish(message(outcome(), "found")).await.unwrap();
}

/// One message of a group comes back, one is rejected, and one has no confirm for a while. None of them changes the
/// results of the others, and the late one is not published twice.
#[tokio::test(flavor = "multi_thread")]
async fn each_message_of_a_group_has_its_own_result() {
    const VHOST: &str = "each_message_of_a_group_has_its_own_result";
    let bench = bench(VHOST).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(0));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    for (queue, key, arguments) in [("full", "stripe.dead", full), ("slow", "stripe.review", FieldTable::default())] {
        channel.queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments).await.unwrap();
        let (bind, none) = (lapin::options::QueueBindOptions::default(), FieldTable::default());
        channel.queue_bind(queue.into(), "payments.outcomes".into(), key.into(), bind, none).await.unwrap();
    }
    let slow = |call: &str| {
        let name = format!("rabbit_misc:r(<<\"{VHOST}\">>, queue, <<\"slow\">>)");
        let program = format!("{{ok, Q}} = rabbit_amqqueue:lookup({name}), sys:{call}(amqqueue:get_pid(Q)).");
        tokio::task::spawn_blocking(move || RabbitNode::shared().ctl(&["eval", &program]))
    };
    slow("suspend").await.unwrap();
    let messages = (0..200).map(|number| {
        let outcome =
            |state| message(Destination::Outcomes { provider: provider("stripe"), state }, &number.to_string());
        match number {
            20 => to_lane("nowhere", "20"),
            40 => outcome("dead"),
            60 => outcome("review"),
            number if number % 2 == 0 => to_lane("stripe", &number.to_string()),
            _ => outcome("succeeded"),
        }
    });
    let mut publishing = bench.queue.publish_all(messages.collect());
    for _ in 0..199 {
        let published =
            tokio::time::timeout(PATIENCE, publishing.next()).await.expect("a late confirm holds up others");
        match published.unwrap() {
            (20, Err(QueueError::Unroutable(lane))) if lane == "nowhere" => {}
            (40, Err(QueueError::Rejected(_))) => {}
            (20 | 40 | 60, result) => panic!("{result:?}"),
            (_, Ok(())) => {}
            (place, result) => panic!("{place}: {result:?}"),
        }
    }
    assert!(publishing.next().now_or_never().is_none(), "the slow queue has not confirmed");
    slow("resume").await.unwrap();
    let late = tokio::time::timeout(PATIENCE, publishing.next()).await.unwrap();
    assert!(matches!(late, Some((60, Ok(())))), "{late:?}");
    assert!(publishing.next().await.is_none());
    let slow = channel.queue_declare("slow".into(), QueueDeclareOptions::durable().passive(), FieldTable::default());
    assert_eq!(slow.await.unwrap().message_count(), 1);
    super::super::await_depth(&*bench.queue, "stripe", 97).await;
}

/// A channel keeps to a queue's leader that is unavailable, and nacks. So does a queue that is full.
#[tokio::test(flavor = "multi_thread")]
async fn nacks_in_a_row_take_another_connection() {
    let bench = bench("nacks_in_a_row_take_another_connection").await;
    // Each channel that is opened for publishing asks for confirms.
    let between = Counting::before(&bench.url, CONFIRM_SELECT).await;
    let queue = connect(&between.url);
    queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(1));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    channel.queue_declare("full".into(), QueueDeclareOptions::exclusive(), full).await.unwrap();
    let (bind, none) = (lapin::options::QueueBindOptions::default(), FieldTable::default());
    channel.queue_bind("full".into(), "payments.outcomes".into(), "stripe.dead".into(), bind, none).await.unwrap();
    let publish = |state: &'static str| {
        let event = message(Destination::Outcomes { provider: provider("stripe"), state }, "event");
        queue.publish(event)
    };
    let deadline = std::time::Instant::now() + PATIENCE;
    while publish("dead").await.is_ok() {
        assert!(std::time::Instant::now() < deadline, "the queue is never full");
    }
    // One nack is none in a row, and acknowledgements of another key change nothing.
    publish("succeeded").await.unwrap();
    assert_eq!(*between.counted.borrow(), 1);
    assert!(matches!(publish("dead").await, Err(QueueError::Rejected(_))));
    assert_eq!(*between.counted.borrow(), 2, "publishes stay on the channel that nacks");
    publish("succeeded").await.unwrap();
    // A queue that takes messages again gets them.
    channel.queue_purge("full".into(), lapin::options::QueuePurgeOptions::default()).await.unwrap();
    publish("dead").await.unwrap();
}
