//! Where a job stands, committed: after a request, without one, or given back untouched.
//!
//! Refuses to go on without the ledger: what cannot be written down is not acknowledged, and whoever takes the job over
//! finds its request open.

use std::time::Duration;

use tracing::Instrument as _;

use super::{ClaimedJob, LaneContext};
use crate::domain::disposition::Transition;
use crate::domain::group_commit::delay_after_response;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::faults::{self, CrashPoint};
use crate::ledger::copies::ReturnPlan;
use crate::ledger::{AttemptEnd, BatchOptions, FencedWrite, JobState, LedgerError, LookupEnd, OutcomeEvent};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::{BACKEND_REFUSAL_PAUSE, DeliveryAction, action_after_delay, pause_intake};
use crate::worker::outbox::EVENT_LEASE;
use crate::worker::retry::{RetryEnded, Transient as _, retry_while_unavailable};

/// Commits where a job stands; `None` when the ledger cannot be had and the worker is leaving.
async fn persist_state(
    lane: &LaneContext,
    job: &ClaimedJob,
    state: &JobState,
) -> Option<(FencedWrite, Option<ReturnPlan>)> {
    let ledger = &lane.worker.backends.ledger;
    let written = retry_while_unavailable("put a job down", &lane.worker.abandon, || {
        ledger.transition_with_copy(&job.active.lease, state)
    });
    written.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok()
}

/// What was written of where a job stands.
#[derive(Default)]
struct CommittedState {
    /// Not always what was asked for: a charge that another payment has makes it `review`.
    state: Option<FinalState>,
    /// If it is ours to publish.
    event: Option<OutcomeEvent>,
    /// Of a job that waits.
    next_copy: Option<ReturnPlan>,
}

impl CommittedState {
    fn delayed(next_copy: Option<ReturnPlan>) -> Self {
        Self { next_copy, ..Self::default() }
    }
}

/// What a request came to, for its row.
pub(super) enum AttemptResult {
    Charge(AttemptEnd),
    Lookup(LookupEnd),
}

impl AttemptResult {
    /// A request that was written down and surely never left.
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

    /// The word for it, and the status it came with.
    fn outcome_and_status(&self) -> (&'static str, Option<u16>) {
        match self {
            Self::Charge(end) => (end.outcome, end.status),
            Self::Lookup(end) => (end.outcome, end.status),
        }
    }

    /// Writes what it came to, and where the job stands.
    async fn write(
        &self,
        lane: &LaneContext,
        job: &ClaimedJob,
        state: &JobState,
    ) -> Result<(FencedWrite, CommittedState), LedgerError> {
        let hold = &job.active.lease;
        let ledger = &lane.worker.backends.ledger;
        match self {
            Self::Charge(end) => {
                let timing = BatchOptions {
                    lease: EVENT_LEASE,
                    max_batch_delay: delay_after_response(job.delivered_at.elapsed()),
                };
                let (written, event, back) = ledger.finish_attempt_batched(hold, end, state, timing).await?;
                Ok((written, CommittedState { state: event.as_ref().map(|event| event.state), event, next_copy: back }))
            }
            Self::Lookup(end) => {
                let (written, state, back) = ledger.finish_lookup(hold, end, state).await?;
                Ok((written, CommittedState { state, event: None, next_copy: back }))
            }
        }
    }
}

/// A request that was written down and surely never left.
pub(super) async fn finish_unsent(lane: &LaneContext, job: &ClaimedJob, kind: CallKind, number: u32) -> DeliveryAction {
    let closing = AttemptResult::unsent(kind, number, "the permit came too late");
    commit_result(lane, job, &closing, (retry_soon(job, "begun too late, nothing was sent"), "late")).await
}

