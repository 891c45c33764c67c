//! Faults of this process, such as missing descriptors: the lane pauses its intake, and the log says why.
//!
//! Every job meets such a fault, so the log has one line per fault and minute. `status` shows the lane's state.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::lane::LaneContext;
use super::meter::{DecisionKind, LaneDecision};
use crate::domain::local_fault::LocalFault;
use crate::fleet::report::PauseCause;

/// Least time between two log lines about one fault.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// When each fault of this process was last logged.
#[derive(Debug, Default)]
pub struct LocalFaults(Mutex<BTreeMap<String, Instant>>);

impl LocalFaults {
    /// Whether the fault is to be logged now.
    fn is_due(&self, fault: &str) -> bool {
        let mut logged = self.0.lock();
        logged.retain(|_, at| at.elapsed() < LOG_INTERVAL);
        let is_due = !logged.contains_key(fault);
        logged.entry(fault.to_owned()).or_insert_with(Instant::now);
        is_due
    }
}

/// Pauses the lane's intake for this long; active jobs continue.
pub(super) fn pause_lane(lane: &LaneContext, wait: Duration, fault: &LocalFault) {
    let cause = fault.to_string();
    log(lane, fault, "nothing can be sent: the lane is paused, jobs wait, and no attempt is counted");
    lane.meter.record_decision(LaneDecision::new(DecisionKind::Paused, &cause));
    lane.control.pause_intake(wait, PauseCause::Setup, fault.wait());
}

/// Logs a fault and what follows, unless that was done a moment ago.
pub(super) fn log(lane: &LaneContext, fault: &LocalFault, consequence: &str) {
    let cause = fault.to_string();
    // A fault of a row belongs to its provider, all others to the process.
    let owner = if matches!(fault, LocalFault::Unbuildable(_)) { lane.name.as_str() } else { "" };
    if lane.worker.local_faults.is_due(&format!("{owner}: {cause}")) {
        tracing::error!(provider = %lane.name, cause, "{consequence}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
