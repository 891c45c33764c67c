//! A lane's backlog in the ledger: jobs that must wait stay there, without message, worker slot or memory.
//!
//! A job that a limit of its account refuses blocks its flow until the exact instant, and new jobs of the flow are
//! recorded behind it. While a limit of the provider or the worker slots hold the lane back, all new jobs are recorded
//! there. One dispatcher per lane and process claims jobs in fair order. Guards say what a job counts for at its lane's
//! dispatcher while it is on its way. See `docs/decisions/0041-account-limits-block-flows.md` and
//! `docs/decisions/0042-limited-lane-empties-its-queue.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Instrument as _;

use self::claimed_ahead::startable_soon;
use self::core::DispatchCore;
use self::permit_waits::OngoingWait;
use super::lane::LaneContext;
use super::lane_control::LanePause;
use super::retry::{RetryEnded, retry_while_unavailable};
use crate::domain::job::{FlowKey, Identifier, JobId};
use crate::domain::persist_window::{STARTS_LOOKED_AT, delay_of_record};
use crate::domain::provider::{Mode, Provider};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::LedgerError;
use crate::ledger::backlog::BacklogRecord;
use crate::limiter::gate::GateView;
use crate::queue::message::Decoded;
use crate::telemetry::spans;

pub(crate) mod claimed_ahead;
pub(crate) mod core;
pub(crate) mod cost_waits;
pub(super) mod dispatcher;
pub(super) mod intake_pace;
pub(crate) mod permit_waits;

/// What this process knows of a lane's backlog.
#[derive(Debug)]
pub struct LaneBacklog {
    core: Mutex<DispatchCore<Identifier, JobId>>,
    /// The dispatcher has to ask for its next step again.
    changed: Notify,
}

impl LaneBacklog {
    pub fn new() -> Self {
        Self { core: Mutex::new(DispatchCore::new(Instant::now())), changed: Notify::new() }
    }

    /// Records that a job has returned, and until when its flow is blocked.
    pub fn record_return(&self, flow: FlowKey, blocked_until: Option<Instant>) {
        self.core.lock().record_return(flow, blocked_until, Instant::now());
        self.changed.notify_one();
    }

    /// Records that a job of this account is done with: the next one may be claimed, where the order of accounts is kept.
    pub fn record_end(&self, provider: &Provider, account: Option<&Identifier>) {
        if provider.keeps_order_of(account) {
            self.core.lock().allow_claim();
            self.changed.notify_one();
        }
    }

    /// Ends all blocks of flows: the row has changed, which may have fixed their cause.
    pub fn end_blocks(&self) {
        self.core.lock().end_blocks();
        self.changed.notify_one();
    }

    /// Claims nothing for this long: the lane cannot send.
    pub fn hold(&self, wait: Duration) {
        self.core.lock().hold_until(Instant::now() + wait);
    }

    /// Claims nothing for this long, unless a worker slot becomes free: a job got none in time.
    pub fn await_slot(&self, wait: Duration) {
        self.core.lock().await_slot(Instant::now() + wait);
    }

    /// Records that a worker slot is free.
    pub fn record_free_slot(&self) {
        self.wake_if(DispatchCore::slot_is_free);
    }

    /// Changes the core, and wakes the dispatcher if that returns so.
    fn wake_if(&self, change: impl FnOnce(&mut DispatchCore<Identifier, JobId>) -> bool) {
        let is_due = change(&mut self.core.lock());
        if is_due {
            self.changed.notify_one();
        }
    }
}

/// Whether intake goes on during this pause, and records new jobs in the backlog: a limit of the provider is used up.
pub(super) fn is_recorded_during(pause: &LanePause, provider: &Provider) -> bool {
    pause.cause == PauseCause::Limit && provider.mode == Mode::Blocking
}

/// Whether a limit of the provider or the worker slots hold the lane back, so that new jobs of this cost wait in the
/// ledger. Then all of them are counted and ordered, and none waits in memory.
///
/// In `requeue` mode, jobs wait in delay queues. While something else pauses the lane, they stay in its queue.
fn is_limited(lane: &LaneContext, cost: u16) -> bool {
    if lane.settings.borrow().provider.mode != Mode::Blocking {
        return false;
    }
    let startable = || startable_soon(&lane.settings.borrow().provider);
    let view = lane.gate.view();
    let is_held_back = lane.backlog.core.lock().is_limited(Instant::now(), startable, &view.borrow());
    is_held_back || lane.control.is_at_limit() || lane.control.cost_wait(u32::from(cost)).is_some()
}

