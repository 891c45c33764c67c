//! Pauses, resumes and changed limits apply to the jobs that wait, and use none of their attempts.

use std::time::Duration;

use sluicegate::domain::limit::Rate;
use sluicegate::ledger::provider_row::ProviderRow;
use tokio::time::Instant;

use super::bench::{Bench, limit, name, row};
use super::script::{Act, throttled};

/// One slot in half a minute, so a job that waits for it outlasts the test.
fn nearly_closed() -> ProviderRow {
    ProviderRow { limits: vec![limit(1, 30_000)], leak_per_second: Some(1_000.0), max_wait_ms: 60_000, ..row("acme") }
}

/// A bench whose one slot is used, with jobs that wait for it at the gate.
async fn waiting_at_the_gate(row: ProviderRow, ids: &[&str]) -> Bench {
    let bench = Bench::open(&[row]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    for id in ids {
        bench.pay("acme", id).await;
    }
    let waiting = async || bench.active().await == ids.len() as i64;
    bench.until("the other jobs are leased and wait", waiting).await;
    bench
}

#[tokio::test]
async fn pause_and_resume_reach_waiting_jobs() {
    let bench = waiting_at_the_gate(nearly_closed(), &["second", "third"]).await;
    bench.database.set_paused(&name("acme"), true).await.unwrap();
    for id in ["second", "third"] {
        let job = bench.until_delayed(id, "paused").await;
        assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
    }
    // A paused lane sends no request, though its limit has room. Payments published meanwhile are recorded.
    bench.database.set_rate(&name("acme"), "all", Rate::new(1_000, Duration::from_millis(100)).unwrap()).await.unwrap();
    bench.settings_known().await;
    bench.pay("acme", "fourth").await;
    let recorded = "SELECT count(*) FROM jobs WHERE id = 'fourth' AND backlog AND fence = 0";
    bench.until("it is recorded", async || bench.count(recorded).await == 1).await;
    bench.until("its message is acknowledged", async || bench.queued("acme") == 0).await;
    assert_eq!(bench.script.order(), ["first"]);
    bench.sql("UPDATE jobs SET wake_at = created_at WHERE state = 'waiting'").await;
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for id in ["second", "third", "fourth"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1, "{id}");
    }
}

#[tokio::test]
async fn raised_limit_applies_to_waiting_jobs() {
    let started = Instant::now();
    let bench = waiting_at_the_gate(nearly_closed(), &["second", "third", "fourth"]).await;
    let rate = Rate::new(4, Duration::from_secs(30)).unwrap();
    bench.database.set_rate(&name("acme"), "all", rate).await.unwrap();
    for id in ["second", "third", "fourth"] {
        bench.until_state(id, "succeeded").await;
    }
    assert!(started.elapsed() < Duration::from_secs(30), "the jobs waited for the old limit");
    // Requests before the change still count.
    bench.pay("acme", "fifth").await;
    bench.until("the fifth job waits", async || bench.active().await == 1).await;
    assert_eq!(bench.script.order().len(), 4);
}

#[tokio::test]
async fn shorter_window_applies_to_waiting_jobs() {
    let bench = waiting_at_the_gate(nearly_closed(), &["second"]).await;
    let rate = Rate::new(1, Duration::from_millis(300)).unwrap();
    bench.database.set_rate(&name("acme"), "all", rate).await.unwrap();
    bench.until_state("second", "succeeded").await;
    let apart = bench.script.sent_for("second")[0].at - bench.script.answered_at("first");
    assert!(apart >= Duration::from_millis(300), "{apart:?}");
    assert!(apart < Duration::from_secs(30), "{apart:?}");
}

/// A lowered limit still counts earlier requests.
#[tokio::test]
async fn lowered_limit_keeps_recorded_usage() {
    let window = Duration::from_millis(1_500);
    let bench = Bench::open(&[ProviderRow { limits: vec![limit(3, 1_500)], ..row("acme") }]).await;
    for id in ["a", "b", "c"] {
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 3).await;
    for id in ["a", "b", "c"] {
        bench.until_state(id, "succeeded").await;
    }
    bench.database.set_rate(&name("acme"), "all", Rate::new(1, window).unwrap()).await.unwrap();
    bench.settings_known().await;
    bench.pay("acme", "d").await;
    bench.until_state("d", "succeeded").await;
    let last = ["a", "b", "c"].map(|id| bench.script.answered_at(id)).into_iter().max().unwrap();
    let apart = bench.script.sent_for("d")[0].at - last;
    assert!(apart >= window, "{apart:?} after the last of three");
}

