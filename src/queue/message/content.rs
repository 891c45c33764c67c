//! What a new job's texts must not hold: card data and credentials, looked for in every field, key, string and number.
//!
//! A problem names the field of the message and never a place in the payload, because a path into a payload is payload.
//! A card number may be cut into parts: those that follow each other in a list, or under names of one kind, are judged
//! together too.

use super::json::{Json, Member};
use crate::amount::Decimal;
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
pub(super) struct SensitiveField {
    pub field: &'static str,
    pub what: Sensitive,
}

impl SensitiveField {
    /// What is wrong, and how to fix it; never a value.
    pub(super) fn detail(self) -> String {
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
pub(super) struct SensitiveContent {
    pub card_data: Option<SensitiveField>,
    pub secret: Option<SensitiveField>,
}

/// Looks at a message whose fields were read: all others hold a number, a time or a word that is known.
pub(super) fn scan_content(members: &[Member<'_>], cards: CardNumbers) -> SensitiveContent {
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
        let belongs = (of_card && self.parts.of_card) || are_alike(self.parts.name, name.text);
        if self.parts.count > 0 && !belongs {
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
