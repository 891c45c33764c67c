//! Digits in every script: the value of a character when text is read as digits.
//!
//! It covers decimal digits of all scripts, and characters that look like digits, such as superscripts and circled
//! ones.

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
const RUNS: [(u32, u32, u32); 27] = [
    (0xb2, 2, 2),
    (0xb9, 1, 1),
    (0x1369, 1, 9),
    (0x2070, 0, 1),
    (0x2074, 4, 6),
    (0x2080, 0, 10),
    (0x2460, 1, 9),
    (0x2474, 1, 9),
    (0x2488, 1, 9),
    (0x24ea, 0, 1),
    (0x24f5, 1, 9),
    (0x24ff, 0, 1),
    (0x2776, 1, 9),
    (0x2780, 1, 9),
    (0x278a, 1, 9),
    (0x3007, 0, 1),
    (0x4e00, 1, 1),
    (0x4e03, 7, 1),
    (0x4e09, 3, 1),
    (0x4e5d, 9, 1),
    (0x4e8c, 2, 1),
    (0x4e94, 5, 1),
    (0x516b, 8, 1),
    (0x516d, 6, 1),
    (0x56db, 4, 1),
    (0x1f100, 0, 1),
    (0x1f101, 0, 10),
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
