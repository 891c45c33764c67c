//! The bound on the messages that a lane holds: one for each worker slot, and those that it finishes in a tenth of a
//! second.
//!
//! A message that waits for a worker slot is not available to other workers, and has no place in the fair order. A lane
//! that finishes many needs more of them at hand, because each trip to the broker takes time. It reads no clock: the
//! worker and the simulation drive it. See `docs/decisions/0021-prefetch-and-acknowledgements.md`.

use std::time::Duration;

use tokio::time::Instant;

/// Bounds of the messages beyond the worker slots, unless the provider's `bucket_capacity` is less.
const RESERVE_MIN: u16 = 128;
const RESERVE_MAX: u16 = 4_096;
/// Time in which the lane finishes its reserve.
const RESERVE_S: f64 = 0.1;
/// Time over which finished messages are counted.
const COUNTED: Duration = Duration::from_secs(1);

/// The bound of one lane in one process, which follows its rate.
#[derive(Debug)]
pub struct IntakeBound {
    reserve: u16,
    counted_since: Instant,
    finished: u32,
}

impl IntakeBound {
    pub fn starting_at(now: Instant) -> Self {
        Self { reserve: RESERVE_MIN, counted_since: now, finished: 0 }
    }

    /// Records that the lane holds a message no more.
    pub fn record_end(&mut self) {
        self.finished = self.finished.saturating_add(1);
    }

    /// Messages that the lane holds at most from now on, out of the most that its settings allow.
    pub fn places(&mut self, most: u16, workers: u32, now: Instant) -> u16 {
        let places = workers.saturating_add(u32::from(self.reserve(now)));
        u16::try_from(places).map_or(most, |places| places.min(most))
    }

    /// The part of them beyond one for each worker slot.
    fn reserve(&mut self, now: Instant) -> u16 {
        let counted = now.saturating_duration_since(self.counted_since);
        if counted >= COUNTED {
            self.reserve = next_reserve(self.reserve, f64::from(self.finished) / counted.as_secs_f64());
            (self.counted_since, self.finished) = (now, 0);
        }
        self.reserve
    }
}

/// The reserve at this rate. It changes seldom: a change asks the broker for another consumer.
fn next_reserve(reserve: u16, finished_per_second: f64) -> u16 {
    let wanted = (finished_per_second * RESERVE_S).clamp(f64::from(RESERVE_MIN), f64::from(RESERVE_MAX));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded")]
    let wanted = wanted as u16;
    let is_far = wanted / 2 >= reserve || wanted <= reserve / 4;
    if is_far { wanted } else { reserve }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_follows_the_rate() {
        for (reserve, per_second, next) in [
            (128, 0.0, 128),
            (128, 2_559.0, 128),
            (128, 2_560.0, 256),
            (128, 6_000.0, 600),
            (600, 11_990.0, 600),
            (600, 12_000.0, 1_200),
            (600, 1_600.0, 600),
            (600, 1_500.0, 150),
            (512, 0.0, 128),
            (600, 1_000_000.0, 4_096),
            (4_096, f64::MAX, 4_096),
        ] {
            assert_eq!(next_reserve(reserve, per_second), next, "{reserve} at {per_second}/s");
        }
    }

    /// A provider that takes a second answers as many payments as the lane has slots.
    #[test]
    fn slots_are_not_part_of_the_reserve() {
        let now = Instant::now();
        for (most, workers, places) in [
            (5_000, 1_000, 1_128),
            (1_256, 1_000, 1_128),
            (1_100, 1_000, 1_100),
            (3, 32, 3),
            (u16::MAX, u32::MAX, u16::MAX),
        ] {
            assert_eq!(IntakeBound::starting_at(now).places(most, workers, now), places, "{workers} of {most}");
        }
    }

    /// The reserve of a lane after some seconds at one rate.
    fn reserve_after(seconds: u32, per_second: u32) -> u16 {
        let began = Instant::now();
        let mut bound = IntakeBound::starting_at(began);
        for tick in 1..=seconds * 10 {
            (0..per_second / 10).for_each(|_| bound.record_end());
            bound.reserve(began + Duration::from_millis(100) * tick);
        }
        bound.reserve(began + Duration::from_secs(1) * seconds)
    }

    #[test]
    fn only_whole_seconds_are_counted() {
        assert_eq!(reserve_after(1, 6_000), 600);
        assert_eq!(reserve_after(10, 6_000), 600);
        assert_eq!(reserve_after(10, 600), RESERVE_MIN);
        // A second of rest, and the next job: what came before is counted over the whole time.
        let began = Instant::now();
        let mut bound = IntakeBound::starting_at(began);
        (0..12_000).for_each(|_| bound.record_end());
        assert_eq!(bound.reserve(began + Duration::from_millis(999)), RESERVE_MIN);
        assert_eq!(bound.reserve(began + Duration::from_secs(2)), 600);
        assert_eq!(bound.reserve(began + Duration::from_secs(3)), RESERVE_MIN, "nothing was finished since");
    }
}
