//! Sends one request, from its permit to its outcome: records it, sends it at the permit's start, releases the permit,
//! and commits the outcome.
//!
//! Only a recorded request is sent, and one permit allows one request. See
//! `docs/decisions/0031-one-request-per-permit.md`.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::record::{AttemptResult, abort_attempt, commit_result, finish_unsent};
use super::{ClaimedJob, ProviderCall, attempt_history};
use crate::domain::breaker::BreakerTransition;
use crate::domain::disposition::lookup::after_lookup;
use crate::domain::disposition::{AttemptHistory, PauseRequest, Transition, after_outcome};
use crate::domain::group_commit::delay_before_send;
use crate::domain::job::{Job, JobField};
use crate::domain::lookup::LookupResult;
use crate::domain::outcome::{FinalState, Outcome, Refusal, Transmission, UnknownCause, redacted_reference_note};
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::Provider;
use crate::domain::sensitive::Sensitive;
use crate::domain::wait_reason::WaitReason;
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::{AttemptEnd, BeginResult, LedgerError, LookupEnd};
use crate::limiter::gate::{InFlightPermit, Permit};
use crate::provider::RequestResult;
use crate::telemetry::spans;
use crate::worker::intake::DeliveryAction;
use crate::worker::lane::{LaneContext, LaneSettings};
use crate::worker::lane_control::SendPermission;
use crate::worker::local_faults;
use crate::worker::meter::{DecisionKind, LaneDecision, ReturnReason};

/// Records the request, sends it at most once, and commits its outcome.
pub(super) async fn send(
    lane: &LaneContext,
    settings: &LaneSettings,
    job: &ClaimedJob,
    call: &ProviderCall,
    (permit, permission): (Permit, &SendPermission),
) -> DeliveryAction {
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _in_flight = lane.worker.active_jobs.begin_request();
    faults::crash(CrashPoint::AfterPermit);
    let (ledger, lease) = (&lane.worker.backends.ledger, &job.active.lease);
    let writing = spans::step("write the request down");
    let begin_result = match call {
        ProviderCall::Charge(request) => {
            ledger.begin_attempt_batched(lease, request, delay_before_send(lead)).instrument(writing).await
        }
        ProviderCall::Lookup(_) => ledger.begin_lookup(lease).instrument(writing).await,
    };
    let number = match begin_result {
        Ok(BeginResult::Attempt(number)) => number,
        Ok(BeginResult::Stale) => {
            lane.meter.record_return(ReturnReason::TakenOver);
            return DeliveryAction::Requeue;
        }
        Err(error) => return on_begin_failed(lane, job, call.kind(), permit, &error).await,
    };
    dispatch(lane, settings, job, (call, number), (permit, permission, !lead.is_zero())).await
}

/// Ends a request whose record failed: the commit is unknown, but nothing was sent.
pub(super) async fn on_begin_failed(
    lane: &LaneContext,
    job: &ClaimedJob,
    kind: CallKind,
    permit: Permit,
    error: &LedgerError,
) -> DeliveryAction {
    drop(permit);
    lane.meter.record_return(ReturnReason::LedgerUnavailable);
    tracing::warn!(job = %job.job.id, %error, "failed to record a request; nothing was sent, the job is retried");
    abort_attempt(lane, job, kind, error).await
}

