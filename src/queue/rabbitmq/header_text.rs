//! Header values as text, for people and programs that read a message that was passed on.
//!
//! No value is lost for its type, but the type is not kept. Strings stay as they are, numbers and booleans are written
//! out, tables and arrays become JSON, bytes hexadecimal.

use lapin::types::AMQPValue;
use serde_json::{Number, Value};

pub(super) fn text_of(value: &AMQPValue) -> String {
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
