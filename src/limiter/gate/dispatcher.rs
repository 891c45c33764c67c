//! The gate's task: it gathers requests and releases, calls the limiter when that is due, and hands out permits.
//!
//! It makes one call at a time. A call without a reply is repeated under the same number, so that a lost reply acquires
//! and releases nothing twice. Grants of a store whose clock made a step are discarded.
//! See `docs/decisions/0016-one-batched-call-per-quota.md`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::block::{BlocksByKind, QueueBlock, RETRY_PAUSE_MIN};
use super::call_sequence::CallSequence;
use super::clock_verification::ClockVerification;
use super::history::HistoryLoader;
use super::pending_call::{CallInput, PendingCall};
use super::permit::PendingRelease;
use super::rebuild::Rebuild;
use super::stall::{StallMonitor, StallReport};
use super::unpersisted::PersistWindow;
use super::wait_queue::{PermitWaiter, WaitQueue};
use super::{BlockReason, GateContext, GateMessage, GateView};
use crate::domain::clock_comparison::ClockComparison;
use crate::domain::permit_protocol::BATCH_MAX;
use crate::domain::provider::ProviderName;
use crate::domain::time::Micros;
use crate::faults::{self, CrashPoint};
use crate::limiter::LimiterError;

mod reply;

/// Longest time between two exchanges with the store, because a comparison of the clocks loses precision with time.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long releases wait to be sent in one batch.
pub const RELEASE_DELAY: Duration = Duration::from_millis(10);
/// Most calls that a gate makes before it ends: ten thousand releases.
const LAST_CALLS_MAX: u32 = 10;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// The retry delay of refused jobs while the store is unavailable.
const STORE_UNAVAILABLE_WAIT: Duration = Duration::from_secs(1);

pub(super) struct PermitDispatcher {
    parts: GateContext,
    inbox: mpsc::UnboundedReceiver<GateMessage>,
    outbox: mpsc::WeakUnboundedSender<GateMessage>,
    view: watch::Sender<GateView>,
    queue: WaitQueue,
    persist_window: Arc<PersistWindow>,
    releases: Vec<PendingRelease>,
    release_at: Option<Instant>,
    pause_until: Option<Instant>,
    /// The last pause that was sent; it must outlive the limiter state that has it.
    sent_pause_until: Option<Instant>,
    /// From the settings that are in effect.
    resumed_at: u64,
    /// Epoch of the state that replied last.
    state_epoch: Option<Micros>,
    calls: u64,
    pending_call: Option<PendingCall>,
    failures: u32,
    block: Option<QueueBlock>,
    /// Since when blocks have followed each other. A block that ends by its time begins no new count: only a permit
    /// does, or a reply without a refusal.
    stalled_since: Option<Instant>,
    /// Blocks of the kinds of call that have a limit of their own.
    kind_blocks: BlocksByKind,
    call_at: Instant,
    replied_at: Instant,
    rebuild: Option<Rebuild>,
    history: HistoryLoader,
    /// Our settings are older than the store's. Logged once.
    stale: bool,
    /// The store's state is to be reset, and the call for that need not be made at once.
    may_delay_reset: bool,
    /// Run id of the store that the clock comparison is with.
    run_id: String,
    origin: Instant,
    clock: ClockComparison,
    clock_verification: ClockVerification,
    call_sequence: CallSequence,
    invalidate_epoch: Option<Micros>,
    /// Earliest next reset because of a wait that the settings cannot have caused.
    wait_reset_again_at: Option<Instant>,
    stall: StallMonitor,
}

