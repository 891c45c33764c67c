//! Sensitive text that must not be stored: a card's number or security code, and credentials.
//!
//! All texts have this one scanner: the fields of a message, the texts of a response, and an operator's reason for a
//! decision.

mod card;
mod digits;
mod field_name;
mod groups;
mod issuers;
pub mod safe_quote;
pub mod secret;

pub use field_name::{FieldMeaning, are_alike, field_meaning};

use groups::DigitGroups;
use secret::looks_secret;

/// Digits of the shortest sensitive number: a security code.
const DIGITS_MIN: usize = 3;
/// Replacement for a text that was not stored.
pub const REDACTED: &str = "(withheld)";

/// Handling of a text that looks like a card's number or security code. A secret is always refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardNumbers {
    Refuse,
    Warn,
    Off,
}

/// Kind of sensitive text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sensitive {
    CardNumber,
    SecurityCode,
    Secret,
}

impl Sensitive {
    /// Description for people.
    pub fn describe(self) -> &'static str {
        match self {
            Self::CardNumber => "what looks like a card number",
            Self::SecurityCode => "what looks like a card's security code",
            Self::Secret => "what is obviously a secret",
        }
    }
}

/// Context of a text: what its digits are likely to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextContext {
    /// An id, an account, a key or a reference: a number by itself is more likely one of these.
    Identifier,
    /// Any other text.
    Text,
    /// Below a field name that speaks of a card.
    Card,
}

/// Finds the first sensitive part of a text; all kinds have the same consequence.
pub fn find_sensitive(text: &str, place: TextContext, cards: CardNumbers) -> Option<Sensitive> {
    let card = || (cards != CardNumbers::Off).then(|| find_card_data(text, place)).flatten();
    if looks_secret(text) { Some(Sensitive::Secret) } else { card() }
}

/// Finds a card's number or security code in a text.
pub fn find_card_data(text: &str, place: TextContext) -> Option<Sensitive> {
    // Most texts are names and words: this avoids a second reading of them.
    let possible = text.bytes().filter(u8::is_ascii_digit).count() + text.bytes().filter(|byte| *byte >= 0xc2).count();
    if possible < DIGITS_MIN {
        return None;
    }
    let groups = (possible >= *issuers::DIGITS.start() || names_code(text)).then(|| DigitGroups::parse(text))?;
    if possible >= *issuers::DIGITS.start() && card::contains_card(&groups, place) {
        return Some(Sensitive::CardNumber);
    }
    has_named_code(&groups).then_some(Sensitive::SecurityCode)
}

/// Whether consecutive texts, each of some digits, form one card number.
pub fn is_split_card(parts: &str, place: TextContext) -> bool {
    card::is_split(&DigitGroups::parse(parts), place)
}

/// Whether the value of a field with a card's name is a card number or security code.
pub fn sensitive_value(name: FieldMeaning, value: &str) -> Option<Sensitive> {
    let groups = DigitGroups::parse(value);
    let (has_letters, digits) = (value.chars().any(char::is_alphabetic), groups.all_digits().len());
    let is_masked = value.contains(['*', '•', '#']);
    match name {
        FieldMeaning::CardNumber if !has_letters && !is_masked && issuers::DIGITS.contains(&digits) => {
            Some(Sensitive::CardNumber)
        }
        FieldMeaning::SecurityCode if !has_letters && !is_masked && (3..=4).contains(&digits) => {
            Some(Sensitive::SecurityCode)
        }
        _ => None,
    }
}

/// Whether a text may be a part of a longer number: digits, and no letters.
pub fn is_part(text: &str) -> bool {
    const PART_BYTES_MAX: usize = 64;
    let has_digit = text.bytes().any(|byte| byte.is_ascii_digit()) || !text.is_ascii();
    has_digit
        && text.len() <= PART_BYTES_MAX
        && text.chars().all(|c| digits::ascii_digit(c).is_some() || !c.is_alphanumeric())
        && !DigitGroups::parse(text).all.is_empty()
}

/// Names of a security code as people write them.
const CODE_NAMES: [&str; 7] = ["cvv", "cvc", "cvv2", "cvc2", "cvn", "csc", "security code"];

fn names_code(text: &str) -> bool {
    let begins = |text: &[u8], name: &str| {
        text.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name.as_bytes()))
    };
    let bytes = text.as_bytes();
    bytes.iter().enumerate().any(|(at, byte)| {
        matches!(byte, b'c' | b'C' | b's' | b'S') && CODE_NAMES.iter().any(|name| begins(&bytes[at..], name))
    })
}

/// Whether a security code follows its name: `cvv: 123`, `"cvc":"1234"`. It needs the name, a separator, and three or
/// four digits.
fn has_named_code(groups: &DigitGroups<'_>) -> bool {
    const SEPARATOR_CHARS_MAX: usize = 5;
    groups.all.iter().enumerate().any(|(at, group)| {
        let separator = group.gap.chars().rev().take_while(|c| !c.is_alphanumeric()).count();
        let is_apart = (1..=SEPARATOR_CHARS_MAX).contains(&separator) && !group.gap.ends_with(['-', '_']);
        let words = group.gap.trim_end_matches(|c: char| !c.is_alphanumeric());
        let before = at.checked_sub(1).and_then(|before| groups.all.get(before));
        // The 2 of `CVV2` is a group by itself.
        let named = match before {
            Some(two) if words.is_empty() && groups.digits_of(two) == "2" => two.gap,
            _ => words,
        };
        let is_named = CODE_NAMES.iter().any(|name| {
            let at = named.len().checked_sub(name.len());
            at.and_then(|at| named.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(name))
        });
        (3..=4).contains(&group.len()) && is_apart && is_named
    })
}

#[cfg(test)]
#[path = "found_tests.rs"]
mod found_tests;
#[cfg(test)]
#[path = "innocent_tests.rs"]
mod innocent_tests;
