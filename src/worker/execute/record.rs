//! Commits the state of a job: after a request, without one, or by releasing it unchanged.
//!
//! A delivery is acknowledged only when its job's state is committed. Otherwise the next worker finds the request open
//! in the ledger.

use std::time::Duration;

use tracing::Instrument as _;

use super::{ClaimedJob, LaneContext};
use crate::domain::disposition::Transition;
use crate::domain::group_commit::delay_after_response;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::faults::{self, CrashPoint};
use crate::ledger::copies::ReturnPlan;
use crate::ledger::{AttemptEnd, BatchOptions, FencedWrite, JobState, LedgerError, LookupEnd, OutcomeEvent};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::{BACKEND_REFUSAL_PAUSE, DeliveryAction, action_after_delay, pause_intake};
use crate::worker::outbox::EVENT_LEASE;
use crate::worker::retry::{RetryEnded, Transient as _, retry_while_unavailable};

/// Commits the job's state; `None` when the ledger is unavailable and the worker is stopping.
async fn persist_state(
    lane: &LaneContext,
    job: &ClaimedJob,
    state: &JobState,
) -> Option<(FencedWrite, Option<ReturnPlan>)> {
    let ledger = &lane.worker.backends.ledger;
    let written = retry_while_unavailable("update job state", &lane.worker.abandon, || {
        ledger.transition_with_copy(&job.active.lease, state)
    });
    written
        .await
        .map_err(|error| tracing::warn!(job = %job.job.id, ?error, "failed to update job state; requeueing"))
        .ok()
}

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

    /// Writes the result and the job's state.
    async fn write(
        &self,
        lane: &LaneContext,
        job: &ClaimedJob,
        state: &JobState,
    ) -> Result<(FencedWrite, CommittedState), LedgerError> {
        let lease = &job.active.lease;
        let ledger = &lane.worker.backends.ledger;
        match self {
            Self::Charge(end) => {
                let timing = BatchOptions {
                    lease: EVENT_LEASE,
                    max_batch_delay: delay_after_response(job.delivered_at.elapsed()),
                };
                let (written, event, next_copy) = ledger.finish_attempt_batched(lease, end, state, timing).await?;
                Ok((written, CommittedState { state: event.as_ref().map(|event| event.state), event, next_copy }))
            }
            Self::Lookup(end) => {
                let (written, state, next_copy) = ledger.finish_lookup(lease, end, state).await?;
                Ok((written, CommittedState { state, event: None, next_copy }))
            }
        }
    }
}

/// Ends a request that was recorded too late for its permit: nothing was sent.
pub(super) async fn finish_unsent(lane: &LaneContext, job: &ClaimedJob, kind: CallKind, number: u32) -> DeliveryAction {
    let result = AttemptResult::unsent(kind, number, "recorded too late for its permit");
    commit_result(lane, job, &result, (retry_soon(job, WaitReason::PermitMissed.into()), "late")).await
}

