//! One request, from its permit to its outcome: written down, sent at the permit's start, settled, and what it came to
//! committed.
//!
//! Refuses to send what is not written down, and refuses a second request by the same permit.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::record::{Closing, finish_unsent, retract, write_end};
use super::{Call, JobInHand, history};
use crate::domain::breaker::Change;
use crate::domain::company::before_start;
use crate::domain::decision::CallKind;
use crate::domain::disposition::finding::after_finding;
use crate::domain::disposition::{History, Next, Pause, after_outcome};
use crate::domain::explain::parked;
use crate::domain::job::{Job, JobField};
use crate::domain::lookup::Finding;
use crate::domain::outcome::{FinalState, Outcome, UnknownCause, Way, without_reference};
use crate::domain::provider::Provider;
use crate::domain::sensitive::Sensitive;
use crate::faults::{self, Point};
use crate::fleet::report::By;
use crate::ledger::{AttemptEnd, Begun, LedgerError, LookupEnd};
use crate::limiter::gate::{InFlight, Permit};
use crate::provider::Answer;
use crate::telemetry::spans;
use crate::worker::intake::End;
use crate::worker::lane::{LaneParts, LaneSettings};
use crate::worker::local_faults;
use crate::worker::meter::{Decision, DecisionKind, Returned};
use crate::worker::pauses::Turn;

/// From here on a request may leave: written down first, then at most one request, then what became of it.
pub(super) async fn send(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    call: &Call,
    (permit, turn): (Permit, &Turn),
) -> End {
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _on_wire = lane.worker.in_hand.on_wire();
    faults::crash(Point::AfterPermit);
    let (ledger, hold) = (&lane.worker.engines.ledger, &job.held.hold);
    let writing = spans::step("write the request down");
    let begun = match call {
        Call::Charge(request) => ledger.begin_in_company(hold, request, before_start(lead)).instrument(writing).await,
        Call::Lookup(_) => ledger.begin_lookup(hold).instrument(writing).await,
    };
    let number = match begun {
        Ok(Begun::Attempt(number)) => number,
        Ok(Begun::Lost) => {
            lane.meter.permit_returned(Returned::TakenOver);
            return End::HandBack;
        }
        Err(error) => return not_written_down(lane, job, call.kind(), permit, &error).await,
    };
    written_down(lane, settings, job, (call, number), (permit, turn, !lead.is_zero())).await
}

/// Whether it was committed is unknown, but nothing was sent.
pub(super) async fn not_written_down(
    lane: &LaneParts,
    job: &JobInHand,
    kind: CallKind,
    permit: Permit,
    error: &LedgerError,
) -> End {
    drop(permit);
    lane.meter.permit_returned(Returned::LedgerAway);
    tracing::warn!(job = %job.job.id, %error, "request not written down; nothing was sent");
    retract(lane, job, kind, error).await
}

