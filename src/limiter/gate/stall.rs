//! How long nobody of a quota has been granted a permit, and why: the log has a line for each cause and minute.
//!
//! A wait that is known to be long is told at once. Who waits for a limit that is used in full is told too, as information.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::RefusedBy;

/// Shorter ones are no stall.
const WORTH_TELLING: Duration = Duration::from_secs(5);
/// Least time between two lines of one cause.
const EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Stall {
    since: Option<Instant>,
    told: BTreeMap<String, Instant>,
}

/// What is worth a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LongStall {
    pub cause: String,
    /// So far.
    pub lasted: Duration,
    /// From now on, at least.
    pub wait: Duration,
    /// The limits as they are meant to work, and no trouble.
    pub is_usual: bool,
}

impl Stall {
    /// Somebody is granted a permit, or nobody wants one.
    pub fn ends(&mut self) {
        self.since = None;
    }

    /// Nobody passes until then. Says so if it is worth a line now.
    pub fn stands(&mut self, by: &RefusedBy, until: Instant, now: Instant) -> Option<LongStall> {
        let since = *self.since.get_or_insert(now);
        if until.max(now) - since <= WORTH_TELLING {
            return None;
        }
        let (cause, is_usual) = cause(by);
        self.is_news(&cause, now).then(|| LongStall {
            cause,
            lasted: now - since,
            wait: until.saturating_duration_since(now),
            is_usual,
        })
    }

    /// Whether nothing was said of this cause for a minute.
    pub fn is_news(&mut self, cause: &str, now: Instant) -> bool {
        self.told.retain(|_, at| *at + EVERY > now);
        let is_news = !self.told.contains_key(cause);
        if is_news {
            self.told.insert(cause.to_owned(), now);
        }
        is_news
    }
}

fn cause(by: &RefusedBy) -> (String, bool) {
    match by {
        RefusedBy::Limit(name) => (format!("limit `{name}` is used in full"), true),
        RefusedBy::Paused => ("the provider asked for a pause".to_owned(), true),
        RefusedBy::Cold => ("the limiter has lost its state, and what was used is not known yet".to_owned(), false),
        RefusedBy::NeedsHistory => ("what was used of a limit is not known yet".to_owned(), false),
        RefusedBy::StoreAway(problem) => (format!("the limiter cannot be asked: {problem}"), false),
        RefusedBy::StaleSettings => ("the limiter knows newer settings than this process".to_owned(), false),
        RefusedBy::TooCostly { limit, .. } => (format!("limit `{limit}` never admits as much at once"), true),
        RefusedBy::Blocked { account } => (format!("account `{account}` is blocked"), true),
        RefusedBy::Stopping => ("this process stops".to_owned(), true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_told_once_for_each_cause_and_minute() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let away = RefusedBy::StoreAway("gone".to_owned());
        let mut stall = Stall::default();
        // Each wait is short, and together they are not.
        assert_eq!(stall.stands(&away, at(1), at(0)), None);
        assert_eq!(stall.stands(&away, at(5), at(4)), None);
        let told = stall.stands(&away, at(6), at(5)).unwrap();
        assert_eq!((told.lasted, told.wait, told.is_usual), (Duration::from_secs(5), Duration::from_secs(1), false));
        assert!(told.cause.contains("gone"), "{told:?}");
        assert_eq!(stall.stands(&away, at(65), at(64)), None);
        assert!(stall.stands(&away, at(66), at(65)).is_some());
        assert!(stall.stands(&RefusedBy::Cold, at(66), at(65)).is_some(), "another cause");
        stall.ends();
        assert_eq!(stall.stands(&RefusedBy::StaleSettings, at(71), at(66)), None);
        // Known to be long.
        let told = stall.stands(&RefusedBy::Paused, at(72), at(66)).unwrap();
        assert_eq!((told.lasted, told.wait, told.is_usual), (Duration::ZERO, Duration::from_secs(6), true));
    }
}
