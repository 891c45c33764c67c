//! A new payment that need not wait for anything: it is recorded and its first request written down in one commit, once it
//! has its permit.
//!
//! Refuses whatever the ledger may know more of: a redelivery, a payment with a time of its own, a lane where repeated
//! messages come, a line that stands. Those are claimed first. Refuses to keep a payment unrecorded for long.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;

use super::permit::{PermitWait, acquire_request, wait_for_permit};
use super::send::{dispatch, on_begin_failed};
use super::{ClaimedJob, ProviderCall};
use crate::domain::group_commit::{MAX_DELAY, delay_before_send};
use crate::domain::job::Job;
use crate::domain::permit_protocol::CallKind;
use crate::faults::{self, CrashPoint};
use crate::ledger::{BatchOptions, Claimed, FencedWrite, LeaseToken, NewJobAttempt};
use crate::queue::message::Decoded;
use crate::telemetry::spans;
use crate::worker::active_jobs::LEASE;
use crate::worker::intake::DeliveryAction;
use crate::worker::lane::LaneContext;
use crate::worker::meter::ReturnReason;
use crate::worker::scheduler::{EgressRule, WorkerSlot};

/// A payment that has no turn by then is recorded, so that people see it wait.
const UNRECORDED_MAX: Duration = Duration::from_millis(500);
/// A permit that takes longer is not to be had at once.
const PERMIT_MAX: Duration = Duration::from_millis(50);
/// After a message of a known payment its like are expected for so long: each would take a turn and a write in vain.
const DUPLICATES_EXPECTED_FOR: Duration = Duration::from_secs(1);

/// Whether messages of known payments have come to a lane lately.
#[derive(Debug, Default)]
pub struct Duplicates(Mutex<Option<Instant>>);

impl Duplicates {
    fn are_expected(&self) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < DUPLICATES_EXPECTED_FOR)
    }

    /// A message of a known payment has come.
    pub fn record(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

/// Where a payment waits that must be claimed first: it keeps its place meanwhile.
pub struct Reservation<'a> {
    pub(super) slot: BoxFuture<'a, Option<WorkerSlot>>,
    /// The permit for its charge, if it has been asked for.
    pub(super) permit: Option<BoxFuture<'a, PermitWait>>,
}

/// How long recording such a payment may wait for company. One that has asked for its permit may have it already, and the
/// permit runs out; one without a place asks when it is recorded, and then stands in line if the line does.
pub fn batch_delay(place: Option<&Reservation<'_>>, line_moves: bool) -> Duration {
    let waits_anyway = place.map_or(!line_moves, |place| place.permit.is_none());
    if waits_anyway { MAX_DELAY } else { Duration::ZERO }
}

/// What must be claimed, and the place it has.
type ClaimNeeded<'a> = (Box<Decoded>, Option<Reservation<'a>>);

