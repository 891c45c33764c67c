//! The end of a limit's temporary rate or of an account's rule, as an operator writes it: a time of day, an instant, or `none`.
//!
//! A time of day is read as a provider's cut-off: the next instant at which the clock of its zone shows it. Without a
//! zone it has the zone of the provider's cut-off, or else UTC.

use std::str::FromStr;

use jiff::Timestamp;

use crate::domain::cutoff::Cutoff;
use crate::domain::time::EpochMs;
use crate::ledger::provider_row::ProviderRow;

/// Zone of a time of day without one, for a provider without a cut-off.
const DEFAULT_ZONE: &str = "UTC";
/// The longest time for which a limit can be changed.
const LONGEST_MS: i64 = 366 * 86_400_000;

/// Until when a rate applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Until {
    /// Until the next change.
    NoEnd,
    Instant(EpochMs),
    /// `06:00`, or `06:00 Europe/Berlin`.
    TimeOfDay(String),
}

/// Why a text is no end, and how to write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUntil {
    #[error("`{0}` is no end: write 06:00, 06:00 Europe/Berlin, 2027-01-15T06:00:00Z, or none")]
    Unknown(String),
    #[error("{0}; or write an instant such as 2027-01-15T06:00:00Z, or none")]
    NoTimeOfDay(String),
    #[error("{0} is not in the future")]
    Past(Timestamp),
    #[error("{0} is more than 366 days ahead: leave the end out")]
    TooFar(Timestamp),
}

impl FromStr for Until {
    type Err = InvalidUntil;

    fn from_str(text: &str) -> Result<Self, InvalidUntil> {
        if text == "none" {
            return Ok(Self::NoEnd);
        }
        if let Ok(instant) = text.parse::<Timestamp>() {
            return Ok(Self::Instant(EpochMs(instant.as_millisecond())));
        }
        if !text.contains(':') || text.contains('T') {
            return Err(InvalidUntil::Unknown(text.to_owned()));
        }
        let with_zone = if text.contains(' ') { text.to_owned() } else { format!("{text} UTC") };
        with_zone.parse::<Cutoff>().map_err(|error| InvalidUntil::NoTimeOfDay(error.to_string()))?;
        Ok(Self::TimeOfDay(text.to_owned()))
    }
}

impl Until {
    /// The instant of the end; a time of day without a zone has the zone of the row's cut-off.
    ///
    /// # Errors
    /// As [`Self::instant`].
    pub fn instant_for(&self, now: EpochMs, row: &ProviderRow) -> Result<Option<EpochMs>, InvalidUntil> {
        let of_cutoff = row.cutoff.as_deref().and_then(|cutoff| cutoff.split_once(' '));
        self.instant(now, of_cutoff.map_or(DEFAULT_ZONE, |(_, zone)| zone))
    }

    /// The instant of the end; `None`: there is no end. `zone`: the zone of a time of day without one.
    ///
    /// # Errors
    /// When the instant is over, or too far ahead.
    pub fn instant(&self, now: EpochMs, zone: &str) -> Result<Option<EpochMs>, InvalidUntil> {
        let at = match self {
            Self::NoEnd => return Ok(None),
            Self::Instant(at) => *at,
            Self::TimeOfDay(text) => {
                let text = if text.contains(' ') { text.clone() } else { format!("{text} {zone}") };
                let time = text.parse::<Cutoff>().map_err(|error| InvalidUntil::NoTimeOfDay(error.to_string()))?;
                time.next_after(now).ok_or_else(|| InvalidUntil::Unknown(text.clone()))?
            }
        };
        let written = || Timestamp::from_millisecond(at.0).unwrap_or_default();
        if at <= now {
            return Err(InvalidUntil::Past(written()));
        }
        if at.0 > now.0.saturating_add(LONGEST_MS) {
            return Err(InvalidUntil::TooFar(written()));
        }
        Ok(Some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(text: &str) -> EpochMs {
        EpochMs(text.parse::<Timestamp>().unwrap().as_millisecond())
    }

    #[test]
    fn end_is_the_next_instant_of_its_clock() {
        let now = ms("2026-11-27T20:00:00Z");
        for (text, zone, wanted) in [
            ("06:00", "UTC", "2026-11-28T06:00:00Z"),
            ("06:00", "Europe/Berlin", "2026-11-28T05:00:00Z"),
            ("21:30", "UTC", "2026-11-27T21:30:00Z"),
            ("06:00 America/New_York", "Europe/Berlin", "2026-11-28T11:00:00Z"),
            ("2026-11-28T06:00:00+01:00", "UTC", "2026-11-28T05:00:00Z"),
            ("2026-11-27T20:00:00.001Z", "UTC", "2026-11-27T20:00:00.001Z"),
        ] {
            let until: Until = text.parse().unwrap();
            assert_eq!(until.instant(now, zone), Ok(Some(ms(wanted))), "{text}");
        }
        assert_eq!("none".parse::<Until>().unwrap().instant(now, "UTC"), Ok(None));
    }

    #[test]
    fn other_ends_are_rejected_with_their_fix() {
        for (text, words) in [
            ("", "is no end: write 06:00"),
            ("tomorrow", "write 06:00, 06:00 Europe/Berlin"),
            ("6:00", "`6:00` is not a time of day: write 00:00 to 23:59"),
            ("24:00", "`24:00` is not a time of day"),
            ("06:00 Mars", "`Mars` is not a time zone"),
            ("2026-11-28T06:00:00", "is no end"),
        ] {
            let problem = text.parse::<Until>().unwrap_err().to_string();
            assert!(problem.contains(words), "{text}: {problem}");
        }
        let now = ms("2026-11-27T20:00:00Z");
        for (text, words) in [("2026-11-27T20:00:00Z", "is not in the future"), ("2028-01-01T00:00:00Z", "366 days")] {
            let problem = text.parse::<Until>().unwrap().instant(now, "UTC").unwrap_err().to_string();
            assert!(problem.contains(words), "{text}: {problem}");
        }
    }
}
