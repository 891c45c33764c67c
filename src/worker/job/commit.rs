//! Commits the state of a job: after a request, without one, or by releasing it unchanged.
//!
//! A job that waits sleeps in the ledger until its instant.

use std::fmt;
use std::time::Duration;

use tracing::Instrument as _;

use super::answer::{RefusedAnswer, Rewritten};
use super::{JobRun, LANE_PAUSED_DELAY, UNSENT_DELAY, WaitCause};
use crate::domain::commit_memory::Progress;
use crate::domain::disposition::Transition;
use crate::domain::job::JobId;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::delay_after_response;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::{AttemptEnd, FencedWrite, JobState, LeaseToken, LedgerError, LookupEnd};
use crate::telemetry::spans;
use crate::worker::WorkerContext;
use crate::worker::commit_guard::{HeldBack, KeptResponse, PROOFS_ARRIVE_WITHIN};
use crate::worker::intake::{BACKEND_REFUSAL_PAUSE, DeliveryAction, pause_intake};
use crate::worker::retry::{Transient as _, retry_while_unavailable};

/// Result of a request, for its row.
pub(super) enum AttemptResult {
    Charge(AttemptEnd),
    Lookup(LookupEnd),
}

impl AttemptResult {
    /// A request that was recorded, of which nothing was sent.
    fn unsent(kind: CallKind, number: u32, cause: &str) -> Self {
        let (outcome, detail) = (NOT_SENT, cause.to_owned());
        match kind {
            CallKind::Charge => Self::Charge(AttemptEnd { number, outcome, status: None, detail, counts: false }),
            CallKind::Lookup => Self::Lookup(LookupEnd { number, outcome, status: None, detail, grants_resend: false }),
        }
    }

    /// The same result without text of the response.
    pub(super) fn without_detail(&self) -> Self {
        let detail = String::new();
        match self {
            Self::Charge(end) => Self::Charge(AttemptEnd { detail, ..end.clone() }),
            Self::Lookup(end) => Self::Lookup(LookupEnd { detail, ..end.clone() }),
        }
    }

    /// How far the job is with this result and state. `committed`: the final state that was written, if it is known.
    fn progress(&self, state: &JobState, committed: Option<FinalState>) -> Progress<KeptResponse> {
        match (self, state) {
            // A look-up never takes back that its job may have been charged.
            (Self::Charge(_), JobState::Waiting { .. }) => Progress::Recorded,
            (Self::Lookup(_), JobState::Waiting { .. }) | (_, JobState::Unknown { .. }) => Progress::Sent,
            (_, JobState::Final { .. } | JobState::SucceededInPart(_)) => {
                let (outcome, status) = self.outcome_and_status();
                let requested = if let JobState::Final { state, .. } = state { *state } else { FinalState::Succeeded };
                let end = committed.unwrap_or(requested);
                Progress::Ended(KeptResponse { outcome, status, state: state.clone(), end })
            }
        }
    }

    pub(super) fn number(&self) -> u32 {
        match self {
            Self::Charge(end) => end.number,
            Self::Lookup(end) => end.number,
        }
    }

    /// Outcome code, and the status that it came with.
    pub(super) fn outcome_and_status(&self) -> (&'static str, Option<u16>) {
        match self {
            Self::Charge(end) => (end.outcome, end.status),
            Self::Lookup(end) => (end.outcome, end.status),
        }
    }
}

/// Writes the result of a request and the job's state under the lease, and remembers the commit. Returns the final state
/// that was written, which is not always the requested one: a charge that belongs to another payment makes it `review`.
pub(super) async fn write_answer(
    worker: &WorkerContext,
    lease: &LeaseToken,
    result: &AttemptResult,
    state: &JobState,
    max_batch_delay: Duration,
) -> Result<(FencedWrite, Option<FinalState>), LedgerError> {
    let ledger = &worker.backends.ledger;
    let (written, committed) = match result {
        AttemptResult::Charge(end) => ledger.finish_attempt_batched(lease, end, state, max_batch_delay).await?,
        AttemptResult::Lookup(end) => ledger.finish_lookup(lease, end, state).await?,
    };
    worker.guard.record_end(lease, result.number(), result.progress(state, committed), written);
    Ok((written, committed))
}

