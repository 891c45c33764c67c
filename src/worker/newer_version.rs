//! Messages of a format that is newer than this program's: they wait for a newer worker, as long as a payment of their row may.
//!
//! Refuses to let one wait for ever: it is then kept in `payments.invalid`, where a person finds it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::domain::job::{Invalid, InvalidReason};
use crate::queue::{Properties, headers};

/// How long such a message waits before it is looked at again: about a rolling deployment's step.
pub const LOOK_AGAIN: Duration = Duration::from_secs(60);
pub const WAITS: &str = "message of a newer format waits for a newer worker";

/// What becomes of such a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Newer {
    /// It waits on, with these properties.
    Waits(Properties),
    TooOld(Invalid),
}

/// Judges one by when it was first seen; `max_age` is its row's, if there is one.
#[must_use]
pub fn judge(properties: &Properties, version: u64, max_age: Option<Duration>) -> Newer {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    judge_at(properties, version, max_age, now)
}

/// A time to come was not written by us: the wait begins anew.
fn judge_at(properties: &Properties, version: u64, max_age: Option<Duration>, now: Duration) -> Newer {
    let since = headers::waits_since(properties).filter(|since| *since <= now).unwrap_or(now);
    match max_age.filter(|max_age| now - since > *max_age) {
        Some(max_age) => {
            let age = max_age.as_secs();
            let detail = format!("v: {version} is a newer format, and no newer worker came within max_age_s = {age}");
            Newer::TooOld(Invalid::new(InvalidReason::NewerVersion, detail))
        }
        None => Newer::Waits(headers::with_waits_since(properties.clone(), since)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_from_when_it_was_first_seen_until_it_is_too_old() {
        let at = Duration::from_secs;
        let judge = |properties: &Properties, now: u64| judge_at(properties, 2, Some(at(60)), at(now));
        let Newer::Waits(first) = judge(&Properties::default(), 1_000) else { panic!("it has just come") };
        assert_eq!(judge(&first, 1_060), Newer::Waits(first.clone()));
        let Newer::TooOld(invalid) = judge(&first, 1_061) else { panic!("it has waited for 61 s") };
        assert_eq!(invalid.reason, InvalidReason::NewerVersion);
        assert_eq!(invalid.detail, "v: 2 is a newer format, and no newer worker came within max_age_s = 60");
        // Without a row nobody says how old it may be.
        assert_eq!(judge_at(&first, 2, None, at(9_000)), Newer::Waits(first.clone()));
        for odd in ["99999999999", "soon", "-1"] {
            let mut properties = Properties::default();
            properties.headers.insert(headers::WAITS_SINCE.to_owned(), odd.to_owned());
            assert_eq!(judge(&properties, 1_000), Newer::Waits(first.clone()), "{odd}");
        }
        assert_eq!(headers::without_waits_since(first), Properties::default());
    }
}
