//! Recent activity of all workers' lanes: how long permits were awaited, and the last decisions.
//!
//! A histogram with other bounds cannot be added and is left out. Every decision keeps its worker.

use serde::{Deserialize, Serialize};

use super::report::{LaneReport, ReportedDecision, WaitHistogram};
use super::workers::WorkerProcess;
use crate::ledger::operator::DatabaseTime;

/// Most decisions that one provider's page shows.
const DECISIONS_MAX: usize = 50;

/// A decision and its worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DecisionOverview {
    pub at: String,
    pub worker: String,
    pub kind: String,
    pub reason: String,
    pub permits: u32,
}

/// The reports of one provider's lane, from each worker that has it.
pub(super) fn lane_reports<'a>(
    workers: &'a [WorkerProcess],
    name: &str,
) -> impl Iterator<Item = (&'a WorkerProcess, &'a LaneReport)> {
    let lane = move |worker: &'a WorkerProcess| {
        let lane = worker.report.as_ref()?.lanes.get(name)?;
        Some((worker, lane))
    };
    workers.iter().filter_map(lane)
}

/// Waits for permits of a provider, over all workers.
pub fn permit_waits(workers: &[WorkerProcess], name: &str) -> WaitHistogram {
    let mut sum = WaitHistogram::default();
    lane_reports(workers, name).filter(|(worker, _)| worker.is_live()).for_each(|(_, lane)| sum.add(&lane.waits));
    sum
}

/// The last decisions of all workers, newest first.
pub fn recent_decisions(workers: &[WorkerProcess], name: &str) -> Vec<DecisionOverview> {
    let all = lane_reports(workers, name)
        .flat_map(|(worker, lane)| lane.decisions.iter().map(move |decision| (worker, decision)));
    let mut all: Vec<(&WorkerProcess, &ReportedDecision)> = all.collect();
    all.sort_by_key(|(_, decision)| std::cmp::Reverse(decision.at_ms));
    let line = |(worker, decision): (&WorkerProcess, &ReportedDecision)| DecisionOverview {
        at: DatabaseTime(decision.at_ms).to_string(),
        worker: worker.id.clone(),
        kind: decision.kind.clone(),
        reason: decision.reason.clone(),
        permits: decision.permits,
    };
    all.into_iter().take(DECISIONS_MAX).map(line).collect()
}
