//! Sends one request, from its permit to its outcome: records it, sends it at the permit's start, releases the permit,
//! and commits the outcome.
//!
//! Only a recorded request is sent, and one permit allows one request. See
//! `docs/decisions/0031-one-request-per-permit.md`.

use std::borrow::Cow;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::JobRun;
use super::commit::AttemptResult;
use super::prepare::ProviderCall;
use crate::domain::account_faults::{FaultScope, SetupSign};
use crate::domain::breaker::BreakerTransition;
use crate::domain::commit_memory::Progress;
use crate::domain::disposition::lookup::after_lookup;
use crate::domain::disposition::{AttemptHistory, PauseRequest, Refusals, Transition, after_outcome};
use crate::domain::job::{Job, JobField};
use crate::domain::outcome::{
    FinalState, LookupResult, Outcome, Refusal, Transmission, UnknownCause, redacted_reference_note,
};
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::delay_before_send;
use crate::domain::provider::Provider;
use crate::domain::sensitive::Sensitive;
use crate::domain::unconfirmed::judge;
use crate::domain::wait_reason::WaitReason;
use crate::faults::{self, CrashPoint};
use crate::fleet::report::PauseCause;
use crate::ledger::{AttemptEnd, BeginResult, LedgerError, LookupEnd, RequestTiming};
use crate::limiter::gate::{InFlightPermit, Permit, WorkerSlot};
use crate::provider::RequestResult;
use crate::queue::message::CardNumbers;
use crate::telemetry::spans;

use crate::worker::intake::DeliveryAction;
use crate::worker::lane::LaneContext;
use crate::worker::lane_control::SendPermission;
use crate::worker::log_throttle::pause_for_fault;
use crate::worker::meter::{DecisionKind, LaneDecision, ReturnReason};

const THROTTLED: &str = "the provider throttled requests that the limits allowed; pausing its quota";
const RECORDED_LATE: &str = "a request was recorded too late for its permit; nothing was sent, the job is retried";

/// A recorded request, with what it needs to be sent.
pub(super) struct BegunRequest<'a> {
    pub call: &'a ProviderCall,
    pub number: u32,
    pub permit: Permit,
    pub permission: &'a SendPermission,
    /// The start lay ahead when the permit was granted.
    pub is_ahead: bool,
}

/// A request that may be at the provider.
struct InFlightRequest {
    permit: InFlightPermit,
    began: Instant,
}

/// A charge that ended, with what the lane has learned from it.
struct AnsweredCharge {
    number: u32,
    history: AttemptHistory,
    trouble: Option<FaultScope>,
    response: JudgedResponse<Outcome>,
}

/// The provider's response, and which part of it is not stored.
struct JudgedResponse<T> {
    result: RequestResult<T>,
    withheld: Option<Sensitive>,
}

/// The times of a request whose permit starts after this lead.
pub(super) fn request_timing(permit: &Permit, lead: Duration) -> RequestTiming {
    let response_within = permit.answer_before.saturating_duration_since(Instant::now());
    RequestTiming { response_within, max_batch_delay: delay_before_send(lead) }
}

