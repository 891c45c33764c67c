//! The gate's core: the wait queue, its blocks, and when the limiter is called with what, as a pure state machine.
//!
//! It makes no I/O, starts no task and reads no clock: events and the time are arguments, and decisions are values. The
//! worker's gate drives it with messages and a limiter ([`super::dispatcher`]), the simulation in virtual time. So what
//! is simulated is what runs. See `docs/decisions/0045-one-core-for-worker-and-simulation.md`.
//!
//! It makes one call at a time. A call without a reply is repeated under the same number, so that a lost reply acquires
//! and releases nothing twice.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::cold::ColdState;
use self::store_checks::StoreChecks;
use super::block::{BlocksByKind, QueueBlock, RETRY_PAUSE_MIN};
use super::egress::EgressRequest;
use super::history_stock::HistoryStock;
use super::pending_call::{GrantedSlots, PendingCall, PendingRelease, permit_releases};
use super::unpersisted::{PersistWindow, WindowSlot};
use super::wait_queue::{PermitWaiter, RequestBatch, WaitQueue};
use super::{AcquireResult, BlockReason, GateView, QueuePosition};
use crate::domain::job::JobId;
use crate::domain::permit_protocol::{BATCH_MAX, CounterSeeds, LimiterCall};
use crate::domain::persist_window::BookingAhead;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

mod cold;
mod reply;
mod store_checks;
#[cfg(test)]
mod tests;

pub(crate) use cold::{ColdQuery, RebuildStep};
pub(crate) use reply::{ReplyEffects, StoreFacts};

/// How long releases wait to be sent in one batch.
pub const RELEASE_DELAY: Duration = Duration::from_millis(10);
/// First and longest wait before a failed call is repeated.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// The retry delay of refused jobs while the store is unavailable.
const STORE_UNAVAILABLE_WAIT: Duration = Duration::from_secs(1);
/// Longest time between two exchanges with the store, because a comparison of the clocks loses precision with time.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// A request's sender, returned with the decision.
pub(crate) trait Ticket {
    /// Whether the sender waits no longer. Then no permit is requested for it.
    fn is_cancelled(&self) -> bool;
}

/// The end of one request's wait.
#[derive(Debug)]
pub(crate) struct Decision<T> {
    pub ticket: T,
    pub result: AcquireResult<GrantedPermit>,
}

/// A permit. Its driver begins it in time and reports its end ([`GateCore::release`]).
#[derive(Debug)]
pub(crate) struct GrantedPermit {
    /// Earliest start.
    pub start_at: Instant,
    /// Latest start.
    pub use_before: Instant,
    /// The slots are held for the response at most until then.
    pub answer_before: Instant,
    pub slots: GrantedSlots,
    pub window_slot: WindowSlot,
    /// A limit of its account has made the job wait.
    pub waited_for_account: bool,
    /// The lane whose worker slot it has taken.
    pub egress: Option<EgressRequest>,
}

/// A fact that an operator should read in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    PauseLifted,
    StoreReplaced,
    ClockStepped {
        by: Duration,
        direction: &'static str,
    },
    /// The state cannot be right, so it is reset.
    StateReset(&'static str),
    /// A limit was made slower while it was used in full, so the state is reset.
    LimitSlowed,
    NewerSettings {
        ours: i64,
        theirs: i64,
    },
    /// No attestation covers the state, so it is rebuilt.
    Unattested,
    LatePermits,
}

