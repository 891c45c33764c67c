//! Lanes follow the provider rows: they open, close and keep their state, and lose no job meanwhile.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::domain::limit::Rate;
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};

use super::bench::{Bench, limit, name, row};
use super::script::{Act, accepted};

#[tokio::test]
async fn disabled_provider_keeps_its_messages() {
    let bench = Bench::open(&[row("acme"), row("bolt")]).await;
    bench.pay("acme", "before").await;
    bench.until_state("before", "succeeded").await;
    bench.apply(&[ProviderRow { enabled: false, ..row("acme") }]).await;
    bench.settings_known().await;
    for id in ["one", "two", "three"] {
        bench.pay("acme", id).await;
    }
    bench.pay("bolt", "sentinel").await;
    bench.until_state("sentinel", "succeeded").await;
    bench.until("the messages stay queued", async || bench.queued("acme") == 3).await;
    assert_eq!(bench.script.order(), ["before", "sentinel"]);
    bench.apply(&[row("acme")]).await;
    for id in ["one", "two", "three"] {
        bench.until_state(id, "succeeded").await;
    }
    assert_eq!(bench.script.sent_to("acme").len(), 4);
}

/// A lane that sends nothing records what arrives, up to its bound. Beyond it the queue keeps the messages.
#[tokio::test]
async fn full_lane_leaves_messages_in_its_queue() {
    let mut bench = Bench::prepared(&[ProviderRow { paused: true, ..row("acme") }, row("bolt")]).await;
    bench.max_open_jobs = 5;
    bench.run();
    let status = async || bench.settings_known().await.lanes.get(&name("acme")).map(|lane| lane.status());
    for number in 0..4 {
        bench.pay("acme", &format!("early-{number}")).await;
    }
    let recorded = "SELECT count(*) FROM jobs WHERE provider = 'acme' AND backlog";
    bench.until("four are recorded", async || bench.count(recorded).await == 4).await;
    assert_eq!(status().await.unwrap().does, LaneState::Running);
    bench.pay("acme", "early-4").await;
    bench.until("the lane is full", async || status().await.is_some_and(|is| is.does == LaneState::Full)).await;
    let words = status().await.unwrap().pause.unwrap().words;
    assert!(words.starts_with("it has 5 open payments, as many as intake.max_open_jobs allows"), "{words}");
    for number in 0..7 {
        bench.pay("acme", &format!("late-{number}")).await;
    }
    bench.pay("bolt", "sentinel").await;
    bench.until_state("sentinel", "succeeded").await;
    assert_eq!((bench.count(recorded).await, bench.queued("acme")), (5, 7));
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for id in (0..5).map(|number| format!("early-{number}")).chain((0..7).map(|number| format!("late-{number}"))) {
        bench.until_state(&id, "succeeded").await;
    }
    bench.until("the lane has room", async || status().await.is_some_and(|is| is.does == LaneState::Running)).await;
    assert_eq!(bench.script.sent_to("acme").len(), 12);
}

/// At four a second, four active jobs wait longer than `max_wait_ms`. None is delayed for that, because it would return
/// behind the whole backlog.
#[tokio::test]
async fn slow_lane_sends_in_publish_order() {
    let slow = ProviderRow { limits: vec![limit(4, 1_000)], max_wait_ms: 400, ..row("acme") };
    let bench = Bench::prepared(&[slow]).await;
    let ids: Vec<String> = (0..24).map(|nth| format!("job-{nth:02}")).collect();
    for id in &ids {
        bench.pay("acme", id).await;
    }
    let mut bench = bench;
    bench.run();
    bench.until_sent("acme", ids.len()).await;
    // Jobs that were consumed at the same time may be sent in another order.
    let order = bench.script.order();
    let place = |id: &String| order.iter().position(|sent| sent == id).unwrap();
    assert!(ids.iter().enumerate().all(|(nth, id)| place(id).abs_diff(nth) < 4), "{order:?}");
}

