//! Groups of digits in a text, as a reader sees them: digits of every script, joined if nothing visible is between
//! them.
//!
//! The digits of a UUID form no group, nor do those of an IBAN (ISO 13616) or a creditor reference (ISO 11649). Their
//! form and their own check digits tell them apart from card numbers.
//!
//! Digits are decimal digits of all scripts, and characters that look like digits, such as superscripts and circled
//! ones.

use crate::domain::printable::is_invisible;

/// Consecutive digits.
#[derive(Clone, Copy, Debug)]
pub struct DigitGroup<'a> {
    from: usize,
    to: usize,
    /// The text between the group before, or the beginning, and this group.
    pub gap: &'a str,
    /// The text before this group belongs to no number.
    pub is_apart: bool,
}

impl DigitGroup<'_> {
    pub fn len(&self) -> usize {
        self.to - self.from
    }
}

/// All groups of a text.
pub struct DigitGroups<'a> {
    digits: String,
    pub all: Vec<DigitGroup<'a>>,
    /// The text after the last group.
    pub tail: &'a str,
}

impl<'a> DigitGroups<'a> {
    pub fn parse(text: &'a str) -> Self {
        let mut groups = Self { digits: String::new(), all: Vec::new(), tail: text };
        let (mut at, mut gap_from, mut is_apart) = (0, 0, false);
        let (mut in_group, mut in_word) = (false, false);
        while let Some(c) = text[at..].chars().next() {
            if let Some((length, is_number)) = ignored_length(&text[at..], in_word) {
                gap_from = if in_group { at } else { gap_from };
                (at, in_group, in_word, is_apart) = (at + length, false, is_number, is_apart || is_number);
                continue;
            }
            match ascii_digit(c) {
                Some(digit) => {
                    if !in_group {
                        let (from, gap) = (groups.digits.len(), &text[gap_from..at]);
                        groups.all.push(DigitGroup { from, to: from, gap, is_apart });
                    }
                    groups.digits.push(digit);
                    if let Some(group) = groups.all.last_mut() {
                        group.to += 1;
                    }
                    (in_group, in_word, is_apart) = (true, true, false);
                }
                None if joins(c) => {}
                None => {
                    gap_from = if in_group { at } else { gap_from };
                    (in_group, in_word) = (false, c.is_alphanumeric());
                }
            }
            at += c.len_utf8();
        }
        groups.tail = if in_group { "" } else { &text[gap_from..] };
        groups
    }

    /// Digits of one group, or of several that follow each other.
    pub fn digits(&self, first: &DigitGroup<'_>, last: &DigitGroup<'_>) -> &str {
        &self.digits[first.from..last.to]
    }

    pub fn digits_of(&self, group: &DigitGroup<'_>) -> &str {
        self.digits(group, group)
    }

    /// All digits of the text.
    pub fn all_digits(&self) -> &str {
        &self.digits
    }
}

/// Characters that do not separate digits: marks such as those of a keycap, and invisible characters.
fn joins(c: char) -> bool {
    is_invisible(c) || matches!(c, '\u{300}'..='\u{36f}' | '\u{20d0}'..='\u{20ff}')
}

/// Length of a prefix whose digits are no group: a separator in a URL (`%20`), or else, with `true`, a UUID or an IBAN.
fn ignored_length(text: &str, in_word: bool) -> Option<(usize, bool)> {
    let bytes = text.as_bytes();
    let number = match bytes {
        [b'%', b'0' | b'2', digit, ..] if digit.is_ascii_hexdigit() => return Some((3, false)),
        _ if in_word => 0,
        [b'A'..=b'Z', b'A'..=b'Z', b'0'..=b'9', b'0'..=b'9', ..] => iban(bytes).max(uuid(bytes)),
        [first, ..] if first.is_ascii_hexdigit() => uuid(bytes),
        _ => 0,
    };
    (number > 0).then_some((number, true))
}

