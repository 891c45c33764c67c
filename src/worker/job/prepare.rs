//! The decision what a job does next: its charge, a look-up, or a new state without a request.
//!
//! It is made when the job is claimed, and again by the row in force once the gate has answered.

use std::sync::Arc;

use super::{JobRun, LANE_PAUSED_DELAY, UNSENT_DELAY, WaitCause};
use crate::domain::disposition::{
    AttemptHistory, LOCAL_FAULT_PAUSE, LOST_HOLDERS_MAX, PreSend, Refusals, SendObstacle, Transition, before_request,
    review_unless_lookup,
};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::Provider;
use crate::domain::sum::{SentSum, UnsupportedSum};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::limiter::gate::EgressRule;
use crate::provider::{FreezeError, FrozenRequest, LookupRequest};
use crate::worker::intake::DeliveryAction;
use crate::worker::log_throttle::pause_for_fault;

/// The one request that a job is claimed for.
pub(super) enum ProviderCall {
    Charge(FrozenRequest),
    Lookup(LookupRequest),
}

impl ProviderCall {
    pub fn kind(&self) -> CallKind {
        match self {
            Self::Charge(_) => CallKind::Charge,
            Self::Lookup(_) => CallKind::Lookup,
        }
    }

    pub fn egress_rule(&self, provider: &Provider) -> EgressRule {
        let is_paced = self.kind() == CallKind::Charge || provider.egress_counts_lookups();
        if is_paced { EgressRule::Paced } else { EgressRule::Exempt }
    }
}

/// What a job does next.
pub(super) enum Prepared {
    Call(ProviderCall),
    /// No request is made.
    Transition(Transition),
    /// The request cannot be built, for a fault of the row, its secrets or this process.
    Unbuildable(FreezeError),
}

impl JobRun<'_> {
    pub(super) async fn prepare(&self) -> Prepared {
        match self.pre_send(&self.settings.provider) {
            PreSend::Transition(next) => {
                if self.claimed.lost_holders >= LOST_HOLDERS_MAX {
                    let (provider, job, lost) = (&self.lane.name, &self.job.id, self.claimed.lost_holders);
                    tracing::error!(%provider, %job, lost, "workers lost; job moves to review");
                }
                Prepared::Transition(next)
            }
            PreSend::LookUp => self.look_up(),
            PreSend::Charge => self.charge().await,
        }
    }

    /// The decision tables' answer for the job now.
    fn pre_send(&self, provider: &Provider) -> PreSend {
        let expired = self.claimed.expires_in.is_some_and(|left| left <= self.claimed_at.elapsed());
        let refused = provider.refuses_account(self.job.account_name());
        let unsupported = provider.amounts.sum_of(&self.job).err();
        let obstacle = SendObstacle::of(refused, expired, unsupported);
        before_request(&self.attempt_history(), &provider.retry_policy(), obstacle)
    }

    /// The sum of the next request. An earlier one that may have charged is repeated as it was.
    fn sum(&self) -> Result<SentSum, UnsupportedSum> {
        match &self.claimed.frozen_request {
            Some((frozen, _)) if self.claimed.maybe_charged => Ok(frozen.sum),
            _ => self.settings.provider.amounts.sum_of(&self.job),
        }
    }

    async fn charge(&self) -> Prepared {
        let sum = match self.sum() {
            Ok(sum) => sum,
            Err(unsupported) => return self.on_request_mismatch(unsupported.describe()),
        };
        let fresh = match self.settings.client.freeze(&self.job, sum).await {
            Ok(fresh) => fresh,
            Err(FreezeError::Job(unfit)) => return self.on_request_mismatch(&unfit.to_string()),
            Err(error) => return Prepared::Unbuildable(error),
        };
        let Some((frozen, _)) = &self.claimed.frozen_request else {
            return Prepared::Call(ProviderCall::Charge(fresh));
        };
        if let Some(difference) = request_mismatch(frozen, &fresh, self.claimed.maybe_charged) {
            return self.on_request_mismatch(difference);
        }
        let credential_fingerprint = fresh.credential_fingerprint;
        Prepared::Call(ProviderCall::Charge(FrozenRequest { credential_fingerprint, ..frozen.clone() }))
    }

    /// Transition or look-up of a job whose charge cannot be sent as recorded.
    fn on_request_mismatch(&self, problem: &str) -> Prepared {
        if !self.claimed.maybe_charged {
            let reason = format!("confirmed not charged; {problem}");
            return Prepared::Transition(Transition::Finalize { state: FinalState::Review, reason, reference: None });
        }
        let reason = format!("the outcome is unknown and {problem}");
        let policy = self.settings.provider.retry_policy();
        let next = review_unless_lookup(&self.attempt_history(), &policy, &reason);
        next.map_or_else(|| self.look_up(), Prepared::Transition)
    }

    fn look_up(&self) -> Prepared {
        let sum = self.sum().map_err(|unsupported| unsupported.describe().to_owned());
        match sum.and_then(|sum| self.settings.client.lookup_request(&self.job, sum)) {
            Ok(request) => Prepared::Call(ProviderCall::Lookup(request)),
            Err(problem) => {
                let reason = format!("the outcome is unknown and the provider cannot be asked: {problem}");
                Prepared::Transition(Transition::Finalize { state: FinalState::Review, reason, reference: None })
            }
        }
    }

    /// The transition that replaces the request, decided again by the current row once the gate has answered.
    pub(super) fn transition_instead(&self, call: &ProviderCall) -> Option<Transition> {
        let provider = Arc::clone(&self.lane.settings.borrow().provider);
        match (self.pre_send(&provider), call) {
            (PreSend::Transition(next), _) => Some(next),
            (PreSend::LookUp, ProviderCall::Charge(_)) => {
                let reason = "waited too long to be sent again: the provider is asked";
                let reason = Wait::with_detail(WaitReason::Lookup, reason);
                Some(Transition::Retry { after: UNSENT_DELAY, unknown: true, reason })
            }
            // A job that could be sent again is looked up instead where its request would differ.
            (PreSend::Charge | PreSend::LookUp, _) => None,
        }
    }

    /// Delays a job for a fault of its row or its secrets, and pauses the lane for one of its process.
    pub(super) async fn on_unbuildable(&self, error: FreezeError) -> DeliveryAction {
        let fault = LocalFault::from(error);
        if !fault.is_of_setup() {
            pause_for_fault(self.lane, LOCAL_FAULT_PAUSE, &fault);
            return self.delay(LANE_PAUSED_DELAY, WaitCause::new(NOT_SENT, fault.wait())).await;
        }
        self.delay_unbuildable(fault).await
    }

    /// History of the job until now, for the decision tables.
    pub(super) fn attempt_history(&self) -> AttemptHistory {
        let (claimed, since_claim) = (&self.claimed, self.claimed_at.elapsed());
        AttemptHistory {
            attempts: claimed.attempts,
            requests: claimed.last_attempt.saturating_sub(claimed.lookups),
            lookups: claimed.lookups,
            resend: claimed.resend,
            unknown: claimed.maybe_charged,
            age: self.age(),
            first_sent_age: claimed.frozen_request.as_ref().map(|(_, age)| *age + since_claim),
            unknown_age: claimed.unknown_age.map(|age| age + since_claim),
            throttle_generation: 1,
            lost_holders: claimed.lost_holders,
            probe: false,
            refusals: Refusals::default(),
        }
    }
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
    if frozen.sum != fresh.sum {
        return Some("the request is frozen with another sum than the row sends (decimals changed)");
    }
    (unknown && frozen.credential_fingerprint != fresh.credential_fingerprint)
        .then_some("the credential has changed since")
}
