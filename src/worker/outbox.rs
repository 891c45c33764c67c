//! The transactional outbox: publishes outcome events, which were committed with their outcome, at least once.
//!
//! An event that cannot be published stays in the ledger, and holds up no payment. Events of this process are handed
//! over as they are written, so the ledger is not asked for them. A single event is published at once; many together
//! become a batch. While one batch is with the broker, the next is gathered and the last is marked. An event whose
//! confirm is late, or that some queue rejects, leaves its batch. It is waited for, or retried with growing pauses,
//! beside the later ones. See `docs/decisions/0023-transactional-outbox.md`.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _, OptionFuture};
use futures_util::stream::{BoxStream, FuturesUnordered, SelectAll};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::publish::{BatchResult, CONFIRM_TIMEOUT, EventResult, EventStatus, publish_batch};
use super::WorkerContext;
use crate::ledger::EventSelection;
use crate::ledger::OutcomeEvent;

mod publish;

/// Most events of one batch.
const BATCH: u32 = 500;
/// Most batches that are published at once.
const CONCURRENT_BATCHES: usize = 3;
/// Lease of a batch: longer than publishing takes, short enough that a dead worker's events are not late.
pub const EVENT_LEASE: Duration = Duration::from_secs(10);
/// Most events that are queued here; those beyond it are read from the ledger.
const PENDING_MAX: usize = 10_000;
/// Least time between two batches, so that two statements serve all jobs that finish meanwhile.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);
/// How often the ledger is asked for events of other workers and for missed notifications.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const UNAVAILABLE_PAUSE: Duration = Duration::from_secs(1);
/// Most events that are retried at once after a rejection.
const RETRY_BATCH: u32 = 100;
/// Most events with late confirms; with more, no further ones are published.
const LATE_MAX: usize = 2_000;

/// Queue of the outcome events of this process.
#[derive(Default)]
pub struct Outbox {
    /// Events with the instant of their lease, which is [`EVENT_LEASE`] long and was taken as they were written.
    pending: Mutex<VecDeque<(Instant, OutcomeEvent)>>,
    arrived: Notify,
    unleased: Notify,
}

impl Outbox {
    /// Adds an event that the caller has written and leased for [`EVENT_LEASE`].
    pub fn push(&self, event: OutcomeEvent) {
        let mut pending = self.pending.lock();
        if pending.len() < PENDING_MAX {
            pending.push_back((Instant::now(), event));
            drop(pending);
            self.arrived.notify_one();
        }
    }

    /// Says that the ledger has events without a lease.
    pub fn notify_unleased(&self) {
        self.unleased.notify_one();
    }

    /// The next batch, without events whose lease may have expired meanwhile.
    fn take_batch(&self) -> Vec<OutcomeEvent> {
        let mut pending = self.pending.lock();
        let batch = pending.len().min(BATCH as usize);
        let ours = pending.drain(..batch).filter(|(at, _)| at.elapsed() < EVENT_LEASE / 2);
        ours.map(|(_, event)| event).collect()
    }

    /// The next batch, if there is one and it is due; sets when the one after it is due.
    fn take_batch_if_due(&self, at: &mut Instant) -> Option<Vec<OutcomeEvent>> {
        let events = if Instant::now() >= *at { self.take_batch() } else { Vec::new() };
        if events.is_empty() {
            return None;
        }
        *at = Instant::now() + BATCH_INTERVAL;
        Some(events)
    }

    fn is_empty(&self) -> bool {
        self.pending.lock().is_empty()
    }
}

/// Marks of events that are to be written to the ledger.
#[derive(Default)]
struct EventMarks {
    published: Vec<i64>,
    rejected: Vec<i64>,
    /// Events whose lease is renewed.
    renewed: Vec<i64>,
}

impl EventMarks {
    fn is_empty(&self) -> bool {
        self.published.is_empty() && self.rejected.is_empty() && self.renewed.is_empty()
    }

    fn record(&mut self, EventResult { sequence, status: end }: EventResult) {
        match end {
            EventStatus::Published => self.published.push(sequence),
            EventStatus::Rejected => self.rejected.push(sequence),
            EventStatus::Retry => {}
        }
    }
}

/// When the ledger is asked for events without a lease.
struct LedgerPoll {
    wanted: bool,
    not_before: Instant,
    /// Latest time of the next query.
    latest: Instant,
}

impl LedgerPoll {
    fn due_now() -> Self {
        Self { wanted: true, not_before: Instant::now(), latest: Instant::now() }
    }

    fn is_due(&self) -> bool {
        self.wanted && Instant::now() >= self.not_before
    }

    fn record_start(&mut self) {
        *self =
            Self { wanted: false, not_before: Instant::now() + BATCH_INTERVAL, latest: Instant::now() + POLL_INTERVAL };
    }

