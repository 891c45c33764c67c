//! What a new job's texts must not hold: card data and credentials, looked for in every field, key, string and number.
//!
//! A problem names the field of the message and never a place in the payload, because a path into a payload is payload.
//! A card number may be cut into parts: those that follow each other in a list, or under names of one kind, are judged
//! together too.

use super::{Json, Member};
use crate::domain::amount::Decimal;
use crate::domain::sensitive::secret::looks_secret;
use crate::domain::sensitive::{
    CardNumbers, FieldMeaning, Sensitive, TextContext, are_alike, field_meaning, find_card_data, is_part,
    is_split_card, sensitive_value,
};

/// Longest number that is looked at, in digits: a longer one is no card's.
const NUMBER_DIGITS_MAX: usize = 19;

/// Fields of a message that hold a text of the producer's own, and what their names say of it.
const TEXTS: [(&str, FieldMeaning); 5] = [
    ("id", FieldMeaning::Identifier),
    ("account", FieldMeaning::Identifier),
    ("reference", FieldMeaning::Identifier),
    ("idempotency_key", FieldMeaning::Identifier),
    ("payload", FieldMeaning::Other),
];

/// What was found, and in which field of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SensitiveField {
    pub field: &'static str,
    pub what: Sensitive,
}

impl SensitiveField {
    /// What is wrong, and how to fix it; never a value.
    pub fn detail(self) -> String {
        let Self { field, what } = self;
        let fix = match what {
            Sensitive::CardNumber if field == "payload" => "send a token of the provider instead",
            Sensitive::CardNumber => "where it is a number of your own, put a 0 before it",
            Sensitive::SecurityCode => "it must not be stored: leave it out",
            Sensitive::Secret => "send a reference, and put the secret's reference into the provider row's headers",
        };
        format!("{field}: holds {}; {fix}", what.describe())
    }
}

/// The first of each kind.
#[derive(Default)]
pub struct SensitiveContent {
    pub card_data: Option<SensitiveField>,
    pub secret: Option<SensitiveField>,
}

/// Looks at a message whose fields were read: all others hold a number, a time or a word that is known.
pub fn scan_content(members: &[Member<'_>], cards: CardNumbers) -> SensitiveContent {
    let mut content = SensitiveContent::default();
    for member in members {
        let Some((field, meaning)) = TEXTS.into_iter().find(|(field, _)| *field == member.key) else { continue };
        let mut walk = ContentScanner { looks_for_cards: cards != CardNumbers::Off, ..ContentScanner::default() };
        walk.value(&member.value, ValueName { text: "", meaning });
        walk.end_parts();
        let found = |what: Sensitive| SensitiveField { field, what };
        content.card_data = content.card_data.or(walk.card_data.map(found));
        content.secret = content.secret.or(walk.is_secret.then(|| found(Sensitive::Secret)));
    }
    content
}

/// Whether a value holds card data or a credential anywhere. Its fields are those of any JSON, not of a job.
pub fn is_sensitive(json: &Json<'_>) -> bool {
    let walk = scan_json(json);
    walk.card_data.is_some() || walk.is_secret
}

/// Whether a value holds a credential anywhere.
pub fn holds_secret(json: &Json<'_>) -> bool {
    scan_json(json).is_secret
}

fn scan_json<'a>(json: &'a Json<'a>) -> ContentScanner<'a> {
    let mut walk = ContentScanner { looks_for_cards: true, ..ContentScanner::default() };
    walk.value(json, ValueName { text: "", meaning: FieldMeaning::Other });
    walk.end_parts();
    walk
}

fn place_of(name: FieldMeaning) -> TextContext {
    match name {
        FieldMeaning::SecurityCode | FieldMeaning::CardNumber | FieldMeaning::Card => TextContext::Card,
        FieldMeaning::Identifier => TextContext::Identifier,
        FieldMeaning::Other => TextContext::Text,
    }
}

/// The name of the field that a value belongs to, and what it says of the value.
#[derive(Clone, Copy)]
struct ValueName<'a> {
    text: &'a str,
    meaning: FieldMeaning,
}

/// A way through one value, in its order.
#[derive(Default)]
struct ContentScanner<'a> {
    looks_for_cards: bool,
    card_data: Option<Sensitive>,
    is_secret: bool,
    parts: TextParts<'a>,
}

/// Texts that follow each other and may be one number.
#[derive(Default)]
struct TextParts<'a> {
    text: String,
    count: usize,
    /// Name of the last one.
    name: &'a str,
    of_card: bool,
}

impl<'a> ContentScanner<'a> {
    fn value(&mut self, json: &'a Json<'_>, name: ValueName<'a>) {
        match json {
            Json::Null | Json::Bool(_) => self.end_parts(),
            Json::Number(number) => self.number(number, name),
            Json::Text(text) => {
                self.is_secret |= looks_secret(text);
                self.text(text, name, true);
            }
            Json::Array(items) => items.iter().for_each(|item| self.value(item, name)),
            Json::Object(members) => members.iter().for_each(|member| self.member(member, name.meaning)),
        }
    }

