//! One job through its steps, in the order that is never changed:
//! turn → permit → written down → one request → permit settled → outcome committed.
//!
//! The request is a charge or a look-up; the order is the same for both. Refuses to reorder and refuses to guess. The
//! acknowledgement comes after all of this, in [`super::intake`].

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

pub(super) use self::permit::held_by;
use self::permit::{Pass, permit, refused};
pub use self::record::put_down;
use self::record::{Closing, finish_unsent, give_back, park, put_down_next, retract, write_end};
use super::in_hand::Held;
use super::intake::End;
use super::lane::{LaneParts, LaneSettings};
use super::meter::{Decision, DecisionKind, Returned};
use super::pauses::Turn;
use crate::domain::breaker::Change;
use crate::domain::decision::CallKind;
use crate::domain::disposition::finding::after_finding;
use crate::domain::disposition::{
    History, MISCONFIGURED_PAUSE, Next, Pause, Step, after_outcome, ask_or_review, before_request,
};
use crate::domain::job::Job;
use crate::domain::lookup::Finding;
use crate::domain::outcome::{FinalState, Outcome, UnknownCause, Way};
use crate::domain::provider::Provider;
use crate::faults::{self, Point};
use crate::fleet::report::By;
use crate::ledger::{AttemptEnd, Begun, Claimed, LookupEnd};
use crate::limiter::gate::{InFlight, Permit};
use crate::provider::{Answer, FreezeError, FrozenRequest, Question};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;

mod permit;
mod record;

/// How long jobs of a lane that must not send are parked before they are looked at again.
const HELD_WAIT: Duration = Duration::from_secs(5);

/// How long a job is parked for which the bucket had no place in time.
pub const BUCKET_WAIT: Duration = Duration::from_secs(5);

/// A job that this process holds.
pub struct JobInHand {
    pub job: Job,
    pub claimed: Claimed,
    pub held: Held,
    pub delivered_at: Instant,
    pub claimed_at: Instant,
}

/// The one request that a job is taken in hand for.
enum Call {
    Charge(FrozenRequest),
    Lookup(Question),
}

impl Call {
    fn kind(&self) -> CallKind {
        match self {
            Self::Charge(_) => CallKind::Charge,
            Self::Lookup(_) => CallKind::Lookup,
        }
    }
}

/// Takes one claimed job as far as it can go now.
pub async fn execute(lane: &LaneParts, job: &JobInHand) -> End {
    let settings = lane.settings.borrow().clone();
    let call = match next_call(&settings, job) {
        Ok(Ok(call)) => call,
        Ok(Err(next)) => return put_down_next(lane, job, next, "again").await,
        Err(error) => {
            lane.pauses.stop_sending(MISCONFIGURED_PAUSE, By::Setup, &error.to_string());
            tracing::error!(provider = %lane.name, %error, "requests cannot be built; the lane rests");
            return park(lane, job, MISCONFIGURED_PAUSE, ("misconfigured", "the request cannot be built yet")).await;
        }
    };
    let waiting = lane.pool.turn(job.job.priority).instrument(spans::step("wait for a turn"));
    let turn = tokio::select! {
        turn = timeout_at(job.delivered_at + settings.provider.max_wait, waiting) => turn,
        () = lane.stop.cancelled() => Ok(None),
    };
    let _turn = match turn {
        Ok(Some(turn)) => turn,
        Ok(None) => return give_back(lane, job).await,
        Err(_) => return park(lane, job, BUCKET_WAIT, ("outflow", "waits for a place in the steady outflow")).await,
    };
    match permit(lane, &settings.provider, job, call.kind()).instrument(spans::step("wait for a permit")).await {
        Pass::Granted(permit) => match no_longer(&call, job, &settings.provider) {
            // Its time has passed while it waited; the permit drops and goes back.
            Some(next) => {
                lane.meter.permit_returned(Returned::NotNeeded);
                put_down_next(lane, job, next, "again").await
            }
            None => match lane.pauses.turn() {
                // Thousands wait for their permits, few send: those alone pay for the room that it takes.
                Some(turn) => Box::pin(send(lane, &settings, job, &call, (permit, &turn))).await,
                None => {
                    lane.meter.permit_returned(Returned::Probing);
                    let reason = "another job finds out whether the provider is up again";
                    park(lane, job, HELD_WAIT, ("probing", reason)).await
                }
            },
        },
        Pass::Refused(refusal) => refused(lane, job, &refusal).await,
        Pass::Held(cause) => park(lane, job, HELD_WAIT, ("held", &cause)).await,
        Pass::Stopping => give_back(lane, job).await,
    }
}

