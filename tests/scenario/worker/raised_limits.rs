//! Raised and lowered limits while jobs wait for them: the waiting jobs follow the change.

use std::time::Duration;

use serde_json::json;
use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::ProviderRow;

use super::bench::{Bench, limit, name, row};
use super::script::{Act, busy};

const HOUR_MS: i64 = 3_600_000;

/// Two requests an hour; a job without a permit waits for an hour.
fn hourly(provider: &str) -> ProviderRow {
    ProviderRow {
        mode: "requeue".to_owned(),
        limits: vec![limit(2, HOUR_MS)],
        leak_per_second: Some(1_000.0),
        ..row(provider)
    }
}

/// Sends two jobs, of which one is busy for an hour. The other jobs wait for the limit.
async fn delay_jobs(bench: &Bench, provider: &str, others: &[&str]) {
    let busy_id = format!("{provider}-busy");
    bench.script.plan(&busy_id, [Act::Answer(busy(Some(Duration::from_secs(3_600))))]);
    for id in [format!("{provider}-first"), busy_id] {
        bench.pay(provider, &id).await;
    }
    bench.until_state(&format!("{provider}-first"), "succeeded").await;
    bench.until_delayed(&format!("{provider}-busy"), "busy").await;
    for id in others {
        bench.pay(provider, id).await;
        bench.until("it is recorded", async || bench.job(id).await.is_some()).await;
    }
    let job = bench.until_delayed(others[0], "waits for limit all").await;
    assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
}

async fn raise(bench: &Bench, provider: &str) {
    let rate = Rate::new(100, Duration::from_secs(3_600)).unwrap();
    bench.database.set_rate(&name(provider), "all", rate).await.unwrap();
}

#[tokio::test]
async fn delayed_jobs_follow_a_raised_limit() {
    let bench = Bench::open(&[hourly("acme"), hourly("bolt")]).await;
    delay_jobs(&bench, "acme", &["a", "b", "c"]).await;
    delay_jobs(&bench, "bolt", &["d"]).await;
    raise(&bench, "acme").await;
    for id in ["a", "b", "c"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1, "{id}");
    }
    // Jobs of the other lane and jobs that wait for other reasons stay delayed.
    assert_eq!(bench.job("d").await.unwrap().state, "waiting");
    assert_eq!(bench.job("acme-busy").await.unwrap().state, "waiting");
    assert_eq!(bench.script.sent().len(), 2 * 2 + 3);
}

/// The worker that notices the raised limit may not have run when it changed.
#[tokio::test]
async fn limit_raised_while_stopped_is_followed() {
    let mut bench = Bench::prepared(&[hourly("acme")]).await;
    bench.keep_limiter();
    bench.run();
    delay_jobs(&bench, "acme", &["a"]).await;
    bench.stop().await;
    raise(&bench, "acme").await;
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.run();
    bench.settings_known().await;
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    assert_eq!(bench.until_state("a", "succeeded").await.attempts, 1);
}

/// A lane pauses until its limit has room; the limit belongs to another row of the quota.
#[tokio::test]
async fn paused_lane_follows_another_rows_limit() {
    let sharing = ProviderRow { quota: Some("acme".to_owned()), limits: vec![limit(50, 1_000)], ..row("bolt") };
    let sharing = ProviderRow { leak_per_second: Some(1_000.0), mode: "requeue".to_owned(), ..sharing };
    let other_limit = |mut row: ProviderRow| {
        row.limits[0].name = "burst".to_owned();
        row
    };
    let bench = Bench::open(&[hourly("acme"), other_limit(sharing)]).await;
    for id in ["1", "2"] {
        bench.pay("bolt", id).await;
        bench.until_state(id, "succeeded").await;
    }
    bench.pay("bolt", "parked").await;
    bench.until_delayed("parked", "waits for limit all").await;
    bench.pay("bolt", "queued").await;
    raise(&bench, "acme").await;
    for id in ["queued", "parked"] {
        bench.until_state(id, "succeeded").await;
    }
}

/// A limit that is lowered for an hour does not end jobs that cost more than it allows.
#[tokio::test]
async fn cost_above_limit_waits_for_a_raise() {
    let bench = Bench::open(&[ProviderRow { limits: vec![limit(10, 100)], ..row("acme") }]).await;
    let publish = async |id: &str, cost: u32| {
        let message = json!({ "id": id, "amount": 1, "currency": "EUR", "cost": cost });
        bench.publish("acme", &message.to_string()).await;
    };
    publish("costly", 11).await;
    let job = bench.until_delayed("costly", "waits for limit all: cost 11 exceeds the 10 that it admits at once").await;
    assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
    // Later jobs continue: the lane does not pause.
    for (id, cost) in [("fits", 10), ("small", 1)] {
        publish(id, cost).await;
        bench.until_state(id, "succeeded").await;
    }
    assert_eq!(bench.job("costly").await.unwrap().state, "waiting");
    let rate = Rate::new(100, Duration::from_millis(100)).unwrap();
    bench.database.set_rate(&name("acme"), "all", rate).await.unwrap();
    assert_eq!(bench.until_state("costly", "succeeded").await.attempts, 1);
    assert_eq!(bench.script.order(), ["fits", "small", "costly"]);
    assert!(bench.attempts("costly").await.len() == 1 && bench.events_of("costly").await.len() <= 1);
}

/// A job does not wait for ever: its expiry and its age end it like any other.
#[tokio::test]
async fn cost_above_limit_still_expires() {
    let bench = Bench::open(&[ProviderRow { limits: vec![limit(10, 100)], max_age_s: 1, ..row("acme") }]).await;
    let message = |id: &str| json!({ "id": id, "amount": 1, "currency": "EUR", "cost": 11 });
    bench.publish("acme", &message("old").to_string()).await;
    let mut dated = message("dated");
    dated["expires_at"] = (jiff::Timestamp::now() + Duration::from_millis(600)).to_string().into();
    bench.publish("acme", &dated.to_string()).await;
    bench.until_delayed("old", "cost 11 exceeds").await;
    assert_eq!(bench.until_state("dated", "expired").await.attempts, 0);
    assert_eq!(bench.until_state("old", "dead").await.attempts, 0);
    assert!(bench.script.sent().is_empty());
}