/// Commits what a request came to and where its job stands now; `why` it waits, if it does, in a word for metrics.
pub(super) async fn commit_result(
    lane: &LaneContext,
    job: &ClaimedJob,
    closing: &AttemptResult,
    (next, why): (Transition, &'static str),
) -> DeliveryAction {
    let state = job_state(next);
    let mut tries = 0;
    let written = retry_while_unavailable("write an outcome down", &lane.worker.abandon, || {
        tries += 1;
        faults::unread(CrashPoint::OutcomeCommitUnacknowledged, closing.write(lane, job, &state))
    });
    let written = written.instrument(spans::step("write the outcome down")).await;
    faults::crash(CrashPoint::AfterOutcome);
    let (end, unwritten) = match written {
        Ok((FencedWrite::Applied, noted)) => return to_delivery_action(lane, job, (&state, noted), why),
        Ok((FencedWrite::Stale, _)) if tries > 1 && is_recorded(lane, job, closing).await => {
            tracing::debug!(job = %job.job.id, "the outcome was written before the database went away");
            return DeliveryAction::Requeue;
        }
        Ok((FencedWrite::Stale, _)) => (DeliveryAction::Requeue, CommitFailure::TakenOver),
        Err(RetryEnded::Stopped) => (DeliveryAction::Requeue, CommitFailure::ShuttingDown),
        Err(RetryEnded::Failed(error)) => (DeliveryAction::RequeueAndPause, CommitFailure::Refused(error)),
    };
    unwritten.log(job, closing, &state);
    end
}

/// Whether the ledger has this answer: the first try was committed, and only its reply was lost.
async fn is_recorded(lane: &LaneContext, job: &ClaimedJob, closing: &AttemptResult) -> bool {
    let ledger = &lane.worker.backends.ledger;
    let (id, number) = (&job.job.id, closing.number());
    let found =
        retry_while_unavailable("read an outcome", &lane.worker.abandon, || ledger.request_outcome(id, number)).await;
    found.is_ok_and(|outcome| outcome.as_deref() == Some(closing.outcome_and_status().0))
}

/// Why an answer is in no ledger, as far as this worker knows.
#[derive(Debug, thiserror::Error)]
enum CommitFailure {
    #[error("another worker has taken this job over; what it comes to must agree with this answer")]
    TakenOver,
    #[error("the database was away until this worker left; the ledger says the request is open")]
    ShuttingDown,
    #[error("outcome not written down; the ledger says the request is open: {0}")]
    Refused(LedgerError),
}

impl CommitFailure {
    /// A person can use what is known of it, above all when it says what became of the money.
    fn log(&self, job: &ClaimedJob, closing: &AttemptResult, state: &JobState) {
        let (id, (outcome, status)) = (&job.job.id, closing.outcome_and_status());
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

/// Writing a request down failed: whether it was committed is unknown, but nothing was sent. What the database refuses will
/// be refused again: the lane rests.
pub(super) async fn abort_attempt(
    lane: &LaneContext,
    job: &ClaimedJob,
    kind: CallKind,
    error: &LedgerError,
) -> DeliveryAction {
    let (ledger, hold) = (&lane.worker.backends.ledger, &job.active.lease);
    let refused = !error.is_transient();
    let (after, cause, why) = match refused {
        true => (BACKEND_REFUSAL_PAUSE, error.to_string(), "ledger_refused"),
        false => (DELAY_STEPS[0], "the ledger was away".to_owned(), "ledger_away"),
    };
    let open = AttemptResult::unsent(kind, job.claimed.last_attempt + 1, &cause);
    let reason = format!("{cause}, nothing was sent");
    let state = job_state(Transition::Retry { after, unknown: job.claimed.maybe_charged, reason });
    let written = retry_while_unavailable("retract a request", &lane.worker.abandon, || async {
        match open.write(lane, job, &state).await? {
            (FencedWrite::Applied, noted) => Ok::<_, LedgerError>((FencedWrite::Applied, noted)),
            (FencedWrite::Stale, _) => {
                let (written, back) = ledger.transition_with_copy(hold, &state).await?;
                Ok((written, CommittedState::delayed(back)))
            }
        }
    });
    match written.await {
        Ok((FencedWrite::Applied, noted)) => {
            if refused {
                pause_intake(lane);
            }
            to_delivery_action(lane, job, (&state, noted), why)
        }
        _ if refused => DeliveryAction::RequeueAndPause,
        _ => DeliveryAction::Requeue,
    }
}

fn retry_soon(job: &ClaimedJob, reason: &str) -> Transition {
    Transition::Retry { after: DELAY_STEPS[0], unknown: job.claimed.maybe_charged, reason: reason.to_owned() }
}

/// Puts a job down without a request; `why` it waits, if it does, in a word for metrics.
pub(super) async fn transition(
    lane: &LaneContext,
    job: &ClaimedJob,
    next: Transition,
    why: &'static str,
) -> DeliveryAction {
    let state = job_state(next);
    match persist_state(lane, job, &state).await {
        Some((FencedWrite::Applied, back)) => {
            to_delivery_action(lane, job, (&state, CommittedState::delayed(back)), why)
        }
        Some((FencedWrite::Stale, _)) => DeliveryAction::Requeue,
        None => DeliveryAction::RequeueAndPause,
    }
}

pub(super) async fn delay(
    lane: &LaneContext,
    job: &ClaimedJob,
    wait: Duration,
    (why, reason): (&'static str, &str),
) -> DeliveryAction {
    let next = Transition::Retry { after: wait, unknown: job.claimed.maybe_charged, reason: reason.to_owned() };
    transition(lane, job, next, why).await
}

/// The worker leaves: the job is free for others at once.
pub(super) async fn release(lane: &LaneContext, job: &ClaimedJob) -> DeliveryAction {
    match lane.worker.backends.ledger.release(&job.active.lease).await {
        Ok(FencedWrite::Applied | FencedWrite::Stale) => {}
        Err(error) => tracing::debug!(job = %job.job.id, %error, "not released; the lease will run out"),
    }
    DeliveryAction::Requeue
}

fn to_delivery_action(
    lane: &LaneContext,
    job: &ClaimedJob,
    (state, noted): (&JobState, CommittedState),
    why: &'static str,
) -> DeliveryAction {
    match state {
        JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
            spans::record_result(why);
            lane.meter.record_delay(why, reason);
            action_after_delay(job, *wait, noted.next_copy)
        }
        JobState::Final { state, .. } => {
            let state = noted.state.unwrap_or(*state);
            spans::record_result(state.name());
            lane.meter.record_finished(state.name(), job.claimed.age + job.claimed_at.elapsed());
            match noted.event {
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
