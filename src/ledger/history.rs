//! The history of each provider in the ledger: samples over time, the runs for which they are complete, and marks.
//!
//! A sample has the counts of its step, which the ledger knows exactly, and the overview's figures at its end. A
//! provider without a change has no new sample, except once an hour ([`SAMPLE_AGAIN_AFTER`]). So between two samples of
//! a run nothing changed, and between two runs nothing is known. One worker of the cluster writes them.

use std::time::Duration;

use serde::Serialize;

/// How long each kind of sample is kept. A little longer than what is shown, so that a full range always has its start.
pub const FINE_RETENTION: Duration = Duration::from_secs(25 * 3_600);
pub const COARSE_RETENTION: Duration = Duration::from_secs(31 * 86_400);

/// An unchanged provider gets a sample again after this long: a reader needs to look back no further.
pub const SAMPLE_AGAIN_AFTER: Duration = Duration::from_secs(3_600);

/// Most marks that are read at once: recorded ones, and changes of settings.
pub const MARKS_MAX: u32 = 200;

/// Longest detail of a mark, in characters.
pub const MARK_DETAIL_MAX: usize = 1_000;

/// The length of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleStep {
    /// Ten seconds.
    Fine,
    /// Five minutes: the sum of fine ones.
    Coarse,
}

impl SampleStep {
    pub const fn seconds(self) -> i64 {
        match self {
            Self::Fine => 10,
            Self::Coarse => 300,
        }
    }

    pub const fn millis(self) -> i64 {
        self.seconds() * 1_000
    }

    pub const fn retention(self) -> Duration {
        match self {
            Self::Fine => FINE_RETENTION,
            Self::Coarse => COARSE_RETENTION,
        }
    }
}

/// One provider over one step. All instants are milliseconds since the Unix epoch, by the ledger's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HistorySample {
    pub provider: String,
    /// End of the step.
    pub at_ms: i64,
    /// Requests that started, and that reached the network.
    pub started: u64,
    /// Payments that succeeded, were declined, expired or were cancelled.
    pub finished: u64,
    /// Responses with status 429.
    pub throttled: u64,
    /// At the end of the step. `None`: a source did not answer.
    pub waiting: Option<u64>,
    pub review: Option<u64>,
    /// Mean rate of the slowest limit.
    pub limit_per_s: Option<f64>,
}

impl HistorySample {
    pub fn has_counts(&self) -> bool {
        self.started > 0 || self.finished > 0 || self.throttled > 0
    }

    /// Whether the figures at the end of the step are those of the other sample.
    pub fn has_figures_of(&self, other: &Self) -> bool {
        (self.waiting, self.review) == (other.waiting, other.review)
            && self.limit_per_s.map(f64::to_bits) == other.limit_per_s.map(f64::to_bits)
    }
}

/// A time for which samples were written without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedRun {
    pub began_at_ms: i64,
    pub recorded_until_ms: i64,
}

/// The ledger's clock, and the last run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryClock {
    pub now_ms: i64,
    pub last: Option<RecordedRun>,
}

/// How the last run changes with new samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunUpdate {
    Extend { last: RecordedRun, until_ms: i64 },
    Begin(RecordedRun),
}

/// An event of a chart, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct HistoryMark {
    /// Empty: all providers.
    pub provider: String,
    pub at_ms: i64,
    pub kind: String,
    /// The worker that reported it.
    pub worker: String,
    pub detail: String,
}
