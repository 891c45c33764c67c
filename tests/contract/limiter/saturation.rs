//! Real Redis under saturation, with one fault in the middle of each run. The judge is the provider, which counts every
//! request on arrival. No window may hold more than the limit, before, during or after the fault, and traffic must
//! continue.

use sluicegate::limiter::gate::{AcquireResult, Gate, Permit};
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::provider::simulated::FakeProviderReport;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::support::clock::{ahead_ms, move_clock, redis_with_false_clock};
use crate::support::redis::{Redis, RedisCluster, RedisOptions};

pub mod load;
mod slots;
pub mod switch;

use load::{Attempts, LIMIT, Works, quota};
use switch::Switch;

/// Requests that prove traffic: several full windows.
pub const TRAFFIC: u64 = 250;

fn on(url: &str) -> Arc<dyn Limiter> {
    Arc::new(RedisLimiter::new(url, "saturated").unwrap())
}

/// Never more than the limit; and the limit was reached, so that one request more would have been detected.
pub fn judge(report: &FakeProviderReport) {
    let counted = &report.limits[0];
    assert_eq!(counted.breaches, 0, "{} of {} requests in one window: {report:?}", counted.largest, counted.limit);
    assert_eq!(counted.largest, u64::from(LIMIT), "{report:?}");
    assert!(report.requests >= 2 * TRAFFIC);
}

