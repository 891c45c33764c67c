//! Instants, durations and counts as text for people: `14:03:21 UTC (in 12.4 s)`, `1 job`.
//!
//! All times are UTC and are marked as UTC.

use std::time::Duration;

use jiff::Timestamp;

use super::time::EpochMs;

/// `14:03:21 UTC`; with its date unless that is today's.
pub fn clock(at: EpochMs, now: EpochMs) -> String {
    let [at, now] = [at, now].map(|instant| Timestamp::from_millisecond(instant.0).unwrap_or(Timestamp::MAX));
    let is_today = at.strftime("%F").to_string() == now.strftime("%F").to_string();
    at.strftime(if is_today { "%T UTC" } else { "%F %T UTC" }).to_string()
}

/// `14:03:21 UTC (in 12.4 s)`, or `(12.4 s ago)`.
pub fn instant(at: EpochMs, now: EpochMs) -> String {
    let apart = duration(Duration::from_millis(at.0.abs_diff(now.0)));
    let apart = if at > now { format!("in {apart}") } else { format!("{apart} ago") };
    format!("{} ({apart})", clock(at, now))
}

/// `850 ms`, `12.4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`.
pub fn duration(span: Duration) -> String {
    let (ms, s) = (span.as_millis(), span.as_secs());
    let two = |whole: u64, unit: &str, rest: u64, of: &str| match rest {
        0 => format!("{whole} {unit}"),
        _ => format!("{whole} {unit} {rest} {of}"),
    };
    match s {
        0 => format!("{ms} ms"),
        1..60 if ms.is_multiple_of(1_000) => format!("{s} s"),
        1..60 => format!("{}.{} s", s, ms % 1_000 / 100),
        60..3_600 => two(s / 60, "min", s % 60, "s"),
        3_600..86_400 => two(s / 3_600, "h", s / 60 % 60, "min"),
        _ => two(s / 86_400, "d", s / 3_600 % 24, "h"),
    }
}

/// `1 job`, `2 jobs`, `0 copies`, `3 breaches`.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {}", plural(number, noun))
}

/// The noun in the form that fits the number, for numbers that are formatted elsewhere.
pub fn plural(number: u64, noun: &str) -> String {
    if number == 1 {
        return noun.to_owned();
    }
    let ends_in_any = |endings: &[&str]| endings.iter().any(|ending| noun.ends_with(ending));
    match noun.strip_suffix('y') {
        Some(stem) if !ends_in_any(&["ay", "ey", "oy", "uy"]) => format!("{stem}ies"),
        _ if ends_in_any(&["s", "x", "ch", "sh"]) => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

/// `1st`, `2nd`, `3rd`, `11th`, `21st`.
pub fn ordinal(number: u64) -> String {
    let ending = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

/// The verb that fits the number.
pub fn is_or_are(number: u64) -> &'static str {
    if number == 1 { "is" } else { "are" }
}

/// A window in the unit that limits use: `60 s`, `250 ms`, `1 d`.
pub fn window(window: Duration) -> String {
    let s = window.as_secs();
    if window.subsec_nanos() == 0 && s <= 600 { format!("{s} s") } else { duration(window) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_a_plural() {
        for (number, noun, words) in [
            (0, "job", "0 jobs"),
            (1, "job", "1 job"),
            (2, "job", "2 jobs"),
            (1, "breach", "1 breach"),
            (3, "breach", "3 breaches"),
            (1, "copy", "1 copy"),
            (3, "copy", "3 copies"),
            (2, "key", "2 keys"),
            (2, "process", "2 processes"),
        ] {
            assert_eq!(count(number, noun), words);
        }
        assert_eq!([0, 1, 2].map(is_or_are), ["are", "is", "are"]);
        let ordinals = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "17th", "21st", "102nd", "111th"];
        assert_eq!([1, 2, 3, 4, 11, 12, 13, 17, 21, 102, 111].map(ordinal), ordinals);
    }

    #[test]
    fn instants_and_durations_are_readable() {
        // 2026-11-21 14:03:21 UTC.
        let at = EpochMs(1_795_269_801_000);
        assert_eq!(clock(at, EpochMs(at.0 + 1)), "14:03:21 UTC");
        assert_eq!(clock(at, EpochMs(at.0 + 86_400_000)), "2026-11-21 14:03:21 UTC");
        assert_eq!(clock(EpochMs(951_782_400_000), at), "2000-02-29 00:00:00 UTC");
        assert_eq!(instant(at, EpochMs(at.0 - 12_432)), "14:03:21 UTC (in 12.4 s)");
        assert_eq!(instant(at, EpochMs(at.0 + 850)), "14:03:21 UTC (850 ms ago)");
        for (ms, words) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (1_000, "1 s"),
            (12_432, "12.4 s"),
            (60_000, "1 min"),
            (200_000, "3 min 20 s"),
            (7_500_000, "2 h 5 min"),
            (273_600_000, "3 d 4 h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), words);
        }
        assert_eq!(window(Duration::from_secs(60)), "60 s");
        assert_eq!(window(Duration::from_millis(250)), "250 ms");
        assert_eq!(window(Duration::from_secs(86_400)), "1 d");
    }
}
