//! Messages of a newer format than this program knows: they wait for a newer worker, at most as long as a payment may.
//!
//! A message that has waited too long goes to `payments.invalid`, where an operator finds it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::domain::job::{InvalidMessage, InvalidReason};
use crate::queue::{Properties, headers};

/// Delay before such a message is looked at again: about one step of a rolling deployment.
pub const RETRY_DELAY: Duration = Duration::from_secs(60);
pub const DELAYED_TEXT: &str = "message of a newer format waits for a newer worker";

/// What to do with such a message.
#[derive(Debug, PartialEq, Eq)]
pub enum NewerVersionAction {
    /// Delay it again, with these properties.
    Delay(Properties),
    TooOld(InvalidMessage),
}

/// Decides by the time when the message was first seen; `max_age` is its row's, if it has one.
pub fn decide(properties: &Properties, version: u64, max_age: Option<Duration>) -> NewerVersionAction {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    decide_at(properties, version, max_age, now)
}

/// A time in the future was not written by a worker: the wait starts again.
fn decide_at(properties: &Properties, version: u64, max_age: Option<Duration>, now: Duration) -> NewerVersionAction {
    let since = headers::waits_since(properties).filter(|since| *since <= now).unwrap_or(now);
    match max_age.filter(|max_age| now - since > *max_age) {
        Some(max_age) => {
            let age = max_age.as_secs();
            let detail = format!("v: {version} is a newer format, and no newer worker came within max_age_s = {age}");
            NewerVersionAction::TooOld(InvalidMessage::new(InvalidReason::NewerVersion, detail))
        }
        None => NewerVersionAction::Delay(headers::with_waits_since(properties.clone(), since)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_version_waits_until_max_age() {
        let at = Duration::from_secs;
        let judge = |properties: &Properties, now: u64| decide_at(properties, 2, Some(at(60)), at(now));
        let NewerVersionAction::Delay(first) = judge(&Properties::default(), 1_000) else { panic!("it has just come") };
        assert_eq!(judge(&first, 1_060), NewerVersionAction::Delay(first.clone()));
        let NewerVersionAction::TooOld(invalid) = judge(&first, 1_061) else { panic!("it has waited for 61 s") };
        assert_eq!(invalid.reason, InvalidReason::NewerVersion);
        assert_eq!(invalid.detail, "v: 2 is a newer format, and no newer worker came within max_age_s = 60");
        // Without a row there is no maximum age.
        assert_eq!(decide_at(&first, 2, None, at(9_000)), NewerVersionAction::Delay(first.clone()));
        for odd in ["99999999999", "soon", "-1"] {
            let mut properties = Properties::default();
            properties.headers.insert(headers::WAITS_SINCE.to_owned(), odd.to_owned());
            assert_eq!(judge(&properties, 1_000), NewerVersionAction::Delay(first.clone()), "{odd}");
        }
        assert_eq!(headers::without_waits_since(first), Properties::default());
    }
}
