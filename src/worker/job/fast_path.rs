//! The fast path of a new payment: the payment and its first request are recorded in one commit, once it has its
//! permit.
//!
//! Payments that the ledger may know are claimed first: a redelivery, or any payment of a lane with duplicates. So are
//! payments with a time of their own, and those whose gate has a wait queue. No payment stays unrecorded for long. See
//! `docs/decisions/0029-fast-path-for-new-payments.md`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;

use super::JobRun;
use super::acquire::{PermitWait, acquire_request, egress_request, wait_for_permit};
use super::prepare::ProviderCall;
use super::send::BegunRequest;
use crate::domain::job::Job;
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::{BATCH_DELAY_MAX, delay_before_send};
use crate::faults::{self, CrashPoint};
use crate::ledger::{BatchOptions, Claimed, FencedWrite, LeaseToken, NewJobAttempt};
use crate::limiter::gate::EgressRule;
use crate::queue::message::Decoded;
use crate::telemetry::spans;
use crate::worker::active_jobs::LEASE;
use crate::worker::intake::DeliveryAction;
use crate::worker::lane::LaneContext;
use crate::worker::meter::ReturnReason;

/// Longest wait of an unrecorded payment for its permit; then it is recorded, so that operators see it wait.
const UNRECORDED_MAX: Duration = Duration::from_millis(250);
/// Time for which more duplicates are expected after one: each would use a worker slot and a write in vain.
const DUPLICATES_EXPECTED_FOR: Duration = Duration::from_secs(1);

/// Whether messages of known payments have arrived in a lane lately.
#[derive(Debug, Default)]
pub struct Duplicates(Mutex<Option<Instant>>);

impl Duplicates {
    fn are_expected(&self) -> bool {
        let last = *self.0.lock();
        last.is_some_and(|last| last.elapsed() < DUPLICATES_EXPECTED_FOR)
    }

    /// Records that a message of a known payment has arrived.
    pub fn record(&self) {
        *self.0.lock() = Some(Instant::now());
    }
}

/// The requested permit of a payment that must be claimed first: it keeps its place in the queue meanwhile.
pub struct Reservation<'a>(pub(super) BoxFuture<'a, PermitWait>);

/// Batch delay of recording such a payment. A permit that it has requested may be granted already and expire. If it has
/// no reservation, it requests the permit after it is recorded, and may have to queue.
pub fn batch_delay(reservation: Option<&Reservation<'_>>, queue_moves: bool) -> Duration {
    if reservation.is_some() || queue_moves { Duration::ZERO } else { BATCH_DELAY_MAX }
}

/// What became of a payment that was not claimed first.
pub enum FirstTry<'a> {
    Finished(DeliveryAction),
    /// The payment, unchanged, and its reservation: it must be claimed.
    MustBeClaimed(Box<Decoded>, Option<Reservation<'a>>),
}

