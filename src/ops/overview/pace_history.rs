//! The times in which lanes had a backlog and nothing disturbed them: only those are judged by the pace that was kept.
//!
//! A cause that changes the pace begins a new time: a changed row, a pause, an outage, other costs of the payments, or
//! workers that started or ended.
//! The mean of ten seconds is judged only when all of it is later than the cause.

use std::collections::VecDeque;
use std::time::Duration;

use crate::domain::clear_time::SENT_STEP;
use crate::domain::time::millis_up;
use crate::fleet::{Overview, ProviderOverview, ProviderState};

/// Time after a cause until its effect is no part of a figure: that of the mean, and the age of a report.
const SETTLE: Duration = Duration::from_secs(14);
/// A longer time between two points is a cause, too: nothing is known of it.
const GAP_MAX: Duration = Duration::from_secs(6);
/// A lane with less work than for this time may wait for work.
const WORK_MIN_S: f64 = 2.0;
/// A mean cost that is higher or lower by this factor is another one: requests that were sent cannot be judged by it.
const COST_FACTOR: f64 = 1.25;

/// A provider at one instant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PacePoint {
    at_ms: i64,
    version: i64,
    is_disturbed: bool,
    has_work: bool,
    /// Mean cost of the waiting payments.
    cost_per_job: f64,
}

impl PacePoint {
    pub fn new(overview: &Overview, provider: &ProviderOverview, at_ms: i64) -> Self {
        let is_sending =
            matches!(provider.state, ProviderState::Running | ProviderState::WaitingForLimit | ProviderState::Idle);
        let is_known = overview.missing.is_empty() && overview.outages.is_empty() && !provider.waiting_is_at_least;
        Self {
            at_ms,
            version: provider.version,
            is_disturbed: !is_sending || !is_known,
            has_work: has_work(provider),
            cost_per_job: provider.cost_per_job,
        }
    }
}

/// Whether enough payments are due to keep the lanes busy at their pace.
#[allow(clippy::cast_precision_loss, reason = "counts of payments")]
fn has_work(provider: &ProviderOverview) -> bool {
    let due = provider.waiting.saturating_sub(provider.delayed.unwrap_or(0)) as f64;
    let pace = provider.limit_per_s.unwrap_or(0.0).max(provider.rate_per_s.unwrap_or(0.0));
    due >= 1.0 && due >= pace * WORK_MIN_S
}

/// The judged part of each [`SENT_STEP`] before now, 0 to 1, the last step first. `cause_ms`: a cause for all providers.
pub fn judged_before(points: &VecDeque<PacePoint>, cause_ms: i64, now_ms: i64) -> Vec<f64> {
    let from_ms = settled_from(points, cause_ms);
    let step_ms = whole_ms(SENT_STEP);
    let mut judged = Vec::new();
    let mut end_ms = now_ms;
    while end_ms > from_ms {
        let begin_ms = end_ms - step_ms;
        let within = || points.iter().rev().filter(|point| point.at_ms > begin_ms && point.at_ms <= end_ms);
        let with_work = part(within().filter(|point| point.has_work).count(), within().count());
        let settled = ratio(end_ms - begin_ms.max(from_ms), step_ms);
        // A lane without work for a while has sent less, and not for its pace. So little is counted of such a step.
        judged.push(settled * with_work * with_work);
        end_ms = begin_ms;
    }
    judged
}

/// The instant from which on figures are judged.
fn settled_from(points: &VecDeque<PacePoint>, cause_ms: i64) -> i64 {
    let Some(last) = points.back() else { return i64::MAX };
    let costs_alike = |point: &PacePoint| {
        let (more, less) = (point.cost_per_job.max(last.cost_per_job), point.cost_per_job.min(last.cost_per_job));
        more <= less * COST_FACTOR
    };
    let is_alike = |point: &PacePoint| !point.is_disturbed && point.version == last.version && costs_alike(point);
    let mut later_ms = last.at_ms;
    let mut began_ms = last.at_ms;
    for point in points.iter().rev() {
        if !is_alike(point) || later_ms - point.at_ms > whole_ms(GAP_MAX) {
            break;
        }
        (later_ms, began_ms) = (point.at_ms, point.at_ms);
    }
    began_ms.max(cause_ms).saturating_add(whole_ms(SETTLE))
}

fn whole_ms(duration: Duration) -> i64 {
    i64::try_from(millis_up(duration)).unwrap_or(i64::MAX)
}

#[allow(clippy::cast_precision_loss, reason = "a few points")]
fn part(count: usize, of: usize) -> f64 {
    if of == 0 { 0.0 } else { count as f64 / of as f64 }
}

#[allow(clippy::cast_precision_loss, reason = "milliseconds of a step")]
fn ratio(ms: i64, of_ms: i64) -> f64 {
    ms as f64 / of_ms as f64
}

#[cfg(test)]
#[path = "pace_history_tests.rs"]
mod tests;
