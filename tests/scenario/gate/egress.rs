//! Worker slots and egress rate of a lane: both are taken with the permit, so a job that waits for a limit holds
//! neither.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sluicegate::domain::job::Identifier;
use sluicegate::domain::limit::Scope;
use sluicegate::domain::permit_protocol::{LimiterRefusal, RefusalReason};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::gate::{
    AcquireRequest, AcquireResult, BlockReason, EgressPosition, EgressRequest, EgressRule, Gate, LaneEgress, Permit,
    WorkerSlot,
};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::altered::{Altered, Steered, account, hour, steered};
use super::{ask, spec};

fn gate(spec: QuotaSpec) -> Steered {
    steered(Altered::slow(Duration::from_micros(100)), spec)
}

/// A limit that no test uses up.
fn open() -> QuotaSpec {
    spec(&[("all", 10_000, 1_000)])
}

fn with_egress(lane: &Arc<LaneEgress>, rule: EgressRule, request: AcquireRequest) -> AcquireRequest {
    let wait_until = hour();
    AcquireRequest { egress: Some(EgressRequest { lane: Arc::clone(lane), rule, wait_until }), ..request }
}

fn paced(lane: &Arc<LaneEgress>) -> AcquireRequest {
    with_egress(lane, EgressRule::Paced, ask(1, hour()))
}

async fn granted(gate: &Gate, request: AcquireRequest) -> Permit {
    match gate.acquire(request).await {
        AcquireResult::Granted(permit) => permit,
        other => panic!("{other:?}"),
    }
}

/// Starts a job with its permit. The job runs while its worker slot is held.
async fn started(gate: &Gate, request: AcquireRequest) -> WorkerSlot {
    let mut permit = granted(gate, request).await;
    permit.mark_persisted();
    let slot = permit.take_worker_slot().unwrap();
    sleep_until(permit.start_at).await;
    permit.begin().unwrap().release_used(Instant::now());
    slot
}

fn waits(gate: &Gate, id: &str, request: AcquireRequest) -> JoinHandle<AcquireResult> {
    let (gate, job) = (gate.clone(), Some(Identifier::new(id).unwrap()));
    tokio::spawn(async move { gate.acquire(AcquireRequest { job, ..request }).await })
}

async fn egress_of(gate: &Gate, id: &str) -> Option<EgressPosition> {
    gate.position_of(Identifier::new(id).unwrap()).await.unwrap().egress
}

#[tokio::test(start_paused = true)]
async fn higher_priority_leaves_first_at_the_steady_rate() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let lane = LaneEgress::new(1, 10.0);
    let first = started(&gate, paced(&lane)).await;
    let (order, mut left) = mpsc::unbounded_channel();
    for (name, priority) in [("low", 0), ("high", 9), ("middle", 5)] {
        let (gate, lane, order) = (gate.clone(), Arc::clone(&lane), order.clone());
        tokio::spawn(async move {
            let slot = started(&gate, AcquireRequest { priority, ..paced(&lane) }).await;
            order.send((name, Instant::now())).unwrap();
            drop(slot);
        });
    }
    sleep(Duration::from_secs(1)).await;
    drop(first);
    let (mut names, mut instants) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (name, at) = left.recv().await.unwrap();
        names.push(name);
        instants.push(at);
    }
    assert_eq!(names, ["high", "middle", "low"]);
    assert!(instants[2] - instants[0] >= Duration::from_millis(99), "{instants:?}");
}

#[tokio::test(start_paused = true)]
async fn unused_permit_refunds_its_egress_tick() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let (lane, start) = (LaneEgress::new(32, 2.0 / 3_600.0), Instant::now());
    drop(granted(&gate, paced(&lane)).await);
    drop(started(&gate, paced(&lane)).await);
    assert!(start.elapsed() <= Duration::from_secs(2), "{:?}", start.elapsed());
    // That permit was used, so the next one waits.
    drop(started(&gate, paced(&lane)).await);
    assert!(start.elapsed() >= Duration::from_secs(1_790), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn worker_slots_are_bounded() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let lane = LaneEgress::new(2, 1_000.0);
    let (first, _second) = (started(&gate, paced(&lane)).await, started(&gate, paced(&lane)).await);
    let third = timeout(Duration::from_secs(60), gate.acquire(paced(&lane))).await;
    assert!(third.is_err(), "a third job got one of two worker slots");
    drop(first);
    started(&gate, paced(&lane)).await;
}

