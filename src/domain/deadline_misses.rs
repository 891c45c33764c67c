//! Streak of permits that missed their deadline: when it says that the ledger has stalled, the lane takes no jobs for a
//! while.
//!
//! A single miss means that a burst was too large, which [`super::persist_window`] corrects. A pause for each miss
//! would leave the limit unused. So neither one miss nor many that come together cause a pause.

use std::time::Duration;

/// Time for which the lane takes no jobs after a streak: the database must catch up first.
pub const DEADLINE_MISS_PAUSE: Duration = Duration::from_secs(1);
/// Misses in a row that make a streak, …
const MISSES_MIN: u32 = 3;
/// … if they span at least this time.
const MISSES_SPAN: Duration = Duration::from_millis(500);

/// Permits that missed their deadline since the last that met it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissStreak {
    since: Option<Duration>,
    misses: u32,
}

impl MissStreak {
    /// Records a permit that was persisted in time, which ends the streak.
    pub fn record_on_time(&mut self) {
        *self = Self::default();
    }

    /// Records a miss at `now` (any monotonic clock). True: the lane should pause, and a new streak begins.
    pub fn record_miss(&mut self, now: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        self.misses += 1;
        let stalled = self.misses >= MISSES_MIN && now.saturating_sub(since) >= MISSES_SPAN;
        if stalled {
            self.record_on_time();
        }
        stalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(events: &[(u64, bool)]) -> Vec<u64> {
        let mut streak = MissStreak::default();
        let mut pauses = Vec::new();
        for (at_ms, in_time) in events {
            if *in_time {
                streak.record_on_time();
            } else if streak.record_miss(Duration::from_millis(*at_ms)) {
                pauses.push(*at_ms);
            }
        }
        pauses
    }

    #[test]
    fn lane_pauses_after_a_streak_of_misses() {
        let burst: Vec<(u64, bool)> = (0..1_000).map(|number| (60 + number / 10, false)).collect();
        for (events, expected, why) in [
            (&[(60, false)][..], &[][..], "one"),
            (&burst[..], &[], "a thousand that were granted together"),
            (&[(0, false), (400, true), (600, false), (900, false), (1_000, false)], &[], "one in time between them"),
            (&[(0, false), (600, false)], &[], "two"),
            (&[(0, false), (300, false), (499, false), (500, false)], &[500], "a streak of half a second"),
            (
                &[(0, false), (300, false), (600, false), (900, false), (1_200, false)],
                &[600],
                "a new streak after a pause",
            ),
            (
                &[(0, false), (1, false), (600, false), (601, false), (602, false), (1_102, false)],
                &[600, 1_102],
                "and again",
            ),
        ] {
            assert_eq!(pauses(events), expected, "{why}");
        }
    }
}
