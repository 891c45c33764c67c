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

use super::authority::{Cause, Timing, Verdict};
use super::embedded::EmbeddedLimiter;
use super::{AuthorityRows, LimitUse, Limiter, LimiterError, LinkedLimiter, StoreReading};
use crate::domain::clock_witness::Witness;
use crate::domain::decision::{Call, Reply, Subject, Want};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use seat::Seat;

mod clocks;
mod seat;
mod share;
#[cfg(test)]
mod tests;
mod watch;

/// Asks the store, or grants this worker's share, or nobody's.
pub struct Authorised {
    store: Arc<dyn LinkedLimiter>,
    shares: EmbeddedLimiter,
    rows: Arc<dyn AuthorityRows>,
    timing: Timing,
    seats: Mutex<HashMap<ProviderName, Seat>>,
    /// A link, or which quotas are open, has changed: worth looking at the rows.
    look: Notify,
    /// A link has failed, or a quota has none yet: worth probing.
    probe: Notify,
}

/// Who grants now, with the identity that the state of its term has.
struct Granting {
    verdict: Verdict,
    identity: String,
}

impl Authorised {
    /// `timing`: of the rows' polls; what permits in hands take is each quota's own.
    #[must_use]
    pub fn new(store: Arc<dyn LinkedLimiter>, rows: Arc<dyn AuthorityRows>, timing: Timing) -> Self {
        Self {
            store,
            shares: EmbeddedLimiter::new(),
            rows,
            timing,
            seats: Mutex::default(),
            look: Notify::new(),
            probe: Notify::new(),
        }
    }

    fn seats(&self) -> MutexGuard<'_, HashMap<ProviderName, Seat>> {
        // A seat is whole after every statement.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn granting(&self, quota: &ProviderName) -> Result<Granting, LimiterError> {
        let seats = self.seats();
        let seat = seats.get(quota).ok_or_else(|| LimiterError::Away("this quota is not open".to_owned()))?;
        match (seat.decide(Instant::now()).verdict, seat.identity()) {
            (Verdict::Nobody(Cause::StoreAway), _) => Err(seat.why_away()),
            (Verdict::Nobody(cause), _) => Err(LimiterError::Away(cause.to_string())),
            (verdict, Some(identity)) => Ok(Granting { verdict, identity }),
            (_, None) => Err(LimiterError::Away(Cause::NoHolder.to_string())),
        }
    }

    /// What a call over the link has shown of the store.
    fn heard(&self, quota: &ProviderName, outcome: &Result<Reply, LimiterError>) {
        let Err(error @ LimiterError::Away(_)) = outcome else { return };
        if let Some(seat) = self.seats().get_mut(quota)
            && seat.away(error, Instant::now())
        {
            self.probe.notify_one();
        }
    }
}

#[async_trait]
impl Limiter for Authorised {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.granting(quota).map(|granting| granting.identity)
    }

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        let granting = self.granting(&spec.quota)?;
        if granting.identity != call.run_id {
            return Err(LimiterError::Away("another holder grants by now".to_owned()));
        }
        match (granting.verdict, spec.store_down) {
            (Verdict::Store { .. }, _) => {
                let outcome = self.store.call(spec, call).await;
                self.heard(&spec.quota, &outcome);
                outcome
            }
            (Verdict::OwnShare, StoreDown::Share { of }) => share::call(&self.shares, spec, call, of).await,
            (Verdict::OwnShare, StoreDown::Wait) => Err(LimiterError::Away(Cause::StoreAway.to_string())),
            (Verdict::Nobody(cause), _) => Err(LimiterError::Away(cause.to_string())),
        }
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
        let verdict = self.granting(&spec.quota).map(|granting| granting.verdict);
        match (verdict, spec.store_down) {
            (Ok(Verdict::OwnShare), StoreDown::Share { of }) => {
                let subject = subject.map(|subject| subject.share(spec, of));
                self.shares.peek(&spec.share(of), subject.as_ref()).await
            }
            _ => self.store.peek(spec, subject).await,
        }
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.store.ping().await
    }

    async fn may_rebuild(&self, quota: &ProviderName) -> bool {
        let verdict = self.granting(quota).map(|granting| granting.verdict);
        matches!(verdict, Ok(Verdict::Store { may_warm: true } | Verdict::OwnShare))
    }

    fn outgrows_share(&self, spec: &QuotaSpec, want: &Want) -> bool {
        let verdict = self.granting(&spec.quota).map(|granting| granting.verdict);
        match (verdict, spec.store_down) {
            (Ok(Verdict::OwnShare), StoreDown::Share { of }) => {
                want.share(spec, of).outgrown(&spec.share(of)).is_some()
            }
            _ => false,
        }
    }

    fn witness(&self, quota: &ProviderName, read: &StoreReading) -> Witness {
        self.seats().get(quota).map_or(Witness::Silent, |seat| seat.clocks.witness(read))
    }

    fn clock_kept(&self, quota: &ProviderName, run_id: &str, since: Micros, read: StoreReading) {
        if let Some(seat) = self.seats().get_mut(quota)
            && seat.clocks.kept(run_id, since, read)
        {
            self.look.notify_one();
        }
    }

    fn opened(&self, spec: &QuotaSpec) {
        let timing = self.timing.with_in_hand(BOOKING_HORIZON + spec.send_budget);
        let mut seats = self.seats();
        match seats.get_mut(&spec.quota) {
            Some(seat) => seat.follow(spec.store_down, timing),
            None => {
                seats.insert(spec.quota.clone(), Seat::new(spec.store_down, timing, Instant::now()));
                self.probe.notify_one();
                self.look.notify_one();
            }
        }
    }

    fn closed(&self, quota: &ProviderName) {
        self.seats().remove(quota);
    }

    async fn tend(&self, stop: CancellationToken) {
        watch::until(self, stop).await;
    }
}
