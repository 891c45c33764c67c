//! Dead-lettered messages of a lane, one at a time, each on a channel of its own.
//!
//! They are rare, so they are fetched and not consumed: that needs no prefetch and leaves none behind. The lane of a
//! message comes from the broker's own header, which no producer can write.

use std::collections::BTreeMap;

use async_trait::async_trait;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions};
use lapin::types::{AMQPValue, ShortString};
use lapin::{Acker, BasicProperties};

use super::channels::OpenChannel;
use super::failure::{CallFailure, with_call_limit};
use super::supervisor::Generation;
use super::topology::Topology;
use super::wire;
use crate::domain::provider::ProviderName;
use crate::queue::{DeadLetter, DeathCause, QueueError, Receipt};

/// <https://www.rabbitmq.com/docs/dlx#effects>
const DEATHS: &str = "x-death";

pub(super) async fn take(generation: &Generation, topology: &Topology) -> Result<Option<DeadLetter>, QueueError> {
    let (channel, queue) = (generation.open_channel().await?, topology.dead());
    let got = match with_call_limit(channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: false })).await {
        Ok(got) => got,
        // Nothing was ever given up where nothing is declared.
        Err(failure) if failure.is_not_found() => None,
        Err(failure) => return Err(failure.into_error(&format!("look into queue `{queue}`"))),
    };
    Ok(got.map(|message| {
        let message = message.delivery;
        DeadLetter {
            lane: lane_of(&message.properties, topology),
            cause: cause_of(&message.properties, topology),
            properties: wire::from_amqp(&message.properties),
            body: message.data.into(),
            receipt: Box::new(RabbitDeadReceipt { acker: message.acker, _channel: channel }),
        }
    }))
}

/// The lane that gave up last, for whatever reason: too many deliveries, or an `expiration` that the producer set. A message
/// that was delayed has died in delay queues too, by their time; those tell its lane by the routing key.
fn lane_of(properties: &BasicProperties, topology: &Topology) -> Option<ProviderName> {
    deaths(properties).find_map(|death| {
        let queue = text(death.get("queue"))?;
        match topology.is_delay(&queue) {
            true => ProviderName::new(first_text(death.get("routing-keys"))?).ok(),
            false => topology.provider_of(&queue),
        }
    })
}

/// The broker puts the last death first.
fn cause_of(properties: &BasicProperties, topology: &Topology) -> DeathCause {
    let last = deaths(properties).next().and_then(|death| text(death.get("queue")));
    match last.is_some_and(|queue| topology.is_delay(&queue)) {
        true => DeathCause::NoQueue,
        false => DeathCause::DeliveryLimit,
    }
}

fn deaths(properties: &BasicProperties) -> impl Iterator<Item = &BTreeMap<ShortString, AMQPValue>> {
    let header = properties.headers().as_ref().and_then(|headers| headers.inner().get(DEATHS));
    let deaths = match header {
        Some(AMQPValue::FieldArray(deaths)) => deaths.as_slice(),
        _ => &[],
    };
    deaths.iter().filter_map(|death| match death {
        AMQPValue::FieldTable(death) => Some(death.inner()),
        _ => None,
    })
}

fn text(value: Option<&AMQPValue>) -> Option<String> {
    match value? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        _ => None,
    }
}

fn first_text(value: Option<&AMQPValue>) -> Option<String> {
    match value? {
        AMQPValue::FieldArray(values) => text(values.as_slice().first()),
        _ => None,
    }
}

/// Dropping it closes the channel, and the broker has the message back.
struct RabbitDeadReceipt {
    acker: Acker,
    _channel: OpenChannel,
}

fn check_result(answer: Result<bool, CallFailure>, doing: &str) -> Result<(), QueueError> {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(QueueError::Unavailable(format!("{doing}: the channel is gone"))),
        Err(failure) => Err(QueueError::Unavailable(failure.describe(doing))),
    }
}

#[async_trait]
impl Receipt for RabbitDeadReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        check_result(with_call_limit(self.acker.ack(BasicAckOptions { multiple: false })).await, "acknowledge")
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        check_result(
            with_call_limit(self.acker.nack(BasicNackOptions { multiple: false, requeue: true })).await,
            "requeue",
        )
    }
}

#[cfg(test)]
mod tests {
    use lapin::types::{FieldArray, FieldTable};

    use super::*;

    fn death(queue: &str, reason: &str) -> AMQPValue {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString(queue.into()));
        death.insert("reason".into(), AMQPValue::LongString(reason.into()));
        AMQPValue::FieldTable(death)
    }

    fn with(deaths: Vec<AMQPValue>) -> BasicProperties {
        let mut headers = FieldTable::default();
        headers.insert(DEATHS.into(), AMQPValue::FieldArray(FieldArray::from(deaths)));
        BasicProperties::default().with_headers(headers)
    }

    fn lane(deaths: Vec<AMQPValue>) -> Option<String> {
        lane_of(&with(deaths), &Topology::new("payments")).map(|provider| provider.to_string())
    }

    /// What a delay queue gave back, and no lane took.
    fn unrouted() -> AMQPValue {
        let AMQPValue::FieldTable(mut death) = death("payments.delay.250", "expired") else { panic!("no table") };
        let keys = vec![AMQPValue::LongString("acme".into())];
        death.insert("routing-keys".into(), AMQPValue::FieldArray(FieldArray::from(keys)));
        AMQPValue::FieldTable(death)
    }

    #[test]
    fn death_header_names_the_lane() {
        let delayed = || death("payments.delay.250", "expired");
        assert_eq!(lane(vec![death("payments.acme", "delivery_limit"), delayed()]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![delayed(), death("payments.acme", "delivery_limit")]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![death("payments.acme", "expired"), delayed()]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![unrouted()]).as_deref(), Some("acme"));
        let cause = |deaths| cause_of(&with(deaths), &Topology::new("payments"));
        assert_eq!(cause(vec![unrouted(), death("payments.acme", "delivery_limit")]), DeathCause::NoQueue);
        assert_eq!(cause(vec![death("payments.acme", "delivery_limit"), unrouted()]), DeathCause::DeliveryLimit);
        for other in [delayed(), death("payments.dead", "delivery_limit"), death("other.acme", "delivery_limit")] {
            assert_eq!(lane(vec![other.clone()]), None, "{other:?}");
        }
        assert_eq!(lane_of(&BasicProperties::default(), &Topology::new("payments")), None);
    }
}
