//! How long nobody of a quota has been granted a permit, and why: the log has a line for each cause and minute.
//!
//! A wait that is known to be long is told at once. Who waits for a limit that is used in full is told too, as information.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::BlockReason;

/// Shorter ones are no stall.
const STALL_MIN: Duration = Duration::from_secs(5);
/// Least time between two lines of one cause.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct StallMonitor {
    since: Option<Instant>,
    logged_at: BTreeMap<String, Instant>,
}

/// What is worth a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StallReport {
    pub cause: String,
    /// So far.
    pub lasted: Duration,
    /// From now on, at least.
    pub wait: Duration,
    /// The limits as they are meant to work, and no trouble.
    pub is_expected: bool,
}

impl StallMonitor {
    /// A payment is given a permit that it can use, or none wants one.
    pub fn end(&mut self) {
        self.since = None;
    }

    /// Nobody passes until then. Says so if it is worth a line now.
    pub fn observe_block(&mut self, by: &BlockReason, until: Instant, now: Instant) -> Option<StallReport> {
        let (cause, is_expected) = describe(by);
        self.observe(cause, is_expected, until, now)
    }

    /// No payment gets a permit until then, for this cause.
    pub fn observe(&mut self, cause: String, is_expected: bool, until: Instant, now: Instant) -> Option<StallReport> {
        let since = *self.since.get_or_insert(now);
        let (lasted, wait) = (now - since, until.saturating_duration_since(now));
        let is_worth_a_line = until.max(now) - since > STALL_MIN && self.should_log(&cause, now);
        is_worth_a_line.then_some(StallReport { cause, lasted, wait, is_expected })
    }

    /// Whether nothing was said of this cause for a minute.
    pub fn should_log(&mut self, cause: &str, now: Instant) -> bool {
        self.logged_at.retain(|_, at| *at + LOG_INTERVAL > now);
        let is_news = !self.logged_at.contains_key(cause);
        if is_news {
            self.logged_at.insert(cause.to_owned(), now);
        }
        is_news
    }
}

fn describe(by: &BlockReason) -> (String, bool) {
    match by {
        BlockReason::Limit(name) => (format!("limit `{name}` is used in full"), true),
        BlockReason::Paused => ("the provider asked for a pause".to_owned(), true),
        BlockReason::Cold => ("the limiter has lost its state, and what was used is not known yet".to_owned(), false),
        BlockReason::NeedsHistory => ("what was used of a limit is not known yet".to_owned(), false),
        BlockReason::StoreUnavailable(problem) => (format!("the limiter cannot be asked: {problem}"), false),
        BlockReason::StaleSettings => ("the limiter knows newer settings than this process".to_owned(), false),
        BlockReason::Oversized { limit, .. } => (format!("limit `{limit}` never admits as much at once"), true),
        BlockReason::AccountBlocked { account } => (format!("account `{account}` is blocked"), true),
        BlockReason::Stopping => ("this process stops".to_owned(), true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_is_logged_once_per_cause_and_minute() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let away = BlockReason::StoreUnavailable("gone".to_owned());
        let mut stall = StallMonitor::default();
        // Each wait is short, and together they are not.
        assert_eq!(stall.observe_block(&away, at(1), at(0)), None);
        assert_eq!(stall.observe_block(&away, at(5), at(4)), None);
        let told = stall.observe_block(&away, at(6), at(5)).unwrap();
        assert_eq!((told.lasted, told.wait, told.is_expected), (Duration::from_secs(5), Duration::from_secs(1), false));
        assert!(told.cause.contains("gone"), "{told:?}");
        assert_eq!(stall.observe_block(&away, at(65), at(64)), None);
        assert!(stall.observe_block(&away, at(66), at(65)).is_some());
        assert!(stall.observe_block(&BlockReason::Cold, at(66), at(65)).is_some(), "another cause");
        stall.end();
        assert_eq!(stall.observe_block(&BlockReason::StaleSettings, at(71), at(66)), None);
        // Known to be long.
        let told = stall.observe_block(&BlockReason::Paused, at(72), at(66)).unwrap();
        assert_eq!((told.lasted, told.wait, told.is_expected), (Duration::ZERO, Duration::from_secs(6), true));
    }
}
