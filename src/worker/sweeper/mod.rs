//! The sweeper: sees to it that no job of the ledger falls out, whatever became of its message.
//!
//! Refuses to guess and refuses to flood: what it publishes is made from the ledger and must say what the first message
//! said, and how often is decided in [`rule`]. It runs in every worker; the ledger gives each duty to one at a time, and
//! each job's copy to one sweeper, so that several do no harm.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::log_throttle;
use super::settings_sync::LoadedSettings;
use super::supervisor::WorkerStatus;
use super::{WorkerContext, WorkerOptions};
use crate::ledger::LedgerError;
use crate::ledger::upkeep::ScrubScope;
use crate::queue::QueueError;

mod dead;
mod limit_changes;
pub mod overdue;
mod reconcile;
pub(super) mod republish;

pub use reconcile::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

/// How often a sweeper looks. Nothing waits for it in the usual course, so it may be slow; a job whose message is gone
/// waits for it on top of its grace, so it should be short beside that.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Jobs that are ended or emptied at a time: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;

/// Why a sweep ended early. The next one begins anew.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error("{0}")]
    Ledger(#[from] LedgerError),
    #[error("{0}")]
    Queue(#[from] QueueError),
}

/// Sweeps until the worker stops. A sweep that is under way then is dropped: what it had taken is taken again later.
pub async fn run(
    worker: WorkerContext,
    known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Receiver<WorkerStatus>,
) {
    let (mut troubled, mut changes) = (false, limit_changes::LimitChanges::default());
    loop {
        let sweep = async {
            sleep(worker.options.sweep_every).await;
            worker.log_throttle.log_suppressed(log_throttle::LOG_INTERVAL);
            let (known, progress) = (known.borrow().clone(), progress.borrow().clone());
            changes.update(&known, Instant::now());
            changes.clear_pauses(&progress.lanes, limit_changes::propagation_time(&worker), Instant::now());
            sweep(&worker, &progress, &known, &mut changes).await
        };
        let swept = tokio::select! {
            swept = sweep => swept,
            () = worker.stop.cancelled() => return worker.log_throttle.log_suppressed(Duration::ZERO),
        };
        match &swept {
            Ok(()) if troubled => tracing::info!("the sweeper works again"),
            // Once per outage: the engines' own users say the rest.
            Err(error) if !troubled => tracing::warn!(%error, "not swept, will try again"),
            _ => {}
        }
        troubled = swept.is_err();
    }
}

/// One sweep, if it is this worker's turn. Each duty is tried even if another fails.
async fn sweep(
    worker: &WorkerContext,
    progress: &WorkerStatus,
    known: &LoadedSettings,
    changes: &mut limit_changes::LimitChanges,
) -> Result<(), SweepError> {
    let upkeep = &worker.backends.upkeep;
    // A little shorter than the pause between two looks, so that a worker alone has every turn.
    if !upkeep.lease_duty("sweep", worker.options.sweep_every * 3 / 4).await? {
        return Ok(());
    }
    let woken = limit_changes::wake_jobs(worker, changes, known).await;
    let again = republish::republish_all(worker, progress, known).await;
    let dead = dead::process_all(worker, known).await;
    let ended = expire_and_scrub(worker).await;
    let account = reconcile::check(worker, known).await;
    woken.and(again).and(dead).and(ended).and(account)
}

/// Ends what has expired, and empties what settled long ago: batch after batch, until one is not full or the next sweep is
/// near.
async fn expire_and_scrub(worker: &WorkerContext) -> Result<(), SweepError> {
    let upkeep = &worker.backends.upkeep;
    let mut batches = SweepBatches::for_worker(worker);
    while batches.next().await {
        let expired = upkeep.expire("expires_at has passed", BATCH).await?;
        batches.finish_batch(expired);
        if expired > 0 {
            worker.outbox.notify_unleased();
            tracing::info!(expired, "jobs expired while they waited");
        }
    }
    let WorkerOptions { scrub_after, scrub_review_after, .. } = *worker.options;
    for (which, after) in [(ScrubScope::Finished, Some(scrub_after)), (ScrubScope::InReview, scrub_review_after)] {
        let Some(after) = after else { continue };
        let mut batches = SweepBatches::for_worker(worker);
        while batches.next().await {
            let scrubbed = upkeep.scrub(which, after, BATCH).await?;
            batches.finish_batch(scrubbed);
            if scrubbed > 0 {
                tracing::debug!(scrubbed, "payloads, references and requests emptied");
            }
        }
    }
    let mut batches = SweepBatches::for_worker(worker);
    while batches.next().await {
        batches.finish_batch(upkeep.forget_references(BATCH).await?);
    }
    Ok(())
}

/// Lanes that have a batch in turn, one at least, and more as long as theirs are full and the next sweep is not near: the
/// backlog of one is no other's wait.
struct RoundRobin<L>(VecDeque<(L, SweepBatches)>);

impl<L> RoundRobin<L> {
    fn new(worker: &WorkerContext, lanes: impl IntoIterator<Item = L>) -> Self {
        let until = SweepBatches::sweep_deadline(worker);
        Self(lanes.into_iter().map(|lane| (lane, SweepBatches::ending_at(until))).collect())
    }

    /// Whose turn it is. It has no more unless it comes back by [`Self::done`].
    async fn next(&mut self) -> Option<(L, SweepBatches)> {
        while let Some((lane, mut batches)) = self.0.pop_front() {
            if batches.next().await {
                return Some((lane, batches));
            }
        }
        None
    }

    fn requeue(&mut self, lane: L, mut batches: SweepBatches, jobs: u32) {
        batches.finish_batch(jobs);
        self.0.push_back((lane, batches));
    }
}

/// The batches of one duty in one sweep.
struct SweepBatches {
    deadline: Instant,
    started_at: Instant,
    /// Before the next one; `None`: it was the last.
    pause: Option<Duration>,
}

impl SweepBatches {
    fn for_worker(worker: &WorkerContext) -> Self {
        Self::ending_at(Self::sweep_deadline(worker))
    }

    /// When the batches of a sweep that begins now end.
    fn sweep_deadline(worker: &WorkerContext) -> Instant {
        Instant::now() + worker.options.sweep_every / 2
    }

    /// One at least, whatever the time.
    fn ending_at(deadline: Instant) -> Self {
        Self { deadline, started_at: Instant::now(), pause: Some(Duration::ZERO) }
    }

    async fn next(&mut self) -> bool {
        let Some(pause) = self.pause else { return false };
        sleep(pause).await;
        self.started_at = Instant::now();
        true
    }

    fn finish_batch(&mut self, jobs: u32) {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.pause = overdue::pause_before_next(jobs >= BATCH, self.started_at.elapsed(), left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lanes_alternate_until_the_next_sweep() {
        let until = Instant::now() + SWEEP_INTERVAL;
        let mut turns = RoundRobin(["a", "m", "z", "failed"].map(|lane| (lane, SweepBatches::ending_at(until))).into());
        let mut order = Vec::new();
        while let Some((lane, batches)) = turns.next().await {
            order.push(lane);
            tokio::time::advance(Duration::from_millis(400)).await;
            if lane != "failed" {
                turns.requeue(lane, batches, if lane == "m" { BATCH - 1 } else { BATCH });
            }
        }
        assert_eq!(order[..6], ["a", "m", "z", "failed", "a", "z"], "one each, then those that had a full batch");
        let of = |lane: &str| order.iter().filter(|it| **it == lane).count();
        assert!(of("a") - of("z") <= 1 && Instant::now() < until + SWEEP_INTERVAL, "{order:?}");
    }
}
