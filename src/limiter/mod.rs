//! The face of the limiter: one atomic call that takes permits under all limits of a quota and settles earlier ones.
//!
//! Refuses to wait and refuses to guess: a store that cannot be asked grants nothing. Waiting is the [`gate`]'s work.

use std::time::Duration;

use async_trait::async_trait;

use crate::domain::decision::{Call, PastUse, Reply, Standing, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{LimitSpec, QuotaSpec};

pub mod authority;
pub mod embedded;
pub mod gate;
pub mod redis;

#[derive(Debug, thiserror::Error)]
pub enum LimiterError {
    /// The store cannot be reached or did not answer in time. Whether the call ran is unknown: repeat it.
    #[error("limiter store away: {0}")]
    Away(String),
    /// The store answered with what can never be a reply, or refuses for a reason that trying again will not mend.
    #[error("limiter store refuses: {0}")]
    Refused(String),
}

/// How much of each limit is used now; looked at without taking anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUse {
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
}

#[async_trait]
pub trait Limiter: Send + Sync {
    /// Identity of the process that keeps the quota's state, as of the connection that the next [`Limiter::call`] will use.
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError>;

    /// Makes one call; atomic, and repeatable under its number.
    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError>;

    /// Looks without taking: at the limits on everything, and at those of one account or reference.
    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError>;

    async fn ping(&self) -> Result<(), LimiterError>;
}

/// What the ledger remembers when a limiter has lost its state.
#[async_trait]
pub trait RecentAttempts: Send + Sync {
    /// Requests at the quota's provider that ended within that time, and the cost of those that may be on the wire now.
    ///
    /// # Errors
    /// Text for a person: the ledger cannot say.
    async fn recent_uses(&self, quota: &ProviderName, within: Duration) -> Result<(Vec<PastUse>, u32), String>;
}

/// Puts counts beside the limits that they belong to.
fn uses(spec: &QuotaSpec, subject: Option<&Subject>, standings: &[Standing]) -> Vec<LimitUse> {
    let line = |standing: &Standing| {
        let limit = spec.limits.get(standing.index)?;
        let own = subject.and_then(|subject| subject.limits.iter().find(|own| own.index == standing.index));
        let (max_requests, window) =
            own.map_or((limit.max_requests, limit.window), |own| (own.max_requests, own.window));
        Some(LimitUse {
            name: limit.name.clone(),
            max_requests,
            window,
            capacity: LimitSpec { max_requests, window, ..limit.clone() }.cost_max(),
            used: standing.used,
            shadow: limit.shadow,
            would_have_refused: standing.would_have_refused,
            would_have_waited: standing.would_have_waited,
        })
    };
    standings.iter().filter_map(line).collect()
}
