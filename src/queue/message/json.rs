//! JSON as strict as money needs it: no duplicate keys, no NUL, no lone surrogates, numbers kept as digits.
//!
//! `serde_json` parses every byte; this module checks each level of the result.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Deepest nesting that is read; the same as serde_json's own limit, which does not hold for raw values.
const DEPTH_MAX: usize = 128;

/// A JSON value that keeps what [`serde_json::Value`] would lose.
#[derive(Debug)]
pub enum Json<'a> {
    Null,
    Bool(bool),
    /// As written.
    Number(&'a str),
    Text(String),
    Array(Vec<Json<'a>>),
    Object(Vec<Member<'a>>),
}

#[derive(Debug)]
pub struct Member<'a> {
    pub key: String,
    pub value: Json<'a>,
    /// The value exactly as written.
    pub raw: &'a str,
}

/// # Errors
/// Says what is wrong and where; never a value.
pub fn parse(text: &str) -> Result<Json<'_>, String> {
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| describe_error(&error))?;
    read(raw.get(), 0)
}

/// `raw` is one whole value that serde_json has accepted.
fn read(raw: &str, depth: usize) -> Result<Json<'_>, String> {
    if depth >= DEPTH_MAX {
        return Err(format!("nested deeper than {DEPTH_MAX} levels"));
    }
    Ok(match raw.as_bytes().first() {
        Some(b'{') => {
            let Pairs(pairs) = serde_json::from_str(raw).map_err(|error| describe_error(&error))?;
            Json::Object(members(pairs, depth)?)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(raw).map_err(|error| describe_error(&error))?;
            Json::Array(items.into_iter().map(|item| read(item.get(), depth + 1)).collect::<Result<_, _>>()?)
        }
        Some(b'"') => {
            let text: String = serde_json::from_str(raw).map_err(|_| "a string holds an invalid escape".to_owned())?;
            Json::Text(without_nul(text)?)
        }
        Some(b't') => Json::Bool(true),
        Some(b'f') => Json::Bool(false),
        Some(b'n') => Json::Null,
        _ => Json::Number(raw),
    })
}

fn members<'a>(pairs: Vec<(String, &'a RawValue)>, depth: usize) -> Result<Vec<Member<'a>>, String> {
    let mut seen = BTreeSet::new();
    let mut members = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        let key = without_nul(key)?;
        if !seen.insert(key.clone()) {
            return Err(format!("{} appears twice in one object", named(&key)));
        }
        members.push(Member { key, value: read(value.get(), depth + 1)?, raw: value.get() });
    }
    Ok(members)
}

/// A key as it may be shown: only what can be a field's name, for a key can be as secret as a value.
pub fn named(key: &str) -> String {
    let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
    if !key.is_empty() && key.len() <= 32 && key.bytes().all(plain) {
        return format!("field `{key}`");
    }
    "a field".to_owned()
}

fn without_nul(text: String) -> Result<String, String> {
    if text.contains('\0') {
        return Err("a string holds U+0000, which SQL cannot store".to_owned());
    }
    Ok(text)
}

/// What is wrong with a text that is no JSON, and where; never what stands there.
pub fn describe_error(error: &serde_json::Error) -> String {
    use serde_json::error::Category;
    let what = match error.classify() {
        Category::Eof => "JSON ends too early",
        Category::Io | Category::Syntax | Category::Data => "not JSON",
    };
    format!("{what}: line {}, column {}", error.line(), error.column())
}

/// An object's members in their order, duplicates included.
struct Pairs<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> serde::Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;

        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(pairs)
            }
        }

        deserializer.deserialize_map(PairsVisitor).map(Pairs)
    }
}
