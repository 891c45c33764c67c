//! The topology check: missing and different queues and exchanges are found, named, and left as they are.

use sluicegate::queue::TopologyProblem;

use super::*;

/// Everything that could drop a message is found, and the check creates nothing.
#[tokio::test(flavor = "multi_thread")]
async fn topology_check_reports_without_changes() {
    let bench = bench("topology_check_reports_without_changes").await;
    let lanes = [provider("stripe")];
    bench.queue.declare(&lanes).await.unwrap();
    assert_eq!(bench.queue.topology_problems(&lanes).await.unwrap(), Vec::new());
    let (_connection, channel) = raw_channel(&bench.url).await;
    for queue in ["payments.dead", "payments.stripe"] {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
    }
    channel.exchange_delete("payments.outcomes".into(), ExchangeDeleteOptions::default()).await.unwrap();
    // A lane's queue that was made by hand: messages that it dead-letters are lost.
    let plain = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("payments.stripe".into(), plain, FieldTable::default()).await.unwrap();
    for _ in 0..2 {
        let unfit = bench.queue.topology_problems(&lanes).await.unwrap();
        let [exchange, dead, lane] = unfit.as_slice() else { panic!("{unfit:?}") };
        assert_eq!(exchange, &TopologyProblem::Missing("exchange `payments.outcomes` is not there".to_owned()));
        assert_eq!(dead, &TopologyProblem::Missing("queue `payments.dead` is not there".to_owned()));
        let different = |line: &str| line.contains("queue `payments.stripe` exists with other arguments");
        assert!(matches!(lane, TopologyProblem::Mismatch(line) if different(line)), "{lane}");
    }
}

/// The error quotes the broker on the difference, and does not advise to declare the exchange again.
#[tokio::test(flavor = "multi_thread")]
async fn exchange_type_mismatch_is_reported() {
    let bench = bench("exchange_type_mismatch_is_reported").await;
    let (_connection, channel) = raw_channel(&bench.url).await;
    let options = lapin::options::ExchangeDeclareOptions { durable: true, ..Default::default() };
    let topic = lapin::ExchangeKind::Topic;
    channel.exchange_declare("payments".into(), topic, options, FieldTable::default()).await.unwrap();
    let unfit = bench.queue.topology_problems(&[]).await.unwrap();
    let different: Vec<&String> = unfit
        .iter()
        .filter_map(|problem| match problem {
            TopologyProblem::Mismatch(line) => Some(line),
            TopologyProblem::Missing(_) | TopologyProblem::Refused(_) => None,
        })
        .collect();
    let [exchange] = different.as_slice() else { panic!("{unfit:?}") };
    assert!(exchange.starts_with("exchange `payments` exists with another type"), "{exchange}");
    assert!(exchange.contains("'type'") && exchange.contains("'topic'"), "{exchange}");
    let error = bench.queue.declare(&[provider("stripe")]).await.unwrap_err();
    assert!(error.to_string().contains("another type"), "{error}");
}

/// A policy that matches every queue and deletes unused ones: the queue of invalid messages has no consumer.
#[tokio::test(flavor = "multi_thread")]
async fn queue_deleted_by_policy_is_reported() {
    const VHOST: &str = "queue_deleted_by_policy_is_reported";
    let policy = async |args: &'static [&'static str]| {
        tokio::task::spawn_blocking(move || RabbitNode::shared().ctl(args)).await.unwrap();
    };
    let bench = bench(VHOST).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    policy(&["set_policy", "-p", VHOST, "tidy", ".*", r#"{"expires":500}"#]).await;
    let deadline = std::time::Instant::now() + PATIENCE;
    // A publish does not count as use of a queue.
    while bench.queue.publish(super::super::invalid_with_all_properties()).await.is_ok() {
        assert!(std::time::Instant::now() < deadline, "the policy deletes nothing");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    let unfit = bench.queue.topology_problems(&[provider("stripe")]).await.unwrap();
    assert!(unfit.contains(&TopologyProblem::Missing("queue `payments.invalid` is not there".to_owned())), "{unfit:?}");
    policy(&["clear_policy", "-p", VHOST, "tidy"]).await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    bench.queue.publish(super::super::invalid_with_all_properties()).await.unwrap();
}
