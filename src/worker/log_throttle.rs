//! Throttles of the log: lines about messages, and faults of this process such as missing descriptors.
//!
//! There is one line per lane, reason and minute. The first line about messages is logged as it is; those of the
//! following minute become one line with their number. Metrics count all. Every job meets a fault of the process, so the
//! lane starts no job, and `status` shows that.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::lane::LaneContext;
use super::meter::{DecisionKind, LaneDecision};
use crate::domain::local_fault::LocalFault;
use crate::fleet::report::PauseCause;
use crate::telemetry::repeated::{self, RepeatedLines};

/// Least time between two lines of the same kind.
pub const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Lines that an operator would treat the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LineKind {
    lane: String,
    line: &'static str,
    reason: &'static str,
}

/// When each kind of line was last logged.
#[derive(Debug, Default)]
pub struct LogThrottle(RepeatedLines<LineKind>);

impl LogThrottle {
    /// Whether the line is to be logged now. If not, it is counted.
    pub fn admits(&self, lane: &str, line: &'static str, reason: &'static str) -> bool {
        self.0.admits(LineKind { lane: lane.to_owned(), line, reason })
    }

    /// Logs the number of suppressed lines, one line per kind, for kinds whose last line is at least this old.
    pub fn log_suppressed(&self, at_least: Duration) {
        for (LineKind { lane, line, reason }, count) in self.0.take_suppressed(at_least) {
            tracing::warn!(provider = lane, reason, count, "similar lines suppressed: {line}");
        }
        repeated::log_suppressed(at_least);
    }
}

/// When each fault of this process was last logged.
#[derive(Debug, Default)]
pub struct LocalFaults(Mutex<BTreeMap<String, Instant>>);

impl LocalFaults {
    /// Whether the fault is to be logged now.
    pub(super) fn is_due(&self, fault: &str) -> bool {
        let mut logged = self.0.lock();
        logged.retain(|_, at| at.elapsed() < LOG_INTERVAL);
        let is_due = !logged.contains_key(fault);
        logged.entry(fault.to_owned()).or_insert_with(Instant::now);
        is_due
    }
}

/// Starts nothing in the lane for this long; active jobs continue.
pub(super) fn pause_for_fault(lane: &LaneContext, wait: Duration, fault: &LocalFault) {
    let cause = fault.to_string();
    log_fault(lane, fault, "nothing can be sent: the lane is paused, jobs wait, and no attempt is counted");
    lane.meter.record_decision(LaneDecision::new(DecisionKind::Paused, &cause));
    lane.control.pause_claims(wait, PauseCause::Setup, fault.wait());
}

/// Logs a fault and what follows, unless that was done a moment ago.
pub(super) fn log_fault(lane: &LaneContext, fault: &LocalFault, consequence: &str) {
    let cause = fault.to_string();
    // A fault of a row belongs to its provider, all others to the process.
    let owner = if fault.is_of_setup() { lane.name.as_str() } else { "" };
    if lane.worker.local_faults.is_due(&format!("{owner}: {cause}")) {
        tracing::error!(provider = %lane.name, cause, "{consequence}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_kind_is_logged_once_a_minute() {
        let throttle = LogThrottle::default();
        let counted = |at_least| -> Vec<(String, u64)> {
            throttle.0.take_suppressed(at_least).into_iter().map(|(kind, count)| (kind.lane, count)).collect()
        };
        let log = |lane| throttle.admits(lane, "message rejected", "bad_amount");
        assert_eq!([log("acme"), log("acme"), log("acme"), log("bolt")], [true, false, false, true]);
        assert!(throttle.admits("acme", "message rejected", "secret"));
        assert_eq!(counted(LOG_INTERVAL), []);
        tokio::time::advance(LOG_INTERVAL).await;
        // A line that comes before the count is logged is included in it.
        assert!(!log("acme"));
        assert_eq!(counted(LOG_INTERVAL), [("acme".to_owned(), 3)]);
        // Then a new minute begins; a kind without suppressed lines is removed.
        assert_eq!([log("acme"), log("bolt")], [false, true]);
        assert_eq!(counted(LOG_INTERVAL), []);
        assert_eq!(counted(Duration::ZERO), [("acme".to_owned(), 1)]);
        assert_eq!(counted(Duration::ZERO), []);
        assert!(log("acme"));
    }

    #[tokio::test(start_paused = true)]
    async fn each_fault_is_logged_once_a_minute() {
        let faults = LocalFaults::default();
        let due = || ["descriptors", "threads"].map(|fault| faults.is_due(fault));
        assert_eq!([faults.is_due("descriptors"), faults.is_due("descriptors")], [true, false]);
        assert_eq!(due(), [false, true]);
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!([due(), due()], [[true; 2], [false; 2]]);
    }
}
