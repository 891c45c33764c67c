//! Slots of a concurrency limit: all that no request in flight holds.
//!
//! The leases of [`super::counters`] count the requests in flight. A use that has ended counts for nothing, so there is
//! no log: a released slot is free at once. Two requests that use the same slot do not overlap at the provider, because
//! the second one starts after the response to the first one, or after its lease.

use super::counter::Availability;

/// Slots that are not in flight; below zero after the limit was lowered. Valid during a call only.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeSlots(i64);

impl FreeSlots {
    pub fn of(max: u32, in_flight: u64) -> Self {
        Self(i64::from(max) - in_flight.cast_signed())
    }

    /// Called before the first request of a call.
    pub fn begin_batch(&mut self, max: u32, in_flight: u64) {
        *self = Self::of(max, in_flight);
    }

    /// Finds `cost` slots; `None` if a request in flight has to end before.
    pub fn find(&self, cost: u64, from_us: u64) -> Option<Availability> {
        let permits = self.0.max(0).cast_unsigned() / cost.max(1);
        (permits > 0).then_some(Availability { start_us: from_us, origin_ms: 0, permits })
    }

    pub fn consume(&mut self, cost: u64) {
        self.0 -= cost.cast_signed();
    }
}
