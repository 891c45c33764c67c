//! The steps of one job, in a fixed order:
//! permit and worker slot → request recorded → one request → permit released → outcome committed.
//!
//! The request is a charge or a look-up; the order is the same for both. A new payment may skip the claim, because
//! [`fast_path`] records it together with its request. The acknowledgement follows in [`super::intake`].

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tracing::Instrument as _;

pub(super) use self::backlog::review_changed_row;
use self::backlog::{refused_account_block, return_to_backlog, wait_for_lane};
pub use self::fast_path::{Duplicates, Reservation, batch_delay, discard, record_and_send};
pub(super) use self::permit::pause_cause;
use self::permit::{PermitWait, acquire_request, delay_refused, egress_request, record_refusal, wait_for_permit};
use self::record::{delay, release, transition};
use self::send::send;
use super::active_jobs::ActiveJob;
use super::backlog::FlowPlace;
use super::intake::DeliveryAction;
use super::lane::{LaneContext, LaneSettings};
use super::local_faults;
use super::meter::ReturnReason;
use crate::domain::disposition::{
    AttemptHistory, LOCAL_FAULT_PAUSE, LOST_HOLDERS_MAX, MISCONFIGURED_PAUSE, PreSend, SendObstacle, Transition,
    before_request, review_unless_lookup,
};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::Provider;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::PauseCause;
use crate::ledger::Claimed;
use crate::limiter::gate::{AcquireRequest, BlockReason, EgressRule};
use crate::provider::{FreezeError, FrozenRequest, LookupRequest};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;

pub(crate) mod backlog;
mod fast_path;
pub(crate) mod permit;
mod record;
mod send;

/// Delay of jobs whose lane must not send.
pub(crate) const LANE_PAUSED_DELAY: Duration = Duration::from_secs(5);

/// Delay of a job that got no worker slot at the egress rate in time.
pub const EGRESS_DELAY: Duration = Duration::from_secs(5);

/// How a claimed job came to this worker.
pub struct Arrival<'a> {
    pub at: Instant,
    /// Worker slot and permit that it keeps.
    pub reservation: Option<Reservation<'a>>,
    /// Set for a job of the backlog: it has no message.
    pub place: Option<FlowPlace>,
}

impl Arrival<'_> {
    #[must_use]
    pub fn now() -> Self {
        Self { at: Instant::now(), reservation: None, place: None }
    }
}

/// A job whose lease this process has.
pub struct ClaimedJob {
    pub job: Job,
    pub claimed: Claimed,
    pub active: ActiveJob,
    pub delivered_at: Instant,
    pub claimed_at: Instant,
    /// Set for a job that was claimed from the backlog: it has no message.
    pub place: Option<FlowPlace>,
}

impl ClaimedJob {
    /// The job as it was claimed at this moment.
    pub fn new(lane: &LaneContext, job: Job, claimed: Claimed, arrival: &mut Arrival<'_>) -> Self {
        Self {
            job,
            active: lane.worker.active_jobs.insert(claimed.lease.clone()),
            claimed,
            delivered_at: arrival.at,
            claimed_at: Instant::now(),
            place: arrival.place.take(),
        }
    }

    /// Whether the job can wait in the backlog. One of unknown outcome has its own way back.
    fn is_for_backlog(&self) -> bool {
        !self.claimed.maybe_charged
    }
}

/// The one request that a job is claimed for.
enum ProviderCall {
    Charge(FrozenRequest),
    Lookup(LookupRequest),
}

impl ProviderCall {
    fn kind(&self) -> CallKind {
        match self {
            Self::Charge(_) => CallKind::Charge,
            Self::Lookup(_) => CallKind::Lookup,
        }
    }

    fn egress_rule(&self, provider: &Provider) -> EgressRule {
        let is_paced = self.kind() == CallKind::Charge || provider.egress_counts_lookups();
        if is_paced { EgressRule::Paced } else { EgressRule::Exempt }
    }
}

