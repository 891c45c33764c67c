//! Look-ups of a lane in which only charges are limited: they are sent by their own limits, apart from the lane's
//! queue.
//!
//! A payment with an unknown outcome comes back as a message in the lane's queue, among payments that the limit
//! refuses. So due look-ups are claimed from the ledger. Their messages stay in the queue, and count again when the
//! payments are delayed. See `docs/decisions/0034-look-ups-of-unknown-outcomes.md`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::intake::{DeliveryAction, run_without_message};
use super::job::{Arrival, claim, run_claimed};
use super::lane::LaneContext;
use super::sweeper::republish::rebuild_or_review;
use crate::ledger::copies::DeliveredCopy;
use crate::ledger::upkeep::JobToRepublish;
use crate::ledger::{Claim, LedgerError};
use crate::queue::message::Decoded;
use crate::telemetry::spans;

/// Least time between two queries for due look-ups.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The query takes at most this part of the time, however many look-ups wait.
const QUERY_TIME_DIVISOR: u32 = 20;

/// Sends a lane's look-ups until the lane is stopped.
pub(super) async fn run(lane: Arc<LaneContext>) {
    let jobs = TaskTracker::new();
    let mut wait = POLL_INTERVAL;
    loop {
        tokio::select! {
            () = lane.stop.cancelled() => return,
            () = sleep(wait) => {}
        }
        let begun = Instant::now();
        if let Err(error) = start_due(&lane, &jobs).await {
            tracing::debug!(provider = %lane.name, %error, "failed to query due look-ups, retrying");
        }
        wait = POLL_INTERVAL.max(begun.elapsed() * QUERY_TIME_DIVISOR);
    }
}

/// Claims at most as many payments as may be looked up at once, and none while the lane takes nothing at all.
async fn start_due(lane: &Arc<LaneContext>, jobs: &TaskTracker) -> Result<(), LedgerError> {
    let provider = Arc::clone(&lane.settings.borrow().provider);
    let pauses = &lane.control;
    let apart = provider.limits_charges_alone() || pauses.are_charges_paused();
    let most = if pauses.is_probing() { 1 } else { provider.workers };
    let free = most.saturating_sub(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
    if !apart || provider.lookup.is_none() || provider.paused || !pauses.accepts_lookups() || free == 0 {
        return Ok(());
    }
    let due = lane.worker.backends.ledger.due_lookups(&lane.name, &provider.retry_policy(), free).await?;
    for recorded in due {
        let context = Arc::clone(lane);
        let work = async move { run_without_message(&context, &recorded.job.id, process(&context, &recorded)).await };
        lane.worker.jobs.spawn(jobs.track_future(Box::pin(work)));
    }
    Ok(())
}

/// Processes the job as a delivery does, but without a message: nothing is acknowledged, requeued or published.
async fn process(lane: &LaneContext, recorded: &JobToRepublish) -> DeliveryAction {
    match rebuild_or_review(&lane.worker, recorded).await {
        Ok(Some(_)) => {}
        Ok(None) => return DeliveryAction::Ack,
        Err(error) => {
            tracing::debug!(job = %recorded.job.id, %error, "failed to prepare a due look-up, retrying");
            return DeliveryAction::Requeue;
        }
    }
    spans::record_job(&recorded.job.id);
    let decoded = Decoded { job: recorded.job.clone(), hash: recorded.hash, warnings: Vec::new() };
    let arrived = DeliveredCopy::queued(recorded.copy);
    match claim(lane, &decoded, arrived, Duration::ZERO).instrument(spans::step("claim")).await {
        Some(Claim::Claimed(claimed)) => run_claimed(lane, Box::new(decoded), claimed, Arrival::now()).await,
        // As for a delivery, but without a message: it is looked up again when its row is repaired.
        Some(Claim::Unreadable(problem)) => {
            let job = &recorded.job.id;
            tracing::error!(provider = %lane.name, job = %job, problem, "a job's row cannot be read: repair it by SQL");
            DeliveryAction::Requeue
        }
        // Another worker has the job, or it is finished.
        _ => DeliveryAction::Requeue,
    }
}
