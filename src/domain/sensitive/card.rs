//! Card numbers in groups of digits: an issuer's range, a length of this range, and the Luhn digit.
//!
//! A number by itself is judged by its context. An id or a reference has digits of its own, so only the usual lengths
//! count there. A number that begins with a date of this decade (`261121…`) or a time in milliseconds is no card
//! number. Digits in the groups of a printed card are judged at all lengths.

use super::TextContext;
use super::groups::{DigitGroup, DigitGroups};
use super::issuers::{DIGITS, Lengths, is_issued};

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
pub fn contains_card(groups: &DigitGroups<'_>, place: TextContext) -> bool {
    let alone = (0..groups.all.len()).any(|at| is_alone(groups, at, place));
    alone || is_grouped(groups, place) || (place == TextContext::Card && is_whole(groups))
}

/// Whether several texts, each a part, form one card number and nothing else.
pub fn is_split(parts: &DigitGroups<'_>, place: TextContext) -> bool {
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
