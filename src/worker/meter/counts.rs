//! Snapshots of a lane's counters, for the overview and for the metrics.
//!
//! Counts run since the process started and are never reset; each reader takes its own differences.

use std::sync::atomic::Ordering;

use super::buckets::Distribution;
use super::decisions::RecordedDecision;
use super::lane::{LaneMeter, RefusalLabels, WAITS_MS};
use crate::domain::job::JobField;

/// Figures of a lane for the overview, since the process started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Requests begun.
    pub sent_total: u64,
    /// Requests that the provider throttled although the limits allowed them.
    pub throttled_total: u64,
    /// Requests without a response yet.
    pub in_flight: u64,
    /// Messages taken from the queue and not finished.
    pub active: u64,
    pub permit_waits: Histogram,
    /// At most 50, newest first.
    pub decisions: Vec<RecordedDecision>,
}

/// Waits by their length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Upper bounds in milliseconds, ascending.
    pub bounds_ms: &'static [u64],
    /// One count per bound, and one of what exceeds the last; not cumulative.
    pub counts: Vec<u64>,
}

/// All other counts of a lane, since the process started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneCounts {
    pub granted: u64,
    /// Permits released unused, by reason.
    pub returned: Vec<(&'static str, u64)>,
    pub redelivered: u64,
    /// Jobs sent that some limits or rules did not count, by the field that they lack.
    pub uncounted: Vec<(JobField, u64)>,
    /// Jobs that wait for a permit now.
    pub waiting: u64,
    /// By status class.
    pub answers: Vec<(&'static str, u64)>,
    /// By final state.
    pub outcomes: Vec<(&'static str, u64)>,
    pub refused: Vec<(RefusalLabels, u64)>,
    /// By reason: delayed, or requeued.
    pub requeues: Vec<(&'static str, u64)>,
    /// By reason.
    pub rejected: Vec<(&'static str, u64)>,
    pub permit_waits: Distribution,
    /// All starts.
    pub lateness: Distribution,
    /// Starts that lay ahead when their permit was granted; the others begin as soon as they are recorded.
    pub lateness_ahead: Distribution,
    pub holds: Distribution,
    pub requests: Distribution,
    pub jobs: Distribution,
}

impl LaneMeter {
    /// The figures for the overview.
    pub fn figures(&self) -> LaneFigures {
        LaneFigures {
            sent_total: self.sent.load(Ordering::Relaxed),
            throttled_total: self.throttled.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            active: self.active.load(Ordering::Relaxed),
            permit_waits: Histogram { bounds_ms: &WAITS_MS, counts: self.permit_waits.read().counts },
            decisions: self.decisions.read(),
        }
    }

    /// Jobs sent that some limits or rules did not count, by the field that they lack.
    pub fn uncounted(&self) -> Vec<(JobField, u64)> {
        self.uncounted.read()
    }

    /// All other counts.
    pub fn counts(&self) -> LaneCounts {
        // The part is read before the whole, so that it is never larger.
        let lateness_ahead = self.lateness_ahead.read();
        LaneCounts {
            granted: self.granted.load(Ordering::Relaxed),
            returned: self.returned.read(),
            redelivered: self.redelivered.load(Ordering::Relaxed),
            uncounted: self.uncounted(),
            waiting: self.waiting.load(Ordering::Relaxed),
            answers: self.answers.read(),
            outcomes: self.outcomes.read(),
            refused: self.refused.read(),
            requeues: self.requeues.read(),
            rejected: self.rejected.read(),
            permit_waits: self.permit_waits.read(),
            lateness: self.lateness.read(),
            lateness_ahead,
            holds: self.holds.read(),
            requests: self.requests.read(),
            jobs: self.jobs.read(),
        }
    }
}
