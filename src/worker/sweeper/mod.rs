//! The sweeper: applies changed settings to recorded jobs, ends and empties jobs whose time is over, and checks that all
//! jobs are accounted for.
//!
//! It runs in every worker. The ledger gives each duty to one worker at a time.
//!
//! It also checks periodically that all jobs are accounted for, and logs an error if they are not. That repairs nothing.
//! A discrepancy is a fault of the program or of manual SQL, and an operator must see it. See
//! `docs/decisions/0005-reconcile-all-jobs.md`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use self::held::HeldMessages;
use self::settings_changes::{SettingsChanges, propagation_time};
use super::rejections::{self, OverflowError};
use super::settings_sync::LoadedSettings;
use super::supervisor::WorkerStatus;
use super::{WorkerContext, WorkerOptions, log_throttle};
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;
use crate::ledger::LedgerError;
use crate::ledger::backlog::RepairedFlows;
use crate::ledger::events::EVENTS_KEPT_FOR;
use crate::ledger::upkeep::{CheckScope, ProviderReconciliation, ScrubScope};
use crate::queue::QueueError;

mod dead_letters;
mod held;
mod history;
mod settings_changes;

/// Time between two sweeps. A raised limit, an expiry and a refused account wait for a sweep.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Jobs that one statement ends or empties: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;

/// Why a sweep ended early. The next one starts again.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error("{0}")]
    Ledger(#[from] LedgerError),
    #[error("{0}")]
    Queue(#[from] QueueError),
    #[error("{0}")]
    Rejected(#[from] OverflowError),
}

/// Sweeps until the worker stops. A sweep that runs then is cancelled; its jobs are taken again later.
pub async fn run(
    worker: WorkerContext,
    known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Receiver<WorkerStatus>,
) {
    let (mut failing, mut changes) = (false, SettingsChanges::default());
    let mut held = HeldMessages::default();
    loop {
        let sweep = async {
            sleep(worker.options.sweep_every).await;
            worker.log_throttle.log_suppressed(log_throttle::LOG_INTERVAL);
            let (known, progress) = (known.borrow().clone(), progress.borrow().clone());
            changes.limits.update(&known, Instant::now());
            changes.limits.clear_pauses(&progress.lanes, propagation_time(&worker), Instant::now());
            let held = held.process(&worker, &known).await;
            held.and(sweep(&worker, &known, &mut changes).await)
        };
        let swept = tokio::select! {
            swept = sweep => swept,
            () = worker.stop.cancelled() => return worker.log_throttle.log_suppressed(Duration::ZERO),
        };
        match &swept {
            Ok(()) if failing => tracing::info!("sweep succeeded again"),
            // Logged once per outage: the modules that use the backends log the rest.
            Err(error) if !failing => tracing::warn!(%error, "sweep failed, retrying"),
            _ => {}
        }
        failing = swept.is_err();
    }
}

/// One sweep, if this worker gets the duty. Each step is tried even if another fails.
async fn sweep(
    worker: &WorkerContext,
    known: &LoadedSettings,
    changes: &mut SettingsChanges,
) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    // A little shorter than the pause between two sweeps, so that a single worker gets every sweep.
    if !ledger.lease_duty("sweep", worker.options.sweep_every * 3 / 4).await? {
        return Ok(());
    }
    let weighted = settings_changes::sync_weights(worker, &mut changes.weights, known).await;
    let woken = settings_changes::wake_jobs(worker, &mut changes.limits, known).await;
    let dead = dead_letters::process_all(worker).await;
    let rejected = rejections::record_overflow(worker).await.and(rejections::announce(worker).await);
    let ended = expire_and_scrub(worker).await;
    let refused = decline_refused(worker, known).await;
    let flows = keep_flows(worker, known).await;
    let reconciled = reconcile(worker, known).await;
    let history = history::keep_history(ledger).await;
    let batches = forget_batches(worker).await;
    let events = forget_events(worker).await;
    let wal = check_wal(worker).await;
    let kept = flows.and(reconciled).and(history).and(batches).and(events).and(wal);
    weighted.and(woken).and(dead).and(rejected.map_err(SweepError::from)).and(ended).and(refused).and(kept)
}

/// Warns of a reader that keeps SQLite's write-ahead log from being reused: the log grows until the disk is full.
async fn check_wal(worker: &WorkerContext) -> Result<(), SweepError> {
    let held = worker.backends.ledger.checkpoint_held_wal().await?;
    if let Some(bytes) = held.filter(|_| worker.local_faults.is_due("a reader holds the write-ahead log")) {
        tracing::warn!(
            wal_bytes = bytes,
            "a reader holds SQLite's write-ahead log, which grows with each write: end the process that reads the \
             database in a long transaction"
        );
    }
    Ok(())
}

/// Expires jobs, and empties jobs that finished long ago: batch after batch, until one is not full or the next sweep is
/// near.
async fn expire_and_scrub(worker: &WorkerContext) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    in_batches(worker, || async {
        let expired = ledger.expire("expires_at has passed", BATCH).await?;
        if expired > 0 {
            worker.new_events.notify_one();
            tracing::info!(expired, "expired waiting jobs");
        }
        Ok(expired)
    })
    .await?;
    let WorkerOptions { scrub_after, scrub_review_after, .. } = *worker.options;
    for (which, after) in [(ScrubScope::Finished, Some(scrub_after)), (ScrubScope::InReview, scrub_review_after)] {
        let Some(after) = after else { continue };
        in_batches(worker, || async {
            let scrubbed = ledger.scrub(which, after, BATCH).await?;
            if scrubbed > 0 {
                tracing::debug!(scrubbed, "payloads, references and requests emptied");
            }
            Ok(scrubbed)
        })
        .await?;
    }
    in_batches(worker, || ledger.forget_references(BATCH)).await
}

