//! Message properties of Sluicegate converted to AMQP's and back, and header values as text.
//!
//! What the broker judges or acts on is not passed on: user id, cluster id, expiration, priority and the broker's own
//! headers, which describe a message's past way. No header value is lost for its type, but the type is not kept:
//! strings stay as they are, numbers and booleans are written out, tables and arrays become JSON, bytes hexadecimal.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::{Number, Value};

use crate::queue::{Properties, QueueError, headers};

/// Stored on disk. <https://www.rabbitmq.com/docs/publishers#message-properties>
const PERSISTENT: u8 = 2;
const JSON: &str = "application/json";
/// Kept free in the frame of a content header: 39 bytes around the properties, and what the broker adds when it
/// dead-letters the message, without which it could not deliver it to us again (about 500 bytes).
const SPARE_BYTES: usize = 2_048;
/// Of a header: length of its name, type and length of its value.
const HEADER_BYTES: usize = 6;

/// Headers that the broker writes or acts on; passed on, they would be taken for the new message's.
/// <https://www.rabbitmq.com/docs/dlx#effects>, <https://www.rabbitmq.com/docs/sender-selected>
const BROKERS_OWN: [&str; 6] = ["x-death", "x-delivery-count", "x-acquired-count", "x-received-from", "CC", "BCC"];
const BROKERS_OWN_PREFIXES: [&str; 2] = ["x-first-death-", "x-last-death-"];
/// Refused by the broker unless the channel that publishes it also consumes the answers; in a message that was
/// delivered it names no client. <https://www.rabbitmq.com/docs/direct-reply-to>
const DIRECT_REPLY: &str = "amq.rabbitmq.reply-to";

/// Properties for one publish on a connection whose frames have at most `frame_max` bytes.
pub fn to_amqp(properties: &Properties, frame_max: u32) -> Result<BasicProperties, QueueError> {
    let content_type = properties.content_type.as_deref().unwrap_or(JSON);
    let mut amqp = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type(short("content type", content_type)?);
    let mut used = SPARE_BYTES + 1 + content_type.len();
    let mut put = |what, value: &Option<String>, with: fn(BasicProperties, ShortString) -> BasicProperties| {
        if let Some(value) = value {
            amqp = with(std::mem::take(&mut amqp), short(what, value)?);
            used += 1 + value.len();
        }
        Ok::<_, QueueError>(())
    };
    put("content encoding", &properties.content_encoding, BasicProperties::with_content_encoding)?;
    put("correlation id", &properties.correlation_id, BasicProperties::with_correlation_id)?;
    put("reply to", &properties.reply_to, BasicProperties::with_reply_to)?;
    put("message id", &properties.message_id, BasicProperties::with_message_id)?;
    put("type", &properties.kind, BasicProperties::with_type)?;
    put("app id", &properties.app_id, BasicProperties::with_app_id)?;
    if let Some(timestamp) = properties.timestamp_s {
        amqp = amqp.with_timestamp(timestamp);
    }
    let room = usize::try_from(frame_max).unwrap_or(usize::MAX).saturating_sub(used);
    Ok(amqp.with_headers(table(&properties.headers, room)?))
}

/// All headers share one frame, and the broker closes the connection on one that is too long. So those that no longer
/// fit, longest first, stay behind; ours never do.
fn table(given: &BTreeMap<String, String>, mut room: usize) -> Result<FieldTable, QueueError> {
    let ours = |key: &str| [headers::REASON, headers::DETAIL].contains(&key);
    let mut sorted: Vec<(&String, &String)> = given.iter().collect();
    sorted.sort_by_key(|(key, value)| (!ours(key), key.len() + value.len()));
    let mut table = FieldTable::default();
    for (index, (key, value)) in sorted.iter().enumerate() {
        let Some(left) = room.checked_sub(HEADER_BYTES + key.len() + value.len()) else {
            tracing::warn!(headers = sorted.len() - index, "headers do not fit into a frame and are left behind");
            break;
        };
        room = left;
        table.insert(short("header name", key)?, AMQPValue::LongString(value.as_str().into()));
    }
    Ok(table)
}

pub fn from_amqp(amqp: &BasicProperties) -> Properties {
    let kept = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    let headers = amqp.headers().iter().flat_map(|table| table.inner());
    Properties {
        message_id: kept(amqp.message_id()),
        content_type: kept(amqp.content_type()),
        content_encoding: kept(amqp.content_encoding()),
        correlation_id: kept(amqp.correlation_id()),
        reply_to: kept(amqp.reply_to()).filter(|name| name != DIRECT_REPLY),
        kind: kept(amqp.kind()),
        app_id: kept(amqp.app_id()),
        timestamp_s: *amqp.timestamp(),
        headers: headers
            .filter(|(key, _)| !is_brokers_own(key.as_str()))
            .map(|(key, value)| (key.as_str().to_owned(), text_of(value)))
            .collect(),
    }
}

fn is_brokers_own(header: &str) -> bool {
    BROKERS_OWN.contains(&header) || BROKERS_OWN_PREFIXES.iter().any(|prefix| header.starts_with(prefix))
}

/// AMQP's short strings have at most 255 bytes, and lapin panics on a longer one.
fn short(what: &str, value: &str) -> Result<ShortString, QueueError> {
    ShortString::try_new(value).map_err(|_| QueueError::Refused(format!("{what}: must have at most 255 bytes")))
}

