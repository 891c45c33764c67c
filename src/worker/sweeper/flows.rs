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
    if !worker.backends.ledger.lease_duty("flows", REMOVE_INTERVAL).await? {
        return compared;
    }
    let with_flows = worker.backends.ledger.lanes_with_flows().await?;
    let mut lanes = RoundRobin::new(worker, known.providers.keys().filter(|lane| with_flows.contains(*lane)));
    while let Some((lane, batches)) = lanes.next().await {
        let removed = worker.backends.ledger.remove_idle_flows(lane, BATCH).await?;
        lanes.requeue(lane, batches, removed);
    }
    compared
}

async fn compare(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    if !worker.backends.ledger.lease_duty("flows_compare", COMPARE_INTERVAL).await? {
        return Ok(());
    }
    for lane in known.providers.keys() {
        let repaired = worker.backends.ledger.repair_flows(lane, BATCH).await?;
        if repaired != RepairedFlows::default() {
            let RepairedFlows { recreated, corrected } = repaired;
            tracing::error!(provider = %lane, recreated, corrected, "flows differed from their jobs; repaired");
        }
    }
    Ok(())
}
