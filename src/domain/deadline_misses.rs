//! When permits that come too late say that the ledger stands still, so that a lane takes nothing for a while.
//!
//! One that came too late says that a burst was too large, which [`super::write_pace`] mends; a lane that rested for each
//! would leave its limit unused. Refuses to judge by one, or by many that were late together.

use std::time::Duration;

/// How long a lane takes nothing then: what is slow must catch up first.
pub const DEADLINE_MISS_PAUSE: Duration = Duration::from_secs(1);
/// So many in a row, with none in time between them,
const MISSES_MIN: u32 = 3;
/// over so long.
const MISSES_SPAN: Duration = Duration::from_millis(500);

/// Permits that came too late since the last that came in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissStreak {
    since: Option<Duration>,
    misses: u32,
}

impl MissStreak {
    /// One was written down in time.
    pub fn record_on_time(&mut self) {
        *self = Self::default();
    }

    /// One came too late at `now` on any monotonic clock; whether the lane had better rest. After a rest a new row begins.
    #[must_use]
    pub fn record_miss(&mut self, now: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        self.misses += 1;
        let stands_still = self.misses >= MISSES_MIN && now.saturating_sub(since) >= MISSES_SPAN;
        if stands_still {
            self.record_on_time();
        }
        stands_still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(events: &[(u64, bool)]) -> Vec<u64> {
        let mut row = MissStreak::default();
        let mut rests = Vec::new();
        for (at_ms, in_time) in events {
            if *in_time {
                row.record_on_time();
            } else if row.record_miss(Duration::from_millis(*at_ms)) {
                rests.push(*at_ms);
            }
        }
        rests
    }

    #[test]
    fn lane_pauses_after_a_streak_of_misses() {
        let burst: Vec<(u64, bool)> = (0..1_000).map(|number| (60 + number / 10, false)).collect();
        for (events, expected, why) in [
            (&[(60, false)][..], &[][..], "one"),
            (&burst[..], &[], "a thousand that were granted together"),
            (&[(0, false), (400, true), (600, false), (900, false), (1_000, false)], &[], "one in time between them"),
            (&[(0, false), (600, false)], &[], "two"),
            (&[(0, false), (300, false), (499, false), (500, false)], &[500], "a row of half a second"),
            (&[(0, false), (300, false), (600, false), (900, false), (1_200, false)], &[600], "a new row after a rest"),
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