/// The limit of a day has a mean of 1.16 a second and is far from used up.
#[tokio::test]
async fn long_limit_does_not_slow_a_lane() {
    let day = LimitRow { name: "day".to_owned(), ..limit(100_000, 86_400_000) };
    let bench = Bench::open(&[ProviderRow { limits: vec![limit(100, 1_000), day], ..row("acme") }]).await;
    for nth in 0..250 {
        bench.pay("acme", &format!("job-{nth:03}")).await;
    }
    bench.until_sent("acme", 250).await;
    let sent = bench.script.sent_to("acme");
    assert!(
        sent.windows(101).all(|sent| sent[100].at - sent[0].at >= Duration::from_secs(1)),
        "more than 100 requests within a second"
    );
}

#[tokio::test]
async fn job_beyond_the_egress_rate_is_delayed() {
    let bench = Bench::open(&[ProviderRow { leak_per_second: Some(0.01), max_wait_ms: 300, ..row("acme") }]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.pay("acme", "second").await;
    bench.until_delayed("second", "waits for a worker slot at the egress rate").await;
}

/// Jobs that wait for a permit return to the backlog at once. The request in flight is finished and recorded.
#[tokio::test]
async fn stopping_lane_returns_waiting_and_finishes_in_flight() {
    let one_slot = ProviderRow {
        limits: vec![limit(1, 30_000)],
        max_wait_ms: 60_000,
        leak_per_second: Some(1_000.0),
        ..row("acme")
    };
    let bench = Bench::open(std::slice::from_ref(&one_slot)).await;
    bench.script.plan("first", [Act::Hold]);
    bench.pay("acme", "first").await;
    bench.until_sent("acme", 1).await;
    for id in ["second", "third"] {
        bench.pay("acme", id).await;
    }
    bench.until("two leased jobs wait", async || bench.active().await == 2).await;
    bench.apply(&[ProviderRow { enabled: false, ..one_slot.clone() }]).await;
    let in_backlog = "SELECT count(*) FROM jobs WHERE backlog";
    let free = async || bench.active().await == 0 && bench.count(in_backlog).await == 2;
    bench.until("the waiting jobs are released", free).await;
    bench.script.release_all();
    bench.until_state("first", "succeeded").await;
    assert_eq!(bench.unacknowledged("acme"), 0, "all messages are acknowledged");
    bench.apply(&[one_slot]).await;
    bench.database.set_rate(&name("acme"), "all", Rate::new(9, Duration::from_secs(30)).unwrap()).await.unwrap();
    for id in ["second", "third"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1);
    }
    assert_eq!(bench.script.sent().len(), 3);
}

#[tokio::test]
async fn new_row_opens_a_lane_immediately() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.settings_known().await;
    bench.pay("bolt", "job").await;
    bench.apply(&[row("bolt")]).await;
    bench.until_state("job", "succeeded").await;
}

/// A provider without an enabled limit is an error, not unlimited: the lane continues with the last valid row.
#[tokio::test]
async fn lane_keeps_the_last_valid_row() {
    let bench = Bench::open(&[ProviderRow { limits: vec![limit(2, 700)], ..row("acme") }, row("bolt")]).await;
    bench.settings_known().await;
    bench.sql("UPDATE provider_limits SET enabled = 0 WHERE provider = 'acme'").await;
    let progress = bench.settings_known().await;
    assert_eq!(progress.settings.invalid_rows.iter().map(|bad| bad.provider.as_str()).collect::<Vec<_>>(), ["acme"]);
    for number in 0..4 {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    for number in 0..4 {
        bench.until_state(&format!("job-{number}"), "succeeded").await;
    }
    let sent = bench.script.sent_to("acme");
    assert!(sent[2].at - sent[0].at >= Duration::from_millis(700), "the last valid limit was not applied");
    // Changes of the other provider still apply.
    bench.database.set_paused(&name("bolt"), true).await.unwrap();
    assert!(bench.settings_known().await.settings.providers[&name("bolt")].paused);
}

/// A valid row that cannot be called keeps the last usable client.
#[tokio::test]
async fn unusable_row_keeps_the_last_valid_client() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "one").await;
    bench.until_state("one", "succeeded").await;
    bench.apply(&[ProviderRow { url: "https://refused.test/".to_owned(), ..row("acme") }]).await;
    assert_eq!(bench.bad_rows(1).await, ["url `https://refused.test/` is refused: not today"]);
    bench.pay("acme", "two").await;
    bench.until_state("two", "succeeded").await;
    // Its `paused` still applies.
    bench.sql("UPDATE providers SET paused = 1").await;
    bench.settings_known().await;
    bench.bad_rows(1).await;
    bench.pay("acme", "three").await;
    bench.apply(&[ProviderRow { url: "https://moved.test/".to_owned(), ..row("acme") }]).await;
    assert!(bench.bad_rows(0).await.is_empty());
    bench.until_state("three", "succeeded").await;
    let urls: Vec<_> = bench.script.sent().into_iter().map(|sent| sent.request.url).collect();
    let wanted = ["https://acme.test/charges", "https://acme.test/charges", "https://moved.test/"];
    assert_eq!(urls, wanted.map(Arc::from));
}

