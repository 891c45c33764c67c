//! The limiter's interface: one atomic call acquires permits under all limits of a quota and releases earlier ones.
//!
//! No implementation waits: the [`gate`] does. While the store is unavailable, no permit is granted.
//! See `docs/decisions/0008-one-limiter-state-machine.md`.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::clock_comparison::{AttestationCheck, LeaderRow, QuotaAttestation};
use crate::domain::limit::Algorithm;
use crate::domain::limit_usage::LimitUsage;
use crate::domain::permit_protocol::{CostByKind, LimiterCall, LimiterReply, PastUse, PermitRequest, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, QuotaSpec, SubjectQuery};
use crate::domain::time::Micros;

pub mod embedded;
pub mod gate;
pub mod leader_election;
pub mod leadership;
pub mod redis;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LimiterError {
    /// The store cannot be reached or did not answer in time. Whether the call ran is unknown: repeat it.
    #[error("limiter store unavailable: {0}")]
    Unavailable(String),
    /// The store sent an invalid reply, or rejects the call for a reason that a retry does not remove.
    #[error("limiter store rejects the call: {0}")]
    Refused(String),
}

/// Usage of one limit, read without acquiring a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    pub name: String,
    pub max_requests: u32,
    pub window: Duration,
    /// Uses that may count at once: `max_requests`, or what a bucket holds.
    pub capacity: u32,
    /// Uses that count now, and calls in flight.
    pub used: u64,
    pub shadow: bool,
    /// Shadow limit only: permits that it would have refused since its state began.
    pub would_have_refused: u64,
    /// Shadow limit only: permits that it would have delayed.
    pub would_have_waited: u64,
    /// Time until the next permit of cost 1 may start; `None` for a limit that allows nothing.
    pub retry_after: Option<Duration>,
    /// Time until all of it is free again if nothing more is sent.
    pub reset_after: Duration,
    /// Uses that still count after each of so many equal parts of the window; see [`LimitUsage::still_used`].
    pub still_used: Vec<u64>,
}

impl LimitStatus {
    /// Permits of cost 1 that the limit can grant now.
    pub fn remaining(&self) -> u64 {
        u64::from(self.capacity).saturating_sub(self.used)
    }
}

#[async_trait]
pub trait Limiter: Send + Sync {
    /// Run id of the store's process that keeps the quota, as of the connection that the next [`Limiter::call`] uses.
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError>;

    /// Makes one call. It is atomic, and a repeat with the same number has no further effect.
    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError>;

    /// Usage of the provider's limits, and of those of one account or reference. Acquires nothing.
    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError>;

    /// Checks that the store answers; returns its version if it is a server. This process's own memory always answers.
    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }

    /// How the store's servers drop keys. A server that does not answer is left out; this process's own memory drops none.
    async fn evictions(&self) -> Vec<StoreEviction> {
        Vec::new()
    }

    /// Whether a lost state may be rebuilt from the ledger now. It may not while permits of another limiter leader can
    /// still be used: the ledger does not contain their requests yet.
    async fn may_rebuild(&self, _quota: &ProviderName) -> bool {
        true
    }

    /// Whether this request costs more than this worker's share of a limit, though the limit itself admits it. Such a
    /// request is skipped, so that the requests behind it need not wait.
    fn exceeds_share(&self, _spec: &QuotaSpec, _request: &PermitRequest) -> bool {
        false
    }

    /// Whether the store's clock can be trusted for the time before this process first compared it. A store that no
    /// other process uses needs no attestation.
    fn check_attestation(&self, _quota: &ProviderName, _read: &StoreClockReading) -> AttestationCheck {
        AttestationCheck::Valid { since: Micros(0), undetected_step: Duration::ZERO }
    }

    /// Records that the caller has compared this store's clock without a break since `since` (the store's clock), as an
    /// attestation for processes that start later.
    fn attest_clock(&self, _quota: &ProviderName, _run_id: &str, _since: Micros, _read: StoreClockReading) {}

    /// Opens the quota in this process, or applies its new settings.
    fn open_quota(&self, _spec: &QuotaSpec) {}

    /// Closes the quota in this process.
    fn close_quota(&self, _quota: &ProviderName) {}

    /// Background work while quotas are open; returns when it is stopped.
    async fn run_background(&self, _stop: CancellationToken) {}
}

/// Bounds in nanoseconds of what a store's clock reads at an instant of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreClockReading {
    pub at: Instant,
    pub least_ns: i128,
    pub most_ns: i128,
}