impl JobRun<'_> {
    /// Records the request, sends it at most once, and commits its outcome.
    pub(super) async fn begin_and_send(
        &self,
        call: &ProviderCall,
        permit: Permit,
        permission: &SendPermission,
    ) -> DeliveryAction {
        let lead = permit.start_at.saturating_duration_since(Instant::now());
        let _in_flight = self.lane.worker.active_jobs.begin_request();
        faults::crash(CrashPoint::AfterPermit);
        let (ledger, lease) = (&self.lane.worker.backends.ledger, &self.active.lease);
        let timing = request_timing(&permit, lead);
        let writing = spans::step("write the request down");
        let begin_result = match call {
            ProviderCall::Charge(request) => ledger.begin_attempt(lease, request, timing).instrument(writing).await,
            ProviderCall::Lookup(_) => ledger.begin_lookup(lease, timing.response_within).instrument(writing).await,
        };
        let number = match begin_result {
            Ok(BeginResult::Attempt(number)) => number,
            Ok(BeginResult::Stale) => {
                self.lane.meter.record_return(ReturnReason::TakenOver);
                return DeliveryAction::Requeue;
            }
            Err(error) => return self.on_begin_failed(call.kind(), permit, &error).await,
        };
        self.lane.worker.guard.remember(&self.lane.name, lease, number, Progress::Sent);
        self.send(BegunRequest { call, number, permit, permission, is_ahead: !lead.is_zero() }).await
    }

    /// Ends a request whose record failed: the commit is unknown, but nothing was sent.
    pub(super) async fn on_begin_failed(&self, kind: CallKind, permit: Permit, error: &LedgerError) -> DeliveryAction {
        drop(permit);
        self.lane.meter.record_return(ReturnReason::LedgerUnavailable);
        tracing::warn!(job = %self.job.id, %error, "failed to record a request; nothing was sent, the job is retried");
        self.abort_attempt(kind, error).await
    }

    /// Sends a recorded request at its permit's start, and commits its outcome.
    pub(super) async fn send(&self, request: BegunRequest<'_>) -> DeliveryAction {
        let action = self.send_and_commit(request).await;
        self.lane.backlog.record_free_slot();
        action
    }

    async fn send_and_commit(&self, request: BegunRequest<'_>) -> DeliveryAction {
        let BegunRequest { call, number, mut permit, permission, is_ahead } = request;
        let lane = self.lane;
        permit.mark_persisted();
        // Free for the next job once this one's outcome is recorded, or its connection is watched.
        let worker_slot = permit.take_worker_slot();
        if number == 1 {
            record_missing_fields(lane, &self.settings.provider, &self.job);
        }
        faults::crash(CrashPoint::AfterSending);
        let starting = spans::step("wait for the permit's start");
        lane.worker.start_timer.sleep_until(permit.start_at).instrument(starting).await;
        let (began, lateness) = (Instant::now(), permit.start_at.elapsed());
        if call.kind() == CallKind::Charge
            && let Err(held_back) = lane.worker.guard.admit_charge(&self.settings.provider)
        {
            drop(permit);
            return self.finish_held_back(number, held_back).await;
        }
        let Ok(permit) = permit.begin() else { return self.finish_late(call.kind(), number).await };
        lane.control.record_on_time();
        let started = lane.meter.request_started(lateness, is_ahead);
        // A start in the past says nothing: it was late before it could be recorded.
        if is_ahead {
            lane.worker.intake_turns.record_start(lateness);
        }
        let answer_before = permit.answer_before;
        let in_flight = InFlightRequest { permit, began };
        match call {
            ProviderCall::Charge(request) => {
                let no_response = Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None };
                let span = spans::request("charge");
                let sent = self.settings.client.send(&self.job, request);
                let sent = faults::on_the_wire(request, sent).instrument(span.clone());
                let answer = in_flight.response(lane, sent, no_response, Outcome::transmission).await;
                spans::record_response(&span, answer.outcome.code(), answer.status);
                drop(started);
                let change = lane.control.observe(&self.job.id, &answer.outcome, began, rand::random());
                record_breaker_transition(lane, change, &answer.outcome);
                let trouble = lane.control.judge_refusal(&self.job, &answer.outcome, began);
                let passed = answer.outcome.passed_rate_limit();
                let is_refused = SetupSign::from_outcome(&answer.outcome) == Some(SetupSign::Misconfigured);
                let history = AttemptHistory {
                    throttle_generation: throttle_generation(lane, CallKind::Charge, began, passed),
                    probe: permission.is_probe(),
                    refusals: if is_refused { self.count_refusal().await } else { Refusals::default() },
                    ..self.attempt_history()
                };
                let response = self.redact(answer, Outcome::redact);
                let answered = AnsweredCharge { number, history, trouble, response };
                self.finish_charge(answered, answer_before, worker_slot).await
            }
            ProviderCall::Lookup(question) => {
                let no_response = LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after: None };
                let span = spans::request("look-up");
                let asked = self.settings.client.look_up(question).instrument(span.clone());
                let answer = in_flight.response(lane, asked, no_response, LookupResult::transmission).await;
                spans::record_response(&span, answer.outcome.code(), answer.status);
                drop(started);
                faults::crash(CrashPoint::AfterLookup);
                let passed = answer.outcome.passed_rate_limit();
                let throttle_generation = throttle_generation(lane, CallKind::Lookup, began, passed);
                let history = AttemptHistory { throttle_generation, ..self.attempt_history() };
                self.finish_lookup(number, history, self.redact(answer, LookupResult::redact)).await
            }
        }
    }

    /// Ends a request that was recorded too late for its permit.
    async fn finish_late(&self, kind: CallKind, number: u32) -> DeliveryAction {
        let lane = self.lane;
        lane.meter.record_return(ReturnReason::DeadlineMissed);
        if lane.worker.log_throttle.admits(lane.name.as_str(), RECORDED_LATE, "deadline") {
            tracing::warn!(provider = %lane.name, "{RECORDED_LATE}");
        }
        lane.control.record_deadline_miss();
        self.finish_unsent(kind, number).await
    }

    /// Takes out of a response what is not stored, and logs that.
    fn redact<T>(
        &self,
        mut result: RequestResult<T>,
        redact: fn(&mut T, CardNumbers) -> Option<Sensitive>,
    ) -> JudgedResponse<T> {
        let withheld = redact(&mut result.outcome, self.lane.worker.options.card_numbers).inspect(|what| {
            let (provider, job, found) = (&self.lane.name, &self.job.id, what.describe());
            tracing::warn!(%provider, %job, found, "a text of the provider's response is not stored");
        });
        JudgedResponse { result, withheld }
    }

    /// Follows the response to a charge. An unconfirmed refusal pauses at once; what it means for its payment is known
    /// at its deadline.
    async fn finish_charge(
        &self,
        charge: AnsweredCharge,
        answer_before: Instant,
        worker_slot: Option<WorkerSlot>,
    ) -> DeliveryAction {
        let AnsweredCharge { number, mut history, trouble, response } = charge;
        let JudgedResponse { result: RequestResult { mut outcome, status, watch, .. }, withheld } = response;
        if outcome.may_have_charged() {
            history.first_sent_age.get_or_insert_default();
        }
        let policy = self.settings.provider.retry_policy();
        let mut disposition = after_outcome(&outcome, &history, &policy, rand::random());
        let refusal = outcome.refusal();
        if matches!(refusal, Some(Refusal::Throttled { .. })) {
            self.lane.meter.record_throttle();
        }
        let is_refused = SetupSign::from_outcome(&outcome) == Some(SetupSign::Misconfigured);
        let by = if is_refused { PauseCause::Setup } else { PauseCause::Provider };
        let pause = match disposition.pause.take() {
            // Where only its account or itself is refused, the lane goes on.
            Some(_) if is_refused && trouble != Some(FaultScope::Lane) => None,
            Some(PauseRequest::Lane { wait, cause }) if is_refused => {
                Some(PauseRequest::Lane { wait, cause: self.naming_this_payment(cause) })
            }
            pause => pause,
        };
        apply_pause(self.lane, pause, by, CallKind::Charge, history.throttle_generation);
        let deduplicates = policy.idempotency_retention.is_some();
        if let (Outcome::Unconfirmed { refusal, status }, Some(watch), true) = (&outcome, watch, deduplicates) {
            // The limits hold the slot until then; the next job may use the worker's.
            drop(worker_slot);
            let answered = Instant::now();
            let evidence = watch.evidence_until(answer_before).await;
            outcome = judge(*refusal, *status, deduplicates, evidence);
            disposition = after_outcome(&outcome, &history, &policy, rand::random());
            disposition.transition.shorten(answered.elapsed());
        }
        if SetupSign::from_outcome(&outcome) == Some(SetupSign::Misconfigured) {
            self.report_refusal(&disposition.transition);
        }
        let (code, detail) = (outcome.code(), outcome.detail());
        let end = AttemptEnd { number, outcome: code, status, detail, counts: disposition.counts_attempt };
        let next = note_redaction(disposition.transition, withheld);
        self.commit_result(AttemptResult::Charge(end), next, code).await
    }

    async fn finish_lookup(
        &self,
        number: u32,
        history: AttemptHistory,
        answer: JudgedResponse<LookupResult>,
    ) -> DeliveryAction {
        let JudgedResponse { result: RequestResult { outcome, status, .. }, withheld } = answer;
        if let LookupResult::Misconfigured { status } = outcome {
            tracing::error!(
                provider = %self.lane.name,
                job = %self.job.id,
                status,
                "the provider refused a look-up: check the credentials in `headers` of its row"
            );
        }
        let policy = self.settings.provider.retry_policy();
        let disposition = after_lookup(&outcome, &history, &policy, rand::random());
        if matches!(outcome, LookupResult::Throttled { .. }) {
            self.lane.meter.record_throttle();
        }
        let generation = history.throttle_generation;
        apply_pause(self.lane, disposition.pause, PauseCause::Provider, CallKind::Lookup, generation);
        let (code, detail) = (outcome.code(), outcome.detail());
        let end = LookupEnd { number, outcome: code, status, detail, grants_resend: disposition.grants_resend };
        let next = note_redaction(disposition.transition, withheld);
        self.commit_result(AttemptResult::Lookup(end), next, code).await
    }
}

