//! Events of fault handling, one per test: each is provoked, found in log, ledger or provider records, and survived.
//!
//! Crash points provoke other events, and their tests assert those. docs/guarantees.md lists all of them.

use sluicegate::provider::simulated::FakeOptions;

use super::cell::{Cell, Kind, PATIENCE, Setup, until};
use super::trap::Trap;
use super::verdict::Verdict;
use crate::support::rabbitmq::RabbitNode;

/// Of the limit that the provider enforces and its row does not have.
const WINDOW_US: u64 = 3_000_000;
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
    // The provider's first reference: only an outcome has it. The sweeper's statements name outcomes, too.
    let trap = Trap::on(b"ch_1");
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
    assert_eq!(cell.count("SELECT count(*) FROM events").await, 3);
    assert_eq!(cell.verdict().await, Verdict::default());
}

/// Honoured 429: the provider allows less than its row says. No request arrives before the named wait is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_wait_is_honoured_in_full() {
    // The provider row has the first of these limits. However slowly payments are recorded, the second one is exceeded.
    let limits = ["20/1s", "2/3s"].map(|limit| limit.parse().unwrap()).to_vec();
    let setup = Setup::of(Kind::Neither);
    let mut cell = Cell::open("throttled", Setup { fake: FakeOptions { limits, ..setup.fake }, ..setup }).await;
    cell.publish(6).await;
    let worker = cell.worker(None).await;
    cell.until_finished(&worker).await;
    let log = worker.stop().await;
    assert!(log.contains("the provider throttled requests that the limits allowed"), "{log}");
    let arrivals = cell.fake.arrivals_us();
    let refused: Vec<usize> = (2..arrivals.len()).filter(|at| arrivals[*at] - arrivals[*at - 2] < WINDOW_US).collect();
    assert!(!refused.is_empty() && refused.len() as u64 == cell.fake.report().refused_429, "{arrivals:?}");
    for at in refused {
        let next = arrivals.get(at + 1).map(|next| next - arrivals[at - 1]);
        assert!(next.is_none_or(|after| after >= WINDOW_US), "{at} in {arrivals:?}");
    }
    // A 429 uses no attempt.
    assert_eq!(cell.count("SELECT sum(attempts)::bigint FROM jobs").await, 6);
    let verdict = cell.verdict().await;
    assert_eq!(Verdict { breach: 0, ..verdict }, Verdict::default());
    assert_eq!(cell.fake.report().limits[0].breaches, 0);
}

/// A broker that requeues messages after a consumer timeout of a second, and one that blocks publishers. No message is held
/// for as long, however long its payment waits for the limit.
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
    cell.until_finished(&worker).await;
    let log = worker.stop().await;
    assert!(!log.contains("PRECONDITION_FAILED"), "{log}");
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
