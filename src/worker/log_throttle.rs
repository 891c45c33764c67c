//! Log lines about messages, which may come by the thousand: one per lane, reason and minute, and the others are counted.
//!
//! The first is logged as it is; those of the minute after it are one line, with their number. Metrics count each.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Least time between two lines of the same kind.
pub const EVERY: Duration = Duration::from_secs(60);

/// Lines that differ in nothing that people would act on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    lane: String,
    line: &'static str,
    reason: &'static str,
}

#[derive(Clone, Copy, Debug)]
struct Logged {
    at: Instant,
    /// How many were not logged since.
    unsaid: u64,
}

/// When each kind of line was last logged.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<BTreeMap<Kind, Logged>>);

impl LogThrottle {
    /// Whether the log is to say this now. If not, it is counted.
    pub fn admits(&self, lane: &str, line: &'static str, reason: &'static str) -> bool {
        let mut admitted = false;
        let kind = Kind { lane: lane.to_owned(), line, reason };
        let mut kinds = self.lock();
        let logged = kinds.entry(kind).or_insert_with(|| {
            admitted = true;
            Logged { at: Instant::now(), unsaid: 0 }
        });
        if !admitted {
            logged.unsaid += 1;
        }
        admitted
    }

    /// Logs the numbers of those that were not logged, a kind at a time, where the last line is at least so old.
    pub fn log_counted(&self, at_least: Duration) {
        for (Kind { lane, line, reason }, count) in self.counted(at_least) {
            tracing::warn!(provider = lane, reason, count, "more of the same since the last line of it: {line}");
        }
    }

    fn counted(&self, at_least: Duration) -> Vec<(Kind, u64)> {
        let mut kinds = self.lock();
        let is_due = |logged: &Logged| logged.at.elapsed() >= at_least;
        kinds.retain(|_, logged| logged.unsaid > 0 || !is_due(logged));
        let due = kinds.iter_mut().filter(|(_, logged)| logged.unsaid > 0 && is_due(logged));
        due.map(|(kind, logged)| {
            let count = logged.unsaid;
            *logged = Logged { at: Instant::now(), unsaid: 0 };
            (kind.clone(), count)
        })
        .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, Logged>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_kind_has_one_line_a_minute_and_loses_none() {
        let throttle = LogThrottle::default();
        let counted = |at_least| -> Vec<(String, u64)> {
            throttle.counted(at_least).into_iter().map(|(kind, count)| (kind.lane, count)).collect()
        };
        let say = |lane| throttle.admits(lane, "message is no job", "bad_amount");
        assert_eq!([say("acme"), say("acme"), say("acme"), say("bolt")], [true, false, false, true]);
        assert!(throttle.admits("acme", "message is no job", "secret"));
        assert_eq!(counted(EVERY), []);
        tokio::time::advance(EVERY).await;
        // Whoever comes before the count is told is in it.
        assert!(!say("acme"));
        assert_eq!(counted(EVERY), [("acme".to_owned(), 3)]);
        // Its minute begins anew; a kind of which nothing is left is forgotten.
        assert_eq!([say("acme"), say("bolt")], [false, true]);
        assert_eq!(counted(EVERY), []);
        assert_eq!(counted(Duration::ZERO), [("acme".to_owned(), 1)]);
        assert_eq!(counted(Duration::ZERO), []);
        assert!(say("acme"));
    }
}
