//! Look-ups of a lane whose charges alone are limited: they go by their own limits, wherever the lane's queue stands.
//!
//! A payment of unknown outcome comes back by a message in the lane's queue, among payments that the limit refuses. So those
//! whose provider is to be asked are claimed from the ledger when they are due. Their messages stay where they are, and count
//! again when the payments are put down.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::intake::{DeliveryAction, claim, pause_intake, run_claimed};
use super::lane::LaneContext;
use super::sweeper::republish::rebuild_or_review;
use crate::ledger::copies::DeliveredCopy;
use crate::ledger::upkeep::JobToRepublish;
use crate::ledger::{Claim, LedgerError};
use crate::queue::message::Decoded;
use crate::telemetry::spans;

/// Between two looks at what is due.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// At most so much of the time is spent looking, however many wait to be sent again.
const QUERY_TIME_DIVISOR: u32 = 20;

/// Sees to a lane's look-ups until the lane is stopped.
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
            tracing::debug!(provider = %lane.name, %error, "due look-ups are not known, will ask again");
        }
        wait = POLL_INTERVAL.max(begun.elapsed() * QUERY_TIME_DIVISOR);
    }
}

/// Takes no more payments at once than may be asked about at the same time, and none while nothing at all is taken.
async fn start_due(lane: &Arc<LaneContext>, jobs: &TaskTracker) -> Result<(), LedgerError> {
    let provider = Arc::clone(&lane.settings.borrow().provider);
    let pauses = &lane.control;
    let apart = provider.limits_charges_alone() || pauses.are_charges_paused();
    let most = if pauses.is_probing() { 1 } else { provider.workers };
    let free = most.saturating_sub(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
    if !apart || provider.lookup.is_none() || provider.paused || !pauses.accepts_lookups() || free == 0 {
        return Ok(());
    }
    let due = lane.worker.backends.upkeep.due_lookups(&lane.name, &provider.retry_policy(), free).await?;
    for recorded in due {
        let work = Box::pin(handle_lookup(Arc::clone(lane), recorded));
        lane.worker.jobs.spawn(jobs.track_future(work));
    }
    Ok(())
}

async fn handle_lookup(lane: Arc<LaneContext>, recorded: JobToRepublish) {
    let _in_hand = lane.meter.delivery_started(false);
    let span = spans::job(lane.name.as_str(), &BTreeMap::new());
    let end = AssertUnwindSafe(process(&lane, &recorded).instrument(span.clone())).catch_unwind().await;
    let end = end.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, job = %recorded.job.id, "a job panicked; its lease runs out");
        DeliveryAction::RequeueFault
    });
    spans::record_end(&span, end.code());
    if end == DeliveryAction::RequeueAndPause {
        pause_intake(&lane);
    }
}

/// As of a delivery, apart from its message: nothing is acknowledged, handed back or published.
async fn process(lane: &LaneContext, recorded: &JobToRepublish) -> DeliveryAction {
    match rebuild_or_review(&lane.worker, recorded).await {
        Ok(Some(_)) => {}
        Ok(None) => return DeliveryAction::Ack,
        Err(error) => {
            tracing::debug!(job = %recorded.job.id, %error, "a due look-up is not taken");
            return DeliveryAction::Requeue;
        }
    }
    spans::record_job(&recorded.job.id);
    let decoded = Decoded { job: recorded.job.clone(), hash: recorded.hash, warnings: Vec::new() };
    let arrived = DeliveredCopy::queued(recorded.copy);
    match claim(lane, &decoded, arrived, Duration::ZERO).instrument(spans::step("claim")).await {
        Some(Claim::Claimed(claimed)) => run_claimed(lane, Box::new(decoded), claimed, (Instant::now(), None)).await,
        // As for a delivery, but without a message: it is asked for again when its row was repaired.
        Some(Claim::Unreadable(problem)) => {
            let job = &recorded.job.id;
            tracing::error!(provider = %lane.name, job = %job, problem, "a job's row cannot be read: repair it by SQL");
            DeliveryAction::Requeue
        }
        // Somebody else has it, or it has ended.
        _ => DeliveryAction::Requeue,
    }
}
