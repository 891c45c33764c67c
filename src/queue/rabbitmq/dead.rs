//! Messages that a lane gave up on, one at a time, each on a channel of its own.
//!
//! Refuses to consume: they are rare, and a look now and then needs no prefetch and leaves none behind. Which lane a
//! message comes from is told by the broker's own header, which it writes itself and no producer can.

use async_trait::async_trait;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions};
use lapin::types::AMQPValue;
use lapin::{Acker, BasicProperties, Channel, Connection};

use super::declare::open_channel;
use super::failure::{Failure, limited};
use super::topology::Topology;
use super::wire;
use crate::domain::provider::ProviderName;
use crate::queue::{DeadLetter, QueueError, Receipt};

/// <https://www.rabbitmq.com/docs/dlx#effects>
const DEATHS: &str = "x-death";

pub(super) async fn take(connection: &Connection, topology: &Topology) -> Result<Option<DeadLetter>, QueueError> {
    let (channel, queue) = (open_channel(connection).await?, topology.dead());
    let got = match limited(channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: false })).await {
        Ok(got) => got,
        // Nothing was ever given up where nothing is declared.
        Err(failure) if failure.is_not_found() => None,
        Err(failure) => return Err(failure.into_error(&format!("look into queue `{queue}`"))),
    };
    Ok(got.map(|message| {
        let message = message.delivery;
        DeadLetter {
            lane: lane_of(&message.properties, topology),
            properties: wire::from_amqp(&message.properties),
            body: message.data.into(),
            receipt: Box::new(DeadReceipt { acker: message.acker, _channel: channel }),
        }
    }))
}

/// The lane that gave up last, for whatever reason: too many deliveries, or an `expiration` that the producer set. A message
/// that was parked has died in delay queues too, by their time; those are no provider's.
fn lane_of(properties: &BasicProperties, topology: &Topology) -> Option<ProviderName> {
    let AMQPValue::FieldArray(deaths) = properties.headers().as_ref()?.inner().get(DEATHS)? else { return None };
    let text = |value: Option<&AMQPValue>| match value? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        _ => None,
    };
    let mut given_up = deaths.as_slice().iter().filter_map(|death| match death {
        AMQPValue::FieldTable(death) => Some(death.inner()),
        _ => None,
    });
    given_up.find_map(|death| topology.provider_of(&text(death.get("queue"))?))
}

/// Dropping it closes the channel, and the broker has the message back.
struct DeadReceipt {
    acker: Acker,
    _channel: Channel,
}

fn judge(answer: Result<bool, Failure>, doing: &str) -> Result<(), QueueError> {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(QueueError::Away(format!("{doing}: the channel is gone"))),
        Err(failure) => Err(QueueError::Away(failure.describe(doing))),
    }
}

#[async_trait]
impl Receipt for DeadReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        judge(limited(self.acker.ack(BasicAckOptions { multiple: false })).await, "acknowledge")
    }

    async fn hand_back(self: Box<Self>) -> Result<(), QueueError> {
        judge(limited(self.acker.nack(BasicNackOptions { multiple: false, requeue: true })).await, "hand back")
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

    fn lane(deaths: Vec<AMQPValue>) -> Option<String> {
        let mut headers = FieldTable::default();
        headers.insert(DEATHS.into(), AMQPValue::FieldArray(FieldArray::from(deaths)));
        let properties = BasicProperties::default().with_headers(headers);
        lane_of(&properties, &Topology::new("payments")).map(|provider| provider.to_string())
    }

    #[test]
    fn a_death_names_the_lane_that_gave_up() {
        let parked = || death("payments.delay.250", "expired");
        assert_eq!(lane(vec![death("payments.acme", "delivery_limit"), parked()]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![parked(), death("payments.acme", "delivery_limit")]).as_deref(), Some("acme"));
        assert_eq!(lane(vec![death("payments.acme", "expired"), parked()]).as_deref(), Some("acme"));
        for other in [parked(), death("payments.dead", "delivery_limit"), death("other.acme", "delivery_limit")] {
            assert_eq!(lane(vec![other.clone()]), None, "{other:?}");
        }
        assert_eq!(lane_of(&BasicProperties::default(), &Topology::new("payments")), None);
    }
}