/// Commits the result of a request and the job's state; `label` names its wait, if it waits, in metrics.
pub(super) async fn commit_result(
    lane: &LaneContext,
    job: &ClaimedJob,
    result: &AttemptResult,
    (next, label): (Transition, &'static str),
) -> DeliveryAction {
    let state = job_state(next);
    let mut tries = 0;
    let written = retry_while_unavailable("record an outcome", &lane.worker.abandon, || {
        tries += 1;
        faults::unread(CrashPoint::OutcomeCommitUnacknowledged, result.write(lane, job, &state))
    });
    let written = written.instrument(spans::step("write the outcome down")).await;
    faults::crash(CrashPoint::AfterOutcome);
    let (end, failure) = match written {
        Ok((FencedWrite::Applied, committed)) => return to_delivery_action(lane, job, (&state, committed), label),
        Ok((FencedWrite::Stale, _)) if tries > 1 && is_recorded(lane, job, result).await => {
            tracing::debug!(job = %job.job.id, "the outcome was recorded before the database became unavailable");
            return DeliveryAction::Requeue;
        }
        Ok((FencedWrite::Stale, _)) => (DeliveryAction::Requeue, CommitFailure::TakenOver),
        Err(RetryEnded::Stopped) => (DeliveryAction::Requeue, CommitFailure::ShuttingDown),
        Err(RetryEnded::Failed(error)) => (DeliveryAction::RequeueAndPause, CommitFailure::Refused(error)),
    };
    failure.log(job, result, &state);
    end
}

/// Whether the ledger has this response: the first try was committed, and only its reply was lost.
async fn is_recorded(lane: &LaneContext, job: &ClaimedJob, result: &AttemptResult) -> bool {
    let ledger = &lane.worker.backends.ledger;
    let (id, number) = (&job.job.id, result.number());
    let found =
        retry_while_unavailable("read an outcome", &lane.worker.abandon, || ledger.request_outcome(id, number)).await;
    found.is_ok_and(|outcome| outcome.as_deref() == Some(result.outcome_and_status().0))
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
    fn log(&self, job: &ClaimedJob, result: &AttemptResult, state: &JobState) {
        let (id, (outcome, status)) = (&job.job.id, result.outcome_and_status());
        let reference = match state {
            JobState::Final { reference, .. } => reference.as_deref(),
            JobState::Waiting { .. } | JobState::Unknown { .. } => None,
        };
        if matches!(outcome, "accepted" | "declined") || matches!(self, Self::Refused(_)) {
            tracing::error!(job = %id, outcome, status, reference, "{self}");
        } else {
            tracing::warn!(job = %id, outcome, status, reference, "{self}");
        }
    }
}

/// Ends a request that could not be recorded: its commit is unknown, but nothing was sent. An error of the database
/// that is not transient would repeat, so the lane's intake is paused.
pub(super) async fn abort_attempt(
    lane: &LaneContext,
    job: &ClaimedJob,
    kind: CallKind,
    error: &LedgerError,
) -> DeliveryAction {
    let (ledger, lease) = (&lane.worker.backends.ledger, &job.active.lease);
    let refused = !error.is_transient();
    let (after, cause, label) = match refused {
        true => (BACKEND_REFUSAL_PAUSE, error.to_string(), "ledger_refused"),
        false => (DELAY_STEPS[0], "the ledger was unavailable".to_owned(), "ledger_unavailable"),
    };
    let reason = if refused { WaitReason::LedgerRefused } else { WaitReason::LedgerUnavailable };
    let open = AttemptResult::unsent(kind, job.claimed.last_attempt + 1, &cause);
    let reason = Wait::with_detail(reason, format!("{cause}, nothing was sent"));
    let state = job_state(Transition::Retry { after, unknown: job.claimed.maybe_charged, reason });
    let written = retry_while_unavailable("cancel an unsent request", &lane.worker.abandon, || async {
        match open.write(lane, job, &state).await? {
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
                pause_intake(lane);
            }
            to_delivery_action(lane, job, (&state, committed), label)
        }
        _ if refused => DeliveryAction::RequeueAndPause,
        _ => DeliveryAction::Requeue,
    }
}

fn retry_soon(job: &ClaimedJob, reason: Wait) -> Transition {
    Transition::Retry { after: DELAY_STEPS[0], unknown: job.claimed.maybe_charged, reason }
}

/// Changes the job's state without a request; `label` names its wait, if it waits, in metrics.
pub(super) async fn transition(
    lane: &LaneContext,
    job: &ClaimedJob,
    next: Transition,
    label: &'static str,
) -> DeliveryAction {
    let state = job_state(next);
    match persist_state(lane, job, &state).await {
        Some((FencedWrite::Applied, next_copy)) => {
            to_delivery_action(lane, job, (&state, CommittedState::delayed(next_copy)), label)
        }
        Some((FencedWrite::Stale, _)) => DeliveryAction::Requeue,
        None => DeliveryAction::RequeueAndPause,
    }
}

pub(super) async fn delay(
    lane: &LaneContext,
    job: &ClaimedJob,
    wait: Duration,
    (label, reason): (&'static str, Wait),
) -> DeliveryAction {
    let next = Transition::Retry { after: wait, unknown: job.claimed.maybe_charged, reason };
    transition(lane, job, next, label).await
}

/// Releases the job of a stopping worker: other workers can claim it at once.
pub(super) async fn release(lane: &LaneContext, job: &ClaimedJob) -> DeliveryAction {
    match lane.worker.backends.ledger.release(&job.active.lease).await {
        Ok(FencedWrite::Applied | FencedWrite::Stale) => {}
        Err(error) => tracing::debug!(job = %job.job.id, %error, "failed to release a job; its lease expires"),
    }
    DeliveryAction::Requeue
}

fn to_delivery_action(
    lane: &LaneContext,
    job: &ClaimedJob,
    (state, committed): (&JobState, CommittedState),
    label: &'static str,
) -> DeliveryAction {
    match state {
        JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
            spans::record_result(label);
            lane.meter.record_delay(label, &reason.to_string());
            action_after_delay(job, *wait, committed.next_copy)
        }
        JobState::Final { state, .. } => {
            let state = committed.state.unwrap_or(*state);
            spans::record_result(state.name());
            lane.meter.record_finished(state.name(), job.claimed.age + job.claimed_at.elapsed());
            match committed.event {
                Some(event) => lane.worker.outbox.push(event),
                None => lane.worker.outbox.notify_unleased(),
            }
            DeliveryAction::Ack
        }
    }
}

fn job_state(next: Transition) -> JobState {
    match next {
        Transition::Finalize { state, reason, reference } => JobState::Final { state, reason, reference },
        Transition::Retry { after, unknown: true, reason } => JobState::Unknown { wait: after, reason },
        Transition::Retry { after, unknown: false, reason } => JobState::Waiting { wait: after, reason },
    }
}