/// What a server of the store does when its memory is short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEviction {
    /// Host and port.
    pub address: String,
    /// Run id of the server's process.
    pub run_id: String,
    /// How it chooses the keys that it drops.
    pub policy: String,
    /// Keys that it has dropped since its process started.
    pub evicted_keys: u64,
}

impl StoreEviction {
    /// Whether it may drop keys of the limiter.
    pub fn may_evict(&self) -> bool {
        self.policy != "noeviction"
    }
}

/// A connection to a store's server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConnection {
    /// Run id of the server process at the other end.
    pub run_id: String,
    pub connected_at: Instant,
}

/// A limiter in a store whose server may be replaced behind the same host name.
#[async_trait]
pub trait RemoteLimiter: Limiter {
    /// Checks whether the servers of these quotas answer; connects where there is no connection.
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)>;

    /// Drops this connection of a quota if it is still the current one. The next one resolves the host name again.
    async fn disconnect(&self, quota: &ProviderName, connection: &StoreConnection);

    /// Whether another store in the leader row has certainly ended, so that the row is no sign of two active stores.
    fn previous_store_has_ended(&self) -> bool {
        false
    }
}

/// Access to the leader rows.
#[async_trait]
pub trait LeaderRows: Send + Sync {
    /// The leader rows of these quotas. A quota without a row has had no holder yet.
    ///
    /// # Errors
    /// Text for an operator: the database did not answer.
    async fn leader_rows(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, LeaderRow>, String>;

    /// Makes `to` the holder if `from` is the holder now, or if there is none; returns the row as it is afterwards.
    ///
    /// # Errors
    /// Text for an operator: whether the row changed is unknown.
    async fn take_over(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<LeaderRow, String>;

    /// Records each clock attestation, unless the row has another term, or one that begins after a later step.
    ///
    /// # Errors
    /// Text for an operator: whether they were recorded is unknown.
    async fn record_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), String>;
}

/// The ledger's record of recent requests, for a limiter that lost its state or has a new limit.
#[async_trait]
pub trait RecentAttempts: Send + Sync {
    /// Requests at the quota's provider that ended recently, and the cost of those that may be in flight now.
    ///
    /// # Errors
    /// Text for an operator: the ledger did not answer.
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback)
    -> Result<(Vec<PastUse>, CostByKind), String>;

    /// Recent requests of accounts or references, one entry each. An entry without requests may be missing.
    ///
    /// # Errors
    /// Text for an operator: the ledger did not answer. The limits then grant nothing for as long as uses may count.
    async fn recent_subject_uses(
        &self,
        _quota: &ProviderName,
        _query: &SubjectQuery,
    ) -> Result<Vec<SubjectUses>, String> {
        Err("this ledger keeps no uses of accounts and references".to_owned())
    }
}

/// Recent uses of an account or a reference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubjectUses {
    pub name: String,
    pub ended: Vec<PastUse>,
    pub in_flight: CostByKind,
}

/// Combines each usage with the limit that it belongs to.
fn limit_statuses(spec: &QuotaSpec, subject: Option<&Subject>, usages: &[LimitUsage]) -> Vec<LimitStatus> {
    let status = |usage: &LimitUsage| {
        let limit = spec.limits.get(usage.index)?;
        let own = subject.and_then(|subject| subject.limits.iter().find(|own| own.index == usage.index));
        if limit.is_of_rules() && own.is_none_or(|own| own.exempt) {
            return None;
        }
        let counted = own.map_or_else(|| limit.clone(), |own| limit.with_subject_limit(own));
        // Nothing names the instant at which a request in flight ends.
        let is_full_of_requests =
            counted.algorithm == Algorithm::Concurrency && usage.used >= u64::from(counted.max_requests);
        Some(LimitStatus {
            name: limit.name.clone(),
            max_requests: counted.max_requests,
            window: counted.window,
            capacity: counted.cost_max(),
            used: usage.used,
            shadow: limit.shadow || own.is_some_and(|own| own.exempt),
            would_have_refused: usage.would_have_refused,
            would_have_waited: usage.would_have_waited,
            retry_after: (counted.cost_max() > 0 && !is_full_of_requests)
                .then(|| Duration::from_micros(usage.retry_us)),
            reset_after: Duration::from_micros(usage.reset_us),
            still_used: usage.still_used.clone(),
        })
    };
    usages.iter().filter_map(status).collect()
}