impl InFlightRequest {
    /// Waits for the response to the permit's one request, and releases the permit by how far the request got.
    async fn response<T>(
        self,
        lane: &LaneContext,
        request: impl Future<Output = RequestResult<T>>,
        no_response: T,
        transmission: fn(&T) -> Transmission,
    ) -> RequestResult<T> {
        let Self { permit, began } = self;
        // The row's own timeout ends a request before this, unless the row changed since the permit was requested.
        let answer_before = permit.answer_before;
        let answer = timeout_at(answer_before, request).await;
        let answer = answer.unwrap_or(RequestResult {
            outcome: no_response,
            status: None,
            response_age: Duration::ZERO,
            watch: None,
        });
        faults::crash(CrashPoint::AfterAnswer);
        let transmission = match transmission(&answer.outcome) {
            // It may answer an earlier request.
            Transmission::Responded if answer.watch.is_some() => Transmission::NoResponse,
            known => known,
        };
        match transmission {
            Transmission::NotSent => permit.release_unused(),
            Transmission::NoResponse => {
                permit.release_unknown();
                lane.meter.record_hold(answer_before.saturating_duration_since(began));
            }
            Transmission::Responded => {
                let read_at = Instant::now() - answer.response_age;
                permit.release_used(read_at);
                lane.meter.record_hold(read_at.saturating_duration_since(began));
            }
        }
        lane.meter.record_response(answer.status, transmission != Transmission::NotSent, began.elapsed());
        answer
    }
}

