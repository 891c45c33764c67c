//! The guard against a database that went back: it remembers this worker's commits, compares them when another server
//! answers, and holds lanes.
//!
//! [`crate::domain::commit_memory`] decides. Between the commit of `sending` and the first byte, each charge asks
//! [`CommitGuard::admit_charge`]. The pool counts another server before it lends the first connection to it, so a request
//! that was committed there is asked after the count. See `docs/decisions/0054-the-database-went-back.md`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::WorkerContext;
use super::retry::Transient as _;
use super::settings_sync::LoadedSettings;
use super::supervisor::WorkerStatus;
use crate::domain::commit_memory::{Commit, CommitMemory, End, HoldCause, Mark, Progress, must_hold};
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::domain::outcome::FinalState;
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::ledger::database::Database;
use crate::ledger::lane_holds::{HoldsAndHeartbeat, LaneHold};
use crate::ledger::operator::DatabaseTime;
use crate::ledger::{FencedWrite, JobState, LeaseToken, LedgerError};

mod repair;

/// Time after another server answers until the proofs of the other workers are in it.
pub const PROOFS_ARRIVE_WITHIN: Duration = Duration::from_secs(3);
/// Time between two reads of the holds.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// Payments that one transaction compares.
const COMPARED_AT_ONCE: usize = 1_000;

const NOT_COMPARED: &str = "another database server answers: its ledger is compared with this worker's commits first";

/// What came of a payment, as it is written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptResponse {
    pub outcome: &'static str,
    pub status: Option<u16>,
    /// As it was requested.
    pub state: JobState,
    /// As it was committed: a charge that belongs to another payment makes it `review`.
    pub end: FinalState,
}

/// Why a charge is not sent now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldBack {
    /// Until an operator releases the lane.
    Hold(Wait),
    /// Until the ledger of another server is compared.
    NotCompared,
}

impl HeldBack {
    pub fn wait(&self) -> Wait {
        match self {
            Self::Hold(wait) => wait.clone(),
            Self::NotCompared => Wait::with_detail(WaitReason::LaneHeld, NOT_COMPARED),
        }
    }
}

/// A payment of which the database has lost a commit.
struct LostPayment {
    commit: Commit<KeptResponse>,
    /// It is `unknown` by now, and may still get its response.
    is_unknown: bool,
}

/// What this worker has committed, and which lanes are held.
pub struct CommitGuard {
    memory: Mutex<CommitMemory<KeptResponse>>,
    lost: Mutex<HashMap<JobId, LostPayment>>,
    holds: Mutex<BTreeMap<ProviderName, LaneHold>>,
    /// How often another server answered; `None`: the database is a file.
    server_changes: Option<watch::Receiver<u64>>,
    /// The changes of which the ledger is compared, and other workers' proofs are read.
    compared: AtomicU64,
    /// The database may have gone back without another server.
    suspected: Notify,
    origin: Instant,
}

impl CommitGuard {
    pub fn new(ledger: &Database) -> Self {
        Self {
            memory: Mutex::default(),
            lost: Mutex::default(),
            holds: Mutex::default(),
            server_changes: ledger.server_changes(),
            compared: AtomicU64::new(0),
            suspected: Notify::new(),
            origin: Instant::now(),
        }
    }

    /// Remembers an acknowledged commit about a payment; `number` is that of its last request.
    pub fn remember(&self, lane: &ProviderName, token: &LeaseToken, number: u32, progress: Progress<KeptResponse>) {
        let end = if let Progress::Ended(response) = &progress { End::of(response.end) } else { End::Open };
        let mark = Mark { fence: token.fence, number, end };
        let commit = Commit { provider: lane.clone(), mark, progress, at: self.now() };
        if !self.memory.lock().remember(token.id.clone(), commit) {
            self.suspected.notify_one();
        }
    }

