//! The face of the limiter: one atomic call that takes permits under all limits of a quota and settles earlier ones.
//!
//! Refuses to wait and refuses to guess: a store that cannot be asked grants nothing. Waiting is the [`gate`]'s work.

use std::time::Duration;

use async_trait::async_trait;

use crate::domain::decision::{Call, QuotaSpec, Reply};
use crate::domain::provider::ProviderName;

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
    /// Uses within the window, and calls in flight.
    pub used: u64,
}

#[async_trait]
pub trait Limiter: Send + Sync {
    /// Identity of the store's process that keeps the quota, as of the connection that the next [`Limiter::call`] for it
    /// will use.
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError>;

    /// Makes one call; atomic, and repeatable under its number.
    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError>;

    /// Looks without taking.
    async fn peek(&self, spec: &QuotaSpec) -> Result<Vec<LimitUse>, LimiterError>;

    async fn ping(&self) -> Result<(), LimiterError>;
}

/// What the ledger can vouch for when a limiter has lost its state.
#[async_trait]
pub trait RecentAttempts: Send + Sync {
    /// Age of the youngest attempt at the quota's provider that is younger than `within`; `None` when there is none.
    ///
    /// # Errors
    /// Text for a person: the ledger cannot say.
    async fn youngest_age(&self, quota: &ProviderName, within: Duration) -> Result<Option<Duration>, String>;
}

/// Puts counts beside the limits of a spec, in its order; a count that is not known is zero.
fn uses(spec: &QuotaSpec, used: &[u64]) -> Vec<LimitUse> {
    let counts = used.iter().copied().chain(std::iter::repeat(0));
    let line = |(limit, used): (&crate::domain::decision::LimitSpec, u64)| LimitUse {
        name: limit.name.clone(),
        max_requests: limit.max_requests,
        window: limit.window,
        used,
    };
    spec.limits.iter().zip(counts).map(line).collect()
}
