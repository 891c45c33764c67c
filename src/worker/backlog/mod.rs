//! A lane's backlog in the ledger: jobs that must wait stay there, without message, worker slot or memory.
//!
//! A job that a limit of its account refuses blocks its flow until the exact instant, and new jobs of the flow are
//! recorded behind it. While a limit of the provider or the worker slots hold the lane back, all new jobs are recorded
//! there. One dispatcher per lane and process claims jobs in fair order. See
//! `docs/decisions/0041-account-limits-block-flows.md` and `docs/decisions/0042-limited-lane-empties-its-queue.md`.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::Instrument as _;

pub use self::claimed_ahead::AheadGuard;
use self::claimed_ahead::{AheadBounds, ClaimedAhead, Room, startable_soon};
use self::known_flows::{KNOWN_FLOWS_MAX, KnownFlows};
use self::permit_waits::PermitWaits;
use super::active_jobs::LEASE;
use super::delay::{MessageCopy, publish_delayed};
use super::intake::{DeliveryAction, pause_intake};
use super::job::{Arrival, review_changed_row, run_claimed};
use super::lane::{LaneContext, RESUME_AHEAD, current_prefetch};
use super::lane_control::LanePause;
use super::retry::{RetryEnded, retry_while_unavailable};
use super::sweeper::republish::rebuild_message;
use crate::domain::group_commit::MAX_DELAY;
use crate::domain::job::Identifier;
use crate::domain::provider::{Mode, Provider};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{
    BacklogClaim, BacklogClaimRequest, BacklogJob, BacklogRecord, FlowClass, FlowKey, FlowStatus,
};
use crate::ledger::upkeep::JobToRepublish;
use crate::limiter::gate::BlockReason;
use crate::queue::Properties;
use crate::queue::message::Decoded;
use crate::telemetry::spans;

pub(crate) mod claimed_ahead;
mod known_flows;
pub(crate) mod permit_waits;

/// Time between two looks at the flows, while some are known. Other processes block and unblock them, too.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The same, while the lane has no backlog.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// A look takes at most this part of the time, however many flows there are.
const LOOK_TIME_DIVISOR: u32 = 20;
/// Least time between a claim that found nothing more and the next one.
pub(crate) const CLAIM_PAUSE: Duration = Duration::from_millis(10);
/// Least time between two claims for few jobs. An urgent job waits that long, while the lane has as many as it may.
pub(crate) const SMALL_CLAIM_PAUSE: Duration = Duration::from_millis(50);
/// Longest time between two looks at a lane that must not send.
const PAUSED_INTERVAL: Duration = Duration::from_secs(1);
/// Most jobs of one claim.
pub(crate) const CLAIM_MAX: u32 = 100;
/// Jobs of a flow in a row.
pub(crate) const QUANTUM: u32 = 4;

/// What this process knows of a lane's backlog.
#[derive(Debug, Default)]
pub struct LaneBacklog {
    flows: KnownFlows,
    ahead: Arc<ClaimedAhead>,
    permit_waits: PermitWaits,
    /// The last claim left jobs behind for which the lane has no room yet.
    has_more: AtomicBool,
    /// The dispatcher has to end all blocks.
    ends_blocks: AtomicBool,
    dispatch_at: Mutex<DispatchTimes>,
    /// The dispatcher has to look at its times again.
    changed: Notify,
}

/// When the dispatcher claims next.
#[derive(Clone, Copy, Debug, Default)]
struct DispatchTimes {
    /// A block ends.
    wake: Option<Instant>,
    /// Nothing is claimed before.
    not_before: Option<Instant>,
    /// A flow that is not blocked may have jobs.
    is_claimable: bool,
}

impl DispatchTimes {
    fn delay_until(&mut self, at: Instant) {
        self.not_before = self.not_before.max(Some(at));
    }

    fn wake_at(&mut self, at: Instant) {
        self.wake = [self.wake, Some(at)].into_iter().flatten().min();
    }
}

impl LaneBacklog {
    /// Records that a job has returned, and until when its flow is blocked.
    pub fn record_return(&self, flow: FlowKey, blocked_until: Option<Instant>) {
        self.flows.record_return(flow, blocked_until);
        match blocked_until {
            Some(until) => self.times().wake_at(until),
            None => self.times().is_claimable = true,
        }
        self.changed.notify_one();
    }