impl JobRun<'_> {
    async fn write_result(
        &self,
        result: &AttemptResult,
        state: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>), LedgerError> {
        let max_batch_delay = delay_after_response(self.delivered_at.elapsed());
        write_answer(&self.lane.worker, &self.active.lease, result, state, max_batch_delay).await
    }

    /// Ends a request that was recorded too late for its permit: nothing was sent.
    pub(super) async fn finish_unsent(&self, kind: CallKind, number: u32) -> DeliveryAction {
        let result = AttemptResult::unsent(kind, number, "recorded too late for its permit");
        let unknown = self.claimed.maybe_charged;
        let next = Transition::Retry { after: UNSENT_DELAY, unknown, reason: WaitReason::PermitMissed.into() };
        self.commit_result(result, next, "late").await
    }

    /// Ends a charge that was recorded and may not be sent now.
    pub(super) async fn finish_held_back(&self, number: u32, held_back: HeldBack) -> DeliveryAction {
        let reason = held_back.wait();
        if matches!(held_back, HeldBack::NotCompared) {
            self.lane.control.pause_sending(PROOFS_ARRIVE_WITHIN, PauseCause::Backend, reason.clone());
        }
        let result = AttemptResult::unsent(CallKind::Charge, number, &reason.to_string());
        let unknown = self.claimed.maybe_charged;
        self.commit_result(result, Transition::Retry { after: LANE_PAUSED_DELAY, unknown, reason }, "lane_held").await
    }

    /// Commits the result of a request and the job's state; `label` names its wait, if it waits, in metrics.
    pub(super) async fn commit_result(
        &self,
        result: AttemptResult,
        next: Transition,
        label: &'static str,
    ) -> DeliveryAction {
        let state = job_state(next);
        let written = faults::unread(CrashPoint::OutcomeCommitUnacknowledged, self.write_result(&result, &state));
        let written = written.instrument(spans::step("write the outcome down")).await;
        faults::crash(CrashPoint::AfterOutcome);
        match written {
            Ok((FencedWrite::Applied, committed)) => {
                self.lane.control.outcomes.record_accepted();
                self.to_delivery_action(&state, committed, label)
            }
            Ok((FencedWrite::Stale, _)) => {
                AnswerText::new(&self.job.id, &result, &state).log_taken_over();
                DeliveryAction::Requeue
            }
            // Boxed because it is rare and large.
            Err(error) => Box::pin(self.write_again(RefusedAnswer::new(self, result, state, error), label)).await,
        }
    }

    async fn write_again(&self, mut answer: RefusedAnswer, label: &'static str) -> DeliveryAction {
        match answer.write().instrument(spans::step("write the outcome down again")).await {
            Rewritten::Applied(state, committed) => return self.to_delivery_action(&state, committed, label),
            Rewritten::TakenOver => answer.text().log_taken_over(),
            Rewritten::Known | Rewritten::Abandoned => {}
            Rewritten::Continues => drop(self.lane.worker.jobs.spawn(answer.finish())),
        }
        DeliveryAction::Requeue
    }

    /// Ends a request that could not be recorded: its commit is unknown, but nothing was sent. An error of the database
    /// that is not transient would repeat, so the lane's intake is paused.
    pub(super) async fn abort_attempt(&self, kind: CallKind, error: &LedgerError) -> DeliveryAction {
        let (ledger, lease) = (&self.lane.worker.backends.ledger, &self.active.lease);
        let refused = !error.is_transient();
        let (after, cause, label) = match refused {
            true => (BACKEND_REFUSAL_PAUSE, error.to_string(), "ledger_refused"),
            false => (UNSENT_DELAY, "the ledger was unavailable".to_owned(), "ledger_unavailable"),
        };
        let reason = if refused { WaitReason::LedgerRefused } else { WaitReason::LedgerUnavailable };
        let open = AttemptResult::unsent(kind, self.claimed.last_attempt + 1, &cause);
        let reason = Wait::with_detail(reason, format!("{cause}, nothing was sent"));
        let state = job_state(Transition::Retry { after, unknown: self.claimed.maybe_charged, reason });
        let written = retry_while_unavailable("cancel an unsent request", &self.lane.worker.abandon, || async {
            match self.write_result(&open, &state).await? {
                (FencedWrite::Applied, committed) => Ok::<_, LedgerError>((FencedWrite::Applied, committed)),
                (FencedWrite::Stale, _) => Ok((ledger.transition(lease, &state).await?, None)),
            }
        });
        match written.await {
            Ok((FencedWrite::Applied, committed)) => {
                if refused {
                    pause_intake(self.lane);
                }
                self.to_delivery_action(&state, committed, label)
            }
            _ if refused => DeliveryAction::RequeueAndPause,
            _ => DeliveryAction::Requeue,
        }
    }

    /// Changes the job's state without a request; `label` names its wait, if it waits, in metrics.
    pub(super) async fn transition(&self, next: Transition, label: &'static str) -> DeliveryAction {
        let (state, ledger) = (job_state(next), &self.lane.worker.backends.ledger);
        let written = retry_while_unavailable("update job state", &self.lane.worker.abandon, || {
            ledger.transition(&self.active.lease, &state)
        });
        match written.await {
            Ok(FencedWrite::Applied) => self.to_delivery_action(&state, None, label),
            Ok(FencedWrite::Stale) => DeliveryAction::Requeue,
            Err(error) => {
                tracing::warn!(job = %self.job.id, %error, "failed to update job state; the job returns to the backlog");
                DeliveryAction::RequeueAndPause
            }
        }
    }

    pub(super) async fn delay(&self, wait: Duration, cause: WaitCause) -> DeliveryAction {
        let WaitCause { label, reason } = cause;
        self.transition(Transition::Retry { after: wait, unknown: self.claimed.maybe_charged, reason }, label).await
    }

    /// Releases the job of a stopping worker: other workers can claim it at once.
    pub(super) async fn release(&self) -> DeliveryAction {
        match self.lane.worker.backends.ledger.release(&self.active.lease).await {
            Ok(FencedWrite::Applied | FencedWrite::Stale) => {}
            Err(error) => {
                tracing::debug!(job = %self.job.id, %error, "failed to release a job; it returns to the backlog")
            }
        }
        DeliveryAction::Requeue
    }

    /// Follows a commit; `committed`: the final state that was written, if it is known.
    fn to_delivery_action(
        &self,
        state: &JobState,
        committed: Option<FinalState>,
        label: &'static str,
    ) -> DeliveryAction {
        match state {
            JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
                spans::record_result(label);
                self.lane.meter.record_delay(label, reason.to_string());
                self.lane.sleepers.add(*wait);
            }
            JobState::Final { .. } | JobState::SucceededInPart(_) => {
                let requested = match state {
                    JobState::Final { state, .. } => *state,
                    _ => FinalState::Succeeded,
                };
                let state = committed.unwrap_or(requested);
                spans::record_result(state.name());
                self.lane.meter.record_finished(state, self.age());
                self.lane.worker.new_events.notify_one();
            }
        }
        DeliveryAction::Ack
    }
}