/// Length of a UUID with a known version and variant (<https://www.rfc-editor.org/rfc/rfc9562>); 0: none.
fn uuid(bytes: &[u8]) -> usize {
    const LENGTH: usize = 36;
    let is_uuid = bytes.len() >= LENGTH
        && bytes.iter().take(LENGTH).enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            14 => (b'1'..=b'8').contains(byte),
            19 => matches!(byte, b'8' | b'9' | b'a' | b'b' | b'A' | b'B'),
            _ => byte.is_ascii_hexdigit(),
        });
    let ends = bytes.get(LENGTH).is_none_or(|next| !next.is_ascii_alphanumeric());
    if is_uuid && ends { LENGTH } else { 0 }
}

/// Length of the longest IBAN with correct check digits; 0: none. ISO 7064, MOD 97-10: the first four characters count
/// after the others.
fn iban(bytes: &[u8]) -> usize {
    const HEAD: usize = 4;
    const CHARS: std::ops::RangeInclusive<usize> = 8..=34;
    let head = bytes.iter().take(HEAD).fold(0, |remainder, byte| with_char(remainder, *byte));
    let (mut remainder, mut chars, mut found) = (0, HEAD, 0);
    for (at, byte) in bytes.iter().enumerate().skip(HEAD) {
        let next = bytes.get(at + 1);
        match byte {
            b'0'..=b'9' | b'A'..=b'Z' if chars < *CHARS.end() => remainder = with_char(remainder, *byte),
            b' ' | b'-' if next.is_some_and(u8::is_ascii_alphanumeric) => continue,
            _ => break,
        }
        chars += 1;
        let ends = next.is_none_or(|next| !next.is_ascii_alphanumeric());
        // Two letters of two digits each, and two digits.
        if ends && CHARS.contains(&chars) && (remainder * 1_000_000 + head) % 97 == 1 {
            found = at + 1;
        }
    }
    found
}

/// Remainder modulo 97 after one more character: a letter counts as two digits, A as 10.
fn with_char(remainder: u32, byte: u8) -> u32 {
    match byte {
        b'0'..=b'9' => (remainder * 10 + u32::from(byte - b'0')) % 97,
        letter => (remainder * 100 + u32::from(letter - b'A') + 10) % 97,
    }
}

/// First of ten consecutive digits (general category Nd, Unicode 16).
const ZEROS: [u32; 74] = [
    0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0, 0xf20,
    0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0,
    0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0xff10, 0x104a0, 0x10d30, 0x10d40, 0x11066, 0x110f0, 0x11136, 0x111d0,
    0x112f0, 0x11450, 0x114d0, 0x11650, 0x116c0, 0x116d0, 0x116da, 0x11730, 0x118e0, 0x11950, 0x11bf0, 0x11c50,
    0x11d50, 0x11da0, 0x11f50, 0x16a60, 0x16ac0, 0x16b50, 0x16d70, 0x1ccf0, 0x1d7ce, 0x1d7d8, 0x1d7e2, 0x1d7ec,
    0x1d7f6, 0x1e140, 0x1e2f0, 0x1e4f0, 0x1e5f1, 0x1e950, 0x1fbf0,
];
/// Superscript, subscript, circled, bracketed and Chinese digits: first character, its value, number of characters.
#[rustfmt::skip]
const RUNS: [(u32, u32, u32); 27] = [
    (0xb2, 2, 2), (0xb9, 1, 1), (0x1369, 1, 9), (0x2070, 0, 1), (0x2074, 4, 6), (0x2080, 0, 10), (0x2460, 1, 9),
    (0x2474, 1, 9), (0x2488, 1, 9), (0x24ea, 0, 1), (0x24f5, 1, 9), (0x24ff, 0, 1), (0x2776, 1, 9), (0x2780, 1, 9),
    (0x278a, 1, 9), (0x3007, 0, 1), (0x4e00, 1, 1), (0x4e03, 7, 1), (0x4e09, 3, 1), (0x4e5d, 9, 1), (0x4e8c, 2, 1),
    (0x4e94, 5, 1), (0x516b, 8, 1), (0x516d, 6, 1), (0x56db, 4, 1), (0x1f100, 0, 1), (0x1f101, 0, 10),
];

