//! One job through its steps, in the order that is never changed:
//! turn → permit → written down → one request → permit settled → outcome committed.
//!
//! The request is a charge or a look-up; the order is the same for both. A new payment may skip the claim, because
//! [`first`] records it with its request. Refuses to reorder and refuses to guess. The acknowledgement comes after all of
//! this, in [`super::intake`].

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use self::first::unused;
pub use self::first::{Place, Repeats, given_up, records_within, send_new};
pub(super) use self::permit::held_by;
use self::permit::{Pass, ask, permit, refused, tell_refused};
use self::record::{give_back, park, put_down_next};
use self::send::send;
use super::in_hand::Held;
use super::intake::End;
use super::lane::{LaneParts, LaneSettings, patience};
use super::local_faults;
use super::meter::Returned;
use super::pool::Pace;
use crate::domain::decision::CallKind;
use crate::domain::disposition::{
    History, LOCAL_FAULT_PAUSE, LOST_HOLDERS_MAX, MISCONFIGURED_PAUSE, Next, Step, ask_or_review, before_request,
};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{FinalState, NOT_SENT};
use crate::domain::provider::Provider;
use crate::fleet::report::By;
use crate::ledger::Claimed;
use crate::provider::{FreezeError, FrozenRequest, Question};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;

mod first;
mod permit;
mod record;
mod send;

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

    fn pace(&self, provider: &Provider) -> Pace {
        let is_paced = self.kind() == CallKind::Charge || provider.paces_lookups();
        if is_paced { Pace::Outflow } else { Pace::Free }
    }
}

/// Takes one claimed job as far as it can go now, from the place where it waits already, if it does.
pub async fn execute(lane: &LaneParts, job: &JobInHand, place: Option<Place<'_>>) -> End {
    let settings = lane.settings.borrow().clone();
    let call = match next_call(&settings, job).await {
        Ok(Ok(call)) => call,
        Ok(Err(next)) => {
            given_up(lane, place);
            if job.claimed.lost_holders >= LOST_HOLDERS_MAX {
                let lost = job.claimed.lost_holders;
                tracing::error!(provider = %lane.name, job = %job.job.id, lost, "workers may die of a job; it goes to review");
            }
            return put_down_next(lane, job, next, "again").await;
        }
        // Seldom, so those who wait by the thousand pay nothing for its room.
        Err(error) => {
            given_up(lane, place);
            return Box::pin(unbuildable(lane, job, error)).await;
        }
    };
    let (turn, pass) = place.map_or((None, None), |place| (Some(place.turn), place.pass));
    let pace = call.pace(&settings.provider);
    let turn = turn.unwrap_or_else(|| lane.pool.turn_for(job.job.id.clone(), job.job.priority, pace).boxed());
    let waiting = turn.instrument(spans::step("wait for a turn"));
    let turn = tokio::select! {
        turn = timeout_at(job.delivered_at + patience(&settings.provider), waiting) => turn,
        () = lane.stop.cancelled() => Ok(None),
    };
    let mut turn = match turn {
        Ok(Some(turn)) => turn,
        Ok(None) => return give_back(lane, job).await,
        Err(_) => return park(lane, job, BUCKET_WAIT, ("outflow", "waits for a place in the steady outflow")).await,
    };
    let pass = match (pass, call.kind()) {
        (Some(pass), CallKind::Charge) => pass,
        (pass, kind) => {
            unused(lane, pass);
            let ask = ask(&job.job, kind, &settings.provider, job.delivered_at);
            permit(lane, job.job.id.clone(), ask).boxed()
        }
    };
    let waiting = spans::step("wait for a permit");
    match pass.instrument(waiting.clone()).await {
        Pass::Granted(permit) => match no_longer(&call, job, &settings.provider) {
            // Its time has passed while it waited. Putting it down may wait for the ledger, and the permit not with it.
            Some(next) => {
                drop(permit);
                turn.unused();
                lane.meter.permit_returned(Returned::NotNeeded);
                put_down_next(lane, job, next, "again").await
            }
            None => match lane.pauses.turn() {
                // Thousands wait for their permits, few send: those alone pay for the room that it takes.
                Some(turn) => Box::pin(send(lane, &settings, job, &call, (permit, &turn))).await,
                None => {
                    drop(permit);
                    turn.unused();
                    lane.meter.permit_returned(Returned::Probing);
                    let reason = "another job finds out whether the provider is up again";
                    park(lane, job, HELD_WAIT, ("probing", reason)).await
                }
            },
        },
        Pass::Refused(refusal) => {
            turn.unused();
            tell_refused((lane, &settings.provider), &refusal, &waiting);
            refused(lane, job, &refusal).await
        }
        Pass::Held(cause) => {
            turn.unused();
            park(lane, job, HELD_WAIT, ("held", &cause)).await
        }
        Pass::Stopping => give_back(lane, job).await,
    }
}

