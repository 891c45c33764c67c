//! The checks of the store behind the limiter: its run, its clock, and whether its state is the one that it was.
//!
//! Grants of a store whose clock made a step, or whose state is an earlier one, are discarded. The state is reset then.
//! The gate's own comparison of the clocks covers the time since its first exchange. The time before needs a clock
//! attestation of another process. If none comes in time, verification fails, and the state is reset, too.
//! See `docs/decisions/0013-verify-the-store-clock.md`.

use std::time::Duration;

use tokio::time::Instant;

use super::reply::{AnsweredCall, ClockProof};
use super::{GateCore, Notice, Ticket};
use crate::domain::clock_comparison::{AttestationCheck, ClockComparison, Comparison};
use crate::domain::permit_protocol::{LimiterReply, PermitGrant};
use crate::domain::quota_spec::CounterSpec;
use crate::domain::time::Micros;
use crate::limiter::StoreClockReading;
use crate::limiter::gate::BlockReason;
use crate::limiter::gate::block::{QueueBlock, exceeded_wait};
use crate::limiter::gate::call_sequence::CallSequence;
use crate::limiter::gate::wait_queue::CountedSubjects;

/// How long a gate with old settings waits for the new ones before it asks again.
pub(super) const STALE_PAUSE: Duration = Duration::from_millis(100);
/// Time between two checks for a clock attestation.
const ATTESTATION_PAUSE: Duration = Duration::from_millis(50);

/// Longer than another process needs to record an attestation: two polls of the row, and the time of a poll.
const ATTESTATION_WAIT_MAX: Duration = Duration::from_secs(4);

const ROLLED_BACK: &str = "the limiter's state is an earlier one than we have seen";
pub(super) const IMPLAUSIBLE_VERSION: &str = "the limiter's settings version cannot be true";

/// What the gate knows about its store.
#[derive(Debug)]
pub(super) struct StoreChecks {
    /// Run id of the store that the clock comparison is with.
    run_id: String,
    origin: Instant,
    clock: ClockComparison,
    clock_verification: ClockVerification,
    call_sequence: CallSequence,
    invalidate_epoch: Option<Micros>,
    /// Earliest next reset because of a wait that is longer than any under these settings.
    wait_reset_again_at: Option<Instant>,
}

impl StoreChecks {
    pub fn new(now: Instant) -> Self {
        Self {
            run_id: String::new(),
            origin: now,
            clock: ClockComparison::default(),
            clock_verification: ClockVerification::default(),
            call_sequence: CallSequence::default(),
            invalidate_epoch: None,
            wait_reset_again_at: None,
        }
    }

    pub fn origin(&self) -> Instant {
        self.origin
    }

    pub fn is_verified(&self) -> bool {
        self.clock_verification.is_verified()
    }

    /// Whether grants of the next call could be used.
    pub fn may_request(&self) -> bool {
        self.is_verified() && self.invalidate_epoch.is_none()
    }

    pub fn invalidate_epoch(&self) -> Option<Micros> {
        self.invalidate_epoch
    }

    /// Has the state of this epoch reset with the next call.
    pub fn invalidate(&mut self, state_epoch: Micros) {
        self.invalidate_epoch = Some(state_epoch);
    }

    pub fn is_same_run(&self, run_id: &str) -> bool {
        self.run_id == run_id
    }

    /// Begins with another store; returns whether there was one before.
    pub fn replace(&mut self, run_id: &str) -> bool {
        let had_store = !self.run_id.is_empty();
        run_id.clone_into(&mut self.run_id);
        (self.clock, self.clock_verification) = (ClockComparison::default(), ClockVerification::default());
        self.call_sequence.reset();
        had_store
    }

    /// Earliest start of a grant's permits: not before the reply arrived, and not before each slot's window is over.
    /// The store's clock counts as it ran during that window, in case it has made an undetected step since. The origin
    /// of an account's slot is not in the reply; it is due now at the latest.
    pub fn start_at(
        &self,
        cells: &[CounterSpec],
        run: &PermitGrant,
        answered: AnsweredCall<'_>,
        counted: &CountedSubjects,
    ) -> Instant {
        let (now, since) = (answered.reply.now, answered.arrived.saturating_duration_since(self.origin));
        let known = cells.iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0);
        let known =
            known.map(|(cell, origin_ms)| ((origin_ms * 1_000 + cell.window_us).min(now.0 + run.wait_us), cell));
        let slots = known.chain(counted.held_counters.iter().map(|cell| (now.0, cell)));
        let starts = slots
            .map(|(due_us, cell)| self.clock.not_before(since, Micros(due_us), Duration::from_micros(cell.window_us)));
        self.origin + starts.fold(since + Duration::from_micros(run.wait_us), Duration::max)
    }
}