/// Traffic, the fault, traffic again.
async fn with_fault(redis: &Redis, fault: impl FnOnce(&Redis)) -> FakeProviderReport {
    let works = Works::start(|| on(&redis.url()));
    works.flows(TRAFFIC).await;
    block_in_place(|| fault(redis));
    works.flows(TRAFFIC).await;
    works.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_free_run_reaches_the_limit() {
    judge(&with_fault(&Redis::start(), |_| {}).await);
}

/// A test of the judge: three limiter stores where one is required.
#[tokio::test(flavor = "multi_thread")]
async fn unshared_stores_are_detected() {
    let stores = [Redis::start(), Redis::start(), Redis::start()];
    let mut next = stores.iter();
    let works = Works::start(|| on(&next.next().unwrap().url()));
    works.until(|report| report.limits[0].breaches > 0).await;
    works.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flushall() {
    judge(&with_fault(&Redis::start(), |redis| redis.command("FLUSHALL")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn function_flush() {
    judge(&with_fault(&Redis::start(), |redis| redis.command("FUNCTION FLUSH")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_and_restarted_with_its_data() {
    let kill = |redis: &Redis| {
        redis.kill();
        redis.restart();
    };
    judge(&with_fault(&Redis::start(), kill).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_and_restarted_without_its_data() {
    let forgetful = Redis::start_with(RedisOptions { is_forgetful: true, ..RedisOptions::default() });
    let kill = |redis: &Redis| {
        redis.kill();
        redis.restart();
    };
    judge(&with_fault(&forgetful, kill).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_for_a_second() {
    let stop = |redis: &Redis| {
        redis.signal("STOP");
        // The fault: no answer for a second.
        std::thread::sleep(SECOND);
        redis.signal("CONT");
    };
    judge(&with_fault(&Redis::start(), stop).await);
}

/// When the state is lost, one booked permit is held by a process and not yet in the ledger. Other processes must wait
/// for it.
#[tokio::test(flavor = "multi_thread")]
async fn lost_state_with_an_outstanding_permit() {
    let redis = Redis::start();
    let (stop, attempts) = (CancellationToken::new(), Arc::new(Attempts::default()));
    let spec = QuotaSpec { send_budget: Duration::from_millis(400), ..load::quota_of(1) };
    let mut running = JoinSet::new();
    let mut open = || {
        let (gate, run) = load::gate(on(&redis.url()), &attempts, spec.clone(), &stop);
        running.spawn(run);
        gate
    };
    let (first, second) = (open(), open());
    // One use, so that the next start is booked: its permit is granted before its start.
    let used = permit(&first).await;
    sleep_until(used.start_at).await;
    used.begin().unwrap().release_used(Instant::now());
    let booked = permit(&first).await;
    block_in_place(|| redis.command::<()>("FLUSHALL"));
    let other = tokio::spawn(async move { permit(&second).await });
    // Late, and still within its budget.
    sleep_until(booked.start_at + Duration::from_millis(100)).await;
    attempts.begin();
    let in_flight = booked.begin().unwrap();
    let begun = Instant::now();
    let window = Duration::from_millis(500);
    let early = timeout(2 * window, async { other.await.unwrap() }).await;
    assert!(early.is_err(), "{:?} after the first began: {early:?}", begun.elapsed());
    drop(in_flight);
    stop.cancel();
    while running.join_next().await.is_some() {}
}

pub async fn permit(gate: &Gate) -> Permit {
    match gate.acquire(ask(Instant::now() + 60 * SECOND)).await {
        AcquireResult::Granted(permit) => permit,
        refused => panic!("{refused:?}"),
    }
}

/// The replica lacks the last hundreds of grants when it becomes the primary.
#[tokio::test(flavor = "multi_thread")]
async fn a_lagging_replica_promoted() {
    let (primary, replica) = (Redis::start(), Redis::start());
    block_in_place(|| {
        replica.command::<()>(&format!("REPLICAOF 127.0.0.1 {}", primary.port));
        until_replicated(&replica);
    });
    let switch = Switch::to(primary.port).await;
    let works = Works::start(|| on(&switch.url()));
    works.flows(TRAFFIC).await;
    // Replication is cut: the named primary does not exist.
    block_in_place(|| replica.command::<()>("REPLICAOF 127.0.0.1 1"));
    works.flows(TRAFFIC).await;
    block_in_place(|| {
        primary.kill();
        replica.command::<()>("REPLICAOF NO ONE");
    });
    switch.turn_to(replica.port);
    works.flows(TRAFFIC).await;
    judge(&works.end().await);
}

fn until_replicated(replica: &Redis) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let is_up =
        || replica.command::<String>("INFO replication").lines().any(|line| line.trim() == "master_link_status:up");
    while !is_up() {
        assert!(std::time::Instant::now() < deadline, "the link of the replica was never up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A slot with all its keys moves to another master, and back.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_of_a_cluster_migrated() {
    let cluster = RedisCluster::start();
    let urls = cluster.urls();
    let works = Works::start(|| {
        Arc::new(RedisLimiter::cluster(urls.iter().map(String::as_str), "saturated").unwrap()) as Arc<dyn Limiter>
    });
    let key = format!("{{{}}}", quota().quota);
    let (slot, home) = block_in_place(|| (cluster.slot(&key), cluster.owner(&key)));
    let away = (home + 1) % 3;
    for (from, to) in [(home, away), (away, home)] {
        works.flows(TRAFFIC).await;
        block_in_place(|| cluster.migrate(slot, from, to, || {}));
    }
    works.flows(TRAFFIC).await;
    judge(&works.end().await);
}

/// A master is stopped until its replica has taken over. When it resumes, it still acts as a master.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_master_resumed_after_failover() {
    let cluster = RedisCluster::start();
    let key = format!("{{{}}}", quota().quota);
    let (home, _replica) = block_in_place(|| {
        let home = cluster.owner(&key);
        (home, cluster.add_replica(home))
    });
    let urls = cluster.urls();
    let works = Works::start(|| {
        Arc::new(RedisLimiter::cluster(urls.iter().map(String::as_str), "saturated").unwrap()) as Arc<dyn Limiter>
    });
    works.flows(TRAFFIC).await;
    cluster.nodes[home].signal("STOP");
    works.flows(TRAFFIC).await;
    cluster.nodes[home].signal("CONT");
    works.flows(TRAFFIC).await;
    judge(&works.end().await);
}

/// The server's clock steps while it runs.
async fn with_clock_moved_by(millis: i64) {
    let (redis, clock) = redis_with_false_clock();
    let fault = |redis: &Redis| {
        move_clock(&clock, millis);
        let ahead_ms = ahead_ms(redis);
        assert!((ahead_ms - millis).abs() <= 100, "{ahead_ms} ms ahead");
    };
    judge(&with_fault(&redis, fault).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn store_clock_moved_forward() {
    with_clock_moved_by(30_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_clock_moved_back() {
    with_clock_moved_by(-30_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_clock_moved_forward_within_the_window() {
    with_clock_moved_by(200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_clock_moved_back_within_the_window() {
    with_clock_moved_by(-200).await;
}
