//! Virtual clock of a run: microseconds on the limiter's clock, and the same instants as the gate's core counts them.
//!
//! The core computes with differences of monotonic instants only, so any instant can be the origin.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::time::micros_up;

#[derive(Clone, Copy, Debug)]
pub(super) struct VirtualClock {
    start_us: u64,
    origin: Instant,
}

impl VirtualClock {
    pub fn new(start_us: u64) -> Self {
        Self { start_us, origin: Instant::now() }
    }

    pub fn instant(&self, at_us: u64) -> Instant {
        self.origin + Duration::from_micros(at_us.saturating_sub(self.start_us))
    }

    /// The first whole microsecond at or after this instant.
    pub fn micros(&self, at: Instant) -> u64 {
        self.start_us + micros_up(at.saturating_duration_since(self.origin))
    }
}