/// What is done with a job as things stand now; asked when it is taken and again when its permit has come.
fn step(job: &JobInHand, provider: &Provider) -> Step {
    let since_claim = job.claimed_at.elapsed();
    let expired = job.claimed.expires_in.is_some_and(|left| left <= since_claim);
    before_request(&history(job), &provider.retry_policy(), expired)
}

/// The request to make, or what becomes of the job without one.
fn next_call(settings: &LaneSettings, job: &JobInHand) -> Result<Result<Call, Next>, FreezeError> {
    match step(job, &settings.provider) {
        Step::Put(next) => Ok(Err(next)),
        Step::Ask => Ok(question(settings, job)),
        Step::Charge => {
            let fresh = settings.client.freeze(&job.job)?;
            let Some((frozen, _)) = &job.claimed.frozen else { return Ok(Ok(Call::Charge(fresh))) };
            let Some(difference) = difference(frozen, &fresh, job.claimed.unknown) else {
                return Ok(Ok(Call::Charge(frozen.clone())));
            };
            if !job.claimed.unknown {
                let reason = format!("surely not charged; {difference}");
                return Ok(Err(Next::Settle { state: FinalState::Review, reason, reference: None }));
            }
            let reason = format!("the outcome is unknown and {difference}");
            let next = ask_or_review(&history(job), &settings.provider.retry_policy(), &reason);
            Ok(next.map_or_else(|| question(settings, job), Err))
        }
    }
}

/// Why the frozen request is not sent again. At an address that the row no longer has, nobody's answer says anything of
/// this lane, and yet it would rest it. Credentials may change while nothing can have been charged with the old ones.
fn difference(frozen: &FrozenRequest, fresh: &FrozenRequest, unknown: bool) -> Option<&'static str> {
    if (&frozen.method, &frozen.url) != (&fresh.method, &fresh.url) {
        return Some("the request is frozen for an address that the row no longer has (url or method changed)");
    }
    (unknown && frozen.credential_fingerprint != fresh.credential_fingerprint)
        .then_some("the credential has changed since")
}

fn question(settings: &LaneSettings, job: &JobInHand) -> Result<Call, Next> {
    settings.client.question(&job.job).map(Call::Lookup).map_err(|problem| {
        let reason = format!("the outcome is unknown and the provider cannot be asked: {problem}");
        Next::Settle { state: FinalState::Review, reason, reference: None }
    })
}

/// Why a request must not be made any more now that its permit has come.
fn no_longer(call: &Call, job: &JobInHand, provider: &Provider) -> Option<Next> {
    match (step(job, provider), call) {
        (Step::Put(next), _) => Some(next),
        (Step::Ask, Call::Charge(_)) => {
            let reason = "waited too long to be sent again: the provider is asked".to_owned();
            Some(Next::Again { after: DELAY_STEPS[0], unknown: true, reason })
        }
        // A job that could be sent again is asked about where its request would differ.
        (Step::Charge | Step::Ask, _) => None,
    }
}