#[tokio::test(start_paused = true)]
async fn changed_workers_apply_to_waiting_jobs() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let lane = LaneEgress::new(1, 1_000.0);
    let _first = started(&gate, paced(&lane)).await;
    let second = waits(&gate, "second", paced(&lane));
    sleep(Duration::from_secs(1)).await;
    assert!(!second.is_finished());
    lane.configure(2, 1_000.0, Instant::now());
    gate.wake();
    let second = timeout(Duration::from_secs(1), second).await.unwrap().unwrap();
    assert!(matches!(second, AcquireResult::Granted(_)), "{second:?}");
}

#[tokio::test(start_paused = true)]
async fn waiting_job_has_a_position_and_egress_wait() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let (lane, start) = (LaneEgress::new(9, 0.5), Instant::now());
    let _first = started(&gate, paced(&lane)).await;
    let mut waiting = Vec::new();
    for id in ["second", "third", "fourth"] {
        waiting.push(waits(&gate, id, paced(&lane)));
        sleep(Duration::from_millis(1)).await;
    }
    let EgressPosition { jobs_ahead, egress_wait } = egress_of(&gate, "third").await.unwrap();
    assert_eq!(jobs_ahead, 1);
    assert_eq!(egress_wait, Duration::from_secs(4) - start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn exempt_job_waits_only_for_a_worker_slot() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let (lane, start) = (LaneEgress::new(2, 1.0 / 3_600.0), Instant::now());
    let exempt = || with_egress(&lane, EgressRule::Exempt, ask(1, hour()));
    drop(started(&gate, paced(&lane)).await);
    let slow = waits(&gate, "slow", paced(&lane));
    let (free, _other) = (started(&gate, exempt()).await, started(&gate, exempt()).await);
    let third = waits(&gate, "third", exempt());
    sleep(Duration::from_millis(10)).await;
    assert_eq!(egress_of(&gate, "third").await, Some(EgressPosition { jobs_ahead: 0, egress_wait: Duration::ZERO }));
    drop(free);
    drop(third.await.unwrap());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(!slow.is_finished());
}

/// Twenty jobs of one account wait for its own limit, with two worker slots and a slow egress rate.
#[tokio::test(start_paused = true)]
async fn job_at_its_own_limit_holds_no_slot() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 1, Duration::from_secs(60)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let Steered { gate, settings: _settings, .. } = gate(QuotaSpec { limits: vec![all, own], ..spec(&[]) });
    let lane = LaneEgress::new(2, 100.0);
    let mut flood = JoinSet::new();
    for _ in 0..20 {
        let (gate, request) = (gate.clone(), account("flood", paced(&lane)));
        flood.spawn(async move { started(&gate, request).await });
    }
    flood.join_next().await.unwrap().unwrap();
    sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    for other in 0..10 {
        started(&gate, account(&format!("other-{other}"), paced(&lane))).await;
    }
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    assert_eq!(flood.len(), 19, "the account has used its one permit per minute");
}

#[tokio::test(start_paused = true)]
async fn busy_lane_holds_up_no_other_lane() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let (busy, idle) = (LaneEgress::new(1, 1_000.0), LaneEgress::new(1, 1_000.0));
    let _first = started(&gate, paced(&busy)).await;
    let second = waits(&gate, "second", AcquireRequest { priority: 9, ..paced(&busy) });
    sleep(Duration::from_millis(10)).await;
    let other = timeout(Duration::from_secs(1), gate.acquire(paced(&idle))).await;
    assert!(matches!(other, Ok(AcquireResult::Granted(_))), "{other:?}");
    assert!(!second.is_finished());
}