/// How long an ended decision batch and its report are kept.
const BATCH_RETENTION: Duration = Duration::from_secs(90 * 86_400);

/// Deletes old decision batches. The audit of their payments stays.
async fn forget_batches(worker: &WorkerContext) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    if !ledger.lease_duty("decision_batches", REMOVE_INTERVAL).await? {
        return Ok(());
    }
    in_batches(worker, || ledger.forget_batches(BATCH_RETENTION, BATCH)).await
}

/// Deletes old events that are published.
async fn forget_events(worker: &WorkerContext) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    if !ledger.lease_duty("events", REMOVE_INTERVAL).await? {
        return Ok(());
    }
    in_batches(worker, || async { Ok(if ledger.forget_events(EVENTS_KEPT_FOR).await? { BATCH } else { 0 }) }).await
}

/// Does batch after batch, which return how many jobs they had.
async fn in_batches<F: Future<Output = Result<u32, LedgerError>>>(
    worker: &WorkerContext,
    mut batch: impl FnMut() -> F,
) -> Result<(), SweepError> {
    let mut batches = SweepBatches::ending_at(SweepBatches::sweep_deadline(worker));
    while batches.next().await {
        batches.finish_batch(batch().await?);
    }
    Ok(())
}

/// Lanes that each get a batch in turn: one at least, and more as long as theirs are full and the next sweep is not
/// near. So the backlog of one lane does not hold up the others.
struct RoundRobin<L>(VecDeque<(L, SweepBatches)>);

impl<L> RoundRobin<L> {
    fn new(worker: &WorkerContext, lanes: impl IntoIterator<Item = L>) -> Self {
        let until = SweepBatches::sweep_deadline(worker);
        Self(lanes.into_iter().map(|lane| (lane, SweepBatches::ending_at(until))).collect())
    }

    /// The next lane and its batches. It gets no further batch unless it is added again by [`Self::requeue`].
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
    /// Pause before the next batch; `None`: that was the last.
    pause: Option<Duration>,
}

impl SweepBatches {
    /// When the batches of a sweep that starts now end.
    fn sweep_deadline(worker: &WorkerContext) -> Instant {
        Instant::now() + worker.options.sweep_every / 2
    }

    /// Allows one batch at least, whatever the time.
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
        self.pause = pause_before_next(jobs >= BATCH, self.started_at.elapsed(), left);
    }
}

/// Pause after a batch of jobs that were ended or emptied: as long as the batch took, so that the payments get at least
/// half of the database's time. `None`: the batch was not full, or the next sweep continues.
fn pause_before_next(full: bool, took: Duration, left: Duration) -> Option<Duration> {
    (full && !left.is_zero() && took.saturating_mul(2) <= left).then_some(took)
}

