//! The limiter of a single process: the specification itself, behind a lock, on the process's monotonic clock.
//!
//! Refuses to be shared: two processes would each allow the whole limit, so `run` takes an exclusive lock on the
//! database before it uses this.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use tokio::time::Instant;

use super::{LimitUse, Limiter, LimiterError};
use crate::domain::decision::{Call, QuotaSpec, Reply};
use crate::domain::provider::ProviderName;
use crate::domain::sliding_log::Carousel;
use crate::domain::time::{Micros, micros_up};

/// Where this clock starts: late enough that no instant of a window before it is negative.
const EPOCH_US: u64 = 1_800_000_000_000_000;

pub struct EmbeddedLimiter {
    started: Instant,
    quotas: Mutex<HashMap<ProviderName, Carousel>>,
}

impl EmbeddedLimiter {
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now(), quotas: Mutex::default() }
    }

    fn now(&self) -> Micros {
        Micros(EPOCH_US + micros_up(self.started.elapsed()))
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

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        // A panic inside the state machine would leave at worst slots that are held too long.
        let mut quotas = self.quotas.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(quotas.entry(spec.quota.clone()).or_default().call(self.now(), spec, call))
    }

    async fn peek(&self, spec: &QuotaSpec) -> Result<Vec<LimitUse>, LimiterError> {
        let quotas = self.quotas.lock().unwrap_or_else(PoisonError::into_inner);
        let used = quotas.get(&spec.quota).map(|carousel| carousel.used(self.now(), spec));
        Ok(super::uses(spec, &used.unwrap_or_default()))
    }

    async fn ping(&self) -> Result<(), LimiterError> {
        Ok(())
    }
}
