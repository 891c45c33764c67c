//! The upkeep of flows: rows of flows without jobs are removed, and counts are compared with the jobs of the backlog.
//!
//! A flow whose row is missing would hide its jobs from every dispatcher. So the comparison repairs, and logs what it
//! repaired.

use std::time::Duration;

use super::{BATCH, RoundRobin, SweepError};
use crate::ledger::backlog::RepairedFlows;
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// Time between two removals, in the whole cluster.
const REMOVE_INTERVAL: Duration = Duration::from_secs(60);
/// Time between two comparisons. Each reads all jobs of every backlog.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5 * 60);

pub async fn keep(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let compared = compare(worker, known).await;
    if !worker.backends.upkeep.lease_duty("flows", REMOVE_INTERVAL).await? {
        return compared;
    }
    let with_flows = worker.backends.backlog.lanes_with_flows().await?;
    let mut lanes = RoundRobin::new(worker, known.providers.keys().filter(|lane| with_flows.contains(*lane)));
    while let Some((lane, batches)) = lanes.next().await {
        let removed = worker.backends.backlog.remove_idle_flows(lane, BATCH).await?;
        lanes.requeue(lane, batches, removed);
    }
    compared
}

async fn compare(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    if !worker.backends.upkeep.lease_duty("flows_compare", COMPARE_INTERVAL).await? {
        return Ok(());
    }
    let mut in_use = worker.backends.backlog.lanes_with_flows().await?;
    in_use.extend(worker.backends.upkeep.lanes_with_open_jobs().await?);
    for lane in known.providers.keys().filter(|lane| in_use.contains(*lane)) {
        let repaired = worker.backends.backlog.repair_flows(lane, BATCH).await?;
        if repaired != RepairedFlows::default() {
            let RepairedFlows { recreated, corrected } = repaired;
            tracing::error!(provider = %lane, recreated, corrected, "flows differed from their jobs; repaired");
        }
    }
    Ok(())
}
