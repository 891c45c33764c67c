//! Sleeping jobs: each lane returns those that this process put to sleep at their instants, and one process returns all
//! others each second, together with the jobs of lost workers.
//!
//! The ledger has each job's instant, and decides who is due. The instants here only say when to ask.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::{Instant, sleep, sleep_until};

use super::WorkerContext;
use super::lane::LaneContext;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::LedgerError;

/// Instants that one lane keeps: the memory of a few jobs. Beyond that, the look of each second finds the jobs.
const INSTANTS_MAX: usize = 10_000;
/// Time between two looks for jobs that no instant of this process names.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Jobs that one step returns: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;
/// Time after the end of a lease in which its worker may still renew it: the database may have been slow.
const LEASE_GRACE: Duration = Duration::from_secs(10);
/// Time after an outage of the database in which no job is taken from a worker: living workers renew their leases first.
const OUTAGE_GRACE: Duration = Duration::from_secs(10);
/// As long as no lease can have ended.
const NEVER: Duration = Duration::from_secs(10 * 365 * 86_400);
/// A look that takes longer has waited for a database that was away.
const LOOK_MAX: Duration = Duration::from_secs(3);
/// Time between two looks without the duty: the process that has it may not serve all lanes.
const OWN_LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// The instants at which jobs of one lane are due, as far as this process has put them to sleep.
#[derive(Debug, Default)]
pub struct Sleepers {
    instants: Mutex<BinaryHeap<Reverse<Instant>>>,
    has_earlier: Notify,
}

impl Sleepers {
    /// Records that a job sleeps for this long from now on.
    pub fn add(&self, wait: Duration) {
        let Some(at) = Instant::now().checked_add(wait) else { return };
        let mut instants = self.instants.lock();
        if instants.len() >= INSTANTS_MAX {
            return;
        }
        let is_first = instants.peek().is_none_or(|Reverse(first)| at < *first);
        instants.push(Reverse(at));
        drop(instants);
        if is_first {
            self.has_earlier.notify_one();
        }
    }

    fn first(&self) -> Option<Instant> {
        self.instants.lock().peek().map(|Reverse(at)| *at)
    }

    /// Forgets the instants that have passed. Returns whether there were any.
    fn take_due(&self, now: Instant) -> bool {
        let mut instants = self.instants.lock();
        let before = instants.len();
        while instants.peek().is_some_and(|Reverse(at)| *at <= now) {
            instants.pop();
        }
        instants.len() < before
    }
}

/// The lanes that have jobs to return, as this process has read them.
#[derive(Debug, Default)]
pub struct LanesWithReturns(AsyncMutex<Looks>);

#[derive(Debug, Default)]
struct Looks {
    last: Option<LookedAt>,
    last_own_at: Option<Instant>,
    /// When the database was last seen to be away.
    last_outage_at: Option<Instant>,
}

#[derive(Debug)]
struct LookedAt {
    at: Instant,
    lanes: BTreeSet<ProviderName>,
}

impl LanesWithReturns {
    /// Whether this process is to return jobs of the lane. One query runs at a time, and answers for all lanes.
    async fn contains(&self, lane: &ProviderName, worker: &WorkerContext) -> Result<bool, LedgerError> {
        let mut looks = self.0.lock().await;
        let now = Instant::now();
        let is_fresh = |looked: &LookedAt| now < looked.at + LOOK_INTERVAL * 3 / 4;
        let looked = match looks.last.take().filter(is_fresh) {
            Some(fresh) => fresh,
            None => {
                let lanes = looks.look(now, worker).await;
                let is_outage = lanes.as_ref().is_err_and(LedgerError::is_outage);
                looks.record_statement(is_outage, now, Instant::now());
                LookedAt { at: now, lanes: lanes? }
            }
        };
        Ok(looks.last.insert(looked).lanes.contains(lane))
    }

    /// Time after the end of a lease in which its job stays with its worker.
    async fn lease_grace(&self) -> Duration {
        self.0.lock().await.lease_grace(Instant::now())
    }

    async fn record_outage(&self) {
        self.0.lock().await.last_outage_at = Some(Instant::now());
    }
}

impl Looks {
    async fn look(&mut self, now: Instant, worker: &WorkerContext) -> Result<BTreeSet<ProviderName>, LedgerError> {
        let ledger = &worker.backends.ledger;
        let has_duty = ledger.lease_duty("returns", LOOK_INTERVAL * 3 / 4).await?;
        if !has_duty && now < *self.last_own_at.get_or_insert(now) + OWN_LOOK_INTERVAL {
            return Ok(BTreeSet::new());
        }
        self.last_own_at = Some(now);
        ledger.lanes_with_returns().await
    }