/// Time between two removals, in the whole cluster.
const REMOVE_INTERVAL: Duration = Duration::from_secs(60);
/// Time between two comparisons. Each reads all jobs of every backlog.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// The upkeep of flows: removes rows of flows without jobs, and compares the counts with the jobs of the backlog.
async fn keep_flows(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let compared = compare_flows(worker, known).await;
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

/// A flow whose row is missing would hide its jobs from every dispatcher. So this repairs, and logs what it repaired.
async fn compare_flows(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    if !worker.backends.ledger.lease_duty("flows_compare", COMPARE_INTERVAL).await? {
        return Ok(());
    }
    let mut in_use = worker.backends.ledger.lanes_with_flows().await?;
    in_use.extend(worker.backends.ledger.lanes_with_open_jobs().await?);
    for lane in known.providers.keys().filter(|lane| in_use.contains(*lane)) {
        let repaired = worker.backends.ledger.repair_flows(lane, BATCH).await?;
        if repaired != RepairedFlows::default() {
            let RepairedFlows { recreated, corrected } = repaired;
            tracing::error!(provider = %lane, recreated, corrected, "flows differed from their jobs; repaired");
        }
    }
    Ok(())
}

/// Ends the jobs in the backlog whose account a rule refuses. A worker declines such a job when it takes it, but a lane
/// that is paused or at its limit takes few, and such a rule must answer. The next sweep continues where this one ends.
async fn decline_refused(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let refuses = |row: &Provider| row.account_rules.iter().any(|rule| rule.rule == Rule::Refuse);
    let refusing = known.providers.iter().filter(|(_, row)| refuses(row)).map(|(lane, _)| lane);
    let mut lanes = RoundRobin::new(worker, refusing);
    while let Some((lane, batches)) = lanes.next().await {
        let declined = worker.backends.ledger.decline_refused(lane, BATCH).await?;
        lanes.requeue(lane, batches, declined);
        if declined > 0 {
            worker.new_events.notify_one();
            tracing::info!(provider = %lane, declined, "declined waiting jobs of refused accounts");
        }
    }
    Ok(())
}

/// Time between two checks, in the whole cluster.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which finished jobs are compared with their events and attempts: ten checks of each.
pub const CHECKED_JOBS: CheckScope = CheckScope::Since(Duration::from_secs(10 * 60));
/// A job is overdue when it has been due for this long without a worker, and has not returned to the backlog.
pub const OVERDUE_ALARM_AFTER: Duration = Duration::from_secs(2 * 60 * 60);

async fn reconcile(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    if !ledger.lease_duty("account", CHECK_INTERVAL).await? {
        return Ok(());
    }
    // The reconciliation is right without it, and only takes longer.
    if let Err(error) = ledger.update_finished_totals().await {
        tracing::warn!(%error, "failed to update the totals of finished jobs; reconciliation continues without them");
    }
    for account in ledger.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await? {
        for fault in &account.faults {
            tracing::error!(provider = account.provider, fault, "jobs are not accounted for");
        }
        if let Some(why) = overdue_alarm(&account, known) {
            tracing::error!(provider = account.provider, jobs = account.overdue, why, "jobs are overdue");
        }
    }
    Ok(())
}

/// Why overdue jobs need an alarm; `None` when an operator has stopped their lane.
fn overdue_alarm(account: &ProviderReconciliation, known: &LoadedSettings) -> Option<&'static str> {
    if account.overdue == 0 {
        return None;
    }
    let row = known.providers.get(account.provider.as_str());
    match row {
        None => Some("their provider has no valid row: no worker takes them"),
        Some(row) if row.enabled && !row.paused => Some("due for two hours, and no worker takes them"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lanes_alternate_until_the_next_sweep() {
        let until = Instant::now() + SWEEP_INTERVAL;
        let mut lanes = RoundRobin(["a", "m", "z", "failed"].map(|lane| (lane, SweepBatches::ending_at(until))).into());
        let mut order = Vec::new();
        while let Some((lane, batches)) = lanes.next().await {
            order.push(lane);
            tokio::time::advance(Duration::from_millis(400)).await;
            if lane != "failed" {
                lanes.requeue(lane, batches, if lane == "m" { BATCH - 1 } else { BATCH });
            }
        }
        assert_eq!(order[..6], ["a", "m", "z", "failed", "a", "z"], "one each, then those that had a full batch");
        let batches_of = |lane: &str| order.iter().filter(|name| **name == lane).count();
        assert!(batches_of("a") - batches_of("z") <= 1 && Instant::now() < until + SWEEP_INTERVAL, "{order:?}");
    }

    fn account() -> ProviderReconciliation {
        let states = [("waiting", 4), ("sending", 2), ("unknown", 1), ("succeeded", 9), ("review", 1)];
        ProviderReconciliation {
            provider: "acme".to_owned(),
            recorded: 17,
            states: states.map(|(state, jobs)| (state.to_owned(), jobs)).into(),
            active: 3,
            delayed: 2,
            due: 2,
            ..ProviderReconciliation::default()
        }
    }

    #[test]
    fn each_reconciliation_fault_is_reported() {
        assert_eq!(account().discrepancies(), Vec::<String>::new());
        type Alter = fn(&mut ProviderReconciliation);
        let altered: [(Alter, &str); 4] = [
            (|account| account.due -= 1, "7 jobs open, 6"),
            (|account| account.delayed += 1, "7 jobs open, 8"),
            (|account| account.without_event = 1, "1 finished job without an event"),
            (|account| account.without_accepted_attempt = 2, "2 jobs succeeded without"),
        ];
        for (alter, words) in altered {
            let mut account = account();
            alter(&mut account);
            let faults = account.discrepancies();
            assert!(faults.len() == 1 && faults[0].starts_with(words), "{words}: {faults:?}");
        }
    }

    #[test]
    fn overdue_jobs_of_a_removed_provider_alarm() {
        let known = LoadedSettings::default();
        assert_eq!(overdue_alarm(&account(), &known), None);
        assert!(overdue_alarm(&ProviderReconciliation { overdue: 1, ..account() }, &known).is_some());
    }

    #[test]
    fn batches_continue_while_full_and_in_time() {
        let ms = Duration::from_millis;
        for (full, took, left, pause) in [
            (true, 20, 2_500, Some(20)),
            (true, 0, 10, Some(0)),
            (true, 20, 40, Some(20)),
            (true, 20, 39, None),
            (true, 0, 0, None),
            (true, 5_000, 0, None),
            (false, 20, 2_500, None),
        ] {
            assert_eq!(pause_before_next(full, ms(took), ms(left)), pause.map(ms), "{full} in {took}, {left} left");
        }
    }
}
