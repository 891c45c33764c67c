//! A limiter that grants only as the leader row in SQL allows, for deployments with several workers.
//!
//! It calls the store while the row names the server that this worker is connected to. While the row says so, it grants
//! this worker's share. Otherwise no permit is granted. [`super::leader_election`] decides before each use, from what
//! [`view`] has recorded.
//!
//! A call of a former term is rejected. Each term has its own run id, so every state begins cold in it.
//! See `docs/decisions/0014-leader-row-in-sql.md`.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::embedded::EmbeddedLimiter;
use super::leader_election::{Leader, LeadershipTiming, NoLeaderCause};
use super::{LeaderRows, LimitStatus, Limiter, LimiterError, RemoteLimiter, StoreClockReading, StoreEviction};
use crate::domain::clock_comparison::AttestationCheck;
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, PermitRequest, Shortage, SkippedRequest, Subject};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use view::LeadershipView;

#[cfg(test)]
mod tests;
mod view;
mod watch;

/// Calls the store or this worker's share, whichever is the limiter leader.
pub struct LeaderGuardedLimiter {
    store: Arc<dyn RemoteLimiter>,
    share_limiter: EmbeddedLimiter,
    rows: Arc<dyn LeaderRows>,
    timing: LeadershipTiming,
    views: Mutex<HashMap<ProviderName, LeadershipView>>,
    /// A connection or the set of open quotas has changed, so the rows are polled now.
    poll_now: Notify,
    /// A connection has failed, or a quota has none yet, so the servers are probed now.
    probe_now: Notify,
}

/// The limiter leader now, with the run id of its term's state.
struct CurrentLeader {
    leader: Leader,
    term_run_id: String,
}

impl LeaderGuardedLimiter {
    /// `timing`: without the time that permits may wait for their start, which each quota adds.
    pub fn new(store: Arc<dyn RemoteLimiter>, rows: Arc<dyn LeaderRows>, timing: LeadershipTiming) -> Self {
        Self {
            store,
            share_limiter: EmbeddedLimiter::new(),
            rows,
            timing,
            views: Mutex::default(),
            poll_now: Notify::new(),
            probe_now: Notify::new(),
        }
    }

    fn current_leader(&self, quota: &ProviderName) -> Result<CurrentLeader, LimiterError> {
        let views = self.views.lock();
        let view = views.get(quota).ok_or_else(|| LimiterError::Unavailable("this quota is not open".to_owned()))?;
        match (view.decide(Instant::now()).leader, view.term_run_id()) {
            (Leader::NoLeader(NoLeaderCause::StoreUnavailable), _) => Err(view.unavailable_error()),
            (Leader::NoLeader(cause), _) => Err(LimiterError::Unavailable(cause.to_string())),
            (leader, Some(term_run_id)) => Ok(CurrentLeader { leader, term_run_id }),
            (_, None) => Err(LimiterError::Unavailable(NoLeaderCause::NoHolder.to_string())),
        }
    }

    /// Among how many workers the limits are shared, while each worker's own share is the limiter leader.
    fn share_of(&self, spec: &QuotaSpec) -> Option<u32> {
        match (self.current_leader(&spec.quota).ok()?.leader, spec.store_down) {
            (Leader::FallbackShare, StoreDown::Share { workers }) => Some(workers),
            _ => None,
        }
    }

    /// Records whether a call shows that the store is unavailable.
    fn record_result(&self, quota: &ProviderName, outcome: &Result<LimiterReply, LimiterError>) {
        let Err(error @ LimiterError::Unavailable(_)) = outcome else { return };
        if let Some(view) = self.views.lock().get_mut(quota)
            && view.record_unavailable(error, Instant::now())
        {
            self.probe_now.notify_one();
        }
    }
}

