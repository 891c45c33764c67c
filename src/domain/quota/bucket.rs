//! Bucket of a limit: token bucket, GCRA and pacing as one theoretical arrival time with different capacities.
//!
//! Each use moves the instant at which the bucket is empty forward by one interval. There is capacity while that
//! instant is at most the capacity ahead (ITU-T I.371, the virtual scheduling algorithm). An interval is whole parts of
//! a microsecond, rounded up, so nothing is a fraction.

use super::counter::Availability;
use crate::domain::quota_spec::{DEBT_PARTS, INTERVAL_PARTS};

/// Latest time after a use at which a bucket is empty: some four years, half of what the wait of a reply can hold.
pub(super) const AHEAD_MAX_US: u64 = 1 << 47;

/// Buckets are ordered by the instant at which they are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bucket {
    /// Instant at which the bucket is empty: whole microseconds, and parts of one.
    empty_us: u64,
    empty_part: u64,
}

impl Bucket {
    /// The earliest instant at which `cost` fits. With debt, any cost fits where a part of the
    /// bucket is free.
    pub fn find(&self, cost: u64, from_us: u64, interval: u64, max: u32, debt: bool) -> Option<Availability> {
        // With debt, a part of the bucket must be free.
        let needed = if debt { u64::from(max.div_ceil(DEBT_PARTS)) } else { cost };
        if needed > u64::from(max) {
            return None;
        }
        let tolerance = (u64::from(max) - needed) * interval;
        let full = self.empty_us * INTERVAL_PARTS + self.empty_part;
        let start_us = from_us.max(full.saturating_sub(tolerance).div_ceil(INTERVAL_PARTS));
        let room = u64::from(max) * interval - self.backlog(start_us);
        let permits = room / (cost * interval);
        let permits = if debt { permits.max(1) } else { permits };
        Some(Availability { start_us, origin_ms: 0, permits })
    }

    /// Counts a use; returns whether all of it could be counted.
    pub fn consume(&mut self, cost: u64, start_us: u64, interval: u64) -> bool {
        if start_us > self.empty_us || (start_us == self.empty_us && self.empty_part == 0) {
            (self.empty_us, self.empty_part) = (start_us, 0);
        }
        let part = self.empty_part + cost * (interval % INTERVAL_PARTS);
        let whole_us = cost.saturating_mul(interval / INTERVAL_PARTS).saturating_add(part / INTERVAL_PARTS);
        let (empty_us, latest_us) = (self.empty_us.saturating_add(whole_us), start_us + AHEAD_MAX_US);
        let fits = empty_us <= latest_us;
        (self.empty_us, self.empty_part) = if fits { (empty_us, part % INTERVAL_PARTS) } else { (latest_us, 0) };
        fits
    }

    /// Counts a past use from a history; `most` is the bucket's capacity. Without this bound, uses under another
    /// interval or of another limit would pile up for hours. Returns whether all that it holds could be counted.
    pub fn replay(&mut self, cost: u64, instant_us: u64, interval: u64, most: u64) -> bool {
        let (before, mut full) = (*self, Self::default());
        let counted = self.consume(cost, instant_us, interval);
        let can_be_full = full.consume(most, instant_us, interval);
        if *self <= full {
            return counted;
        }
        *self = full.max(before);
        can_be_full
    }

    /// Converts the usage to a new interval; it keeps its size in permits. That may be more than the capacity: starts
    /// are booked ahead, and the capacity may have been lowered. Returns whether all of it could be counted.
    pub fn rescale(&mut self, now_us: u64, old: u64, new: u64) -> bool {
        let uses = self.counted(now_us, old);
        (self.empty_us, self.empty_part) = (now_us, 0);
        self.consume(uses, now_us, new)
    }

    /// Permits that have not drained at an instant, rounded up.
    pub fn counted(&self, now_us: u64, interval: u64) -> u64 {
        self.backlog(now_us).div_ceil(interval.max(1))
    }

    /// Permits that may start now, and the time until the bucket is empty.
    pub fn remaining_and_reset(&self, now_us: u64, interval: u64, max: u32) -> (u64, u64) {
        let backlog = self.backlog(now_us);
        let room = (u64::from(max) * interval).saturating_sub(backlog);
        (room / interval.max(1), backlog.div_ceil(INTERVAL_PARTS))
    }

    /// Distance of the empty instant, in parts.
    fn backlog(&self, at_us: u64) -> u64 {
        if at_us > self.empty_us { 0 } else { (self.empty_us - at_us) * INTERVAL_PARTS + self.empty_part }
    }
}