/// Executes one claimed job as far as possible now, from its reservation if it has one.
pub async fn execute(lane: &LaneContext, job: &ClaimedJob, reservation: Option<Reservation<'_>>) -> DeliveryAction {
    let settings = lane.settings.borrow().clone();
    let call = match next_call(&settings, job).await {
        Ok(Ok(call)) => call,
        Ok(Err(next)) => {
            discard(lane, reservation);
            if job.claimed.lost_holders >= LOST_HOLDERS_MAX {
                let lost = job.claimed.lost_holders;
                tracing::error!(provider = %lane.name, job = %job.job.id, lost, "workers lost; job moves to review");
            }
            return transition(lane, job, next, "retry").await;
        }
        // Rare, and boxed so that the thousands of waiting jobs do not carry its memory.
        Err(error) => {
            discard(lane, reservation);
            return Box::pin(pause_unbuildable(lane, job, error)).await;
        }
    };
    if call.kind() == CallKind::Charge
        && let Some((block, reason)) = refused_account_block(lane, job)
    {
        discard(lane, reservation);
        return return_to_backlog(lane, job, ("account_refused", reason.into()), Some(block)).await;
    }
    let permit_wait = match (reservation, call.kind()) {
        (Some(Reservation(permit_wait)), CallKind::Charge) => permit_wait,
        (reservation, kind) => {
            discard(lane, reservation);
            let egress = egress_request(lane, call.egress_rule(&settings.provider), job.delivered_at);
            let acquire = acquire_request(&job.job, kind, &settings.provider, egress);
            let account_wait = if job.is_for_backlog() { acquire.account_wait } else { Duration::MAX };
            wait_for_permit(lane, job.job.id.clone(), AcquireRequest { account_wait, ..acquire }).boxed()
        }
    };
    let waiting = spans::step("wait for a permit");
    let waited = permit_wait.instrument(waiting.clone()).await;
    if let Some(place) = &job.place {
        place.release();
    }
    match waited {
        PermitWait::Granted(permit) => match transition_instead(lane, &call, job) {
            // Its time has passed while it waited. The transition may wait for the ledger; the permit must not.
            Some(next) => {
                drop(permit);
                lane.meter.record_return(ReturnReason::NotNeeded);
                transition(lane, job, next, "retry").await
            }
            None => match lane.control.try_send() {
                // Boxed because thousands wait for their permits and few send: only those need its memory.
                Some(permission) => Box::pin(send(lane, &settings, job, &call, (permit, &permission))).await,
                None => {
                    drop(permit);
                    lane.meter.record_return(ReturnReason::Probing);
                    wait_for_lane(lane, job, LANE_PAUSED_DELAY, ("probing", WaitReason::CircuitProbing.into())).await
                }
            },
        },
        PermitWait::Refused(refusal) => {
            record_refusal((lane, &settings.provider), &refusal, &waiting);
            // The rule may have been set while the job waited.
            let blocked = matches!(refusal.reason, BlockReason::AccountBlocked { .. });
            match blocked.then(|| transition_instead(lane, &call, job)).flatten() {
                Some(next) => transition(lane, job, next, "retry").await,
                None => delay_refused(lane, job, &refusal).await,
            }
        }
        PermitWait::NoWorkerSlot => wait_for_lane(lane, job, EGRESS_DELAY, ("egress", WaitReason::Egress.into())).await,
        PermitWait::LanePaused(cause) => wait_for_lane(lane, job, LANE_PAUSED_DELAY, ("lane_paused", cause)).await,
        PermitWait::Stopping => release(lane, job).await,
    }
}

/// Pauses the lane for a fault of its row, its secrets or its process.
async fn pause_unbuildable(lane: &LaneContext, job: &ClaimedJob, error: FreezeError) -> DeliveryAction {
    let fault = LocalFault::from(error);
    if !matches!(fault, LocalFault::Unbuildable(_)) {
        local_faults::pause_lane(lane, LOCAL_FAULT_PAUSE, &fault);
        return delay(lane, job, LANE_PAUSED_DELAY, (NOT_SENT, fault.wait())).await;
    }
    lane.control.pause_sending(MISCONFIGURED_PAUSE, PauseCause::Setup, fault.wait());
    local_faults::log(lane, &fault, "lane paused: the request cannot be built from the provider row");
    delay(lane, job, MISCONFIGURED_PAUSE, ("misconfigured", fault.wait())).await
}

/// Decision before a request; made when the job is claimed and again when its permit is granted.
fn pre_send(job: &ClaimedJob, provider: &Provider) -> PreSend {
    let since_claim = job.claimed_at.elapsed();
    let expired = job.claimed.expires_in.is_some_and(|left| left <= since_claim);
    let refused = provider.refuses_account(job.job.account_name());
    before_request(&attempt_history(job), &provider.retry_policy(), SendObstacle::of(refused, expired))
}

