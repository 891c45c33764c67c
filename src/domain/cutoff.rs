//! Cut-off of a provider: a time of day in a time zone, until which the day's payments should be sent.
//!
//! The zones are those of the IANA database that is part of the program. So all workers agree, on machines without zone
//! files too. One rule covers the days on which clocks change: the cut-off is the first instant of the day at which the
//! clock of the zone shows the time of day or a later one. Invariant: the next cut-off is later than the instant that is
//! asked about, and at most two days later (held by `next_cutoff_is_close`).

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use jiff::civil::{Date, Time};
use jiff::tz::{AmbiguousOffset, TimeZone, TimeZoneDatabase};
use jiff::{Timestamp, ToSpan as _};

use super::time::EpochMs;

static ZONES: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// A time of day in a time zone, as text: `18:00 Europe/Berlin`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cutoff {
    time: Time,
    zone: TimeZone,
}

/// Why a text is no cut-off, and how to write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCutoff {
    #[error("`{0}` is not a time of day and a time zone: write 18:00 Europe/Berlin")]
    NotTwoParts(String),
    #[error("`{0}` is not a time of day: write 00:00 to 23:59, such as 18:00")]
    NoTimeOfDay(String),
    #[error("`{0}` is not a time zone: write its name in the IANA database, such as Europe/Berlin or UTC")]
    UnknownZone(String),
}

impl FromStr for Cutoff {
    type Err = InvalidCutoff;

    fn from_str(text: &str) -> Result<Self, InvalidCutoff> {
        let Some((time, zone)) = text.split_once(' ') else { return Err(InvalidCutoff::NotTwoParts(text.to_owned())) };
        let time = time_of_day(time).ok_or_else(|| InvalidCutoff::NoTimeOfDay(time.to_owned()))?;
        let found = ZONES.get(zone).ok().filter(|zone| !zone.is_unknown() && zone.iana_name().is_some());
        let zone = found.ok_or_else(|| InvalidCutoff::UnknownZone(zone.to_owned()))?;
        Ok(Self { time, zone })
    }
}

/// Reads `18:00`: two digits each.
fn time_of_day(text: &str) -> Option<Time> {
    let (hour, minute) = text.split_once(':')?;
    let number = |digits: &str| {
        let is_plain = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|_| is_plain)
    };
    Time::new(number(hour)?, number(minute)?, 0, 0).ok()
}

impl fmt::Display for Cutoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zone = self.zone.iana_name().unwrap_or("UTC");
        write!(f, "{:02}:{:02} {zone}", self.time.hour(), self.time.minute())
    }
}

impl Cutoff {
    /// The next cut-off after this instant; `None` at the end of the calendar.
    pub fn next_after(&self, now: EpochMs) -> Option<EpochMs> {
        let now = Timestamp::from_millisecond(now.0).ok()?;
        let today = self.zone.to_datetime(now).date();
        // A change of clocks at midnight may put a cut-off on the day beside its own.
        let days = (-1..=2).filter_map(|days: i64| today.checked_add(days.days()).ok());
        let instants = days.filter_map(|day| self.instant_on(day));
        instants.filter(|at| *at > now).min().map(|at| EpochMs(at.as_millisecond()))
    }