    fn member(&mut self, member: &'a Member<'_>, within: FieldMeaning) {
        self.is_secret |= looks_secret(&member.key);
        if self.looks_for_cards && self.card_data.is_none() {
            self.card_data = find_card_data(&member.key, TextContext::Text);
        }
        self.value(&member.value, ValueName { text: &member.key, meaning: field_meaning(&member.key, within) });
    }

    /// A whole number is the text of its digits, in whatever notation; of another the digits are no card's.
    fn number(&mut self, number: &str, name: ValueName<'a>) {
        let whole = Decimal::new(number).and_then(|decimal| {
            let zeros = usize::try_from(decimal.exponent).ok().filter(|zeros| *zeros <= NUMBER_DIGITS_MAX)?;
            Some(format!("{}{}", decimal.digits, "0".repeat(zeros)))
        });
        match whole {
            // Counts and amounts stand beside each other everywhere: parts of a card are told by its name alone.
            Some(digits) => self.text(&digits, name, place_of(name.meaning) == TextContext::Card),
            None => self.end_parts(),
        }
    }

    fn text(&mut self, text: &str, name: ValueName<'a>, may_be_part: bool) {
        if !self.looks_for_cards || self.card_data.is_some() {
            return;
        }
        let place = place_of(name.meaning);
        self.card_data = sensitive_value(name.meaning, text).or_else(|| find_card_data(text, place));
        if !may_be_part || !is_part(text) {
            return self.end_parts();
        }
        let of_card = place == TextContext::Card;
        let belongs = |parts: &TextParts<'_>| (of_card && parts.of_card) || are_alike(parts.name, name.text);
        if self.parts.count > 0 && !belongs(&self.parts) {
            self.end_parts();
        }
        let parts = &mut self.parts;
        (parts.name, parts.of_card, parts.count) = (name.text, parts.of_card || of_card, parts.count + 1);
        parts.text.push_str(text);
        parts.text.push(' ');
    }

    fn end_parts(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        let place = if parts.of_card { TextContext::Card } else { TextContext::Text };
        if parts.count > 1 && self.card_data.is_none() && is_split_card(&parts.text, place) {
            self.card_data = Some(Sensitive::CardNumber);
        }
    }
}

/// Field by field: the reason, the field that is named, and that no value is repeated.
#[cfg(test)]
mod tests {
    use super::super::*;

    const CARD: &str = "4111111111111111";
    const SECRET: &str = "sk_live_4eC39HqLyjWDarjtT1zdp7dc";

    fn read(body: &str, cards: CardNumbers) -> Result<Decoded, DecodeError> {
        decode(body.as_bytes(), &ProviderName::new("stripe").unwrap(), cards)
    }