    /// Records that a job of this account is done with: the next one may be claimed, where the order of accounts is kept.
    pub fn record_end(&self, provider: &Provider, account: Option<&Identifier>) {
        if provider.keeps_order_of(account) {
            self.times().is_claimable = true;
            self.changed.notify_one();
        }
    }

    /// Ends all blocks of flows: the row has changed, which may have fixed their cause.
    pub fn end_blocks(&self) {
        self.ends_blocks.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// The waits of the lane's charges for their permits.
    pub fn permit_waits(&self) -> &PermitWaits {
        &self.permit_waits
    }

    /// Claims nothing for this long: the lane cannot send.
    pub fn hold(&self, wait: Duration) {
        self.times().delay_until(Instant::now() + wait);
    }

    fn times(&self) -> MutexGuard<'_, DispatchTimes> {
        self.dispatch_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether intake goes on during this pause, and records new jobs in the backlog: a limit of the provider is used up.
pub(super) fn is_recorded_during(pause: &LanePause, provider: &Provider) -> bool {
    pause.cause == PauseCause::Limit && provider.mode == Mode::Blocking
}

/// Whether a limit of the provider or the worker slots hold the lane back, so that new jobs wait in the ledger. Then
/// all of them are counted and ordered, and none waits in memory.
///
/// In `requeue` mode, jobs wait in delay queues. While something else pauses the lane, they stay in its queue.
fn is_limited(lane: &LaneContext) -> bool {
    if lane.settings.borrow().provider.mode != Mode::Blocking {
        return false;
    }
    let startable = || startable_soon(&lane.settings.borrow().provider);
    let is_blocked = || {
        let view = lane.gate.view();
        let reason = view.borrow().block.as_ref().map(|(reason, _)| reason.clone());
        matches!(reason, Some(BlockReason::Limit(_)))
    };
    if lane.backlog.has_more.load(Ordering::Relaxed) || lane.backlog.permit_waits.are_long(startable, is_blocked) {
        return true;
    }
    lane.control.is_at_limit()
}

/// Records a new job in the backlog, if earlier jobs of its flow wait there, if its account is paused or has an order, or
/// if its lane is limited. `None`: it does not wait there, or it is known already and not in the backlog.
pub(super) async fn record_if_it_must_wait(
    lane: &LaneContext,
    decoded: &Decoded,
) -> Option<Result<BacklogRecord, RetryEnded<LedgerError>>> {
    let flow = FlowKey::of(&decoded.job);
    let is_paused = || lane.control.account_pause(flow.account.as_ref()).is_some();
    let has_order = lane.settings.borrow().provider.keeps_order_of(flow.account.as_ref());
    let must_wait = || has_order || lane.backlog.flows.contains(&flow) || is_limited(lane) || is_paused();
    if decoded.job.not_before.is_some() || !must_wait() {
        return None;
    }
    let backlog = &lane.worker.backends.backlog;
    let recorded = retry_while_unavailable("record a job in the backlog", &lane.stop, || {
        backlog.record_backlog(&decoded.job, decoded.hash, MAX_DELAY)
    });
    let recorded = recorded.instrument(spans::step("record in the backlog")).await;
    if matches!(recorded, Ok(BacklogRecord::Recorded)) {
        faults::crash(CrashPoint::AfterBacklogRecord);
        if lane.backlog.flows.record_new(&flow) {
            lane.backlog.times().is_claimable = true;
            lane.backlog.changed.notify_one();
        }
    }
    (!matches!(recorded, Ok(BacklogRecord::Open))).then_some(recorded)
}

/// Claims jobs from the backlog until the lane is stopped.
pub(super) async fn run(lane: Arc<LaneContext>) {
    let now = Instant::now();
    let mut dispatcher = Dispatcher { look_at: now, claimed_at: now };
    loop {
        let next_at = match dispatcher.step(&lane).await {
            Ok(next_at) => next_at,
            Err(error) => {
                tracing::debug!(provider = %lane.name, %error, "failed to claim from the backlog, retrying");
                Instant::now() + PAUSED_INTERVAL
            }
        };
        tokio::select! {
            () = lane.stop.cancelled() => return,
            () = sleep_until(next_at) => {}
            () = lane.backlog.changed.notified() => {}
            () = lane.backlog.ahead.wait_for_room() => lane.backlog.times().is_claimable = true,
        }
    }
}

struct Dispatcher {
    look_at: Instant,
    /// When it claimed last.
    claimed_at: Instant,
}

impl Dispatcher {
    /// Looks at the flows and claims, where that is due. Returns when to do so again, if nothing happens before.
    async fn step(&mut self, lane: &Arc<LaneContext>) -> Result<Instant, LedgerError> {
        let began = Instant::now();
        if lane.backlog.ends_blocks.swap(false, Ordering::Relaxed) {
            let ended = lane.worker.backends.backlog.unblock_flows(&lane.name).await;
            ended.inspect_err(|_| lane.backlog.ends_blocks.store(true, Ordering::Relaxed))?;
            self.look_at = began;
        }
        if self.look_at <= began {
            self.look(lane).await?;
        }
        let times = *lane.backlog.times();
        if !times.is_claimable && times.wake.is_none_or(|wake| wake > began) {
            return Ok(times.wake.map_or(self.look_at, |wake| wake.min(self.look_at)));
        }
        if let Some(at) = cannot_send_until(lane) {
            return Ok(at.min(began + PAUSED_INTERVAL));
        }
        let bounds = AheadBounds::of(&lane.settings.borrow().provider, current_prefetch(lane));
        let room = lane.backlog.ahead.room_within(bounds, lane.backlog.flows.first_class());
        let small_claim_at = self.claimed_at + SMALL_CLAIM_PAUSE;
        if room.jobs == 0 {
            return Ok(self.look_at);
        }
        if !room.is_worth_a_claim && small_claim_at > began {
            return Ok(small_claim_at.min(self.look_at));
        }
        self.claimed_at = began;
        self.claim(lane, room, bounds).await
    }

    async fn look(&mut self, lane: &LaneContext) -> Result<(), LedgerError> {
        let began = Instant::now();
        self.look_at = began + REFRESH_INTERVAL;
        let flows = lane.worker.backends.backlog.waiting_flows(&lane.name, KNOWN_FLOWS_MAX).await?;
        lane.backlog.flows.refresh(began, &flows);
        let is_free = |flow: &FlowStatus| flow.blocked.as_ref().is_none_or(|blocked| blocked.left.is_zero());
        if flows.iter().any(is_free) {
            lane.backlog.times().is_claimable = true;
        }
        let blocked = flows.iter().filter_map(|flow| flow.blocked.as_ref());
        if let Some(at) = blocked.map(|blocked| blocked.left).min().and_then(|left| began.checked_add(left)) {
            lane.backlog.times().wake_at(at);
        }
        let interval = if lane.backlog.flows.is_empty() { IDLE_INTERVAL } else { REFRESH_INTERVAL };
        self.look_at = Instant::now() + interval.max(began.elapsed() * LOOK_TIME_DIVISOR);
        Ok(())
    }

    async fn claim(&self, lane: &Arc<LaneContext>, room: Room, bounds: AheadBounds) -> Result<Instant, LedgerError> {
        let at_most = room.jobs.min(CLAIM_MAX);
        let request = BacklogClaimRequest {
            lane: &lane.name,
            owner: &lane.worker.options.owner,
            lease: LEASE,
            at_most,
            per_flow: QUANTUM,
            flow_max: bounds.of_one_flow,
            except: &room.full_flows,
            class_max: room.class_max,
            order: lane.settings.borrow().provider.order,
        };
        // What happens from now on sets them again.
        {
            let mut times = lane.backlog.times();
            (times.wake, times.is_claimable) = (None, false);
        }
        let claimed = lane.worker.backends.backlog.claim_backlog(&request).await;
        faults::crash(CrashPoint::AfterBacklogClaim);
        let now = Instant::now();
        let (jobs, next_wake) = match claimed {
            Ok(BacklogClaim::Claimed { jobs, next_wake }) => (jobs, next_wake),
            Ok(BacklogClaim::Busy) => {
                lane.backlog.times().is_claimable = true;
                return Ok(now + CLAIM_PAUSE.mul_f64(0.5 + rand::random::<f64>()));
            }
            Err(error) => {
                lane.backlog.times().is_claimable = true;
                return Err(error);
            }
        };
        let has_more = u32::try_from(jobs.len()).is_ok_and(|jobs| jobs == at_most);
        if room.class_max == FlowClass::LAST {
            lane.backlog.has_more.store(has_more, Ordering::Relaxed);
        }
        for job in jobs {
            start(lane, job);
        }
        let mut times = lane.backlog.times();
        if let Some(at) = next_wake.and_then(|wait| now.checked_add(wait)) {
            times.wake_at(at);
        }
        times.is_claimable |= has_more;
        if has_more {
            return Ok(now);
        }
        times.delay_until(now + CLAIM_PAUSE);
        Ok(times.wake.map_or(self.look_at, |wake| wake.min(self.look_at)))
    }
}

fn start(lane: &Arc<LaneContext>, job: BacklogJob) {
    let flow = FlowKey { class: job.class, account: job.job.account.clone() };
    let ahead = lane.backlog.ahead.add(flow);
    // Boxed because a future of thousands of bytes is moved several times on its way into a task.
    lane.worker.jobs.spawn(Box::pin(handle_job(Arc::clone(lane), job, ahead)));
}

/// Until when the lane sends no charge; `None`: it may.
fn cannot_send_until(lane: &LaneContext) -> Option<Instant> {
    let now = Instant::now();
    if lane.settings.borrow().provider.paused {
        // Ends with the row's next change, not by time.
        return Some(now + PAUSED_INTERVAL);
    }
    let control = &lane.control;
    let pauses = [control.watch_intake(), control.watch_charges(), control.watch_sending()];
    let until = pauses.iter().filter_map(|pause| pause.borrow().as_ref().map(|pause| pause.until)).max();
    let until = until.map(|until| until.checked_sub(RESUME_AHEAD).unwrap_or(until));
    until.max(lane.backlog.times().not_before).filter(|until| *until > now)
}

/// Runs a job that was claimed from the backlog, to its end.
async fn handle_job(lane: Arc<LaneContext>, job: BacklogJob, ahead: AheadGuard) {
    let _active = lane.meter.delivery_started(false);
    let span = spans::job(lane.name.as_str(), &BTreeMap::new());
    let end = AssertUnwindSafe(process(&lane, job, ahead).instrument(span.clone())).catch_unwind().await;
    let action = end.unwrap_or_else(|_| {
        tracing::error!(provider = %lane.name, "job handler panicked; the job's lease expires");
        DeliveryAction::RequeueFault
    });
    spans::record_end(&span, action.code());
    if action == DeliveryAction::RequeueAndPause {
        pause_intake(&lane);
    }
}

/// Processes the job as a delivery does, but without a message: nothing is acknowledged or requeued.
async fn process(lane: &LaneContext, claimed: BacklogJob, ahead: AheadGuard) -> DeliveryAction {
    let BacklogJob { job, hash, claimed, .. } = claimed;
    spans::record_job(&job.id);
    let recorded = JobToRepublish { job, hash, sweeps: 0, copy: claimed.copy };
    let body = rebuild_message(&recorded);
    let arrival = Arrival { ahead: Some(ahead), ..Arrival::now() };
    let decoded = Box::new(Decoded { job: recorded.job, hash, warnings: Vec::new() });
    let Some(body) = body else { return review_changed_row(lane, decoded.job, claimed, arrival).await };
    let properties = Properties {
        message_id: Some(decoded.job.id.as_str().to_owned()),
        content_type: Some("application/json".to_owned()),
        ..Properties::default()
    };
    let copy = MessageCopy { provider: lane.name.clone(), body, properties };
    let action = run_claimed(lane, decoded, Box::new(claimed), arrival).await;
    if let DeliveryAction::Delay { wait, number } = action
        && let Err(error) = publish_delayed(&lane.worker, &copy.with_number(number), wait).await
    {
        tracing::warn!(provider = %lane.name, ?error, "failed to delay a job; a sweeper publishes it when it is overdue");
    }
    action
}
