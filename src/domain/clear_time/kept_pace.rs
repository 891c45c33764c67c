//! The pace that lanes with a backlog have kept lately, as a part of what their limits allowed.
//!
//! A slow database, a busy machine or a slow provider makes lanes slower than their limits. Then the limits alone say too
//! little. So the last [`HORIZON_STEPS`] are looked at: in each [`SENT_STEP`] that was judged, the missing requests count
//! against the pace. What was not judged counts as kept, such as the time without a backlog, or before a cause.
//! So a lane that has just started keeps the pace of its limits, and ten seconds of an outage do not decide an hour.
//!
//! Invariant: within two seconds, the interval of the readouts, the part changes by at most a tenth of itself (held by
//! `part_moves_slowly_at_the_steepest_turns`).

use super::{ClearTimeInput, LimitPace, PaceKind, SENT_STEP, float, limit_paces, steady_rate};

/// Time that is looked at.
const HORIZON_STEPS: usize = 12;
/// Least part of the limits' pace that is assumed. Two seconds are a sixtieth of the time that is looked at, so they move
/// the part by less than a tenth of this.
const PART_MIN: f64 = 0.17;
/// A step counts in full if the longer limits allowed all of the pace, and not if they allowed this part of it: then the
/// order of starts within the step decides.
const ALLOWED_MIN: f64 = 0.5;

/// Jobs per second of lanes that keep this part of their pace. `steady`: jobs per second without any limit.
pub(super) fn kept_per_second(part: f64, limits: &[LimitPace], steady: f64) -> f64 {
    if part < 1.0 { steady.min(part.max(PART_MIN) * full_per_second(limits, steady)) } else { steady }
}

/// Jobs per second that all limits but the longer ones let out.
fn full_per_second(limits: &[LimitPace], steady: f64) -> f64 {
    limits.iter().filter(|limit| limit.is_short()).map(LimitPace::per_second).fold(steady, f64::min)
}

impl ClearTimeInput<'_> {
    /// The part of the limits' pace that was kept lately, at most 1. It is measured by the limits in force, and holds for
    /// proposed ones, too. `judged_before`: the part of each [`SENT_STEP`] until now, 0 to 1, in which the lanes had a
    /// backlog and only their own pace held it back.
    pub fn measured_part(&self, judged_before: &[f64]) -> f64 {
        let Some(steady) = steady_rate(self) else { return 1.0 };
        let limits = limit_paces(self);
        let full = full_per_second(&limits, steady) * SENT_STEP.as_secs_f64();
        let judged = judged_before.iter().take(HORIZON_STEPS).enumerate();
        let missed = judged.map(|(number, part)| part.clamp(0.0, 1.0) * missed_part(self, &limits, full, number));
        #[allow(clippy::cast_precision_loss, reason = "a dozen")]
        let horizon = HORIZON_STEPS as f64;
        (1.0 - missed.sum::<f64>() / horizon).max(PART_MIN)
    }
}

/// The part of its pace that the lanes missed in one step, 0 to 1.
fn missed_part(input: &ClearTimeInput<'_>, limits: &[LimitPace], full: f64, number: usize) -> f64 {
    let Some(sent) = input.sent_before.get(number) else { return 0.0 };
    let earlier = input.sent_before.get(number + 1..).unwrap_or_default();
    let mut longer = limits.iter().filter(|limit| !limit.is_short()).map(|limit| limit.left_after(earlier));
    let allowed = longer.try_fold(full, |least: f64, left| Some(least.min(left?)));
    match allowed {
        Some(allowed) if allowed > full * ALLOWED_MIN => {
            let counts = (allowed / full - ALLOWED_MIN) / (1.0 - ALLOWED_MIN);
            counts * (1.0 - sent / allowed).clamp(0.0, 1.0)
        }
        _ => 0.0,
    }
}

impl LimitPace {
    /// Whether each step has whole cycles of it.
    fn is_short(&self) -> bool {
        matches!(self.kind, PaceKind::Spaced { .. }) || self.cycle <= SENT_STEP.as_secs_f64()
    }

    /// Jobs per second over a long time.
    fn per_second(&self) -> f64 {
        let cost = if let PaceKind::Spaced { cost, .. } = self.kind { cost } else { 1.0 };
        float(self.per_cycle) / (self.cycle * cost).max(f64::MIN_POSITIVE)
    }

    /// Jobs that it lets out in a step after those that were sent in the steps before, the last step first. `None`:
    /// that is not known.
    fn left_after(&self, earlier: &[f64]) -> Option<f64> {
        if !matches!(self.kind, PaceKind::Sliding { .. }) {
            return None;
        }
        // Those of a whole cycle before the end of the step still count.
        let mut left = self.cycle / SENT_STEP.as_secs_f64() - 1.0;
        let (mut used, mut earlier) = (0.0, earlier.iter());
        while left > 0.0 {
            used += earlier.next()? * left.min(1.0);
            left -= 1.0;
        }
        Some((float(self.per_cycle) - used).max(0.0))
    }
}

#[cfg(test)]
#[path = "kept_pace_tests.rs"]
mod tests;
