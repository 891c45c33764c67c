//! Settings that change and states that end while the gate is in the middle of a call.
//!
//! Refuses to look inside the gate: what it sends and what it grants is all that is judged.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sluicegate::domain::decision::{Call, Refusal, Refused, Reply, Subject};
use sluicegate::domain::limit::{AccountRule, Rule};
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::quota_spec::QuotaSpec;
use sluicegate::domain::time::Micros;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::gate::{Ask, Gate, GateParts, GateRefusal, Grant, RefusedBy};
use sluicegate::limiter::{LimitUse, Limiter, LimiterError};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{NoAttempts, ask, spec};

/// What is done to the replies of the limiter behind it, in order; later ones stay as they are.
pub struct Altered {
    inner: EmbeddedLimiter,
    slowness: Duration,
    alterations: Mutex<VecDeque<Box<dyn FnOnce(&mut Reply) + Send>>>,
    pub calls: AtomicU64,
    pub seen: Mutex<Vec<Call>>,
}

impl Altered {
    pub fn slow(slowness: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: EmbeddedLimiter::new(),
            slowness,
            alterations: Mutex::default(),
            calls: AtomicU64::new(0),
            seen: Mutex::default(),
        })
    }

    pub fn next(&self, alteration: impl FnOnce(&mut Reply) + Send + 'static) {
        self.alterations.lock().unwrap().push_back(Box::new(alteration));
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn pauses(&self) -> usize {
        self.seen.lock().unwrap().iter().filter(|call| call.pause >= Some(Duration::from_secs(30))).count()
    }
}

#[async_trait]
impl Limiter for Altered {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.inner.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.seen.lock().unwrap().push(call.clone());
        sleep(self.slowness).await;
        let mut reply = self.inner.call(spec, call).await?;
        if let Some(alteration) = self.alterations.lock().unwrap().pop_front() {
            alteration(&mut reply);
        }
        Ok(reply)
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
        self.inner.peek(spec, subject).await
    }

    async fn ping(&self) -> Result<(), LimiterError> {
        Ok(())
    }
}

/// A gate whose settings the test changes.
pub fn steered(limiter: Arc<dyn Limiter>, spec: QuotaSpec) -> (Gate, watch::Sender<Arc<QuotaSpec>>, CancellationToken) {
    let (sender, spec) = watch::channel(Arc::new(spec));
    let stop = CancellationToken::new();
    let (recent, newer) = (Arc::new(NoAttempts), Arc::new(|_| {}));
    let (gate, task) = Gate::new(GateParts { limiter, recent, spec, incarnation: 1, stop: stop.clone(), newer });
    tokio::spawn(task);
    (gate, sender, stop)
}

fn account(name: &str, ask: Ask) -> Ask {
    Ask { account: Some(name.to_owned()), ..ask }
}

fn hour() -> Instant {
    Instant::now() + Duration::from_secs(3_600)
}

#[tokio::test(start_paused = true)]
async fn an_account_that_is_blocked_during_a_call_is_granted_nothing_by_the_next() {
    let limiter = Altered::slow(Duration::from_millis(20));
    let old = spec(&[("second", 1, 1_000)]);
    let (gate, settings, _stop) = steered(limiter.clone(), old.clone());
    let Grant::Granted(permit) = gate.permit(ask(1, hour())).await else { panic!("refused") };
    permit.begin().unwrap().answered(Instant::now());
    let asking = gate.clone();
    let waiting = tokio::spawn(async move { asking.permit(account("mallory", ask(1, hour()))).await });
    let before = limiter.calls();
    while limiter.calls() == before {
        sleep(Duration::from_millis(1)).await;
    }
    let blocked = AccountRule { account: "mallory".into(), limit: None, rule: Rule::Blocked };
    settings.send_replace(Arc::new(QuotaSpec { version: 2, account_rules: vec![blocked], ..old }));
    // One that is answered makes the gate call again as soon as it is free.
    gate.pause(Duration::from_millis(1), 0.0);
    match waiting.await.unwrap() {
        Grant::Refused(GateRefusal { by: RefusedBy::Blocked { account }, .. }) => assert_eq!(account, "mallory"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_does_not_hurry_a_gate_whose_settings_are_old() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let old = spec(&[("second", 10, 1_000)]);
    let (gate, _settings, _stop) = steered(limiter.clone(), old.clone());
    let Grant::Granted(_permit) = gate.permit(ask(1, hour())).await else { panic!("refused") };
    let newer = QuotaSpec { version: 2, ..old };
    let call = limiter.seen.lock().unwrap()[0].clone();
    limiter.inner.call(&newer, &Call { incarnation: 2, wants: Vec::new(), ..call }).await.unwrap();
    let before = limiter.calls();
    gate.pause(Duration::from_secs(60), 0.0);
    sleep(Duration::from_secs(1)).await;
    let calls = limiter.calls() - before;
    assert!((2..=12).contains(&calls), "{calls} calls in a second");
}

#[tokio::test(start_paused = true)]
async fn a_pause_outlives_a_step_of_the_clock_and_the_state_that_was_told() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let (gate, _settings, _stop) = steered(limiter.clone(), spec(&[("second", 10, 1_000)]));
    let Grant::Granted(_permit) = gate.permit(ask(1, hour())).await else { panic!("refused") };
    // The reply to the call that carries the pause shows a step; later replies are of a state that began anew.
    limiter.next(|reply| reply.now = Micros(reply.now.0 + 5_000_000));
    gate.pause(Duration::from_secs(60), 0.0);
    sleep(Duration::from_millis(5)).await;
    assert!(limiter.pauses() >= 2, "the pause of a call that showed a step is forgotten");
    sleep(Duration::from_secs(10)).await;
    let before = limiter.pauses();
    limiter.next(|reply| {
        reply.born = Micros(reply.born.0 + 1);
        reply.refused = Some(Refused { by: Refusal::Cold, wait_us: 50_000, exact: false });
    });
    // Any call hears of the new state; the pause that this one carries is over long before the other.
    gate.pause(Duration::from_millis(1), 0.0);
    let asking = timeout(Duration::from_secs(1), gate.permit(ask(1, hour())));
    assert!(asking.await.is_err(), "granted in a pause");
    assert!(limiter.pauses() > before, "the new state was not told of the pause");
}