/// A request that is written down leaves at its permit's start; `ahead`: that was booked.
pub(super) async fn written_down(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    (call, number): (&Call, u32),
    (mut permit, turn, ahead): (Permit, &Turn, bool),
) -> End {
    permit.written_down();
    if number == 1 {
        note_uncounted(lane, &settings.provider, &job.job);
    }
    faults::crash(Point::AfterSending);
    lane.worker.start_timer.sleep_until(permit.start_at).instrument(spans::step("wait for the permit's start")).await;
    let (began, lateness) = (Instant::now(), permit.start_at.elapsed());
    let Ok(in_flight) = permit.begin() else {
        lane.meter.permit_returned(Returned::Late);
        tracing::warn!(provider = %lane.name, "a request was written down too slowly for its permit; nothing was sent");
        lane.pauses.permit_late();
        return finish_unsent(lane, job, call.kind(), number).await;
    };
    lane.pauses.permit_in_time();
    let started = lane.meter.started(lateness, ahead);
    match call {
        Call::Charge(request) => {
            let silence = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
            let span = spans::request("charge");
            let sent = faults::on_the_wire(request, settings.client.send(&job.job, request)).instrument(span.clone());
            let mut answer = answered((lane, began), in_flight, sent, (silence, Outcome::way)).await;
            spans::answered(&span, answer.outcome.word(), answer.status);
            drop(started);
            let change = lane.pauses.observe(&job.job.id, &answer.outcome, began, rand::random());
            tell_of_breaker(lane, change, &answer.outcome);
            let round = refusal_round(lane, (CallKind::Charge, began), answer.outcome.is_let_through());
            let history = History { refusal_round: round, probe: turn.is_probe(), ..history(job) };
            let withheld = withheld(lane, job, answer.outcome.withhold(lane.worker.options.card_numbers));
            finish_charge(lane, settings, job, (number, history), (&answer, withheld)).await
        }
        Call::Lookup(question) => {
            let silence = Finding::Unknown { cause: UnknownCause::Timeout, retry_after: None };
            let span = spans::request("look-up");
            let asked = settings.client.ask(question).instrument(span.clone());
            let mut answer = answered((lane, began), in_flight, asked, (silence, Finding::way)).await;
            spans::answered(&span, answer.outcome.word(), answer.status);
            drop(started);
            faults::crash(Point::AfterLookup);
            let round = refusal_round(lane, (CallKind::Lookup, began), answer.outcome.is_let_through());
            let history = History { refusal_round: round, ..history(job) };
            let withheld = withheld(lane, job, answer.outcome.withhold(lane.worker.options.card_numbers));
            finish_lookup(lane, settings, job, (number, &history), (&answer, withheld)).await
        }
    }
}

/// Counts a job that limits or rules of its provider do not apply to because it lacks their field; once per job, with its first
/// request.
fn note_uncounted(lane: &LaneParts, provider: &Provider, job: &Job) {
    let lacks = |field: &JobField| !job.has(*field) && provider.counts_by(*field);
    JobField::ALL.into_iter().filter(lacks).for_each(|field| lane.meter.passes_uncounted(field));
}

/// The answer of the one request that a permit is for, and the permit settled by how far it got.
async fn answered<T>(
    (lane, began): (&LaneParts, Instant),
    in_flight: InFlight,
    request: impl Future<Output = Answer<T>>,
    (silence, way): (T, fn(&T) -> Way),
) -> Answer<T> {
    // The row's own timeout ends a request before this, unless the row changed since the permit was asked for.
    let answer_before = in_flight.answer_before;
    let answer = timeout_at(answer_before, request).await;
    let answer = answer.unwrap_or(Answer { outcome: silence, status: None, answer_age: Duration::ZERO });
    faults::crash(Point::AfterAnswer);
    let way = way(&answer.outcome);
    match way {
        Way::NotSent => in_flight.not_sent(),
        Way::Lost => {
            in_flight.unknown();
            lane.meter.hold(answer_before.saturating_duration_since(began));
        }
        Way::Answered => {
            let read_at = Instant::now() - answer.answer_age;
            in_flight.answered(read_at);
            lane.meter.hold(read_at.saturating_duration_since(began));
        }
    }
    lane.meter.answered(answer.status, way != Way::NotSent, began.elapsed());
    answer
}

fn tell_of_breaker(lane: &LaneParts, change: Option<Change>, outcome: &Outcome) {
    let decision = match change {
        Some(Change::Opens { rest }) => {
            let words =
                format!("{}: the provider is down, nothing is sent for {:.1} s", outcome.word(), rest.as_secs_f64());
            Decision { about: String::new(), ..Decision::new(DecisionKind::BreakerOpened, &words) }
        }
        Some(Change::Closes) => Decision::new(DecisionKind::BreakerClosed, "the provider answers again"),
        None => return,
    };
    lane.meter.decision(decision);
}

