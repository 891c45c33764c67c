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
use super::{LimitStatus, Limiter, LimiterError, RemoteLimiter, StoreConnection};
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;

/// The right to be the only process.
#[async_trait]
pub trait SessionLock: Send + Sync {
    /// Whether this process has it, or has it again.
    ///
    /// # Errors
    /// Text for a person: somebody else has it, or nobody can say.
    async fn check_held(&self) -> Result<(), String>;
}

pub struct SingleProcessLimiter {
    limiter: EmbeddedLimiter,
    run_id: String,
    session_lock: Arc<dyn SessionLock>,
    connected_at: Instant,
    /// Of quotas whose row has named somebody else: since when this process is what the name leads to, all the same.
    reconnected_at: Mutex<HashMap<ProviderName, Instant>>,
}

impl SingleProcessLimiter {
    /// `run_id`: 1 to 64 of letters, digits, `_` and `-`, another one with each process.
    #[must_use]
    pub fn new(run_id: String, session_lock: Arc<dyn SessionLock>) -> Self {
        let connected_at = Instant::now();
        Self { limiter: EmbeddedLimiter::new(), run_id, session_lock, connected_at, reconnected_at: Mutex::default() }
    }

    fn connection(&self, quota: &ProviderName) -> StoreConnection {
        // One instant is inserted at a time.
        let made_anew_at = self.reconnected_at.lock().unwrap_or_else(PoisonError::into_inner);
        let made_at = made_anew_at.get(quota).copied().unwrap_or(self.connected_at);
        StoreConnection { run_id: self.run_id.clone(), connected_at: made_at }
    }
}

#[async_trait]
impl Limiter for SingleProcessLimiter {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok(self.run_id.clone())
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.limiter.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.limiter.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        self.limiter.ping().await
    }
}

#[async_trait]
impl RemoteLimiter for SingleProcessLimiter {
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)> {
        if quotas.is_empty() {
            return Vec::new();
        }
        let held = self.session_lock.check_held().await;
        let outcome = |quota: &ProviderName| {
            let link = held.clone().map(|()| self.connection(quota)).map_err(LimiterError::Unavailable);
            (quota.clone(), link)
        };
        quotas.iter().map(outcome).collect()
    }

    async fn disconnect(&self, quota: &ProviderName, link: &StoreConnection) {
        let mut made_anew_at = self.reconnected_at.lock().unwrap_or_else(PoisonError::into_inner);
        let made_at = made_anew_at.entry(quota.clone()).or_insert(self.connected_at);
        if *made_at == link.connected_at {
            *made_at = Instant::now();
        }
    }

    fn previous_store_has_ended(&self) -> bool {
        true
    }
}