impl PermitDispatcher {
    pub fn new(
        parts: GateContext,
        inbox: mpsc::UnboundedReceiver<GateMessage>,
        outbox: mpsc::WeakUnboundedSender<GateMessage>,
        view: watch::Sender<GateView>,
    ) -> Self {
        let now = Instant::now();
        let persist_window = PersistWindow::new(parts.spec.borrow().use_within());
        let resumed_at = parts.spec.borrow().resumed_at;
        Self {
            parts,
            inbox,
            outbox,
            view,
            queue: WaitQueue::default(),
            persist_window,
            releases: Vec::new(),
            release_at: None,
            pause_until: None,
            sent_pause_until: None,
            resumed_at,
            state_epoch: None,
            calls: 0,
            pending_call: None,
            failures: 0,
            block: None,
            stalled_since: None,
            kind_blocks: BlocksByKind::default(),
            call_at: now,
            replied_at: now,
            rebuild: None,
            history: HistoryLoader::default(),
            stale: false,
            may_delay_reset: false,
            run_id: String::new(),
            origin: now,
            clock: ClockComparison::default(),
            clock_verification: ClockVerification::default(),
            call_sequence: CallSequence::default(),
            invalidate_epoch: None,
            wait_reset_again_at: None,
            stall: StallMonitor::default(),
        }
    }

    pub async fn run(mut self) {
        let stop = self.parts.stop.clone();
        while !stop.is_cancelled() {
            while let Ok(message) = self.inbox.try_recv() {
                self.handle_message(message);
            }
            if let Some(answer) = self.history.poll_result() {
                self.receive_history(answer);
            }
            // Blocks by former settings do not hold under the new ones.
            if self.parts.spec.has_changed().unwrap_or(false) {
                self.apply_settings();
            }
            self.expire_waiters();
            let next = self.next_call_at();
            if next.is_some_and(|at| at <= Instant::now()) {
                self.call().await;
                continue;
            }
            let wake = [next, self.queue.next_deadline(Instant::now())].into_iter().flatten().min();
            tokio::select! {
                () = stop.cancelled() => {}
                message = self.inbox.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => break,
                },
                changed = self.parts.spec.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    self.apply_settings();
                }
                answer = self.history.wait_for_result() => self.receive_history(answer),
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
        self.flush_releases().await;
    }

    /// Applies the current settings to all waiters.
    fn apply_settings(&mut self) {
        let spec = self.parts.spec.borrow_and_update().clone();
        self.queue.apply_spec(&spec, Instant::now());
        self.history.clear();
        self.call_at = Instant::now();
        self.block = None;
        self.kind_blocks.clear();
        if spec.resumed_at != self.resumed_at {
            tracing::info!(quota = %spec.quota, "an operator has lifted the wait that the provider named");
            self.resumed_at = spec.resumed_at;
            (self.pause_until, self.sent_pause_until) = (None, None);
        }
    }

    /// Sends a pause again that may not have arrived, unless an operator has lifted it since.
    fn repeat_pause(&mut self, outgoing: &PendingCall) {
        if outgoing.spec.resumed_at == self.resumed_at {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
        }
    }

    fn handle_message(&mut self, message: GateMessage) {
        match message {
            GateMessage::Acquire(waiter) => self.enqueue(waiter),
            GateMessage::Position { job, reply } => {
                // A caller that was cancelled needs no answer.
                let now = Instant::now();
                let _ = reply.send(self.queue.position_of(&job, self.block.as_ref(), &self.kind_blocks, now));
            }
            GateMessage::Release(release) => {
                self.handle_release(release);
            }
            // The free slots are read before the next call.
            GateMessage::SlotFreed => {}
            GateMessage::Pause { until } => self.pause_until = self.pause_until.max(Some(until)),
        }
    }

    /// Keeps a release for the next call. Under a concurrency limit the next call is made now, and asks again for the
    /// waiters that this limit has refused: they may get the released slot.
    fn handle_release(&mut self, release: PendingRelease) {
        let (now, spec) = (Instant::now(), self.parts.spec.borrow());
        let delay = if spec.releases_are_urgent() { Duration::ZERO } else { RELEASE_DELAY };
        if delay.is_zero() {
            let is_freed = |by: &BlockReason| matches!(by, BlockReason::Limit(name) if spec.counts_in_flight(name));
            self.kind_blocks.retain(|_, block| !is_freed(&block.reason));
            self.queue.resume_after_release(&release.scope, is_freed);
        }
        drop(spec);
        self.releases.push(release);
        let at = now + delay;
        self.release_at = Some(self.release_at.map_or(at, |known| known.min(at)));
    }

