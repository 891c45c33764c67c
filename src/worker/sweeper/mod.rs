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

use super::deployment::Progress;
use super::log_throttle;
use super::settings_watch::Known;
use super::{Worker, WorkerOptions};
use crate::ledger::LedgerError;
use crate::ledger::upkeep::Scrubbed;
use crate::queue::QueueError;

mod account;
pub(super) mod again;
mod dead;
mod raised;
pub mod rule;

pub use account::{ASTRAY_AFTER, CHECKED};

/// How often a sweeper looks. Nothing waits for it in the usual course, so it may be slow; a job whose message is gone
/// waits for it on top of its grace, so it should be short beside that.
pub const EVERY: Duration = Duration::from_secs(5);

/// Jobs that are ended or emptied at a time: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;

/// Why a sweep ended early. The next one begins anew.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("{0}")]
    Ledger(#[from] LedgerError),
    #[error("{0}")]
    Queue(#[from] QueueError),
}

/// Sweeps until the worker stops. A sweep that is under way then is dropped: what it had taken is taken again later.
pub async fn run(worker: Worker, known: watch::Receiver<Arc<Known>>, progress: watch::Receiver<Progress>) {
    let (mut troubled, mut changes) = (false, raised::Changes::default());
    loop {
        let sweep = async {
            sleep(worker.options.sweep_every).await;
            worker.log_throttle.log_counted(log_throttle::EVERY);
            let (known, progress) = (known.borrow().clone(), progress.borrow().clone());
            changes.note(&known, Instant::now());
            changes.lift(&progress.lanes, raised::settles(&worker), Instant::now());
            sweep(&worker, &progress, &known, &mut changes).await
        };
        let swept = tokio::select! {
            swept = sweep => swept,
            () = worker.stop.cancelled() => return worker.log_throttle.log_counted(Duration::ZERO),
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
    worker: &Worker,
    progress: &Progress,
    known: &Known,
    changes: &mut raised::Changes,
) -> Result<(), Trouble> {
    let upkeep = &worker.engines.upkeep;
    // A little shorter than the pause between two looks, so that a worker alone has every turn.
    if !upkeep.take_turn("sweep", worker.options.sweep_every * 3 / 4).await? {
        return Ok(());
    }
    let woken = raised::wake(worker, changes, known).await;
    let again = again::bring_back(worker, progress, known).await;
    let dead = dead::judge_all(worker, known).await;
    let ended = end(worker).await;
    let account = account::look(worker, known).await;
    woken.and(again).and(dead).and(ended).and(account)
}

/// Ends what has expired, and empties what settled long ago: batch after batch, until one is not full or the next sweep is
/// near.
async fn end(worker: &Worker) -> Result<(), Trouble> {
    let upkeep = &worker.engines.upkeep;
    let mut batches = Batches::of(worker);
    while batches.next().await {
        let expired = upkeep.expire("expires_at has passed", BATCH).await?;
        batches.done(expired);
        if expired > 0 {
            worker.outbox.left();
            tracing::info!(expired, "jobs expired while they waited");
        }
    }
    let WorkerOptions { scrub_after, scrub_review_after, .. } = *worker.options;
    for (which, after) in [(Scrubbed::Settled, Some(scrub_after)), (Scrubbed::InReview, scrub_review_after)] {
        let Some(after) = after else { continue };
        let mut batches = Batches::of(worker);
        while batches.next().await {
            let scrubbed = upkeep.scrub(which, after, BATCH).await?;
            batches.done(scrubbed);
            if scrubbed > 0 {
                tracing::debug!(scrubbed, "payloads, references and requests emptied");
            }
        }
    }
    let mut batches = Batches::of(worker);
    while batches.next().await {
        batches.done(upkeep.forget_references(BATCH).await?);
    }
    Ok(())
}

/// Lanes that have a batch in turn, one at least, and more as long as theirs are full and the next sweep is not near: the
/// backlog of one is no other's wait.
struct Turns<L>(VecDeque<(L, Batches)>);

impl<L> Turns<L> {
    fn of(worker: &Worker, lanes: impl IntoIterator<Item = L>) -> Self {
        let until = Batches::end(worker);
        Self(lanes.into_iter().map(|lane| (lane, Batches::until(until))).collect())
    }

    /// Whose turn it is. It has no more unless it comes back by [`Self::done`].
    async fn next(&mut self) -> Option<(L, Batches)> {
        while let Some((lane, mut batches)) = self.0.pop_front() {
            if batches.next().await {
                return Some((lane, batches));
            }
        }
        None
    }

    fn done(&mut self, lane: L, mut batches: Batches, jobs: u32) {
        batches.done(jobs);
        self.0.push_back((lane, batches));
    }
}

/// The batches of one duty in one sweep.
struct Batches {
    until: Instant,
    begun: Instant,
    /// Before the next one; `None`: it was the last.
    pause: Option<Duration>,
}

impl Batches {
    fn of(worker: &Worker) -> Self {
        Self::until(Self::end(worker))
    }

    /// When the batches of a sweep that begins now end.
    fn end(worker: &Worker) -> Instant {
        Instant::now() + worker.options.sweep_every / 2
    }

    /// One at least, whatever the time.
    fn until(until: Instant) -> Self {
        Self { until, begun: Instant::now(), pause: Some(Duration::ZERO) }
    }

    async fn next(&mut self) -> bool {
        let Some(pause) = self.pause else { return false };
        sleep(pause).await;
        self.begun = Instant::now();
        true
    }

    fn done(&mut self, jobs: u32) {
        let left = self.until.saturating_duration_since(Instant::now());
        self.pause = rule::pause_before_next(jobs >= BATCH, self.begun.elapsed(), left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lanes_take_turns_until_the_next_sweep_is_near() {
        let until = Instant::now() + EVERY;
        let mut turns = Turns(["a", "m", "z", "failed"].map(|lane| (lane, Batches::until(until))).into());
        let mut order = Vec::new();
        while let Some((lane, batches)) = turns.next().await {
            order.push(lane);
            tokio::time::advance(Duration::from_millis(400)).await;
            if lane != "failed" {
                turns.done(lane, batches, if lane == "m" { BATCH - 1 } else { BATCH });
            }
        }
        assert_eq!(order[..6], ["a", "m", "z", "failed", "a", "z"], "one each, then those that had a full batch");
        let of = |lane: &str| order.iter().filter(|it| **it == lane).count();
        assert!(of("a") - of("z") <= 1 && Instant::now() < until + EVERY, "{order:?}");
    }
}
