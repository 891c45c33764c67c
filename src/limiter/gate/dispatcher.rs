//! The gate's task: it drives the core with messages, limiter calls and histories, and hands out the permits.
//!
//! The rules are the core's ([`super::core`]). This is its I/O: it makes one limiter call at a time, and loads from the
//! ledger what a state has forgotten. See `docs/decisions/0016-one-batched-call-per-quota.md`.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use self::log::StallMonitor;
use super::core::{Decision, GateCore, ReplyEffects, StoreFacts, Ticket};
use super::history::{HistoryQuery, Rebuild, query_history};
use super::pending_call::PendingCall;
use super::permit::Permit;
use super::{AcquireResult, GateContext, GateMessage, GateView};
use crate::domain::permit_protocol::{CounterSeeds, LimiterReply};
use crate::faults::{self, CrashPoint};
use crate::limiter::LimiterError;

mod log;

/// Most calls that a gate makes before it ends: ten thousand releases.
const LAST_CALLS_MAX: u32 = 10;

impl Ticket for oneshot::Sender<AcquireResult> {
    fn is_cancelled(&self) -> bool {
        self.is_closed()
    }
}

pub(super) struct PermitDispatcher {
    parts: GateContext,
    inbox: mpsc::UnboundedReceiver<GateMessage>,
    outbox: mpsc::WeakUnboundedSender<GateMessage>,
    view: watch::Sender<GateView>,
    core: GateCore<oneshot::Sender<AcquireResult>>,
    rebuild: Option<Rebuild>,
    /// One query runs at a time.
    history: Option<HistoryQuery>,
    stall: StallMonitor,
}

impl PermitDispatcher {
    pub fn new(
        parts: GateContext,
        inbox: mpsc::UnboundedReceiver<GateMessage>,
        outbox: mpsc::WeakUnboundedSender<GateMessage>,
        view: watch::Sender<GateView>,
    ) -> Self {
        let spec = Arc::clone(&parts.spec.borrow());
        let core = GateCore::new(parts.incarnation, spec, Instant::now());
        Self { parts, inbox, outbox, view, core, rebuild: None, history: None, stall: StallMonitor::default() }
    }