#[tokio::test(start_paused = true)]
async fn job_without_a_slot_in_time_is_refused() {
    let Steered { gate, settings: _settings, .. } = gate(open());
    let lane = LaneEgress::new(1, 1_000.0);
    let _first = started(&gate, paced(&lane)).await;
    let until = Instant::now() + Duration::from_secs(3);
    let egress = Some(EgressRequest { lane: Arc::clone(&lane), rule: EgressRule::Paced, wait_until: until });
    let refused = gate.acquire(AcquireRequest { egress, ..ask(1, until) }).await;
    assert!(matches!(refused, AcquireResult::NoWorkerSlot), "{refused:?}");
    assert!(Instant::now() >= until && Instant::now() < until + Duration::from_millis(50));
}

/// Each block is short, but their total exceeds the job's accepted wait.
#[tokio::test(start_paused = true)]
async fn series_of_short_blocks_ends_the_wait() {
    let limiter = Altered::slow(Duration::from_micros(100));
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), open());
    let (lane, accepted_wait) = (LaneEgress::new(1, 1_000.0), Duration::from_secs(1));
    drop(started(&gate, paced(&lane)).await);
    for _ in 0..200 {
        let refused = LimiterRefusal { reason: RefusalReason::Paused, wait_us: 50_000, exact: false };
        limiter.next(move |reply| (reply.grants, reply.refused) = (Vec::new(), Some(refused)));
    }
    let start = Instant::now();
    let ask = AcquireRequest { accepted_wait, wait_until: start + accepted_wait, ..paced(&lane) };
    let refused = gate.acquire(ask).await;
    assert!(matches!(&refused, AcquireResult::Refused(by) if by.reason == BlockReason::Paused), "{refused:?}");
    let waited = start.elapsed();
    assert!(waited > Duration::from_millis(900) && waited < Duration::from_millis(1_100), "{waited:?}");
}

/// A job at its own limit reserves at most one tick of the egress rate, however long it waits.
#[tokio::test(start_paused = true)]
async fn job_at_its_own_limit_causes_no_burst() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 1, Duration::from_secs(600)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let Steered { gate, settings: _settings, .. } = gate(QuotaSpec { limits: vec![all, own], ..spec(&[]) });
    let lane = LaneEgress::new(32, 10.0);
    drop(started(&gate, account("limited", paced(&lane))).await);
    let limited = waits(&gate, "limited", account("limited", paced(&lane)));
    sleep(Duration::from_secs(60)).await;
    let (start, mut others) = (Instant::now(), JoinSet::new());
    for other in 0..21 {
        let (gate, request) = (gate.clone(), account(&format!("other-{other}"), paced(&lane)));
        others.spawn(async move { drop(started(&gate, request).await) });
    }
    while others.join_next().await.transpose().unwrap().is_some() {}
    assert!(start.elapsed() > Duration::from_millis(1_750), "21 jobs at 10/s within {:?}", start.elapsed());
    assert!(!limited.is_finished());
}

/// A limit and an egress rate, both a hundred a second: ticks that the limit holds back are not lost.
#[tokio::test(start_paused = true)]
async fn egress_rate_loses_nothing_behind_a_limit() {
    const SECONDS: u64 = 30;
    let Steered { gate, settings: _settings, .. } = gate(spec(&[("all", 100, 1_000)]));
    let (lane, answer) = (LaneEgress::new(32, 100.0), Duration::from_millis(20));
    let (sent, mut jobs) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
    drop(started(&gate, paced(&lane)).await);
    for _ in 0..100 {
        let (gate, lane, sent) = (gate.clone(), Arc::clone(&lane), Arc::clone(&sent));
        jobs.spawn(async move {
            loop {
                let mut permit = granted(&gate, paced(&lane)).await;
                permit.mark_persisted();
                let _slot = permit.take_worker_slot();
                sleep_until(permit.start_at).await;
                let in_flight = permit.begin().unwrap();
                sent.fetch_add(1, Ordering::Relaxed);
                sleep(answer).await;
                in_flight.release_used(Instant::now());
            }
        });
    }
    sleep(Duration::from_secs(SECONDS)).await;
    let possible = 100.0 * SECONDS as f64 / (1.0 + answer.as_secs_f64());
    let sent = sent.load(Ordering::Relaxed) as f64;
    assert!(sent >= 0.98 * possible, "{sent} of {possible:.0}");
}
