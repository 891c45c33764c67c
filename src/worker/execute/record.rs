//! Where a job stands, committed: after a request, without one, or given back untouched.
//!
//! Refuses to go on without the ledger: what cannot be written down is not acknowledged, and whoever takes the job over
//! finds its request open.

use std::time::Duration;

use tracing::Instrument as _;

use super::{JobInHand, LaneParts};
use crate::domain::company::after_answer;
use crate::domain::decision::CallKind;
use crate::domain::disposition::Next;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::faults::{self, Point};
use crate::ledger::copies::ComesBack;
use crate::ledger::{AttemptEnd, JobState, LedgerError, LookupEnd, OutcomeEvent, Timing, Written};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::{End, REFUSAL_REST, after_delay, rest_from_taking};
use crate::worker::outbox::TAKEN_FOR;
use crate::worker::patience::{GivenUp, Passing as _, until_back};

/// Commits where a job stands; `None` when the ledger cannot be had and the worker is leaving.
async fn put_down(lane: &LaneParts, job: &JobInHand, state: &JobState) -> Option<(Written, Option<ComesBack>)> {
    let ledger = &lane.worker.engines.ledger;
    let written = until_back("put a job down", &lane.worker.abandon, || ledger.delay(&job.held.hold, state));
    written.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok()
}

/// What was written of where a job stands.
#[derive(Default)]
struct Noted {
    /// Not always what was asked for: a charge that another payment has makes it `review`.
    state: Option<FinalState>,
    /// If it is ours to publish.
    event: Option<OutcomeEvent>,
    /// Of a job that waits.
    back: Option<ComesBack>,
}

impl Noted {
    fn waits(back: Option<ComesBack>) -> Self {
        Self { back, ..Self::default() }
    }
}

/// What a request came to, for its row.
pub(super) enum Closing {
    Charge(AttemptEnd),
    Lookup(LookupEnd),
}

impl Closing {
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
    fn answer(&self) -> (&'static str, Option<u16>) {
        match self {
            Self::Charge(end) => (end.outcome, end.status),
            Self::Lookup(end) => (end.outcome, end.status),
        }
    }

    /// Writes what it came to, and where the job stands.
    async fn write(
        &self,
        lane: &LaneParts,
        job: &JobInHand,
        state: &JobState,
    ) -> Result<(Written, Noted), LedgerError> {
        let hold = &job.held.hold;
        let ledger = &lane.worker.engines.ledger;
        match self {
            Self::Charge(end) => {
                let timing = Timing { lease: TAKEN_FOR, may_wait: after_answer(job.delivered_at.elapsed()) };
                let (written, event, back) = ledger.finish_and_take(hold, end, state, timing).await?;
                Ok((written, Noted { state: event.as_ref().map(|event| event.state), event, back }))
            }
            Self::Lookup(end) => {
                let (written, state, back) = ledger.finish_lookup(hold, end, state).await?;
                Ok((written, Noted { state, event: None, back }))
            }
        }
    }
}

/// A request that was written down and surely never left.
pub(super) async fn finish_unsent(lane: &LaneParts, job: &JobInHand, kind: CallKind, number: u32) -> End {
    let closing = Closing::unsent(kind, number, "the permit came too late");
    write_end(lane, job, &closing, (soon(job, "begun too late, nothing was sent"), "late")).await
}

