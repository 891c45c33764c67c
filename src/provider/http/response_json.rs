//! JSON body of a response. Only the fields that are read must be valid text.
//!
//! Providers send byte-order marks, UTF-16, Latin-1, and broken text in fields that are not needed. A browser reads all
//! of it, so a successful payment must not become unknown because of it. Numbers keep their digits as sent. A key on
//! the way to a field must not appear twice in its object, because it is unclear which value counts.

use std::borrow::Cow;
use std::fmt;

use encoding_rs::{Encoding, UTF_8, UTF_16BE, UTF_16LE};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::domain::amount::Decimal;

/// A whole JSON text.
pub struct ResponseJson<'a> {
    text: Cow<'a, str>,
    /// Some bytes are not valid text; U+FFFD replaces them.
    has_invalid_bytes: bool,
}

/// A key on the way to a field appears twice in its object, or a header has two different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmbiguousValue;

/// Value of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue {
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
    pub fn matches(&self, expected: &str) -> bool {
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
    pub fn to_text(&self) -> Option<String> {
        match self {
            Self::Text(text) | Self::Number(text) => Some(text.clone()),
            Self::Bool(truth) => Some(truth.to_string()),
            Self::Null | Self::List(_) | Self::Object | Self::Unreadable => None,
        }
    }
}

impl<'a> ResponseJson<'a> {
    /// Parses a body. Its encoding is the first of these that makes it JSON: its byte-order mark's, UTF-16 by its zero
    /// bytes, the charset of its `Content-Type`, UTF-8. `None` if none does.
    pub fn parse(body: &'a [u8], content_type: Option<&str>) -> Option<Self> {
        let marked = Encoding::for_bom(body);
        let (by_mark, rest) = match marked {
            Some((encoding, length)) => (Some(encoding), body.get(length..).unwrap_or_default()),
            None => (None, body),
        };
        let candidates = [by_mark, detect_utf_16(rest), content_type.and_then(charset), Some(UTF_8)];
        candidates.into_iter().flatten().find_map(|encoding| Self::decode(rest, encoding))
    }

    fn decode(body: &'a [u8], encoding: &'static Encoding) -> Option<Self> {
        let (text, has_invalid_bytes) = encoding.decode_without_bom_handling(body);
        let text = match text {
            Cow::Borrowed(text) => Cow::Borrowed(trim(text)),
            Cow::Owned(text) => Cow::Owned(trim(&text).to_owned()),
        };
        serde_json::from_str::<&RawValue>(&text).ok()?;
        Some(Self { text, has_invalid_bytes })
    }

    pub fn is_object(&self) -> bool {
        self.text.starts_with('{')
    }

    /// The value at a JSON pointer. <https://www.rfc-editor.org/rfc/rfc6901>
    ///
    /// # Errors
    /// [`AmbiguousValue`] when a key of the pointer appears twice in its object.
    pub fn field(&self, pointer: &str) -> Result<Option<FieldValue>, AmbiguousValue> {
        let mut raw = &*self.text;
        if !pointer.is_empty() {
            let Some(steps) = pointer.strip_prefix('/') else { return Ok(None) };
            for step in steps.split('/') {
                let escaped = || step.replace("~1", "/").replace("~0", "~");
                let step = if step.contains('~') { Cow::Owned(escaped()) } else { Cow::Borrowed(step) };
                let Some(below) = child(raw, &step)? else { return Ok(None) };
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

fn trim(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '\0' | '\u{feff}'))
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
            let found = serde_json::Deserializer::from_str(raw).deserialize_map(MemberFinder(step));
            Ok(found.unwrap_or(Ok(None))?.map(RawValue::get))
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

/// A key; U+FFFD replaces what is not valid text in it.
struct LossyKey<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> serde::Deserialize<'de> for LossyKey<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = LossyKey<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_bytes<E>(self, bytes: &'de [u8]) -> Result<Self::Value, E> {
                Ok(LossyKey(String::from_utf8_lossy(bytes)))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                Ok(LossyKey(String::from_utf8_lossy(bytes).into_owned().into()))
            }
        }

        // Read as bytes: in a string, an unpaired surrogate would be an error.
        deserializer.deserialize_bytes(KeyVisitor)
    }
}

/// Finds the value of one key in an object.
struct MemberFinder<'k>(&'k str);