    pub async fn run(mut self) {
        let stop = self.parts.stop.clone();
        while !stop.is_cancelled() {
            while let Ok(message) = self.inbox.try_recv() {
                self.handle_message(message);
            }
            if let Some(answer) = self.history.as_mut().and_then(|query| query.now_or_never()) {
                self.receive_history(answer);
            }
            self.apply_new_settings();
            self.advance();
            let now = Instant::now();
            let next = self.core.next_call_at(now);
            if next <= now {
                self.call().await;
                continue;
            }
            let wake = self.core.next_deadline(now).map_or(next, |deadline| deadline.min(next));
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
                Some(answer) = OptionFuture::from(self.history.as_mut()) => self.receive_history(answer),
                () = sleep_until(wake) => {}
            }
        }
        self.flush_releases().await;
    }

    fn apply_new_settings(&mut self) {
        if self.parts.spec.has_changed().unwrap_or(false) {
            self.apply_settings();
        }
    }

    fn apply_settings(&mut self) {
        let spec = Arc::clone(&self.parts.spec.borrow_and_update());
        // Other settings may need another history.
        self.history = None;
        self.core.apply_spec(spec, Instant::now());
        self.log_notices();
    }

    fn handle_message(&mut self, message: GateMessage) {
        self.apply_new_settings();
        let now = Instant::now();
        match message {
            GateMessage::Acquire(waiter) => self.core.join(waiter, now),
            GateMessage::Position { job, reply } => {
                // A caller that was cancelled needs no answer.
                let _ = reply.send(self.core.position_of(&job, now));
            }
            GateMessage::Ping(reply) => {
                // A caller that no longer waits needs no answer.
                let _ = reply.send(());
            }
            GateMessage::Release(release) => self.core.release(release, now),
            // The free slots are read before the next call.
            GateMessage::SlotFreed => {}
            GateMessage::Pause { until } => self.core.pause(until),
        }
    }

    /// Takes a history from the ledger.
    fn receive_history(&mut self, answer: Result<CounterSeeds, String>) {
        self.history = None;
        if let Err(cause) = self.core.receive_history(answer, Instant::now()) {
            let quota = &self.core.spec().quota;
            tracing::warn!(%quota, cause, "cannot read past usage from the ledger: new limits wait, retrying");
        }
    }

    /// Ends the waits that are over, and shows the state of the queue.
    fn advance(&mut self) {
        let now = Instant::now();
        self.core.advance(now);
        self.deliver_decisions();
        let view = self.core.view();
        self.log_stall(&view, now);
        self.view.send_replace(view);
    }

    fn deliver_decisions(&mut self) {
        for Decision { ticket, result } in self.core.take_decisions() {
            let result = match result {
                AcquireResult::Granted(permit) => {
                    self.stall.end();
                    AcquireResult::Granted(Permit::new(permit, &self.outbox))
                }
                AcquireResult::Refused(refusal) => AcquireResult::Refused(refusal),
                AcquireResult::NoWorkerSlot => AcquireResult::NoWorkerSlot,
            };
            // A request that was cancelled needs no answer. Its permit is dropped, which releases its slots.
            let _ = ticket.send(result);
        }
    }

    async fn call(&mut self) {
        let outgoing = match self.prepare_call().await {
            Ok(outgoing) => outgoing,
            Err(error) => return self.record_failure(None, &error),
        };
        match self.parts.limiter.call(&outgoing.spec, &outgoing.call).await {
            Ok(reply) => {
                if !outgoing.releases.is_empty() {
                    faults::crash(CrashPoint::AfterSettle);
                }
                self.handle_reply(outgoing, &reply).await;
            }
            Err(error) => self.record_failure(Some(outgoing), &error),
        }
    }

    /// The unanswered call again, or a new one.
    async fn prepare_call(&mut self) -> Result<PendingCall, LimiterError> {
        let quota = self.core.spec().quota.clone();
        let run_id = self.parts.limiter.run_id(&quota).await?;
        // The settings may have changed while this task made a call.
        if !self.core.repeats_call(&run_id) {
            self.apply_new_settings();
        }
        let outgoing = self.core.prepare_call(&run_id, Instant::now());
        self.log_notices();
        Ok(outgoing)
    }

    async fn handle_reply(&mut self, outgoing: PendingCall, reply: &LimiterReply) {
        let (arrived, spec, run_id) = (Instant::now(), Arc::clone(&outgoing.spec), outgoing.call.run_id.clone());
        let effects = self.receive_reply(outgoing, reply, arrived);
        self.deliver_decisions();
        self.log_notices();
        if !self.core.is_cold() {
            self.rebuild = None;
        }
        if let Some(proof) = effects.clock_proof {
            self.parts.limiter.attest_clock(&spec.quota, &run_id, proof.since, proof.read);
        }
        if let Some(request) = effects.history {
            let recent = Arc::clone(&self.parts.recent);
            self.history.get_or_insert_with(|| query_history(request, recent));
        }
        if let Some(version) = effects.newer_version {
            (self.parts.on_newer_version)(version);
        }
        if let Some(cold) = effects.cold {
            let mut rebuild = Rebuild::resume_or_new(self.rebuild.take(), cold.state_epoch);
            let step = rebuild.advance(&spec, &self.parts, cold).await;
            self.rebuild = Some(rebuild);
            self.core.resolve_cold(cold, step, arrived);
        }
    }

    fn receive_reply(&mut self, outgoing: PendingCall, reply: &LimiterReply, arrived: Instant) -> ReplyEffects {
        let limiter = &self.parts.limiter;
        let quota = outgoing.spec.quota.clone();
        let facts = StoreFacts {
            exceeds_share: &|spec, request| limiter.exceeds_share(spec, request),
            attestation: &|reading| limiter.check_attestation(&quota, reading),
        };
        self.core.receive_reply(outgoing, reply, &facts, arrived)
    }

    fn record_failure(&mut self, outgoing: Option<PendingCall>, error: &LimiterError) {
        self.log_failure(error);
        self.core.record_failure(outgoing, error.to_string(), Instant::now());
    }

    /// Releases permits before the gate ends, so that other processes can use their slots.
    async fn flush_releases(&mut self) {
        self.inbox.close();
        while let Ok(message) = self.inbox.try_recv() {
            if let GateMessage::Release(release) = message {
                self.core.release(release, Instant::now());
            }
        }
        self.core.close();
        for _ in 0..LAST_CALLS_MAX {
            if !self.core.has_unsent() {
                return;
            }
            let Err(error) = self.last_call().await else { continue };
            tracing::debug!(%error, "cannot deliver the last releases: their slots are free once the leases expire");
            return;
        }
        tracing::debug!(
            left = self.core.unsent_releases(),
            "too many releases at the end: their slots are free once the leases expire"
        );
    }

    async fn last_call(&mut self) -> Result<(), LimiterError> {
        let outgoing = self.prepare_call().await?;
        self.parts.limiter.call(&outgoing.spec, &outgoing.call).await.map(drop)
    }
}
