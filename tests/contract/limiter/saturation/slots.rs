//! A concurrency limit on real Redis under saturation: whatever happens to the store, the provider never has more
//! requests in flight, and work goes on.

use super::*;

const SLOTS: u32 = 12;

fn slots() -> QuotaSpec {
    QuotaSpec { limits: vec![LimitSpec::concurrency("slots", SLOTS)], ..quota() }
}

async fn judged(redis: &Redis, fault: impl FnOnce(&Redis)) {
    let works = Works::start_with(slots(), || on(&redis.url()));
    works.flows(TRAFFIC).await;
    block_in_place(|| fault(redis));
    works.flows(TRAFFIC).await;
    // A slot is on its way to the provider for half of its time, so they are there together only now and then.
    works.until(|report| report.largest_in_flight > u64::from(SLOTS / 2)).await;
    let report = works.end().await;
    assert_eq!(report.in_flight_breaches, 0, "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn store_faults_never_put_more_in_flight() {
    let redis = Redis::start();
    judged(&redis, |_| {}).await;
    judged(&redis, |redis| redis.command("FLUSHALL")).await;
    let stop = |redis: &Redis| {
        redis.signal("STOP");
        std::thread::sleep(SECOND);
        redis.signal("CONT");
    };
    judged(&redis, stop).await;
    let forgetful = Redis::start_with(RedisOptions { is_forgetful: true, ..RedisOptions::default() });
    let kill = |redis: &Redis| {
        redis.kill();
        redis.restart();
    };
    judged(&forgetful, kill).await;
}

/// The judge's own test: three times the slots where there should be one.
#[tokio::test(flavor = "multi_thread")]
async fn unshared_slots_are_detected() {
    let stores = [Redis::start(), Redis::start(), Redis::start()];
    let mut next = stores.iter();
    let works = Works::start_with(slots(), || on(&next.next().unwrap().url()));
    works.until(|report| report.in_flight_breaches > 0).await;
    works.end().await;
}