    /// Adds a waiter. If it is more urgent than the first one that was refused, the block ends, and the limiter is
    /// asked.
    fn enqueue(&mut self, waiter: PermitWaiter) {
        let (now, kind) = (Instant::now(), waiter.scope.kind());
        let Some(key) = self.queue.enqueue(waiter, &self.parts.spec.borrow(), now) else { return };
        if self.kind_blocks.get(&kind).is_some_and(|block| block.is_overtaken_by(key)) {
            self.kind_blocks.remove(&kind);
        }
        if self.block.take_if(|block| block.is_overtaken_by(key)).is_some() {
            self.call_at = now.max(self.replied_at + RETRY_PAUSE_MIN);
        }
    }

    /// Refuses the waiters whose deadline is before the end of the block.
    fn expire_waiters(&mut self) {
        let now = Instant::now();
        self.queue.sweep_cancelled(now);
        self.queue.refuse_without_worker_slot(now);
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
        let first_of_kinds = || self.kind_blocks.values().min_by_key(|block| block.until);
        let block = self.block.as_ref().or_else(first_of_kinds).map(|block| (block.reason.clone(), block.until));
        let is_at_limit = matches!(block, Some((BlockReason::Limit(_), _)));
        let limited_at = if is_at_limit { Some(now) } else { self.view.borrow().limited_at };
        let view = GateView { waiting: self.queue.len(), block, limited_at };
        self.log_stall(&view, now);
        self.view.send_replace(view);
    }

    fn log_stall(&mut self, view: &GateView, now: Instant) {
        let is_asking = view.waiting > 0 || self.pending_call.is_some() || self.failures > 0 || self.rebuild.is_some();
        let Some((by, until)) = &view.block else {
            if !is_asking {
                self.stall.end();
            }
            return;
        };
        let stalled = self.stall.observe_block(by, *until, now);
        self.log_stall_report(stalled, &self.parts.spec.borrow().quota);
    }

    fn log_stall_report(&self, stalled: Option<StallReport>, quota: &ProviderName) {
        let Some(StallReport { cause, lasted, wait, is_expected }) = stalled else { return };
        let waiting = self.queue.len();
        if is_expected {
            tracing::info!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        } else {
            tracing::warn!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        }
    }

    /// When the next call is due; `None`: never.
    fn next_call_at(&self) -> Option<Instant> {
        // A new gate, and one whose store is cold, calls without any request, so that its first job need not wait for
        // that.
        if !self.clock_verification.is_verified()
            || self.calls < 2
            || self.rebuild.is_some()
            || self.history.has_loaded()
            || self.pending_call.is_some()
            || self.failures > 0
        {
            return Some(self.call_at);
        }
        let may_ask = self.queue.len() > 0 && self.persist_window.free_slots() > 0;
        let ready_at = may_ask.then(|| self.queue.next_ready_at(&self.kind_blocks, Instant::now())).flatten();
        let wants = ready_at.map(|ready_at| ready_at.max(self.call_at));
        // With older settings than the store's a call has no effect, however urgent it is.
        let urgent_at = if self.stale || self.may_delay_reset { self.call_at } else { Instant::now() };
        let pause = self.pause_until.map(|_| urgent_at);
        let distrust = self.invalidate_epoch.map(|_| urgent_at);
        let idle = Some(self.replied_at + IDLE_MAX);
        [wants, self.release_at, pause, distrust, idle].into_iter().flatten().min()
    }

    async fn call(&mut self) {
        let outgoing = match self.prepare_call().await {
            Ok(outgoing) => outgoing,
            Err(error) => return self.record_failure(&error),
        };
        match self.parts.limiter.call(&outgoing.spec, &outgoing.call).await {
            Ok(reply) => {
                if !outgoing.releases.is_empty() {
                    faults::crash(CrashPoint::AfterSettle);
                }
                self.failures = 0;
                self.handle_reply(outgoing, &reply).await;
            }
            Err(error) => {
                self.pending_call = Some(outgoing);
                self.record_failure(&error);
            }
        }
    }

