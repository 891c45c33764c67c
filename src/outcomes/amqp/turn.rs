//! The turn of the process that has the cursor: reads pages of the order, publishes several at once, and passes them in
//! their order.

use std::collections::BTreeSet;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _, OptionFuture};
use futures_util::stream::{BoxStream, FuturesOrdered, SelectAll};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Publisher;
use super::publish::{EventResult, EventStatus, publish_group};
use crate::domain::event_order::EventOrder;
use crate::ledger::LedgerError;
use crate::ledger::events::{EventCursor, EventPage, EventsAfter, PublishResults};
use crate::outcomes::timing::{BATCH_INTERVAL, POLL_INTERVAL, RENEW_INTERVAL, RETRY_INTERVAL, UNAVAILABLE_PAUSE};

/// Most pages that are published at once.
const CONCURRENT_PAGES: usize = 3;
/// Most events that are retried at once after they left the order.
const RETRY_BATCH: u32 = 100;
/// Most events with late confirms; with more, no further ones are published.
const LATE_MAX: usize = 2_000;

/// A reading of the order.
struct Reading {
    order: Option<EventOrder>,
    result: Result<NewEvents, LedgerError>,
}

struct NewEvents {
    /// The place of the last event.
    end: i64,
    /// What comes after the pages that were read; `None`: nothing was asked for.
    after: Option<EventsAfter>,
}

/// Events that were published as far as that is possible, or left the order.
#[derive(Default)]
struct Published<'p> {
    results: PublishResults,
    late: Vec<BoxStream<'p, EventResult>>,
    /// Some events were published neither way.
    has_retries: bool,
}

/// A page that the cursor may pass.
struct PublishedPage<'p> {
    upto: i64,
    published: Published<'p>,
}

/// A write of the cursor.
struct Written {
    turn: Result<Option<i64>, LedgerError>,
    position: i64,
    results: PublishResults,
}

/// How a step of the turn leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Continues,
    /// Another process has the cursor.
    Lost,
    /// A backend is unavailable while the process drains.
    GivenUp,
}

pub struct Turn<'p> {
    publisher: &'p Publisher,
    drained: &'p CancellationToken,
    /// As the ledger has it.
    cursor: EventCursor,
    /// The reading began after the drain.
    is_last_reading: bool,
    /// Such a reading found nothing.
    is_read: bool,
    order: Option<EventOrder>,
    read_to: i64,
    last_read: Instant,
    read_at: Instant,
    reading: Option<BoxFuture<'p, Reading>>,
    pages: FuturesOrdered<BoxFuture<'p, PublishedPage<'p>>>,
    retry_at: Instant,
    retrying: Option<BoxFuture<'p, Published<'p>>>,
    late: SelectAll<BoxStream<'p, EventResult>>,
    /// The sequences of their events.
    late_events: BTreeSet<i64>,
    /// The end of the pages that the cursor may pass, and what is written with it.
    passed: i64,
    results: PublishResults,
    write_at: Instant,
    /// The write has results beside the position.
    writes_results: bool,
    writing: Option<BoxFuture<'p, Written>>,
}

impl<'p> Turn<'p> {
    pub fn new(publisher: &'p Publisher, drained: &'p CancellationToken, cursor: EventCursor) -> Self {
        let now = Instant::now();
        Self {
            publisher,
            drained,
            is_last_reading: false,
            is_read: false,
            order: None,
            read_to: cursor.position,
            last_read: now,
            read_at: now,
            reading: None,
            pages: FuturesOrdered::new(),
            retry_at: now,
            retrying: None,
            late: SelectAll::new(),
            late_events: BTreeSet::new(),
            passed: cursor.position,
            results: PublishResults::default(),
            write_at: now,
            writes_results: false,
            writing: None,
            cursor,
        }
    }

    /// Publishes until the cursor is lost, or everything is published after the drain.
    pub async fn run(mut self) {
        let mut is_draining = false;
        let progress = loop {
            self.start_what_is_due();
            if self.is_done() {
                break Progress::Continues;
            }
            let next = self.next_at();
            let progress = tokio::select! {
                Some(reading) = OptionFuture::from(self.reading.as_mut()) => self.record_reading(reading),
                Some(page) = self.pages.next() => self.record_page(page),
                Some(retried) = OptionFuture::from(self.retrying.as_mut()) => self.record_retried(retried),
                Some(result) = self.late.next() => self.record_late(&result),
                Some(written) = OptionFuture::from(self.writing.as_mut()) => self.record_written(written),
                () = self.publisher.new_events.notified() => self.read_soon(),
                () = sleep_until(next) => Progress::Continues,
                () = self.drained.cancelled(), if !is_draining => {
                    is_draining = true;
                    self.read_soon()
                }
            };
            if progress != Progress::Continues {
                break progress;
            }
        };
        if progress != Progress::Lost {
            self.leave().await;
        }
    }

