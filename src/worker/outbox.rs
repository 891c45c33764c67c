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

use self::publish::{Done, End, IN_TIME, Sent, publish_batch};
use super::Worker;
use crate::ledger::OutcomeEvent;
use crate::ledger::outcomes::Events;

mod publish;
mod unpublished;

/// Most events of one batch.
const BATCH: u32 = 500;
/// Batches that may be with the broker at once.
const BATCHES: usize = 3;
/// How long a batch is ours: longer than publishing takes, short enough that a dead worker's events are not late.
pub const TAKEN_FOR: Duration = Duration::from_secs(10);
/// Most events that are kept here; beyond them the ledger's are enough.
const HANDED_MAX: usize = 10_000;
/// Least time from one taking to the next, so that two statements do for all that settles meanwhile.
const GATHER: Duration = Duration::from_millis(20);
/// Other workers' leftovers and missed wake-ups are looked for this often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const AWAY_PAUSE: Duration = Duration::from_secs(1);
/// Most events that are tried again at once, after a rejection.
const AGAIN_BATCH: u32 = 100;
/// Events with late confirms that are waited for; with more, no further ones are published.
const LATE_MAX: usize = 2_000;

/// Where those who settle jobs leave word.
#[derive(Default)]
pub struct Outbox {
    /// Taken for [`TAKEN_FOR`] as they were written, shortly before the instant beside them.
    handed: Mutex<VecDeque<(Instant, OutcomeEvent)>>,
    came: Notify,
    left: Notify,
}

impl Outbox {
    /// An event that the caller has written and taken for [`TAKEN_FOR`].
    pub fn hand_over(&self, event: OutcomeEvent) {
        let mut handed = self.handed();
        if handed.len() < HANDED_MAX {
            handed.push_back((Instant::now(), event));
            drop(handed);
            self.came.notify_one();
        }
    }

    /// There are events in the ledger that nobody has taken.
    pub fn left(&self) {
        self.left.notify_one();
    }

    /// The next batch. Those that others may have taken meanwhile are theirs.
    fn gather(&self) -> Vec<OutcomeEvent> {
        let mut handed = self.handed();
        let batch = handed.len().min(BATCH as usize);
        let ours = handed.drain(..batch).filter(|(at, _)| at.elapsed() < TAKEN_FOR / 2);
        ours.map(|(_, event)| event).collect()
    }

    /// The next batch, if there is one and it is time for it; the next time follows.
    fn gather_from(&self, at: &mut Instant) -> Option<Vec<OutcomeEvent>> {
        let events = if Instant::now() >= *at { self.gather() } else { Vec::new() };
        if events.is_empty() {
            return None;
        }
        *at = Instant::now() + GATHER;
        Some(events)
    }

    fn is_empty(&self) -> bool {
        self.handed().is_empty()
    }

    fn handed(&self) -> MutexGuard<'_, VecDeque<(Instant, OutcomeEvent)>> {
        // Whole after every statement.
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the ledger is to be told of events.
#[derive(Default)]
struct Marks {
    published: Vec<i64>,
    rejected: Vec<i64>,
    /// They are still ours.
    renewed: Vec<i64>,
}

impl Marks {
    fn is_empty(&self) -> bool {
        self.published.is_empty() && self.rejected.is_empty() && self.renewed.is_empty()
    }

    fn note(&mut self, Done { sequence, end }: Done) {
        match end {
            End::Published => self.published.push(sequence),
            End::Rejected => self.rejected.push(sequence),
            End::Left => {}
        }
    }
}

/// When the ledger is asked for events that no process has taken.
struct Look {
    wanted: bool,
    not_before: Instant,
    /// At the latest.
    at: Instant,
}

impl Look {
    fn now() -> Self {
        Self { wanted: true, not_before: Instant::now(), at: Instant::now() }
    }

    fn is_due(&self) -> bool {
        self.wanted && Instant::now() >= self.not_before
    }

    fn taken(&mut self) {
        *self = Self { wanted: false, not_before: Instant::now() + GATHER, at: Instant::now() + LOOK_EVERY };
    }

