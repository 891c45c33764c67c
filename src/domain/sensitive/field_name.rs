//! Meaning of a field by its name: a card's number or security code, an id, or anything else.
//!
//! Names are compared by their letters and digits only, so `cardNumber`, `Card-Number` and `CARD_NUMBER` are equal.

use crate::domain::printable::is_invisible;

/// Meaning of a field's value by the field's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldMeaning {
    /// The code printed on a card (CVV, CVC, CID). It must not be stored once the payment is authorised (PCI DSS
    /// 3.3.1).
    SecurityCode,
    /// A card's number, whatever its digits are.
    CardNumber,
    /// Other data of a card.
    Card,
    /// An id, a reference, a telephone number or a time: a number by itself may be anything.
    Identifier,
    Other,
}

#[rustfmt::skip]
const SECURITY_CODES: [&str; 16] = [
    "cvv", "cvv2", "cvc", "cvc2", "cvn", "cvn2", "csc", "cav2", "cvd", "cvvcode", "cvccode", "cvvnumber", "cvcnumber",
    "securitycode", "verificationvalue", "cardverificationcode",
];
#[rustfmt::skip]
const CARD_NUMBERS: [&str; 12] = [
    "pan", "cardpan", "fullpan", "cardnumber", "cardno", "cardnum", "creditcardnumber", "debitcardnumber",
    "paymentcardnumber", "ccnumber", "primaryaccountnumber", "cardaccountnumber",
];
const CARDS: [&str; 6] = ["card", "cc", "ccno", "ccnum", "track1", "track2"];
#[rustfmt::skip]
const IDENTIFIERS: [&str; 27] = [
    "id", "ids", "uuid", "ref", "reference", "key", "token", "order", "invoice", "phone", "phonenumber", "mobile",
    "msisdn", "tel", "telephone", "fax", "ean", "gtin", "upc", "barcode", "sku", "imei", "iban", "time", "timestamp",
    "date", "at",
];

/// The meaning of a name, for a field below one with the meaning `within`.
pub fn field_meaning(name: &str, within: FieldMeaning) -> FieldMeaning {
    let plain = plain(name);
    let ends_in = |words: &[&str]| words.iter().any(|word| plain.ends_with(word));
    // Outside a card `cid` means customer, client or correlation.
    if ends_in(&SECURITY_CODES) || (within == FieldMeaning::Card && plain == "cid") {
        return FieldMeaning::SecurityCode;
    }
    if CARD_NUMBERS.contains(&plain.as_str()) {
        return FieldMeaning::CardNumber;
    }
    match ends_in(&IDENTIFIERS) {
        true => FieldMeaning::Identifier,
        false if CARDS.contains(&plain.as_str()) || plain.contains("card") || ends_in(&CARDS[2..]) => {
            FieldMeaning::Card
        }
        // A field below `order` may be anything; a field below `card` belongs to the card.
        false if within == FieldMeaning::Identifier => FieldMeaning::Other,
        false => within,
    }
}

/// Whether two consecutive names may be parts of one value: `part1` and `part2`, `a` and `b`, `first` and `last`.
pub fn are_alike(one: &str, other: &str) -> bool {
    part(one) == part(other)
}

fn part(name: &str) -> String {
    const PARTS: [&str; 11] =
        ["bin", "iin", "first", "second", "third", "fourth", "middle", "mid", "last", "part", "block"];
    let letters: String = plain(name).chars().filter(|c| !c.is_ascii_digit()).collect();
    match letters.len() <= 1 || PARTS.contains(&letters.as_str()) {
        true => "part".to_owned(),
        false => letters,
    }
}

/// Lower-case ASCII letters and digits; full-width forms count as ASCII.
fn plain(name: &str) -> String {
    let narrow = |c: char| match u32::from(c) {
        code @ 0xff01..=0xff5e => char::from_u32(code - 0xfee0).unwrap_or(c),
        _ => c,
    };
    let shown = name.chars().filter(|c| !is_invisible(*c)).map(narrow);
    shown.filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_names_match_in_any_spelling() {
        for (expected, names) in [
            (
                FieldMeaning::SecurityCode,
                &["cvv", "CVV2", "cvc", "card_cvc", "Card-Security-Code", "securityCode", "ｃｖｖ", "c\u{200b}vv"]
                    as &[&str],
            ),
            (
                FieldMeaning::CardNumber,
                &["pan", "PAN", "cardNumber", "card_number", "Card.Number", "credit card number", "CC-Number"],
            ),
            (FieldMeaning::Card, &["card", "paymentCard", "gift_card_number", "track2", "new_cc_num"]),
            (
                FieldMeaning::Identifier,
                &["id", "order_id", "orderId", "reference", "card_token", "phone", "msisdn", "created_at", "cardId"],
            ),
            (FieldMeaning::Other, &["", "note", "number", "japan", "span", "company", "name", "amount", "zip"]),
        ] {
            for name in names {
                assert_eq!(field_meaning(name, FieldMeaning::Other), expected, "{name}");
            }
        }
        assert_eq!(
            [field_meaning("cid", FieldMeaning::Card), field_meaning("cid", FieldMeaning::Other)],
            [FieldMeaning::SecurityCode, FieldMeaning::Identifier]
        );
        assert_eq!(
            [field_meaning("number", FieldMeaning::Card), field_meaning("value", FieldMeaning::SecurityCode)],
            [FieldMeaning::Card, FieldMeaning::SecurityCode]
        );
    }

    #[test]
    fn part_names_are_recognised() {
        for (one, other) in
            [("part1", "part2"), ("a", "b"), ("1", "2"), ("bin", "middle"), ("middle", "last4"), ("x_1", "x_2")]
        {
            assert!(are_alike(one, other), "{one} {other}");
        }
        for (one, other) in [("month", "year"), ("zip", "house"), ("mcc", "terminal")] {
            assert!(!are_alike(one, other), "{one} {other}");
        }
    }
}
