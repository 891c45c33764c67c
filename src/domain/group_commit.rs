//! Batch delay of writes to the ledger: how long a write may wait so that one commit serves many.
//!
//! A statement costs as much as ten of its rows, so writes that no request waits for are worth batching. Processor time
//! that the ledger saves is free for the next start. Writes that are latency-critical are not delayed: those of a
//! request that may be sent now, or of a payment that was active only briefly. See
//! `docs/decisions/0026-group-commit.md`.

use std::time::Duration;

/// Longest batch delay of a write.
pub const MAX_DELAY: Duration = Duration::from_millis(10);
/// Shorter delays become zero, because timers count whole milliseconds.
const MIN_DELAY: Duration = Duration::from_millis(2);
/// A write whose request is sent later may wait for this part of the time that is left.
const LEAD_DIVISOR: u32 = 10;
/// An outcome, and its worker slot, may wait for this part of the time that the payment was active.
const ACTIVE_DIVISOR: u32 = 20;

/// Batch delay of a request that is recorded `lead` before its start.
pub fn delay_before_send(lead: Duration) -> Duration {
    bounded_delay(lead / LEAD_DIVISOR)
}

/// Batch delay of the outcome of a payment that was active for this long.
pub fn delay_after_response(active_for: Duration) -> Duration {
    bounded_delay(active_for / ACTIVE_DIVISOR)
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
        for (active_ms, waits_ms) in [(0, 0), (5, 0), (39, 0), (40, 2), (200, 10), (60_000, 10)] {
            assert_eq!(delay_after_response(ms(active_ms)), ms(waits_ms), "{active_ms} ms active");
        }
    }
}