/// The lane rests for what is wrong with its row, its secrets or its process.
async fn unbuildable(lane: &LaneParts, job: &JobInHand, error: FreezeError) -> End {
    let fault = LocalFault::from(error);
    let reason = fault.to_string();
    let LocalFault::Unbuildable(problem) = &fault else {
        local_faults::rest(lane, LOCAL_FAULT_PAUSE, &fault);
        return park(lane, job, HELD_WAIT, (NOT_SENT, &reason)).await;
    };
    lane.pauses.stop_sending(MISCONFIGURED_PAUSE, By::Setup, problem);
    local_faults::log(lane, &fault, "the lane rests");
    park(lane, job, MISCONFIGURED_PAUSE, ("misconfigured", &reason)).await
}

/// What is done with a job as things stand now; asked when it is taken and again when its permit has come.
fn step(job: &JobInHand, provider: &Provider) -> Step {
    let since_claim = job.claimed_at.elapsed();
    let expired = job.claimed.expires_in.is_some_and(|left| left <= since_claim);
    before_request(&history(job), &provider.retry_policy(), expired)
}

/// The request to make, or what becomes of the job without one.
async fn next_call(settings: &LaneSettings, job: &JobInHand) -> Result<Result<Call, Next>, FreezeError> {
    match step(job, &settings.provider) {
        Step::Put(next) => Ok(Err(next)),
        Step::Ask => Ok(question(settings, job)),
        Step::Charge => {
            let fresh = match settings.client.freeze(&job.job).await {
                Err(FreezeError::Job(unfit)) => return Ok(not_as_frozen(settings, job, &unfit.to_string())),
                fresh => fresh?,
            };
            let Some((frozen, _)) = &job.claimed.frozen else { return Ok(Ok(Call::Charge(fresh))) };
            let Some(difference) = difference(frozen, &fresh, job.claimed.unknown) else {
                let credential_fingerprint = fresh.credential_fingerprint;
                return Ok(Ok(Call::Charge(FrozenRequest { credential_fingerprint, ..frozen.clone() })));
            };
            Ok(not_as_frozen(settings, job, difference))
        }
    }
}

/// What becomes of a job whose charge cannot be sent as it should be.
fn not_as_frozen(settings: &LaneSettings, job: &JobInHand, problem: &str) -> Result<Call, Next> {
    if !job.claimed.unknown {
        let reason = format!("surely not charged; {problem}");
        return Err(Next::Settle { state: FinalState::Review, reason, reference: None });
    }
    let reason = format!("the outcome is unknown and {problem}");
    let next = ask_or_review(&history(job), &settings.provider.retry_policy(), &reason);
    next.map_or_else(|| question(settings, job), Err)
}

/// Why the frozen request is not sent again. At an address that the row no longer has, nobody's answer says anything of
/// this lane, and yet it would rest it. Credentials may change while nothing can have been charged with the old ones.
fn difference(frozen: &FrozenRequest, fresh: &FrozenRequest, unknown: bool) -> Option<&'static str> {
    if !frozen.fits() {
        return Some("the frozen request is larger than requests may be");
    }
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
        refusal_round: 1,
        lost_holders: claimed.lost_holders,
        probe: false,
    }
}
