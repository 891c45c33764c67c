//! Tests of harmless numbers: of 10,000 ids, references or other numbers of each kind, at most one is taken for card
//! data or a secret.

use super::*;

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
