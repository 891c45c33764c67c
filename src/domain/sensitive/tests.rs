//! Tests of card data in all its common spellings: each is found in every context where it must be. Of 10,000 harmless
//! numbers of each kind, at most one is taken for card data or a secret.

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

const SAMPLES: u64 = 10_000;
/// Most matches among 10,000 samples of a kind.
const TAKEN_MAX: u64 = 1;
/// 2026-11-21, in milliseconds. Samples are from the five years before and the three years after.
const NOW_MS: u64 = 1_795_219_200_000;

/// A generator with a fixed sequence: <https://prng.di.unimi.it/splitmix64.c>.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn string_of(&mut self, alphabet: &str, length: usize) -> String {
        let chars: Vec<char> = alphabet.chars().collect();
        (0..length).map(|_| chars[usize::try_from(self.below(chars.len() as u64)).unwrap()]).collect()
    }

    fn digits(&mut self, length: usize) -> String {
        self.string_of("0123456789", length)
    }

    fn hex(&mut self, length: usize) -> String {
        self.string_of("0123456789abcdef", length)
    }

    fn ms(&mut self) -> u64 {
        const YEAR: u64 = 365 * 86_400_000;
        NOW_MS - 5 * YEAR + self.below(8 * YEAR)
    }

    /// Year, month and day from the years 2020 to 2029.
    fn day(&mut self) -> (u64, u64, u64) {
        (2020 + self.below(10), 1 + self.below(12), 1 + self.below(28))
    }

    fn time(&mut self) -> String {
        format!("{:02}{:02}{:02}", self.below(24), self.below(60), self.below(60))
    }

    fn uuid(&mut self, version: char) -> String {
        let variant = self.string_of("89ab", 1);
        let (a, b, c, d, e) = (self.hex(8), self.hex(4), self.hex(3), self.hex(3), self.hex(12));
        format!("{a}-{b}-{version}{c}-{variant}{d}-{e}")
    }
}

const BASE_62: &str = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const CROCKFORD: &str = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

