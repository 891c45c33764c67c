//! A lane: takes jobs of one provider from the broker, no more than it has free places, and only while it is worth it.
//!
//! Refuses to share: every lane has its own channel, places, pool and pauses, so one that is limited, slow or broken
//! costs the others nothing. While its provider cannot take jobs anyway, the backlog stays in the queue.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::execute::Duplicates;
use super::lane_control::LaneControl;
use super::meter::LaneMeter;
use super::scheduler::Scheduler;
use super::{WorkerContext, intake, lookups};
use crate::domain::backoff::BackoffPolicy;
use crate::domain::provider::{Provider, ProviderName};
use crate::limiter::gate::Gate;
use crate::provider::PaymentProvider;
use crate::queue::{self, QueueError};

/// Fewest places of a lane: enough that the next job is at hand when its permit comes.
const PREFETCH_MIN: u32 = 4;
/// Share of `max_wait` that a full lane's jobs may have to wait, if this process were alone: others hold jobs too.
const WAIT_SHARE: f64 = 0.2;
/// What [`patience`] adds to what a full lane's jobs wait if this process is alone: others hold jobs too, and answers hold
/// slots.
const LOCAL_WAIT_FACTOR: u32 = 4;
/// Longest wait in hand, whatever the row says: as long as its `max_wait` may be.
const LOCAL_WAIT_MAX: Duration = Duration::from_secs(60);
/// Taking begins this long before a pause ends, so that the first job is ready when it does.
pub const RESUME_AHEAD: Duration = Duration::from_millis(50);
const REOPEN_BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(5) };

/// A provider row and the client made from it.
pub struct LaneSettings {
    pub provider: Arc<Provider>,
    pub client: Arc<dyn PaymentProvider>,
}

/// What every job of a lane shares.
pub struct LaneContext {
    pub worker: WorkerContext,
    pub name: ProviderName,
    pub meter: Arc<LaneMeter>,
    pub settings: watch::Receiver<Arc<LaneSettings>>,
    pub gate: Gate,
    pub scheduler: Scheduler,
    pub control: Arc<LaneControl>,
    pub duplicates: Duplicates,
    /// Ends this lane alone.
    pub stop: CancellationToken,
}

/// Jobs that one process takes in hand: what its share of `max_wait` can start, within workers and bucket.
#[must_use]
pub fn prefetch(provider: &Provider) -> u16 {
    let outflow = provider.egress_per_second();
    let startable = (outflow * provider.max_wait.as_secs_f64() * WAIT_SHARE).ceil();
    let most = provider.workers.saturating_add(provider.bucket_capacity).min(u32::from(u16::MAX));
    // A float beyond the range of u32 saturates, which `most` then bounds.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded above and not negative")]
    let (startable, patient) = (startable as u32, (outflow * LOCAL_WAIT_MAX.as_secs_f64() / 2.0) as u32);
    let least = PREFETCH_MIN.min(patient).max(1).min(most);
    u16::try_from(startable.clamp(least, most)).unwrap_or(u16::MAX)
}

/// How long a job may wait in hand, from its delivery: `max_wait`, or what the steady outflow needs for all that a lane has
/// in hand. Where it is slow, a job would else be parked for waiting behind three others, and go behind the whole backlog.
/// An outflow that starts nothing within [`PATIENCE_MAX`] is not waited for.
#[must_use]
pub fn max_local_wait(provider: &Provider) -> Duration {
    let full_s = f64::from(prefetch(provider)) / provider.egress_per_second();
    match Duration::try_from_secs_f64(full_s) {
        Ok(full) if full <= LOCAL_WAIT_MAX => provider.max_wait.max((full * LOCAL_WAIT_FACTOR).min(LOCAL_WAIT_MAX)),
        _ => provider.max_wait,
    }
}

/// Places of a lane now: one while nobody knows whether its provider is up.
fn current_prefetch(parts: &LaneContext) -> u16 {
    if parts.control.is_probing() { 1 } else { prefetch(&parts.settings.borrow().provider) }
}

