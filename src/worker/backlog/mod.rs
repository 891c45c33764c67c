//! A lane's backlog in the ledger: jobs that a limit of their account refuses wait there, without message, worker slot
//! or memory.
//!
//! A refused job blocks its flow until the exact instant, and new jobs of the flow are recorded behind it. One
//! dispatcher per lane and process claims jobs in fair order. See `docs/decisions/0041-account-limits-block-flows.md`.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use self::known_flows::{KNOWN_FLOWS_MAX, KnownFlows};
pub use self::places::FlowPlace;
use self::places::{FLOW_MAX, FlowPlaces};
use super::active_jobs::LEASE;
use super::delay::{MessageCopy, publish_delayed};
use super::execute::{Arrival, review_changed_row};
use super::intake::{DeliveryAction, pause_intake, run_claimed};
use super::lane::{LaneContext, RESUME_AHEAD, current_prefetch};
use super::retry::{RetryEnded, retry_while_unavailable};
use super::sweeper::republish::rebuild_message;
use crate::domain::group_commit::MAX_DELAY;
use crate::faults::{self, CrashPoint};
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogClaim, BacklogClaimRequest, BacklogJob, BacklogRecord, FlowKey, FlowStatus};
use crate::ledger::upkeep::JobToRepublish;
use crate::queue::Properties;
use crate::queue::message::Decoded;
use crate::telemetry::spans;

mod known_flows;
mod places;

/// Time between two looks at the flows, while some are known. Other processes block and unblock them, too.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The same, while the lane has no backlog.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// A look takes at most this part of the time, however many flows there are.
const LOOK_TIME_DIVISOR: u32 = 20;
/// Least time between a claim that found nothing more and the next one.
const CLAIM_PAUSE: Duration = Duration::from_millis(10);
/// Longest time between two looks at a lane that must not send.
const PAUSED_INTERVAL: Duration = Duration::from_secs(1);
/// Most jobs of one claim.
const CLAIM_MAX: u32 = 100;
/// Jobs of a flow in a row.
const QUANTUM: u32 = 4;

/// What this process knows of a lane's backlog.
#[derive(Debug, Default)]
pub struct LaneBacklog {
    flows: KnownFlows,
    places: Arc<FlowPlaces>,
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

    /// Claims nothing for this long: the lane cannot send.
    pub fn hold(&self, wait: Duration) {
        self.times().delay_until(Instant::now() + wait);
    }

    fn times(&self) -> MutexGuard<'_, DispatchTimes> {
        self.dispatch_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records a new job behind those of its flow that wait in the backlog. `None`: none is known to wait, or the job is
/// known already and not in the backlog.
pub(super) async fn record_behind(
    lane: &LaneContext,
    decoded: &Decoded,
) -> Option<Result<BacklogRecord, RetryEnded<LedgerError>>> {
    let flow = FlowKey::of(&decoded.job);
    if decoded.job.not_before.is_some() || !lane.backlog.flows.contains(&flow) {
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
    let mut dispatcher = Dispatcher { jobs: TaskTracker::new(), ended: Arc::default(), look_at: Instant::now() };
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
            () = lane.backlog.places.room() => lane.backlog.times().is_claimable = true,
            () = dispatcher.ended.notified() => {}
        }
    }
}

struct Dispatcher {
    jobs: TaskTracker,
    /// A job has ended while there was no room for another.
    ended: Arc<Notify>,
    look_at: Instant,
}

impl Dispatcher {
    /// Looks at the flows and claims, where that is due. Returns when to do so again, if nothing happens before.
    async fn step(&mut self, lane: &Arc<LaneContext>) -> Result<Instant, LedgerError> {
        let began = Instant::now();
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
        let most = u32::from(current_prefetch(lane)).min(CLAIM_MAX);
        let free = most.saturating_sub(u32::try_from(self.jobs.len()).unwrap_or(u32::MAX));
        if free == 0 {
            return Ok(self.look_at);
        }
        self.claim(lane, free).await
    }

    async fn look(&mut self, lane: &LaneContext) -> Result<(), LedgerError> {
        let began = Instant::now();
        self.look_at = began + REFRESH_INTERVAL;
        let flows = lane.worker.backends.backlog.largest_flows(&lane.name, KNOWN_FLOWS_MAX).await?;
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

    async fn claim(&mut self, lane: &Arc<LaneContext>, at_most: u32) -> Result<Instant, LedgerError> {
        let full = lane.backlog.places.full_flows();
        let request = BacklogClaimRequest {
            lane: &lane.name,
            owner: &lane.worker.options.owner,
            lease: LEASE,
            at_most,
            per_flow: QUANTUM,
            flow_max: FLOW_MAX,
            except: &full,
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
        for job in jobs {
            self.start(lane, job);
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

    fn start(&self, lane: &Arc<LaneContext>, job: BacklogJob) {
        let flow = FlowKey { class: job.class, account: job.job.account.clone() };
        let place = lane.backlog.places.occupy(flow);
        // Boxed because a future of thousands of bytes is moved several times on its way into a task.
        let work = Box::pin(handle_job(Arc::clone(lane), job, place));
        let ended = Arc::clone(&self.ended);
        let tracked = self.jobs.track_future(work);
        lane.worker.jobs.spawn(async move {
            tracked.await;
            ended.notify_one();
        });
    }
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
async fn handle_job(lane: Arc<LaneContext>, job: BacklogJob, place: FlowPlace) {
    let _active = lane.meter.delivery_started(false);
    let span = spans::job(lane.name.as_str(), &BTreeMap::new());
    let end = AssertUnwindSafe(process(&lane, job, place).instrument(span.clone())).catch_unwind().await;
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
async fn process(lane: &LaneContext, claimed: BacklogJob, place: FlowPlace) -> DeliveryAction {
    let BacklogJob { job, hash, claimed, .. } = claimed;
    spans::record_job(&job.id);
    let recorded = JobToRepublish { job, hash, sweeps: 0, copy: claimed.copy };
    let body = rebuild_message(&recorded);
    let arrival = Arrival { place: Some(place), ..Arrival::now() };
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
