//! The pace of several limits together: a function from a number of jobs to the seconds until the last one is sent.
//!
//! A longer limit matters only where the shorter ones let out a whole cycle of it before that cycle ends. Its first window
//! also matters where it is used up before the next one begins. So limits are taken from the shortest to the longest,
//! each built on the one before it. What does not depend on the number of jobs is computed once for all. A search for the
//! jobs that are sent in time then asks often, and each answer is cheap.

use super::{LimitPace, float};

/// Pace of several limits together, and of the lanes without any limit.
pub(super) struct CombinedPace {
    /// Sorted by the length of their cycles.
    limits: Vec<RankedLimit>,
    per_second: f64,
}

/// A limit, and how it relates to the shorter ones.
struct RankedLimit {
    pace: LimitPace,
    /// Seconds in which the shorter limits let out a whole cycle of it, and one job more.
    cycle_sent_in: f64,
    /// The same for what is left of its first cycle.
    first_sent_in: f64,
}

impl RankedLimit {
    /// Whether the shorter limits wait for it in each cycle.
    fn decides(&self) -> bool {
        self.cycle_sent_in < self.pace.cycle
    }

    /// Seconds of the cycles that the shorter limits wait for before the `n`th job, and the job's place after them.
    fn cycle_of(&self, n: u64) -> Option<(f64, u64)> {
        if self.decides() {
            return self.pace.cycle_of(n);
        }
        self.pace.behind_first_window(n).filter(|(begins_in, _)| self.first_sent_in < *begins_in)
    }

    /// At least as many seconds as the shorter limits take to that place, if they take no more than this to the job.
    fn most_in_cycle(&self, shorter: f64) -> f64 {
        if self.decides() { self.cycle_sent_in } else { shorter }
    }
}

impl CombinedPace {
    pub fn new(mut paces: Vec<LimitPace>, per_second: f64) -> Self {
        paces.sort_by(|a, b| a.cycle.total_cmp(&b.cycle));
        let mut combined = Self { limits: Vec::with_capacity(paces.len()), per_second };
        for pace in paces {
            let cycle_sent_in = combined.seconds(pace.per_cycle.saturating_add(1));
            let first_sent_in = combined.seconds(pace.free().saturating_add(1));
            combined.limits.push(RankedLimit { pace, cycle_sent_in, first_sent_in });
        }
        combined
    }

    /// Seconds until the `n`th job is sent.
    pub fn seconds(&self, n: u64) -> f64 {
        self.seconds_by(&self.limits, n)
    }

    /// The same, by some of the shortest limits.
    fn seconds_by(&self, limits: &[RankedLimit], n: u64) -> f64 {
        let Some((limit, shorter)) = limits.split_last() else { return self.seconds_without_limits(n) };
        let alone = limit.pace.permit_time(n);
        let Some((cycles, place)) = limit.cycle_of(n) else { return alone.max(self.seconds_by(shorter, n)) };
        let in_cycle = alone.max(cycles + self.seconds_by(shorter, place));
        // The shorter limits alone are usually far ahead of it. Only if they may not be, they are followed as well.
        if place == n || self.most_seconds_by(shorter, n) <= in_cycle {
            return in_cycle;
        }
        in_cycle.max(self.seconds_by(shorter, n))
    }

    /// At least as many seconds as [`Self::seconds_by`], in one pass: each job takes as long as the last one of its
    /// cycle.
    fn most_seconds_by(&self, limits: &[RankedLimit], n: u64) -> f64 {
        limits.iter().fold(self.seconds_without_limits(n), |shorter, limit| {
            let cycles = limit.cycle_of(n).map_or(0.0, |(cycles, _)| cycles + limit.most_in_cycle(shorter));
            shorter.max(limit.pace.permit_time(n)).max(cycles)
        })
    }

    fn seconds_without_limits(&self, n: u64) -> f64 {
        float(n.saturating_sub(1)) / self.per_second
    }
}

#[cfg(test)]
#[path = "combined_tests.rs"]
mod tests;
