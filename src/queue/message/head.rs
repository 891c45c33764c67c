//! What is kept of a rejected message, and how it begins for operators: without card data and credentials.
//!
//! JSON is scanned as a whole, field by field, like the content of a job: with anything sensitive in it, nothing is shown.
//! A body that is no JSON cannot be scanned like this, so its digits are masked.

use super::content::{holds_secret, is_sensitive};
use super::{parse_json, text_of};
use crate::domain::job::{BODY_BYTES_MAX, InvalidReason};
use crate::domain::sensitive::secret::looks_secret;
use crate::domain::sensitive::{CardNumbers, REDACTED, TextContext, find_sensitive};
use crate::ledger::rejected::StoredMessage;
use crate::queue::Properties;

/// Characters that are shown.
pub const HEAD_CHARS_MAX: usize = 120;
/// Bytes of a body that is no JSON which are searched for credentials. One that begins in the head is within them.
const SEARCHED_BYTES: usize = 4_096;
const MASKED_DIGIT: char = '#';

/// What is stored of a rejected message: the message itself, or a masked one if it holds something sensitive, cannot be
/// searched for that, or is longer than a message may be.
pub fn stored_message(body: &[u8], properties: &Properties) -> StoredMessage {
    let properties = serde_json::to_string(properties).unwrap_or_default();
    let are_clean = find_sensitive(&properties, TextContext::Text, CardNumbers::Refuse).is_none()
        && !looks_secret(&properties)
        && properties.len() <= BODY_BYTES_MAX;
    let text = (body.len() <= BODY_BYTES_MAX).then(|| text_of(body).ok()).flatten().filter(|_| are_clean);
    if text.is_some_and(is_clean) {
        return StoredMessage { body: body.to_vec(), properties, is_masked: false };
    }
    let start = body.get(..BODY_BYTES_MAX).unwrap_or(body);
    let mut masked: String = match std::str::from_utf8(start.get(..whole_chars(start)).unwrap_or(start)) {
        Ok(text) if !has_secret(text) => text.chars().map(mask_digit).collect(),
        // What is no text cannot be searched.
        _ => REDACTED.to_owned(),
    };
    let end = (0..=BODY_BYTES_MAX.min(masked.len())).rev().find(|end| masked.is_char_boundary(*end));
    masked.truncate(end.unwrap_or(0));
    let properties = if are_clean { properties } else { String::new() };
    StoredMessage { body: masked.into_bytes(), properties, is_masked: true }
}

/// Why [`stored_message`] masks a message.
pub fn masked_because(body: &[u8], properties: &Properties) -> InvalidReason {
    let properties = serde_json::to_string(properties).unwrap_or_default();
    if body.len().max(properties.len()) > BODY_BYTES_MAX {
        return InvalidReason::TooLarge;
    }
    let is_secret = looks_secret(&properties) || text_of(body).is_ok_and(has_secret);
    if is_secret { InvalidReason::Secret } else { InvalidReason::CardNumber }
}

/// Whether a whole text holds nothing sensitive: as JSON field by field, and as text.
fn is_clean(text: &str) -> bool {
    let is_sensitive_json = || parse_json(text).is_ok_and(|json| is_sensitive(&json));
    find_sensitive(text, TextContext::Text, CardNumbers::Refuse).is_none()
        && !looks_secret(text)
        && !is_sensitive_json()
}

fn has_secret(text: &str) -> bool {
    looks_secret(text) || parse_json(text).is_ok_and(|json| holds_secret(&json))
}

/// Bytes of a cut text up to the end of its last whole character.
fn whole_chars(start: &[u8]) -> usize {
    match std::str::from_utf8(start) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => start.len(),
    }
}

fn mask_digit(c: char) -> char {
    if c.is_numeric() { MASKED_DIGIT } else { c }
}

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
    searched.chars().take(HEAD_CHARS_MAX).map(mask_digit).collect()
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
    fn stored_message_is_the_original_or_masked() {
        let plain = Properties { message_id: Some("m-1".to_owned()), ..Properties::default() };
        let card = Properties { correlation_id: Some("4111 1111 1111 1111".to_owned()), ..Properties::default() };
        let long = format!("{{\"id\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX));
        for (body, properties, expected) in [
            (r#"{ "id":"p-1","amount":1299 }"#, &plain, None),
            ("no JSON", &plain, None),
            (r#"{"amount":1299}"#, &card, Some(r##"{"amount":####}"##)),
            (r#"{"pan":4111111111111111}"#, &plain, Some(r##"{"pan":################}"##)),
            ("{\"pan\":\"4111 1111 1111 1111\",", &plain, Some("{\"pan\":\"#### #### #### ####\",")),
            (r#"{"key":"sk_live_4eC39HqLyjWDarjtT1zdp7dc"}"#, &plain, Some(REDACTED)),
            (r#"{"pan":"4111 1111 1111 1111","auth":"Bearer 4eC39HqLyjWDarjtT1zdp7dc"}"#, &plain, Some(REDACTED)),
            (&long, &plain, Some(&long[..BODY_BYTES_MAX])),
        ] {
            let stored = stored_message(body.as_bytes(), properties);
            let text = String::from_utf8(stored.body).unwrap();
            assert_eq!((text.as_str(), stored.is_masked), (expected.unwrap_or(body), expected.is_some()));
            assert!(!stored.properties.contains("4111"), "{}", stored.properties);
        }
        let bytes = stored_message(b"\xff\xfe4\x001\x00", &plain);
        assert!(bytes.is_masked && !bytes.body.iter().any(u8::is_ascii_digit), "{bytes:?}");
        let wide = stored_message(&[0xff; BODY_BYTES_MAX], &plain);
        assert!(wide.body.len() <= BODY_BYTES_MAX && wide.is_masked);
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