/// Sends a payment's first request without a claim before it.
pub async fn record_and_send(lane: &LaneContext, decoded: Box<Decoded>, delivered_at: Instant) -> FirstTry<'_> {
    let settings = lane.settings.borrow().clone();
    let waits_for_account = || lane.control.admit_charge(&decoded.job).is_some();
    if is_claimed_first(lane, &decoded.job) || waits_for_account() {
        return FirstTry::MustBeClaimed(decoded, None);
    }
    // A request that cannot be built is reported where the payment is claimed.
    let Ok(sum) = settings.provider.amounts.sum_of(&decoded.job) else {
        return FirstTry::MustBeClaimed(decoded, None);
    };
    let frozen = timeout(UNRECORDED_MAX, settings.client.freeze(&decoded.job, sum)).await;
    let Ok(Ok(request)) = frozen else { return FirstTry::MustBeClaimed(decoded, None) };
    let egress = egress_request(lane, EgressRule::Paced, delivered_at);
    let acquire = acquire_request(&decoded.job, CallKind::Charge, false, &settings.provider, egress);
    let mut permit_wait = wait_for_permit(lane, acquire).boxed();
    let waited = timeout_at(delivered_at + UNRECORDED_MAX, &mut permit_wait);
    let permit = match waited.instrument(spans::step("wait for a permit")).await {
        Ok(PermitWait::Granted(permit)) => permit,
        refused => {
            let permit_wait = refused.map_or(permit_wait, |refused| ready(refused).boxed());
            return FirstTry::MustBeClaimed(decoded, Some(Reservation(permit_wait)));
        }
    };
    // Once it is claimed, it waits in the backlog.
    if waits_for_account() {
        drop(permit);
        lane.meter.record_return(ReturnReason::NotNeeded);
        return FirstTry::MustBeClaimed(decoded, None);
    }
    let Some(permission) = lane.control.try_send(settings.provider.workers) else {
        drop(permit);
        lane.meter.record_return(ReturnReason::Probing);
        return FirstTry::MustBeClaimed(decoded, None);
    };
    let lease = new_lease(&decoded.job);
    let Some(active) = lane.worker.active_jobs.try_insert(&lease) else {
        drop(permit);
        lane.meter.record_return(ReturnReason::NotNeeded);
        return FirstTry::MustBeClaimed(decoded, None);
    };
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _in_flight = lane.worker.active_jobs.begin_request();
    faults::crash(CrashPoint::AfterPermit);
    let owner = &lane.worker.options.owner;
    let (job, hash, timing) =
        (&decoded.job, decoded.hash, BatchOptions { lease: LEASE, max_batch_delay: delay_before_send(lead) });
    let first = NewJobAttempt { job, hash, lease: &lease, owner, options: timing, request: &request };
    let written = lane.worker.backends.ledger.record_and_begin(first);
    let written = written.instrument(spans::step("write the request down")).await;
    if matches!(written, Ok(FencedWrite::Stale)) {
        lane.duplicates.record();
        // Most likely the job was delayed and is due now: it uses this permit, which a limit may have counted for good.
        let reservation = Reservation(ready(PermitWait::Granted(permit)).boxed());
        return FirstTry::MustBeClaimed(decoded, Some(reservation));
    }
    let run = JobRun {
        lane,
        settings,
        job: decoded.job,
        claimed: Claimed::new_job(lease),
        active: Arc::new(active),
        delivered_at,
        claimed_at: Instant::now(),
        ahead: None,
    };
    if let Err(error) = written {
        return FirstTry::Finished(run.on_begin_failed(CallKind::Charge, permit, &error).await);
    }
    let call = ProviderCall::Charge(request);
    let first = BegunRequest { call: &call, number: 1, permit, permission: &permission, is_ahead: !lead.is_zero() };
    FirstTry::Finished(Box::pin(run.send(first)).await)
}

/// Whether a payment is claimed before anything else, whatever its account.
fn is_claimed_first(lane: &LaneContext, job: &Job) -> bool {
    let has_own_time = job.not_before.is_some() || job.expires_at.is_some();
    has_own_time || lane.duplicates.are_expected() || !lane.gate.is_open() || lane.stop.is_cancelled()
}

/// A lease with a random token. If this worker does not learn whether the insert was committed, it must not take
/// another worker's lease of the job for its own.
fn new_lease(job: &Job) -> LeaseToken {
    // Claims count up from this number for as long as the job lives.
    LeaseToken { id: job.id.clone(), fence: rand::random_range(1 << 32..1 << 62) }
}

/// Discards a reservation: nothing is sent for its payment now.
pub fn discard(lane: &LaneContext, reservation: Option<Reservation<'_>>) {
    if let Some(Some(PermitWait::Granted(_))) = reservation.map(|Reservation(permit_wait)| permit_wait.now_or_never()) {
        lane.meter.record_return(ReturnReason::NotNeeded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recording_is_batched_only_without_a_permit() {
        let requested = Reservation(ready(PermitWait::Stopping).boxed());
        for (reservation, queue_moves, waits) in [
            (None, true, Duration::ZERO),
            (None, false, BATCH_DELAY_MAX),
            (Some(&requested), true, Duration::ZERO),
            (Some(&requested), false, Duration::ZERO),
        ] {
            assert_eq!(batch_delay(reservation, queue_moves), waits, "queue moves: {queue_moves}");
        }
    }
}
