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
use crate::domain::outcome::NOT_SENT;
use crate::faults::{self, Point};
use crate::ledger::{AttemptEnd, JobState, LedgerError, LookupEnd, OutcomeEvent, Timing, Written};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::End;
use crate::worker::outbox::TAKEN_FOR;
use crate::worker::patience::{GivenUp, until_back};

/// Commits where a job stands; `None` when the ledger cannot be had and the worker is leaving.
pub async fn put_down(lane: &LaneParts, job: &JobInHand, state: &JobState) -> Option<Written> {
    let ledger = &lane.worker.engines.ledger;
    let written = until_back("put a job down", &lane.worker.abandon, || ledger.put_down(&job.held.hold, state));
    written.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok()
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

    /// The word for it, and the status it came with.
    fn answer(&self) -> (&'static str, Option<u16>) {
        match self {
            Self::Charge(end) => (end.outcome, end.status),
            Self::Lookup(end) => (end.outcome, end.status),
        }
    }

    /// With the event, if it is ours to publish.
    async fn write(
        &self,
        lane: &LaneParts,
        job: &JobInHand,
        state: &JobState,
    ) -> Result<(Written, Option<OutcomeEvent>), LedgerError> {
        let hold = &job.held.hold;
        let ledger = &lane.worker.engines.ledger;
        match self {
            Self::Charge(end) => {
                let timing = Timing { lease: TAKEN_FOR, may_wait: after_answer(job.delivered_at.elapsed()) };
                ledger.finish_and_take(hold, end, state, timing).await
            }
            Self::Lookup(end) => Ok((ledger.finish_lookup(hold, end, state).await?, None)),
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
    let written = until_back("write an outcome down", &lane.worker.abandon, || {
        faults::unread(Point::OutcomeCommitUnacknowledged, closing.write(lane, job, &state))
    });
    let written = written.instrument(spans::step("write the outcome down")).await;
    faults::crash(Point::AfterOutcome);
    match written {
        Ok((Written::Kept, event)) => kept(lane, job, (&state, event), why),
        Ok((Written::Lost, _)) => {
            tell_lost(job, closing, &state);
            End::HandBack
        }
        Err(GivenUp::Stopped) => End::HandBack,
        Err(GivenUp::Failed(error)) => {
            tracing::error!(job = %job.job.id, %error, "outcome not written down; the ledger says the request is open");
            End::Refused
        }
    }
}

/// The answer is in no ledger: a person can use what is known of it, above all when it says what became of the money.
fn tell_lost(job: &JobInHand, closing: &Closing, state: &JobState) {
    let (id, (outcome, status)) = (&job.job.id, closing.answer());
    let reference = match state {
        JobState::Final { reference, .. } => reference.as_deref(),
        JobState::Waiting { .. } | JobState::Unknown { .. } => None,
    };
    if matches!(outcome, "accepted" | "declined") {
        let lost = "another worker has taken this job over; what it comes to must agree with this answer";
        tracing::error!(job = %id, outcome, status, reference, "{lost}");
    } else {
        tracing::warn!(job = %id, outcome, status, reference, "another worker has taken this job over");
    }
}

/// Writing a request down failed with the database away: whether it was committed is unknown, but nothing was sent.
pub(super) async fn retract(lane: &LaneParts, job: &JobInHand, kind: CallKind) -> End {
    let (ledger, hold) = (&lane.worker.engines.ledger, &job.held.hold);
    let open = Closing::unsent(kind, job.claimed.last_attempt + 1, "the ledger was away");
    let state = state_of(soon(job, "the ledger was away, nothing was sent"));
    let written = until_back("retract a request", &lane.worker.abandon, || async {
        match open.write(lane, job, &state).await? {
            (Written::Kept, _) => Ok(Written::Kept),
            (Written::Lost, _) => ledger.put_down(hold, &state).await,
        }
    });
    match written.await {
        Ok(Written::Kept) => kept(lane, job, (&state, None), "ledger_away"),
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
        Some(Written::Kept) => kept(lane, job, (&state, None), why),
        Some(Written::Lost) => End::HandBack,
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

fn kept(
    lane: &LaneParts,
    job: &JobInHand,
    (state, event): (&JobState, Option<OutcomeEvent>),
    why: &'static str,
) -> End {
    match state {
        JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
            spans::came_to(why);
            lane.meter.parked(why, reason);
            End::Park(*wait)
        }
        JobState::Final { state, .. } => {
            spans::came_to(state.name());
            lane.meter.settled(state.name(), job.claimed.age + job.claimed_at.elapsed());
            match event {
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