    fn record_statement(&mut self, is_outage: bool, began: Instant, ended: Instant) {
        if is_outage || ended - began > LOOK_MAX {
            self.last_outage_at = Some(ended);
        }
    }

    fn lease_grace(&self, now: Instant) -> Duration {
        match self.last_outage_at {
            Some(at) if now < at + OUTAGE_GRACE => NEVER,
            _ => LEASE_GRACE,
        }
    }
}

/// Returns the lane's jobs until the lane is stopped.
pub async fn run(lane: Arc<LaneContext>) {
    let mut look_at = Instant::now() + LOOK_INTERVAL;
    loop {
        let first = lane.sleepers.first();
        tokio::select! {
            () = lane.stop.cancelled() => return,
            () = lane.sleepers.has_earlier.notified() => continue,
            () = sleep_until(first.map_or(look_at, |at| at.min(look_at))) => {}
        }
        let now = Instant::now();
        let mut is_due = lane.sleepers.take_due(now);
        let returned = async {
            if look_at <= now {
                is_due |= lane.worker.lanes_with_returns.contains(&lane.name, &lane.worker).await?;
            }
            if is_due { return_due(&lane).await } else { Ok(()) }
        };
        if let Err(error) = returned.await {
            if error.is_outage() {
                lane.worker.lanes_with_returns.record_outage().await;
            }
            tracing::debug!(provider = %lane.name, %error, "failed to wake sleeping jobs, retrying");
        }
        if look_at <= now {
            look_at = now + LOOK_INTERVAL;
        }
    }
}

/// Returns batch after batch, with pauses as long as each took.
async fn return_due(lane: &LaneContext) -> Result<(), LedgerError> {
    let worker = &lane.worker;
    // The end of a request may wait for the database: this worker has not lost its job.
    let is_kept = |job: &JobId| worker.active_jobs.contains(job);
    loop {
        let began = Instant::now();
        let grace = worker.lanes_with_returns.lease_grace().await;
        let returned = worker.backends.ledger.return_due(&lane.name, grace, BATCH, &is_kept).await?;
        faults::crash(CrashPoint::AfterWake);
        if returned.lost > 0 {
            tracing::warn!(provider = %lane.name, jobs = returned.lost, "jobs of lost workers return to the backlog");
        }
        let is_full = returned.flows.len() >= BATCH as usize;
        returned.flows.into_iter().for_each(|flow| lane.backlog.record_return(flow, None));
        if !is_full || lane.stop.is_cancelled() {
            return Ok(());
        }
        sleep(began.elapsed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_instant_comes_first() {
        let sleepers = Sleepers::default();
        let now = Instant::now();
        [5, 2, 9].into_iter().for_each(|seconds| sleepers.add(Duration::from_secs(seconds)));
        assert_eq!(sleepers.first(), Some(now + Duration::from_secs(2)));
        assert!(!sleepers.take_due(now + Duration::from_secs(1)));
        assert!(sleepers.take_due(now + Duration::from_secs(5)));
        assert_eq!(sleepers.first(), Some(now + Duration::from_secs(9)));
    }

    #[tokio::test(start_paused = true)]
    async fn instants_are_bounded() {
        let sleepers = Sleepers::default();
        (0..=INSTANTS_MAX).for_each(|_| sleepers.add(Duration::from_secs(1)));
        sleepers.add(Duration::MAX);
        assert_eq!(sleepers.instants.lock().len(), INSTANTS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn after_an_outage_no_job_is_taken_away_at_once() {
        let mut looks = Looks::default();
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        looks.record_statement(false, now, after(1));
        assert_eq!(looks.lease_grace(after(1)), LEASE_GRACE);
        looks.record_statement(true, after(2), after(2));
        assert_eq!([looks.lease_grace(after(2)), looks.lease_grace(after(11))], [NEVER; 2]);
        assert_eq!(looks.lease_grace(after(12)), LEASE_GRACE);
        // A look that has waited for the database is one, too.
        looks.record_statement(false, after(20), after(24));
        assert_eq!([looks.lease_grace(after(33)), looks.lease_grace(after(34))], [NEVER, LEASE_GRACE]);
    }
}
