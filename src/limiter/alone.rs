//! The embedded limiter of a process that has the one right to run on a database which others can reach too.
//!
//! Refuses to rely on that right alone: it may be lost without anybody's doing (the database restarts, fails over), and
//! somebody else may have it since. So the row that says who grants names this process, as it would name a Redis, and who has
//! lost the right is away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::time::Instant;

use super::embedded::EmbeddedLimiter;
use super::{LimitUse, Limiter, LimiterError, Linked, LinkedLimiter};
use crate::domain::decision::{Call, Reply, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;

/// The right to be the only process.
#[async_trait]
pub trait SoleRight: Send + Sync {
    /// Whether this process has it, or has it again.
    ///
    /// # Errors
    /// Text for a person: somebody else has it, or nobody can say.
    async fn is_held(&self) -> Result<(), String>;
}

pub struct Alone {
    limiter: EmbeddedLimiter,
    run_id: String,
    right: Arc<dyn SoleRight>,
    made_at: Instant,
    /// Of quotas whose row has named somebody else: since when this process is what the name leads to, all the same.
    made_anew_at: Mutex<HashMap<ProviderName, Instant>>,
}

impl Alone {
    /// `run_id`: 1 to 64 of letters, digits, `_` and `-`, another one with each process.
    #[must_use]
    pub fn new(run_id: String, right: Arc<dyn SoleRight>) -> Self {
        let made_at = Instant::now();
        Self { limiter: EmbeddedLimiter::new(), run_id, right, made_at, made_anew_at: Mutex::default() }
    }

    fn link(&self, quota: &ProviderName) -> Linked {
        // One instant is inserted at a time.
        let made_anew_at = self.made_anew_at.lock().unwrap_or_else(PoisonError::into_inner);
        let made_at = made_anew_at.get(quota).copied().unwrap_or(self.made_at);
        Linked { run_id: self.run_id.clone(), made_at }
    }
}

#[async_trait]
impl Limiter for Alone {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok(self.run_id.clone())
    }

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        self.limiter.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
        self.limiter.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.limiter.ping().await
    }
}

#[async_trait]
impl LinkedLimiter for Alone {
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<Linked, LimiterError>)> {
        if quotas.is_empty() {
            return Vec::new();
        }
        let held = self.right.is_held().await;
        let outcome = |quota: &ProviderName| {
            let link = held.clone().map(|()| self.link(quota)).map_err(LimiterError::Away);
            (quota.clone(), link)
        };
        quotas.iter().map(outcome).collect()
    }

    async fn unlink(&self, quota: &ProviderName, link: &Linked) {
        let mut made_anew_at = self.made_anew_at.lock().unwrap_or_else(PoisonError::into_inner);
        let made_at = made_anew_at.entry(quota.clone()).or_insert(self.made_at);
        if *made_at == link.made_at {
            *made_at = Instant::now();
        }
    }

    fn succeeds_others(&self) -> bool {
        true
    }
}
