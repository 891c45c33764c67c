//! Whether a payload holds what looks like a payment card number: issuer prefix, length and Luhn digit.
//!
//! Refuses to look inside longer runs of digits: a window of a 30-digit reference passes Luhn by chance.

use super::json::Json;
use crate::domain::decimal::Decimal;

/// Shortest and longest card number, in digits (ISO/IEC 7812-1 allows up to 19; none in use is shorter than 12).
const DIGITS: std::ops::RangeInclusive<usize> = 12..=19;

/// First and last prefix of a range, and the lengths that the issuer uses.
const ISSUERS: [(&str, &str, std::ops::RangeInclusive<usize>); 18] = [
    ("4", "4", 13..=13),       // Visa, old
    ("4", "4", 16..=16),       // Visa
    ("4", "4", 19..=19),       // Visa
    ("51", "55", 16..=16),     // Mastercard
    ("2221", "2720", 16..=16), // Mastercard
    ("34", "34", 15..=15),     // American Express
    ("37", "37", 15..=15),     // American Express
    ("6011", "6011", 16..=19), // Discover
    ("644", "649", 16..=19),   // Discover
    ("65", "65", 16..=19),     // Discover
    ("300", "305", 14..=19),   // Diners Club
    ("36", "36", 14..=19),     // Diners Club
    ("38", "39", 14..=19),     // Diners Club
    ("3528", "3589", 16..=19), // JCB
    ("62", "62", 16..=19),     // UnionPay
    ("50", "50", 12..=19),     // Maestro
    ("56", "58", 12..=19),     // Maestro
    ("6304", "6763", 12..=19), // Maestro and its neighbours
];

/// Looks at every key, string and number.
pub(super) fn found_in(json: &Json<'_>) -> bool {
    match json {
        Json::Null | Json::Bool(_) => false,
        Json::Number(number) => in_number(number),
        Json::Text(text) => in_text(text),
        Json::Array(items) => items.iter().any(found_in),
        Json::Object(members) => members.iter().any(|member| in_text(&member.key) || found_in(&member.value)),
    }
}

fn in_number(number: &str) -> bool {
    let Some(decimal) = Decimal::new(number) else { return false };
    let Ok(zeros) = usize::try_from(decimal.exponent) else { return in_text(number) };
    zeros <= *DIGITS.end() && is_card(&format!("{}{}", decimal.digits, "0".repeat(zeros)))
}

/// Digits may be grouped by single spaces or hyphens; a card may be followed by other groups (`… 1111 12/27`).
fn in_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut start = 0;
    while start < bytes.len() {
        let begins_group = bytes[start].is_ascii_digit() && (start == 0 || !bytes[start - 1].is_ascii_digit());
        if begins_group && starts_card(&bytes[start..]) {
            return true;
        }
        start += 1;
    }
    false
}

fn starts_card(bytes: &[u8]) -> bool {
    let mut digits = String::new();
    for (at, byte) in bytes.iter().enumerate() {
        let next_is_digit = bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        match byte {
            b'0'..=b'9' => digits.push(char::from(*byte)),
            b' ' | b'-' if next_is_digit => continue,
            _ => return false,
        }
        if digits.len() > *DIGITS.end() {
            return false;
        }
        if !next_is_digit && is_card(&digits) {
            return true;
        }
    }
    false
}

fn is_card(digits: &str) -> bool {
    let issued = ISSUERS.iter().any(|(first, last, lengths)| {
        lengths.contains(&digits.len())
            && digits.get(..first.len()).is_some_and(|prefix| (*first..=*last).contains(&prefix))
    });
    DIGITS.contains(&digits.len()) && issued && luhn(digits)
}

/// ISO/IEC 7812-1, annex B.
fn luhn(digits: &str) -> bool {
    let sum: u32 = digits
        .bytes()
        .rev()
        .enumerate()
        .map(|(place, byte)| {
            let digit = u32::from(byte - b'0');
            let weighted = if place % 2 == 1 { digit * 2 } else { digit };
            weighted / 10 + weighted % 10
        })
        .sum();
    sum.is_multiple_of(10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cards_and_leaves_other_numbers_alone() {
        for card in [
            "4111111111111111",
            "4111 1111 1111 1111",
            "4111-1111-1111-1111 12/27 123",
            "pay with 378282246310005.",
            "5555555555554444",
            "2223003122003222",
            "6011111111111117",
            "30569309025904",
            "3530111333300000",
            "order 7 4111 1111 1111 1111",
        ] {
            assert!(in_text(card), "{card}");
        }
        for other in [
            "4111111111111112",                 // Luhn
            "1732180000000",                    // a time in ms
            "9111111111111111",                 // no issuer
            "41111111111111110000",             // too long
            "123e4567-e89b-12d3-a456-42661417", // a UUID
            "",
            "tok_1111",
        ] {
            assert!(!in_text(other), "{other}");
        }
        assert!(in_number("4111111111111111"));
        assert!(in_number("4.111111111111111e15"));
        assert!(!in_number("4111111111111112"));
        assert!(!in_number("1e400"));
    }
}
