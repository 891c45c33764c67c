//! Sensitive text that must not be stored: a card's number or security code, and credentials.
//!
//! All texts have this one scanner: the fields of a message, the texts of a response, and an operator's reason for a
//! decision.
//!
//! A card number has an issuer's range, a length of this range, and the Luhn digit. A number by itself is judged by its
//! context. An id or a reference has digits of its own, so only the usual lengths count there. A number that begins with
//! a date of this decade (`261121…`) or a time in milliseconds is no card number. Digits in the groups of a printed card
//! are judged at all lengths.

mod field_name;
mod groups;
mod issuers;
pub mod secret;

pub use field_name::{FieldMeaning, are_alike, field_meaning};

use groups::{DigitGroup, DigitGroups};
use issuers::{DIGITS, Lengths, is_issued};
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
    let groups = (possible >= *DIGITS.start() || names_code(text)).then(|| DigitGroups::parse(text))?;
    if possible >= *DIGITS.start() && contains_card(&groups, place) {
        return Some(Sensitive::CardNumber);
    }
    has_named_code(&groups).then_some(Sensitive::SecurityCode)
}

/// Whether consecutive texts, each of some digits, form one card number.
pub fn is_split_card(parts: &str, place: TextContext) -> bool {
    is_split(&DigitGroups::parse(parts), place)
}

/// Whether the value of a field with a card's name is a card number or security code.
pub fn sensitive_value(name: FieldMeaning, value: &str) -> Option<Sensitive> {
    let (sensitive, lengths) = match name {
        FieldMeaning::CardNumber => (Sensitive::CardNumber, DIGITS),
        FieldMeaning::SecurityCode => (Sensitive::SecurityCode, 3..=4),
        FieldMeaning::Card | FieldMeaning::Identifier | FieldMeaning::Other => return None,
    };
    let has_letters = value.chars().any(char::is_alphabetic);
    let is_masked = value.contains(['*', '•', '#']);
    let digits = DigitGroups::parse(value).all_digits().len();
    (!has_letters && !is_masked && lengths.contains(&digits)).then_some(sensitive)
}

