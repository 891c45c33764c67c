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

use super::permit::{Pass, ask, permit};
use super::send::{not_written_down, written_down};
use super::{Call, JobInHand};
use crate::domain::company::{LONGEST, before_start};
use crate::domain::decision::CallKind;
use crate::domain::job::Job;
use crate::faults::{self, Point};
use crate::ledger::{Claimed, First, Hold, Timing, Written};
use crate::queue::message::Decoded;
use crate::telemetry::spans;
use crate::worker::in_hand::LEASE;
use crate::worker::intake::End;
use crate::worker::lane::LaneParts;
use crate::worker::meter::Returned;
use crate::worker::pool::{Pace, Turn};

/// A payment that has no turn by then is recorded, so that people see it wait.
const UNRECORDED_MAX: Duration = Duration::from_millis(500);
/// A permit that takes longer is not to be had at once.
const PERMIT_MAX: Duration = Duration::from_millis(50);
/// After a message of a known payment its like are expected for so long: each would take a turn and a write in vain.
const REPEATS_FOR: Duration = Duration::from_secs(1);

/// Whether messages of known payments have come to a lane lately.
#[derive(Debug, Default)]
pub struct Repeats(Mutex<Option<Instant>>);

impl Repeats {
    fn expected(&self) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < REPEATS_FOR)
    }

    /// A message of a known payment has come.
    pub fn came(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

/// Where a payment waits that must be claimed first: it keeps its place meanwhile.
pub struct Place<'a> {
    pub(super) turn: BoxFuture<'a, Option<Turn>>,
    /// The permit for its charge, if it has been asked for.
    pub(super) pass: Option<BoxFuture<'a, Pass>>,
}

/// How long recording such a payment may wait for company. One that has asked for its permit may have it already, and the
/// permit runs out; one without a place asks when it is recorded, and then stands in line if the line does.
pub fn records_within(place: Option<&Place<'_>>, line_moves: bool) -> Duration {
    let waits_anyway = place.map_or(!line_moves, |place| place.pass.is_none());
    if waits_anyway { LONGEST } else { Duration::ZERO }
}

/// What must be claimed, and the place it has.
type ToClaim<'a> = (Box<Decoded>, Option<Place<'a>>);

/// Sends a payment's first request without claiming the payment before; gives it back, untouched, where it must be claimed.
pub async fn send_new(lane: &LaneParts, decoded: Box<Decoded>, delivered_at: Instant) -> Result<End, ToClaim<'_>> {
    let settings = lane.settings.borrow().clone();
    let has_own_time = decoded.job.not_before.is_some() || decoded.job.expires_at.is_some();
    if has_own_time || lane.repeats.expected() || !lane.gate.moves() || lane.stop.is_cancelled() {
        return Err((decoded, None));
    }
    // What cannot be built is told of where the payment is claimed.
    let frozen = timeout(UNRECORDED_MAX, settings.client.freeze(&decoded.job)).await;
    let Ok(Ok(request)) = frozen else { return Err((decoded, None)) };
    let mut turn = lane.pool.turn_for(decoded.job.id.clone(), decoded.job.priority, Pace::Outflow).boxed();
    let mine = tokio::select! {
        mine = timeout_at(delivered_at + UNRECORDED_MAX, &mut turn) => mine,
        () = lane.stop.cancelled() => Ok(None),
    };
    let mut mine = match mine {
        Ok(Some(mine)) => mine,
        Ok(None) => return Err((decoded, None)),
        Err(_) => return Err((decoded, Some(Place { turn, pass: None }))),
    };
    let ask = ask(&decoded.job, CallKind::Charge, &settings.provider, delivered_at);
    let mut pass = permit(lane, decoded.job.id.clone(), ask).boxed();
    let permit = match timeout(PERMIT_MAX, &mut pass).instrument(spans::step("wait for a permit")).await {
        Ok(Pass::Granted(permit)) => permit,
        refused => {
            let pass = refused.map_or(pass, |refused| ready(refused).boxed());
            return Err((decoded, Some(Place { turn: ready(Some(mine)).boxed(), pass: Some(pass) })));
        }
    };
    let Some(turn) = lane.pauses.turn() else {
        mine.unused();
        lane.meter.permit_returned(Returned::Probing);
        return Err((decoded, None));
    };
    let hold = own_hold(&decoded.job);
    let Some(held) = lane.worker.in_hand.hold_new(&hold) else {
        mine.unused();
        lane.meter.permit_returned(Returned::NotNeeded);
        return Err((decoded, None));
    };
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _on_wire = lane.worker.in_hand.on_wire();
    faults::crash(Point::AfterPermit);
    let owner = &lane.worker.options.owner;
    let (job, hash, timing) = (&decoded.job, decoded.hash, Timing { lease: LEASE, may_wait: before_start(lead) });
    let first = First { job, hash, hold: &hold, owner, timing, request: &request };
    let written = lane.worker.engines.ledger.record_and_begin(first);
    let written = written.instrument(spans::step("write the request down")).await;
    if matches!(written, Ok(Written::Lost)) {
        lane.repeats.came();
        // Most likely it has waited and is to be sent now: by this permit, which a limit may have counted for good.
        let pass = Some(ready(Pass::Granted(permit)).boxed());
        return Err((decoded, Some(Place { turn: ready(Some(mine)).boxed(), pass })));
    }
    let claimed_at = Instant::now();
    let job = JobInHand { job: decoded.job, claimed: Claimed::new_job(hold), held, delivered_at, claimed_at };
    if let Err(error) = written {
        return Ok(not_written_down(lane, &job, CallKind::Charge, permit, &error).await);
    }
    let call = Call::Charge(request);
    Ok(Box::pin(written_down(lane, &settings, &job, (&call, 1), (permit, &turn, !lead.is_zero()))).await)
}

/// Nobody else's: whoever does not learn whether it was recorded must not take another's hold of the job for this one.
fn own_hold(job: &Job) -> Hold {
    // Claims count on from here for as long as the job lives.
    Hold { id: job.id.clone(), fence: rand::random_range(1 << 32..1 << 62) }
}

/// A place that is not used: nothing is sent for its payment now.
pub fn given_up(lane: &LaneParts, place: Option<Place<'_>>) {
    unused(lane, place.and_then(|place| place.pass));
}

/// A permit that was asked for and is not used: it goes back if it is there already.
pub(super) fn unused(lane: &LaneParts, pass: Option<BoxFuture<'_, Pass>>) {
    if let Some(Some(Pass::Granted(_))) = pass.map(FutureExt::now_or_never) {
        lane.meter.permit_returned(Returned::NotNeeded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recording_waits_for_company_only_where_no_permit_can_be_there() {
        let place = |pass| Place { turn: ready(None).boxed(), pass };
        let (turn_alone, asked) = (place(None), place(Some(ready(Pass::Stopping).boxed())));
        for (place, line_moves, waits) in [
            (None, true, Duration::ZERO),
            (None, false, LONGEST),
            (Some(&turn_alone), true, LONGEST),
            (Some(&asked), true, Duration::ZERO),
            (Some(&asked), false, Duration::ZERO),
        ] {
            assert_eq!(records_within(place, line_moves), waits, "line moves: {line_moves}");
        }
    }
}