    /// Records the end of a request. A stale one is the late response of a payment that the database may have lost.
    pub fn record_end(&self, token: &LeaseToken, number: u32, progress: Progress<KeptResponse>, written: FencedWrite) {
        match written {
            FencedWrite::Applied => {
                let lane = self.memory.lock().commit_of(&token.id).map(|commit| commit.provider.clone());
                if let Some(lane) = lane {
                    self.remember(&lane, token, number, progress);
                }
            }
            FencedWrite::Stale => {
                let mut lost = self.lost.lock();
                match lost.get_mut(&token.id).filter(|lost| lost.commit.mark.fence == token.fence) {
                    Some(lost) => lost.commit.progress = progress,
                    None => self.memory.lock().record_late(&token.id, token.fence, progress),
                }
                drop(lost);
                self.suspected.notify_one();
            }
        }
    }

    /// Whether a charge of this row that is committed as `sending` may be sent now.
    ///
    /// # Errors
    /// Why it may not.
    pub fn admit_charge(&self, row: &Provider) -> Result<(), HeldBack> {
        if let Some(hold) = self.hold_of(&row.name) {
            return Err(HeldBack::Hold(hold));
        }
        let is_compared = self.compared.load(Ordering::Acquire) == self.changes();
        if is_compared || row.idempotency_retention.is_some() { Ok(()) } else { Err(HeldBack::NotCompared) }
    }

    /// Why the lane is held.
    pub fn hold_of(&self, lane: &ProviderName) -> Option<Wait> {
        let holds = self.holds.lock();
        holds.get(lane).map(|hold| Wait::with_detail(WaitReason::LaneHeld, hold.to_string()))
    }

    /// Reads the holds; returns when this worker's report was last written.
    pub async fn read_holds(&self, ledger: &Database, worker: &str) -> Result<Option<DatabaseTime>, LedgerError> {
        let HoldsAndHeartbeat { holds, reported_at } = ledger.holds_and_heartbeat(worker).await?;
        *self.holds.lock() = holds;
        Ok(reported_at)
    }

