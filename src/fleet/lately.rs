//! What the lanes of all workers did lately: how long permits were waited for, and what was decided.
//!
//! Refuses to add up what was measured apart: a histogram with other bounds is left out, and every decision keeps its
//! worker.

use serde::{Deserialize, Serialize};

use super::report::{Decision, Lane, Waits};
use super::workers::Worker;
use crate::ledger::operator::At;

/// Most decisions that one provider's page shows.
const DECISIONS_MAX: usize = 50;

/// A decision and whose it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DecisionLine {
    pub at: String,
    pub worker: String,
    pub kind: String,
    pub reason: String,
    pub permits: u32,
}

/// One provider's lane in each worker that has one.
pub(super) fn lanes<'a>(workers: &'a [Worker], name: &str) -> impl Iterator<Item = (&'a Worker, &'a Lane)> {
    let lane = move |worker: &'a Worker| {
        let lane = worker.report.as_ref()?.lanes.get(name)?;
        Some((worker, lane))
    };
    workers.iter().filter_map(lane)
}

/// How long permits of a provider were waited for, all workers.
#[must_use]
pub fn waits(workers: &[Worker], name: &str) -> Waits {
    let mut sum = Waits::default();
    lanes(workers, name).filter(|(worker, _)| worker.is_live()).for_each(|(_, lane)| sum.add(&lane.waits));
    sum
}

/// The last decisions of all workers, newest first.
#[must_use]
pub fn decisions(workers: &[Worker], name: &str) -> Vec<DecisionLine> {
    let all = lanes(workers, name).flat_map(|(worker, lane)| lane.decisions.iter().map(move |it| (worker, it)));
    let mut all: Vec<(&Worker, &Decision)> = all.collect();
    all.sort_by_key(|(_, decision)| std::cmp::Reverse(decision.at_ms));
    let line = |(worker, decision): (&Worker, &Decision)| DecisionLine {
        at: At(decision.at_ms).to_string(),
        worker: worker.id.clone(),
        kind: decision.kind.clone(),
        reason: decision.reason.clone(),
        permits: decision.permits,
    };
    all.into_iter().take(DECISIONS_MAX).map(line).collect()
}
