//! Commits the state of a job: after a request, without one, or by releasing it unchanged.
//!
//! A delivery is acknowledged only when its job's state is committed. Otherwise the next worker finds the request open
//! in the ledger.

use std::time::Duration;

use tracing::Instrument as _;

use super::{JobRun, WaitCause};
use crate::domain::disposition::Transition;
use crate::domain::job::JobId;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::delay_after_response;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::ledger::copies::ReturnPlan;
use crate::ledger::{AttemptEnd, BatchOptions, FencedWrite, JobState, LedgerError, LookupEnd, OutcomeEvent};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::{BACKEND_REFUSAL_PAUSE, DeliveryAction, pause_intake};
use crate::worker::outbox::EVENT_LEASE;
use crate::worker::retry::{RetryEnded, Transient as _, retry_while_unavailable};

/// State of a job as it was committed.
#[derive(Default)]
struct CommittedState {
    /// Not always the requested state: a charge that belongs to another payment makes it `review`.
    state: Option<FinalState>,
    /// The outcome event, if this process publishes it.
    event: Option<OutcomeEvent>,
    /// Copy of a waiting job.
    next_copy: Option<ReturnPlan>,
}

impl CommittedState {
    fn delayed(next_copy: Option<ReturnPlan>) -> Self {
        Self { next_copy, ..Self::default() }
    }
}

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

    fn number(&self) -> u32 {
        match self {
            Self::Charge(end) => end.number,
            Self::Lookup(end) => end.number,
        }
    }

    /// Outcome code, and the status that it came with.
    fn outcome_and_status(&self) -> (&'static str, Option<u16>) {
        match self {
            Self::Charge(end) => (end.outcome, end.status),
            Self::Lookup(end) => (end.outcome, end.status),
        }
    }
}

