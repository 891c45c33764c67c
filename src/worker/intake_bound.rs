//! The bound on the unacknowledged messages that a lane holds: those that it acknowledges in a tenth of a second.
//!
//! Such a message is not available to other workers, and has no place in the fair order. A lane that acknowledges many
//! needs more of them at hand, because each trip to the broker takes time. Worker slots do not count: a message is
//! acknowledged before its request. The bound reads no clock: the worker and the simulation drive it. See `docs/decisions/0021-prefetch-and-acknowledgements.md`.

use std::time::Duration;

use tokio::time::Instant;

/// Bounds of the bound, unless the settings allow fewer.
const PLACES_MIN: u16 = 128;
const PLACES_MAX: u16 = 4_096;
/// Time in which the lane acknowledges as many messages as it holds.
const HELD_S: f64 = 0.1;
/// Time over which acknowledged messages are counted.
const COUNTED: Duration = Duration::from_secs(1);

/// The bound of one lane in one process, which follows its rate.
#[derive(Debug)]
pub struct IntakeBound {
    places: u16,
    counted_since: Instant,
    acknowledged: u32,
}

impl IntakeBound {
    pub fn starting_at(now: Instant) -> Self {
        Self { places: PLACES_MIN, counted_since: now, acknowledged: 0 }
    }

    /// Records that the lane holds a message no more.
    pub fn record_end(&mut self) {
        self.acknowledged = self.acknowledged.saturating_add(1);
    }

    /// Messages that the lane holds at most from now on, out of the most that its settings allow.
    pub fn places(&mut self, most: u16, now: Instant) -> u16 {
        let counted = now.saturating_duration_since(self.counted_since);
        if counted >= COUNTED {
            self.places = next_places(self.places, f64::from(self.acknowledged) / counted.as_secs_f64());
            (self.counted_since, self.acknowledged) = (now, 0);
        }
        self.places.min(most)
    }
}

/// The places at this rate. They change seldom: a change asks the broker for another consumer.
fn next_places(places: u16, acknowledged_per_second: f64) -> u16 {
    let wanted = (acknowledged_per_second * HELD_S).clamp(f64::from(PLACES_MIN), f64::from(PLACES_MAX));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded")]
    let wanted = wanted as u16;
    let is_far = wanted / 2 >= places || wanted <= places / 4;
    if is_far { wanted } else { places }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_the_rate() {
        for (places, per_second, next) in [
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
            assert_eq!(next_places(places, per_second), next, "{places} at {per_second}/s");
        }
    }

    #[test]
    fn settings_bound_the_places() {
        let now = Instant::now();
        for (most, places) in [(5_000, PLACES_MIN), (129, PLACES_MIN), (127, 127), (3, 3)] {
            assert_eq!(IntakeBound::starting_at(now).places(most, now), places, "of {most}");
        }
    }

    /// The places of a lane after some seconds at one rate.
    fn places_after(seconds: u32, per_second: u32) -> u16 {
        let began = Instant::now();
        let mut bound = IntakeBound::starting_at(began);
        for tick in 1..=seconds * 10 {
            (0..per_second / 10).for_each(|_| bound.record_end());
            bound.places(u16::MAX, began + Duration::from_millis(100) * tick);
        }
        bound.places(u16::MAX, began + Duration::from_secs(1) * seconds)
    }

    #[test]
    fn only_whole_seconds_are_counted() {
        assert_eq!(places_after(1, 6_000), 600);
        assert_eq!(places_after(10, 6_000), 600);
        assert_eq!(places_after(10, 600), PLACES_MIN);
        // A second of rest, and the next job: what came before is counted over the whole time.
        let began = Instant::now();
        let mut bound = IntakeBound::starting_at(began);
        (0..12_000).for_each(|_| bound.record_end());
        assert_eq!(bound.places(u16::MAX, began + Duration::from_millis(999)), PLACES_MIN);
        assert_eq!(bound.places(u16::MAX, began + Duration::from_secs(2)), 600);
        assert_eq!(
            bound.places(u16::MAX, began + Duration::from_secs(3)),
            PLACES_MIN,
            "nothing was acknowledged since"
        );
    }
}
