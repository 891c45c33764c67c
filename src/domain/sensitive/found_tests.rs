//! Tests of card data in all its common spellings: each is found in every context where it must be.

use proptest::prelude::*;

use super::issuers::tests::with_luhn;
use super::*;

const EVERYWHERE: [TextContext; 3] = [TextContext::Identifier, TextContext::Text, TextContext::Card];

fn found(text: &str, place: TextContext) -> Option<Sensitive> {
    find_sensitive(text, place, CardNumbers::Refuse)
}

#[test]
fn a_card_number_is_found_in_every_place() {
    for text in [
        // Numbers that issuers and payment providers publish for tests.
        "4111111111111111",
        "4242424242424242",
        "5555555555554444",
        "2223003122003222",
        "2720994326581252",
        "378282246310005",
        "371449635398431",
        "6011111111111117",
        "30569309025904",
        "38520000023237",
        "3530111333300000",
        "6200000000000005",
        "6205500000000000004",
        "6304000000000000",
        "6759649826438453",
        "2200000000000004",
        "6521111111111110",
        "9792030000000000",
        "6062826786276634",
        "5066991111111118",
        "5060666666666666666",
        "3095000000000000",
        "135412345678911",
        // Separators of any kind.
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "4111_1111_1111_1111",
        "4111.1111.1111.1111",
        "4111/1111/1111/1111",
        "4111\u{a0}1111\u{2009}1111\u{3000}1111",
        "4111\u{2013}1111\u{2014}1111\u{2212}1111",
        "4111 - 1111 - 1111 - 1111",
        "4111, 1111, 1111, 1111",
        "4111\n1111\r\n1111\t1111",
        "4111-1111 1111.1111",
        "4111x1111x1111x1111",
        "4111&nbsp;1111&nbsp;1111&nbsp;1111",
        "4111%201111%201111%201111",
        "3782 822463 10005",
        "3782-822463-10005",
        "3056 930902 5904",
        "41 11 11 11 11 11 11 11",
        "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "4-1-1-1-1-1-1-1-1-1-1-1-1-1-1-1",
        // Digits of other scripts, and invisible characters.
        "٤١١١١١١١١١١١١١١١",
        "４１１１　１１１１　１１１１　１１１１",
        "𝟺𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷𝟷",
        "④①①①①①①①①①①①①①①①",
        "4\u{200b}1\u{200b}1\u{200b}1\u{200b}1111\u{feff}11111111",
        "4\u{fe0f}\u{20e3}111111111111111",
        // Within other text.
        "PAN4111111111111111",
        "card:4111111111111111;",
        "order 7 4111 1111 1111 1111",
        "4111-1111-1111-1111 12/27 123",
        "%B4111111111111111^DOE/JOHN^2712101?",
        ";4111111111111111=27121010000012345678?",
        "pay_4111111111111111_x",
        "https://example.com/4111111111111111?a=b",
        "{\"n\":\"4111111111111111\"}",
        "2026-11-21T11:58:40Z 4111111111111111",
        "+4111111111111111",
        "DE89 3704 0044 0532 0130 00 4111 1111 1111 1111",
    ] {
        for place in EVERYWHERE {
            assert!(find_card_data(text, place).is_some(), "{place:?} {text:?}");
        }
    }
}

/// Free text, and text below a card's name, have more lengths and other groupings.
#[test]
fn free_text_is_checked_at_more_lengths() {
    for text in [
        "4000000000000000006",
        "4222222222222",
        "6011000000000000001",
        "30000000000000007",
        "41111111 11111111",
        "411111 1111111111",
        "411111-111111-1111",
        "41111 11111 11111 1",
        "cvv: 123",
        "CVC 1234",
        "cvv2=123",
        "{\"cvc\":\"123\"}",
        "security code: 123",
    ] {
        assert!(find_card_data(text, TextContext::Text).is_some(), "{text}");
    }
    for digits in ["501800000009", "4026000000002", "2301010000000", "15000000000000"] {
        let number = with_luhn(&digits[..digits.len() - 1]);
        assert_eq!(
            find_card_data(&number, TextContext::Card).is_some(),
            !number.starts_with("23") && number.len() != 14,
            "{number}"
        );
        assert_eq!(find_card_data(&number, TextContext::Identifier), None, "{number}");
    }
}