impl JobRun<'_> {
    /// Writes the result of a request and the job's state.
    async fn write_result(
        &self,
        result: &AttemptResult,
        state: &JobState,
    ) -> Result<(FencedWrite, CommittedState), LedgerError> {
        let (lease, ledger) = (&self.active.lease, &self.lane.worker.backends.ledger);
        match result {
            AttemptResult::Charge(end) => {
                let max_batch_delay = delay_after_response(self.delivered_at.elapsed());
                let timing = BatchOptions { lease: EVENT_LEASE, max_batch_delay };
                let (written, event, next_copy) = ledger.finish_attempt_batched(lease, end, state, timing).await?;
                Ok((written, CommittedState { state: event.as_ref().map(|event| event.state), event, next_copy }))
            }
            AttemptResult::Lookup(end) => {
                let (written, state, next_copy) = ledger.finish_lookup(lease, end, state).await?;
                Ok((written, CommittedState { state, event: None, next_copy }))
            }
        }
    }

    /// Ends a request that was recorded too late for its permit: nothing was sent.
    pub(super) async fn finish_unsent(&self, kind: CallKind, number: u32) -> DeliveryAction {
        let result = AttemptResult::unsent(kind, number, "recorded too late for its permit");
        let (after, unknown, reason) = (DELAY_STEPS[0], self.claimed.maybe_charged, WaitReason::PermitMissed.into());
        self.commit_result(&result, Transition::Retry { after, unknown, reason }, "late").await
    }

    /// Commits the result of a request and the job's state; `label` names its wait, if it waits, in metrics.
    pub(super) async fn commit_result(
        &self,
        result: &AttemptResult,
        next: Transition,
        label: &'static str,
    ) -> DeliveryAction {
        let state = job_state(next);
        let mut tries = 0;
        let written = retry_while_unavailable("record an outcome", &self.lane.worker.abandon, || {
            tries += 1;
            faults::unread(CrashPoint::OutcomeCommitUnacknowledged, self.write_result(result, &state))
        });
        let written = written.instrument(spans::step("write the outcome down")).await;
        faults::crash(CrashPoint::AfterOutcome);
        let (end, failure) = match written {
            Ok((FencedWrite::Applied, committed)) => return self.to_delivery_action(&state, committed, label),
            Ok((FencedWrite::Stale, _)) if tries > 1 && self.is_recorded(result).await => {
                tracing::debug!(job = %self.job.id, "the outcome was recorded before the database became unavailable");
                return DeliveryAction::Requeue;
            }
            Ok((FencedWrite::Stale, _)) => (DeliveryAction::Requeue, CommitFailure::TakenOver),
            Err(RetryEnded::Stopped) => (DeliveryAction::Requeue, CommitFailure::ShuttingDown),
            Err(RetryEnded::Failed(error)) => (DeliveryAction::RequeueAndPause, CommitFailure::Refused(error)),
        };
        failure.log(&self.job.id, result, &state);
        end
    }

    /// Whether the ledger has this response: the first try was committed, and only its reply was lost.
    async fn is_recorded(&self, result: &AttemptResult) -> bool {
        let ledger = &self.lane.worker.backends.ledger;
        let (id, number) = (&self.job.id, result.number());
        let found = retry_while_unavailable("read an outcome", &self.lane.worker.abandon, || {
            ledger.request_outcome(id, number)
        });
        found.await.is_ok_and(|outcome| outcome.as_deref() == Some(result.outcome_and_status().0))
    }

    /// Ends a request that could not be recorded: its commit is unknown, but nothing was sent. An error of the database
    /// that is not transient would repeat, so the lane's intake is paused.
    pub(super) async fn abort_attempt(&self, kind: CallKind, error: &LedgerError) -> DeliveryAction {
        let (ledger, lease) = (&self.lane.worker.backends.ledger, &self.active.lease);
        let refused = !error.is_transient();
        let (after, cause, label) = match refused {
            true => (BACKEND_REFUSAL_PAUSE, error.to_string(), "ledger_refused"),
            false => (DELAY_STEPS[0], "the ledger was unavailable".to_owned(), "ledger_unavailable"),
        };
        let reason = if refused { WaitReason::LedgerRefused } else { WaitReason::LedgerUnavailable };
        let open = AttemptResult::unsent(kind, self.claimed.last_attempt + 1, &cause);
        let reason = Wait::with_detail(reason, format!("{cause}, nothing was sent"));
        let state = job_state(Transition::Retry { after, unknown: self.claimed.maybe_charged, reason });
        let written = retry_while_unavailable("cancel an unsent request", &self.lane.worker.abandon, || async {
            match self.write_result(&open, &state).await? {
                (FencedWrite::Applied, committed) => Ok::<_, LedgerError>((FencedWrite::Applied, committed)),
                (FencedWrite::Stale, _) => {
                    let (written, next_copy) = ledger.transition_with_copy(lease, &state).await?;
                    Ok((written, CommittedState::delayed(next_copy)))
                }
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
            ledger.transition_with_copy(&self.active.lease, &state)
        });
        match written.await {
            Ok((FencedWrite::Applied, next_copy)) => {
                self.to_delivery_action(&state, CommittedState::delayed(next_copy), label)
            }
            Ok((FencedWrite::Stale, _)) => DeliveryAction::Requeue,
            Err(error) => {
                tracing::warn!(job = %self.job.id, ?error, "failed to update job state; requeueing");
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
            Err(error) => tracing::debug!(job = %self.job.id, %error, "failed to release a job; its lease expires"),
        }
        DeliveryAction::Requeue
    }

    fn to_delivery_action(&self, state: &JobState, committed: CommittedState, label: &'static str) -> DeliveryAction {
        match state {
            JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
                spans::record_result(label);
                self.lane.meter.record_delay(label, &reason.to_string());
                self.action_after_delay(*wait, committed.next_copy)
            }
            JobState::Final { .. } | JobState::SucceededInPart(_) => {
                let requested = match state {
                    JobState::Final { state, .. } => *state,
                    _ => FinalState::Succeeded,
                };
                let state = committed.state.unwrap_or(requested);
                spans::record_result(state.name());
                self.lane.meter.record_finished(state.name(), self.age());
                match committed.event {
                    Some(event) => self.lane.worker.outbox.push(event),
                    None => self.lane.worker.outbox.notify_unleased(),
                }
                DeliveryAction::Ack
            }
        }
    }
}

/// Why a response is not in the ledger, as far as this worker knows.
#[derive(Debug, thiserror::Error)]
enum CommitFailure {
    #[error("another worker has taken this job over; its outcome must agree with this response")]
    TakenOver,
    #[error("the database was unavailable until this worker stopped; the ledger shows the request as open")]
    ShuttingDown,
    #[error("failed to record the outcome; the ledger shows the request as open: {0}")]
    Refused(LedgerError),
}

impl CommitFailure {
    /// Logs everything that is known, for the operator: above all whether the payment was charged.
    fn log(&self, id: &JobId, result: &AttemptResult, state: &JobState) {
        let (outcome, status) = result.outcome_and_status();
        let reference = match state {
            JobState::Final { reference, .. } => reference.as_deref(),
            JobState::SucceededInPart(charge) => charge.reference.as_deref(),
            JobState::Waiting { .. } | JobState::Unknown { .. } => None,
        };
        if matches!(outcome, "accepted" | "declined" | "differs") || matches!(self, Self::Refused(_)) {
            tracing::error!(job = %id, outcome, status, reference, "{self}");
        } else {
            tracing::warn!(job = %id, outcome, status, reference, "{self}");
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
