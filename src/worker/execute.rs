//! One job through its steps, in the order that is never changed:
//! turn → permit → `sending` committed → one request → permit settled → outcome committed.
//!
//! Refuses to reorder and refuses to guess. The acknowledgement comes after all of this, in [`super::intake`].

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::in_hand::Held;
use super::intake::End;
use super::lane::{LaneParts, LaneSettings};
use super::patience::{GivenUp, until_back};
use super::pauses::Turn;
use crate::domain::decision::CallKind;
use crate::domain::disposition::{
    History, MISCONFIGURED_PAUSE, Next, Pause, RetryPolicy, after_outcome, before_resend, before_start,
};
use crate::domain::job::Job;
use crate::domain::outcome::{FinalState, Outcome, UnknownCause};
use crate::domain::provider::{Mode, Provider};
use crate::faults::{self, Point};
use crate::ledger::{AttemptEnd, Begun, Claimed, JobState, Written};
use crate::limiter::gate::{Ask, GateRefusal, Grant, InFlight, Permit, RefusedBy};
use crate::provider::{Answer, FreezeError, FrozenRequest};
use crate::queue::DELAY_STEPS;

/// How long jobs of a lane that must not send are parked before they are looked at again.
const HELD_WAIT: Duration = Duration::from_secs(5);

/// How long a job is parked for which the bucket had no place in time.
const BUCKET_WAIT: Duration = Duration::from_secs(5);
/// How long a lane takes nothing after a permit came too late to be used: what is slow must catch up first.
const LATE_REST: Duration = Duration::from_secs(1);

/// A job that this process holds.
pub struct JobInHand {
    pub job: Job,
    pub claimed: Claimed,
    pub held: Held,
    pub delivered_at: Instant,
    pub claimed_at: Instant,
}

/// Takes one claimed job as far as it can go now.
pub async fn execute(lane: &LaneParts, job: &JobInHand) -> End {
    let settings = lane.settings.borrow().clone();
    if let Some(next) = may_not_be_sent(job, &settings.provider) {
        return put_down_next(lane, job, next).await;
    }
    let request = match request(&settings, job) {
        Ok(Ok(request)) => request,
        Ok(Err(differs)) => return put_down_next(lane, job, differs).await,
        Err(error) => {
            lane.pauses.stop_sending(MISCONFIGURED_PAUSE, &error.to_string());
            tracing::error!(provider = %lane.name, %error, "requests cannot be built; the lane rests");
            return park(lane, job, MISCONFIGURED_PAUSE, "the request cannot be built yet").await;
        }
    };
    let turn = tokio::select! {
        turn = timeout_at(job.delivered_at + settings.provider.max_wait, lane.pool.turn(job.job.priority)) => turn,
        () = lane.stop.cancelled() => Ok(None),
    };
    let _turn = match turn {
        Ok(Some(turn)) => turn,
        Ok(None) => return give_back(lane, job).await,
        Err(_) => return park(lane, job, BUCKET_WAIT, "waits for a place in the steady outflow").await,
    };
    match permit(lane, &settings.provider, job).await {
        Pass::Granted(permit) => match may_not_be_sent(job, &settings.provider) {
            // Its time has passed while it waited; the permit drops and goes back.
            Some(next) => put_down_next(lane, job, next).await,
            None => match lane.pauses.turn() {
                Some(turn) => send(lane, &settings, job, &request, (permit, &turn)).await,
                None => park(lane, job, HELD_WAIT, "another job finds out whether the provider is up again").await,
            },
        },
        Pass::Refused(refusal) => refused(lane, job, &refusal).await,
        Pass::Held(cause) => park(lane, job, HELD_WAIT, &cause).await,
        Pass::Stopping => give_back(lane, job).await,
    }
}

/// Why a job must not be sent as things stand now; asked when it is taken and again when its permit has come.
fn may_not_be_sent(job: &JobInHand, provider: &Provider) -> Option<Next> {
    let (mut history, policy) = (history(&job.claimed), retry_policy(provider));
    let since_claim = job.claimed_at.elapsed();
    history.age += since_claim;
    history.first_sent_age = history.first_sent_age.map(|age| age + since_claim);
    let expired = job.claimed.expires_in.is_some_and(|left| left <= since_claim);
    before_start(&history, &policy, expired).or_else(|| before_resend(&history, &policy))
}

