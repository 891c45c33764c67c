//! The limiter of a worker that is not alone: the store, as long as the row in SQL names the server that our link leads to;
//! our own share while the row says so; nobody otherwise.
//!
//! Refuses to decide: [`super::authority`] does, from what [`seat`] remembers, and is asked before each use. Refuses calls
//! of another term than the one that holds: each term is another identity, so that every state begins cold in it.

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

/// Asks the store, or grants this worker's share, or nobody's.
pub struct LeaderGuardedLimiter {
    store: Arc<dyn RemoteLimiter>,
    share_limiter: EmbeddedLimiter,
    rows: Arc<dyn LeaderRows>,
    timing: LeadershipTiming,
    views: Mutex<HashMap<ProviderName, LeadershipView>>,
    /// A link, or which quotas are open, has changed: worth looking at the rows.
    poll_now: Notify,
    /// A link has failed, or a quota has none yet: worth probing.
    probe_now: Notify,
}

/// Who grants now, with the identity that the state of its term has.
struct CurrentLeader {
    leader: Leader,
    term_run_id: String,
}

impl LeaderGuardedLimiter {
    /// `timing`: of the rows' polls; what permits in hands take is each quota's own.
    #[must_use]
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
        // A seat is whole after every statement.
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current_leader(&self, quota: &ProviderName) -> Result<CurrentLeader, LimiterError> {
        let seats = self.lock_views();
        let seat = seats.get(quota).ok_or_else(|| LimiterError::Unavailable("this quota is not open".to_owned()))?;
        match (seat.decide(Instant::now()).leader, seat.term_run_id()) {
            (Leader::NoLeader(NoLeaderCause::StoreUnavailable), _) => Err(seat.unavailable_error()),
            (Leader::NoLeader(cause), _) => Err(LimiterError::Unavailable(cause.to_string())),
            (verdict, Some(identity)) => Ok(CurrentLeader { leader: verdict, term_run_id: identity }),
            (_, None) => Err(LimiterError::Unavailable(NoLeaderCause::NoHolder.to_string())),
        }
    }

    /// What a call over the link has shown of the store.
    fn record_result(&self, quota: &ProviderName, outcome: &Result<LimiterReply, LimiterError>) {
        let Err(error @ LimiterError::Unavailable(_)) = outcome else { return };
        if let Some(seat) = self.lock_views().get_mut(quota)
            && seat.record_unavailable(error, Instant::now())
        {
            self.probe_now.notify_one();
        }
    }
}

#[async_trait]
impl Limiter for LeaderGuardedLimiter {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.current_leader(quota).map(|granting| granting.term_run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        let granting = self.current_leader(&spec.quota)?;
        if granting.term_run_id != call.run_id {
            return Err(LimiterError::Unavailable("another holder grants by now".to_owned()));
        }
        match (granting.leader, spec.store_down) {
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
        let verdict = self.current_leader(&spec.quota).map(|granting| granting.leader);
        match (verdict, spec.store_down) {
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
        let verdict = self.current_leader(quota).map(|granting| granting.leader);
        matches!(verdict, Ok(Leader::Store { may_rebuild: true } | Leader::FallbackShare))
    }

    fn exceeds_share(&self, spec: &QuotaSpec, want: &PermitRequest) -> bool {
        let verdict = self.current_leader(&spec.quota).map(|granting| granting.leader);
        match (verdict, spec.store_down) {
            (Ok(Leader::FallbackShare), StoreDown::Share { workers }) => {
                want.divided_by(spec, workers).exceeded_limit(&spec.divided_by(workers)).is_some()
            }
            _ => false,
        }
    }

    fn check_attestation(&self, quota: &ProviderName, read: &StoreClockReading) -> AttestationCheck {
        self.lock_views().get(quota).map_or(AttestationCheck::Missing, |seat| seat.attestations.check_attestation(read))
    }

    fn attest_clock(&self, quota: &ProviderName, run_id: &str, since: Micros, read: StoreClockReading) {
        if let Some(seat) = self.lock_views().get_mut(quota)
            && seat.attestations.record_comparison(run_id, since, read)
        {
            self.poll_now.notify_one();
        }
    }

    fn open_quota(&self, spec: &QuotaSpec) {
        let timing = self.timing.with_start_delay_max(BOOKING_HORIZON + spec.send_budget);
        let mut seats = self.lock_views();
        match seats.get_mut(&spec.quota) {
            Some(seat) => seat.apply_settings(spec.store_down, timing),
            None => {
                seats.insert(spec.quota.clone(), LeadershipView::new(spec.store_down, timing, Instant::now()));
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
