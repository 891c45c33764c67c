//! JSON body of a response. Only the fields that are read must be valid text.
//!
//! Providers send byte-order marks, UTF-16, Latin-1, and broken text in fields that are not needed. A browser reads all
//! of it, so a successful payment must not become unknown because of it. Numbers keep their digits as sent. A key on
//! the way to a field must not appear twice in its object, because it is unclear which value counts.

use std::fmt;

use encoding_rs::{Encoding, UTF_8, UTF_16BE, UTF_16LE};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::amount::Decimal;

/// A whole JSON text.
pub(super) struct ResponseJson {
    text: String,
    /// Some bytes are not valid text; U+FFFD replaces them.
    has_invalid_bytes: bool,
}

/// A key on the way to a field appears twice in its object, or a header has two different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AmbiguousValue;

/// Value of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FieldValue {
    Text(String),
    /// The digits as sent.
    Number(String),
    Bool(bool),
    Null,
    List(Vec<FieldValue>),
    Object,
    /// A string with bytes that are not valid text.
    Unreadable,
}

impl FieldValue {
    /// Whether this value equals `expected`: the same text, the same number in any notation, or `true` or `false`.
    pub(super) fn matches(&self, expected: &str) -> bool {
        match self {
            Self::Text(text) => text == expected,
            Self::Number(digits) => {
                digits == expected || Decimal::new(digits).is_some_and(|number| Decimal::new(expected) == Some(number))
            }
            Self::Bool(truth) => expected == if *truth { "true" } else { "false" },
            Self::Null | Self::List(_) | Self::Object | Self::Unreadable => false,
        }
    }

    /// The value as text: text itself, a number's digits as sent, or `true` and `false`.
    pub(super) fn to_text(&self) -> Option<String> {
        match self {
            Self::Text(text) | Self::Number(text) => Some(text.clone()),
            Self::Bool(truth) => Some(truth.to_string()),
            Self::Null | Self::List(_) | Self::Object | Self::Unreadable => None,
        }
    }
}

impl ResponseJson {
    /// Parses a body. Its encoding is the first of these that makes it JSON: its byte-order mark's, UTF-16 by its zero
    /// bytes, the charset of its `Content-Type`, UTF-8. `None` if none does.
    pub(super) fn parse(body: &[u8], content_type: Option<&str>) -> Option<Self> {
        let marked = Encoding::for_bom(body);
        let (by_mark, rest) = match marked {
            Some((encoding, length)) => (Some(encoding), body.get(length..).unwrap_or_default()),
            None => (None, body),
        };
        let candidates = [by_mark, detect_utf_16(rest), content_type.and_then(charset), Some(UTF_8)];
        candidates.into_iter().flatten().find_map(|encoding| Self::decode(rest, encoding))
    }

    fn decode(body: &[u8], encoding: &'static Encoding) -> Option<Self> {
        let (text, is_damaged) = encoding.decode_without_bom_handling(body);
        let text = text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '\0' | '\u{feff}'));
        serde_json::from_str::<&RawValue>(text).ok()?;
        Some(Self { text: text.to_owned(), has_invalid_bytes: is_damaged })
    }

    pub(super) fn is_object(&self) -> bool {
        self.text.starts_with('{')
    }

    /// The value at a JSON pointer. <https://www.rfc-editor.org/rfc/rfc6901>
    ///
    /// # Errors
    /// [`AmbiguousValue`] when a key of the pointer appears twice in its object.
    pub(super) fn field(&self, pointer: &str) -> Result<Option<FieldValue>, AmbiguousValue> {
        let mut raw = self.text.as_str();
        if !pointer.is_empty() {
            let Some(steps) = pointer.strip_prefix('/') else { return Ok(None) };
            for step in steps.split('/') {
                let Some(below) = child(raw, &step.replace("~1", "/").replace("~0", "~"))? else { return Ok(None) };
                raw = below;
            }
        }
        Ok(Some(self.value(raw, true)))
    }

    fn value(&self, raw: &str, with_items: bool) -> FieldValue {
        match raw.as_bytes().first() {
            Some(b'"') => match serde_json::from_str::<String>(raw) {
                Ok(text) if !(self.has_invalid_bytes && text.contains('\u{fffd}')) => FieldValue::Text(text),
                _ => FieldValue::Unreadable,
            },
            Some(b't') => FieldValue::Bool(true),
            Some(b'f') => FieldValue::Bool(false),
            Some(b'n') => FieldValue::Null,
            Some(b'[') => {
                let items = if with_items { items(raw) } else { Vec::new() };
                FieldValue::List(items.into_iter().map(|item| self.value(item, false)).collect())
            }
            Some(b'{') => FieldValue::Object,
            _ => FieldValue::Number(raw.to_owned()),
        }
    }
}

/// UTF-16 without a byte-order mark. JSON begins with an ASCII character, so one of the first two bytes is zero.
fn detect_utf_16(body: &[u8]) -> Option<&'static Encoding> {
    match body {
        [0, second, ..] if *second != 0 => Some(UTF_16BE),
        [first, 0, ..] if *first != 0 => Some(UTF_16LE),
        _ => None,
    }
}

/// The charset that a `Content-Type` names, if it is known.
fn charset(content_type: &str) -> Option<&'static Encoding> {
    let named = content_type.split(';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("charset").then(|| value.trim().trim_matches(['"', '\'']))
    });
    Encoding::for_label(named?.as_bytes())
}

/// The member of an object, or the element of an array, that one step of a pointer names.
fn child<'a>(raw: &'a str, step: &str) -> Result<Option<&'a str>, AmbiguousValue> {
    match raw.as_bytes().first() {
        Some(b'{') => {
            let Ok(JsonMembers(members)) = serde_json::from_str(raw) else { return Ok(None) };
            let mut named = members.into_iter().filter(|(key, _)| key == step).map(|(_, value)| value.get());
            let value = named.next();
            if named.next().is_some() { Err(AmbiguousValue) } else { Ok(value) }
        }
        Some(b'[') => Ok(index(step).and_then(|index| items(raw).into_iter().nth(index))),
        _ => Ok(None),
    }
}

/// Array index of a pointer: digits without a leading zero.
fn index(step: &str) -> Option<usize> {
    let is_index = step == "0" || (!step.starts_with('0') && step.bytes().all(|b| b.is_ascii_digit()));
    step.parse().ok().filter(|_| is_index)
}

fn items(raw: &str) -> Vec<&str> {
    let items: Vec<&RawValue> = serde_json::from_str(raw).unwrap_or_default();
    items.into_iter().map(RawValue::get).collect()
}

/// Members of an object, in their order.
struct JsonMembers<'a>(Vec<(String, &'a RawValue)>);

/// A key; U+FFFD replaces what is not valid text in it.
struct LossyKey(String);

impl<'de> serde::Deserialize<'de> for LossyKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl Visitor<'_> for KeyVisitor {
            type Value = LossyKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<LossyKey, E> {
                Ok(LossyKey(String::from_utf8_lossy(bytes).into_owned()))
            }
        }

        // Read as bytes: in a string, an unpaired surrogate would be an error.
        deserializer.deserialize_bytes(KeyVisitor)
    }
}

impl<'de: 'a, 'a> serde::Deserialize<'de> for JsonMembers<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((LossyKey(key), value)) = map.next_entry()? {
                    members.push((key, value));
                }
                Ok(members)
            }
        }

        deserializer.deserialize_map(MembersVisitor).map(JsonMembers)
    }
}

#[cfg(test)]
#[path = "response_json_tests.rs"]
mod tests;
