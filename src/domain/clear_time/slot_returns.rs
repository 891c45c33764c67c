//! When the used slots of a sliding limit are free again.
//!
//! A slot returns one cycle after it was used. The limiter says when the first and the last one return, and how many are
//! still used at some instants between them. A lane with a backlog uses a long window within a part of it, so that its
//! slots also return within a part of the next one.

use std::time::Duration;

use super::{SlotReturns, float};

/// Part of the used slots that is free again at a time.
#[derive(Clone, Debug)]
pub(super) struct ReturnCurve {
    points: Vec<ReturnPoint>,
}

#[derive(Clone, Copy, Debug)]
struct ReturnPoint {
    /// Ascending from 0 to 1.
    part: f64,
    /// Seconds from now.
    at: f64,
}

impl ReturnCurve {
    /// Of so many used slots, as far as the limiter knows it; else evenly over a cycle. None returns later than a cycle.
    pub fn new(returns: Option<&SlotReturns>, used: u64, cycle: Duration) -> Self {
        let Some(returns) = returns else { return Self::even(0.0, cycle.as_secs_f64()) };
        let last_in = returns.last_in.min(cycle);
        let [first_in, last_in] = [returns.first_in.min(last_in), last_in].map(|wait| wait.as_secs_f64());
        let mut curve = Self::even(first_in, last_in);
        let between = returns.still_used.iter().zip(1_u64..).map(|(still_used, number)| ReturnPoint {
            part: float(used.saturating_sub(*still_used)) / float(used.max(1)),
            at: (float(number) * returns.step.as_secs_f64()).clamp(first_in, last_in),
        });
        curve.points.splice(1..1, between);
        curve
    }

    /// From the first to the last, in seconds.
    pub fn even(first_in: f64, last_in: f64) -> Self {
        Self { points: vec![ReturnPoint { part: 0.0, at: first_in }, ReturnPoint { part: 1.0, at: last_in }] }
    }

    /// Seconds from now until this part of them is free again.
    pub fn time_of(&self, part: f64) -> f64 {
        let next = self.points.partition_point(|known| known.part < part);
        match (next.checked_sub(1).and_then(|before| self.points.get(before)), self.points.get(next)) {
            (Some(from), Some(to)) => from.at + (part - from.part) / (to.part - from.part) * (to.at - from.at),
            (None, Some(only)) | (Some(only), None) => only.at,
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(first_s: u64, last_s: u64, still_used: &[u64]) -> ReturnCurve {
        let [first_in, last_in, step, cycle] = [first_s, last_s, 10, 60].map(Duration::from_secs);
        let returns = SlotReturns { first_in, last_in, still_used: still_used.to_vec(), step };
        ReturnCurve::new(Some(&returns), 300, cycle)
    }

    #[test]
    fn slots_return_a_cycle_after_their_use() {
        // 200 of them in the last ten seconds, 100 in the five before.
        let curve = curve(45, 60, &[300, 300, 300, 300, 200, 0]);
        for (part, wanted) in [(0.0, 45.0), (1.0 / 3.0, 50.0), (2.0 / 3.0, 55.0), (1.0, 60.0)] {
            assert!((curve.time_of(part) - wanted).abs() < 1e-6, "{part}: {}", curve.time_of(part));
        }
    }

    /// Most return soon. The others were used at the beginning of a new burst, and return a minute after it.
    #[test]
    fn slots_that_return_soon_do_not_wait_for_a_new_burst() {
        let curve = curve(0, 60, &[200, 110, 10, 10, 10, 0]);
        for (part, least, most) in [(0.3, 0.0, 10.0), (0.96, 20.0, 30.0), (0.97, 50.0, 60.0)] {
            assert!((least..=most).contains(&curve.time_of(part)), "{part}: {}", curve.time_of(part));
        }
    }

    #[test]
    fn first_and_last_one_bound_the_curve() {
        let curve = curve(38, 53, &[300, 300, 300, 280, 150, 0]);
        assert_eq!((curve.time_of(0.0001).floor(), curve.time_of(0.5), curve.time_of(1.0)), (38.0, 50.0, 53.0));
        let unknown = ReturnCurve::new(None, 300, Duration::from_secs(60));
        assert_eq!((unknown.time_of(0.0), unknown.time_of(0.5), unknown.time_of(1.0)), (0.0, 30.0, 60.0));
    }
}
