//! Changed settings, reset states and slow stores while the gate has calls in flight.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::domain::limit::{AccountRule, Rule, Scope};
use sluicegate::domain::permit_protocol::{LimiterCall, LimiterRefusal, RefusalReason};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::domain::time::{Micros, micros_up};
use sluicegate::limiter::Limiter;
use sluicegate::limiter::gate::{AcquireResult, BlockReason, GateRefusal};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::altered::{Altered, Steered, account, hour, steered, use_one};
use super::{ask, spec};

#[tokio::test(start_paused = true)]
async fn account_blocked_mid_call_gets_no_permit() {
    let limiter = Altered::slow(Duration::from_millis(20));
    let old = spec(&[("second", 1, 1_000)]);
    let Steered { gate, settings, .. } = steered(limiter.clone(), old.clone());
    use_one(&gate, ask(1, hour())).await;
    let asking = gate.clone();
    let waiting = tokio::spawn(async move { asking.acquire(account("mallory", ask(1, hour()))).await });
    let (before, deadline) = (limiter.calls(), Instant::now() + Duration::from_secs(60));
    while limiter.calls() == before {
        assert!(Instant::now() < deadline, "the gate makes no call");
        sleep(Duration::from_millis(1)).await;
    }
    let blocked = AccountRule { account: "mallory".into(), limit: None, rule: Rule::Blocked };
    settings.send_replace(Arc::new(QuotaSpec { version: 2, account_rules: vec![blocked], ..old }));
    // A reply to a pause makes the gate call again as soon as it is free.
    gate.pause(Duration::from_millis(1), 0.0);
    match waiting.await.unwrap() {
        AcquireResult::Refused(GateRefusal { reason: BlockReason::AccountBlocked { account }, .. }) => {
            assert_eq!(account, "mallory")
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn pause_does_not_speed_up_stale_settings() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let old = spec(&[("second", 10, 1_000)]);
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), old.clone());
    let AcquireResult::Granted(_permit) = gate.acquire(ask(1, hour())).await else { panic!("refused") };
    let newer = QuotaSpec { version: 2, ..old };
    let call = limiter.seen.lock().unwrap()[0].clone();
    limiter.inner.call(&newer, &LimiterCall { incarnation: 2, requests: Vec::new(), ..call }).await.unwrap();
    let before = limiter.calls();
    gate.pause(Duration::from_secs(60), 0.0);
    sleep(Duration::from_secs(1)).await;
    let calls = limiter.calls() - before;
    assert!((2..=12).contains(&calls), "{calls} calls in a second");
}

#[tokio::test(start_paused = true)]
async fn pause_survives_clock_step_and_reset() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec(&[("second", 10, 1_000)]));
    let AcquireResult::Granted(_permit) = gate.acquire(ask(1, hour())).await else { panic!("refused") };
    // The reply to the call with the pause shows a clock step. Later replies come from a reset state.
    limiter.next(|reply| reply.now = Micros(reply.now.0 + 5_000_000));
    gate.pause(Duration::from_secs(60), 0.0);
    sleep(Duration::from_millis(5)).await;
    assert!(limiter.pauses() >= 2, "the pause was not repeated after the clock step");
    sleep(Duration::from_secs(10)).await;
    let before = limiter.pauses();
    limiter.next(|reply| {
        reply.state_epoch = Micros(reply.state_epoch.0 + 1);
        reply.refused = Some(LimiterRefusal { reason: RefusalReason::Cold, wait_us: 50_000, exact: false });
    });
    // Any call shows the reset. The pause of this call ends long before the other one.
    gate.pause(Duration::from_millis(1), 0.0);
    let asking = timeout(Duration::from_secs(1), gate.acquire(ask(1, hour())));
    assert!(asking.await.is_err(), "granted in a pause");
    assert!(limiter.pauses() > before, "the pause was not repeated to the new state");
}

#[tokio::test(start_paused = true)]
async fn stopping_gate_releases_every_answered_permit() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let Steered { gate, settings: _settings, stop, task } = steered(limiter.clone(), spec(&[("second", 2_500, 1_000)]));
    let mut in_flight = Vec::new();
    for _ in 0..2_500 {
        let AcquireResult::Granted(permit) = gate.acquire(ask(1, hour())).await else { panic!("refused") };
        in_flight.push(permit.begin().unwrap());
    }
    in_flight.into_iter().for_each(|permit| permit.release_used(Instant::now()));
    stop.cancel();
    task.await.unwrap();
    let seen = limiter.seen.lock().unwrap();
    let released: u32 = seen.iter().flat_map(|call| &call.releases).map(|release| release.cost).sum();
    assert_eq!(released, 2_500);
}

#[tokio::test(start_paused = true)]
async fn an_idle_gate_keeps_comparing_the_clocks() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec(&[("second", 10, 1_000)]));
    use_one(&gate, ask(1, hour())).await;
    sleep(Duration::from_secs(1)).await;
    let before = limiter.calls();
    sleep(Duration::from_secs(300)).await;
    let calls = limiter.calls() - before;
    assert!((9..=11).contains(&calls), "{calls} calls in five minutes");
}

/// A first exchange of two seconds leaves the clock offset uncertain by two seconds. So a reused slot seems to be free
/// that much later than its permit's deadline.
#[tokio::test(start_paused = true)]
async fn permit_starting_after_its_deadline_is_withheld() {
    let limiter = Altered::slow(Duration::from_micros(100));
    limiter.delay_reply(Duration::from_secs(2));
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec(&[("second", 1, 1_000)]));
    for number in 0..3 {
        let AcquireResult::Granted(permit) = gate.acquire(ask(1, hour())).await else { panic!("refused") };
        sleep_until(permit.start_at).await;
        permit.begin().unwrap_or_else(|late| panic!("permit {number}: {late:?}")).release_used(Instant::now());
    }
}

/// Extra wait of a slot used before a hidden clock step: a step that is shorter than the store's calls. It is the time
/// by which its permit starts later than granted.
async fn waits_after_a_hidden_step(limit: LimitSpec, step: Duration) -> Duration {
    let limiter = Altered::slow(Duration::from_millis(20));
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let settings = QuotaSpec { limits: vec![all, limit], ..spec(&[]) };
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), settings);
    let step_us = micros_up(step);
    for _ in 0..1_000 {
        limiter.next(move |reply| reply.now = Micros(reply.now.0 - step_us));
    }
    use_one(&gate, account("alice", ask(1, hour()))).await;
    // The release has reached the limiter.
    sleep(Duration::from_millis(500)).await;
    limiter.stay();
    let AcquireResult::Granted(permit) = gate.acquire(account("alice", ask(1, hour()))).await else {
        panic!("refused")
    };
    permit.start_at.saturating_duration_since(Instant::now())
}

#[tokio::test(start_paused = true)]
async fn hidden_clock_step_delays_account_slot_reuse() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 1, Duration::from_secs(1)) };
    let waited = waits_after_a_hidden_step(own.clone(), Duration::ZERO).await;
    assert!(waited <= Duration::from_millis(1), "a permit waited without a clock step: {waited:?}");
    let step = Duration::from_millis(10);
    let waited = waits_after_a_hidden_step(own, step).await;
    assert!(waited >= step && waited <= 2 * step, "{waited:?}");
}