    /// `None`: the ledger did not answer. A full batch may not have been the last.
    fn found(&mut self, events: Option<&[OutcomeEvent]>) {
        match events {
            Some(events) => self.wanted |= events.len() == BATCH as usize,
            None => self.pause(),
        }
    }

    fn sent(&mut self, sent: &Sent<'_>) {
        if sent.left {
            self.pause();
        }
    }

    fn marked(&mut self, marked: bool) {
        if !marked {
            self.not_before = Instant::now() + AWAY_PAUSE;
        }
    }

    fn pause(&mut self) {
        (self.wanted, self.not_before) = (true, Instant::now() + AWAY_PAUSE);
    }

    fn next(&self) -> Instant {
        if self.wanted { self.not_before } else { self.at }
    }
}

/// Events with late confirms.
struct Late<'w> {
    waiting: FuturesUnordered<BoxFuture<'w, Done>>,
    sequences: BTreeSet<i64>,
    renew_at: Instant,
    /// How long a drain waits for them.
    until: Option<Instant>,
}

impl Default for Late<'_> {
    fn default() -> Self {
        let waiting = FuturesUnordered::new();
        Self { waiting, sequences: BTreeSet::new(), renew_at: Instant::now(), until: None }
    }
}

impl Late<'_> {
    /// Keeps them ours, when it is time to say so again.
    fn renew(&mut self, marks: &mut Marks) {
        if !self.sequences.is_empty() && Instant::now() >= self.renew_at {
            self.renew_at = Instant::now() + TAKEN_FOR / 3;
            marks.renewed = self.sequences.iter().copied().collect();
        }
    }

    /// Whether a drain need not wait for them, any more.
    fn is_over(&mut self) -> bool {
        let until = *self.until.get_or_insert_with(|| Instant::now() + IN_TIME);
        self.sequences.is_empty() || Instant::now() >= until
    }

    fn done(&mut self, done: Done) -> Done {
        self.sequences.remove(&done.sequence);
        done
    }
}

/// Publishes events until no job is in hand any more, then finishes what it has taken: what a drain settles leaves at once.
pub async fn run(worker: Worker, drained: CancellationToken) {
    tokio::join!(publish_all(&worker, &drained), unpublished::keep_counted(&worker, &drained));
}

async fn publish_all(worker: &Worker, drained: &CancellationToken) {
    let mut publishing: FuturesUnordered<BoxFuture<'_, Sent<'_>>> = FuturesUnordered::new();
    let mut taking: Option<BoxFuture<'_, Option<Vec<OutcomeEvent>>>> = None;
    let mut marking: Option<BoxFuture<'_, bool>> = None;
    let mut again: Option<BoxFuture<'_, Again<'_>>> = None;
    // Not in the ledger yet.
    let (mut marks, mut late) = (Marks::default(), Late::default());
    let (mut gather_at, mut again_at) = (Instant::now(), Instant::now());
    let mut look = Look::now();
    loop {
        late.renew(&mut marks);
        if marking.is_none() && !marks.is_empty() {
            marking = Some(mark(worker, std::mem::take(&mut marks)).boxed());
        }
        let stopping = drained.is_cancelled();
        let may_publish = publishing.len() < BATCHES && late.sequences.len() < LATE_MAX;
        if may_publish && let Some(events) = worker.outbox.gather_from(&mut gather_at) {
            publishing.push(publish_batch(worker, events).boxed());
        }
        let handed = !worker.outbox.is_empty();
        let is_idle = !handed && taking.is_none() && marking.is_none() && publishing.is_empty();
        if stopping && is_idle && late.is_over() {
            return;
        }
        let may_take = !stopping && taking.is_none() && may_publish;
        if may_take && look.is_due() {
            look.taken();
            taking = Some(take(worker).boxed());
        }
        let may_try_again = !stopping && again.is_none() && late.sequences.len() < LATE_MAX;
        if may_try_again && Instant::now() >= again_at {
            again_at = Instant::now() + LOOK_EVERY;
            again = Some(try_again(worker).boxed());
        }
        let next = look.next();
        tokio::select! {
            Some(taken) = OptionFuture::from(taking.as_mut()) => {
                taking = None;
                look.found(taken.as_deref());
                if let Some(events) = taken.filter(|events| !events.is_empty()) {
                    publishing.push(publish_batch(worker, events).boxed());
                }
            }
            Some(sent) = publishing.next() => {
                look.sent(&sent);
                keep(sent, &mut marks, &mut late);
            }
            Some(tried) = OptionFuture::from(again.as_mut()) => {
                again = None;
                again_at = again_at.min(tried.next_at);
                keep(tried.sent, &mut marks, &mut late);
            }
            Some(done) = late.waiting.next() => {
                marks.note(late.done(done));
            }
            Some(marked) = OptionFuture::from(marking.as_mut()) => {
                marking = None;
                look.marked(marked);
            }
            () = worker.outbox.left.notified(), if !look.wanted && !stopping => look.wanted = true,
            () = worker.outbox.came.notified(), if !handed => {}
            () = sleep_until(gather_at), if handed && may_publish => {}
            () = sleep_until(next), if may_take && taking.is_none() => look.wanted = true,
            () = sleep_until(again_at), if may_try_again && again.is_none() => {}
            () = sleep_until(late.renew_at), if !late.sequences.is_empty() => {}
            () = drained.cancelled(), if !stopping => {}
        }
    }
}

