//! When the used slots of a sliding limit are free again.
//!
//! A slot returns one cycle after it was used. The limiter says when the first and the last one return, and the requests
//! of the last minutes say how many return between them. A lane with a backlog uses a long window within a part of it,
//! so that its slots also return within a part of the next one.

use super::SENT_STEP;

/// Part of the used slots that is free again at a time.
#[derive(Clone, Debug)]
pub(super) struct ReturnCurve {
    /// Seconds from now at which this part is free again, ascending from 0 to 1.
    points: Vec<(f64, f64)>,
}

impl ReturnCurve {
    /// Evenly from the first to the last, in seconds.
    pub fn even(first_in: f64, last_in: f64) -> Self {
        Self { points: vec![(0.0, first_in), (1.0, last_in)] }
    }

    /// As they were used, by the requests that were sent in each [`SENT_STEP`], the last step first. `None`: they do not
    /// cover the cycle, or the cycle is hardly longer than a step.
    pub fn of_sent(sent_before: &[f64], cycle: f64, first_in: f64, last_in: f64) -> Option<Self> {
        let step = SENT_STEP.as_secs_f64();
        let steps = steps_within(cycle, step);
        let sent = sent_before.get(..steps).filter(|_| cycle >= 2.0 * step)?;
        let (mut returned, mut points, mut age) = (0.0, Vec::with_capacity(steps + 1), cycle);
        points.push((0.0, 0.0));
        for (number, requests) in (0..steps).rev().zip(sent.iter().rev()) {
            let begins = step * steps_as_float(number);
            // Only a part of the oldest step is within the cycle.
            returned += requests * (age - begins) / step;
            age = begins;
            points.push((returned, cycle - age));
        }
        if returned <= 0.0 {
            return None;
        }
        // The reports are a few seconds old, and the limiter is not.
        let last_used = points.iter().find(|(part, _)| *part >= returned).map_or(cycle, |(_, at)| *at);
        let shift = last_in - last_used;
        for (part, at) in &mut points {
            (*part, *at) = (*part / returned, (*at + shift).clamp(first_in, last_in));
        }
        Some(Self { points })
    }

    /// Seconds from now until this part of them is free again.
    pub fn time_of(&self, part: f64) -> f64 {
        let next = self.points.partition_point(|(known, _)| *known < part);
        match (next.checked_sub(1).and_then(|before| self.points.get(before)), self.points.get(next)) {
            (Some((from, from_at)), Some((to, to_at))) => from_at + (part - from) / (to - from) * (to_at - from_at),
            (None, Some((_, at))) | (Some((_, at)), None) => *at,
            (None, None) => 0.0,
        }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and saturates")]
fn steps_within(cycle: f64, step: f64) -> usize {
    (cycle / step).ceil() as usize
}

#[allow(clippy::cast_precision_loss, reason = "at most some hundred")]
fn steps_as_float(steps: usize) -> f64 {
    steps as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_return_a_cycle_after_their_use() {
        // 200 in the last ten seconds, 100 in the second half of those before, as far as reports say.
        let curve = ReturnCurve::of_sent(&[200.0, 100.0, 0.0, 0.0, 0.0, 0.0], 60.0, 0.0, 60.0).unwrap();
        for (part, wanted) in [(1.0 / 3.0, 50.0), (2.0 / 3.0, 55.0), (1.0, 60.0)] {
            assert!((curve.time_of(part) - wanted).abs() < 1e-6, "{part}: {}", curve.time_of(part));
        }
        assert!(curve.time_of(0.001) > 40.0, "{curve:?}");
    }

    #[test]
    fn limiter_knows_the_first_and_the_last_one() {
        // Nothing was sent for ten seconds by the reports; the limiter knows that the last use is seven seconds old.
        let curve = ReturnCurve::of_sent(&[0.0, 300.0, 300.0, 0.0, 0.0, 0.0], 60.0, 38.0, 53.0).unwrap();
        assert_eq!((curve.time_of(0.001).floor(), curve.time_of(0.5), curve.time_of(1.0)), (38.0, 43.0, 53.0));
    }

    #[test]
    fn cycle_that_is_not_covered_has_no_curve() {
        assert!(ReturnCurve::of_sent(&[1.0, 1.0], 30.0, 0.0, 30.0).is_none(), "too few steps");
        assert!(ReturnCurve::of_sent(&[1.0, 1.0], 15.0, 0.0, 15.0).is_none(), "too short a cycle");
        assert!(ReturnCurve::of_sent(&[0.0, 0.0, 0.0], 30.0, 0.0, 30.0).is_none(), "nothing was sent");
        let curve = ReturnCurve::of_sent(&[10.0, 0.0, 10.0], 25.0, 0.0, 25.0).unwrap();
        assert!((curve.time_of(1.0 / 3.0) - 5.0).abs() < 1e-6, "half of the oldest step: {curve:?}");
    }
}