#[test]
fn field_name_decides_value_sensitivity() {
    for (name, value, expected) in [
        (FieldMeaning::CardNumber, "4111111111111112", Some(Sensitive::CardNumber)),
        (FieldMeaning::CardNumber, "9111 1111 1111 1111", Some(Sensitive::CardNumber)),
        (FieldMeaning::CardNumber, "tok_4111111111111111", None),
        (FieldMeaning::CardNumber, "4111 11** **** 1111", None),
        (FieldMeaning::CardNumber, "1111", None),
        (FieldMeaning::SecurityCode, "123", Some(Sensitive::SecurityCode)),
        (FieldMeaning::SecurityCode, "١٢٣٤", Some(Sensitive::SecurityCode)),
        (FieldMeaning::SecurityCode, "1 2 3", Some(Sensitive::SecurityCode)),
        (FieldMeaning::SecurityCode, "***", None),
        (FieldMeaning::SecurityCode, "tok_123", None),
        (FieldMeaning::SecurityCode, "12", None),
        (FieldMeaning::Card, "123", None),
    ] {
        assert_eq!(sensitive_value(name, value), expected, "{name:?} {value}");
    }
}

#[test]
fn split_card_number_is_found() {
    for parts in [
        "4111 1111 1111 1111",
        "411111 111111 1111",
        "3782 822463 10005",
        "41111111 11111111",
        "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    ] {
        assert!(is_split_card(parts, TextContext::Text), "{parts}");
    }
    for parts in ["4111 1111 1111 1111 1111", "7 4111 1111 1111 1111", "411 11111 1111 1111", "4111 1111 1111 1112"] {
        assert!(!is_split_card(parts, TextContext::Text), "{parts}");
    }
    assert!(is_split_card("7 4111 1111 1111 1111 12 27", TextContext::Card));
}

#[test]
fn card_scan_can_be_off_secret_scan_cannot() {
    assert_eq!(found("4111111111111111", TextContext::Text), Some(Sensitive::CardNumber));
    assert_eq!(find_sensitive("4111111111111111", TextContext::Text, CardNumbers::Off), None);
    assert_eq!(
        find_sensitive("sk_live_4eC39HqLyjWD", TextContext::Identifier, CardNumbers::Off),
        Some(Sensitive::Secret)
    );
}

fn separator() -> impl Strategy<Value = String> {
    proptest::sample::select(vec![" ", "-", "–", ".", "/", "_", "\u{a0}", " - ", ", ", "\n", "|", ":"])
        .prop_map(str::to_owned)
}

proptest! {
    /// A card number is found in any surrounding text and in any script.
    #[test]
    fn card_number_is_found_in_surrounding_text(
        digits in "4[0-9]{14}",
        separator in separator(),
        before in "([^0-9\\pN\\pM\\pC%&+.,]{0,12} )?",
        after in "( [^0-9\\pN\\pM\\pC]{0,12})?",
        zero in proptest::sample::select(vec!['0', '٠', '०', '０', '𝟎']),
    ) {
        let card = with_luhn(&digits);
        let groups: Vec<&str> = [&card[..4], &card[4..8], &card[8..12], &card[12..]].to_vec();
        let is_date = (0..3).any(|at| groups[at].starts_with("20") || groups[at + 1].starts_with("20"));
        prop_assume!(!is_date);
        let script = |text: &str| text.chars().map(|c| match c.to_digit(10) {
            Some(digit) => char::from_u32(u32::from(zero) + digit).unwrap(),
            None => c,
        }).collect::<String>();
        for written in [card.clone(), groups.join(&separator)] {
            let text = format!("{before}{}{after}", script(&written));
            for place in EVERYWHERE {
                prop_assert!(find_card_data(&text, place).is_some(), "{place:?} {text:?}");
            }
        }
    }

    #[test]
    fn scan_handles_any_text(text in ".{0,64}") {
        for place in EVERYWHERE {
            let _ = found(&text, place);
            let _ = is_split_card(&text, place);
        }
        let _ = sensitive_value(field_meaning(&text, FieldMeaning::Other), &text);
    }
}