/// Commits where a job stands; `None` when the ledger cannot be had and the worker is leaving.
pub async fn put_down(lane: &LaneParts, job: &JobInHand, state: &JobState) -> Option<Written> {
    let ledger = &lane.worker.engines.ledger;
    let written = until_back("put a job down", &lane.worker.abandon, || ledger.put_down(&job.held.hold, state));
    written.await.map_err(|error| tracing::warn!(job = %job.job.id, ?error, "not put down")).ok()
}

/// The request to send: the first attempt's, or a new one. A re-send that would differ goes to a person.
fn request(settings: &LaneSettings, job: &JobInHand) -> Result<Result<FrozenRequest, Next>, FreezeError> {
    let Some((frozen, _)) = &job.claimed.frozen else { return settings.client.freeze(&job.job).map(Ok) };
    let now = settings.client.credential_fingerprint(frozen.account.as_deref())?;
    if job.claimed.unknown && now != frozen.credential_fingerprint {
        let reason = "the outcome is unknown and the credential has changed since".to_owned();
        return Ok(Err(Next::Settle { state: FinalState::Review, reason, reference: None }));
    }
    Ok(Ok(frozen.clone()))
}

enum Pass {
    Granted(Permit),
    Refused(GateRefusal),
    /// The lane must not send.
    Held(String),
    Stopping,
}

async fn permit(lane: &LaneParts, provider: &Provider, job: &JobInHand) -> Pass {
    let wait_until = match provider.mode {
        Mode::Blocking => job.delivered_at + provider.max_wait,
        // What no delay queue can hold is slept in hand.
        Mode::Requeue => Instant::now() + DELAY_STEPS[0],
    };
    let mut sending = lane.pauses.watch_sending();
    let mut settings = lane.settings.clone();
    settings.mark_unchanged();
    let asked = lane.gate.permit(Ask {
        cost: u32::from(job.job.cost),
        kind: CallKind::Charge,
        priority: job.job.priority,
        account: job.job.account.as_ref().map(|account| account.as_str().to_owned()),
        reference: job.job.reference.clone(),
        wait_until,
    });
    tokio::pin!(asked);
    loop {
        sending.mark_unchanged();
        if let Some(pause) = lane.pauses.sending_paused() {
            return Pass::Held(pause.cause);
        }
        if settings.borrow_and_update().provider.paused {
            return Pass::Held("the provider is paused".to_owned());
        }
        tokio::select! {
            grant = &mut asked => return match grant {
                Grant::Granted(permit) => Pass::Granted(permit),
                Grant::Refused(GateRefusal { by: RefusedBy::Stopping, .. }) if lane.stop.is_cancelled() => Pass::Stopping,
                // Handed back to a lane that still takes, it would be here again at once.
                Grant::Refused(GateRefusal { by: RefusedBy::Stopping, .. }) => {
                    Pass::Held("the quota is not open in this worker".to_owned())
                }
                Grant::Refused(refusal) => Pass::Refused(refusal),
            },
            _ = sending.changed() => {}
            _ = settings.changed() => {}
            () = lane.stop.cancelled() => return Pass::Stopping,
        }
    }
}

async fn refused(lane: &LaneParts, job: &JobInHand, refusal: &GateRefusal) -> End {
    let cause = match &refusal.by {
        RefusedBy::TooCostly => {
            let reason = "cost is above the smallest limit: it can never be sent".to_owned();
            let next = Next::Settle { state: FinalState::Review, reason, reference: None };
            return put_down_next(lane, job, next).await;
        }
        RefusedBy::Limit(name) => format!("waits for limit {name}"),
        RefusedBy::Blocked { account } => format!("account {account} is blocked by a rule of this provider"),
        RefusedBy::Cold => "the limiter has lost its state and waits".to_owned(),
        RefusedBy::Paused => "the provider asked for a pause".to_owned(),
        RefusedBy::StoreAway(_) => "the limiter store is away".to_owned(),
        RefusedBy::StaleSettings => "newer settings are being loaded".to_owned(),
        RefusedBy::Stopping => return give_back(lane, job).await,
    };
    // What its own account or reference refuses says nothing of the jobs behind it.
    if !refusal.of_its_own {
        lane.pauses.stop_taking(refusal.retry_after, &cause);
    }
    park(lane, job, refusal.retry_after, &cause).await
}

