//! Order of the wait queue: limits on one kind of call, costly jobs and urgent jobs.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::domain::job::Identifier;
use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::domain::permit_protocol::CallKind;
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::gate::{
    AcquireRequest, AcquireResult, BlockReason, EgressRequest, EgressRule, Gate, GateRefusal, LaneEgress, RefusalScope,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::altered::{Altered, Steered, account, hour, steered, use_one};
use super::{ask, spec};

/// Five charges a second; other limits are never reached.
fn five_charges() -> QuotaSpec {
    let charges =
        LimitSpec { applies_to: AppliesTo::Charge, ..LimitSpec::sliding_log("charges", 5, Duration::from_secs(1)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    QuotaSpec { limits: vec![all, charges], ..spec(&[]) }
}

/// A stream of jobs that takes each slot as it becomes free.
fn stream(gate: &Gate, job: &AcquireRequest) -> JoinSet<()> {
    let mut stream = JoinSet::new();
    let (gate, job) = (gate.clone(), job.clone());
    stream.spawn(async move {
        let mut jobs = JoinSet::new();
        loop {
            let (gate, job) = (gate.clone(), job.clone());
            jobs.spawn(async move { use_one(&gate, AcquireRequest { wait_until: hour(), ..job }).await });
            sleep(Duration::from_millis(200)).await;
        }
    });
    stream
}

#[tokio::test(start_paused = true)]
async fn costly_job_is_not_starved_by_kind_limit() {
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five_charges());
    let _stream = stream(&gate, &ask(1, hour()));
    sleep(Duration::from_secs(3)).await;
    let costly = timeout(Duration::from_secs(10), gate.acquire(ask(5, hour()))).await;
    assert!(matches!(costly, Ok(AcquireResult::Granted(_))), "{costly:?}");
}

#[tokio::test(start_paused = true)]
async fn charge_limit_blocks_charges_but_not_lookups() {
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five_charges());
    use_one(&gate, ask(5, hour())).await;
    let asking = gate.clone();
    let waiting = tokio::spawn(async move { asking.acquire(ask(1, hour())).await });
    sleep(Duration::from_millis(100)).await;
    let standing = gate.view().borrow().block.clone();
    assert_eq!(standing.map(|(by, _)| by), Some(BlockReason::Limit("charges".into())));
    let AcquireResult::Refused(refusal) = gate.acquire(ask(1, Instant::now())).await else { panic!("granted") };
    let GateRefusal { exact, reason, scope, .. } = refusal;
    assert_eq!((exact, reason, scope), (true, BlockReason::Limit("charges".into()), RefusalScope::Charges));
    let lookup = AcquireRequest { kind: CallKind::Lookup, ..ask(1, Instant::now() + Duration::from_millis(10)) };
    assert!(matches!(gate.acquire(lookup).await, AcquireResult::Granted(_)));
    assert!(matches!(waiting.await.unwrap(), AcquireResult::Granted(_)));
}

#[tokio::test(start_paused = true)]
async fn costly_job_is_not_starved_within_its_account() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 5, Duration::from_secs(1)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let spec = QuotaSpec { limits: vec![all, own], ..spec(&[]) };
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), spec);
    let _stream = stream(&gate, &account("alice", ask(1, hour())));
    sleep(Duration::from_secs(3)).await;
    let costly = timeout(Duration::from_secs(20), gate.acquire(account("alice", ask(5, hour())))).await;
    assert!(matches!(costly, Ok(AcquireResult::Granted(_))), "{costly:?}");
}

/// Cheaper jobs of its account wait behind it from the beginning, and their slots are free one after another.
#[tokio::test(start_paused = true)]
async fn costly_job_is_not_starved_by_cheaper_ones_behind_it() {
    for scope in [Scope::Account, Scope::Reference] {
        let own = LimitSpec { scope, ..LimitSpec::sliding_log("own", 5, Duration::from_secs(1)) };
        let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
        let spec = QuotaSpec { limits: vec![all, own], ..spec(&[]) };
        let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), spec);
        let job = move |cost| match scope {
            Scope::Reference => AcquireRequest { reference: Some("invoice".into()), ..ask(cost, hour()) },
            _ => account("alice", ask(cost, hour())),
        };
        for _ in 0..3 {
            use_one(&gate, job(1)).await;
            sleep(Duration::from_millis(200)).await;
        }
        let asking = gate.clone();
        let costly = tokio::spawn(async move { asking.acquire(job(5)).await });
        let mut cheap = JoinSet::new();
        for _ in 0..100 {
            let gate = gate.clone();
            cheap.spawn(async move { use_one(&gate, job(1)).await });
        }
        let costly = timeout(Duration::from_secs(3), costly).await;
        assert!(matches!(costly, Ok(Ok(AcquireResult::Granted(_)))), "{scope:?}: {costly:?}");
    }
}

/// A lane with six worker slots asks for six jobs in a call. The refusal of one account's limit counts for all its
/// jobs, so few calls are made, and a job of another account is sent at once.
#[tokio::test(start_paused = true)]
async fn flood_of_an_account_at_its_limit_costs_few_calls() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 2, Duration::from_secs(60)) };
    let all = LimitSpec::sliding_log("all", 1_000, Duration::from_secs(1));
    let spec = QuotaSpec { limits: vec![all, own], ..spec(&[]) };
    let limiter = Altered::slow(Duration::from_millis(1));
    let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec);
    for _ in 0..2 {
        use_one(&gate, account("flood", ask(1, hour()))).await;
    }
    let lane = LaneEgress::new(6, 1_000.0);
    let request = |name: &str| {
        let egress = EgressRequest { lane: Arc::clone(&lane), rule: EgressRule::Exempt, wait_until: hour() };
        account(name, AcquireRequest { egress: Some(egress), ..ask(1, hour()) })
    };
    let before = limiter.calls();
    let mut waiting = JoinSet::new();
    for _ in 0..200 {
        let (gate, request) = (gate.clone(), request("flood"));
        waiting.spawn(async move { gate.acquire(request).await });
    }
    let (asking, request) = (gate.clone(), request("other"));
    let other = tokio::spawn(async move { asking.acquire(request).await });
    let other = timeout(Duration::from_millis(20), other).await;
    assert!(matches!(other, Ok(Ok(AcquireResult::Granted(_)))), "{other:?}");
    sleep(Duration::from_millis(100)).await;
    let calls = limiter.calls() - before;
    assert!(calls <= 4, "{calls} calls for 201 jobs");
}