/// The ASCII digit that a character represents.
pub fn ascii_digit(c: char) -> Option<char> {
    if c.is_ascii() {
        return c.is_ascii_digit().then_some(c);
    }
    let code = u32::from(c);
    let zero = ZEROS[..ZEROS.partition_point(|zero| *zero <= code)].last().map(|zero| code - zero);
    let run = RUNS[..RUNS.partition_point(|(first, _, _)| *first <= code)].last();
    let of_run = run.filter(|(first, _, count)| code - first < *count).map(|(first, value, _)| value + code - first);
    zero.filter(|value| *value < 10).or(of_run).and_then(|value| char::from_digit(value, 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(text: &str) -> Vec<String> {
        let groups = DigitGroups::parse(text);
        groups.all.iter().map(|group| groups.digits_of(group).to_owned()).collect()
    }

    #[test]
    fn digits_are_grouped_as_displayed() {
        for (text, expected) in [
            ("4111 1111-1111.1111", &["4111", "1111", "1111", "1111"] as &[&str]),
            ("x41\u{200b}1\u{feff}1y", &["4111"]),
            ("4\u{fe0f}\u{20e3}1\u{fe0f}\u{20e3}", &["41"]),
            ("４１\u{3000}١١", &["41", "11"]),
            ("4111%201111%2d11", &["4111", "1111", "11"]),
            ("%B4111^", &["4111"]),
            ("", &[]),
            ("no digits, ½", &[]),
        ] {
            assert_eq!(groups(text), expected, "{text}");
        }
    }

    #[test]
    fn uuids_and_ibans_form_no_groups() {
        for text in [
            "123e4567-e89b-12d3-a456-426614174000",
            "12345678-1234-4234-8234-123456789012",
            "DE89 3704 0044 0532 0130 00",
            "DE89370400440532013000",
            "GB29 NWBK 6016 1331 9268 19",
            "RF18 5390 0754 7034",
        ] {
            assert_eq!(groups(text), [""; 0], "{text}");
            assert_eq!(groups(&format!("7 {text}, 9")), ["7", "9"], "{text}");
        }
        // Wrong check digits, another version, another end.
        assert_eq!(groups("GB28 NWBK 6016 1331 9268 19").len(), 5);
        assert_eq!(groups("12345678-1234-0234-8234-123456789012").len(), 5);
        assert_eq!(groups("12345678-1234-4234-8234-1234567890123").len(), 5);
    }

    #[test]
    fn text_between_groups_is_the_gap() {
        let groups = DigitGroups::parse("a1 - 2b");
        let gaps: Vec<&str> = groups.all.iter().map(|group| group.gap).collect();
        assert_eq!((gaps, groups.tail), (vec!["a", " - "], "b"));
        assert!(DigitGroups::parse("1 RF18 5390 0754 7034 2").all[1].is_apart);
    }

    #[test]
    fn digits_of_all_scripts_have_their_value() {
        for (digits, value) in [
            ("0123456789", "0123456789"),
            ("٤٢", "42"),
            ("۴۲", "42"),
            ("४२", "42"),
            ("４２", "42"),
            ("𝟒𝟜𝟦𝟰𝟺", "44444"),
            ("④⑷⒋❹➃➍", "444444"),
            ("⁴₄²³¹⁰", "442310"),
            ("四二〇九", "4209"),
            ("🄀🄅", "04"),
        ] {
            let read: Option<String> = digits.chars().map(ascii_digit).collect();
            assert_eq!(read.as_deref(), Some(value), "{digits}");
        }
        assert!("aé½Ⅷ十\u{2079}x٪".chars().filter_map(ascii_digit).eq(['9']));
    }

    #[test]
    fn both_tables_are_in_order_and_name_digits() {
        assert!(ZEROS.is_sorted() && RUNS.is_sorted());
        let first = ZEROS.iter().flat_map(|zero| *zero..*zero + 10);
        let others = RUNS.iter().flat_map(|(first, _, count)| *first..*first + *count);
        for c in first.chain(others).filter_map(char::from_u32) {
            assert!(c.is_numeric() || ('\u{4e00}'..'\u{9fff}').contains(&c), "{c:?}");
        }
    }
}
