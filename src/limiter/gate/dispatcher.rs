//! The gate's one task: gathers wants and settlements, makes the next call when it is worth making, hands out permits.
//!
//! Refuses to make two calls at once, and refuses to make a new one while an earlier one has no answer: it repeats it
//! under the same number, so that a lost reply neither takes nor settles twice. Refuses grants of a store whose clock has
//! made a step.

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

/// Longest time between two exchanges with the store: the comparison of the clocks wears off.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long settlements wait for company.
pub const RELEASE_DELAY: Duration = Duration::from_millis(10);
/// Most calls that a gate makes before it leaves: ten thousand settlements.
const LAST_CALLS_MAX: u32 = 10;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long those are sent away who will not wait in hand while the store is away.
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
    /// The last pause that has been sent: it must outlive the state that was told of it.
    sent_pause_until: Option<Instant>,
    /// As of the settings that are followed.
    resumed_at: u64,
    /// Of the state that replied last.
    state_epoch: Option<Micros>,
    calls: u64,
    pending_call: Option<PendingCall>,
    failures: u32,
    block: Option<QueueBlock>,
    /// Of the kinds of calls that have a limit of their own.
    kind_blocks: BlocksByKind,
    call_at: Instant,
    replied_at: Instant,
    rebuild: Option<Rebuild>,
    history: HistoryLoader,
    /// Our settings are older than the store's; said once.
    stale: bool,
    /// The store's state is to be begun anew, and it need not hear of that at once.
    may_delay_reset: bool,
    /// The store that the comparison is with.
    run_id: String,
    origin: Instant,
    clock: ClockComparison,
    clock_verification: ClockVerification,
    call_sequence: CallSequence,
    invalidate_epoch: Option<Micros>,
    /// Not before may the state be reset because of a wait that settings cannot have made.
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
            // What was refused by settings of before refuses nobody now.
            if self.parts.spec.has_changed().unwrap_or(false) {
                self.apply_settings();
            }
            self.expire_waiters();
            let next = self.next_call_at();
            if next.is_some_and(|at| at <= Instant::now()) {
                self.call().await;
                continue;
            }
            // One whose time is over and whom nothing refuses waits for room, which is near.
            let deadline = self.queue.next_deadline().filter(|at| *at > Instant::now());
            let wake = [next, deadline].into_iter().flatten().min();
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

    /// Whoever waits is judged by the settings as they are now.
    fn apply_settings(&mut self) {
        let spec = self.parts.spec.borrow_and_update().clone();
        self.queue.apply_spec(&spec);
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

    /// A pause that may not have arrived is told again, unless an operator has lifted it since.
    fn repeat_pause(&mut self, outgoing: &PendingCall) {
        if outgoing.spec.resumed_at == self.resumed_at {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
        }
    }

    fn handle_message(&mut self, message: GateMessage) {
        match message {
            GateMessage::Acquire(waiter) => self.enqueue(waiter),
            GateMessage::Position { job, reply } => {
                // Whoever asked and has gone away needs no answer.
                let _ = reply.send(self.queue.position_of(&job, self.block.as_ref(), &self.kind_blocks));
            }
            GateMessage::Release(settled) => {
                self.releases.push(settled);
                self.release_at.get_or_insert_with(|| Instant::now() + RELEASE_DELAY);
            }
            // Looked at before the next call.
            GateMessage::SlotFreed => {}
            GateMessage::Pause { until } => self.pause_until = self.pause_until.max(Some(until)),
        }
    }

    /// One who is more urgent than the first who was refused is asked for before that one's wait is over.
    fn enqueue(&mut self, waiter: PermitWaiter) {
        let (now, kind) = (Instant::now(), waiter.scope.kind());
        let Some(place) = self.queue.enqueue(waiter, &self.parts.spec.borrow(), now) else { return };
        if self.kind_blocks.get(&kind).is_some_and(|standing| standing.is_overtaken_by(place)) {
            self.kind_blocks.remove(&kind);
        }
        if self.block.take_if(|standing| standing.is_overtaken_by(place)).is_some() {
            self.call_at = now.max(self.replied_at + RETRY_PAUSE_MIN);
        }
    }

    /// Sends away whoever will not wait as long as the line stands.
    fn expire_waiters(&mut self) {
        let now = Instant::now();
        self.queue.sweep_cancelled();
        self.block.take_if(|standing| standing.until <= now);
        self.kind_blocks.retain(|_, standing| standing.until > now);
        let of_kinds = self.kind_blocks.iter().map(|(kind, standing)| (Some(*kind), standing));
        for (kind, standing) in self.block.iter().map(|standing| (None, standing)).chain(of_kinds) {
            self.queue.refuse_expiring(standing, kind, now);
        }
        let first_of_kinds = || self.kind_blocks.values().min_by_key(|standing| standing.until);
        let standing =
            self.block.as_ref().or_else(first_of_kinds).map(|standing| (standing.reason.clone(), standing.until));
        let view = GateView { waiting: self.queue.len(), block: standing };
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

    /// When the next call is worth making; `None`: never.
    fn next_call_at(&self) -> Option<Instant> {
        // A gate that has not been heard yet, or finds the store cold, asks without being asked: its first job must not
        // be the one that waits for it.
        if !self.clock_verification.is_verified()
            || self.calls < 2
            || self.rebuild.is_some()
            || self.history.has_loaded()
            || self.pending_call.is_some()
            || self.failures > 0
        {
            return Some(self.call_at);
        }
        let ready_at =
            self.queue.ready_at(&self.kind_blocks).map_or(self.call_at, |ready_at| ready_at.max(self.call_at));
        let wants = (!self.queue.is_empty() && self.persist_window.free_slots() > 0).then_some(ready_at);
        // Older settings than the store's achieve nothing, however urgent the call is.
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

    /// The unanswered call again, or a new one. A store that has become another knows nothing of the old call.
    async fn prepare_call(&mut self) -> Result<PendingCall, LimiterError> {
        let quota = self.parts.spec.borrow().quota.clone();
        let run_id = self.parts.limiter.run_id(&quota).await?;
        let unanswered = self.pending_call.take();
        if run_id != self.run_id {
            if !self.run_id.is_empty() {
                tracing::warn!(%quota, "limiter store has become another; its state is not trusted");
            }
            self.run_id.clone_from(&run_id);
            (self.clock, self.clock_verification) = (ClockComparison::default(), ClockVerification::default());
            self.call_sequence.reset();
            if let Some(unheard) = unanswered {
                self.repeat_pause(&unheard);
            }
        } else if let Some(unanswered) = unanswered {
            return Ok(unanswered);
        }
        // A change that came while this task made a call.
        if self.parts.spec.has_changed().unwrap_or(false) {
            self.apply_settings();
        }
        let spec = self.parts.spec.borrow().clone();
        self.calls += 1;
        let rest = self.releases.split_off(self.releases.len().min(BATCH_MAX));
        let settled = std::mem::replace(&mut self.releases, rest);
        self.release_at = (!self.releases.is_empty()).then(Instant::now);
        let compared = self.clock_verification.is_verified() && self.invalidate_epoch.is_none();
        self.sent_pause_until = self.sent_pause_until.max(self.pause_until);
        let load = CallInput {
            batches: if compared {
                self.queue.next_batches(&spec, &self.kind_blocks, self.persist_window.free_slots(), Instant::now())
            } else {
                Vec::new()
            },
            spec,
            releases: settled,
            pause_until: self.pause_until.take(),
            rebuild: self.rebuild.as_mut().and_then(|cold| cold.data.take()),
            seeds: self.history.next_seeds(),
            invalidate_epoch: self.invalidate_epoch,
        };
        Ok(PendingCall::new(load, self.parts.incarnation, self.calls, run_id))
    }

    fn record_failure(&mut self, error: &LimiterError) {
        let now = Instant::now();
        if self.failures == 0 {
            tracing::warn!(quota = %self.parts.spec.borrow().quota, %error, "no permits: the limiter cannot be asked");
        }
        self.call_at = now + (RETRY_FIRST * 2_u32.saturating_pow(self.failures.min(10))).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        let by = BlockReason::StoreUnavailable(error.to_string());
        self.block = Some(QueueBlock::new(by, now + STORE_UNAVAILABLE_WAIT, false, now));
    }

    /// Before leaving: what is answered is settled, so that the slots serve other processes.
    async fn flush_releases(&mut self) {
        self.inbox.close();
        while let Ok(message) = self.inbox.try_recv() {
            if let GateMessage::Release(settled) = message {
                self.releases.push(settled);
            }
        }
        self.queue = WaitQueue::default();
        for _ in 0..LAST_CALLS_MAX {
            if self.releases.is_empty() && self.pending_call.is_none() {
                return;
            }
            let Err(error) = self.last_call().await else { continue };
            tracing::debug!(%error, "last settlements not delivered; their leases run out");
            return;
        }
        tracing::debug!(left = self.releases.len(), "too many last settlements; their leases run out");
    }

    async fn last_call(&mut self) -> Result<(), LimiterError> {
        let outgoing = self.prepare_call().await?;
        self.parts.limiter.call(&outgoing.spec, &outgoing.call).await.map(drop)
    }
}
