//! Sleeping jobs: each lane returns those that this process put to sleep at their instants, and one process returns all
//! others each second, together with the jobs of lost workers.
//!
//! The ledger has each job's instant, and decides who is due. The instants here only say when to ask.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::{Instant, sleep, sleep_until};

use super::WorkerContext;
use super::lane::LaneContext;
use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::LedgerError;
use crate::ledger::backlog::LostJob;

/// Instants that one lane keeps: the memory of a few jobs. Beyond that, the look of each second finds the jobs.
const INSTANTS_MAX: usize = 10_000;
/// Time between two looks for jobs that no instant of this process names.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Jobs that one step returns: short statements, so that no worker waits behind them.
const BATCH: u32 = 500;
/// Time between two looks without the duty: the process that has it may not serve all lanes. And between two looks for
/// jobs that this process has without knowing, because it never learned the end of a write.
const OWN_LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Lost jobs that one look finds: they are few.
const LOST_MAX: u32 = 10_000;

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
            None => LookedAt { at: now, lanes: looks.look(now, worker).await? },
        };
        Ok(looks.last.insert(looked).lanes.contains(lane))
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
}

/// The lost jobs of one lane, and since when this process sees each of them.
#[derive(Debug, Default)]
struct LostJobs(HashMap<LostJob, Instant>);

impl LostJobs {
    /// Records the jobs that one look has found. Returns those that may be taken away: what was not sent at once, and what
    /// may be in flight once its response came or never comes. That counts from here on, by the time of this process.
    fn record(&mut self, found: Vec<LostJob>, looks_for_own: bool, now: Instant) -> Vec<LostJob> {
        let mut before = std::mem::take(&mut self.0);
        let mut due = Vec::new();
        for job in found {
            let since = before.remove(&job).unwrap_or(now);
            // A claim of this process may be on its way from the ledger to its lane.
            let kept_for = if job.is_own { OWN_LOOK_INTERVAL / 2 } else { Duration::ZERO };
            if now.saturating_duration_since(since) >= job.wire_time.unwrap_or_default().max(kept_for) {
                due.push(job.clone());
            }
            self.0.insert(job, since);
        }
        if !looks_for_own {
            self.0.extend(before.into_iter().filter(|(job, _)| job.is_own));
        }
        due
    }
}

/// Returns the lane's jobs until the lane is stopped.
pub async fn run(lane: Arc<LaneContext>) {
    let mut look_at = Instant::now() + LOOK_INTERVAL;
    let mut own_look_at = Instant::now() + OWN_LOOK_INTERVAL;
    let mut lost = LostJobs::default();
    loop {
        let first = lane.sleepers.first();
        tokio::select! {
            () = lane.stop.cancelled() => return,
            () = lane.sleepers.has_earlier.notified() => continue,
            () = sleep_until(first.map_or(look_at, |at| at.min(look_at))) => {}
        }
        let now = Instant::now();
        let mut is_due = lane.sleepers.take_due(now);
        let own = (own_look_at <= now).then_some(lane.worker.options.owner.as_str());
        let returned = async {
            let mut is_look = own.is_some();
            if look_at <= now {
                is_look |= lane.worker.lanes_with_returns.contains(&lane.name, &lane.worker).await?;
            }
            is_due |= is_look;
            if is_due {
                wake_due(&lane).await?;
            }
            if is_look { take_away_lost(&lane, &mut lost, own).await } else { Ok(()) }
        };
        if let Err(error) = returned.await {
            tracing::debug!(provider = %lane.name, %error, "failed to return jobs to the backlog, retrying");
        }
        if look_at <= now {
            look_at = now + LOOK_INTERVAL;
        }
        if own.is_some() {
            own_look_at = now + OWN_LOOK_INTERVAL;
        }
    }
}

/// Wakes batch after batch, with pauses as long as each took.
async fn wake_due(lane: &LaneContext) -> Result<(), LedgerError> {
    loop {
        let began = Instant::now();
        let flows = lane.worker.backends.ledger.wake_due(&lane.name, BATCH).await?;
        faults::crash(CrashPoint::AfterWake);
        let is_full = flows.len() >= BATCH as usize;
        flows.into_iter().for_each(|flow| lane.backlog.record_return(flow, None));
        if !is_full || lane.stop.is_cancelled() {
            return Ok(());
        }
        sleep(began.elapsed()).await;
    }
}

/// Takes away what lost workers had, and with `own` what this process has without knowing.
async fn take_away_lost(lane: &LaneContext, lost: &mut LostJobs, own: Option<&str>) -> Result<(), LedgerError> {
    let worker = &lane.worker;
    let mut found = worker.backends.ledger.lost_jobs(&lane.name, own, LOST_MAX).await?;
    // The end of a request may wait for the database: this worker has not lost its job.
    found.retain(|job| !worker.active_jobs.contains(&job.id));
    for some in lost.record(found, own.is_some(), Instant::now()).chunks(BATCH as usize) {
        let flows = worker.backends.ledger.take_away(some, own).await?;
        if !flows.is_empty() {
            tracing::warn!(provider = %lane.name, jobs = flows.len(), "jobs of lost workers return to the backlog");
        }
        flows.into_iter().for_each(|flow| lane.backlog.record_return(flow, None));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::job::JobId;

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
    async fn job_in_flight_is_taken_away_after_its_wire_time() {
        const NONE: [&str; 0] = [];
        let job = |id: &str, number: u32, wire_s: Option<u64>, is_own: bool| LostJob {
            id: JobId::new(id).unwrap(),
            fence: 1,
            number,
            wire_time: wire_s.map(Duration::from_secs),
            is_own,
        };
        let (unsent, sent, own) =
            (job("unsent", 0, None, false), job("sent", 1, Some(30), false), job("own", 0, None, true));
        let mut lost = LostJobs::default();
        let began = Instant::now();
        let mut seen = |seconds: u64, looks_for_own: bool, found: &[&LostJob]| {
            let found = found.iter().map(|job| (*job).clone()).collect();
            let due = lost.record(found, looks_for_own, began + Duration::from_secs(seconds));
            due.iter().map(|job| job.id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(seen(0, true, &[&unsent, &sent, &own]), ["unsent"]);
        assert_eq!(seen(1, false, &[&sent]), NONE);
        assert_eq!(seen(10, true, &[&sent, &own]), ["own"]);
        assert_eq!(seen(29, false, &[&sent]), NONE);
        // Another request began meanwhile.
        let next = job("sent", 2, Some(30), false);
        assert_eq!(seen(30, false, &[&next]), NONE);
        assert_eq!(seen(60, false, &[&next]), ["sent"]);
    }
}
