//! How far ahead a gate books starts: as far as a permit needs to be usable at its start, and hardly farther.
//!
//! A permit must have arrived, and its request must be committed, before its start; otherwise its slot is idle meanwhile.
//! But a start that is booked is taken from a more urgent job that comes later. So the time follows what calls to the
//! limiter and writes of the ledger take. See `docs/decisions/0046-starts-are-spaced-and-booked-late.md`.

use std::time::Duration;

use super::provider::BOOKING_HORIZON;

/// Least time before a start at which the limiter is asked for it: a busy process wakes up late.
const RETRY_MIN: Duration = Duration::from_millis(20);
/// Most of it, so that a call books something whatever was measured.
const RETRY_MAX: Duration = Duration::from_millis(100);
/// What is measured first: a slow call and a slow write.
const FIRST: Duration = Duration::from_millis(40);
/// Starts that one call books beyond those: fewer calls, for as much more time that a later job may wait.
const STARTS_PER_CALL: Duration = Duration::from_millis(30);
/// Share of the longest time that is left after a shorter one: the next ones are most often no longer.
const DECAY: f64 = 0.95;

/// The longest times lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookingAhead {
    call: Duration,
    write: Duration,
}

impl Default for BookingAhead {
    fn default() -> Self {
        Self { call: FIRST, write: FIRST }
    }
}

impl BookingAhead {
    /// Records the time from a call to its reply.
    pub fn record_call(&mut self, took: Duration) {
        self.call = took.max(self.call.mul_f64(DECAY));
    }

    /// Records the time from a permit's grant until its request was committed.
    pub fn record_write(&mut self, took: Duration) {
        self.write = took.max(self.write.mul_f64(DECAY));
    }

    /// How long before a start the limiter is asked for it, 20 to 100 ms.
    pub fn retry(&self) -> Duration {
        (self.call + self.write).clamp(RETRY_MIN, RETRY_MAX)
    }

    /// How far ahead of a call starts are booked; less than [`BOOKING_HORIZON`].
    pub fn booking(&self) -> Duration {
        (self.retry() + STARTS_PER_CALL).min(BOOKING_HORIZON)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booking_follows_the_longest_times() {
        let ms = Duration::from_millis;
        let mut ahead = BookingAhead::default();
        assert_eq!((ahead.retry(), ahead.booking()), (ms(80), ms(110)));
        for _ in 0..60 {
            ahead.record_call(ms(1));
            ahead.record_write(ms(4));
        }
        assert_eq!((ahead.retry(), ahead.booking()), (ms(20), ms(50)), "a quick store and a quick ledger");
        ahead.record_write(ms(50));
        ahead.record_write(ms(4));
        assert!(ahead.retry() > ms(45), "one slow write is not the last: {ahead:?}");
        ahead.record_call(Duration::from_secs(2));
        assert_eq!((ahead.retry(), ahead.booking()), (ms(100), ms(130)), "never more than a call can book");
    }
}