/// Commits what a request came to and where its job stands now; `why` it waits, if it does, in a word for metrics.
pub(super) async fn write_end(
    lane: &LaneParts,
    job: &JobInHand,
    closing: &Closing,
    (next, why): (Next, &'static str),
) -> End {
    let state = state_of(next);
    let mut tries = 0;
    let written = until_back("write an outcome down", &lane.worker.abandon, || {
        tries += 1;
        faults::unread(Point::OutcomeCommitUnacknowledged, closing.write(lane, job, &state))
    });
    let written = written.instrument(spans::step("write the outcome down")).await;
    faults::crash(Point::AfterOutcome);
    let (end, unwritten) = match written {
        Ok((Written::Kept, noted)) => return kept(lane, job, (&state, noted), why),
        Ok((Written::Lost, _)) if tries > 1 && stands(lane, job, closing).await => {
            tracing::debug!(job = %job.job.id, "the outcome was written before the database went away");
            return End::HandBack;
        }
        Ok((Written::Lost, _)) => (End::HandBack, Unwritten::TakenOver),
        Err(GivenUp::Stopped) => (End::HandBack, Unwritten::Leaving),
        Err(GivenUp::Failed(error)) => (End::Refused, Unwritten::Refused(error)),
    };
    unwritten.tell(job, closing, &state);
    end
}

/// Whether the ledger has this answer: the first try was committed, and only its reply was lost.
async fn stands(lane: &LaneParts, job: &JobInHand, closing: &Closing) -> bool {
    let ledger = &lane.worker.engines.ledger;
    let (id, number) = (&job.job.id, closing.number());
    let found = until_back("read an outcome", &lane.worker.abandon, || ledger.outcome_of(id, number)).await;
    found.is_ok_and(|outcome| outcome.as_deref() == Some(closing.answer().0))
}

/// Why an answer is in no ledger, as far as this worker knows.
#[derive(Debug, thiserror::Error)]
enum Unwritten {
    #[error("another worker has taken this job over; what it comes to must agree with this answer")]
    TakenOver,
    #[error("the database was away until this worker left; the ledger says the request is open")]
    Leaving,
    #[error("outcome not written down; the ledger says the request is open: {0}")]
    Refused(LedgerError),
}

impl Unwritten {
    /// A person can use what is known of it, above all when it says what became of the money.
    fn tell(&self, job: &JobInHand, closing: &Closing, state: &JobState) {
        let (id, (outcome, status)) = (&job.job.id, closing.answer());
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
pub(super) async fn retract(lane: &LaneParts, job: &JobInHand, kind: CallKind, error: &LedgerError) -> End {
    let (ledger, hold) = (&lane.worker.engines.ledger, &job.held.hold);
    let refused = !error.passes();
    let (after, cause, why) = match refused {
        true => (REFUSAL_REST, error.to_string(), "ledger_refused"),
        false => (DELAY_STEPS[0], "the ledger was away".to_owned(), "ledger_away"),
    };
    let open = Closing::unsent(kind, job.claimed.last_attempt + 1, &cause);
    let reason = format!("{cause}, nothing was sent");
    let state = state_of(Next::Again { after, unknown: job.claimed.unknown, reason });
    let written = until_back("retract a request", &lane.worker.abandon, || async {
        match open.write(lane, job, &state).await? {
            (Written::Kept, noted) => Ok::<_, LedgerError>((Written::Kept, noted)),
            (Written::Lost, _) => {
                let (written, back) = ledger.delay(hold, &state).await?;
                Ok((written, Noted::waits(back)))
            }
        }
    });
    match written.await {
        Ok((Written::Kept, noted)) => {
            if refused {
                rest_from_taking(lane);
            }
            kept(lane, job, (&state, noted), why)
        }
        _ if refused => End::Refused,
        _ => End::HandBack,
    }
}

fn soon(job: &JobInHand, reason: &str) -> Next {
    Next::Again { after: DELAY_STEPS[0], unknown: job.claimed.unknown, reason: reason.to_owned() }
}

/// Puts a job down without a request; `why` it waits, if it does, in a word for metrics.
pub(super) async fn put_down_next(lane: &LaneParts, job: &JobInHand, next: Next, why: &'static str) -> End {
    let state = state_of(next);
    match put_down(lane, job, &state).await {
        Some((Written::Kept, back)) => kept(lane, job, (&state, Noted::waits(back)), why),
        Some((Written::Lost, _)) => End::HandBack,
        None => End::Refused,
    }
}

pub(super) async fn park(
    lane: &LaneParts,
    job: &JobInHand,
    wait: Duration,
    (why, reason): (&'static str, &str),
) -> End {
    let next = Next::Again { after: wait, unknown: job.claimed.unknown, reason: reason.to_owned() };
    put_down_next(lane, job, next, why).await
}

/// The worker leaves: the job is free for others at once.
pub(super) async fn give_back(lane: &LaneParts, job: &JobInHand) -> End {
    match lane.worker.engines.ledger.release(&job.held.hold).await {
        Ok(Written::Kept | Written::Lost) => {}
        Err(error) => tracing::debug!(job = %job.job.id, %error, "not released; the lease will run out"),
    }
    End::HandBack
}

fn kept(lane: &LaneParts, job: &JobInHand, (state, noted): (&JobState, Noted), why: &'static str) -> End {
    match state {
        JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
            spans::came_to(why);
            lane.meter.parked(why, reason);
            after_delay(job, *wait, noted.back)
        }
        JobState::Final { state, .. } => {
            let state = noted.state.unwrap_or(*state);
            spans::came_to(state.name());
            lane.meter.settled(state.name(), job.claimed.age + job.claimed_at.elapsed());
            match noted.event {
                Some(event) => lane.worker.outbox.hand_over(event),
                None => lane.worker.outbox.left(),
            }
            End::Ack
        }
    }
}

fn state_of(next: Next) -> JobState {
    match next {
        Next::Settle { state, reason, reference } => JobState::Final { state, reason, reference },
        Next::Again { after, unknown: true, reason } => JobState::Unknown { wait: after, reason },
        Next::Again { after, unknown: false, reason } => JobState::Waiting { wait: after, reason },
    }
}