type Kind = (&'static str, fn(&mut Random) -> String);

/// Ids and references of producers and providers.
const IDS: [Kind; 41] = [
    ("UUID 4", |r| r.uuid('4')),
    ("UUID 4, capital", |r| r.uuid('4').to_uppercase()),
    ("UUID 4 behind a word", |r| format!("pay_{}", r.uuid('4'))),
    ("UUID 7", |r| {
        let (ms, rest) = (format!("{:012x}", r.ms()), r.uuid('7'));
        format!("{}-{}-{}", &ms[..8], &ms[8..], &rest[14..])
    }),
    ("UUID without dashes", |r| r.uuid('4').replace('-', "")),
    ("ULID", |r| format!("01J{}", r.string_of(CROCKFORD, 23))),
    ("nanoid", |r| r.string_of(&format!("{BASE_62}_-"), 21)),
    ("KSUID", |r| format!("2{}", r.string_of(BASE_62, 26))),
    ("CUID2", |r| format!("c{}", r.string_of("0123456789abcdefghijklmnopqrstuvwxyz", 23))),
    ("ObjectId", |r| format!("{:08x}{}", r.ms() / 1_000, r.hex(16))),
    ("64 bits in hex", |r| r.hex(16)),
    ("SHA-256", |r| r.hex(64)),
    ("trace context", |r| format!("00-{}-{}-01", r.hex(32), r.hex(16))),
    ("Stripe", |r| format!("pi_3{}", r.string_of(BASE_62, 23))),
    ("Stripe charge", |r| format!("ch_3{}", r.string_of(BASE_62, 23))),
    ("Checkout.com", |r| format!("pay_{}", r.string_of("abcdefghijklmnopqrstuvwxyz234567", 26))),
    ("Adyen", |r| r.string_of("BCDFGHJKLMNPQRSTVWXZ23456789", 16)),
    ("Adyen, old", |r| format!("{}{}{}", [85, 86, 88][r.below(3) as usize], r.ms(), r.below(10))),
    ("PayPal", |r| r.string_of("0123456789ABCDEFGHJKLMNPRSTUVWXY", 17)),
    ("Mollie", |r| format!("tr_{}", r.string_of(BASE_62, 10))),
    ("Amazon order", |r| format!("{}-{}-{}", r.digits(3), r.digits(7), r.digits(7))),
    ("YYYYMMDD and a number", |r| {
        let (y, m, d) = r.day();
        format!("{y}{m:02}{d:02}{}", r.digits(8))
    }),
    ("YYYYMMDDhhmmss", |r| {
        let (y, m, d) = r.day();
        format!("{y}{m:02}{d:02}{}", r.time())
    }),
    ("YYYYMMDDhhmmssSSS", |r| {
        let (y, m, d) = r.day();
        format!("{y}{m:02}{d:02}{}{}", r.time(), r.digits(3))
    }),
    ("YYMMDD and a number", |r| {
        let (y, m, d) = r.day();
        format!("{}{m:02}{d:02}{}", y % 100, r.digits(10))
    }),
    ("YYMMDD-number", |r| {
        let (y, m, d) = r.day();
        format!("{}{m:02}{d:02}-{}", y % 100, r.digits(10))
    }),
    ("DDMMYYYYhhmmss", |r| {
        let (y, m, d) = r.day();
        format!("{d:02}{m:02}{y}{}", r.time())
    }),
    ("30th day", |r| {
        let (y, m, _) = r.day();
        format!("30{m:02}{y}{}", r.time())
    }),
    ("word, date, number", |r| {
        let (y, m, d) = r.day();
        format!("ORD-{y}-{m:02}-{d:02}-{}", r.digits(6))
    }),
    ("shop-date-number", |r| {
        let (y, m, d) = r.day();
        format!("{}-{y}{m:02}{d:02}-{}", r.digits(4), r.digits(4))
    }),
    ("shop-year-day-number", |r| {
        let (y, m, d) = r.day();
        format!("{}-{y}-{m:02}{d:02}-{}", r.digits(4), r.digits(4))
    }),
    ("seconds", |r| (r.ms() / 1_000).to_string()),
    ("seconds and a number", |r| format!("{}{}", r.ms() / 1_000, r.digits(5))),
    ("milliseconds", |r| r.ms().to_string()),
    ("milliseconds and a number", |r| {
        let n = 1 + r.below(4) as usize;
        format!("{}{}", r.ms(), r.digits(n))
    }),
    ("microseconds", |r| format!("{}{}", r.ms(), r.digits(3))),
    ("nanoseconds", |r| format!("{}{}", r.ms(), r.digits(6))),
    ("snowflake", |r| (((r.ms() - 1_288_834_974_657) << 22) | r.below(1 << 22)).to_string()),
    ("snowflake of 53 bits", |r| ((NOW_MS + r.below(100_000_000_000)) << 12).to_string()),
    ("Sonyflake", |r| (((r.ms() - 1_409_529_600_000) / 10) << 24 | r.below(1 << 24)).to_string()),
    ("sharded id of PostgreSQL", |r| ((r.ms() - 1_314_220_021_721) << 23 | r.below(1 << 23)).to_string()),
];

/// A kind, the name of its field, and its generator.
type Other = (&'static str, &'static str, fn(&mut Random) -> String);

/// Values of other fields in a payload, with the names that they have there.
const OTHERS: [Other; 10] = [
    ("EAN-13", "article", |r| {
        let digits = format!("4{}", r.digits(11));
        format!("{digits}{}", gtin_check(&digits))
    }),
    ("UPC", "article", |r| {
        let digits = format!("6{}", r.digits(10));
        format!("{digits}{}", gtin_check(&digits))
    }),
    ("telephone", "note", |r| format!("+49 176 {}", r.digits(8))),
    ("telephone without blanks", "note", |r| format!("+57300{}", r.digits(7))),
    ("telephone by name", "phone", |r| format!("4917{}", r.digits(9))),
    ("IBAN", "note", iban),
    ("IBAN in groups", "note", |r| {
        iban(r)
            .as_bytes()
            .chunks(4)
            .map(|four| String::from_utf8_lossy(four).into_owned())
            .collect::<Vec<_>>()
            .join(" ")
    }),
    ("place", "note", |r| format!("{}.{}, {}.{}", 40 + r.below(20), r.digits(6), 1 + r.below(30), r.digits(6))),
    ("fraction", "rate", |r| format!("0.{}", r.digits(16))),
    ("instant", "note", |r| {
        let (y, m, d) = r.day();
        format!("{y}-{m:02}-{d:02} 11:58:40.{}", r.digits(6))
    }),
];

fn gtin_check(digits: &str) -> u64 {
    let weighted =
        digits.bytes().rev().zip([3, 1].into_iter().cycle()).map(|(byte, weight)| u64::from(byte - b'0') * weight);
    (10 - weighted.sum::<u64>() % 10) % 10
}

/// A German IBAN: <https://www.iban.com/structure>.
fn iban(random: &mut Random) -> String {
    let account = random.digits(18);
    // D is 13, E is 14; the account may have more digits than fit into a u64.
    let remainder =
        format!("{account}131400").bytes().fold(0, |remainder, byte| (remainder * 10 + u64::from(byte - b'0')) % 97);
    format!("DE{:02}{account}", 98 - remainder)
}

fn taken(make: impl Fn(&mut Random) -> String, place: TextContext) -> (u64, Option<String>) {
    let mut random = Random(4711);
    let samples = (0..SAMPLES).map(|_| make(&mut random));
    let taken: Vec<String> =
        samples.filter(|text| find_sensitive(text, place, CardNumbers::Refuse).is_some()).collect();
    (taken.len() as u64, taken.into_iter().next())
}

#[test]
fn ids_and_references_are_no_card_data() {
    for (kind, make) in IDS {
        let (count, example) = taken(make, TextContext::Identifier);
        assert!(count <= TAKEN_MAX, "{kind}: {count} of {SAMPLES}, such as {example:?}");
    }
}

/// Under a name that is no id's, a number of 17 to 19 digits may be a card's. All other kinds are harmless there.
#[test]
fn payload_ids_are_no_card_data() {
    const NUMBERS: [&str; 4] = ["snowflake", "Sonyflake", "sharded id of PostgreSQL", "YYMMDD and a number"];
    for (kind, make) in IDS.into_iter().filter(|(kind, _)| !NUMBERS.contains(kind)) {
        let (count, example) = taken(make, TextContext::Text);
        assert!(count <= TAKEN_MAX, "{kind}: {count} of {SAMPLES}, such as {example:?}");
    }
    for (kind, name, make) in OTHERS {
        let place = if field_meaning(name, FieldMeaning::Other) == FieldMeaning::Identifier {
            TextContext::Identifier
        } else {
            TextContext::Text
        };
        let (count, example) = taken(make, place);
        assert!(count <= TAKEN_MAX, "{kind}: {count} of {SAMPLES}, such as {example:?}");
    }
}

/// Numbers that cannot be told apart from card numbers, and how often they match: docs/security.md states it.
#[test]
fn one_in_thirty_16_digit_numbers_matches() {
    let (count, _) = taken(|random| random.digits(16), TextContext::Identifier);
    assert!((200..=450).contains(&count), "{count} of {SAMPLES}");
    for first in ["0", "7"] {
        let (count, example) = taken(|random| format!("{first}{}", random.digits(15)), TextContext::Identifier);
        assert_eq!(count, 0, "{example:?}");
    }
    let (count, example) = taken(|random| format!("0{}", random.digits(16)), TextContext::Text);
    assert_eq!(count, 0, "{example:?}");
}
