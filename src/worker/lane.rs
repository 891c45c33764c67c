//! A lane: takes the payments of one provider up to its prefetch, and sends them while the provider takes them.
//!
//! Each lane has its own channel, prefetch, egress and pauses. So a lane that is limited, slow or broken does not hold up
//! the others. While the provider cannot take jobs, intake goes on, and new jobs wait in the ledger. Intake pauses when
//! the ledger cannot take jobs, or when the lane has as many open jobs as it may have. See
//! `docs/decisions/0056-paused-lane-goes-on-recording.md`.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::backlog::LaneBacklog;
use super::intake_bound::IntakeBound;
use super::intake_room::IntakeRoom;
use super::job::Duplicates;
use super::lane_control::LaneControl;
use super::meter::LaneMeter;
use super::sleepers::Sleepers;
use super::{WorkerContext, backlog, intake, intake_room, sleepers};
use crate::domain::backoff::BackoffPolicy;
use crate::domain::provider::{Provider, ProviderName};
use crate::limiter::gate::{Gate, LaneEgress};
use crate::provider::PaymentProvider;
use crate::queue::{self, Queue, QueueError};

/// Prefetch of a lane at least, unless fewer jobs start within [`PREFETCH_MIN_SPAN`]: the next job is ready when its
/// permit starts.
const PREFETCH_MIN: u32 = 4;
/// Share of `max_wait` within which one process alone could start all jobs of its prefetch: other processes have jobs
/// too.
const WAIT_SHARE: f64 = 0.2;
/// Time for which a lane keeps at least [`PREFETCH_MIN`] jobs.
const PREFETCH_MIN_SPAN: Duration = Duration::from_secs(30);
/// Factor on the time that a full lane needs to drain, for [`max_local_wait`]. Other processes have jobs too, and
/// requests without a response hold slots.
const LOCAL_WAIT_FACTOR: u32 = 4;
/// Longest drain time of a full lane whose jobs are kept active meanwhile.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(60);
/// Longest wait of an active job, unless the row says more: a drain time of a minute, and the responses.
const LOCAL_WAIT_MAX: Duration = Duration::from_secs(90);
/// Consuming resumes this long before a pause ends, so that the first job is ready when it does.
pub const RESUME_AHEAD: Duration = Duration::from_millis(50);
const REOPEN_BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(5) };

/// A provider row and the client made from it.
pub struct LaneSettings {
    pub provider: Arc<Provider>,
    pub client: Arc<dyn PaymentProvider>,
}

/// Context that all jobs of a lane share.
pub struct LaneContext {
    pub worker: WorkerContext,
    pub name: ProviderName,
    pub meter: Arc<LaneMeter>,
    pub settings: watch::Receiver<Arc<LaneSettings>>,
    pub gate: Gate,
    pub egress: Arc<LaneEgress>,
    pub control: Arc<LaneControl>,
    pub duplicates: Duplicates,
    pub backlog: Arc<LaneBacklog>,
    pub sleepers: Sleepers,
    pub intake_bound: Mutex<IntakeBound>,
    pub room: IntakeRoom,
    /// Stops this lane alone.
    pub stop: CancellationToken,
}

/// Most unacknowledged deliveries that one process may have: what its share of `max_wait` can start, within workers and
/// bucket.
pub fn prefetch(provider: &Provider) -> u16 {
    let startable = provider.startable_within(provider.max_wait.mul_f64(WAIT_SHARE), DRAIN_TIME_MAX).ceil();
    let patient = provider.startable_within(PREFETCH_MIN_SPAN, DRAIN_TIME_MAX);
    let most = provider.workers.saturating_add(provider.bucket_capacity).min(u32::from(u16::MAX));
    // A float beyond the range of u32 saturates, which `most` then bounds.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded above and not negative")]
    let (startable, patient) = (startable as u32, patient as u32);
    let least = PREFETCH_MIN.min(patient).max(1).min(most);
    u16::try_from(startable.clamp(least, most)).unwrap_or(u16::MAX)
}