    /// Records the result of a query; `None`: the ledger did not answer. A full batch may not have been the last.
    fn record_found(&mut self, events: Option<&[OutcomeEvent]>) {
        match events {
            Some(events) => self.wanted |= events.len() == BATCH as usize,
            None => self.pause(),
        }
    }

    fn record_published(&mut self, sent: &BatchResult<'_>) {
        if sent.has_retries {
            self.pause();
        }
    }

    fn record_marked(&mut self, marked: bool) {
        if !marked {
            self.not_before = Instant::now() + UNAVAILABLE_PAUSE;
        }
    }

    fn pause(&mut self) {
        (self.wanted, self.not_before) = (true, Instant::now() + UNAVAILABLE_PAUSE);
    }

    fn next_at(&self) -> Instant {
        if self.wanted { self.not_before } else { self.latest }
    }
}

/// Events with late confirms.
struct LateConfirms<'w> {
    waiting: SelectAll<BoxStream<'w, EventResult>>,
    sequences: BTreeSet<i64>,
    renew_at: Instant,
    /// End of the time for which a drain waits for them.
    drain_deadline: Option<Instant>,
}

impl Default for LateConfirms<'_> {
    fn default() -> Self {
        let waiting = SelectAll::new();
        Self { waiting, sequences: BTreeSet::new(), renew_at: Instant::now(), drain_deadline: None }
    }
}

impl LateConfirms<'_> {
    /// Renews their leases when that is due.
    fn renew(&mut self, marks: &mut EventMarks) {
        if !self.sequences.is_empty() && Instant::now() >= self.renew_at {
            self.renew_at = Instant::now() + EVENT_LEASE / 3;
            marks.renewed = self.sequences.iter().copied().collect();
        }
    }

    /// Whether a drain need not wait for them any longer.
    fn is_over(&mut self) -> bool {
        let until = *self.drain_deadline.get_or_insert_with(|| Instant::now() + CONFIRM_TIMEOUT);
        self.sequences.is_empty() || Instant::now() >= until
    }

    fn finish(&mut self, done: EventResult) -> EventResult {
        self.sequences.remove(&done.sequence);
        done
    }
}

/// Publishes events until no job is active, then finishes its batches: events of jobs that a drain finishes leave at
/// once.
pub async fn run(worker: WorkerContext, drained: CancellationToken) {
    tokio::join!(publish_all(&worker, &drained), keep_counted(&worker, &drained));
}

async fn publish_all(worker: &WorkerContext, drained: &CancellationToken) {
    let mut publishing: FuturesUnordered<BoxFuture<'_, BatchResult<'_>>> = FuturesUnordered::new();
    let mut leasing: Option<BoxFuture<'_, Option<Vec<OutcomeEvent>>>> = None;
    let mut marking: Option<BoxFuture<'_, bool>> = None;
    let mut retrying: Option<BoxFuture<'_, (BatchResult<'_>, Instant)>> = None;
    // Marks that are not in the ledger yet.
    let (mut marks, mut late) = (EventMarks::default(), LateConfirms::default());
    let (mut gather_at, mut retry_at) = (Instant::now(), Instant::now());
    let mut poll = LedgerPoll::due_now();
    loop {
        late.renew(&mut marks);
        if marking.is_none() && !marks.is_empty() {
            marking = Some(write_marks(worker, std::mem::take(&mut marks)).boxed());
        }
        let stopping = drained.is_cancelled();
        let may_publish = publishing.len() < CONCURRENT_BATCHES && late.sequences.len() < LATE_MAX;
        if may_publish && let Some(events) = worker.outbox.take_batch_if_due(&mut gather_at) {
            publishing.push(publish_batch(worker, events).boxed());
        }
        let has_pending = !worker.outbox.is_empty();
        let is_idle = !has_pending && leasing.is_none() && marking.is_none() && publishing.is_empty();
        if stopping && is_idle && late.is_over() {
            return;
        }
        let may_lease = !stopping && leasing.is_none() && may_publish;
        if may_lease && poll.is_due() {
            poll.record_start();
            leasing = Some(lease_events(worker).boxed());
        }
        let may_retry = !stopping && retrying.is_none() && late.sequences.len() < LATE_MAX;
        if may_retry && Instant::now() >= retry_at {
            retry_at = Instant::now() + POLL_INTERVAL;
            retrying = Some(retry_rejected(worker).boxed());
        }
        let next = poll.next_at();
        tokio::select! {
            Some(taken) = OptionFuture::from(leasing.as_mut()) => {
                leasing = None;
                poll.record_found(taken.as_deref());
                if let Some(events) = taken.filter(|events| !events.is_empty()) {
                    publishing.push(publish_batch(worker, events).boxed());
                }
            }
            Some(sent) = publishing.next() => {
                poll.record_published(&sent);
                record_batch(sent, &mut marks, &mut late);
            }
            Some((sent, next_at)) = OptionFuture::from(retrying.as_mut()) => {
                retrying = None;
                retry_at = retry_at.min(next_at);
                record_batch(sent, &mut marks, &mut late);
            }
            Some(done) = late.waiting.next() => {
                marks.record(late.finish(done));
            }
            Some(marked) = OptionFuture::from(marking.as_mut()) => {
                marking = None;
                poll.record_marked(marked);
            }
            () = worker.outbox.unleased.notified(), if !poll.wanted && !stopping => poll.wanted = true,
            () = worker.outbox.arrived.notified(), if !has_pending => {}
            () = sleep_until(gather_at), if has_pending && may_publish => {}
            () = sleep_until(next), if may_lease && leasing.is_none() => poll.wanted = true,
            () = sleep_until(retry_at), if may_retry && retrying.is_none() => {}
            () = sleep_until(late.renew_at), if !late.sequences.is_empty() => {}
            () = drained.cancelled(), if !stopping => {}
        }
    }
}