/// From here on a request may leave: written down first, then at most one request, then what became of it.
async fn send(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    call: &Call,
    (mut permit, turn): (Permit, &Turn),
) -> End {
    let ahead = permit.start_at > Instant::now();
    let _on_wire = lane.worker.in_hand.on_wire();
    faults::crash(Point::AfterPermit);
    let (ledger, hold) = (&lane.worker.engines.ledger, &job.held.hold);
    let writing = spans::step("write the request down");
    let begun = match call {
        Call::Charge(request) => ledger.begin_attempt(hold, request).instrument(writing).await,
        Call::Lookup(_) => ledger.begin_lookup(hold).instrument(writing).await,
    };
    let number = match begun {
        Ok(Begun::Attempt(number)) => number,
        Ok(Begun::Lost) => {
            lane.meter.permit_returned(Returned::TakenOver);
            return End::HandBack;
        }
        Err(error) => {
            drop(permit);
            lane.meter.permit_returned(Returned::LedgerAway);
            tracing::warn!(job = %job.job.id, %error, "request not written down; nothing was sent");
            return retract(lane, job, call.kind()).await;
        }
    };
    permit.written_down();
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
            let sent = faults::on_the_wire(request, settings.client.send(request)).instrument(spans::request("charge"));
            let answer = answered((lane, began), in_flight, sent, (silence, Outcome::way)).await;
            drop(started);
            let change = lane.pauses.observe(&job.job.id, &answer.outcome, began, rand::random());
            tell_of_breaker(lane, change, &answer.outcome);
            finish_charge(lane, settings, job, (number, turn.is_probe()), &answer).await
        }
        Call::Lookup(question) => {
            let silence = Finding::Unknown { cause: UnknownCause::Timeout, retry_after: None };
            let asked = settings.client.ask(question).instrument(spans::request("look-up"));
            let answer = answered((lane, began), in_flight, asked, (silence, Finding::way)).await;
            drop(started);
            faults::crash(Point::AfterLookup);
            finish_lookup(lane, settings, job, number, &answer).await
        }
    }
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
    (number, probe): (u32, bool),
    answer: &Answer<Outcome>,
) -> End {
    let mut history = History { probe, ..history(job) };
    if matches!(answer.outcome, Outcome::Unknown { .. } | Outcome::InProgress) {
        history.first_sent_age.get_or_insert_default();
    }
    let disposition = after_outcome(&answer.outcome, &history, &settings.provider.retry_policy(), rand::random());
    if matches!(answer.outcome, Outcome::Throttled { .. }) {
        lane.meter.throttled();
    }
    let misconfigured = matches!(answer.outcome, Outcome::Misconfigured { .. });
    hold_others_back(lane, disposition.pause, if misconfigured { By::Setup } else { By::Provider });
    let end = AttemptEnd {
        number,
        outcome: answer.outcome.word(),
        status: answer.status,
        detail: answer.outcome.detail(),
        counts: disposition.counts_attempt,
    };
    write_end(lane, job, &Closing::Charge(end), (disposition.next, answer.outcome.word())).await
}

async fn finish_lookup(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    number: u32,
    answer: &Answer<Finding>,
) -> End {
    if let Finding::Misconfigured { status } = answer.outcome {
        tracing::error!(provider = %lane.name, job = %job.job.id, status, "a look-up was refused: check the credentials in headers");
    }
    let judged = after_finding(&answer.outcome, &history(job), &settings.provider.retry_policy(), rand::random());
    if matches!(answer.outcome, Finding::Throttled { .. }) {
        lane.meter.throttled();
    }
    hold_others_back(lane, judged.pause, By::Provider);
    let end = LookupEnd {
        number,
        outcome: answer.outcome.word(),
        status: answer.status,
        detail: answer.outcome.detail(),
        grants_resend: judged.grants_resend,
    };
    write_end(lane, job, &Closing::Lookup(end), (judged.next, answer.outcome.word())).await
}

fn hold_others_back(lane: &LaneParts, pause: Option<Pause>, by: By) {
    match pause {
        Some(Pause::Quota { wait }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), "the provider refused what we allowed");
            let words =
                format!("the provider refused what we allowed; nothing is sent for {:.1} s", wait.as_secs_f64());
            lane.meter.decision(Decision { about: String::new(), ..Decision::new(DecisionKind::Throttled, &words) });
            lane.gate.pause(wait, rand::random());
            lane.pauses.stop_taking(wait, By::Provider, "the provider asked for a pause");
        }
        Some(Pause::Lane { wait, cause }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), cause, "the lane rests");
            lane.meter.decision(Decision::new(DecisionKind::Paused, &cause));
            lane.pauses.stop_sending(wait, by, &cause);
        }
        None => {}
    }
}

/// What the job has been through until now.
fn history(job: &JobInHand) -> History {
    let (claimed, since_claim) = (&job.claimed, job.claimed_at.elapsed());
    History {
        attempts: claimed.attempts,
        requests: claimed.last_attempt.saturating_sub(claimed.lookups),
        lookups: claimed.lookups,
        resend: claimed.resend,
        unknown: claimed.unknown,
        age: claimed.age + since_claim,
        first_sent_age: claimed.frozen.as_ref().map(|(_, age)| *age + since_claim),
        unknown_age: claimed.unknown_age.map(|age| age + since_claim),
        probe: false,
    }
}
