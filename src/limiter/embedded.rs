//! The limiter of a single process: the state machine of [`crate::domain::quota`] behind a mutex.
//!
//! It runs on the process's monotonic clock. Two processes would each grant the whole limit, so `run` takes an
//! exclusive lock on the database first.
//!
//! On a database that other processes can reach, that is a session lock. It can be lost at any time (the database
//! restarts or fails over), and another process can then get it. So the leader row names this process, as it would name
//! a Redis primary. A process that lost the lock counts as an unavailable store. See
//! `docs/decisions/0014-leader-row-in-sql.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{LimitStatus, Limiter, LimiterError, RemoteLimiter, StoreConnection};
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota::Quota;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};

pub struct EmbeddedLimiter {
    started: Instant,
    /// The wall clock at the start, because fixed windows follow the calendar. Read once, so that its steps have no
    /// effect.
    started_wall_clock: Duration,
    quotas: Mutex<HashMap<ProviderName, Quota>>,
}

impl EmbeddedLimiter {
    pub fn new() -> Self {
        Self::default()
    }

    fn now(&self) -> Micros {
        Micros(micros_up(self.started_wall_clock + self.started.elapsed()))
    }
}

impl Default for EmbeddedLimiter {
    fn default() -> Self {
        let started_wall_clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_wall_clock, quotas: Mutex::default() }
    }
}

#[async_trait]
impl Limiter for EmbeddedLimiter {
    async fn run_id(&self, _: &ProviderName) -> Result<String, LimiterError> {
        Ok("embedded".to_owned())
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        // After a panic inside the state machine, slots are at worst held too long.
        let mut quotas = self.quotas.lock();
        Ok(quotas.entry(spec.quota.clone()).or_default().call(self.now(), spec, call))
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        let quotas = self.quotas.lock();
        let unused = Quota::default();
        let quota = quotas.get(&spec.quota).unwrap_or(&unused);
        Ok(super::limit_statuses(spec, subject, &quota.usage(self.now(), spec, subject)))
    }
}

/// The session lock that makes this the only process.
#[async_trait]
pub trait SessionLock: Send + Sync {
    /// Checks that this process has the lock, or has it again.
    ///
    /// # Errors
    /// Text for an operator: another process has the lock, or the database did not answer.
    async fn check_held(&self) -> Result<(), String>;
}

pub struct SingleProcessLimiter {
    limiter: EmbeddedLimiter,
    run_id: String,
    session_lock: Arc<dyn SessionLock>,
    connected_at: Instant,
    /// Quotas whose row named another process: the instant from which this process counts as connected again.
    reconnected_at: Mutex<HashMap<ProviderName, Instant>>,
}

impl SingleProcessLimiter {
    /// `run_id`: 1 to 64 letters, digits, `_` and `-`; different for each process.
    pub fn new(run_id: String, session_lock: Arc<dyn SessionLock>) -> Self {
        let connected_at = Instant::now();
        Self { limiter: EmbeddedLimiter::new(), run_id, session_lock, connected_at, reconnected_at: Mutex::default() }
    }

    fn connection(&self, quota: &ProviderName) -> StoreConnection {
        // The map is consistent after every statement.
        let reconnected_at = self.reconnected_at.lock();
        let connected_at = reconnected_at.get(quota).copied().unwrap_or(self.connected_at);
        StoreConnection { run_id: self.run_id.clone(), connected_at }
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
}

#[async_trait]
impl RemoteLimiter for SingleProcessLimiter {
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)> {
        if quotas.is_empty() {
            return Vec::new();
        }
        let held = self.session_lock.check_held().await;
        let outcome = |quota: &ProviderName| {
            let connection = held.clone().map(|()| self.connection(quota)).map_err(LimiterError::Unavailable);
            (quota.clone(), connection)
        };
        quotas.iter().map(outcome).collect()
    }

    async fn disconnect(&self, quota: &ProviderName, connection: &StoreConnection) {
        let mut reconnected_at = self.reconnected_at.lock();
        let connected_at = reconnected_at.entry(quota.clone()).or_insert(self.connected_at);
        if *connected_at == connection.connected_at {
            *connected_at = Instant::now();
        }
    }

    fn previous_store_has_ended(&self) -> bool {
        true
    }
}
