//! The beginning of a rejected message for operators, without card data and credentials.
//!
//! JSON is scanned as a whole, field by field, like the content of a job: with anything sensitive in it, nothing is shown.
//! A body that is no JSON cannot be scanned like this, so its digits are masked.

use super::content::is_sensitive;
use super::{parse_json, text_of};
use crate::domain::job::BODY_BYTES_MAX;
use crate::domain::sensitive::secret::looks_secret;
use crate::domain::sensitive::{CardNumbers, REDACTED, TextContext, find_sensitive};

/// Characters that are shown.
pub const HEAD_CHARS_MAX: usize = 120;
/// Bytes of a body that is no JSON which are searched for credentials. One that begins in the head is within them.
const SEARCHED_BYTES: usize = 4_096;
const MASKED_DIGIT: char = '#';

/// How a body begins; [`REDACTED`] if it holds something sensitive.
pub fn body_head(body: &[u8]) -> String {
    let json = (body.len() <= BODY_BYTES_MAX).then(|| text_of(body).ok()).flatten();
    let parsed = json.and_then(|text| Some((text, parse_json(text).ok()?)));
    if let Some((text, json)) = parsed {
        let is_known = is_sensitive(&json) || find_sensitive(text, TextContext::Text, CardNumbers::Refuse).is_some();
        return if is_known { REDACTED.to_owned() } else { text.chars().take(HEAD_CHARS_MAX).collect() };
    }
    let searched = String::from_utf8_lossy(body.get(..SEARCHED_BYTES).unwrap_or(body));
    if looks_secret(&searched) {
        return REDACTED.to_owned();
    }
    let masked = |c: char| if c.is_numeric() { MASKED_DIGIT } else { c };
    searched.chars().take(HEAD_CHARS_MAX).map(masked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_shows_no_card_and_no_secret() {
        let plain = r#"{"id":"p-1","amount":1299,"currency":"EUR","colour":"red"}"#;
        assert_eq!(body_head(plain.as_bytes()), plain);
        let far = format!(r#"{{"id":"p-1","note":"{}","card":"4111 1111 1111 1111"}}"#, "x".repeat(500));
        for body in [
            r#"{"id":"4111111111111111"}"#,
            r#"{"pan":4111111111111111}"#,
            r#"{"payload":{"card":{"a":"4111","b":"1111","c":"1111","d":"1111"}}}"#,
            r#"{"payload":{"cvc":"123"}}"#,
            r#"{"key":"sk_live_4eC39HqLyjWDarjtT1zdp7dc"}"#,
            r#"{"auth":"Bearer 4eC39HqLyjWDarjtT1zdp7dc"}"#,
            &far,
            // No JSON: the same, as far as it is searched.
            r#"{"key":"sk_live_4eC39HqLyjWDarjtT1zdp7dc""#,
        ] {
            assert_eq!(body_head(body.as_bytes()), REDACTED, "{body}");
        }
    }

    #[test]
    fn digits_of_unreadable_bodies_are_masked() {
        for (body, head) in [
            (&b"{\"a\":\"4111\",\"b\":\"1111\","[..], "{\"a\":\"####\",\"b\":\"####\","),
            (b"pan=4111111111111111&cvc=123", "pan=################&cvc=###"),
            ("٤١١١ \u{fffd}".as_bytes(), "#### \u{fffd}"),
            (b"\xff\xfe1", "\u{fffd}\u{fffd}#"),
            (b"", ""),
        ] {
            assert_eq!(body_head(body), head);
        }
        let long = "é".repeat(BODY_BYTES_MAX);
        assert_eq!(body_head(long.as_bytes()).chars().count(), HEAD_CHARS_MAX);
    }
}
