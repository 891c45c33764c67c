//! The face of the limiter: one atomic call that takes permits under all limits of a quota and settles earlier ones.
//!
//! Refuses to wait and refuses to guess: a store that cannot be asked grants nothing. Waiting is the [`gate`]'s work.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::clock_attestation::{AttestationCheck, ClockAttestation};
use crate::domain::permit_protocol::{
    CostByKind, LimitUsage, LimiterCall, LimiterReply, PastUse, PermitRequest, Subject,
};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, QuotaSpec, SubjectQuery};
use crate::domain::time::Micros;

pub mod embedded;
pub mod gate;
pub mod leader_election;
pub mod leadership;
pub mod redis;
pub mod single_process;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LimiterError {
    /// The store cannot be reached or did not answer in time. Whether the call ran is unknown: repeat it.
    #[error("limiter store away: {0}")]
    Unavailable(String),
    /// The store answered with what can never be a reply, or refuses for a reason that trying again will not mend.
    #[error("limiter store refuses: {0}")]
    Refused(String),
}

/// How much of each limit is used now; looked at without taking anything.
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
    /// Of a shadow limit: permits that it would have refused, since its state began.
    pub would_have_refused: u64,
    /// Of a shadow limit: permits that it would have made wait.
    pub would_have_waited: u64,
    /// Until the next permit of cost 1 may start; `None` for a limit that allows nothing.
    pub retry_after: Option<Duration>,
    /// Until all of it is free again if nothing more is sent.
    pub reset_after: Duration,
}

impl LimitStatus {
    /// What may still count now.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        u64::from(self.capacity).saturating_sub(self.used)
    }
}

#[async_trait]
pub trait Limiter: Send + Sync {
    /// Identity of the store's process that keeps the quota, as of the connection that the next [`Limiter::call`] for it
    /// will use.
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError>;

    /// Makes one call; atomic, and repeatable under its number.
    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError>;

    /// Looks without taking: at the limits on everything, and at those of one account or reference.
    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError>;

    /// Whether the store answers now; its version, where there is a server.
    async fn ping(&self) -> Result<Option<String>, LimiterError>;

    /// Whether a state that was lost may be rebuilt from the ledger now. Not while permits that another limiter granted may
    /// still be used: the ledger does not know of them yet.
    async fn may_rebuild(&self, _quota: &ProviderName) -> bool {
        true
    }

    /// Whether this want costs more than whoever grants now can ever admit, though the limits themselves do: passed over, it
    /// holds nobody behind it.
    fn exceeds_share(&self, _spec: &QuotaSpec, _want: &PermitRequest) -> bool {
        false
    }

    /// Whether what this quota's store counted before somebody's first exchange with it may be judged by its clock. A store
    /// that no other process uses needs nobody's word.
    fn check_attestation(&self, _quota: &ProviderName, _read: &StoreClockReading) -> AttestationCheck {
        AttestationCheck::Valid { since: Micros(0), undetected_step: Duration::ZERO }
    }

    /// The caller has compared this store's clock without a break since that instant of it: his word for those who come
    /// later.
    fn attest_clock(&self, _quota: &ProviderName, _run_id: &str, _since: Micros, _read: StoreClockReading) {}

    /// The quota is open in this process, with these settings from now on.
    fn open_quota(&self, _spec: &QuotaSpec) {}

    /// The quota is not open any more.
    fn close_quota(&self, _quota: &ProviderName) {}

    /// What must go on while quotas are open; returns when it is stopped.
    async fn run_background(&self, _stop: CancellationToken) {}
}

/// What a store's clock reads at an instant of ours, in nanoseconds: no less and no more than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreClockReading {
    pub at: Instant,
    pub least_ns: i128,
    pub most_ns: i128,
}

/// A link to a store's server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConnection {
    /// Of the process that it leads to.
    pub run_id: String,
    pub connected_at: Instant,
}

/// A limiter in a store whose server may be replaced by another one behind the same name.
#[async_trait]
pub trait RemoteLimiter: Limiter {
    /// Looks whether the servers of these quotas answer, over links that are made where there are none.
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)>;

    /// Drops this link of a quota, if it is still the one: the next is made by name.
    async fn disconnect(&self, quota: &ProviderName, link: &StoreConnection);

    /// Whether a row that names another store names one that has ended: then it is no sign of two of them.
    fn previous_store_has_ended(&self) -> bool {
        false
    }
}

/// The row that says who grants for a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderRow {
    pub holder: String,
    /// Another one with each change.
    pub term: i64,
    /// Since it changed, by the clock of the database.
    pub age: Duration,
    /// The database's clock as this was read, cut to milliseconds.
    pub now: Micros,
    /// The last word in this term on the store's clock, and its age.
    pub attestation: Option<(ClockAttestation, Duration)>,
}

/// The rows that say who grants.
#[async_trait]
pub trait LeaderRows: Send + Sync {
    /// A quota without a row has had no holder yet.
    ///
    /// # Errors
    /// Text for a person: the database cannot say.
    async fn leader_rows(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, LeaderRow>, String>;

    /// Makes `to` the holder if `from` is it now, or if nobody is; returns what holds afterwards.
    ///
    /// # Errors
    /// Text for a person: nobody knows whether it happened.
    async fn take_over(&self, quota: &ProviderName, from: Option<&str>, to: &str) -> Result<LeaderRow, String>;

    /// Notes a word on the store's clock in this term, unless somebody knows of a later step.
    ///
    /// # Errors
    /// Text for a person: nobody knows whether it was noted.
    async fn record_attestation(&self, quota: &ProviderName, term: i64, word: &ClockAttestation) -> Result<(), String>;
}

/// What the ledger remembers when a limiter has lost its state.
#[async_trait]
pub trait RecentAttempts: Send + Sync {
    /// Requests at the quota's provider that ended lately, and the cost of those that may be on the wire now.
    ///
    /// # Errors
    /// Text for a person: the ledger cannot say.
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback)
    -> Result<(Vec<PastUse>, CostByKind), String>;

    /// Those of accounts or references, each apart. One that has none may be left out.
    ///
    /// # Errors
    /// Text for a person: the ledger cannot say. Their limits are held for whatever may have been used.
    async fn recent_subject_uses(
        &self,
        _quota: &ProviderName,
        _asked: &SubjectQuery,
    ) -> Result<Vec<SubjectUses>, String> {
        Err("uses of accounts and references are not kept here".to_owned())
    }
}

/// Uses of an account or a reference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubjectUses {
    pub name: String,
    pub ended: Vec<PastUse>,
    pub in_flight: CostByKind,
}

/// Puts counts beside the limits that they belong to.
fn limit_statuses(spec: &QuotaSpec, subject: Option<&Subject>, standings: &[LimitUsage]) -> Vec<LimitStatus> {
    let line = |standing: &LimitUsage| {
        let limit = spec.limits.get(standing.index)?;
        let own = subject.and_then(|subject| subject.limits.iter().find(|own| own.index == standing.index));
        let counted = own.map_or_else(|| limit.clone(), |own| limit.with_subject_limit(own));
        Some(LimitStatus {
            name: limit.name.clone(),
            max_requests: counted.max_requests,
            window: counted.window,
            capacity: counted.cost_max(),
            used: standing.used,
            shadow: limit.shadow || own.is_some_and(|own| own.exempt),
            would_have_refused: standing.would_have_refused,
            would_have_waited: standing.would_have_waited,
            retry_after: (counted.cost_max() > 0).then(|| Duration::from_micros(standing.retry_us)),
            reset_after: Duration::from_micros(standing.reset_us),
        })
    };
    standings.iter().filter_map(line).collect()
}
