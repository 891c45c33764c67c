//! Outcome events on their way out: committed with the outcome, published from here, at least once.
//!
//! Refuses to hold up a payment: an event that cannot be published stays in the ledger until it can. Refuses to ask the
//! ledger for what this process has just written: that is taken with its writing and handed over. One that comes alone
//! goes at once, those that come in crowds go together, and while one batch is with the broker the next is gathered and
//! the last is marked. An event whose confirm is late, or that some queue rejects, leaves its batch: it is waited for, or
//! tried again later and later, beside those that follow.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _, OptionFuture};
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use self::publish::{BatchResult, CONFIRM_TIMEOUT, EventResult, EventStatus, publish_batch};
use super::WorkerContext;
use crate::ledger::OutcomeEvent;
use crate::ledger::outcomes::EventSelection;

mod publish;
mod unpublished;

/// Most events of one batch.
const BATCH: u32 = 500;
/// Batches that may be with the broker at once.
const CONCURRENT_BATCHES: usize = 3;
/// How long a batch is ours: longer than publishing takes, short enough that a dead worker's events are not late.
pub const EVENT_LEASE: Duration = Duration::from_secs(10);
/// Most events that are kept here; beyond them the ledger's are enough.
const PENDING_MAX: usize = 10_000;
/// Least time from one taking to the next, so that two statements do for all that settles meanwhile.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);
/// Other workers' leftovers and missed wake-ups are looked for this often.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const UNAVAILABLE_PAUSE: Duration = Duration::from_secs(1);
/// Most events that are tried again at once, after a rejection.
const RETRY_BATCH: u32 = 100;
/// Events with late confirms that are waited for; with more, no further ones are published.
const LATE_MAX: usize = 2_000;

/// Where those who settle jobs leave word.
#[derive(Default)]
pub struct Outbox {
    /// Taken for [`TAKEN_FOR`] as they were written, shortly before the instant beside them.
    pending: Mutex<VecDeque<(Instant, OutcomeEvent)>>,
    arrived: Notify,
    unleased: Notify,
}

impl Outbox {
    /// An event that the caller has written and taken for [`TAKEN_FOR`].
    pub fn push(&self, event: OutcomeEvent) {
        let mut handed = self.pending();
        if handed.len() < PENDING_MAX {
            handed.push_back((Instant::now(), event));
            drop(handed);
            self.arrived.notify_one();
        }
    }

    /// There are events in the ledger that nobody has taken.
    pub fn notify_unleased(&self) {
        self.unleased.notify_one();
    }

    /// The next batch. Those that others may have taken meanwhile are theirs.
    fn take_batch(&self) -> Vec<OutcomeEvent> {
        let mut handed = self.pending();
        let batch = handed.len().min(BATCH as usize);
        let ours = handed.drain(..batch).filter(|(at, _)| at.elapsed() < EVENT_LEASE / 2);
        ours.map(|(_, event)| event).collect()
    }

    /// The next batch, if there is one and it is time for it; the next time follows.
    fn take_batch_if_due(&self, at: &mut Instant) -> Option<Vec<OutcomeEvent>> {
        let events = if Instant::now() >= *at { self.take_batch() } else { Vec::new() };
        if events.is_empty() {
            return None;
        }
        *at = Instant::now() + BATCH_INTERVAL;
        Some(events)
    }