    /// The smallest message, with one field set to `value` (as JSON text).
    fn with(field: &str, value: &str) -> String {
        let id = if field == "id" { "" } else { r#""id":"p-1","# };
        format!(r#"{{{id}"amount":1299,"currency":"EUR","{field}":{value}}}"#)
    }

    fn refused(body: &str) -> InvalidMessage {
        match read(body, CardNumbers::Refuse) {
            Err(DecodeError::Invalid { invalid, claimed_id }) => {
                let message = format!("{invalid} {claimed_id:?}");
                assert!(![CARD, SECRET].iter().any(|value| message.contains(value)), "{message}");
                invalid
            }
            other => panic!("{body} gave {other:?}"),
        }
    }

    /// Each field that holds a text of the producer's own, with a message that has it.
    fn fields(text: &str) -> [(&'static str, String); 8] {
        let quoted = format!("\"{text}\"");
        [
            ("id", with("id", &quoted)),
            ("account", with("account", &quoted)),
            ("reference", with("reference", &quoted)),
            ("idempotency_key", with("idempotency_key", &quoted)),
            ("payload", with("payload", &format!(r#"{{"a":[{{"b":{quoted}}}]}}"#))),
            ("payload", with("payload", &format!(r#"{{{quoted}:0}}"#))),
            ("payload", with("payload", &format!(r#"{{"headers":{{"x-a":{quoted}}},"metadata":{{"n":1}}}}"#))),
            ("payload", with("payload", &format!(r#"{{"metadata":[["{text}"]]}}"#))),
        ]
    }

    #[test]
    fn card_numbers_are_rejected_in_every_field() {
        for (field, body) in fields(CARD) {
            let invalid = refused(&body);
            assert_eq!(invalid.reason, InvalidReason::CardNumber, "{body}");
            assert!(
                invalid.detail.starts_with(&format!("{field}: holds what looks like a card number; ")),
                "{invalid}"
            );
            let warned = read(&body, CardNumbers::Warn).unwrap();
            assert_eq!(warned.warnings, [invalid.detail], "{body}");
            assert!(read(&body, CardNumbers::Off).unwrap().warnings.is_empty(), "{body}");
        }
    }

    #[test]
    fn secrets_are_rejected_in_every_field() {
        for (field, body) in fields(SECRET) {
            for cards in [CardNumbers::Refuse, CardNumbers::Warn, CardNumbers::Off] {
                let Err(DecodeError::Invalid { invalid, .. }) = read(&body, cards) else { panic!("{body} was taken") };
                assert_eq!(invalid.reason, InvalidReason::Secret, "{body}");
                assert!(
                    invalid.detail.starts_with(&format!("{field}: holds what is obviously a secret; ")),
                    "{invalid}"
                );
                assert_eq!(refused(&body), invalid);
            }
        }
        let other = with("colour", &format!("\"{SECRET}\"")).replace("\"id\":\"p-1\"", &format!("\"id\":\"{SECRET}\""));
        assert_eq!(refused(&other).reason, InvalidReason::UnknownField);
        assert_eq!(refused(&other.replace(SECRET, CARD)).reason, InvalidReason::UnknownField);
    }

    #[test]
    fn card_data_in_payload_is_always_found() {
        for payload in [
            // As a number, in any notation.
            r#"{"n":4111111111111111}"#,
            r#"{"n":4.111111111111111e15}"#,
            r#"{"n":[4111111111111111.0]}"#,
            // In parts.
            r#"{"n":["4111","1111","1111","1111"]}"#,
            r#"{"n":["4111 ","1111 ","1111 ","1111"]}"#,
            r#"{"n":["411111","1111111111"]}"#,
            r#"{"n":["4","1","1","1","1","1","1","1","1","1","1","1","1","1","1","1"]}"#,
            r#"{"part1":"4111","part2":"1111","part3":"1111","part4":"1111"}"#,
            r#"{"a":"4111","b":"1111","c":"1111","d":"1111"}"#,
            r#"{"n":[{"d":"4111"},{"d":"1111"},{"d":"1111"},{"d":"1111"}]}"#,
            r#"{"bin":"411111","middle":"111111","last4":"1111"}"#,
            r#"{"card":{"bin":"411111","rest":"1111111111","month":"12","year":"27"}}"#,
            r#"{"card":[4111,1111,1111,1111]}"#,
            // By its name.
            r#"{"card_number":"4111111111111112"}"#,
            r#"{"PAN":4111111111111112}"#,
            r#"{"card":{"number":"4026000000000002"}}"#,
            r#"{"card":{"number":"501800000009"}}"#,
            r#"{"\uff50\uff41\uff4e":"4111111111111112"}"#,
            r#"{"cvv":"123"}"#,
            r#"{"cvc":123}"#,
            r#"{"card":{"CVV2":"1234"}}"#,
            r#"{"card":{"cid":"1234"}}"#,
            r#"{"Card-Security-Code":["123"]}"#,
            r#"{"cardVerificationValue":{"value":"123"}}"#,
            r#"{"c\u200bvv":"123"}"#,
            r#"{"raw":"{\"cvv\":\"123\"}"}"#,
            r#"{"track2":";4111111111111111=27121010000012345678?"}"#,
            // In other scripts, and where nothing shows.
            r#"{"n":"\uff14\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11"}"#,
            r#"{"n":"4\u200b111\u200b111111111111"}"#,
        ] {
            let invalid = refused(&with("payload", payload));
            assert_eq!(invalid.reason, InvalidReason::CardNumber, "{payload}");
            assert!(invalid.detail.starts_with("payload: "), "{invalid}");
        }
    }

    #[test]
    fn payload_without_card_data_is_accepted() {
        for payload in [
            r#"{"card":"tok_1","cvv":null,"cvc":"","card_number":"4111 11** **** 1111","pan":"ABCDE1234F","last4":"1111"}"#,
            r#"{"bin":"411111","last4":"1111","exp":"1227"}"#,
            r#"{"cvv_check":"pass","cvc_provided":true,"cvv":true,"encryptedSecurityCode":"adyenjs_0_1_25$abc"}"#,
            r#"{"prices":[4500,1299,3500,1200],"total":10499,"rate":0.4111111111111111,"big":41111111111111110000}"#,
            r#"{"zip":"4000","house":"1111","mcc":"5411","terminal":"4711"}"#,
            r#"{"years":["2023","2024","2025","2026","2027"]}"#,
            r#"{"at":1732180000000,"id":1732180000000123,"order_id":"4032503713710866433","n":[1,2,3]}"#,
            r#"{"ean":"4006381333931","phone":"4917612345678","iban":"DE89370400440532013000"}"#,
        ] {
            let decoded = read(&with("payload", payload), CardNumbers::Refuse);
            assert!(decoded.as_ref().is_ok_and(|decoded| decoded.warnings.is_empty()), "{payload}: {decoded:?}");
        }
        assert!(read(&with("amount2", "1").replace("\"amount2\":1", "\"cost\":1"), CardNumbers::Refuse).is_ok());
        let large = with("amount", "4111111111111111").replacen("\"amount\":1299,", "", 1);
        assert!(read(&large, CardNumbers::Refuse).is_ok());
    }
}
