//! What a lane has counted, read: for an overview and for the metrics.
//!
//! Refuses to reset: counts run since the process began, and each reader takes its own differences.

use std::sync::atomic::Ordering;

use super::buckets::Distribution;
use super::decisions::RecordedDecision;
use super::lane::{LaneMeter, RefusalLabels, WAITS_MS};
use crate::domain::job::JobField;

/// What an overview of a lane shows, since the process began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Requests begun.
    pub sent_total: u64,
    /// Those that the provider refused though we had allowed them.
    pub throttled_total: u64,
    /// Requests without an answer yet.
    pub in_flight: u64,
    /// Messages taken from the queue and not finished.
    pub in_hand: u64,
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

/// Everything else that is counted, since the process began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneCounts {
    pub granted: u64,
    /// Permits given back unused, by reason.
    pub returned: Vec<(&'static str, u64)>,
    pub redelivered: u64,
    /// Jobs sent that passed limits or rules uncounted, by the field that they lack.
    pub uncounted: Vec<(JobField, u64)>,
    /// Jobs that wait for a permit now.
    pub waiting: u64,
    /// By class of status.
    pub answers: Vec<(&'static str, u64)>,
    /// By final state.
    pub outcomes: Vec<(&'static str, u64)>,
    pub refused: Vec<(RefusalLabels, u64)>,
    /// By reason: parked for a while, or handed back to the queue.
    pub requeues: Vec<(&'static str, u64)>,
    /// By reason.
    pub rejected: Vec<(&'static str, u64)>,
    pub permit_waits: Distribution,
    /// Of all starts.
    pub lateness: Distribution,
    /// Of those that lay ahead when their permit was granted; the others begin when they have been written down.
    pub lateness_ahead: Distribution,
    pub holds: Distribution,
    pub requests: Distribution,
    pub jobs: Distribution,
}

impl LaneMeter {
    /// What an overview shows.
    #[must_use]
    pub fn figures(&self) -> LaneFigures {
        LaneFigures {
            sent_total: self.sent.load(Ordering::Relaxed),
            throttled_total: self.throttled.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            in_hand: self.in_hand.load(Ordering::Relaxed),
            permit_waits: Histogram { bounds_ms: &WAITS_MS, counts: self.permit_waits.read().counts },
            decisions: self.decisions.read(),
        }
    }

    /// Jobs sent that passed limits or rules uncounted, by the field that they lack.
    #[must_use]
    pub fn uncounted(&self) -> Vec<(JobField, u64)> {
        self.uncounted.read()
    }

    /// Everything else.
    #[must_use]
    pub fn counts(&self) -> LaneCounts {
        // The part before the whole, so that it is never the larger one.
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