    fn start_what_is_due(&mut self) {
        let now = Instant::now();
        let publisher = self.publisher;
        if self.writing.is_none() && now >= self.write_at {
            self.writing = Some(self.write().boxed());
        }
        if self.reading.is_none() && now >= self.read_at && !self.is_read {
            self.last_read = now;
            self.read_at = now + POLL_INTERVAL;
            self.is_last_reading = self.drained.is_cancelled();
            let may_publish = self.has_room() && self.pages.len() < CONCURRENT_PAGES;
            let after = may_publish.then_some(self.read_to);
            self.reading = Some(read(publisher, self.order.take(), after).boxed());
        }
        if self.may_retry() && now >= self.retry_at {
            self.retry_at = now + RETRY_INTERVAL;
            self.retrying = Some(retry(publisher, self.late_events.clone()).boxed());
        }
    }

    /// When something is due that nothing else tells.
    fn next_at(&self) -> Instant {
        let due = [
            (self.writing.is_none()).then_some(self.write_at),
            (self.reading.is_none() && !self.is_read).then_some(self.read_at),
            self.may_retry().then_some(self.retry_at),
        ];
        // Without any of them, a future says when it has ended.
        due.into_iter().flatten().min().unwrap_or_else(|| Instant::now() + RENEW_INTERVAL)
    }

    /// Not as long as the ledger would say again that events are due whose results are known.
    fn may_retry(&self) -> bool {
        let is_written = self.results.is_empty() && !self.writes_results;
        self.retrying.is_none() && is_written && self.has_room() && !self.drained.is_cancelled()
    }

    fn has_room(&self) -> bool {
        self.late_events.len() < LATE_MAX
    }

    fn is_done(&self) -> bool {
        self.is_read && self.pages.is_empty() && self.writing.is_none() && self.is_written()
    }

    fn is_written(&self) -> bool {
        self.passed == self.cursor.position && self.results.is_empty()
    }

    fn read_soon(&mut self) -> Progress {
        self.read_at = self.read_at.min(self.last_read + BATCH_INTERVAL);
        Progress::Continues
    }

    fn record_reading(&mut self, Reading { order, result }: Reading) -> Progress {
        self.reading = None;
        self.order = order;
        let NewEvents { end, after } = match result {
            Ok(found) => found,
            Err(_) if self.drained.is_cancelled() => return Progress::GivenUp,
            Err(error) => {
                tracing::debug!(%error, "failed to read outcome events, retrying");
                self.read_at = Instant::now() + UNAVAILABLE_PAUSE;
                return Progress::Continues;
            }
        };
        match after {
            Some(EventsAfter::Page(page)) => {
                self.read_to = page.upto;
                self.pages.push_back(publish_page(self.publisher, page, self.drained).boxed());
                return self.read_soon();
            }
            Some(EventsAfter::Deleted { kept_after }) => {
                tracing::error!(
                    position = self.read_to,
                    kept_after,
                    "outcome events were deleted before they were published; continuing with the oldest one"
                );
                self.read_to = kept_after;
                self.pages.push_back(std::future::ready(PublishedPage::empty(kept_after)).boxed());
            }
            Some(EventsAfter::End) | None => {}
        }
        // A reading that began before the drain may have missed the last event.
        self.is_read = self.is_last_reading && end <= self.read_to;
        Progress::Continues
    }

    fn record_page(&mut self, PublishedPage { upto, published }: PublishedPage<'p>) -> Progress {
        if published.has_retries {
            return Progress::GivenUp;
        }
        self.passed = upto;
        self.record_published(published);
        self.read_soon()
    }

    fn record_retried(&mut self, retried: Published<'p>) -> Progress {
        self.retrying = None;
        if retried.has_retries {
            self.retry_at = Instant::now() + UNAVAILABLE_PAUSE;
        } else if retried.results.published.len() == RETRY_BATCH as usize {
            self.retry_at = Instant::now();
        }
        self.record_published(retried);
        Progress::Continues
    }

    fn record_published(&mut self, published: Published<'p>) {
        self.late_events.extend(&published.results.unconfirmed);
        self.late.extend(published.late);
        self.results.extend(published.results);
        if !self.is_written() {
            self.write_at = Instant::now();
        }
    }