/// From here on a request may leave: `sending` first, then at most one request, then what became of it.
async fn send(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    request: &FrozenRequest,
    (permit, turn): (Permit, &Turn),
) -> End {
    let _on_wire = lane.worker.in_hand.on_wire();
    faults::crash(Point::AfterPermit);
    let number = match lane.worker.engines.ledger.begin_attempt(&job.held.hold, request).await {
        Ok(Begun::Attempt(number)) => number,
        Ok(Begun::Lost) => return End::HandBack,
        Err(error) => {
            drop(permit);
            tracing::warn!(job = %job.job.id, %error, "attempt not begun; nothing was sent");
            return retract(lane, job).await;
        }
    };
    faults::crash(Point::AfterSending);
    sleep_until(permit.start_at).await;
    let began = Instant::now();
    let answer = match permit.begin() {
        Ok(in_flight) => {
            // The row's own timeout ends a request before this, unless the row changed since the permit was asked for.
            let call = faults::on_the_wire(request, settings.client.send(request));
            let sent = timeout_at(in_flight.answer_before, call).await;
            let answer = sent.unwrap_or(Answer {
                outcome: Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None },
                status: None,
                answer_age: Duration::ZERO,
            });
            faults::crash(Point::AfterAnswer);
            settle_permit(in_flight, &answer);
            answer
        }
        Err(_late) => {
            tracing::warn!(provider = %lane.name, "an attempt was written down too slowly for its permit; nothing was sent");
            lane.pauses.stop_taking(LATE_REST, "the ledger is slower than the send budget");
            let outcome = Outcome::NotSent { cause: "the permit came too late".to_owned() };
            return finish_unsent(lane, job, number, &outcome).await;
        }
    };
    lane.pauses.observe(&job.job.id, &answer.outcome, began, rand::random());
    finish(lane, settings, job, number, &answer, turn.is_probe()).await
}

fn settle_permit(in_flight: InFlight, answer: &Answer) {
    match &answer.outcome {
        Outcome::NotSent { .. } => in_flight.not_sent(),
        Outcome::Unknown { cause: UnknownCause::Timeout | UnknownCause::ConnectionLost, .. } => in_flight.unknown(),
        _ => in_flight.answered(Instant::now() - answer.answer_age),
    }
}

async fn finish(
    lane: &LaneParts,
    settings: &LaneSettings,
    job: &JobInHand,
    number: u32,
    answer: &Answer,
    probe: bool,
) -> End {
    let policy = retry_policy(&settings.provider);
    let mut history = History { probe, ..history(&job.claimed) };
    if matches!(answer.outcome, Outcome::Unknown { .. } | Outcome::InProgress) {
        history.first_sent_age.get_or_insert_default();
    }
    let disposition = after_outcome(&answer.outcome, &history, &policy, rand::random());
    match disposition.pause {
        Some(Pause::Quota { wait }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), "the provider refused what we allowed");
            lane.gate.pause(wait, rand::random());
            lane.pauses.stop_taking(wait, "the provider asked for a pause");
        }
        Some(Pause::Lane { wait, cause }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), cause, "the lane rests");
            lane.pauses.stop_sending(wait, &cause);
        }
        None => {}
    }
    let end = attempt_end(number, answer.status, &answer.outcome, disposition.counts_attempt);
    write_end(lane, job, &end, &state_of(disposition.next)).await
}

/// An attempt that was begun and surely never left.
async fn finish_unsent(lane: &LaneParts, job: &JobInHand, number: u32, outcome: &Outcome) -> End {
    let reason = "begun too late, nothing was sent".to_owned();
    let wait = DELAY_STEPS[0];
    let state =
        if job.claimed.unknown { JobState::Unknown { wait, reason } } else { JobState::Waiting { wait, reason } };
    write_end(lane, job, &attempt_end(number, None, outcome, false), &state).await
}

