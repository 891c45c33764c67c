//! Message properties, ours to AMQP's and back.
//!
//! Refuses headers that are no strings, and the broker's own: they describe a message's past way, not the message.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use crate::queue::{Properties, QueueError};

/// Stored on disk. <https://www.rabbitmq.com/docs/publishers#message-properties>
const PERSISTENT: u8 = 2;
const JSON: &str = "application/json";

/// Headers that the broker writes or acts on; passed on, they would be taken for the new message's.
/// <https://www.rabbitmq.com/docs/dlx#effects>, <https://www.rabbitmq.com/docs/sender-selected>
const BROKERS_OWN: [&str; 8] = [
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
    "x-received-from",
    "CC",
    "BCC",
];

pub(super) fn to_amqp(properties: &Properties) -> Result<BasicProperties, QueueError> {
    let mut headers = FieldTable::default();
    for (key, value) in &properties.headers {
        headers.insert(short("header name", key)?, AMQPValue::LongString(value.as_str().into()));
    }
    let content_type = properties.content_type.as_deref().unwrap_or(JSON);
    let mut amqp = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type(short("content type", content_type)?)
        .with_headers(headers);
    if let Some(id) = &properties.message_id {
        amqp = amqp.with_message_id(short("message id", id)?);
    }
    Ok(amqp)
}

pub(super) fn from_amqp(amqp: &BasicProperties) -> Properties {
    let mut headers = BTreeMap::new();
    for (key, value) in amqp.headers().iter().flat_map(|table| table.inner()) {
        let own = BROKERS_OWN.iter().any(|own| key.as_str().starts_with(own));
        if let (AMQPValue::LongString(text), false) = (value, own)
            && let Ok(text) = std::str::from_utf8(text.as_bytes())
        {
            headers.insert(key.as_str().to_owned(), text.to_owned());
        }
    }
    Properties {
        message_id: amqp.message_id().as_ref().map(|id| id.as_str().to_owned()),
        content_type: amqp.content_type().as_ref().map(|content_type| content_type.as_str().to_owned()),
        headers,
    }
}

/// AMQP's short strings have at most 255 bytes, and lapin panics on a longer one.
fn short(what: &str, value: &str) -> Result<ShortString, QueueError> {
    ShortString::try_new(value).map_err(|_| QueueError::Refused(format!("{what}: must have at most 255 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_come_back_without_what_the_broker_added() {
        let ours = Properties {
            message_id: Some("p-1".to_owned()),
            content_type: None,
            headers: BTreeMap::from([("tenant".to_owned(), "a".to_owned())]),
        };
        let mut headers = FieldTable::default();
        headers.insert("tenant".into(), AMQPValue::LongString("a".into()));
        headers.insert("x-first-death-queue".into(), AMQPValue::LongString("payments.stripe".into()));
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
        headers.insert("binary".into(), AMQPValue::LongString(vec![0xff].into()));
        let wire = to_amqp(&ours).unwrap().with_headers(headers);
        assert_eq!(wire.delivery_mode(), &Some(2));
        let back = from_amqp(&wire);
        assert_eq!(back, Properties { content_type: Some(JSON.to_owned()), ..ours });
    }

    #[test]
    fn what_amqp_cannot_write_is_refused() {
        let long = Properties { message_id: Some("x".repeat(256)), ..Properties::default() };
        assert!(matches!(to_amqp(&long), Err(QueueError::Refused(_))));
    }
}
