//! Spread of simultaneous starts: how many starts share a millisecond when a log that counts the start has free slots.
//!
//! Starts that coincide would coincide again one window later, for ever. A thousand calls that find all slots unused
//! would leave as one crowd in every window, and the last of them late. So free slots are used one after the other, a
//! few in each millisecond. This delays a slot in the first window only.
//!
//! A start that has to wait anyway is not moved: its slot was spread when it was acquired. See
//! `docs/decisions/0017-spread-and-time-starts.md`.

use super::counter::Availability;
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::{CounterKind, CounterSpec};
use crate::domain::time::micros_up;

/// Starts that may always share a millisecond: about what two cores can send beside all else.
const PER_MS_MIN: u64 = 2;
/// The starts of a whole limit are spread over this part of its window, …
const WINDOW_DIVISOR: u64 = 2;
/// … and over no longer than this.
const SPREAD_MAX_MS: u64 = 500;

/// The last millisecond in which anything starts, and the uses of this call in it. Valid during a call only.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StartSpreader {
    /// Uses that may share a millisecond; 0: any number.
    per_ms_max: u64,
    ms: u64,
    uses: u64,
}

impl StartSpreader {
    /// A spreader that continues after the latest start in the log, whose uses count longer by the transit jitter. The
    /// share of earlier calls in its millisecond is not known.
    pub fn after(spec: &CounterSpec, tail_ms: u64, jitter_us: u64, now_us: u64) -> Self {
        let spread = spec.kind == CounterKind::Log { granule_ms: 1, held: false } && !spec.shadow && jitter_us > 0;
        let ms = tail_ms.saturating_sub(jitter_us.div_ceil(1_000));
        // It was logged under a larger jitter: nothing is booked so far ahead, so this is no start.
        let ms = if ms > (now_us + micros_up(BOOKING_HORIZON)).div_ceil(1_000) { 0 } else { ms };
        if spread { Self { per_ms_max: max_per_ms(spec), ms, uses: 0 } } else { Self::default() }
    }

    /// The start without a crowd, and the number of permits that start then.
    pub fn spread(&self, found: Availability, cost: u64, now_us: u64) -> Availability {
        if self.per_ms_max == 0 || found.start_us > now_us {
            return found;
        }
        let full = self.uses > 0 && self.uses + cost > self.per_ms_max;
        let ms = if full { self.ms + 1 } else { self.ms };
        let start_us = if found.start_us.div_ceil(1_000) < ms { ms * 1_000 } else { found.start_us };
        let shared = start_us.div_ceil(1_000) == self.ms;
        let room = if shared { self.per_ms_max.saturating_sub(self.uses) } else { self.per_ms_max };
        Availability { start_us, permits: found.permits.min((room / cost).max(1)), ..found }
    }

    /// Counts uses that start at an instant.
    pub fn record_start(&mut self, start_us: u64, uses: u64) {
        if self.per_ms_max == 0 {
            return;
        }
        let ms = start_us.div_ceil(1_000);
        if ms > self.ms {
            (self.ms, self.uses) = (ms, 0);
        }
        self.uses += uses;
    }
}