/// In requeue mode a job waits in the backlog and holds no lease, and a refusal is no attempt.
#[tokio::test]
async fn requeue_mode_delays_without_an_attempt() {
    let limits = vec![limit(1, 1_200)];
    let requeue = ProviderRow { mode: "requeue".to_owned(), limits, leak_per_second: Some(1_000.0), ..row("acme") };
    let bench = Bench::open(&[requeue]).await;
    for number in 0..4 {
        bench.pay("acme", &format!("job-{number}")).await;
    }
    bench.until("a refused job waits", async || bench.count(REFUSED).await >= 1).await;
    for number in 0..4 {
        let id = format!("job-{number}");
        let job = bench.until_state(&id, "succeeded").await;
        assert_eq!(job.attempts, 1, "{id}");
        assert_eq!(bench.attempts(&id).await, [("accepted".to_owned(), true)], "{id}");
    }
    let sent = bench.script.sent();
    assert_eq!(sent.len(), 4);
    for pair in sent.windows(2) {
        let apart = pair[1].at - pair[0].at;
        assert!(apart >= Duration::from_millis(1_200), "{apart:?}");
    }
}

const REFUSED: &str = "SELECT count(*) FROM jobs WHERE holder IS NULL AND wait_limit = 'all'";

/// No active job waits longer than `max_wait_ms`: it waits in the backlog, and so do all that come later.
#[tokio::test]
async fn blocking_mode_delays_beyond_max_wait() {
    let bench = Bench::open(&[ProviderRow { max_wait_ms: 500, ..nearly_closed() }, row("bolt")]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.pay("acme", "second").await;
    let job = bench.until_delayed("second", "waits for limit all").await;
    assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE backlog AND id = 'second'").await, 1);
    // The lane claims none until shortly before the pause ends.
    for number in 0..10 {
        bench.pay("acme", &format!("more-{number}")).await;
        let sentinel = format!("sentinel-{number}");
        bench.pay("bolt", &sentinel).await;
        bench.until_state(&sentinel, "succeeded").await;
    }
    let recorded = "SELECT count(*) FROM jobs WHERE id LIKE 'more-%' AND backlog AND fence = 0";
    bench.until("all wait in the ledger alone", async || bench.count(recorded).await == 10).await;
    assert_eq!((bench.queued("acme"), bench.script.sent_to("acme").len()), (0, 1));
}

/// A provider that never responds and one that always responds with 429 do not slow the third.
#[tokio::test]
async fn one_provider_never_delays_another() {
    let few = |name: &str| ProviderRow { workers: 4, ..row(name) };
    let bench = Bench::open(&[few("slow"), few("full"), few("well")]).await;
    bench.script.always("slow", Act::Hold);
    bench.script.always("full", Act::Answer(throttled(Duration::from_millis(20))));
    for number in 0..30 {
        for provider in ["slow", "full", "well"] {
            bench.pay(provider, &format!("{provider}-{number}")).await;
        }
    }
    let done = |provider: &'static str| {
        format!("SELECT count(*) FROM jobs WHERE state = 'succeeded' AND provider = '{provider}'")
    };
    bench.until("all of one provider are paid", async || bench.count(&done("well")).await == 30).await;
    assert_eq!((bench.count(&done("slow")).await, bench.count(&done("full")).await), (0, 0));
    bench.until_sent("full", 3).await;
    assert_eq!(bench.script.sent_to("slow").len(), 4, "four worker slots, so four requests");
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE provider = 'full' AND attempts > 0").await, 0);
}

/// The provider names a wait of a quarter of an hour, and an operator resumes earlier. Every lane of the quota follows
/// at once.
#[tokio::test]
async fn resume_ends_a_provider_pause() {
    let shared = |name: &str| ProviderRow { quota: Some("shared".into()), ..row(name) };
    let bench = Bench::open(&[shared("acme"), shared("bolt")]).await;
    bench.script.plan("first", [Act::Answer(throttled(Duration::from_secs(900)))]);
    bench.pay("acme", "first").await;
    bench.until_delayed("first", "throttled").await;
    // The gate refuses this job, so its lane pauses too.
    bench.pay("bolt", "second").await;
    bench.until_delayed("second", "the provider asked for a pause").await;
    for (lane, id) in [("acme", "third"), ("bolt", "fourth")] {
        bench.pay(lane, id).await;
    }
    assert_eq!(bench.script.order(), ["first"]);
    let resumed = Instant::now();
    bench.database.set_paused(&name("acme"), false).await.unwrap();
    for id in ["third", "fourth"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1, "{id}");
        let sent = bench.script.sent_for(id)[0].at;
        assert!(sent - resumed <= Duration::from_secs(2), "{id} was sent {:?} after the resume", sent - resumed);
    }
    // Jobs that the pause delayed also come back.
    for id in ["first", "second"] {
        assert_eq!(bench.until_state(id, "succeeded").await.attempts, 1, "{id}");
    }
    assert!(resumed.elapsed() < Duration::from_secs(60), "{:?}", resumed.elapsed());
}
