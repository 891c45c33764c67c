//! A limiter that grants only as the leader row in SQL allows, for deployments with several workers.
//!
//! It calls the store while the row names the server that this worker is connected to. While the row says so, it grants
//! this worker's share. Otherwise no permit is granted. [`super::leader_election`] decides before each use, from what
//! [`view`] has recorded.
//!
//! A call of a former term is rejected. Each term has its own run id, so every state begins cold in it.
//! See `docs/decisions/0014-leader-row-in-sql.md`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::embedded::EmbeddedLimiter;
use super::leader_election::{Leader, LeadershipTiming, NoLeaderCause};
use super::{LeaderRows, LimitStatus, Limiter, LimiterError, RemoteLimiter, StoreClockReading};
use crate::domain::clock_attestation::AttestationCheck;
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, PermitRequest, Subject};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use view::LeadershipView;

mod attestation;
mod share;
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

    fn lock_views(&self) -> MutexGuard<'_, HashMap<ProviderName, LeadershipView>> {
        // A view is consistent after every statement.
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current_leader(&self, quota: &ProviderName) -> Result<CurrentLeader, LimiterError> {
        let views = self.lock_views();
        let view = views.get(quota).ok_or_else(|| LimiterError::Unavailable("this quota is not open".to_owned()))?;
        match (view.decide(Instant::now()).leader, view.term_run_id()) {
            (Leader::NoLeader(NoLeaderCause::StoreUnavailable), _) => Err(view.unavailable_error()),
            (Leader::NoLeader(cause), _) => Err(LimiterError::Unavailable(cause.to_string())),
            (leader, Some(term_run_id)) => Ok(CurrentLeader { leader, term_run_id }),
            (_, None) => Err(LimiterError::Unavailable(NoLeaderCause::NoHolder.to_string())),
        }
    }

    /// Records whether a call shows that the store is unavailable.
    fn record_result(&self, quota: &ProviderName, outcome: &Result<LimiterReply, LimiterError>) {
        let Err(error @ LimiterError::Unavailable(_)) = outcome else { return };
        if let Some(view) = self.lock_views().get_mut(quota)
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
                share::call(&self.share_limiter, spec, call, workers).await
            }
            (Leader::FallbackShare, StoreDown::Wait) => {
                Err(LimiterError::Unavailable(NoLeaderCause::StoreUnavailable.to_string()))
            }
            (Leader::NoLeader(cause), _) => Err(LimiterError::Unavailable(cause.to_string())),
        }
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        let leader = self.current_leader(&spec.quota).map(|current| current.leader);
        match (leader, spec.store_down) {
            (Ok(Leader::FallbackShare), StoreDown::Share { workers }) => {
                let subject = subject.map(|subject| subject.divided_by(spec, workers));
                self.share_limiter.peek(&spec.divided_by(workers), subject.as_ref()).await
            }
            _ => self.store.peek(spec, subject).await,
        }
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.store.ping().await
    }

    async fn may_rebuild(&self, quota: &ProviderName) -> bool {
        let leader = self.current_leader(quota).map(|current| current.leader);
        matches!(leader, Ok(Leader::Store { may_rebuild: true } | Leader::FallbackShare))
    }

    fn exceeds_share(&self, spec: &QuotaSpec, request: &PermitRequest) -> bool {
        let leader = self.current_leader(&spec.quota).map(|current| current.leader);
        match (leader, spec.store_down) {
            (Ok(Leader::FallbackShare), StoreDown::Share { workers }) => {
                request.divided_by(spec, workers).exceeded_limit(&spec.divided_by(workers)).is_some()
            }
            _ => false,
        }
    }

    fn check_attestation(&self, quota: &ProviderName, read: &StoreClockReading) -> AttestationCheck {
        self.lock_views().get(quota).map_or(AttestationCheck::Missing, |view| view.attestations.check_attestation(read))
    }

    fn attest_clock(&self, quota: &ProviderName, run_id: &str, since: Micros, read: StoreClockReading) {
        if let Some(view) = self.lock_views().get_mut(quota)
            && view.attestations.record_comparison(run_id, since, read)
        {
            self.poll_now.notify_one();
        }
    }

    fn open_quota(&self, spec: &QuotaSpec) {
        let timing = self.timing.with_start_delay_max(BOOKING_HORIZON + spec.send_budget);
        let mut views = self.lock_views();
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
        self.lock_views().remove(quota);
    }

    async fn run_background(&self, stop: CancellationToken) {
        watch::run_until_stopped(self, stop).await;
    }
}