    /// The first instant of the day at which the clock shows the time of day or a later one.
    fn instant_on(&self, day: Date) -> Option<Timestamp> {
        let ambiguous = self.zone.to_ambiguous_timestamp(day.to_datetime(self.time));
        match ambiguous.offset() {
            AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => ambiguous.earlier().ok(),
            // The clock skips the time of day: the instant of the change.
            AmbiguousOffset::Gap { .. } => {
                let after = ambiguous.later().ok()?.checked_add(1.nanosecond()).ok()?;
                self.zone.preceding(after).next().map(|change| change.timestamp())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY_MS: i64 = 86_400_000;

    fn ms(text: &str) -> EpochMs {
        EpochMs(text.parse::<Timestamp>().unwrap().as_millisecond())
    }

    #[test]
    fn next_cutoff_follows_the_clock_of_its_zone() {
        for (cutoff, now, wanted) in [
            ("18:00 UTC", "2026-11-27T17:59:59.999Z", "2026-11-27T18:00:00Z"),
            ("18:00 UTC", "2026-11-27T18:00:00Z", "2026-11-28T18:00:00Z"),
            ("00:00 UTC", "2026-12-31T23:59:00Z", "2027-01-01T00:00:00Z"),
            ("18:00 Europe/Berlin", "2026-11-27T16:59:00Z", "2026-11-27T17:00:00Z"),
            ("18:00 Europe/Berlin", "2026-07-01T16:30:00Z", "2026-07-02T16:00:00Z"),
            // The day there is not the day in UTC.
            ("08:00 Asia/Tokyo", "2026-11-27T22:00:00Z", "2026-11-27T23:00:00Z"),
            ("23:30 America/Los_Angeles", "2026-11-27T08:00:00Z", "2026-11-28T07:30:00Z"),
            ("17:30 Asia/Kathmandu", "2026-11-27T11:44:00Z", "2026-11-27T11:45:00Z"),
            // In the night to 29 March, 02:00 to 03:00 is skipped: the clock changes at 01:00 UTC.
            ("01:59 Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T00:59:00Z"),
            ("02:00 Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T01:00:00Z"),
            ("02:30 Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T01:00:00Z"),
            ("03:00 Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T01:00:00Z"),
            ("02:30 Europe/Berlin", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"),
            ("18:00 Europe/Berlin", "2026-03-28T17:00:00Z", "2026-03-29T16:00:00Z"),
            // On 25 October, 02:00 to 03:00 comes twice: the first one counts.
            ("02:30 Europe/Berlin", "2026-10-24T23:00:00Z", "2026-10-25T00:30:00Z"),
            ("02:30 Europe/Berlin", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"),
            ("18:00 Europe/Berlin", "2026-10-24T16:00:00Z", "2026-10-25T17:00:00Z"),
            // In Santiago, the hour after midnight is skipped.
            ("00:15 America/Santiago", "2026-09-06T03:30:00Z", "2026-09-06T04:00:00Z"),
            // Half an hour, in the other half of the year.
            ("02:15 Australia/Lord_Howe", "2026-10-03T15:00:00Z", "2026-10-03T15:30:00Z"),
        ] {
            let read: Cutoff = cutoff.parse().unwrap();
            assert_eq!(read.next_after(ms(now)), Some(ms(wanted)), "{cutoff} after {now}");
            assert_eq!(read.to_string(), cutoff);
        }
    }

    #[test]
    fn other_texts_are_rejected_with_their_fix() {
        for (text, words) in [
            ("", "write 18:00 Europe/Berlin"),
            ("18:00", "write 18:00 Europe/Berlin"),
            ("24:00 UTC", "`24:00` is not a time of day"),
            ("18:60 UTC", "`18:60` is not a time of day"),
            ("6:00 UTC", "`6:00` is not a time of day"),
            ("18:00:00 UTC", "`18:00:00` is not a time of day"),
            ("+8:00 UTC", "`+8:00` is not a time of day"),
            ("18.00 UTC", "`18.00` is not a time of day"),
            ("18:00 ", "`` is not a time zone"),
            ("18:00  UTC", "` UTC` is not a time zone"),
            ("18:00 Europe/Atlantis", "`Europe/Atlantis` is not a time zone"),
            ("18:00 +02:00", "`+02:00` is not a time zone"),
            ("18:00 Etc/Unknown", "is not a time zone"),
        ] {
            let problem = text.parse::<Cutoff>().unwrap_err().to_string();
            assert!(problem.contains(words), "{text}: {problem}");
        }
        assert_eq!("18:00 europe/berlin".parse::<Cutoff>().unwrap().to_string(), "18:00 Europe/Berlin");
    }

    proptest! {
        #[test]
        fn next_cutoff_is_close(
            zone in prop::sample::select(vec!["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"]),
            (hour, minute) in (0..24_u8, 0..60_u8), now in 0..4_102_444_800_000_i64,
        ) {
            let cutoff: Cutoff = format!("{hour:02}:{minute:02} {zone}").parse().unwrap();
            let next = cutoff.next_after(EpochMs(now)).unwrap();
            prop_assert!(next.0 > now && next.0 <= now + 2 * DAY_MS, "{cutoff}: {next:?} after {now}");
            // No cut-off lies between.
            prop_assert_eq!(cutoff.next_after(EpochMs(next.0 - 1)), Some(next));
        }
    }
}
