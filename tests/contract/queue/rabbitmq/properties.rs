//! Message properties of foreign producers: which of them are kept when the worker publishes the message again.

use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use sluicegate::queue::OutgoingMessage;

use super::super::{assert_invalid_headers, invalid_message, provider, take};
use super::{bench, raw_channel, string_headers};

/// Every property that a producer can set, including those that must not be published again.
fn producers_properties() -> lapin::BasicProperties {
    let mut nested = FieldTable::default();
    nested.insert("a".into(), AMQPValue::LongInt(1));
    nested.insert("b".into(), AMQPValue::Boolean(false));
    let list = vec![AMQPValue::LongString("x".into()), AMQPValue::Double(0.5), AMQPValue::Void];
    let mut headers = FieldTable::default();
    for (key, value) in [
        ("tenant", AMQPValue::LongString("a".into())),
        ("retry", AMQPValue::Boolean(true)),
        ("attempt", AMQPValue::LongLongInt(-7)),
        ("share", AMQPValue::Double(0.25)),
        ("at", AMQPValue::Timestamp(1_800_000_000)),
        ("table", AMQPValue::FieldTable(nested)),
        ("list", AMQPValue::FieldArray(list.into())),
        ("bytes", AMQPValue::ByteArray(vec![0xff, 0x01].into())),
        ("CCY", AMQPValue::LongString("EUR".into())),
        ("x-death", AMQPValue::FieldArray(Vec::new().into())),
    ] {
        headers.insert(key.into(), value);
    }
    lapin::BasicProperties::default()
        .with_message_id("p-1".into())
        .with_content_type("text/plain".into())
        .with_content_encoding("utf-8".into())
        .with_correlation_id("c-1".into())
        .with_reply_to("answers".into())
        .with_type("charge".into())
        .with_app_id("billing".into())
        .with_timestamp(1_800_000_000)
        .with_user_id("guest".into())
        .with_cluster_id("c".into())
        .with_expiration("3600000".into())
        .with_priority(3)
        .with_delivery_mode(1)
        .with_headers(headers)
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_keep_producer_properties() {
    let bench = bench("invalid_messages_keep_producer_properties").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let options = lapin::options::BasicPublishOptions::default();
    let (exchange, key) = ("payments".into(), "stripe".into());
    channel.basic_publish(exchange, key, options, b"not a job", producers_properties()).await.unwrap();
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let delivery = take(&mut *lane).await;
    let properties = delivery.properties.clone();
    bench.queue.publish(OutgoingMessage { properties, ..invalid_message() }).await.unwrap();
    delivery.receipt.ack().await.unwrap();

    let get = channel.basic_get("payments.invalid".into(), BasicGetOptions { no_ack: true }).await;
    let kept = get.unwrap().unwrap().delivery.properties;
    let sent = producers_properties();
    assert_eq!(kept.message_id(), sent.message_id());
    assert_eq!(kept.content_type(), sent.content_type());
    assert_eq!(kept.content_encoding(), sent.content_encoding());
    assert_eq!(kept.correlation_id(), sent.correlation_id());
    assert_eq!(kept.reply_to(), sent.reply_to());
    assert_eq!(kept.kind(), sent.kind());
    assert_eq!(kept.app_id(), sent.app_id());
    assert_eq!(kept.timestamp(), sent.timestamp());
    // The worker may not set the first two, and decides itself on the others.
    assert_eq!((kept.user_id(), kept.cluster_id(), kept.expiration(), kept.priority()), (&None, &None, &None, &None));
    assert_eq!(kept.delivery_mode(), &Some(2));

    let headers = string_headers(&kept);
    assert_invalid_headers(&headers);
    for (key, expected) in [
        ("tenant", "a"),
        ("retry", "true"),
        ("attempt", "-7"),
        ("share", "0.25"),
        ("at", "1800000000"),
        ("table", r#"{"a":1,"b":false}"#),
        ("list", r#"["x",0.5,null]"#),
        ("bytes", "ff01"),
        ("CCY", "EUR"),
    ] {
        assert_eq!(headers.get(key).map(String::as_str), Some(expected), "{key}");
    }
    assert!(!headers.contains_key("x-death"));
}

#[tokio::test(flavor = "multi_thread")]
async fn largest_producer_headers_are_forwarded() {
    let bench = bench("largest_producer_headers_are_forwarded").await;
    bench.queue.declare(&[provider("stripe")]).await.unwrap();
    let (_connection, channel) = raw_channel(&bench.url).await;
    let mut headers = FieldTable::default();
    // As JSON this header is six times as long, and far beyond one frame. The broker would close the connection.
    let controls = AMQPValue::LongString("\u{1}".repeat(60_000).into());
    headers.insert("long".into(), AMQPValue::FieldArray(vec![controls].into()));
    headers.insert("tenant".into(), AMQPValue::LongString("a".into()));
    headers.insert("wide".into(), AMQPValue::LongString("x".repeat(60_000).into()));
    let properties = lapin::BasicProperties::default().with_headers(headers);
    let options = lapin::options::BasicPublishOptions::default();
    channel.basic_publish("payments".into(), "stripe".into(), options, b"x", properties).await.unwrap();
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let delivery = take(&mut *lane).await;
    let properties = delivery.properties.clone();
    bench.queue.publish(OutgoingMessage { properties, ..invalid_message() }).await.unwrap();
    let get = channel.basic_get("payments.invalid".into(), BasicGetOptions { no_ack: true }).await;
    let headers = string_headers(&get.unwrap().unwrap().delivery.properties);
    assert_eq!((headers["tenant"].as_str(), headers["wide"].len()), ("a", 60_000));
    assert_invalid_headers(&headers);
}