    fn is_empty(&self) -> bool {
        self.pending().is_empty()
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<(Instant, OutcomeEvent)>> {
        // Whole after every statement.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the ledger is to be told of events.
#[derive(Default)]
struct EventMarks {
    published: Vec<i64>,
    rejected: Vec<i64>,
    /// They are still ours.
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

/// When the ledger is asked for events that no process has taken.
struct LedgerPoll {
    wanted: bool,
    not_before: Instant,
    /// At the latest.
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

    /// `None`: the ledger did not answer. A full batch may not have been the last.
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
    waiting: FuturesUnordered<BoxFuture<'w, EventResult>>,
    sequences: BTreeSet<i64>,
    renew_at: Instant,
    /// How long a drain waits for them.
    drain_deadline: Option<Instant>,
}

impl Default for LateConfirms<'_> {
    fn default() -> Self {
        let waiting = FuturesUnordered::new();
        Self { waiting, sequences: BTreeSet::new(), renew_at: Instant::now(), drain_deadline: None }
    }
}

impl LateConfirms<'_> {
    /// Keeps them ours, when it is time to say so again.
    fn renew(&mut self, marks: &mut EventMarks) {
        if !self.sequences.is_empty() && Instant::now() >= self.renew_at {
            self.renew_at = Instant::now() + EVENT_LEASE / 3;
            marks.renewed = self.sequences.iter().copied().collect();
        }
    }

    /// Whether a drain need not wait for them, any more.
    fn is_over(&mut self) -> bool {
        let until = *self.drain_deadline.get_or_insert_with(|| Instant::now() + CONFIRM_TIMEOUT);
        self.sequences.is_empty() || Instant::now() >= until
    }

    fn finish(&mut self, done: EventResult) -> EventResult {
        self.sequences.remove(&done.sequence);
        done
    }
}

/// Publishes events until no job is in hand any more, then finishes what it has taken: what a drain settles leaves at once.
pub async fn run(worker: WorkerContext, drained: CancellationToken) {
    tokio::join!(publish_all(&worker, &drained), unpublished::keep_counted(&worker, &drained));
}

async fn publish_all(worker: &WorkerContext, drained: &CancellationToken) {
    let mut publishing: FuturesUnordered<BoxFuture<'_, BatchResult<'_>>> = FuturesUnordered::new();
    let mut taking: Option<BoxFuture<'_, Option<Vec<OutcomeEvent>>>> = None;
    let mut marking: Option<BoxFuture<'_, bool>> = None;
    let mut again: Option<BoxFuture<'_, RetriedBatch<'_>>> = None;
    // Not in the ledger yet.
    let (mut marks, mut late) = (EventMarks::default(), LateConfirms::default());
    let (mut gather_at, mut again_at) = (Instant::now(), Instant::now());
    let mut look = LedgerPoll::due_now();
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
        let handed = !worker.outbox.is_empty();
        let is_idle = !handed && taking.is_none() && marking.is_none() && publishing.is_empty();
        if stopping && is_idle && late.is_over() {
            return;
        }
        let may_take = !stopping && taking.is_none() && may_publish;
        if may_take && look.is_due() {
            look.record_start();
            taking = Some(lease_events(worker).boxed());
        }
        let may_try_again = !stopping && again.is_none() && late.sequences.len() < LATE_MAX;
        if may_try_again && Instant::now() >= again_at {
            again_at = Instant::now() + POLL_INTERVAL;
            again = Some(retry_rejected(worker).boxed());
        }
        let next = look.next_at();
        tokio::select! {
            Some(taken) = OptionFuture::from(taking.as_mut()) => {
                taking = None;
                look.record_found(taken.as_deref());
                if let Some(events) = taken.filter(|events| !events.is_empty()) {
                    publishing.push(publish_batch(worker, events).boxed());
                }
            }
            Some(sent) = publishing.next() => {
                look.record_published(&sent);
                record_batch(sent, &mut marks, &mut late);
            }
            Some(tried) = OptionFuture::from(again.as_mut()) => {
                again = None;
                again_at = again_at.min(tried.next_at);
                record_batch(tried.sent, &mut marks, &mut late);
            }
            Some(done) = late.waiting.next() => {
                marks.record(late.finish(done));
            }
            Some(marked) = OptionFuture::from(marking.as_mut()) => {
                marking = None;
                look.record_marked(marked);
            }
            () = worker.outbox.unleased.notified(), if !look.wanted && !stopping => look.wanted = true,
            () = worker.outbox.arrived.notified(), if !handed => {}
            () = sleep_until(gather_at), if handed && may_publish => {}
            () = sleep_until(next), if may_take && taking.is_none() => look.wanted = true,
            () = sleep_until(again_at), if may_try_again && again.is_none() => {}
            () = sleep_until(late.renew_at), if !late.sequences.is_empty() => {}
            () = drained.cancelled(), if !stopping => {}
        }
    }
}

fn record_batch<'w>(sent: BatchResult<'w>, marks: &mut EventMarks, late: &mut LateConfirms<'w>) {
    sent.results.into_iter().for_each(|done| marks.record(done));
    for (sequence, waiting) in sent.late {
        late.sequences.insert(sequence);
        late.waiting.push(waiting);
    }
}

/// Publishes whatever is left, as long as no engine is away.
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

/// Whether none of them was left.
async fn publish_and_mark(worker: &WorkerContext, events: Vec<OutcomeEvent>) -> bool {
    let sent = publish_batch(worker, events).await;
    let all = !sent.has_retries && sent.late.is_empty();
    let mut marks = EventMarks::default();
    sent.results.into_iter().for_each(|done| marks.record(done));
    write_marks(worker, marks).await && all
}

async fn lease_events(worker: &WorkerContext) -> Option<Vec<OutcomeEvent>> {
    let taken = worker.backends.ledger.lease_events(BATCH, EVENT_LEASE).await;
    taken.map_err(|error| tracing::debug!(%error, "outcome events cannot be read")).ok()
}

/// One more try of events that were rejected before.
struct RetriedBatch<'w> {
    sent: BatchResult<'w>,
    /// At the latest.
    next_at: Instant,
}

async fn retry_rejected(worker: &WorkerContext) -> RetriedBatch<'_> {
    let taken =
        worker.backends.ledger.lease_selected_events(EventSelection::RejectedBefore, RETRY_BATCH, EVENT_LEASE).await;
    let events = taken.unwrap_or_else(|error| {
        tracing::debug!(%error, "rejected outcome events cannot be read");
        Vec::new()
    });
    let pause = if events.len() == RETRY_BATCH as usize { Duration::ZERO } else { POLL_INTERVAL };
    RetriedBatch { sent: publish_batch(worker, events).await, next_at: Instant::now() + pause }
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
        .inspect_err(|error| tracing::warn!(%error, "published events not marked; they will be published again"))
        .is_ok()
}