pub fn text_of(value: &AMQPValue) -> String {
    match json(value) {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

fn json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(yes) => Value::from(*yes),
        AMQPValue::ShortShortInt(number) => Value::from(*number),
        AMQPValue::ShortShortUInt(number) => Value::from(*number),
        AMQPValue::ShortInt(number) => Value::from(*number),
        AMQPValue::ShortUInt(number) => Value::from(*number),
        AMQPValue::LongInt(number) => Value::from(*number),
        AMQPValue::LongUInt(number) => Value::from(*number),
        AMQPValue::LongLongInt(number) => Value::from(*number),
        AMQPValue::Timestamp(seconds) => Value::from(*seconds),
        // By way of its shortest text, since 0.1 as f32 is 0.10000000149011612 as f64.
        AMQPValue::Float(number) => float(number.to_string().parse().unwrap_or(f64::from(*number))),
        AMQPValue::Double(number) => float(*number),
        AMQPValue::DecimalValue(decimal) => Value::from(point(decimal.value, usize::from(decimal.scale))),
        AMQPValue::ShortString(text) => Value::from(text.as_str()),
        AMQPValue::LongString(text) => match std::str::from_utf8(text.as_bytes()) {
            Ok(text) => Value::from(text),
            Err(_) => Value::from(hex::encode(text.as_bytes())),
        },
        AMQPValue::ByteArray(bytes) => Value::from(hex::encode(bytes.as_slice())),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(json).collect(),
        AMQPValue::FieldTable(table) => {
            table.into_iter().map(|(key, value)| (key.as_str().to_owned(), json(value))).collect()
        }
        AMQPValue::Void => Value::Null,
    }
}

/// JSON has no infinity and no NaN.
fn float(number: f64) -> Value {
    Number::from_f64(number).map_or_else(|| Value::from(number.to_string()), Value::Number)
}

/// `scale` digits stand behind the point.
fn point(value: u32, scale: usize) -> String {
    if scale == 0 {
        return value.to_string();
    }
    let digits = format!("{value:0>width$}", width = scale + 1);
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    format!("{whole}.{fraction}")
}

#[cfg(test)]
mod tests {
    use lapin::types::{DecimalValue, FieldTable};

    use super::*;

    const FRAME_MAX: u32 = 131_072;

    #[test]
    fn broker_headers_are_stripped_from_properties() {
        let ours = Properties {
            message_id: Some("p-1".to_owned()),
            headers: BTreeMap::from([("tenant".to_owned(), "a".to_owned())]),
            ..Properties::default()
        };
        let mut headers = FieldTable::default();
        headers.insert("tenant".into(), AMQPValue::LongString("a".into()));
        headers.insert("x-first-death-queue".into(), AMQPValue::LongString("payments.stripe".into()));
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
        headers.insert("BCC".into(), AMQPValue::LongString("elsewhere".into()));
        let wire = to_amqp(&ours, FRAME_MAX).unwrap().with_headers(headers).with_reply_to(DIRECT_REPLY.into());
        assert_eq!(wire.delivery_mode(), &Some(2));
        let back = from_amqp(&wire);
        assert_eq!(back, Properties { content_type: Some(JSON.to_owned()), ..ours });
    }

    #[test]
    fn unencodable_properties_are_rejected() {
        let long = || Some("x".repeat(256));
        for properties in [
            Properties { message_id: long(), ..Properties::default() },
            Properties { correlation_id: long(), ..Properties::default() },
        ] {
            assert!(matches!(to_amqp(&properties, FRAME_MAX), Err(QueueError::Refused(_))));
        }
    }

    #[test]
    fn longest_foreign_headers_are_dropped_first() {
        let long = "x".repeat(1_500);
        let given = [("a", long.as_str()), ("b", &long), ("c", "short"), (headers::REASON, "malformed")];
        let given: BTreeMap<String, String> = given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let keys = |frame_max| {
            let amqp = to_amqp(&Properties { headers: given.clone(), ..Properties::default() }, frame_max).unwrap();
            let table = amqp.headers().clone().unwrap_or_default();
            table.inner().keys().map(|key| key.as_str().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(keys(FRAME_MAX), ["a", "b", "c", headers::REASON]);
        assert_eq!(keys(4_096), ["a", "c", headers::REASON]);
        assert_eq!(keys(2_200), ["c", headers::REASON]);
    }

    #[test]
    fn every_type_has_a_text() {
        let decimal = |value, scale| AMQPValue::DecimalValue(DecimalValue { scale, value });
        let mut table = FieldTable::default();
        table.insert("k".into(), AMQPValue::FieldArray(vec![AMQPValue::Void, decimal(1_299, 2)].into()));
        table.insert("b".into(), AMQPValue::LongString(vec![0xff].into()));
        for (value, text) in [
            (AMQPValue::LongString("é".into()), "é"),
            (AMQPValue::LongString(vec![0xff, 0x00].into()), "ff00"),
            (AMQPValue::Float(0.1), "0.1"),
            (AMQPValue::Double(f64::NAN), "NaN"),
            (AMQPValue::ShortShortInt(-1), "-1"),
            (AMQPValue::Timestamp(u64::MAX), "18446744073709551615"),
            (decimal(5, 3), "0.005"),
            (decimal(12, 0), "12"),
            (AMQPValue::Void, "null"),
            (AMQPValue::FieldTable(table), r#"{"b":"ff","k":[null,"12.99"]}"#),
        ] {
            assert_eq!(text_of(&value), text);
        }
    }
}