/// Counts a job that limits or rules of its provider do not apply to because it lacks their field; once per job, with
/// its first request.
fn record_missing_fields(lane: &LaneContext, provider: &Provider, job: &Job) {
    let lacks = |field: &JobField| !job.has(*field) && provider.counts_by(*field);
    for field in JobField::ALL.into_iter().filter(lacks) {
        lane.meter.without(field).inc();
    }
}

fn record_breaker_transition(lane: &LaneContext, change: Option<BreakerTransition>, outcome: &Outcome) {
    let decision = match change {
        Some(BreakerTransition::Opens { open_for }) => {
            let words = format!(
                "{}: the provider is down, nothing is sent for {:.1} s",
                outcome.code(),
                open_for.as_secs_f64()
            );
            LaneDecision { merge_key: Cow::Borrowed(""), ..LaneDecision::new(DecisionKind::BreakerOpened, &words) }
        }
        Some(BreakerTransition::Closes) => LaneDecision::new(DecisionKind::BreakerClosed, "the provider answers again"),
        None => return,
    };
    lane.meter.record_decision(decision);
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
fn throttle_generation(lane: &LaneContext, kind: CallKind, began: Instant, passed: bool) -> u32 {
    if passed {
        lane.control.record_passed(kind, began);
    }
    lane.control.throttle_generation(kind, began)
}

fn apply_pause(lane: &LaneContext, pause: Option<PauseRequest>, by: PauseCause, kind: CallKind, generation: u32) {
    match pause {
        Some(PauseRequest::Quota { wait }) => {
            lane.control.record_throttle(kind, generation, wait);
            if lane.worker.log_throttle.admits(lane.name.as_str(), THROTTLED, "429") {
                tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), "{THROTTLED}");
            }
            let words = format!(
                "the provider throttled requests that the limits allowed; nothing is sent for {:.1} s",
                wait.as_secs_f64()
            );
            lane.meter.record_decision(LaneDecision {
                merge_key: Cow::Borrowed(""),
                ..LaneDecision::new(DecisionKind::Throttled, &words)
            });
            lane.gate.pause(wait, rand::random());
            lane.control.pause_claims(wait, PauseCause::Provider, WaitReason::ProviderPaused.into());
        }
        Some(PauseRequest::Lane { wait, cause }) => {
            tracing::warn!(provider = %lane.name, wait_ms = wait.as_millis(), %cause, "lane paused");
            lane.meter.record_decision(LaneDecision::new(DecisionKind::Paused, &cause.to_string()));
            lane.control.pause_sending(wait, by, cause);
        }
        Some(PauseRequest::Claims { wait, fault }) => pause_for_fault(lane, wait, &fault),
        None => {}
    }
}