/// The verification as far as it has come.
#[derive(Clone, Copy, Debug, Default)]
struct ClockVerification {
    /// The store's clock at the exchange with which the comparison began.
    comparison_began: Micros,
    /// The verified time begins here, by the store's clock; `None` before verification.
    verified_since: Option<Micros>,
    missing_since: Option<Instant>,
}

/// The result of one exchange with the store.
#[must_use]
enum VerifyResult {
    /// Verified with this exchange; before, a step of at most this size may have gone undetected.
    Verified { since: Micros, undetected_step: Duration },
    /// Verified earlier.
    AlreadyVerified { since: Micros },
    /// No attestation yet.
    Pending,
    /// No attestation covers the age of the state.
    Failed,
}

impl ClockVerification {
    /// The comparison begins with this exchange, for the first time or again.
    fn begin(&mut self, now: Micros) {
        *self = Self { comparison_began: now, verified_since: None, missing_since: None };
    }

    fn is_verified(&self) -> bool {
        self.verified_since.is_some()
    }

    /// Verifies the clock for a state that began at `born`. A state that is younger than the gate's own comparison
    /// needs no attestation.
    fn verify(&mut self, born: Micros, now: Instant, attested: impl FnOnce() -> AttestationCheck) -> VerifyResult {
        if let Some(since) = self.verified_since {
            return VerifyResult::AlreadyVerified { since };
        }
        if born >= self.comparison_began {
            self.verified_since = Some(self.comparison_began);
            return VerifyResult::Verified { since: self.comparison_began, undetected_step: Duration::ZERO };
        }
        match attested() {
            AttestationCheck::Valid { since, undetected_step } if born >= since => {
                self.verified_since = Some(since);
                VerifyResult::Verified { since, undetected_step }
            }
            AttestationCheck::Missing if now < *self.missing_since.get_or_insert(now) + ATTESTATION_WAIT_MAX => {
                VerifyResult::Pending
            }
            AttestationCheck::Valid { .. } | AttestationCheck::Missing | AttestationCheck::Mismatch => {
                self.missing_since = None;
                VerifyResult::Failed
            }
        }
    }
}

impl<T: Ticket> GateCore<T> {
    /// Compares the clocks before anything of the reply is used. After a step the instants that the store counted mean
    /// nothing. The state is reset, and the grants of this call are discarded.
    pub(super) fn detect_clock_step(&mut self, answered: AnsweredCall<'_>) -> bool {
        let AnsweredCall { outgoing, reply, arrived, .. } = answered;
        let store = &mut self.store;
        store.invalidate_epoch.take_if(|born| outgoing.call.invalidate_epoch == Some(*born));
        let [departed, arrived] = [outgoing.sent_at, arrived].map(|at| at.saturating_duration_since(store.origin));
        let (by, direction) = match store.clock.observe(departed, arrived, reply.now) {
            Comparison::First => {
                store.clock_verification.begin(reply.now);
                return false;
            }
            Comparison::Agrees { .. } => return false,
            Comparison::SteppedForward { by } => (by, "forward"),
            Comparison::SteppedBack { by } => (by, "back"),
        };
        store.clock_verification.begin(reply.now);
        store.invalidate(reply.state_epoch);
        self.notices.push(Notice::ClockStepped { by, direction });
        self.repeat_pause(outgoing);
        true
    }

    /// Detects a state that was put back to an earlier one, which has forgotten uses that are in the ledger, and one
    /// whose uses fill a limit for longer than its settings allow. It is reset, and the grants of this call are
    /// discarded.
    pub(super) fn detect_unusable_state(&mut self, answered: AnsweredCall<'_>) -> bool {
        let AnsweredCall { outgoing, reply, arrived, .. } = answered;
        if outgoing.call.invalidate_epoch.is_some() {
            self.store.call_sequence.reset();
        }
        let notice = if !self.store.call_sequence.is_in_sequence(outgoing.call.number, reply, arrived) {
            Notice::StateReset(ROLLED_BACK)
        } else if self.is_wait_excessive(answered) {
            Notice::LimitSlowed
        } else {
            return false;
        };
        self.reset_state(reply, arrived, notice);
        self.repeat_pause(outgoing);
        true
    }

