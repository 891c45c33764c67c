//! The fast path of a new payment: the payment and its first request are recorded in one commit, once it has its
//! permit.
//!
//! Payments that the ledger may know are recorded in the backlog instead: a redelivery, or any payment of a lane with
//! duplicates. So are payments with a time of their own. No payment stays unrecorded for long. See `docs/decisions/0029-fast-path-for-new-payments.md`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;

use super::JobRun;
use super::acquire::{PermitWait, acquire_request, egress_request, wait_for_permit};
use super::prepare::ProviderCall;
use super::send::{BegunRequest, request_timing};
use crate::domain::commit_memory::Progress;
use crate::domain::job::{FlowKey, Job};
use crate::domain::permit_protocol::CallKind;
use crate::faults::{self, CrashPoint};
use crate::ledger::{Claimed, FencedWrite, LeaseToken, NewJobAttempt};
use crate::limiter::gate::{EgressRule, Permit};
use crate::queue::message::Decoded;
use crate::telemetry::spans;
use crate::worker::backlog::unrecorded::UnrecordedPayment;
use crate::worker::intake::{DeliveryAction, MessageInHand};
use crate::worker::lane::LaneContext;
use crate::worker::meter::ReturnReason;

/// Longest wait of an unrecorded payment for its permit; then it is recorded, so that operators see it wait.
const UNRECORDED_MAX: Duration = Duration::from_millis(500);
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

/// What became of a new payment.
pub enum FirstTry<'a> {
    Finished(DeliveryAction),
    /// The payment, unchanged: it must be recorded in the backlog.
    MustBeRecorded(Box<Decoded>, UnrecordedPayment<'a>),
}

/// A new payment that may be sent at once.
pub struct NewPayment<'a> {
    pub decoded: Box<Decoded>,
    pub delivered_at: Instant,
    pub arrival: UnrecordedPayment<'a>,
}

/// Records a payment together with its first request, acknowledges its message, and sends the request.
pub async fn record_and_send<'a>(
    lane: &'a LaneContext,
    new: NewPayment<'a>,
    message: &mut MessageInHand,
) -> FirstTry<'a> {
    let NewPayment { decoded, delivered_at, arrival } = new;
    let settings = lane.settings.borrow().clone();
    let waits_for_account = || lane.control.admit_charge(&decoded.job).is_some();
    if is_recorded_first(lane) || waits_for_account() {
        return FirstTry::MustBeRecorded(decoded, arrival);
    }
    // A request that cannot be built is reported where the payment is claimed.
    let Ok(sum) = settings.provider.amounts.sum_of(&decoded.job) else {
        return FirstTry::MustBeRecorded(decoded, arrival);
    };
    let frozen = timeout(UNRECORDED_MAX, settings.client.freeze(&decoded.job, sum)).await;
    let Ok(Ok(request)) = frozen else { return FirstTry::MustBeRecorded(decoded, arrival) };
    let egress = egress_request(lane, EgressRule::Paced, delivered_at);
    let acquire = acquire_request(&decoded.job, CallKind::Charge, false, &settings.provider, egress);
    let waiting = timeout_at(delivered_at + UNRECORDED_MAX, wait_for_permit(lane, acquire));
    let waited = tokio::select! {
        waited = waiting.instrument(spans::step("wait for a permit")) => waited,
        () = arrival.gives_up() => return FirstTry::MustBeRecorded(decoded, arrival),
    };
    let Ok(PermitWait::Granted(permit)) = waited else { return FirstTry::MustBeRecorded(decoded, arrival) };
    // Once it is claimed, it waits in the backlog.
    if waits_for_account() {
        give_back(lane, permit, ReturnReason::NotNeeded);
        return FirstTry::MustBeRecorded(decoded, arrival);
    }
    let Some(permission) = lane.control.try_send(settings.provider.workers) else {
        give_back(lane, permit, ReturnReason::Probing);
        return FirstTry::MustBeRecorded(decoded, arrival);
    };
    let lease = new_lease(&decoded.job);
    let Some(active) = lane.worker.active_jobs.try_insert(&lease) else {
        give_back(lane, permit, ReturnReason::NotNeeded);
        return FirstTry::MustBeRecorded(decoded, arrival);
    };
    // Its record is under way.
    drop(arrival);
    let lead = permit.start_at.saturating_duration_since(Instant::now());
    let _in_flight = lane.worker.active_jobs.begin_request();
    faults::crash(CrashPoint::AfterPermit);
    let holder = lane.worker.options.owner.as_str();
    let timing = request_timing(&permit, lead);
    let Decoded { job, hash, .. } = &*decoded;
    let first = NewJobAttempt { job, hash: *hash, lease: &lease, holder, timing, request: &request };
    let written = lane.worker.backends.ledger.record_and_begin(first);
    let written = written.instrument(spans::step("write the request down")).await;
    if matches!(written, Ok(FencedWrite::Stale)) {
        give_back(lane, permit, ReturnReason::NotNeeded);
        let arrival = lane.backlog.unrecorded.add(FlowKey::of(&decoded.job));
        return FirstTry::MustBeRecorded(decoded, arrival);
    }
    if written.is_ok() {
        lane.worker.guard.remember(&lane.name, &lease, 1, Progress::Sent);
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
    // The request does not wait for the acknowledgement.
    FirstTry::Finished(join(Box::pin(run.send(first)), message.acknowledge()).await.0)
}

/// Gives back the permit of a payment that must be recorded first.
fn give_back(lane: &LaneContext, permit: Permit, why: ReturnReason) {
    drop(permit);
    lane.meter.record_return(why);
}

/// Whether payments are recorded before they ask for a permit, whatever their account.
fn is_recorded_first(lane: &LaneContext) -> bool {
    lane.duplicates.are_expected() || lane.stop.is_cancelled() || !lane.worker.beats.are_confirmed()
}

/// A lease with a random token. If this worker does not learn whether the insert was committed, it must not take
/// another worker's lease of the job for its own.
fn new_lease(job: &Job) -> LeaseToken {
    // Claims count up from this number for as long as the job lives.
    LeaseToken { id: job.id.clone(), fence: rand::random_range(1 << 32..1 << 62) }
}