/// Without a valid row to keep, only its own provider stops.
#[tokio::test]
async fn never_valid_row_stops_only_its_provider() {
    let bench = Bench::prepared(&[row("acme"), row("bolt"), row("cool")]).await;
    bench.sql("UPDATE provider_limits SET enabled = 0 WHERE provider = 'acme'").await;
    bench.apply(&[ProviderRow { url: "https://refused.test/".to_owned(), ..row("cool") }]).await;
    let mut bench = bench;
    bench.run();
    for provider in ["acme", "bolt", "cool"] {
        bench.pay(provider, &format!("for-{provider}")).await;
    }
    bench.until_state("for-bolt", "succeeded").await;
    assert_eq!(bench.script.order(), ["for-bolt"]);
    assert_eq!((bench.queued("acme"), bench.queued("cool")), (1, 1));
    bench.sql("UPDATE provider_limits SET enabled = 1 WHERE provider = 'acme'").await;
    bench.apply(&[row("cool")]).await;
    bench.until_state("for-acme", "succeeded").await;
    bench.until_state("for-cool", "succeeded").await;
}

/// A lane whose slots are all in use records what it has taken, so that each worker can claim it.
#[tokio::test]
async fn busy_lane_records_its_queue() {
    let limits = vec![limit(100_000, 1_000)];
    let mode = "requeue".to_owned();
    let bench = Bench::open(&[ProviderRow { workers: 2, bucket_capacity: 4_000, limits, mode, ..row("acme") }]).await;
    bench.script.always("acme", Act::Hold);
    for number in 0..400 {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench.until_sent("acme", 2).await;
    let in_backlog = "SELECT count(*) FROM jobs WHERE backlog";
    bench.until("most are recorded", async || bench.count(in_backlog).await > 300).await;
    bench.script.always("acme", Act::Answer(accepted()));
    bench.script.release_all();
    bench.until_sent("acme", 400).await;
}

/// A change of workers or limits reopens the lane; active jobs continue.
#[tokio::test]
async fn a_resized_lane_loses_nothing() {
    let bench = Bench::open(&[ProviderRow { workers: 2, bucket_capacity: 4, ..row("acme") }]).await;
    bench.script.always("acme", Act::Hold);
    for number in 0..20 {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench.until_sent("acme", 2).await;
    bench.apply(&[ProviderRow { workers: 5, bucket_capacity: 9, ..row("acme") }]).await;
    bench.settings_known().await;
    bench.script.always("acme", Act::Answer(accepted()));
    bench.script.release_all();
    for number in 0..20 {
        let id = format!("job-{number}");
        assert_eq!(bench.until_state(&id, "succeeded").await.attempts, 1, "{id}");
        assert_eq!(bench.script.charges("acme", &id), 1);
    }
    assert_eq!(bench.script.sent().len(), 20);
}
