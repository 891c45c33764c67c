//! Events of fault handling, one per test: each is provoked, found in log, ledger or provider records, and survived.
//!
//! Crash points provoke other events, and their tests assert those. docs/guarantees.md lists all of them.

use sluicegate::provider::simulated::FakeOptions;

use super::cell::{Cell, Kind, PATIENCE, Setup, until};
use super::trap::Trap;
use super::verdict::Verdict;
use crate::support::rabbitmq::RabbitNode;

/// Outcomes of the attempts, in their order.
const OUTCOMES: &str = "SELECT outcome FROM attempts ORDER BY number";

async fn outcomes(cell: &Cell) -> Vec<String> {
    sqlx::query_scalar(OUTCOMES).fetch_all(&cell.ledger).await.unwrap()
}

/// Lease takeover and same-key replay: a worker freezes with a request in flight. When it resumes, another worker has
/// the job's lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_worker_is_taken_over_and_fenced() {
    let trap = Trap::default();
    let setup = Setup { before_provider: Some(trap.clone()), ..Setup::of(Kind::Deduplicates) };
    let mut cell = Cell::open("frozen", setup).await;
    let frozen = cell.worker(None).await;
    frozen.until_logged("lane open").await;
    trap.hold();
    cell.publish(1).await;
    until("the request is in flight", PATIENCE, &frozen, async || cell.fake.report().requests == 1).await;
    frozen.freezes().await;
    trap.release();
    let heir = cell.worker(None).await;
    heir.until_logged("lane open").await;
    cell.end_leases().await;
    // Some of these go to the frozen worker, because its prefetch has room: the broker does not know that it is frozen.
    for _ in 0..24 {
        cell.publish_again(0).await;
    }
    cell.until_finished(&heir).await;
    frozen.signal("CONT");
    frozen.until_logged("another worker has taken this job over").await;
    let mut outcomes = outcomes(&cell).await;
    // The second worker may send while the provider still works on the first request.
    outcomes.retain(|outcome| outcome != "in_progress");
    assert_eq!(outcomes, ["unknown", "accepted"]);
    let report = cell.fake.report();
    assert!(report.replays >= 1, "{report:?}");
    frozen.stop().await;
    heir.stop().await;
    assert_eq!(cell.verdict().await, Verdict::default());
}

/// The database commits an outcome and its reply is lost. The repeated write finds it recorded, and no request is sent
/// twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_with_lost_reply_is_detected() {
    let mut cell = Cell::open("commit", Setup::of(Kind::Neither)).await;
    let trap = Trap::on(b"accepted");
    let database = url::Url::parse(cell.database()).unwrap();
    let mut through = database.clone();
    through.set_port(Some(trap.guard(database.port().unwrap()).await)).unwrap();
    cell.publish(3).await;
    let worker = cell.worker_at(None, through.as_str()).await;
    cell.until_finished(&worker).await;
    assert!(trap.sprung(), "{}", worker.log());
    let log = worker.stop().await;
    assert!(log.contains("the ledger refused an outcome; it is written again"), "{log}");
    assert_eq!(cell.fake.report().requests, 3);
    assert_eq!(outcomes(&cell).await, ["accepted"; 3]);
    assert_eq!(cell.count("SELECT count(*) FROM outcome_events").await, 3);
    assert_eq!(cell.verdict().await, Verdict::default());
}

/// Honoured 429: the provider allows less than its row says. No request arrives before the named wait is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_wait_is_honoured_in_full() {
    // The provider row has the first of these limits.
    let limits = ["20/1s", "5/1s"].map(|limit| limit.parse().unwrap()).to_vec();
    let setup = Setup::of(Kind::Neither);
    let mut cell = Cell::open("throttled", Setup { fake: FakeOptions { limits, ..setup.fake }, ..setup }).await;
    cell.publish(14).await;
    let worker = cell.worker(None).await;
    cell.until_finished(&worker).await;
    let log = worker.stop().await;
    assert!(log.contains("the provider throttled requests that the limits allowed"), "{log}");
    let arrivals = cell.fake.arrivals_us();
    let refused: Vec<usize> = (5..arrivals.len()).filter(|at| arrivals[*at] - arrivals[*at - 5] < 1_000_000).collect();
    assert!(!refused.is_empty() && refused.len() as u64 == cell.fake.report().refused_429, "{arrivals:?}");
    for at in refused {
        let next = arrivals.get(at + 1).map(|next| next - arrivals[at - 4]);
        assert!(next.is_none_or(|after| after >= 1_000_000), "{at} in {arrivals:?}");
    }
    // A 429 uses no attempt.
    assert_eq!(cell.count("SELECT sum(attempts)::bigint FROM jobs").await, 14);
    let verdict = cell.verdict().await;
    assert_eq!(Verdict { breach: 0, ..verdict }, Verdict::default());
    assert_eq!(cell.fake.report().limits[0].breaches, 0);
}

