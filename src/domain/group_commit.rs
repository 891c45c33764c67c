//! How long a write to the ledger may wait for company, so that one commit does for many.
//!
//! A statement costs as much as ten of its rows, so what nobody waits for is worth gathering: processor time that the
//! ledger does not use is there for the next start. Refuses to delay what somebody waits for: a request that may leave at
//! once, or a payment that has hardly been in hand.

use std::time::Duration;

/// Longest time that a write waits for company.
pub const MAX_DELAY: Duration = Duration::from_millis(10);
/// What could wait for less goes at once: timers count whole milliseconds.
const MIN_DELAY: Duration = Duration::from_millis(2);
/// A write whose request leaves later waits for this part of the time that is left.
const LEAD_DIVISOR: u32 = 10;
/// An outcome waits for this part of the time that its payment has been in hand, and so has its place in the pool.
const ACTIVE_DIVISOR: u32 = 20;

/// Of a request that is written down so long before its start.
#[must_use]
pub fn delay_before_send(lead: Duration) -> Duration {
    bounded_delay(lead / LEAD_DIVISOR)
}

/// Of the outcome of a payment that has been in hand so long.
#[must_use]
pub fn delay_after_response(in_hand: Duration) -> Duration {
    bounded_delay(in_hand / ACTIVE_DIVISOR)
}

fn bounded_delay(wait: Duration) -> Duration {
    if wait < MIN_DELAY { Duration::ZERO } else { wait.min(MAX_DELAY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_latency_tolerant_writes_are_delayed() {
        let ms = Duration::from_millis;
        for (lead_ms, waits_ms) in [(0, 0), (19, 0), (20, 2), (80, 8), (100, 10), (250, 10)] {
            assert_eq!(delay_before_send(ms(lead_ms)), ms(waits_ms), "{lead_ms} ms before its start");
        }
        for (in_hand_ms, waits_ms) in [(0, 0), (5, 0), (39, 0), (40, 2), (200, 10), (60_000, 10)] {
            assert_eq!(delay_after_response(ms(in_hand_ms)), ms(waits_ms), "{in_hand_ms} ms in hand");
        }
    }
}