async fn finish_charge(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    (number, mut history): (u32, History),
    (answer, withheld): (&Answer<Outcome>, Option<Sensitive>),
) -> End {
    if matches!(answer.outcome, Outcome::Unknown { .. } | Outcome::InProgress) {
        history.first_sent_age.get_or_insert_default();
    }
    let disposition = after_outcome(&answer.outcome, &history, &settings.provider.retry_policy(), rand::random());
    if matches!(answer.outcome, Outcome::Throttled { .. }) {
        lane.meter.throttled();
    }
    let misconfigured = matches!(answer.outcome, Outcome::Misconfigured { .. });
    let by = if misconfigured { By::Setup } else { By::Provider };
    hold_others_back(lane, disposition.pause, by, (CallKind::Charge, history.refusal_round));
    let end = AttemptEnd {
        number,
        outcome: answer.outcome.word(),
        status: answer.status,
        detail: answer.outcome.detail(),
        counts: disposition.counts_attempt,
    };
    let next = with_note(disposition.next, withheld);
    write_end(lane, job, &Closing::Charge(end), (next, answer.outcome.word())).await
}

async fn finish_lookup(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    (number, history): (u32, &History),
    (answer, withheld): (&Answer<Finding>, Option<Sensitive>),
) -> End {
    if let Finding::Misconfigured { status } = answer.outcome {
        tracing::error!(provider = %lane.name, job = %job.job.id, status, "a look-up was refused: check the credentials in headers");
    }
    let judged = after_finding(&answer.outcome, history, &settings.provider.retry_policy(), rand::random());
    if matches!(answer.outcome, Finding::Throttled { .. }) {
        lane.meter.throttled();
    }
    hold_others_back(lane, judged.pause, By::Provider, (CallKind::Lookup, history.refusal_round));
    let end = LookupEnd {
        number,
        outcome: answer.outcome.word(),
        status: answer.status,
        detail: answer.outcome.detail(),
        grants_resend: judged.grants_resend,
    };
    let next = with_note(judged.next, withheld);
    write_end(lane, job, &Closing::Lookup(end), (next, answer.outcome.word())).await
}

/// Logs what of an answer is not kept.
fn withheld(lane: &LaneParts, job: &JobInHand, what: Option<Sensitive>) -> Option<Sensitive> {
    what.inspect(|what| {
        let (provider, found) = (&lane.name, what.describe());
        tracing::warn!(%provider, job = %job.job.id, found, "a text of the provider's answer is not kept");
    })
}

/// A success says that its reference was not kept.
fn with_note(next: Next, withheld: Option<Sensitive>) -> Next {
    match (next, withheld) {
        (Next::Settle { state: FinalState::Succeeded, reason, reference }, Some(what)) => {
            let reason = format!("{reason}; {}", without_reference(what));
            Next::Settle { state: FinalState::Succeeded, reason, reference }
        }
        (next, _) => next,
    }
}

/// The round in a row that a refusal of this request belongs to; what was let through ends the row.
fn refusal_round(lane: &LaneParts, (kind, began): (CallKind, Instant), let_through: bool) -> u32 {
    if let_through {
        lane.pauses.let_through(kind, began);
    }
    lane.pauses.refusal_round(kind, began)
}

fn hold_others_back(lane: &LaneParts, pause: Option<Pause>, by: By, (kind, round): (CallKind, u32)) {
    match pause {
        Some(Pause::Quota { wait }) => {
            lane.pauses.refused(kind, round, wait);
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), "the provider refused what we allowed");
            let words =
                format!("the provider refused what we allowed; nothing is sent for {:.1} s", wait.as_secs_f64());
            lane.meter.decision(Decision { about: String::new(), ..Decision::new(DecisionKind::Throttled, &words) });
            lane.gate.pause(wait, rand::random());
            lane.pauses.stop_taking(wait, By::Provider, parked::PAUSED);
        }
        Some(Pause::Lane { wait, cause }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), cause, "the lane rests");
            lane.meter.decision(Decision::new(DecisionKind::Paused, &cause));
            lane.pauses.stop_sending(wait, by, &cause);
        }
        Some(Pause::Intake { wait, fault }) => local_faults::rest(lane, wait, &fault),
        None => {}
    }
}