/// Sends a recorded request at its permit's start; `ahead`: the start lay ahead when the permit was granted.
pub(super) async fn dispatch(
    lane: &LaneContext,
    settings: &LaneSettings,
    job: &ClaimedJob,
    (call, number): (&ProviderCall, u32),
    (mut permit, permission, ahead): (Permit, &SendPermission, bool),
) -> DeliveryAction {
    permit.mark_persisted();
    // Free for the next job once this one's outcome is recorded.
    let _worker_slot = permit.take_worker_slot();
    if number == 1 {
        record_missing_fields(lane, &settings.provider, &job.job);
    }
    faults::crash(CrashPoint::AfterSending);
    lane.worker.start_timer.sleep_until(permit.start_at).instrument(spans::step("wait for the permit's start")).await;
    let (began, lateness) = (Instant::now(), permit.start_at.elapsed());
    let Ok(in_flight) = permit.begin() else {
        lane.meter.record_return(ReturnReason::DeadlineMissed);
        tracing::warn!(
            provider = %lane.name,
            "a request was recorded too late for its permit; nothing was sent, the job is retried"
        );
        lane.control.record_deadline_miss();
        return finish_unsent(lane, job, call.kind(), number).await;
    };
    lane.control.record_on_time();
    let started = lane.meter.request_started(lateness, ahead);
    match call {
        ProviderCall::Charge(request) => {
            let no_response = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
            let span = spans::request("charge");
            let sent = faults::on_the_wire(request, settings.client.send(&job.job, request)).instrument(span.clone());
            let mut answer =
                send_and_release((lane, began), in_flight, sent, (no_response, Outcome::transmission)).await;
            spans::record_response(&span, answer.outcome.code(), answer.status);
            drop(started);
            let change = lane.control.observe(&job.job.id, &answer.outcome, began, rand::random());
            record_breaker_transition(lane, change, &answer.outcome);
            lane.control.judge_refusal(job.job.account.as_ref(), &answer.outcome, began);
            let generation = throttle_generation(lane, (CallKind::Charge, began), answer.outcome.passed_rate_limit());
            let history = AttemptHistory {
                throttle_generation: generation,
                probe: permission.is_probe(),
                ..attempt_history(job)
            };
            let withheld = log_redaction(lane, job, answer.outcome.redact(lane.worker.options.card_numbers));
            finish_charge(lane, settings, job, (number, history), (&answer, withheld)).await
        }
        ProviderCall::Lookup(question) => {
            let no_response = LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after: None };
            let span = spans::request("look-up");
            let asked = settings.client.look_up(question).instrument(span.clone());
            let mut answer =
                send_and_release((lane, began), in_flight, asked, (no_response, LookupResult::transmission)).await;
            spans::record_response(&span, answer.outcome.code(), answer.status);
            drop(started);
            faults::crash(CrashPoint::AfterLookup);
            let generation = throttle_generation(lane, (CallKind::Lookup, began), answer.outcome.passed_rate_limit());
            let history = AttemptHistory { throttle_generation: generation, ..attempt_history(job) };
            let withheld = log_redaction(lane, job, answer.outcome.redact(lane.worker.options.card_numbers));
            finish_lookup(lane, settings, job, (number, &history), (&answer, withheld)).await
        }
    }
}

/// Counts a job that limits or rules of its provider do not apply to because it lacks their field; once per job, with
/// its first request.
fn record_missing_fields(lane: &LaneContext, provider: &Provider, job: &Job) {
    let lacks = |field: &JobField| !job.has(*field) && provider.counts_by(*field);
    JobField::ALL.into_iter().filter(lacks).for_each(|field| lane.meter.record_missing_field(field));
}

/// Waits for the response to the permit's one request, and releases the permit by how far the request got.
async fn send_and_release<T>(
    (lane, began): (&LaneContext, Instant),
    in_flight: InFlightPermit,
    request: impl Future<Output = RequestResult<T>>,
    (no_response, transmission): (T, fn(&T) -> Transmission),
) -> RequestResult<T> {
    // The row's own timeout ends a request before this, unless the row changed since the permit was requested.
    let answer_before = in_flight.answer_before;
    let answer = timeout_at(answer_before, request).await;
    let answer = answer.unwrap_or(RequestResult { outcome: no_response, status: None, response_age: Duration::ZERO });
    faults::crash(CrashPoint::AfterAnswer);
    let transmission = transmission(&answer.outcome);
    match transmission {
        Transmission::NotSent => in_flight.release_unused(),
        Transmission::NoResponse => {
            in_flight.release_unknown();
            lane.meter.record_hold(answer_before.saturating_duration_since(began));
        }
        Transmission::Responded => {
            let read_at = Instant::now() - answer.response_age;
            in_flight.release_used(read_at);
            lane.meter.record_hold(read_at.saturating_duration_since(began));
        }
    }
    lane.meter.record_response(answer.status, transmission != Transmission::NotSent, began.elapsed());
    answer
}

fn record_breaker_transition(lane: &LaneContext, change: Option<BreakerTransition>, outcome: &Outcome) {
    let decision = match change {
        Some(BreakerTransition::Opens { open_for }) => {
            let words = format!(
                "{}: the provider is down, nothing is sent for {:.1} s",
                outcome.code(),
                open_for.as_secs_f64()
            );
            LaneDecision { merge_key: String::new(), ..LaneDecision::new(DecisionKind::BreakerOpened, &words) }
        }
        Some(BreakerTransition::Closes) => LaneDecision::new(DecisionKind::BreakerClosed, "the provider answers again"),
        None => return,
    };
    lane.meter.record_decision(decision);
}