/// Whether a text may be a part of a longer number: digits, and no letters.
pub fn is_part(text: &str) -> bool {
    const PART_BYTES_MAX: usize = 64;
    let has_digit = text.bytes().any(|byte| byte.is_ascii_digit()) || !text.is_ascii();
    has_digit
        && text.len() <= PART_BYTES_MAX
        && text.chars().all(|c| groups::ascii_digit(c).is_some() || !c.is_alphanumeric())
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

/// Longest separator between two groups, in characters; and in bytes, if all separators of a number are equal.
const GAP_CHARS_MAX: usize = 3;
const SAME_GAP_BYTES_MAX: usize = 8;
/// Groups of printed cards, in any text.
const PRINTED_LAYOUTS: [&[usize]; 7] =
    [&[4, 4, 4, 4], &[4, 4, 4, 4, 1], &[4, 4, 4, 4, 2], &[4, 4, 4, 4, 3], &[4, 6, 5], &[4, 6, 4], &[4, 5, 6]];
/// Other groupings, which parts of an id may happen to have.
const SPLIT_LAYOUTS: [&[usize]; 5] = [&[6, 13], &[6, 10], &[8, 8], &[6, 6, 4], &[6, 6, 7]];
/// Earliest time in milliseconds that counts as a time: 2020-01-01.
const FIRST_MS: &str = "1577836800000";

/// Whether the text contains a card number.
fn contains_card(groups: &DigitGroups<'_>, place: TextContext) -> bool {
    let alone = (0..groups.all.len()).any(|at| is_alone(groups, at, place));
    alone || is_grouped(groups, place) || (place == TextContext::Card && is_whole(groups))
}

/// Whether several texts, each a part, form one card number and nothing else.
fn is_split(parts: &DigitGroups<'_>, place: TextContext) -> bool {
    match place {
        TextContext::Card => is_grouped(parts, place) || is_whole(parts),
        TextContext::Identifier | TextContext::Text => {
            let lengths: Vec<usize> = parts.all.iter().map(DigitGroup::len).collect();
            let is_known = PRINTED_LAYOUTS.iter().chain(&SPLIT_LAYOUTS).any(|layout| *layout == lengths);
            (is_known || is_even(&lengths)) && is_card_number(parts, &parts.all, place)
        }
    }
}

/// Whether all digits of a text under a card's key are one card number.
fn is_whole(groups: &DigitGroups<'_>) -> bool {
    is_issued(groups.all_digits(), Lengths::Allowed)
}

/// Whether one group by itself is a card number. It is not, if another group is in the same word or before its decimal
/// point.
fn is_alone(groups: &DigitGroups<'_>, at: usize, place: TextContext) -> bool {
    let Some(group) = groups.all.get(at).filter(|group| DIGITS.contains(&group.len())) else { return false };
    let is_word = |gap: &str| !gap.is_empty() && gap.chars().all(char::is_alphanumeric);
    let after = groups.all.get(at + 1).map(|next| next.gap);
    let in_word = at > 0 && is_word(group.gap) || after.is_some_and(is_word);
    let is_fraction = at > 0 && matches!(group.gap, "." | ",");
    // A telephone number has at most 15 digits.
    let is_dialled = group.gap.ends_with('+') && group.len() <= 15;
    let digits = groups.digits_of(group);
    match place {
        TextContext::Card => is_issued(digits, Lengths::Allowed),
        _ if in_word || is_fraction || is_dialled || is_time(digits) => false,
        TextContext::Identifier => is_issued(digits, Lengths::Usual) && !begins_with_date(digits),
        // Barcodes have this length, and a check digit of their own.
        TextContext::Text if digits.len() < 14 => {
            digits.starts_with('4') && is_issued(digits, Lengths::Allowed) && !is_barcode(digits)
        }
        TextContext::Text => is_issued(digits, Lengths::Allowed),
    }
}

fn is_grouped(groups: &DigitGroups<'_>, place: TextContext) -> bool {
    let cut: &[&[usize]] = if place == TextContext::Identifier { &[] } else { &SPLIT_LAYOUTS };
    let layouts = || PRINTED_LAYOUTS.iter().chain(cut);
    let printed = groups.all.windows(2).enumerate().any(|(at, _)| {
        let rest = &groups.all[at..];
        if !matches!(rest[0].len(), 4 | 6 | 8) {
            return false;
        }
        layouts().any(|layout| {
            let Some(window) = rest.get(..layout.len()) else { return false };
            window.iter().map(DigitGroup::len).eq(layout.iter().copied())
                && is_joined(window)
                && is_card_number(groups, window, place)
        })
    });
    printed || groups.all.chunk_by(|_, next| is_plain(next)).any(|run| is_evenly_cut(groups, run, place))
}

/// Whether all groups of a run have the length of the first, and the last at most this length. No further group may
/// adjoin.
fn is_evenly_cut(groups: &DigitGroups<'_>, run: &[DigitGroup<'_>], place: TextContext) -> bool {
    let same_gap = |run: &[DigitGroup<'_>]| run.windows(2).all(|pair| pair[0].gap == pair[1].gap);
    run.len() > 2 && same_gap(&run[1..]) && is_even(&run.iter().map(DigitGroup::len).collect::<Vec<_>>()) && {
        // Groups of three and five digits are parts of many ids.
        let is_small = run[0].len() <= 2;
        (is_small || place != TextContext::Identifier) && is_card_number(groups, run, place)
    }
}

fn is_even(lengths: &[usize]) -> bool {
    let Some((last, others)) = lengths.split_last() else { return false };
    let Some(first) = others.first() else { return false };
    *first <= 5 && others.iter().all(|length| length == first) && last <= first
}

/// Whether the groups are joined like those of one number: each by a short separator, or all by the same.
fn is_joined(window: &[DigitGroup<'_>]) -> bool {
    let Some((_, rest)) = window.split_first() else { return false };
    let gap = rest.first().map_or("", |group| group.gap);
    let is_same = |group: &DigitGroup<'_>| !group.is_apart && group.gap == gap;
    let same = rest.len() > 2 && gap.len() <= SAME_GAP_BYTES_MAX && rest.iter().all(is_same);
    same || rest.iter().all(is_plain)
}

/// Whether a group follows the one before after a short separator without letters.
fn is_plain(group: &DigitGroup<'_>) -> bool {
    let is_short = group.gap.chars().count() <= GAP_CHARS_MAX || group.gap.starts_with('%');
    !group.is_apart && is_short && (group.gap.starts_with('%') || !group.gap.chars().any(char::is_alphanumeric))
}

/// Whether the digits of several groups are a card number, and none of the groups is a date.
fn is_card_number(groups: &DigitGroups<'_>, window: &[DigitGroup<'_>], place: TextContext) -> bool {
    let [first, rest @ ..] = window else { return false };
    let last = rest.last().unwrap_or(first);
    let digits = groups.digits(first, last);
    if !is_issued(digits, Lengths::Allowed) {
        return false;
    }
    let pairs = rest.windows(2).any(|pair| pair[0].len() == 4 && is_whole_date(groups.digits(&pair[0], &pair[1])));
    let one = rest.iter().any(|group| is_whole_date(groups.digits_of(group)));
    let short = rest.iter().any(|group| group.len() == 6 && begins_with_date(groups.digits_of(group)));
    let in_id = short || first.len() != 4 && begins_with_date(digits);
    match place {
        TextContext::Card => true,
        TextContext::Text => !(pairs || one || first.len() == 6 && begins_with_date(digits)),
        TextContext::Identifier => !(pairs || one || in_id),
    }
}

/// Whether the digits are `YYYYMMDD` of this century.
fn is_whole_date(digits: &str) -> bool {
    digits.len() == 8 && digits.starts_with("20") && is_month_and_day(&digits[4..])
}

/// Whether the digits begin with `YYMMDD` of this decade.
fn begins_with_date(digits: &str) -> bool {
    digits.starts_with('2') && digits.get(2..6).is_some_and(is_month_and_day)
}

/// Whether the digits begin with `DDMMYYYY` of this century, or with a time since 1970 in milliseconds or seconds.
fn is_time(digits: &str) -> bool {
    let day_month = digits.get(..4).is_some_and(|dd_mm| is_month_and_day(&format!("{}{}", &dd_mm[2..], &dd_mm[..2])));
    let is_day = day_month && digits.get(4..6) == Some("20");
    let is_epoch = digits.len() == 15 && digits.starts_with('1') && digits.get(..13).is_some_and(|ms| ms >= FIRST_MS);
    is_day || is_epoch
}

fn is_month_and_day(digits: &str) -> bool {
    let (month, day) = digits.split_at(2);
    ("01"..="12").contains(&month) && ("01"..="31").contains(&day)
}

/// Check digit of GTIN-12 and GTIN-13: <https://www.gs1.org/services/how-calculate-check-digit-manually>.
fn is_barcode(digits: &str) -> bool {
    let weights = [1, 3].into_iter().cycle();
    let sum: u32 = digits.bytes().rev().zip(weights).map(|(byte, weight)| u32::from(byte - b'0') * weight).sum();
    sum.is_multiple_of(10)
}

#[cfg(test)]
mod tests;