/// Longest wait of an active job, counted from its delivery: `max_wait`, or what a full lane needs to drain. Without
/// the second, jobs of a slow lane would be delayed behind a few others, and then queue behind the whole backlog. A
/// lane that takes longer than [`DRAIN_TIME_MAX`] to drain is not waited for.
pub fn max_local_wait(provider: &Provider) -> Duration {
    let at_mean_s = f64::from(prefetch(provider)) / provider.mean_per_second();
    let Ok(at_mean) = Duration::try_from_secs_f64(at_mean_s) else { return provider.max_wait };
    let drain_time = at_mean.max(provider.burst_window().unwrap_or_default());
    if drain_time > DRAIN_TIME_MAX {
        return provider.max_wait;
    }
    provider.max_wait.max((drain_time * LOCAL_WAIT_FACTOR).min(LOCAL_WAIT_MAX))
}

/// Most jobs that the lane claims ahead: 1 while the circuit breaker probes the provider.
pub(super) fn claims_ahead_max(context: &LaneContext) -> u16 {
    if context.control.is_probing() { 1 } else { prefetch(&context.settings.borrow().provider) }
}

/// Messages that the lane ever holds at most.
fn prefetch_of(context: &LaneContext) -> u16 {
    prefetch(&context.settings.borrow().provider)
}

/// Messages that the lane holds at most now, out of the most that it ever holds.
fn places(context: &LaneContext, most: u16) -> u16 {
    context.intake_bound.lock().places(most, Instant::now())
}