    fn changes(&self) -> u64 {
        self.server_changes.as_ref().map_or(0, |changes| *changes.borrow())
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Compares what is remembered with the ledger. What is lost is held, reported and moved to the lost payments.
    async fn compare(&self, ledger: &Database, settings: &LoadedSettings) -> Result<(), LedgerError> {
        let marks = self.memory.lock().marks(self.now());
        let mut lost = Vec::new();
        for some in marks.chunks(COMPARED_AT_ONCE) {
            let ids: Vec<JobId> = some.iter().map(|(id, _)| id.clone()).collect();
            let rows = ledger.committed_marks(&ids).await?;
            let missing = some.iter().filter(|(id, mark)| mark.is_missing_in(rows.get(id).copied()));
            lost.extend(missing.map(|(id, _)| id.clone()));
        }
        if lost.is_empty() { Ok(()) } else { self.hold_and_report(ledger, settings, &lost).await }
    }

    async fn hold_and_report(
        &self,
        ledger: &Database,
        settings: &LoadedSettings,
        lost: &[JobId],
    ) -> Result<(), LedgerError> {
        let mut oldest: HashMap<ProviderName, Duration> = HashMap::new();
        {
            let memory = self.memory.lock();
            for commit in lost.iter().filter_map(|id| memory.commit_of(id)) {
                let at = oldest.entry(commit.provider.clone()).or_insert(commit.at);
                *at = commit.at.min(*at);
            }
        }
        let is_held = |row: &&Arc<Provider>| {
            let age = oldest.get(&row.name).map(|at| self.now().saturating_sub(*at));
            must_hold(row.idempotency_retention, age)
        };
        let lanes: Vec<ProviderName> =
            settings.providers.values().filter(is_held).map(|row| row.name.clone()).collect();
        let payments = count(u64::try_from(lost.len()).unwrap_or(u64::MAX), "payment");
        let evidence = format!("the ledger lacks acknowledged commits of {payments}");
        if !lanes.is_empty() {
            ledger.hold_lanes(&lanes, HoldCause::DatabaseWentBack, &evidence).await?;
        }
        // Positions of events repeat from here on, and mean other events. A lane is held and reported all the same.
        match ledger.begin_event_era().await {
            Ok(era) => tracing::info!(era, "outcome events begin another era"),
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => tracing::error!(%error, "failed to begin another era of outcome events"),
        }
        let held = lanes.iter().map(ProviderName::as_str).collect::<Vec<_>>().join(", ");
        tracing::error!(
            payments = lost.len(),
            held,
            "the database went back: it lacks commits that it had acknowledged, as after a fail-over to an asynchronous \
             standby. The held lanes start no charge. Compare their payments with the providers' records, then release \
             each: sluicegate provider resume NAME --release-hold --because TEXT (docs/runbook.md)"
        );
        let mut all = self.lost.lock();
        let mut memory = self.memory.lock();
        for id in lost {
            if let Some(commit) = memory.forget(id) {
                all.insert(id.clone(), LostPayment { commit, is_unknown: false });
            }
        }
        Ok(())
    }
}

/// What the guard's task knows of the present server.
struct PresentServer {
    changes: u64,
    since: Instant,
    is_compared: bool,
    /// When this worker's report was last written there.
    reported_at: Option<DatabaseTime>,
}

/// Reads the holds and compares the commits until the worker stops.
pub async fn run(
    worker: WorkerContext,
    settings: watch::Receiver<Arc<LoadedSettings>>,
    status: watch::Receiver<WorkerStatus>,
) {
    let guard = Arc::clone(&worker.guard);
    let mut tick = interval(READ_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut server = PresentServer { changes: 0, since: Instant::now(), is_compared: true, reported_at: None };
    let mut changes = guard.server_changes.clone();
    let mut failing = false;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = changed(&mut changes) => {}
            () = guard.suspected.notified() => server.is_compared = false,
            () = worker.stop.cancelled() => return,
        }
        let known = settings.borrow().clone();
        let done = step(&worker, &known, &mut server).await;
        for (lane, control) in status.borrow().lanes.iter() {
            control.set_hold(guard.hold_of(lane));
        }
        if let Err(error) = &done
            && !failing
        {
            tracing::warn!(%error, "failed to compare the ledger or to read the holds of lanes, retrying");
        }
        failing = done.is_err();
    }
}

/// Waits until another server answers; a file never changes.
async fn changed(changes: &mut Option<watch::Receiver<u64>>) {
    let ended = match changes {
        Some(changes) => changes.changed().await.is_err(),
        None => true,
    };
    if ended {
        std::future::pending::<()>().await;
    }
}

/// One comparison if it is due, one read of the holds, and the repairs.
async fn step(
    worker: &WorkerContext,
    settings: &LoadedSettings,
    server: &mut PresentServer,
) -> Result<(), LedgerError> {
    let guard = &worker.guard;
    let ledger = &worker.backends.ledger;
    let changes = guard.changes();
    if changes != server.changes {
        tracing::warn!("another database server answers: lanes whose provider does not deduplicate wait for 3 s");
        *server = PresentServer { changes, since: Instant::now(), is_compared: false, reported_at: server.reported_at };
    }
    if !server.is_compared {
        guard.compare(ledger, settings).await?;
        server.is_compared = true;
    }
    let began = Instant::now();
    let reported_at = guard.read_holds(ledger, &worker.options.owner).await?;
    if server.reported_at.is_some() && reported_at < server.reported_at {
        guard.suspected.notify_one();
    }
    server.reported_at = reported_at;
    if began.duration_since(server.since) >= PROOFS_ARRIVE_WITHIN {
        guard.compared.store(changes, Ordering::Release);
    }
    repair::repair_all(worker, settings).await
}

#[cfg(test)]
#[path = "commit_guard_tests.rs"]
mod tests;
