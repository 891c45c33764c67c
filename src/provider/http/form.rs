//! JSON as an HTML form: nested members become `a[b]=c`, array elements `a[0]=c`, as Stripe and PHP read them.
//!
//! Refuses to reinterpret values: numbers keep their digits, `null` is left out, what nests too deep stays JSON text.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use url::form_urlencoded::Serializer;

/// Levels that are taken apart: bounds the recursion whatever a payload holds.
const DEPTH_MAX: usize = 64;

/// Encodes the members of a JSON object. <https://url.spec.whatwg.org/#application/x-www-form-urlencoded>
///
/// # Errors
/// When `json` is not a JSON object.
pub(super) fn encode(json: &str) -> Result<String, String> {
    let members: BTreeMap<String, &RawValue> =
        serde_json::from_str(json).map_err(|_| "a form needs a JSON object".to_owned())?;
    let mut form = Serializer::new(String::new());
    for (name, value) in members {
        append(&mut form, &name, value.get(), DEPTH_MAX);
    }
    Ok(form.finish())
}

fn append(form: &mut Serializer<'_, String>, name: &str, json: &str, depth_left: usize) {
    match json.bytes().next() {
        Some(b'{') if depth_left > 0 => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(json).unwrap_or_default();
            for (inner, value) in members {
                append(form, &format!("{name}[{inner}]"), value.get(), depth_left - 1);
            }
        }
        Some(b'[') if depth_left > 0 => {
            let items: Vec<&RawValue> = serde_json::from_str(json).unwrap_or_default();
            for (index, value) in items.into_iter().enumerate() {
                append(form, &format!("{name}[{index}]"), value.get(), depth_left - 1);
            }
        }
        Some(b'n') => {}
        _ => {
            let text = serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned());
            form.append_pair(name, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_bottomless_payload_ends() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(20_000), "]".repeat(20_000));
        let form = encode(&deep).unwrap();
        assert!(form.starts_with("a%5B0%5D"), "{}", &form[..40]);
    }
}