async fn write_end(lane: &LaneParts, job: &JobInHand, end: &AttemptEnd, state: &JobState) -> End {
    let ledger = &lane.worker.engines.ledger;
    let written = until_back("write an outcome down", &lane.worker.abandon, || {
        faults::unread(Point::OutcomeCommitUnacknowledged, ledger.finish_attempt(&job.held.hold, end, state))
    });
    let written = written.await;
    faults::crash(Point::AfterOutcome);
    match written {
        Ok(Written::Kept) => kept(lane, state),
        Ok(Written::Lost) => {
            tracing::warn!(job = %job.job.id, "another worker has taken this job over");
            End::HandBack
        }
        Err(GivenUp::Stopped) => End::HandBack,
        Err(GivenUp::Failed(error)) => {
            tracing::error!(job = %job.job.id, %error, "outcome not written down; the ledger says `sending`");
            End::Refused
        }
    }
}

/// Beginning an attempt failed with the database away: whether `sending` was committed is unknown, but nothing was sent.
async fn retract(lane: &LaneParts, job: &JobInHand) -> End {
    let ledger = &lane.worker.engines.ledger;
    let outcome = Outcome::NotSent { cause: "the ledger was away".to_owned() };
    let open = attempt_end(job.claimed.last_attempt + 1, None, &outcome, false);
    let wait = DELAY_STEPS[0];
    let reason = "the ledger was away, nothing was sent".to_owned();
    let state =
        if job.claimed.unknown { JobState::Unknown { wait, reason } } else { JobState::Waiting { wait, reason } };
    let written = until_back("retract an attempt", &lane.worker.abandon, || async {
        match ledger.finish_attempt(&job.held.hold, &open, &state).await? {
            Written::Kept => Ok(Written::Kept),
            Written::Lost => ledger.put_down(&job.held.hold, &state).await,
        }
    });
    match written.await {
        Ok(Written::Kept) => End::Park(wait),
        _ => End::HandBack,
    }
}

async fn put_down_next(lane: &LaneParts, job: &JobInHand, next: Next) -> End {
    let state = state_of(next);
    match put_down(lane, job, &state).await {
        Some(Written::Kept) => kept(lane, &state),
        Some(Written::Lost) => End::HandBack,
        None => End::Refused,
    }
}

async fn park(lane: &LaneParts, job: &JobInHand, wait: Duration, reason: &str) -> End {
    put_down_next(lane, job, Next::Again { after: wait, unknown: job.claimed.unknown, reason: reason.to_owned() }).await
}

/// The worker leaves: the job is free for others at once.
async fn give_back(lane: &LaneParts, job: &JobInHand) -> End {
    match lane.worker.engines.ledger.release(&job.held.hold).await {
        Ok(Written::Kept | Written::Lost) => {}
        Err(error) => tracing::debug!(job = %job.job.id, %error, "not released; the lease will run out"),
    }
    End::HandBack
}

fn kept(lane: &LaneParts, state: &JobState) -> End {
    match state {
        JobState::Waiting { wait, .. } | JobState::Unknown { wait, .. } => End::Park(*wait),
        JobState::Final { .. } => {
            lane.worker.outbox.notify_one();
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

fn attempt_end(number: u32, status: Option<u16>, outcome: &Outcome, counts: bool) -> AttemptEnd {
    let (outcome, detail) = match outcome {
        Outcome::Accepted { .. } => ("accepted", String::new()),
        Outcome::Declined { reason } => ("declined", reason.clone()),
        Outcome::Throttled { .. } => ("throttled", String::new()),
        Outcome::Busy { .. } => ("busy", String::new()),
        Outcome::Misconfigured { .. } => ("misconfigured", String::new()),
        Outcome::InProgress => ("in_progress", String::new()),
        Outcome::Unknown { cause, .. } => ("unknown", cause.describe()),
        Outcome::Rejected { reason } => ("rejected", reason.clone()),
        Outcome::NotSent { cause } => ("not_sent", cause.clone()),
    };
    AttemptEnd { number, outcome, status, detail, counts }
}

fn history(claimed: &Claimed) -> History {
    History {
        attempts: claimed.attempts,
        requests: claimed.last_attempt,
        unknown: claimed.unknown,
        age: claimed.age,
        first_sent_age: claimed.frozen.as_ref().map(|(_, age)| *age),
        probe: false,
    }
}

fn retry_policy(provider: &Provider) -> RetryPolicy {
    RetryPolicy {
        max_attempts: provider.max_attempts,
        max_age: provider.max_age,
        backoff: provider.backoff,
        idempotency_retention: provider.idempotency_retention,
    }
}