impl<'de> Visitor<'de> for MemberFinder<'_> {
    type Value = Result<Option<&'de RawValue>, AmbiguousValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = Ok(None);
        while let Some((LossyKey(key), value)) = map.next_entry()? {
            if key == self.0 {
                found = if matches!(found, Ok(None)) { Ok(Some(value)) } else { Err(AmbiguousValue) };
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn utf_16(text: &str, to_bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
        text.encode_utf16().flat_map(to_bytes).collect()
    }

    fn marked(mark: &[u8], body: &[u8]) -> Vec<u8> {
        [mark, body].concat()
    }

    fn id(body: &[u8], content_type: Option<&str>) -> Option<FieldValue> {
        ResponseJson::parse(body, content_type)?.field("/id").unwrap()
    }

    fn text(text: &str) -> Option<FieldValue> {
        Some(FieldValue::Text(text.to_owned()))
    }

    #[test]
    fn every_encoding_a_browser_reads_is_read() {
        let json = r#"{"id":"é1"}"#;
        let latin = b"{\"id\":\"\xe91\"}";
        let (le, be) = (utf_16(json, u16::to_le_bytes), utf_16(json, u16::to_be_bytes));
        let json_type = |charset: &str| format!("application/json; charset={charset}");
        let table: [(Vec<u8>, Option<String>); 14] = [
            (json.into(), None),
            (json.into(), Some("application/json".to_owned())),
            (marked(b"\xef\xbb\xbf", json.as_bytes()), Some(json_type("utf-8"))),
            (marked(b"\xef\xbb\xbf", json.as_bytes()), Some(json_type("iso-8859-1"))),
            (marked(b"\xff\xfe", &le), None),
            (marked(b"\xfe\xff", &be), Some(json_type("utf-16"))),
            (le.clone(), None),
            (be, Some(json_type("UTF-16"))),
            (le, Some(json_type("UTF-8"))),
            (latin.to_vec(), Some(json_type("ISO-8859-1"))),
            (latin.to_vec(), Some("text/plain;foo=bar; Charset = \"Windows-1252\" ".to_owned())),
            (json.into(), Some(json_type("utf-16"))),
            (json.into(), Some(json_type("no-such-charset"))),
            (format!("\u{feff}\r\n\t\u{a0} {json} \u{2028}\0\0").into(), None),
        ];
        for (body, content_type) in table {
            assert_eq!(id(&body, content_type.as_deref()), text("é1"), "{body:02x?} as {content_type:?}");
        }
    }

    #[test]
    fn unused_fields_may_be_broken() {
        let wanted = text("ch_1");
        let bodies: [&[u8]; 8] = [
            br#"{"note":"\ud800","id":"ch_1"}"#,
            br#"{"\udfff":1,"id":"ch_1","x\ud800":{}}"#,
            b"{\"note\":\"\xff\xfe\x80\",\"id\":\"ch_1\"}",
            b"{\"\xc3\x28\":1,\"id\":\"ch_1\"}",
            br#"{"huge":1e99999,"id":"ch_1","long":123456789012345678901234567890.12345}"#,
            br#"{"note":"first","id":"ch_1","note":{"id":1,"id":2}}"#,
            b"{\"note\":\"\xed\xa0\x80\",\"id\":\"ch_1\"}",
            br#"{"a":{"id":"no"},"id":"ch_1","a":[{"id":2}]}"#,
        ];
        for body in bodies {
            assert_eq!(id(body, None), wanted, "{}", String::from_utf8_lossy(body));
        }
        let deep = format!(r#"{{"deep":{}{},"id":"ch_1"}}"#, "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(id(deep.as_bytes(), None), wanted);
    }

    #[test]
    fn duplicate_key_on_the_path_is_ambiguous() {
        for (body, pointer) in [
            (&br#"{"id":"first","id":"ch_1"}"#[..], "/id"),
            (br#"{"id":"ch_1","x":1,"id":"ch_1"}"#, "/id"),
            (br#"{"\u0069d":"first","id":"ch_1"}"#, "/id"),
            (br#"{"a":{"id":1},"a":2}"#, "/a/id"),
            (br#"{"a":[{"id":1,"id":2}]}"#, "/a/0/id"),
        ] {
            let answer = ResponseJson::parse(body, None).unwrap();
            assert_eq!(answer.field(pointer), Err(AmbiguousValue), "{}", String::from_utf8_lossy(body));
            assert_eq!(answer.field("/b"), Ok(None));
            assert_eq!(answer.field(""), Ok(Some(FieldValue::Object)));
        }
    }

    #[test]
    fn a_field_whose_text_is_broken_is_unreadable() {
        for body in [&br#"{"id":"ch\ud800"}"#[..], b"{\"id\":\"ch_\xff\"}", b"\xef\xbb\xbf{\"id\":\"\x80\"}"] {
            assert_eq!(id(body, None), Some(FieldValue::Unreadable));
        }
        // U+FFFD that the provider sent itself.
        assert_eq!(id("{\"id\":\"\u{fffd}\"}".as_bytes(), None), text("\u{fffd}"));
    }

    #[test]
    fn invalid_json_is_not_read() {
        let bodies: [&[u8]; 9] = [
            b"",
            b"\xef\xbb\xbf",
            b"<html>",
            b"{\"id\":",
            b"{\"id\":1}x",
            b"{'id':1}",
            b"\xff\xfe",
            b"\0\0",
            b"{\"id\":01}",
        ];
        for body in bodies {
            assert!(ResponseJson::parse(body, Some("application/json; charset=utf-8")).is_none(), "{body:?}");
        }
    }

    #[test]
    fn pointers_follow_rfc_6901() {
        let json = br#"{"a/b":{"c~d":[10,{"":"x"}]},"0":{"00":1},"l":[[1],"s",null,true]}"#;
        let answer = ResponseJson::parse(json, None).unwrap();
        let number = |digits: &str| Some(FieldValue::Number(digits.to_owned()));
        let table = [
            ("/a~1b/c~0d/0", number("10")),
            ("/a~1b/c~0d/1/", text("x")),
            ("/0/00", number("1")),
            ("", Some(FieldValue::Object)),
            ("/a~1b", Some(FieldValue::Object)),
            ("/a~1b/c~0d/2", None),
            ("/a~1b/c~0d/00", None),
            ("/a~1b/c~0d/+1", None),
            ("/a~1b/c~0d/-", None),
            ("a", None),
            ("/0/00/x", None),
        ];
        for (pointer, field) in table {
            assert_eq!(answer.field(pointer), Ok(field), "{pointer}");
        }
        let list =
            vec![FieldValue::List(vec![]), FieldValue::Text("s".to_owned()), FieldValue::Null, FieldValue::Bool(true)];
        assert_eq!(answer.field("/l"), Ok(Some(FieldValue::List(list))));
    }

    #[test]
    fn numbers_match_in_any_notation() {
        let number = |digits: &str| FieldValue::Number(digits.to_owned());
        for (digits, word) in [("704", "704"), ("704.0", "704"), ("7.04e2", "704"), ("1e400", "1e400")] {
            assert!(number(digits).matches(word), "{digits} {word}");
        }
        assert!(!number("20250416112233445566778801").matches("20250416112233445566778802"));
        assert!(!number("704").matches("0704x") && !FieldValue::Text("704.0".to_owned()).matches("704"));
    }

    proptest! {
        /// What `serde_json` reads, this reads too, and to the same text.
        #[test]
        fn it_agrees_with_the_strict_reader(value in json_value(), at in 0_usize..3) {
            let pointer = ["", "/a", "/a/b"][at];
            let body = value.to_string();
            let answer = ResponseJson::parse(body.as_bytes(), None).unwrap();
            let strict = value.pointer(pointer);
            prop_assert_eq!(answer.is_object(), value.is_object());
            let field = answer.field(pointer).unwrap();
            prop_assert_eq!(field.is_some(), strict.is_some());
            match (strict, field) {
                (Some(Value::String(text)), field) => prop_assert_eq!(field, Some(FieldValue::Text(text.clone()))),
                (Some(Value::Bool(truth)), field) => prop_assert_eq!(field, Some(FieldValue::Bool(*truth))),
                (Some(Value::Number(number)), field) => prop_assert_eq!(field, Some(FieldValue::Number(number.to_string()))),
                _ => {}
            }
        }

        #[test]
        fn every_number_keeps_its_digits(digits in "-?(0|[1-9][0-9]{0,40})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?") {
            let body = format!("{{\"id\": {digits} }}");
            prop_assert_eq!(id(body.as_bytes(), None), Some(FieldValue::Number(digits)));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(body: Vec<u8>, json in json_value(), cut in 0_usize..40, content_type: String) {
            let mut near = json.to_string().into_bytes();
            near.splice(near.len().min(cut)..near.len().min(cut), body.iter().copied().take(3));
            for bytes in [body, near] {
                if let Some(answer) = ResponseJson::parse(&bytes, Some(&content_type)) {
                    let _ = (answer.field("/a/b"), answer.field(&content_type), answer.is_object());
                }
            }
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[abc\u{e9}\"]{0,2}", inner, 0..4).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }
}
