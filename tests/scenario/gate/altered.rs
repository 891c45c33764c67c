//! A limiter that records its calls and alters its replies, and a gate in front of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sluicegate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::quota_spec::QuotaSpec;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{AcquireRequest, AcquireResult, Gate, GateContext};
use sluicegate::limiter::{LimitStatus, Limiter, LimiterError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::NoAttempts;

/// Alters the replies of its inner limiter, in order; later replies are unchanged.
pub struct Altered {
    pub inner: EmbeddedLimiter,
    slowness: Duration,
    /// Delays of the next replies, after the call has taken effect.
    late: Mutex<VecDeque<Duration>>,
    alterations: Mutex<VecDeque<Alteration>>,
    pub calls: AtomicU64,
    pub seen: Mutex<Vec<LimiterCall>>,
}

impl Altered {
    pub fn slow(slowness: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: EmbeddedLimiter::new(),
            slowness,
            late: Mutex::default(),
            alterations: Mutex::default(),
            calls: AtomicU64::new(0),
            seen: Mutex::default(),
        })
    }

    pub fn next(&self, alteration: impl FnOnce(&mut LimiterReply) + Send + 'static) {
        self.alterations.lock().unwrap().push_back(Box::new(alteration));
    }

    /// Leaves all later replies unchanged.
    pub fn stay(&self) {
        self.alterations.lock().unwrap().clear();
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Delays the next reply by this time.
    pub fn delay_reply(&self, late: Duration) {
        self.late.lock().unwrap().push_back(late);
    }

    pub fn pauses(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|call| call.pause >= Some(Duration::from_secs(30))).count()
    }
}

type Alteration = Box<dyn FnOnce(&mut LimiterReply) + Send>;

#[async_trait]
impl Limiter for Altered {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.inner.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.seen.lock().unwrap().push(call.clone());
        sleep(self.slowness).await;
        let mut reply = self.inner.call(spec, call).await?;
        if let Some(alteration) = self.alterations.lock().unwrap().pop_front() {
            alteration(&mut reply);
        }
        let late = self.late.lock().unwrap().pop_front();
        sleep(late.unwrap_or_default()).await;
        Ok(reply)
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.inner.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        Ok(None)
    }
}

/// A gate whose settings and shutdown the test controls.
pub struct Steered {
    pub gate: Gate,
    pub settings: watch::Sender<Arc<QuotaSpec>>,
    pub stop: CancellationToken,
    pub task: JoinHandle<()>,
}

pub fn steered(limiter: Arc<dyn Limiter>, spec: QuotaSpec) -> Steered {
    let (settings, spec) = watch::channel(Arc::new(spec));
    let stop = CancellationToken::new();
    let (recent, newer) = (Arc::new(NoAttempts), Arc::new(|_| {}));
    let (gate, task) =
        Gate::new(GateContext { limiter, recent, spec, incarnation: 1, stop: stop.clone(), on_newer_version: newer });
    Steered { gate, settings, stop, task: tokio::spawn(task) }
}

pub fn account(name: &str, ask: AcquireRequest) -> AcquireRequest {
    AcquireRequest { account: Some(name.into()), ..ask }
}

/// A deadline that no test reaches.
pub fn hour() -> Instant {
    Instant::now() + Duration::from_secs(3_600)
}

/// Acquires a permit, uses it, and releases it at once.
pub async fn use_one(gate: &Gate, ask: AcquireRequest) {
    let AcquireResult::Granted(permit) = gate.acquire(ask).await else { panic!("refused") };
    sleep_until(permit.start_at).await;
    permit.begin().unwrap().release_used(Instant::now());
}