fn record_batch<'w>(sent: BatchResult<'w>, marks: &mut EventMarks, late: &mut LateConfirms<'w>) {
    sent.results.into_iter().for_each(|done| marks.record(done));
    late.sequences.extend(sent.late_sequences);
    late.waiting.extend(sent.late);
}

/// Publishes the remaining events, as long as every backend is available.
pub async fn publish_remaining(worker: &WorkerContext) {
    loop {
        let events = worker.outbox.take_batch();
        if events.is_empty() && worker.outbox.is_empty() {
            break;
        }
        if !publish_and_mark(worker, events).await {
            return;
        }
    }
    while let Some(events) = lease_events(worker).await {
        let is_last = events.len() < BATCH as usize;
        if !publish_and_mark(worker, events).await || is_last {
            return;
        }
    }
}

/// Whether all of them were published and marked.
async fn publish_and_mark(worker: &WorkerContext, events: Vec<OutcomeEvent>) -> bool {
    let sent = publish_batch(worker, events).await;
    let all = !sent.has_retries && sent.late.is_none();
    let mut marks = EventMarks::default();
    sent.results.into_iter().for_each(|done| marks.record(done));
    write_marks(worker, marks).await && all
}

async fn lease_events(worker: &WorkerContext) -> Option<Vec<OutcomeEvent>> {
    let taken = worker.backends.ledger.lease_events(BATCH, EVENT_LEASE).await;
    taken.map_err(|error| tracing::debug!(%error, "failed to lease outcome events, retrying")).ok()
}

/// Retries events that were rejected before. Returns the result, and the latest time of the next retry.
async fn retry_rejected(worker: &WorkerContext) -> (BatchResult<'_>, Instant) {
    let taken =
        worker.backends.ledger.lease_selected_events(EventSelection::RejectedBefore, RETRY_BATCH, EVENT_LEASE).await;
    let events = taken.unwrap_or_else(|error| {
        tracing::debug!(%error, "failed to lease rejected outcome events, retrying");
        Vec::new()
    });
    let pause = if events.len() == RETRY_BATCH as usize { Duration::ZERO } else { POLL_INTERVAL };
    (publish_batch(worker, events).await, Instant::now() + pause)
}

async fn write_marks(worker: &WorkerContext, marks: EventMarks) -> bool {
    let ledger = &worker.backends.ledger;
    let marked = async {
        ledger.mark_events_published(&marks.published).await?;
        ledger.mark_events_rejected(&marks.rejected).await?;
        ledger.renew_event_leases(&marks.renewed, EVENT_LEASE).await
    };
    marked
        .await
        .inspect_err(|error| tracing::warn!(%error, "failed to mark published events; they will be published again"))
        .is_ok()
}

/// Time between two counts.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// A count takes at most this part of the database's time.
const QUERY_TIME_DIVISOR: u32 = 20;

/// Counts the unpublished events for metrics and reports.
async fn keep_counted(worker: &WorkerContext, drained: &CancellationToken) {
    let counting = async {
        loop {
            let began = Instant::now();
            match worker.backends.ledger.unpublished_events().await {
                Ok(unpublished) => worker.meter.set_unpublished(Some(unpublished)),
                Err(error) => {
                    tracing::debug!(%error, "failed to count unpublished outcome events");
                    worker.meter.set_unpublished(None);
                }
            }
            sleep(COUNT_INTERVAL.max(began.elapsed() * QUERY_TIME_DIVISOR)).await;
        }
    };
    drained.run_until_cancelled(counting).await.unwrap_or_default()
}