fn max_per_ms(spec: &CounterSpec) -> u64 {
    let spread_ms = (spec.window_us / 1_000 / WINDOW_DIVISOR).clamp(1, SPREAD_MAX_MS);
    u64::from(spec.max).div_ceil(spread_ms).max(PER_MS_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::limit::AppliesTo;

    const NOW_US: u64 = 1_800_000_000_000_000;
    const JITTER_US: u64 = 50_000;

    fn spec(max: u32, window_ms: u64, kind: CounterKind, shadow: bool) -> CounterSpec {
        let (name, window_us) = ("limit".to_owned(), window_ms * 1_000);
        CounterSpec { name, kind, applies_to: AppliesTo::All, shadow, max, window_us }
    }

    /// A spreader whose latest start is this many milliseconds after now.
    fn after(spec: &CounterSpec, latest_ms: i64) -> StartSpreader {
        StartSpreader::after(spec, ((NOW_US + JITTER_US) / 1_000).saturating_add_signed(latest_ms), JITTER_US, NOW_US)
    }

    fn started(max: u32, window_ms: u64) -> CounterSpec {
        spec(max, window_ms, CounterKind::Log { granule_ms: 1, held: false }, false)
    }

    /// Starts of `permits` permits of one cost, when all slots are free; in microseconds after now.
    fn starts(spreader: &mut StartSpreader, permits: u64, cost: u64) -> Vec<u64> {
        let mut starts = Vec::new();
        while (starts.len() as u64) < permits {
            let left = permits - starts.len() as u64;
            let all = Availability { start_us: NOW_US, origin_ms: 0, permits: left };
            let found = spreader.spread(all, cost, NOW_US);
            assert!(found.start_us >= NOW_US && (1..=left).contains(&found.permits));
            spreader.record_start(found.start_us, cost * found.permits);
            starts.extend((0..found.permits).map(|_| found.start_us - NOW_US));
        }
        starts
    }

    #[test]
    fn spread_is_half_the_window_or_500_ms() {
        for (max, window_ms, in_a_millisecond) in [
            (1, 1_000, 2),
            (100, 1_000, 2),
            (1_000, 1_000, 2),
            (1_001, 1_000, 3),
            (1_000_000, 1_000, 2_000),
            (1_000, 100, 20),
            (1_000, 1, 1_000),
            (60_000, 60_000, 120),
        ] {
            assert_eq!(max_per_ms(&started(max, window_ms)), in_a_millisecond, "{max} in {window_ms} ms");
        }
    }

    #[test]
    fn free_slots_start_one_after_another() {
        for (cost, permits, expected) in [
            (1, 5, vec![0, 0, 1_000, 1_000, 2_000]),
            (2, 3, vec![0, 1_000, 2_000]),
            // A cost above the maximum of a millisecond has one for itself.
            (3, 3, vec![0, 1_000, 2_000]),
        ] {
            let mut spreader = after(&started(100, 1_000), -900);
            assert_eq!(starts(&mut spreader, permits, cost), expected, "cost {cost}");
        }
    }

    #[test]
    fn next_call_continues_after_the_last_start() {
        let mut spreader = after(&started(100, 1_000), 3);
        assert_eq!(starts(&mut spreader, 3, 1), [3_000, 3_000, 4_000]);
        let mut long_ago = after(&started(100, 1_000), -3);
        assert_eq!(starts(&mut long_ago, 3, 1), [0, 0, 1_000]);
    }

    #[test]
    fn only_immediate_starts_of_exact_logs_are_spread() {
        let booked = Availability { start_us: NOW_US + 7, origin_ms: 9, permits: 40 };
        let mut spreader = after(&started(100, 1_000), 5);
        spreader.record_start(NOW_US, 50);
        assert_eq!(spreader.spread(booked, 1, NOW_US), booked);
        let now = Availability { start_us: NOW_US, ..booked };
        for kind in [
            CounterKind::Log { granule_ms: 1, held: true },
            CounterKind::Log { granule_ms: 4, held: false },
            CounterKind::Window { offset_us: 0 },
            CounterKind::Bucket { interval: 1_024, debt: false },
        ] {
            let spreader = after(&spec(100, 1_000, kind, false), 5);
            assert_eq!(spreader.spread(now, 1, NOW_US), now, "{kind:?}");
        }
        let watched = CounterSpec { shadow: true, ..started(100, 1_000) };
        assert_eq!(after(&watched, 5).spread(now, 1, NOW_US), now);
        assert_eq!(
            StartSpreader::after(&started(100, 1_000), NOW_US / 1_000 + 5, 0, NOW_US).spread(now, 1, NOW_US),
            now,
            "no `grant`"
        );
    }
}