    /// The unanswered call again, or a new one. A store that was replaced does not know the old call.
    async fn prepare_call(&mut self) -> Result<PendingCall, LimiterError> {
        let quota = self.parts.spec.borrow().quota.clone();
        let run_id = self.parts.limiter.run_id(&quota).await?;
        let unanswered = self.pending_call.take();
        if run_id != self.run_id {
            if !self.run_id.is_empty() {
                tracing::warn!(%quota, "the limiter store was replaced: its clock must be verified first");
            }
            self.run_id.clone_from(&run_id);
            (self.clock, self.clock_verification) = (ClockComparison::default(), ClockVerification::default());
            self.call_sequence.reset();
            if let Some(unanswered) = unanswered {
                self.repeat_pause(&unanswered);
            }
        } else if let Some(unanswered) = unanswered {
            return Ok(unanswered);
        }
        // The settings may have changed while this task made a call.
        if self.parts.spec.has_changed().unwrap_or(false) {
            self.apply_settings();
        }
        let spec = self.parts.spec.borrow().clone();
        self.calls += 1;
        let rest = self.releases.split_off(self.releases.len().min(BATCH_MAX));
        let releases = std::mem::replace(&mut self.releases, rest);
        self.release_at = (!self.releases.is_empty()).then(Instant::now);
        let compared = self.clock_verification.is_verified() && self.invalidate_epoch.is_none();
        self.sent_pause_until = self.sent_pause_until.max(self.pause_until);
        let input = CallInput {
            batches: if compared {
                self.queue.next_batches(&spec, &self.kind_blocks, self.persist_window.free_slots(), Instant::now())
            } else {
                Vec::new()
            },
            spec,
            releases,
            pause_until: self.pause_until.take(),
            rebuild: self.rebuild.as_mut().and_then(|rebuild| rebuild.data.take()),
            seeds: self.history.next_seeds(),
            invalidate_epoch: self.invalidate_epoch,
        };
        Ok(PendingCall::new(input, self.parts.incarnation, self.calls, run_id))
    }

    fn record_failure(&mut self, error: &LimiterError) {
        let now = Instant::now();
        if self.failures == 0 {
            let quota = self.parts.spec.borrow().quota.clone();
            // A start takes a moment. If it takes longer, the stall is logged.
            let is_starting = self.replied_at == self.origin && matches!(error, LimiterError::Unavailable(_));
            if is_starting {
                tracing::info!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
            } else {
                tracing::warn!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
            }
        }
        self.call_at = now + (RETRY_FIRST * 2_u32.saturating_pow(self.failures.min(10))).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        let reason = BlockReason::StoreUnavailable(error.to_string());
        self.block = Some(QueueBlock::new(reason, now + STORE_UNAVAILABLE_WAIT, false, now));
    }

    /// Releases permits before the gate ends, so that other processes can use their slots.
    async fn flush_releases(&mut self) {
        self.inbox.close();
        while let Ok(message) = self.inbox.try_recv() {
            if let GateMessage::Release(release) = message {
                self.releases.push(release);
            }
        }
        self.queue = WaitQueue::default();
        for _ in 0..LAST_CALLS_MAX {
            if self.releases.is_empty() && self.pending_call.is_none() {
                return;
            }
            let Err(error) = self.last_call().await else { continue };
            tracing::debug!(%error, "cannot deliver the last releases: their slots are free once the leases expire");
            return;
        }
        tracing::debug!(
            left = self.releases.len(),
            "too many releases at the end: their slots are free once the leases expire"
        );
    }

    async fn last_call(&mut self) -> Result<(), LimiterError> {
        let outgoing = self.prepare_call().await?;
        self.parts.limiter.call(&outgoing.spec, &outgoing.call).await.map(drop)
    }
}