/// Records a new job in the backlog, if earlier jobs of its flow wait there, if its account is paused, if the lane keeps
/// the order of its account, or if the lane is limited. One with a `not_before` is claimed first: by its own clock, the
/// database says whether it is due. `None`: it does not wait there, or it is known already and not in the backlog.
pub(super) async fn record_if_it_must_wait(
    lane: &LaneContext,
    decoded: &Decoded,
) -> Option<Result<BacklogRecord, RetryEnded<LedgerError>>> {
    let flow = FlowKey::of(&decoded.job);
    let is_paused = || lane.control.account_pause(flow.account.as_ref()).is_some();
    let has_order = lane.settings.borrow().provider.keeps_order_of(flow.account.as_ref());
    let must_wait =
        || has_order || lane.backlog.core.lock().knows(&flow) || is_limited(lane, decoded.job.cost) || is_paused();
    if decoded.job.not_before.is_some() || !must_wait() {
        return None;
    }
    tokio::select! {
        () = lane.worker.intake_turns.wait() => {}
        () = lane.stop.cancelled() => {}
    }
    let ledger = &lane.worker.backends.ledger;
    let delay = delay_of_record(&lane.worker.start_timer.starts_within(STARTS_LOOKED_AT));
    let recorded = retry_while_unavailable("record a job in the backlog", &lane.stop, || {
        ledger.record_backlog(&decoded.job, decoded.hash, delay)
    });
    let recorded = recorded.instrument(spans::step("record in the backlog")).await;
    if matches!(recorded, Ok(BacklogRecord::Recorded)) {
        faults::crash(CrashPoint::AfterBacklogRecord);
        lane.backlog.wake_if(|core| core.record_new(&flow, Instant::now()));
    }
    (!matches!(recorded, Ok(BacklogRecord::Open))).then_some(recorded)
}

/// Counts one claimed job until its permit is granted, or until it is dropped.
#[derive(Debug)]
pub struct AheadGuard {
    backlog: Arc<LaneBacklog>,
    flow: FlowKey,
    is_released: AtomicBool,
}

/// A new job on its way to the gate; it counts until it waits there, or until this is dropped.
#[derive(Debug)]
pub struct Admission<'a> {
    backlog: &'a LaneBacklog,
    job: JobId,
}

/// A charge that waits for its permit; the wait ends when this is dropped.
#[derive(Debug)]
pub struct ChargeWait<'a> {
    backlog: &'a LaneBacklog,
    wait: OngoingWait,
}

impl AheadGuard {
    /// Of a job that the core has counted.
    pub(super) fn new(backlog: &Arc<LaneBacklog>, flow: FlowKey) -> Self {
        Self { backlog: Arc::clone(backlog), flow, is_released: AtomicBool::new(false) }
    }

    pub fn flow(&self) -> &FlowKey {
        &self.flow
    }

    /// The job has its permit.
    pub fn release(&self) {
        if !self.is_released.swap(true, Ordering::Relaxed) {
            self.backlog.wake_if(|core| core.release_ahead(&self.flow));
        }
    }
}

impl Drop for AheadGuard {
    fn drop(&mut self) {
        self.release();
    }
}

impl LaneBacklog {
    /// Counts a new job until it waits at the gate.
    pub fn admit(&self, job: &JobId) -> Admission<'_> {
        self.core.lock().waits.admit(job.clone());
        Admission { backlog: self, job: job.clone() }
    }

    /// Counts a charge that waits for its permit.
    pub fn begin_wait(&self, job: &JobId) -> ChargeWait<'_> {
        let wait = self.core.lock().waits.begin(job, Instant::now());
        ChargeWait { backlog: self, wait }
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.backlog.core.lock().waits.leave(&self.job);
    }
}

impl ChargeWait<'_> {
    /// The job has its permit.
    pub fn record_grant(&self, gate: &GateView) {
        self.backlog.core.lock().waits.record_grant(self.wait, gate, Instant::now());
    }
}

impl Drop for ChargeWait<'_> {
    fn drop(&mut self) {
        self.backlog.core.lock().waits.end(self.wait);
    }
}
