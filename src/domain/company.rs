//! How long a write to the ledger may wait for company, so that one commit does for many.
//!
//! A statement costs as much as ten of its rows, so what nobody waits for is worth gathering: processor time that the
//! ledger does not use is there for the next start. Refuses to delay what somebody waits for: a request that may leave at
//! once, or a payment that has hardly been in hand.

use std::time::Duration;

/// Longest time that a write waits for company.
pub const LONGEST: Duration = Duration::from_millis(10);
/// What could wait for less goes at once: timers count whole milliseconds.
const SHORTEST: Duration = Duration::from_millis(2);
/// A write whose request leaves later waits for this part of the time that is left.
const OF_LEAD: u32 = 10;
/// An outcome waits for this part of the time that its payment has been in hand, and so has its place in the pool.
const OF_IN_HAND: u32 = 20;

/// Of a request that is written down so long before its start.
#[must_use]
pub fn before_start(lead: Duration) -> Duration {
    worth(lead / OF_LEAD)
}

/// Of the outcome of a payment that has been in hand so long.
#[must_use]
pub fn after_answer(in_hand: Duration) -> Duration {
    worth(in_hand / OF_IN_HAND)
}

fn worth(wait: Duration) -> Duration {
    if wait < SHORTEST { Duration::ZERO } else { wait.min(LONGEST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_waits_for_waits() {
        let ms = Duration::from_millis;
        for (lead_ms, waits_ms) in [(0, 0), (19, 0), (20, 2), (80, 8), (100, 10), (250, 10)] {
            assert_eq!(before_start(ms(lead_ms)), ms(waits_ms), "{lead_ms} ms before its start");
        }
        for (in_hand_ms, waits_ms) in [(0, 0), (5, 0), (39, 0), (40, 2), (200, 10), (60_000, 10)] {
            assert_eq!(after_answer(ms(in_hand_ms)), ms(waits_ms), "{in_hand_ms} ms in hand");
        }
    }
}