    /// Whether a wait is longer than any under these settings. That is so after a limit was made slower while it was
    /// used in full: the uses count at the slower rate. The ledger's usage fills the limit once. The state is reset only
    /// once within the longest wait, because booked starts may cause such a wait again.
    fn is_wait_excessive(&mut self, answered: AnsweredCall<'_>) -> bool {
        let AnsweredCall { outgoing, reply, arrived, .. } = answered;
        let is_due = self.store.wait_reset_again_at.is_none_or(|at| at <= arrived);
        let exceeded = exceeded_wait(&outgoing.spec, reply, |skipped| answered.exceeds_share(skipped));
        let Some(longest) = exceeded.filter(|_| is_due) else { return false };
        self.store.wait_reset_again_at = Some(arrived + longest);
        true
    }

    /// Has the state reset with the next call, after a delay: another version's functions may ignore it for ever.
    pub(super) fn reset_state(&mut self, reply: &LimiterReply, arrived: Instant, notice: Notice) {
        self.store.invalidate(reply.state_epoch);
        self.may_delay_reset = true;
        self.block_until_retry(QueueBlock::new(BlockReason::Cold, arrived + STALE_PAUSE, false, arrived));
        self.notices.push(notice);
    }

    /// What the state counted before the first exchange counts if an attestation covers it; otherwise the state is
    /// reset. Once the clock is verified, it returns what this worker can attest for others.
    pub(super) fn verify_clock(&mut self, answered: AnsweredCall<'_>) -> Option<ClockProof> {
        let AnsweredCall { outgoing, reply, facts, arrived } = answered;
        let store = &mut self.store;
        let since_origin = arrived.saturating_duration_since(store.origin);
        let over = Duration::from_micros(outgoing.spec.longest_window_us()) + outgoing.spec.hold_max;
        let (least_ns, most_ns) = store.clock.reading(since_origin, over)?;
        let read = StoreClockReading { at: arrived, least_ns, most_ns };
        let attested = || (facts.attestation)(&read);
        match store.clock_verification.verify(reply.state_epoch, arrived, attested) {
            VerifyResult::Verified { since, undetected_step } => {
                store.clock.assume_undetected_step(undetected_step);
                Some(ClockProof { since, read })
            }
            VerifyResult::AlreadyVerified { since } => Some(ClockProof { since, read }),
            VerifyResult::Pending => None,
            VerifyResult::Failed => {
                store.invalidate(reply.state_epoch);
                self.notices.push(Notice::Unattested);
                None
            }
        }
    }

    pub(super) fn wait_for_verification(&mut self, arrived: Instant) {
        if !self.store.is_verified() && self.store.invalidate_epoch.is_none() {
            self.block_until_retry(QueueBlock::new(BlockReason::Cold, arrived + ATTESTATION_PAUSE, false, arrived));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verify_text(
        verification: &mut ClockVerification,
        born: u64,
        now: Instant,
        attested: AttestationCheck,
    ) -> String {
        match verification.verify(Micros(born), now, || attested) {
            VerifyResult::Verified { since, undetected_step } => {
                format!("verified since {} but {undetected_step:?}", since.0)
            }
            VerifyResult::AlreadyVerified { since } => format!("already since {}", since.0),
            VerifyResult::Pending => "pending".to_owned(),
            VerifyResult::Failed => "failed".to_owned(),
        }
    }

    #[test]
    fn state_is_verified_by_own_or_attested_comparison() {
        let (now, hidden) = (Instant::now(), Duration::from_millis(3));
        let attested_since = |since| AttestationCheck::Valid { since: Micros(since), undetected_step: hidden };
        let started = || {
            let mut verification = ClockVerification::default();
            verification.begin(Micros(100));
            verification
        };
        for (born, attested, expected) in [
            (100, AttestationCheck::Missing, "verified since 100 but 0ns"),
            (101, AttestationCheck::Mismatch, "verified since 100 but 0ns"),
            (99, attested_since(40), "verified since 40 but 3ms"),
            (40, attested_since(40), "verified since 40 but 3ms"),
            (39, attested_since(40), "failed"),
            (99, AttestationCheck::Mismatch, "failed"),
            (99, AttestationCheck::Missing, "pending"),
        ] {
            assert_eq!(verify_text(&mut started(), born, now, attested), expected, "{born} {attested:?}");
        }
        let mut verification = started();
        let _ = verify_text(&mut verification, 99, now, attested_since(40));
        assert_eq!(verify_text(&mut verification, 99, now, AttestationCheck::Mismatch), "already since 40");
        // After a step the earlier verification does not count any more.
        verification.begin(Micros(500));
        assert!(!verification.is_verified());
        assert_eq!(verify_text(&mut verification, 99, now, AttestationCheck::Missing), "pending");
        assert_eq!(verify_text(&mut verification, 99, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing), "failed");
        assert_eq!(
            verify_text(&mut verification, 501, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing),
            "verified since 500 but 0ns"
        );
    }
}