/// The request to make, or the transition that replaces it.
async fn next_call(settings: &LaneSettings, job: &ClaimedJob) -> Result<Result<ProviderCall, Transition>, FreezeError> {
    match pre_send(job, &settings.provider) {
        PreSend::Transition(next) => Ok(Err(next)),
        PreSend::LookUp => Ok(lookup_call(settings, job)),
        PreSend::Charge => {
            let fresh = match settings.client.freeze(&job.job).await {
                Err(FreezeError::Job(unfit)) => return Ok(on_request_mismatch(settings, job, &unfit.to_string())),
                fresh => fresh?,
            };
            let Some((frozen, _)) = &job.claimed.frozen_request else { return Ok(Ok(ProviderCall::Charge(fresh))) };
            let Some(difference) = request_mismatch(frozen, &fresh, job.claimed.maybe_charged) else {
                let credential_fingerprint = fresh.credential_fingerprint;
                return Ok(Ok(ProviderCall::Charge(FrozenRequest { credential_fingerprint, ..frozen.clone() })));
            };
            Ok(on_request_mismatch(settings, job, difference))
        }
    }
}

/// Transition or look-up for a job whose charge cannot be sent as recorded.
fn on_request_mismatch(settings: &LaneSettings, job: &ClaimedJob, problem: &str) -> Result<ProviderCall, Transition> {
    if !job.claimed.maybe_charged {
        let reason = format!("confirmed not charged; {problem}");
        return Err(Transition::Finalize { state: FinalState::Review, reason, reference: None });
    }
    let reason = format!("the outcome is unknown and {problem}");
    let next = review_unless_lookup(&attempt_history(job), &settings.provider.retry_policy(), &reason);
    next.map_or_else(|| lookup_call(settings, job), Err)
}

/// Why the frozen request is not sent again. A response from an address that the row no longer has says nothing about
/// this lane, but would pause it. Credentials may change while nothing can have been charged with the old ones.
fn request_mismatch(frozen: &FrozenRequest, fresh: &FrozenRequest, unknown: bool) -> Option<&'static str> {
    if !frozen.is_within_bounds() {
        return Some("the frozen request is larger than requests may be");
    }
    if (&frozen.method, &frozen.url) != (&fresh.method, &fresh.url) {
        return Some("the request is frozen for an address that the row no longer has (url or method changed)");
    }
    (unknown && frozen.credential_fingerprint != fresh.credential_fingerprint)
        .then_some("the credential has changed since")
}

fn lookup_call(settings: &LaneSettings, job: &ClaimedJob) -> Result<ProviderCall, Transition> {
    settings.client.lookup_request(&job.job).map(ProviderCall::Lookup).map_err(|problem| {
        let reason = format!("the outcome is unknown and the provider cannot be asked: {problem}");
        Transition::Finalize { state: FinalState::Review, reason, reference: None }
    })
}

/// The transition that replaces the request, decided again by the current row once the gate has answered.
fn transition_instead(lane: &LaneContext, call: &ProviderCall, job: &ClaimedJob) -> Option<Transition> {
    let provider = Arc::clone(&lane.settings.borrow().provider);
    match (pre_send(job, &provider), call) {
        (PreSend::Transition(next), _) => Some(next),
        (PreSend::LookUp, ProviderCall::Charge(_)) => {
            let reason = "waited too long to be sent again: the provider is asked";
            let reason = Wait::with_detail(WaitReason::Lookup, reason);
            Some(Transition::Retry { after: DELAY_STEPS[0], unknown: true, reason })
        }
        // A job that could be sent again is looked up instead where its request would differ.
        (PreSend::Charge | PreSend::LookUp, _) => None,
    }
}

/// History of the job until now, for the decision tables.
fn attempt_history(job: &ClaimedJob) -> AttemptHistory {
    let (claimed, since_claim) = (&job.claimed, job.claimed_at.elapsed());
    AttemptHistory {
        attempts: claimed.attempts,
        requests: claimed.last_attempt.saturating_sub(claimed.lookups),
        lookups: claimed.lookups,
        resend: claimed.resend,
        unknown: claimed.maybe_charged,
        age: claimed.age + since_claim,
        first_sent_age: claimed.frozen_request.as_ref().map(|(_, age)| *age + since_claim),
        unknown_age: claimed.unknown_age.map(|age| age + since_claim),
        throttle_generation: 1,
        lost_holders: claimed.lost_holders,
        probe: false,
    }
}