/// The core of one quota's gate in one process; `T` identifies the sender of a request.
#[derive(Debug)]
pub(crate) struct GateCore<T> {
    incarnation: u64,
    /// The settings that are in effect.
    spec: Arc<QuotaSpec>,
    queue: WaitQueue<T>,
    persist_window: Arc<PersistWindow>,
    releases: Vec<PendingRelease>,
    release_at: Option<Instant>,
    pause_until: Option<Instant>,
    /// The last pause that was sent; it must outlive the limiter state that has it.
    sent_pause_until: Option<Instant>,
    /// Epoch of the state that replied last.
    state_epoch: Option<Micros>,
    calls: u64,
    /// A call whose reply is missing; it is repeated.
    unanswered: Option<PendingCall>,
    failures: u32,
    block: Option<QueueBlock>,
    /// Since when blocks have followed each other. A block that ends by its time begins no new count: only a permit
    /// does, or a reply without a refusal.
    stalled_since: Option<Instant>,
    /// Blocks of the kinds of call that have a limit of their own.
    kind_blocks: BlocksByKind,
    /// When a limit blocked the queue last.
    limited_at: Option<Instant>,
    unavailable_at: Option<Instant>,
    /// When the waiters for slots in flight are requested next, unless a permit is released before.
    release_check_at: Instant,
    call_at: Instant,
    replied_at: Instant,
    cold: Option<ColdState>,
    history: HistoryStock,
    /// Our settings are older than the store's.
    stale: bool,
    /// The store's state is to be reset, and the call for that need not be made at once.
    may_delay_reset: bool,
    store: StoreChecks,
    notices: Vec<Notice>,
}

impl<T: Ticket> GateCore<T> {
    pub fn new(incarnation: u64, spec: Arc<QuotaSpec>, now: Instant) -> Self {
        let persist_window = PersistWindow::new(spec.use_within());
        Self {
            incarnation,
            spec,
            queue: WaitQueue::default(),
            persist_window,
            releases: Vec::new(),
            release_at: None,
            pause_until: None,
            sent_pause_until: None,
            state_epoch: None,
            calls: 0,
            unanswered: None,
            failures: 0,
            block: None,
            stalled_since: None,
            kind_blocks: BlocksByKind::default(),
            limited_at: None,
            unavailable_at: None,
            release_check_at: now,
            call_at: now,
            replied_at: now,
            cold: None,
            history: HistoryStock::default(),
            stale: false,
            may_delay_reset: false,
            store: StoreChecks::new(now),
            notices: Vec::new(),
        }
    }

    pub fn spec(&self) -> &Arc<QuotaSpec> {
        &self.spec
    }

    /// The decisions since the last call of this.
    pub fn take_decisions(&mut self) -> Vec<Decision<T>> {
        self.queue.take_decisions()
    }

    /// The notices since the last call of this.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// Applies new settings to all waiters. Blocks by former settings do not hold under the new ones.
    pub fn apply_spec(&mut self, spec: Arc<QuotaSpec>, now: Instant) {
        self.queue.apply_spec(&spec, now);
        self.history.clear();
        self.call_at = now;
        self.block = None;
        self.kind_blocks.clear();
        if spec.resumed_at != self.spec.resumed_at {
            self.notices.push(Notice::PauseLifted);
            (self.pause_until, self.sent_pause_until) = (None, None);
        }
        self.spec = spec;
    }

    /// Adds a waiter. If it is more urgent than the first one that was refused, the block ends, and the limiter is
    /// asked.
    pub fn join(&mut self, waiter: PermitWaiter<T>, now: Instant) {
        let kind = waiter.scope.kind;
        let Some(key) = self.queue.enqueue(waiter, &self.spec, now) else { return };
        if self.kind_blocks.get(&kind).is_some_and(|block| block.is_overtaken_by(key)) {
            self.kind_blocks.remove(&kind);
        }
        if self.block.take_if(|block| block.is_overtaken_by(key)).is_some() {
            self.call_at = now.max(self.replied_at + RETRY_PAUSE_MIN);
        }
    }

    /// Keeps a release for the next call. Under a concurrency limit the next call is made now, and asks again for the
    /// waiters that this limit has refused: they may get the released slot.
    pub fn release(&mut self, release: PendingRelease, now: Instant) {
        let delay = if self.spec.releases_are_urgent() { Duration::ZERO } else { RELEASE_DELAY };
        if delay.is_zero() {
            let spec = &self.spec;
            let is_freed = |by: &BlockReason| matches!(by, BlockReason::Limit(name) if spec.counts_in_flight(name));
            self.kind_blocks.retain(|_, block| !is_freed(&block.reason));
            self.queue.resume_after_release(release.scope(), is_freed);
            self.queue.resume_costly(is_freed);
        }
        self.releases.push(release);
        let at = now + delay;
        self.release_at = Some(self.release_at.map_or(at, |known| known.min(at)));
    }

