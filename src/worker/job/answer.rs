//! Writing of an answer that the ledger has refused: again, whatever the error, until the ledger has it.
//!
//! [`crate::domain::kept_answers`] says when, and how. The job waits for that with its worker slot for
//! a short time. Then the writes go on in the background, under the same lease. If the drain's time is over, the answer is logged.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::JobRun;
use super::commit::{AnswerText, AttemptResult, write_answer};
use crate::domain::kept_answers::{KeptStage, KeptWrite, REFUSALS_MAX};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::faults::{self, CrashPoint};
use crate::ledger::{FencedWrite, JobState, LedgerError};
use crate::worker::WorkerContext;
use crate::worker::active_jobs::{ActiveJob, InFlightRequest};
use crate::worker::meter::{GaugeGuard, LaneMeter};
use crate::worker::outcome_writes::KeptAnswer;
use crate::worker::retry::retry_while_unavailable;
use crate::worker::unwritten::UnwrittenAnswer;

/// Time for which a job waits for the write of its answer with its worker slot.
const FOREGROUND_MAX: Duration = Duration::from_secs(30);
const REFUSED: &str = "the ledger refused an outcome; it is written again until it is accepted";

/// An answer that the ledger has refused, with all that its writes need.
pub(super) struct RefusedAnswer {
    result: AttemptResult,
    state: JobState,
    error: LedgerError,
    kept: KeptAnswer,
    since: Instant,
    active: Arc<ActiveJob>,
    worker: WorkerContext,
    provider: ProviderName,
    meter: Arc<LaneMeter>,
    /// Age of the job when the answer was refused.
    age: Duration,
    _guards: AnswerGuards,
}

/// What counts the answer while it is kept.
struct AnswerGuards {
    _gauge: GaugeGuard,
    _request: InFlightRequest,
    _unwritten: UnwrittenAnswer,
}

/// How the writes of an answer ended.
pub(super) enum Rewritten {
    /// With the final state that was written, if one was.
    Applied(JobState, Option<FinalState>),
    /// The ledger had it already, and only the reply was lost.
    Known,
    TakenOver,
    /// The drain's time is over.
    Abandoned,
    /// Not yet: the writes go on in the background.
    Continues,
}

impl RefusedAnswer {
    pub(super) fn new(run: &JobRun<'_>, result: AttemptResult, state: JobState, error: LedgerError) -> Self {
        let lane = run.lane;
        let worker = lane.worker.clone();
        let guards = AnswerGuards {
            _gauge: lane.meter.outcome_unwritten(),
            _request: worker.active_jobs.begin_request(),
            _unwritten: worker.unwritten.insert(&run.job.id),
        };
        let answer = Self {
            result,
            state,
            error,
            kept: lane.control.outcomes.keep(),
            since: Instant::now(),
            active: Arc::clone(&run.active),
            provider: lane.name.clone(),
            meter: Arc::clone(&lane.meter),
            age: run.age(),
            _guards: guards,
            worker,
        };
        if answer.worker.log_throttle.admits(answer.provider.as_str(), REFUSED, "refused") {
            let (provider, job, error) = (&answer.provider, &answer.active.lease.id, &answer.error);
            tracing::warn!(%provider, %job, %error, "{REFUSED}");
        }
        answer
    }

    /// Writes the answer while its job waits.
    pub(super) async fn write(&mut self) -> Rewritten {
        self.write_until(Some(self.since + FOREGROUND_MAX)).await
    }

    /// Writes it to its end without its job.
    pub(super) async fn finish(mut self) {
        match self.write_until(None).await {
            Rewritten::Applied(JobState::Final { state, .. }, committed) => {
                let state = committed.unwrap_or(state);
                self.meter.record_finished(state, self.age + self.since.elapsed());
                self.worker.new_events.notify_one();
            }
            Rewritten::TakenOver => self.text().log_taken_over(),
            // A sleeping job is found when it is due.
            Rewritten::Applied(..) | Rewritten::Known | Rewritten::Abandoned | Rewritten::Continues => {}
        }
    }

    async fn write_until(&mut self, until: Option<Instant>) -> Rewritten {
        let abandon = self.worker.abandon.clone();
        loop {
            let write = tokio::select! {
                biased;
                () = abandon.cancelled() => return self.abandon(),
                write = self.kept.next_write() => write,
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => return Rewritten::Continues,
            };
            let written = tokio::select! {
                biased;
                written = self.write_once(write) => written,
                () = abandon.cancelled() => return self.abandon(),
            };
            match written {
                Ok((FencedWrite::Applied, state, committed)) => {
                    self.kept.record_accepted();
                    return Rewritten::Applied(state, committed);
                }
                Ok((FencedWrite::Stale, ..)) if self.is_recorded().await => {
                    self.kept.record_accepted();
                    return Rewritten::Known;
                }
                Ok((FencedWrite::Stale, ..)) => return Rewritten::TakenOver,
                Err(error) => {
                    self.error = error;
                    if self.record_refused() && until.is_some() {
                        return Rewritten::Continues;
                    }
                }
            }
        }
    }

    async fn write_once(&self, write: KeptWrite) -> Result<(FencedWrite, JobState, Option<FinalState>), LedgerError> {
        let review;
        let (result, state) = match write {
            KeptWrite::Answer => (&self.result, &self.state),
            KeptWrite::Review => {
                review = (self.result.without_detail(), self.review());
                (&review.0, &review.1)
            }
        };
        let writing = write_answer(&self.worker, &self.active.lease, result, state, Duration::ZERO);
        let (written, committed) = faults::unread(CrashPoint::OutcomeCommitUnacknowledged, writing).await?;
        faults::crash(CrashPoint::AfterOutcome);
        Ok((written, state.clone(), committed))
    }

    /// The payment's state if the ledger accepts others' answers and not this one: a person decides.
    fn review(&self) -> JobState {
        let text = self.text();
        let reason = format!("the database refused this payment's outcome {REFUSALS_MAX} times: {text}");
        JobState::Final { state: FinalState::Review, reason, reference: None }
    }

    /// Records a refusal; true if the answer stays in memory and its job need not wait.
    fn record_refused(&self) -> bool {
        let error = &self.error;
        let text = self.text();
        match self.kept.record_refused() {
            KeptStage::Retried => {
                tracing::debug!(answer = %text, %error, "the ledger refused an outcome again");
                false
            }
            KeptStage::Review => {
                text.log_error(error, "the ledger accepts other outcomes and not this one: the payment goes to review");
                false
            }
            KeptStage::Aside(KeptWrite::Answer) => {
                text.log_error(
                    error,
                    "the ledger refused the review as well: the outcome stays in this worker's memory",
                );
                true
            }
            KeptStage::Aside(KeptWrite::Review) => true,
        }
    }

    fn abandon(&self) -> Rewritten {
        let lost = "the ledger did not accept an outcome until this worker stopped, and shows the request as open";
        self.text().log_error(&self.error, lost);
        Rewritten::Abandoned
    }

    /// Whether the ledger has this response: an earlier write was committed, and only its reply was lost.
    async fn is_recorded(&self) -> bool {
        let ledger = &self.worker.backends.ledger;
        let (id, number) = (&self.active.lease.id, self.result.number());
        let found =
            retry_while_unavailable("read an outcome", &self.worker.abandon, || ledger.request_outcome(id, number));
        found.await.is_ok_and(|outcome| outcome.as_deref() == Some(self.result.outcome_and_status().0))
    }

    pub(super) fn text(&self) -> AnswerText<'_> {
        AnswerText::new(&self.active.lease.id, &self.result, &self.state)
    }
}
