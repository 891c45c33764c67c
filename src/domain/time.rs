//! Instants and their rounding: microseconds on the limiter's clock, milliseconds on the ledger's.
//!
//! It reads no clock. Every conversion names its rounding: a wait that is rounded down becomes a hot loop, and a
//! release that is rounded down becomes a breach of a limit.

use std::time::Duration;

/// An instant on the limiter's clock, in microseconds since the Unix epoch (Redis `TIME`).
///
/// A Lua number holds it exactly until the year 2255 (2^53 µs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl Micros {
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros_up(duration)))
    }

    /// Time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// An instant on the ledger's clock, in milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpochMs(pub i64);

impl EpochMs {
    /// 0001-01-01T00:00:00Z, the first instant that RFC 3339 and both databases can write.
    pub const FIRST: Self = Self(-62_135_596_800_000);
    /// The last instant before 9999-12-30T22:00:00Z, the first second that jiff parses but cannot build from
    /// milliseconds.
    pub const LAST: Self = Self(253_402_207_199_999);

    /// Whether the instant can be stored and written as text. Constraint `instants_are_finite` of the database checks
    /// the same.
    pub fn is_writable(self) -> bool {
        (Self::FIRST..=Self::LAST).contains(&self)
    }

    /// Whole milliseconds of the duration count. Saturates.
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)))
    }
}

/// Whole microseconds, rounded up.
pub fn micros_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}

/// Whole microseconds, rounded down.
pub fn micros_down(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Whole milliseconds, rounded up.
pub fn millis_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Whole milliseconds, rounded down.
pub fn millis_down(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Why a text is no duration, and how it should look.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDuration {
    #[error("`{0}` is not a duration: write 250ms, 1s, 5m, 1h or 1d")]
    NoNumber(String),
    #[error("`{0}` has no unit: write {0}ms or {0}s")]
    NoUnit(String),
    #[error("`{0}` is not a unit of time: use ms, s, m, h or d")]
    UnknownUnit(String),
    #[error("`{0}` is too long")]
    TooLong(String),
}

/// Parses `250ms`, `1s`, `5m`, `1h`, `1d`: the duration half of the limit grammar.
pub fn parse_duration(text: &str) -> Result<Duration, InvalidDuration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| InvalidDuration::NoNumber(text.to_owned()))?;
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" => return Err(InvalidDuration::NoUnit(text.to_owned())),
        _ => return Err(InvalidDuration::UnknownUnit(unit.to_owned())),
    };
    let duration = number.checked_mul(unit_ms).map(Duration::from_millis);
    duration.ok_or_else(|| InvalidDuration::TooLong(text.to_owned()))
}

/// The shortest exact text that [`parse_duration`] accepts: `1500ms`, `1s`, `5m`.
pub fn format_duration(duration: Duration) -> String {
    let ms = millis_up(duration);
    for (unit_ms, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
        if ms >= unit_ms && ms.is_multiple_of(unit_ms) {
            return format!("{}{unit}", ms / unit_ms);
        }
    }
    format!("{ms}ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_never_down() {
        assert_eq!(micros_up(Duration::from_nanos(1)), 1);
        assert_eq!(micros_up(Duration::from_nanos(1_000)), 1);
        assert_eq!(millis_up(Duration::from_micros(1_001)), 2);
        assert_eq!(Micros(10).since(Micros(20)), Duration::ZERO);
    }

    #[test]
    fn durations_read_back_as_written() {
        for text in ["250ms", "1s", "90s", "5m", "1h", "1d", "1500ms"] {
            let duration = parse_duration(text).unwrap();
            assert_eq!(parse_duration(&format_duration(duration)).unwrap(), duration, "{text}");
        }
        assert_eq!(format_duration(Duration::from_secs(60)), "1m");
        for bad in ["", "s", "1", "1 s", "-1s", "1.5s", "99999999999999999999d", "1w"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
