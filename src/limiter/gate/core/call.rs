//! The calls of the core: when the next one is due, what it contains, and what follows if it fails.
//!
//! It makes one call at a time. A call without a reply is repeated under the same number, so that a lost reply acquires
//! and releases nothing twice.

use std::time::Duration;

use tokio::time::Instant;

use super::{GateCore, Notice, RETRY_FIRST, RETRY_MAX, STORE_UNAVAILABLE_WAIT, Ticket};
use crate::domain::permit_protocol::BATCH_MAX;
use crate::limiter::gate::BlockReason;
use crate::limiter::gate::block::QueueBlock;
use crate::limiter::gate::pending_call::{CallIdentity, CallInput, PendingCall};

/// Longest time between two exchanges with the store, because a comparison of the clocks loses precision with time.
const IDLE_MAX: Duration = Duration::from_secs(30);

impl<T: Ticket> GateCore<T> {
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
        let input = CallInput {
            batches,
            spec: self.spec.clone(),
            releases,
            pause_until: self.pause_until.take(),
            rebuild: self.cold.as_mut().and_then(|cold| cold.data.take()),
            seeds: self.history.next_seeds(),
            invalidate_epoch: self.store.invalidate_epoch(),
            look_ahead: self.persist_window.ahead().booking(),
        };
        let identity = CallIdentity { incarnation: self.incarnation, number: self.calls, run_id: run_id.to_owned() };
        PendingCall::new(input, identity, now)
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