fn keep<'w>(sent: Sent<'w>, marks: &mut Marks, late: &mut Late<'w>) {
    sent.done.into_iter().for_each(|done| marks.note(done));
    for (sequence, waiting) in sent.late {
        late.sequences.insert(sequence);
        late.waiting.push(waiting);
    }
}

/// Publishes whatever is left, as long as no engine is away.
pub async fn publish_rest(worker: &Worker) {
    loop {
        let events = worker.outbox.gather();
        if events.is_empty() && worker.outbox.is_empty() {
            break;
        }
        if !publish_and_mark(worker, events).await {
            return;
        }
    }
    while let Some(events) = take(worker).await {
        let is_last = events.len() < BATCH as usize;
        if !publish_and_mark(worker, events).await || is_last {
            return;
        }
    }
}

/// Whether none of them was left.
async fn publish_and_mark(worker: &Worker, events: Vec<OutcomeEvent>) -> bool {
    let sent = publish_batch(worker, events).await;
    let all = !sent.left && sent.late.is_empty();
    let mut marks = Marks::default();
    sent.done.into_iter().for_each(|done| marks.note(done));
    mark(worker, marks).await && all
}

async fn take(worker: &Worker) -> Option<Vec<OutcomeEvent>> {
    let taken = worker.engines.ledger.take_outcomes(BATCH, TAKEN_FOR).await;
    taken.map_err(|error| tracing::debug!(%error, "outcome events cannot be read")).ok()
}

/// One more try of events that were rejected before.
struct Again<'w> {
    sent: Sent<'w>,
    /// At the latest.
    next_at: Instant,
}

async fn try_again(worker: &Worker) -> Again<'_> {
    let taken = worker.engines.ledger.take_outcomes_of(Events::RejectedBefore, AGAIN_BATCH, TAKEN_FOR).await;
    let events = taken.unwrap_or_else(|error| {
        tracing::debug!(%error, "rejected outcome events cannot be read");
        Vec::new()
    });
    let pause = if events.len() == AGAIN_BATCH as usize { Duration::ZERO } else { LOOK_EVERY };
    Again { sent: publish_batch(worker, events).await, next_at: Instant::now() + pause }
}

async fn mark(worker: &Worker, marks: Marks) -> bool {
    let ledger = &worker.engines.ledger;
    let marked = async {
        ledger.outcomes_published(&marks.published).await?;
        ledger.outcomes_rejected(&marks.rejected).await?;
        ledger.renew_outcomes(&marks.renewed, TAKEN_FOR).await
    };
    marked
        .await
        .inspect_err(|error| tracing::warn!(%error, "published events not marked; they will be published again"))
        .is_ok()
}
