//! Encoder of JSON as an HTML form: nested members become `a[b]=c`, array elements `a[0]=c`, as for Stripe and PHP.
//!
//! Numbers keep their digits, and `null` is left out. A value that nests too deep stays JSON text.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use url::form_urlencoded::byte_serialize;

use super::request::BodyError;
use crate::domain::expansion::BoundedBuffer;

/// Largest nesting depth that is encoded. It bounds the recursion for every payload.
const DEPTH_MAX: usize = 64;

/// Encodes the members of a JSON object. <https://url.spec.whatwg.org/#application/x-www-form-urlencoded>
///
/// # Errors
/// When `json` is not a JSON object, or its form does not fit.
pub(super) fn encode(json: &str, out: &mut BoundedBuffer) -> Result<(), BodyError> {
    let members: BTreeMap<String, &RawValue> =
        serde_json::from_str(json).map_err(|_| BodyError::Malformed("a form needs a JSON object".to_owned()))?;
    for (mut name, value) in members {
        append_value(out, &mut name, value.get(), DEPTH_MAX)?;
    }
    Ok(())
}

/// Appends one value. `path` is its name, and is the same afterwards.
fn append_value(out: &mut BoundedBuffer, path: &mut String, json: &str, depth_left: usize) -> Result<(), BodyError> {
    match json.bytes().next() {
        Some(b'{') if depth_left > 0 => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(json).unwrap_or_default();
            members.into_iter().try_for_each(|(inner, value)| append_nested(out, path, &inner, value, depth_left))
        }
        Some(b'[') if depth_left > 0 => {
            let items: Vec<&RawValue> = serde_json::from_str(json).unwrap_or_default();
            let mut items = items.into_iter().enumerate();
            items.try_for_each(|(index, value)| append_nested(out, path, &index.to_string(), value, depth_left))
        }
        Some(b'n') => Ok(()),
        _ => {
            let text = serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned());
            push_pair(out, path, &text)
        }
    }
}

fn append_nested(
    out: &mut BoundedBuffer,
    path: &mut String,
    step: &str,
    value: &RawValue,
    depth_left: usize,
) -> Result<(), BodyError> {
    let above = path.len();
    path.extend(["[", step, "]"]);
    let appended = append_value(out, path, value.get(), depth_left - 1);
    path.truncate(above);
    appended
}

fn push_pair(out: &mut BoundedBuffer, name: &str, text: &str) -> Result<(), BodyError> {
    if !out.is_empty() {
        out.push("&")?;
    }
    for piece in byte_serialize(name.as_bytes()).chain(["="]).chain(byte_serialize(text.as_bytes())) {
        out.push(piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::expansion::REQUEST_BODY_BYTES_MAX;

    fn encode(json: &str) -> Result<String, BodyError> {
        let mut out = BoundedBuffer::new(REQUEST_BODY_BYTES_MAX);
        super::encode(json, &mut out).map(|()| String::from_utf8(out.into_bytes()).unwrap())
    }

    #[test]
    fn nesting_becomes_brackets() {
        let table = [
            (r#"{"amount":1299,"ok":true,"none":null}"#, "amount=1299&ok=true"),
            (r#"{"a":{"b":{"c":"x y"}}}"#, "a%5Bb%5D%5Bc%5D=x+y"),
            (r#"{"a":[1,"b&c=d"]}"#, "a%5B0%5D=1&a%5B1%5D=b%26c%3Dd"),
            (r#"{"n":12345678901234567890.10,"s":"\u00e9\"\n"}"#, "n=12345678901234567890.10&s=%C3%A9%22%0A"),
            ("{}", ""),
        ];
        for (json, form) in table {
            assert_eq!(encode(json).unwrap(), form, "{json}");
        }
        assert!(encode("[1]").is_err());
    }

    #[test]
    fn nesting_depth_is_bounded() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(20_000), "]".repeat(20_000));
        let form = encode(&deep).unwrap();
        assert!(form.starts_with("a%5B0%5D"), "{}", &form[..40]);
    }

    /// A message of 64 KiB would become a form of 3.5 GB.
    #[test]
    fn form_size_is_bounded() {
        let json = format!("{{\"{}\":[{}]}}", "é".repeat(16_000), ["1"; 16_500].join(","));
        assert!(json.len() < 65_536 + 100 && matches!(encode(&json), Err(BodyError::TooLarge)), "{}", json.len());
    }
}
