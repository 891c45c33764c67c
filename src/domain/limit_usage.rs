//! Usage of one limit as both limiters tell it: what counts now, and when the used slots are free again.

/// Usage of one limit, read without acquiring anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUsage {
    /// Index of the limit in the spec.
    pub index: usize,
    /// Uses that count now, including those in flight.
    pub used: u64,
    /// Permits that a shadow limit would have refused, since its state began.
    pub would_have_refused: u64,
    /// Permits that a shadow limit would have delayed.
    pub would_have_waited: u64,
    /// Time until the next permit of cost 1 may start, in microseconds.
    pub retry_us: u64,
    /// Time until all of the limit is free again if nothing more is granted, in microseconds.
    pub reset_us: u64,
    /// Uses that still count after each of [`STILL_USED_STEPS`] equal parts of the window, if nothing more is granted.
    /// Empty without uses, for a window below [`STILL_USED_WINDOW_MIN_US`], and where the algorithm keeps no log.
    pub still_used: Vec<u64>,
}

/// Instants within a window at which [`LimitUsage::still_used`] counts.
pub const STILL_USED_STEPS: u32 = 16;
/// All of a shorter window is free again soon.
pub const STILL_USED_WINDOW_MIN_US: u64 = 10_000_000;

impl LimitUsage {
    /// A limit without uses that grants nothing for this time.
    pub fn unused(index: usize, retry_us: u64) -> Self {
        Self {
            index,
            used: 0,
            would_have_refused: 0,
            would_have_waited: 0,
            retry_us,
            reset_us: retry_us,
            still_used: Vec::new(),
        }
    }
}