/// Sends a payment's first request without claiming the payment before; gives it back, untouched, where it must be claimed.
pub async fn record_and_send(
    lane: &LaneContext,
    decoded: Box<Decoded>,
    delivered_at: Instant,
) -> Result<DeliveryAction, ClaimNeeded<'_>> {
    let settings = lane.settings.borrow().clone();
    let has_own_time = decoded.job.not_before.is_some() || decoded.job.expires_at.is_some();
    if has_own_time || lane.duplicates.are_expected() || !lane.gate.is_open() || lane.stop.is_cancelled() {
        return Err((decoded, None));
    }
    // What cannot be built is told of where the payment is claimed.
    let frozen = timeout(UNRECORDED_MAX, settings.client.freeze(&decoded.job)).await;
    let Ok(Ok(request)) = frozen else { return Err((decoded, None)) };
    let mut turn = lane.scheduler.acquire_for(decoded.job.id.clone(), decoded.job.priority, EgressRule::Paced).boxed();
    let mine = tokio::select! {
        mine = timeout_at(delivered_at + UNRECORDED_MAX, &mut turn) => mine,
        () = lane.stop.cancelled() => Ok(None),
    };
    let mut mine = match mine {
        Ok(Some(mine)) => mine,
        Ok(None) => return Err((decoded, None)),
        Err(_) => return Err((decoded, Some(Reservation { slot: turn, permit: None }))),
    };
    let ask = acquire_request(&decoded.job, CallKind::Charge, &settings.provider, delivered_at);
    let mut pass = wait_for_permit(lane, decoded.job.id.clone(), ask).boxed();
    let permit = match timeout(PERMIT_MAX, &mut pass).instrument(spans::step("wait for a permit")).await {
        Ok(PermitWait::Granted(permit)) => permit,
        refused => {
            let pass = refused.map_or(pass, |refused| ready(refused).boxed());
            return Err((decoded, Some(Reservation { slot: ready(Some(mine)).boxed(), permit: Some(pass) })));
        }
    };
    let Some(turn) = lane.control.try_send() else {
        mine.refund();
        lane.meter.record_return(ReturnReason::Probing);
        return Err((decoded, None));
    };
    let hold = new_lease(&decoded.job);
    let Some(held) = lane.worker.active_jobs.try_insert(&hold) else {
        mine.refund();
        lane.meter.record_return(ReturnReason::NotNeeded);
        return Err((decoded, None));
    };
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _on_wire = lane.worker.active_jobs.begin_request();
    faults::crash(CrashPoint::AfterPermit);
    let owner = &lane.worker.options.owner;
    let (job, hash, timing) =
        (&decoded.job, decoded.hash, BatchOptions { lease: LEASE, max_batch_delay: delay_before_send(lead) });
    let first = NewJobAttempt { job, hash, lease: &hold, owner, options: timing, request: &request };
    let written = lane.worker.backends.ledger.record_and_begin(first);
    let written = written.instrument(spans::step("write the request down")).await;
    if matches!(written, Ok(FencedWrite::Stale)) {
        lane.duplicates.record();
        // Most likely it has waited and is to be sent now: by this permit, which a limit may have counted for good.
        let pass = Some(ready(PermitWait::Granted(permit)).boxed());
        return Err((decoded, Some(Reservation { slot: ready(Some(mine)).boxed(), permit: pass })));
    }
    let claimed_at = Instant::now();
    let job = ClaimedJob { job: decoded.job, claimed: Claimed::new_job(hold), active: held, delivered_at, claimed_at };
    if let Err(error) = written {
        return Ok(on_begin_failed(lane, &job, CallKind::Charge, permit, &error).await);
    }
    let call = ProviderCall::Charge(request);
    Ok(Box::pin(dispatch(lane, &settings, &job, (&call, 1), (permit, &turn, !lead.is_zero()))).await)
}

/// Nobody else's: whoever does not learn whether it was recorded must not take another's hold of the job for this one.
fn new_lease(job: &Job) -> LeaseToken {
    // Claims count on from here for as long as the job lives.
    LeaseToken { id: job.id.clone(), fence: rand::random_range(1 << 32..1 << 62) }
}

/// A place that is not used: nothing is sent for its payment now.
pub fn discard(lane: &LaneContext, place: Option<Reservation<'_>>) {
    return_permit(lane, place.and_then(|place| place.permit));
}

/// A permit that was asked for and is not used: it goes back if it is there already.
pub(super) fn return_permit(lane: &LaneContext, pass: Option<BoxFuture<'_, PermitWait>>) {
    if let Some(Some(PermitWait::Granted(_))) = pass.map(FutureExt::now_or_never) {
        lane.meter.record_return(ReturnReason::NotNeeded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recording_is_batched_only_without_a_permit() {
        let place = |pass| Reservation { slot: ready(None).boxed(), permit: pass };
        let (turn_alone, asked) = (place(None), place(Some(ready(PermitWait::Stopping).boxed())));
        for (place, line_moves, waits) in [
            (None, true, Duration::ZERO),
            (None, false, MAX_DELAY),
            (Some(&turn_alone), true, MAX_DELAY),
            (Some(&asked), true, Duration::ZERO),
            (Some(&asked), false, Duration::ZERO),
        ] {
            assert_eq!(batch_delay(place, line_moves), waits, "line moves: {line_moves}");
        }
    }
}