    /// An event that must be published again is due soon, because its confirm was late.
    fn record_late(&mut self, result: &EventResult) -> Progress {
        self.late_events.remove(&result.sequence);
        match result.status {
            EventStatus::Published => self.results.published.push(result.sequence),
            EventStatus::Rejected => self.results.rejected.push(result.sequence),
            EventStatus::Retry => {}
        }
        self.write_at = Instant::now();
        Progress::Continues
    }

    /// Moves the cursor past what is published. Without anything new, it only says that this process is alive.
    fn write(&mut self) -> impl Future<Output = Written> + use<'p> {
        self.write_at = Instant::now() + RENEW_INTERVAL;
        let publisher = self.publisher;
        let turn = self.cursor.turn;
        let position = self.passed;
        let results = std::mem::take(&mut self.results);
        self.writes_results = !results.is_empty();
        async move {
            let turn = publisher.ledger.move_event_cursor(turn, position, &results).await;
            Written { turn, position, results }
        }
    }

    fn record_written(&mut self, Written { turn, position, results }: Written) -> Progress {
        self.writing = None;
        self.writes_results = false;
        match turn {
            Ok(Some(turn)) => {
                self.cursor.turn = turn;
                self.cursor.position = position;
                Progress::Continues
            }
            Ok(None) => {
                tracing::info!("another process publishes outcome events now");
                Progress::Lost
            }
            Err(error) => {
                tracing::warn!(%error, "failed to move the cursor of outcome events; they may be published again");
                self.results.extend(results);
                self.write_at = Instant::now() + UNAVAILABLE_PAUSE;
                if self.drained.is_cancelled() { Progress::GivenUp } else { Progress::Continues }
            }
        }
    }

    /// Leaves the cursor to another process, with what was published until now.
    async fn leave(mut self) {
        if let Some(writing) = self.writing.take() {
            let written = writing.await;
            if self.record_written(written) == Progress::Lost {
                return;
            }
        }
        if !self.is_written() {
            let written = self.write().await;
            if self.record_written(written) == Progress::Lost {
                return;
            }
        }
        if let Err(error) = self.publisher.ledger.leave_event_cursor(self.cursor.turn).await {
            tracing::debug!(%error, "failed to leave the cursor of outcome events; another process waits for it");
        }
    }
}

impl PublishedPage<'_> {
    fn empty(upto: i64) -> Self {
        Self { upto, published: Published::default() }
    }
}

/// Gives new events their places, and reads a page after a position.
async fn read(publisher: &Publisher, mut order: Option<EventOrder>, after: Option<i64>) -> Reading {
    let result = async {
        let end = publisher.ledger.place_events(&mut order).await?;
        let after = match after {
            Some(position) if position < end => Some(publisher.ledger.events_after(position).await?),
            Some(_) => Some(EventsAfter::End),
            None => None,
        };
        Ok(NewEvents { end, after })
    };
    let result = result.await;
    Reading { order, result }
}

/// Publishes each event of a page until the broker has it or it leaves the order; after the drain, only once.
async fn publish_page<'p>(publisher: &'p Publisher, page: EventPage, drained: &CancellationToken) -> PublishedPage<'p> {
    let EventPage { mut events, unreadable, upto } = page;
    let mut published = Published::default();
    published.results.rejected = unreadable;
    loop {
        let group = publish_group(publisher, events).await;
        published.results.rejected.extend(group.results.rejected);
        published.results.unconfirmed.extend(group.results.unconfirmed);
        published.late.extend(group.late);
        published.has_retries = !group.retries.is_empty();
        if !published.has_retries || drained.run_until_cancelled(sleep(UNAVAILABLE_PAUSE)).await.is_none() {
            return PublishedPage { upto, published };
        }
        events = group.retries;
    }
}

/// Publishes events again that have left the order and are due. Those that the broker did not get stay due, and those
/// with late confirms are waited for as long as this process has the cursor.
async fn retry(publisher: &Publisher, late: BTreeSet<i64>) -> Published<'_> {
    let due = publisher.ledger.events_to_retry(RETRY_BATCH).await.unwrap_or_else(|error| {
        tracing::debug!(%error, "failed to read rejected outcome events, retrying");
        EventPage::default()
    });
    let (waiting, due_events): (Vec<_>, Vec<_>) =
        due.events.into_iter().partition(|event| late.contains(&event.sequence));
    let group = publish_group(publisher, due_events).await;
    let mut results = group.results;
    results.rejected.extend(due.unreadable);
    results.unconfirmed.extend(waiting.iter().map(|event| event.sequence));
    Published { results, late: group.late.into_iter().collect(), has_retries: !group.retries.is_empty() }
}