/// Runs one lane until it is stopped, over as many connections as that takes.
pub async fn run(parts: Arc<LaneContext>) {
    parts.worker.jobs.spawn(lookups::run(Arc::clone(&parts)));
    let mut failed = 0;
    while !parts.stop.is_cancelled() {
        let places = current_prefetch(&parts);
        let error = match open(&parts, places).await {
            Ok(mut lane) => {
                failed = 0;
                parts.control.record_queue_open();
                tracing::info!(provider = %parts.name, places, "lane open");
                let jobs = TaskTracker::new();
                match consume(&parts, lane.as_mut(), places, &jobs).await {
                    // Stopped, or to be opened anew with other places: what is in hand is finished on this lane.
                    Ok(()) => {
                        parts.worker.jobs.spawn(retire(Arc::clone(&parts), lane, jobs));
                        continue;
                    }
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        failed += 1;
        tracing::warn!(provider = %parts.name, %error, failed, "lane closed, will open again");
        let wait = REOPEN_BACKOFF.delay(failed, rand::random());
        if let QueueError::Refused(why) = &error {
            parts.control.record_queue_refusal(wait, why);
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = parts.stop.cancelled() => {}
        }
    }
}

/// Opens the lane over a topology that is declared, whatever became of it since the last time.
async fn open(parts: &LaneContext, places: u16) -> Result<Box<dyn queue::LaneConsumer>, QueueError> {
    let queue = &parts.worker.backends.queue;
    queue.declare(std::slice::from_ref(&parts.name)).await?;
    queue.open_lane(&parts.name, places).await
}

/// Takes jobs until the lane is stopped or its number of places has changed.
async fn consume(
    parts: &Arc<LaneContext>,
    lane: &mut dyn queue::LaneConsumer,
    places: u16,
    jobs: &TaskTracker,
) -> Result<(), QueueError> {
    let free = Arc::new(Semaphore::new(usize::from(places)));
    let mut settings = parts.settings.clone();
    let (mut intake, mut charges) = (parts.control.watch_intake(), parts.control.watch_charges());
    let mut probing = parts.control.watch_probing();
    let mut taking = true;
    let mut arrived = true;
    loop {
        let pauses =
            [&mut intake, &mut charges].map(|pause| pause.borrow_and_update().as_ref().map(|pause| pause.until));
        let rests_until =
            intake_paused_until(&settings.borrow_and_update().provider, pauses.into_iter().flatten().max());
        if taking && rests_until.is_some() {
            lane.stop().await?;
            taking = false;
        } else if !taking && rests_until.is_none() {
            lane.resume().await?;
            (taking, arrived) = (true, true);
        }
        tokio::select! {
            biased;
            () = parts.stop.cancelled() => break,
            changed = settings.changed() => {
                // A lane that nobody steers any more is about to be stopped.
                if changed.is_err() || current_prefetch(parts) != places {
                    break;
                }
            }
            _ = probing.changed() => if current_prefetch(parts) != places { break },
            _ = intake.changed() => {}
            _ = charges.changed() => {}
            () = sleep_until(rests_until.unwrap_or_else(Instant::now)), if rests_until.is_some() => {}
            taken = next_delivery(lane, &free), if arrived => match taken? {
                Some((delivery, place)) => {
                    let lane = Arc::clone(parts);
                    // On its way into a task a future is moved several times, and this one has thousands of bytes.
                    let work = Box::pin(intake::handle_delivery(lane, delivery));
                    let job = jobs.track_future(async move {
                        work.await;
                        drop(place);
                    });
                    parts.worker.jobs.spawn(job);
                }
                None => arrived = false,
            },
        }
    }
    if taking {
        lane.stop().await?;
    }
    // What had arrived goes back untouched.
    while let Some(delivery) = lane.next().await? {
        if let Err(error) = delivery.receipt.requeue().await {
            tracing::debug!(%error, "not handed back; the broker will do it");
        }
    }
    Ok(())
}

/// Keeps a lane that takes no more until its last job is done: acknowledgements need it.
async fn retire(parts: Arc<LaneContext>, lane: Box<dyn queue::LaneConsumer>, jobs: TaskTracker) {
    jobs.close();
    tokio::select! {
        () = jobs.wait() => {}
        () = parts.worker.abandon.cancelled() => {}
    }
    drop(lane);
}

/// The next delivery and a place for it; cancel-safe, because the place is had first.
async fn next_delivery(
    lane: &mut dyn queue::LaneConsumer,
    free: &Arc<Semaphore>,
) -> Result<Option<(queue::Delivery, tokio::sync::OwnedSemaphorePermit)>, QueueError> {
    let Ok(place) = Arc::clone(free).acquire_owned().await else { return Ok(None) };
    Ok(lane.next().await?.map(|delivery| (delivery, place)))
}

/// Until when a lane takes nothing; `None` when it may.
fn intake_paused_until(provider: &Provider, paused_until: Option<Instant>) -> Option<Instant> {
    let now = Instant::now();
    if provider.paused {
        // Ends with the row's next change, not by time.
        return Some(now + Duration::from_secs(3_600));
    }
    let until = paused_until?;
    let until = until.checked_sub(RESUME_AHEAD).unwrap_or(until);
    (until > now).then_some(until)
}
