//! The limiter of a single process: the state machine of [`crate::domain::quota`] behind a mutex.
//!
//! It runs on the process's monotonic clock. Two processes would each grant the whole limit, so `run` takes an
//! exclusive lock on the database first.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{LimitStatus, Limiter, LimiterError};
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
        let started_wall_clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_wall_clock, quotas: Mutex::default() }
    }

    fn now(&self) -> Micros {
        Micros(micros_up(self.started_wall_clock + self.started.elapsed()))
    }
}

impl Default for EmbeddedLimiter {
    fn default() -> Self {
        Self::new()
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

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}