async fn finish_charge(
    lane: &LaneContext,
    settings: &LaneSettings,
    job: &ClaimedJob,
    (number, mut history): (u32, AttemptHistory),
    (answer, withheld): (&RequestResult<Outcome>, Option<Sensitive>),
) -> DeliveryAction {
    if answer.outcome.may_have_charged() {
        history.first_sent_age.get_or_insert_default();
    }
    let disposition = after_outcome(&answer.outcome, &history, &settings.provider.retry_policy(), rand::random());
    let refusal = answer.outcome.refusal();
    if matches!(refusal, Some(Refusal::Throttled { .. })) {
        lane.meter.record_throttle();
    }
    let misconfigured = matches!(refusal, Some(Refusal::Misconfigured { .. }));
    let by = if misconfigured { PauseCause::Setup } else { PauseCause::Provider };
    // Where only its account is refused, the lane goes on.
    let is_accounts = misconfigured && lane.control.account_pause(job.job.account.as_ref()).is_some();
    let pause = disposition.pause.filter(|_| !is_accounts);
    apply_pause(lane, pause, by, (CallKind::Charge, history.throttle_generation));
    let end = AttemptEnd {
        number,
        outcome: answer.outcome.code(),
        status: answer.status,
        detail: answer.outcome.detail(),
        counts: disposition.counts_attempt,
    };
    let next = note_redaction(disposition.transition, withheld);
    commit_result(lane, job, &AttemptResult::Charge(end), (next, answer.outcome.code())).await
}

async fn finish_lookup(
    lane: &LaneContext,
    settings: &LaneSettings,
    job: &ClaimedJob,
    (number, history): (u32, &AttemptHistory),
    (answer, withheld): (&RequestResult<LookupResult>, Option<Sensitive>),
) -> DeliveryAction {
    if let LookupResult::Misconfigured { status } = answer.outcome {
        tracing::error!(
            provider = %lane.name,
            job = %job.job.id,
            status,
            "the provider refused a look-up: check the credentials in `headers` of its row"
        );
    }
    let disposition = after_lookup(&answer.outcome, history, &settings.provider.retry_policy(), rand::random());
    if matches!(answer.outcome, LookupResult::Throttled { .. }) {
        lane.meter.record_throttle();
    }
    apply_pause(lane, disposition.pause, PauseCause::Provider, (CallKind::Lookup, history.throttle_generation));
    let end = LookupEnd {
        number,
        outcome: answer.outcome.code(),
        status: answer.status,
        detail: answer.outcome.detail(),
        grants_resend: disposition.grants_resend,
    };
    let next = note_redaction(disposition.transition, withheld);
    commit_result(lane, job, &AttemptResult::Lookup(end), (next, answer.outcome.code())).await
}

/// Logs which part of a response is not stored.
fn log_redaction(lane: &LaneContext, job: &ClaimedJob, what: Option<Sensitive>) -> Option<Sensitive> {
    what.inspect(|what| {
        let (provider, found) = (&lane.name, what.describe());
        tracing::warn!(%provider, job = %job.job.id, found, "a text of the provider's response is not stored");
    })
}

/// Adds to the reason of a success that its reference was not stored.
fn note_redaction(next: Transition, withheld: Option<Sensitive>) -> Transition {
    match (next, withheld) {
        (Transition::Finalize { state: FinalState::Succeeded, reason, reference }, Some(what)) => {
            let reason = format!("{reason}; {}", redacted_reference_note(what));
            Transition::Finalize { state: FinalState::Succeeded, reason, reference }
        }
        (next, _) => next,
    }
}

/// The generation of consecutive refusals that a refusal of this request belongs to; a request that passed ends the
/// streak.
fn throttle_generation(lane: &LaneContext, (kind, began): (CallKind, Instant), passed: bool) -> u32 {
    if passed {
        lane.control.record_passed(kind, began);
    }
    lane.control.throttle_generation(kind, began)
}

fn apply_pause(lane: &LaneContext, pause: Option<PauseRequest>, by: PauseCause, (kind, generation): (CallKind, u32)) {
    match pause {
        Some(PauseRequest::Quota { wait }) => {
            lane.control.record_throttle(kind, generation, wait);
            tracing::warn!(
                provider = %lane.name,
                wait_ms = wait.as_millis(),
                "the provider throttled requests that the limits allowed; pausing its quota"
            );
            let words = format!(
                "the provider throttled requests that the limits allowed; nothing is sent for {:.1} s",
                wait.as_secs_f64()
            );
            lane.meter.record_decision(LaneDecision {
                merge_key: String::new(),
                ..LaneDecision::new(DecisionKind::Throttled, &words)
            });
            lane.gate.pause(wait, rand::random());
            lane.control.pause_intake(wait, PauseCause::Provider, WaitReason::ProviderPaused.into());
        }
        Some(PauseRequest::Lane { wait, cause }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), %cause, "lane paused");
            lane.meter.record_decision(LaneDecision::new(DecisionKind::Paused, &cause.to_string()));
            lane.control.pause_sending(wait, by, cause);
        }
        Some(PauseRequest::Intake { wait, fault }) => local_faults::pause_lane(lane, wait, &fault),
        None => {}
    }
}