    /// Pauses the quota until then.
    pub fn pause(&mut self, until: Instant) {
        self.pause_until = self.pause_until.max(Some(until));
    }

    /// Sends a pause again that may not have arrived, unless an operator has lifted it since.
    fn repeat_pause(&mut self, outgoing: &PendingCall) {
        if outgoing.spec.resumed_at == self.spec.resumed_at {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
        }
    }

    /// Takes a history from the ledger, and lets the jobs that waited for it try again.
    ///
    /// # Errors
    /// Text for an operator: the query failed. It is repeated a little later.
    pub fn receive_history(&mut self, answer: Result<CounterSeeds, String>, now: Instant) -> Result<(), String> {
        self.history.store_result(answer, now)?;
        let waits = |block: &QueueBlock| block.reason == BlockReason::NeedsHistory;
        self.queue.resume_after_history();
        self.kind_blocks.retain(|_, block| !waits(block));
        if self.block.take_if(|block| waits(block)).is_some() {
            self.call_at = now;
        }
        Ok(())
    }

    /// Ends the waits that are over at this instant: those whose deadline is before the end of the block, too. The
    /// driver calls it after every other event, and at [`Self::next_deadline`].
    pub fn advance(&mut self, now: Instant) {
        self.queue.sweep_cancelled(now);
        self.queue.refuse_without_worker_slot(now);
        if let Some(block) = self.first_block().filter(|block| !matches!(block.reason, BlockReason::Limit(_))) {
            self.unavailable_at = Some(block.until.min(now));
        }
        self.block.take_if(|block| block.until <= now);
        self.kind_blocks.retain(|_, block| block.until > now);
        if self.block.is_some() || !self.kind_blocks.is_empty() {
            self.stalled_since.get_or_insert(now);
        }
        let stalled_since = self.stalled_since.unwrap_or(now);
        let kind_blocks = self.kind_blocks.iter().map(|(kind, block)| (Some(*kind), block));
        for (kind, block) in self.block.iter().map(|block| (None, block)).chain(kind_blocks) {
            self.queue.refuse_expiring(block, kind, stalled_since, now);
        }
        if self.first_block().is_some_and(|block| matches!(block.reason, BlockReason::Limit(_))) {
            self.limited_at = Some(now);
        }
    }

    /// The queue's block, or that of a kind of call which ends first.
    fn first_block(&self) -> Option<&QueueBlock> {
        self.block.as_ref().or_else(|| self.kind_blocks.values().min_by_key(|block| block.until))
    }