/// A job waits at the gate for its account's limit only as long as it says, and as long as usual for others.
#[tokio::test(start_paused = true)]
async fn account_limit_refuses_impatient_jobs_early() {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 1, Duration::from_secs(10)) };
    let all = LimitSpec::sliding_log("all", 3, Duration::from_secs(5));
    let spec = QuotaSpec { limits: vec![all, own], ..spec(&[]) };
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), spec);
    let impatient =
        |name: &str| account(name, AcquireRequest { account_wait: Duration::from_millis(250), ..ask(1, hour()) });
    use_one(&gate, impatient("alice")).await;
    let began = Instant::now();
    let refused = gate.acquire(impatient("alice")).await;
    let AcquireResult::Refused(GateRefusal { retry_after, exact, reason, scope }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((exact, reason, scope), (true, BlockReason::Limit("own".into()), RefusalScope::Account));
    assert!(retry_after > Duration::from_secs(9) && began.elapsed() < Duration::from_secs(1), "{retry_after:?}");
    // Another account's job waits for the limit of all.
    use_one(&gate, impatient("bob")).await;
    use_one(&gate, impatient("carol")).await;
    use_one(&gate, impatient("dave")).await;
    assert!(began.elapsed() > Duration::from_secs(4));
}

/// For a limit on all calls and for a limit on charges. The costly job has its slots soon, so cheaper ones wait behind it.
#[tokio::test(start_paused = true)]
async fn urgent_job_overtakes_a_waiting_costly_job() {
    let on = |applies_to| LimitSpec { applies_to, ..LimitSpec::sliding_log("ten", 10, Duration::from_millis(1_900)) };
    for applies_to in [AppliesTo::All, AppliesTo::Charge] {
        let spec = QuotaSpec { limits: vec![on(applies_to)], ..spec(&[]) };
        let limiter = Altered::slow(Duration::from_millis(1));
        let Steered { gate, settings: _settings, .. } = steered(limiter.clone(), spec);
        use_one(&gate, ask(8, hour())).await;
        let asking = gate.clone();
        let costly = tokio::spawn(async move { asking.acquire(ask(5, hour())).await });
        sleep(Duration::from_millis(500)).await;
        let before = limiter.calls();
        // A job of the same priority waits behind it, without a limiter call.
        let patient = timeout(Duration::from_millis(200), gate.acquire(ask(1, hour()))).await;
        assert!(patient.is_err(), "overtaken: {patient:?}");
        assert_eq!(limiter.calls(), before);
        let urgent = AcquireRequest { priority: 9, ..ask(1, hour()) };
        let urgent = timeout(Duration::from_millis(200), gate.acquire(urgent)).await;
        assert!(matches!(urgent, Ok(AcquireResult::Granted(_))), "{applies_to:?}: {urgent:?}");
        assert!(!costly.is_finished());
    }
}

/// A queued job reports its exact position and the limit that blocks the queue, even if urgent jobs come later.
#[tokio::test(start_paused = true)]
async fn queued_job_reports_its_position() {
    let five = spec(&[("all", 5, 1_000)]);
    let Steered { gate, settings: _settings, .. } = steered(Altered::slow(Duration::from_millis(1)), five);
    use_one(&gate, ask(5, hour())).await;
    let wait = |id: &str, priority: u8, cost: u32| {
        let (gate, job) = (gate.clone(), Identifier::new(id).unwrap());
        let request = AcquireRequest { job: Some(job), priority, ..ask(cost, hour()) };
        tokio::spawn(async move { gate.acquire(request).await })
    };
    let mut waiting = Vec::new();
    for (id, priority, cost) in [("first", 0, 1), ("second", 0, 3), ("third", 0, 1), ("urgent", 9, 2)] {
        waiting.push(wait(id, priority, cost));
        sleep(Duration::from_millis(1)).await;
    }
    // Time for the gate to request a permit for the urgent job.
    sleep(Duration::from_millis(20)).await;
    let place = async |id: &str| gate.position_of(Identifier::new(id).unwrap()).await;
    for (id, before, cost_before) in [("urgent", 0, 0), ("first", 1, 2), ("second", 2, 3), ("third", 3, 6)] {
        let told = place(id).await.unwrap();
        assert_eq!((told.jobs_ahead, told.cost_ahead, told.is_own_limit), (before, cost_before, false), "{id}");
        let (by, until, exact) = told.block.unwrap();
        assert_eq!((by, exact), (BlockReason::Limit("all".into()), true), "{id}");
        assert!(until > Instant::now() && until < Instant::now() + Duration::from_millis(1_100), "{id}");
    }
    assert_eq!(place("nobody").await, None);
    // A cancelled job leaves the queue, and later jobs move up.
    waiting.remove(1).abort();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(place("third").await.map(|told| told.jobs_ahead), Some(2));
    let urgent = waiting.pop().unwrap().await.unwrap();
    assert!(matches!(urgent, AcquireResult::Granted(_)), "{urgent:?}");
    assert_eq!(place("urgent").await, None);
}
