//! The worker's gate, limiter and HTTP provider without its ledger, which on SQLite could not record 500 payments a
//! second. So nginx meets the limiter at its full rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::outcome::Outcome;
use sluicegate::domain::permit_protocol::{CallKind, CostByKind, PastUse};
use sluicegate::domain::provider::{Provider, ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{LimitSpec, Lookback, QuotaSpec};
use sluicegate::domain::sum::AmountRules;
use sluicegate::ledger::provider_row::parse_provider_file;
use sluicegate::limiter::RecentAttempts;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{AcquireRequest, AcquireResult, Gate, GateContext};
use sluicegate::provider::PaymentProvider as _;
use sluicegate::provider::http::{HttpProvider, OutboundPolicy};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

/// More than the starts of one window that can be delayed.
const TASKS: u32 = 128;

pub struct Sender {
    provider: Arc<HttpProvider>,
    name: ProviderName,
    gate: Gate,
    _until_dropped: DropGuard,
}

/// A ledger without attempts.
struct NoAttempts;

#[async_trait]
impl RecentAttempts for NoAttempts {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

impl Sender {
    /// Reads a provider file of one row, whose limits are sliding logs for all calls.
    pub fn new(file: &str) -> Self {
        let rows = parse_provider_file(file).unwrap();
        let provider = rows[0].validate(1).unwrap();
        let stop = CancellationToken::new();
        let (spec, spec_rx) = watch::channel(Arc::new(spec(&provider)));
        let (gate, task) = Gate::new(GateContext {
            limiter: Arc::new(EmbeddedLimiter::new()),
            recent: Arc::new(NoAttempts),
            spec: spec_rx,
            incarnation: 1,
            stop: stop.clone(),
            on_newer_version: Arc::new(|_| {}),
        });
        tokio::spawn(async move {
            task.await;
            drop(spec);
        });
        let outbound = OutboundPolicy::parse(&["loopback".to_owned()]).unwrap();
        let http = HttpProvider::new(&provider, &outbound).unwrap();
        Self { provider: Arc::new(http), name: provider.name, gate, _until_dropped: stop.drop_guard() }
    }

    /// Sends this many payments, once each, as fast as permits are granted.
    pub async fn send(&self, payments: u32) -> Vec<Outcome> {
        let next = Arc::new(AtomicU32::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let (provider, gate, next, name) =
                (Arc::clone(&self.provider), self.gate.clone(), Arc::clone(&next), self.name.clone());
            tasks.spawn(async move {
                let mut outcomes = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= payments {
                        return outcomes;
                    }
                    outcomes.push(pay(&provider, &gate, &job(&name, number)).await);
                }
            });
        }
        tasks.join_all().await.into_iter().flatten().collect()
    }
}

fn spec(provider: &Provider) -> QuotaSpec {
    let limits = provider.limits.iter();
    QuotaSpec {
        quota: provider.quota.clone(),
        version: provider.version,
        limits: limits
            .map(|limit| LimitSpec::sliding_log(&limit.name, limit.rate.max_requests(), limit.rate.window()))
            .collect(),
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: provider.hold_max(),
        send_budget: provider.send_budget,
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn job(provider: &ProviderName, number: u32) -> Job {
    Job {
        id: Identifier::new(format!("pay-{number}")).unwrap(),
        provider: provider.clone(),
        amount: 1_299,
        currency: "EUR".into(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    }
}

/// One request under one permit, as the worker sends it.
async fn pay(provider: &HttpProvider, gate: &Gate, job: &Job) -> Outcome {
    let request = provider.freeze(job, AmountRules::default().sum_of(job).unwrap()).await.unwrap();
    loop {
        let wait_until = Instant::now() + Duration::from_secs(60);
        let ask = AcquireRequest::new(1, CallKind::Charge, wait_until);
        let permit = match gate.acquire(ask).await {
            AcquireResult::Granted(permit) => permit,
            AcquireResult::Refused(refusal) => {
                sleep(refusal.retry_after).await;
                continue;
            }
            AcquireResult::NoWorkerSlot => panic!("none is needed"),
        };
        sleep_until(permit.start_at).await;
        let Ok(in_flight) = permit.begin() else { continue };
        let answer = provider.send(job, &request).await;
        if answer.status.is_some() {
            in_flight.release_used(Instant::now() - answer.response_age);
        } else {
            in_flight.release_unknown();
        }
        return answer.outcome;
    }
}