    /// The earliest instant at which [`Self::advance`] ends a wait, unless something else happens before.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.queue.next_deadline(now)
    }

    /// A job's position in the queue, and what it waits for.
    pub fn position_of(&self, job: &JobId, now: Instant) -> Option<QueuePosition> {
        self.queue.position_of(job, self.block.as_ref(), &self.kind_blocks, now)
    }

    pub fn view(&self) -> GateView {
        let block = self.first_block().map(|block| (block.reason.clone(), block.until));
        GateView { waiting: self.queue.len(), block, limited_at: self.limited_at, unavailable_at: self.unavailable_at }
    }

    /// Whether the gate wants something of the limiter that it has not got.
    pub fn is_asking(&self) -> bool {
        self.queue.len() > 0 || self.unanswered.is_some() || self.failures > 0 || self.cold.is_some()
    }

    pub fn is_cold(&self) -> bool {
        self.cold.is_some()
    }

    /// Whether releases or an unanswered call are still to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.releases.is_empty() || self.unanswered.is_some()
    }

    pub fn unsent_releases(&self) -> usize {
        self.releases.len()
    }

    /// Drops all waiters: the gate grants nothing more, and sends the releases that are left.
    pub fn close(&mut self) {
        self.queue = WaitQueue::default();
    }

    /// Blocks the queue, and makes the next call when the block says so.
    fn block_until_retry(&mut self, block: QueueBlock) {
        self.call_at = block.retry_at;
        self.block = Some(block);
    }

    /// When the next call is due. The driver makes it then, unless one is in flight.
    pub fn next_call_at(&self, now: Instant) -> Instant {
        // A new gate, and one whose store is cold, calls without any request, so that its first job need not wait for
        // that.
        if !self.store.is_verified()
            || self.calls < 2
            || self.cold.is_some()
            || self.history.has_loaded()
            || self.unanswered.is_some()
            || self.failures > 0
        {
            return self.call_at;
        }
        let may_ask = self.queue.len() > 0 && self.persist_window.free_slots() > 0;
        let ready_at = may_ask.then(|| self.queue.next_ready_at(&self.kind_blocks, now)).flatten();
        let wants = ready_at.map(|ready_at| ready_at.max(self.call_at));
        // With older settings than the store's a call has no effect, however urgent it is.
        let urgent_at = if self.stale || self.may_delay_reset { self.call_at } else { now };
        let pause = self.pause_until.map(|_| urgent_at);
        let distrust = self.store.invalidate_epoch().map(|_| urgent_at);
        let idle = self.replied_at + IDLE_MAX;
        [wants, self.release_at, pause, distrust].into_iter().flatten().fold(idle, Instant::min)
    }

    /// Whether the next call repeats the unanswered one.
    pub fn repeats_call(&self, run_id: &str) -> bool {
        self.unanswered.is_some() && self.store.is_same_run(run_id)
    }

    /// The unanswered call again, or a new one. A store that was replaced does not know the old call.
    pub fn prepare_call(&mut self, run_id: &str, now: Instant) -> PendingCall {
        let unanswered = self.unanswered.take();
        if !self.store.is_same_run(run_id) {
            if self.store.replace(run_id) {
                self.notices.push(Notice::StoreReplaced);
            }
            if let Some(unanswered) = unanswered {
                self.repeat_pause(&unanswered);
            }
        } else if let Some(unanswered) = unanswered {
            return unanswered;
        }
        self.calls += 1;
        let rest = self.releases.split_off(self.releases.len().min(BATCH_MAX));
        let releases = std::mem::replace(&mut self.releases, rest);
        self.release_at = (!self.releases.is_empty()).then_some(now);
        self.sent_pause_until = self.sent_pause_until.max(self.pause_until);
        let batches = if self.store.may_request() {
            self.queue.next_batches(&self.kind_blocks, self.persist_window.free_slots(), now)
        } else {
            Vec::new()
        };
        let first = batches.first().and_then(|batch| batch.keys.first());
        let look_ahead = match first.filter(|first| self.queue.is_urgent(**first)) {
            Some(_) => BookingAhead::urgent_booking(),
            None => self.persist_window.ahead().booking(),
        };
        let (spec, pause_until) = (Arc::clone(&self.spec), self.pause_until.take());
        let call = LimiterCall {
            incarnation: self.incarnation,
            number: self.calls,
            requests: batches.iter().map(RequestBatch::request).collect(),
            releases: permit_releases(&releases, &spec, now),
            pause: pause_until.map(|until| until.saturating_duration_since(now)),
            rebuild: self.cold.as_mut().and_then(|cold| cold.data.take()),
            seeds: self.history.next_seeds(),
            invalidate_epoch: self.store.invalidate_epoch(),
            look_ahead,
            run_id: run_id.to_owned(),
        };
        PendingCall { call, spec, sent_at: now, batches, releases, pause_until }
    }

    /// Whether no reply has come since the last failure.
    pub fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// Whether no reply has come at all.
    pub fn is_starting(&self) -> bool {
        self.replied_at == self.store.origin()
    }

    /// Records that a call could not be prepared, or that its reply is missing: then it is kept, and repeated.
    pub fn record_failure(&mut self, outgoing: Option<PendingCall>, cause: String, now: Instant) {
        if outgoing.is_some() {
            self.unanswered = outgoing;
        }
        self.call_at = now + (RETRY_FIRST * 2_u32.saturating_pow(self.failures.min(10))).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        let reason = BlockReason::StoreUnavailable(cause);
        self.block = Some(QueueBlock::new(reason, now + STORE_UNAVAILABLE_WAIT, false, now));
    }
}