/// The broker returns copies because their delay queue was deleted. They are published again once the queue is
/// declared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returned_copy_is_republished_to_redeclared_queue() {
    let setup = Setup::of(Kind::Neither).apart("returned");
    // Most jobs wait for the limit, however slow the machine is.
    let fake = FakeOptions { limits: vec!["4/2s".parse().unwrap()], ..setup.fake };
    let row = "workers = 1\nmode = \"requeue\"\nleak_per_second = 100";
    let mut cell = Cell::open("returned", Setup { fake, row, ..setup }).await;
    let worker = cell.worker(None).await;
    worker.until_logged("lane open").await;
    for step_ms in [250, 500, 1_000] {
        cell.broker.delete_queue(&cell.queue(&format!("delay.{step_ms}"))).await;
    }
    cell.publish(14).await;
    cell.until_finished(&worker).await;
    let log = worker.stop().await;
    assert!(log.contains("message unroutable; declaring its queues and exchanges again"), "{log}");
    assert_eq!(cell.verdict().await, Verdict::default());
}

/// A broker that requeues messages after a consumer timeout, and one that blocks publishers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumer_timeout_and_blocked_publishers_lose_nothing() {
    let rabbit = tokio::task::spawn_blocking(RabbitNode::start).await.unwrap();
    let broker = tokio::task::block_in_place(|| rabbit.create_vhost("patience"));
    let eval = |program: &str| tokio::task::block_in_place(|| rabbit.ctl(&["eval", program]));
    // Channels that are opened from now on read these at every tick.
    eval(
        "application:set_env(rabbit, consumer_timeout, 1000), application:set_env(rabbit, channel_tick_interval, 300).",
    );
    let slow = FakeOptions { limits: vec!["2/2s".parse().unwrap()], deduplicate: false, ..FakeOptions::default() };
    let row = "workers = 8\nmax_wait_ms = 20000";
    let setup = Setup { fake: slow, row, broker: Some(broker.clone()), ..Setup::of(Kind::Neither) };
    let mut cell = Cell::open("impatient", setup).await;
    cell.publish(6).await;
    let worker = cell.worker(None).await;
    worker.until_logged("lane closed, reopening").await;
    assert!(worker.log().contains("PRECONDITION_FAILED"), "{}", worker.log());
    cell.until_finished(&worker).await;
    worker.stop().await;
    assert_eq!(cell.verdict().await, Verdict::default());

    eval("application:set_env(rabbit, consumer_timeout, 1800000).");
    let setup = Setup { row: "workers = 1\nmode = \"requeue\"", broker: Some(broker), ..Setup::of(Kind::Neither) };
    let mut cell = Cell::open("blocked", setup).await;
    cell.publish(14).await;
    eval("rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []}).");
    let worker = cell.worker(None).await;
    worker.until_logged("broker blocks publishers").await;
    eval("rabbit_alarm:clear_alarm({resource_limit, memory, node()}).");
    worker.until_logged("broker takes publishes again").await;
    cell.until_finished(&worker).await;
    worker.stop().await;
    assert_eq!(cell.verdict().await, Verdict::default());
}

/// Sweeper republish: the sweeper republishes a job whose message is lost, even if one sweeper crashes meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_job_is_republished_despite_sweeper_crash() {
    let mut cell = Cell::open("swept", Setup::of(Kind::Neither)).await;
    // A payment with an expiry is claimed before it is sent.
    cell.publish_with_expiry().await;
    let claiming = cell.worker(Some("after_claim:1")).await;
    claiming.dies().await;
    cell.leases_run_out().await;
    // The broker loses the message.
    let lane = cell.queue(&cell.name);
    until("the broker has the message again", PATIENCE, &claiming, async || cell.broker.ready(&lane).await == Some(1))
        .await;
    assert_eq!(cell.broker.drain(&lane).await.len(), 1);
    // The job looks as if a minute had passed.
    let sql =
        "UPDATE jobs SET wake_at = wake_at - interval '1 minute', lease_until = lease_until - interval '1 minute'";
    sqlx::query(sql).execute(&cell.ledger).await.unwrap();
    let doomed = cell.worker(Some("sweeper_after_publish:1")).await;
    doomed.dies().await;
    cell.leases_run_out().await;
    let heir = cell.worker(None).await;
    cell.until_finished(&heir).await;
    heir.stop().await;
    assert_eq!(cell.count("SELECT sweeps FROM jobs").await, 1);
    assert_eq!(cell.fake.report().requests, 1);
    assert_eq!(cell.verdict().await, Verdict::default());
}
