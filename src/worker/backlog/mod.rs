//! A lane's backlog in the ledger: jobs that must wait stay there, without worker slot or memory.
//!
//! A job that a limit of its account refuses blocks its flow until the exact instant, and new jobs of the flow are
//! recorded behind it. While a limit of the provider or the worker slots hold the lane back, all new jobs are recorded
//! there. One dispatcher per lane and process claims jobs in fair order. Guards say what a job counts for at its lane's
//! dispatcher while it is on its way. See `docs/decisions/0041-account-limits-block-flows.md` and
//! `docs/decisions/0042-limited-lane-empties-its-queue.md`.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Instrument as _;

use self::claimed_ahead::startable_soon;
use self::core::DispatchCore;
use self::dispatcher::claims_paused_until;
use self::permit_waits::OngoingWait;
use self::unrecorded::{Unrecorded, UnrecordedPayment};
use super::lane::LaneContext;
use super::retry::{RetryEnded, retry_while_unavailable};
use crate::domain::commit_memory::Progress;
use crate::domain::job::{FlowKey, Identifier, Job, JobId};
use crate::domain::persist_window::{STARTS_LOOKED_AT, delay_of_record};
use crate::domain::provider::Provider;
use crate::faults::{self, CrashPoint};
use crate::ledger::backlog::BacklogRecord;
use crate::ledger::{LeaseToken, LedgerError};
use crate::limiter::gate::GateView;
use crate::queue::message::Decoded;
use crate::telemetry::spans;

pub(crate) mod claimed_ahead;
pub(crate) mod core;
pub(crate) mod cost_waits;
pub(super) mod dispatcher;
pub(super) mod intake_pace;
pub(crate) mod permit_waits;
pub(super) mod unrecorded;

/// What this process knows of a lane's backlog.
#[derive(Debug)]
pub struct LaneBacklog {
    core: Mutex<DispatchCore<Identifier, JobId>>,
    pub unrecorded: Unrecorded,
    /// The dispatcher has to ask for its next step again.
    changed: Notify,
}

impl LaneBacklog {
    pub fn new() -> Self {
        let core = Mutex::new(DispatchCore::new(Instant::now()));
        Self { core, unrecorded: Unrecorded::default(), changed: Notify::new() }
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

/// Whether the lane is paused, tests its provider, or is kept back by a limit of the provider or the worker slots, so that
/// new jobs of this cost wait in the ledger. Then all of them are counted and ordered, and none waits in memory.
fn is_limited(lane: &LaneContext, cost: u16) -> bool {
    if claims_paused_until(lane).is_some() || lane.control.is_probing() {
        return true;
    }
    let startable = || startable_soon(&lane.settings.borrow().provider);
    let view = lane.gate.view();
    let by_slots = || !writes_hold_slots(lane);
    let is_held_back = lane.backlog.core.lock().is_limited(Instant::now(), startable, &view.borrow(), by_slots);
    is_held_back || lane.control.cost_wait(u32::from(cost)).is_some()
}

/// Whether most worker slots are busy with the writes of this process, and not with requests: then it is the ledger, or
/// the processor, that holds the lane back.
fn writes_hold_slots(lane: &LaneContext) -> bool {
    let workers = u64::from(lane.settings.borrow().provider.workers);
    !lane.egress.has_free_slot() && lane.meter.in_flight() < workers / 2
}

/// Whether a new job must be recorded before it is sent: it has a time of its own, earlier jobs of its flow wait, its
/// account is refused or paused, the lane keeps the order of its account, or the lane is limited.
pub(super) fn must_wait(lane: &LaneContext, job: &Job) -> bool {
    let flow = FlowKey::of(job);
    let provider = Arc::clone(&lane.settings.borrow().provider);
    let account = flow.account.as_ref();
    job.not_before.is_some()
        || job.expires_at.is_some()
        || provider.refuses_account(job.account_name())
        || provider.keeps_order_of(account)
        || lane.backlog.core.lock().knows(&flow)
        || lane.backlog.unrecorded.is_recording(&flow)
        || is_limited(lane, job.cost)
        || lane.control.account_pause(account).is_some()
}

/// Records a new job in the backlog, or asleep until its `not_before`, in its turn among the starts of other jobs and
/// behind the earlier jobs of its flow.
pub(super) async fn record(
    lane: &LaneContext,
    decoded: &Decoded,
    arrival: UnrecordedPayment<'_>,
) -> Result<BacklogRecord, RetryEnded<LedgerError>> {
    arrival.must_be_recorded();
    tokio::select! {
        () = lane.worker.intake_turns.wait() => {}
        () = lane.stop.cancelled() => {}
    }
    arrival.turn().await;
    let ledger = &lane.worker.backends.ledger;
    let delay = delay_of_record(&lane.worker.start_timer.starts_within(STARTS_LOOKED_AT));
    let recorded = retry_while_unavailable("record a job in the backlog", &lane.stop, || {
        ledger.record_backlog(&decoded.job, decoded.hash, delay)
    });
    let mut recorded = pin!(recorded.instrument(spans::step("record in the backlog")));
    let under_way = poll!(&mut recorded);
    // The jobs of a batch are recorded in the order in which they joined it.
    let _under_way = arrival.under_way();
    let recorded = match under_way {
        Poll::Ready(recorded) => recorded?,
        Poll::Pending => recorded.await?,
    };
    if let BacklogRecord::Recorded { wait } = &recorded {
        faults::crash(CrashPoint::AfterBacklogRecord);
        let token = LeaseToken { id: decoded.job.id.clone(), fence: 0 };
        lane.worker.guard.remember(&lane.name, &token, 0, Progress::Recorded);
        lane.room.record();
        if wait.is_zero() {
            lane.backlog.wake_if(|core| core.record_new(&FlowKey::of(&decoded.job), Instant::now()));
        } else {
            lane.sleepers.add(*wait);
        }
    }
    Ok(recorded)
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