/// What is known of an answer, for the operator: above all whether the payment was charged.
pub(super) struct AnswerText<'a> {
    id: &'a JobId,
    outcome: &'static str,
    status: Option<u16>,
    reference: Option<&'a str>,
}

impl<'a> AnswerText<'a> {
    pub(super) fn new(id: &'a JobId, result: &AttemptResult, state: &'a JobState) -> Self {
        let (outcome, status) = result.outcome_and_status();
        let reference = match state {
            JobState::Final { reference, .. } => reference.as_deref(),
            JobState::SucceededInPart(charge) => charge.reference.as_deref(),
            JobState::Waiting { .. } | JobState::Unknown { .. } => None,
        };
        Self { id, outcome, status, reference }
    }

    pub(super) fn log_error(&self, error: &LedgerError, consequence: &str) {
        let Self { id, outcome, status, reference } = self;
        tracing::error!(job = %id, outcome, status, reference, %error, "{consequence}");
    }

    /// Another worker has the job: its outcome must agree with this response.
    pub(super) fn log_taken_over(&self) {
        const TAKEN_OVER: &str = "another worker has taken this job over; its outcome must agree with this response";
        let Self { id, outcome, status, reference } = self;
        if matches!(*outcome, "accepted" | "declined" | "differs") {
            tracing::error!(job = %id, outcome, status, reference, "{TAKEN_OVER}");
        } else {
            tracing::warn!(job = %id, outcome, status, reference, "{TAKEN_OVER}");
        }
    }
}

impl fmt::Display for AnswerText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "outcome {}", self.outcome)?;
        if let Some(status) = self.status {
            write!(f, ", status {status}")?;
        }
        match self.reference {
            Some(reference) => write!(f, ", reference {reference}"),
            None => write!(f, ", no reference"),
        }
    }
}

fn job_state(next: Transition) -> JobState {
    match next {
        Transition::Finalize { state, reason, reference } => JobState::Final { state, reason, reference },
        Transition::SucceedInPart(charge) => JobState::SucceededInPart(charge),
        Transition::Retry { after, unknown: true, reason } => JobState::Unknown { wait: after, reason },
        Transition::Retry { after, unknown: false, reason } => JobState::Waiting { wait: after, reason },
    }
}