/// Runs one lane until it is stopped, and reopens its consumer after each failure.
pub async fn run(context: Arc<LaneContext>) {
    context.worker.jobs.spawn(sleepers::run(Arc::clone(&context)));
    context.worker.jobs.spawn(backlog::dispatcher::run(Arc::clone(&context)));
    // Without a broker the dispatcher alone has payments for the lane: those that are recorded.
    let Some(queue) = context.worker.backends.queue.clone() else {
        tracing::info!(provider = %context.name, "lane open, without a queue");
        return;
    };
    context.worker.jobs.spawn(intake_room::run(Arc::clone(&context)));
    let mut failed = 0;
    while !context.stop.is_cancelled() {
        let most = prefetch_of(&context);
        let prefetch = places(&context, most);
        let error = match open(&context, queue.as_ref(), prefetch).await {
            Ok(lane) => {
                failed = 0;
                context.control.record_queue_open();
                tracing::info!(provider = %context.name, prefetch, "lane open");
                let jobs = TaskTracker::new();
                let mut lane = OpenLane { consumer: lane, most, prefetch };
                match consume(&context, &mut lane, &jobs).await {
                    // Stopped, or reopened with another prefetch: active jobs finish on the old consumer.
                    Ok(()) => {
                        context.worker.jobs.spawn(retire(Arc::clone(&context), lane.consumer, jobs));
                        continue;
                    }
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        failed += 1;
        tracing::warn!(provider = %context.name, %error, failed, "lane closed, reopening");
        let wait = REOPEN_BACKOFF.delay(failed, rand::random());
        if let QueueError::Refused(why) = &error {
            context.control.record_queue_refusal(wait, why);
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = context.stop.cancelled() => {}
        }
    }
}

/// Opens the lane's consumer after declaring its topology again: it may have been deleted since the last time.
async fn open(
    context: &LaneContext,
    queue: &dyn Queue,
    prefetch: u16,
) -> Result<Box<dyn queue::LaneConsumer>, QueueError> {
    queue.declare(std::slice::from_ref(&context.name)).await?;
    queue.open_lane(&context.name, prefetch).await
}

/// A lane's consumer, and how many messages it holds at most: ever, and now.
struct OpenLane {
    consumer: Box<dyn queue::LaneConsumer>,
    most: u16,
    prefetch: u16,
}

impl OpenLane {
    /// Follows the lane's rate.
    async fn resize(&mut self, context: &LaneContext) -> Result<(), QueueError> {
        let prefetch = places(context, self.most);
        if prefetch != self.prefetch {
            tracing::debug!(provider = %context.name, prefetch, "the lane's rate has changed its prefetch");
            self.prefetch = prefetch;
            self.consumer.resize(prefetch).await?;
        }
        Ok(())
    }
}

/// Consumes jobs until the lane is stopped or the bound of its prefetch changes.
async fn consume(context: &Arc<LaneContext>, open: &mut OpenLane, jobs: &TaskTracker) -> Result<(), QueueError> {
    let free = Arc::new(Semaphore::new(usize::from(open.most)));
    let mut settings = context.settings.clone();
    let mut intake = context.control.watch_intake();
    let mut outcomes = context.control.outcomes.watch_pause();
    let mut full = context.control.watch_full();
    let mut consuming = true;
    let mut arrived = true;
    loop {
        let pauses =
            [&mut intake, &mut outcomes].map(|pause| pause.borrow_and_update().as_ref().map(|pause| pause.until));
        let paused_until = intake_paused_until(pauses.into_iter().flatten().max());
        let may_consume = paused_until.is_none() && full.borrow_and_update().is_none();
        if consuming && !may_consume {
            open.consumer.stop().await?;
            consuming = false;
        } else if !consuming && may_consume {
            open.consumer.resume().await?;
            (consuming, arrived) = (true, true);
        }
        tokio::select! {
            biased;
            () = context.stop.cancelled() => break,
            changed = settings.changed() => {
                // Without its sender the lane is about to be stopped.
                if changed.is_err() || prefetch_of(context) != open.most {
                    break;
                }
            }
            _ = intake.changed() => {}
            _ = outcomes.changed() => {}
            _ = full.changed() => {}
            () = sleep_until(paused_until.unwrap_or_else(Instant::now)), if paused_until.is_some() => {}
            delivered = next_delivery(open.consumer.as_mut(), &free), if arrived => match delivered? {
                Some((delivery, share)) => {
                    let lane = Arc::clone(context);
                    // Boxed because a future of thousands of bytes is moved several times on its way into a task.
                    let work = Box::pin(intake::handle_delivery(lane, delivery, share));
                    context.worker.jobs.spawn(jobs.track_future(work));
                    open.resize(context).await?;
                }
                None => arrived = false,
            },
        }
    }
    if consuming {
        open.consumer.stop().await?;
    }
    // Deliveries that have not been started are requeued unchanged.
    while let Some(delivery) = open.consumer.next().await? {
        if let Err(error) = delivery.receipt.requeue().await {
            tracing::debug!(%error, "delivery not requeued; the broker requeues it");
        }
    }
    Ok(())
}

/// Keeps a stopped consumer open until its last job is finished: acknowledgements need its channel.
async fn retire(context: Arc<LaneContext>, lane: Box<dyn queue::LaneConsumer>, jobs: TaskTracker) {
    jobs.close();
    tokio::select! {
        () = jobs.wait() => {}
        () = context.worker.abandon.cancelled() => {}
    }
    drop(lane);
}

/// The next delivery and its share of the prefetch; cancel-safe, because the share is acquired first.
async fn next_delivery(
    lane: &mut dyn queue::LaneConsumer,
    free: &Arc<Semaphore>,
) -> Result<Option<(queue::Delivery, tokio::sync::OwnedSemaphorePermit)>, QueueError> {
    let Ok(share) = Arc::clone(free).acquire_owned().await else { return Ok(None) };
    Ok(lane.next().await?.map(|delivery| (delivery, share)))
}

/// Instant until which the lane does not consume; `None` when it may.
fn intake_paused_until(paused_until: Option<Instant>) -> Option<Instant> {
    let until = paused_until?;
    let until = until.checked_sub(RESUME_AHEAD).unwrap_or(until);
    (until > Instant::now()).then_some(until)
}