#[async_trait]
impl Limiter for LeaderGuardedLimiter {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.current_leader(quota).map(|current| current.term_run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        let current = self.current_leader(&spec.quota)?;
        if current.term_run_id != call.run_id {
            return Err(LimiterError::Unavailable("another limiter leader grants now".to_owned()));
        }
        match (current.leader, spec.store_down) {
            (Leader::Store { .. }, _) => {
                let outcome = self.store.call(spec, call).await;
                self.record_result(&spec.quota, &outcome);
                outcome
            }
            (Leader::FallbackShare, StoreDown::Share { workers }) => {
                call_share(&self.share_limiter, spec, call, workers).await
            }
            (Leader::FallbackShare, StoreDown::Wait) | (Leader::NoLeader(_), _) => {
                Err(LimiterError::Unavailable(NoLeaderCause::StoreUnavailable.to_string()))
            }
        }
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        let Some(workers) = self.share_of(spec) else { return self.store.peek(spec, subject).await };
        let subject = subject.map(|subject| subject.divided_by(spec, workers));
        self.share_limiter.peek(&spec.divided_by(workers), subject.as_ref()).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.store.ping().await
    }

    async fn evictions(&self) -> Vec<StoreEviction> {
        self.store.evictions().await
    }

    async fn may_rebuild(&self, quota: &ProviderName) -> bool {
        let leader = self.current_leader(quota).map(|current| current.leader);
        matches!(leader, Ok(Leader::Store { may_rebuild: true } | Leader::FallbackShare))
    }

    fn exceeds_share(&self, spec: &QuotaSpec, request: &PermitRequest) -> bool {
        self.share_of(spec).is_some_and(|workers| {
            request.divided_by(spec, workers).exceeded_limit(&spec.divided_by(workers)).is_some()
        })
    }

    fn check_attestation(&self, quota: &ProviderName, read: &StoreClockReading) -> AttestationCheck {
        self.views.lock().get(quota).map_or(AttestationCheck::Missing, |view| view.check_attestation(read))
    }

    fn attest_clock(&self, quota: &ProviderName, run_id: &str, since: Micros, read: StoreClockReading) {
        if let Some(view) = self.views.lock().get_mut(quota)
            && view.record_comparison(run_id, since, read)
        {
            self.poll_now.notify_one();
        }
    }

    fn open_quota(&self, spec: &QuotaSpec) {
        let timing = self.timing.with_start_delay_max(BOOKING_HORIZON + spec.send_budget);
        let mut views = self.views.lock();
        match views.get_mut(&spec.quota) {
            Some(view) => view.apply_settings(spec.store_down, timing),
            None => {
                views.insert(spec.quota.clone(), LeadershipView::new(spec.store_down, timing, Instant::now()));
                self.probe_now.notify_one();
                self.poll_now.notify_one();
            }
        }
    }

    fn close_quota(&self, quota: &ProviderName) {
        self.views.lock().remove(quota);
    }

    async fn run_background(&self, stop: CancellationToken) {
        watch::run_until_stopped(self, stop).await;
    }
}

/// How long a request that costs more than a share is deferred before the next try, in microseconds. Shares last for a
/// minute at least, and each try of a delayed job costs a round through the queue.
const OVERSIZED_WAIT_US: u64 = 15_000_000;

/// One call on this worker's share of the limits. A request that costs more than the share is skipped while shares last,
/// so that it does not block the wait queue. See `docs/decisions/0015-fallback-shares-without-redis.md`.
async fn call_share(
    shares: &EmbeddedLimiter,
    spec: &QuotaSpec,
    call: &LimiterCall,
    workers: u32,
) -> Result<LimiterReply, LimiterError> {
    let mut own = call.divided_by(spec, workers);
    let spec = spec.divided_by(workers);
    let (mut fitting, mut oversized) = (Vec::new(), Vec::new());
    for (index, request) in std::mem::take(&mut own.requests).into_iter().enumerate() {
        if let Some(limit) = request.exceeded_limit(&spec) {
            let (request_index, shortage) = (index, Shortage::NoSlot);
            oversized.push(SkippedRequest { request_index, limit, wait_us: OVERSIZED_WAIT_US, exact: false, shortage });
        } else {
            fitting.push(index);
            own.requests.push(request);
        }
    }
    let mut reply = shares.call(&spec, &own).await?;
    let original_index = |index: usize| fitting.get(index).copied().unwrap_or(usize::MAX);
    reply.grants.iter_mut().for_each(|grant| grant.request_index = original_index(grant.request_index));
    reply.skipped.iter_mut().for_each(|skipped| skipped.request_index = original_index(skipped.request_index));
    reply.skipped.extend(oversized);
    Ok(reply)
}
