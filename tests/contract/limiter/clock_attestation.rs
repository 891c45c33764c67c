//! Clock attestations: a process that starts after the store's clock has stepped. It reads from the database the offset
//! that an earlier process recorded.

use sluicegate::limiter::gate::{Gate, Permit};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::leadership::{Rows, TIMING};
use super::saturation::load::{self, Attempts, quota_of};
use super::saturation::permit;
use super::*;
use crate::support::clock::{move_clock, redis_with_false_clock};
use crate::support::redis::Redis;

const LIMIT: u32 = 20;
/// Longer than a new process takes to get its first permit.
const WINDOW: Duration = Duration::from_secs(8);

/// A process of one quota, with its own connections and gate.
struct Process {
    gate: Gate,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Process {
    fn start(rows: &Rows, redis: &Redis, attempts: &Arc<Attempts>) -> Self {
        let mut spec = QuotaSpec { handover: TIMING.handover(), ..quota_of(LIMIT) };
        spec.limits[0].window = WINDOW;
        let (limiter, stop, mut tasks) = (rows.limiter(&redis.url()), CancellationToken::new(), JoinSet::new());
        limiter.open_quota(&spec);
        let (tended, ended) = (limiter.clone(), stop.clone());
        tasks.spawn(async move { tended.run_background(ended).await });
        let (gate, run) = load::gate(limiter, attempts, spec, &stop);
        tasks.spawn(run);
        Self { gate, stop, tasks }
    }

    /// Sends this many requests, each answered at once. Returns when the first was answered.
    async fn requests(&self, number: u32, attempts: &Attempts) -> Instant {
        let mut first = None;
        for _ in 0..number {
            let permit: Permit = permit(&self.gate).await;
            attempts.begin();
            let in_flight = permit.begin().unwrap();
            in_flight.release_used(Instant::now());
            attempts.end();
            first.get_or_insert_with(Instant::now);
        }
        first.unwrap()
    }

    /// Ends the process after its releases are reported.
    async fn end(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn until_word(rows: &Rows) {
    let stored = async {
        while rows.word().await.is_none() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(timeout(30 * SECOND, stored).await.is_ok(), "no process has stored an attestation");
}

/// When the state of the quota began: bytes 17 to 23 of its head.
fn born(redis: &Redis) -> Vec<u8> {
    let state: Vec<u8> = block_in_place(|| redis.command("HGET authority:{acme} m"));
    state[16..23].to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn new_process_respects_window_after_clock_step() {
    for millis in [30_000, 1_000, -30_000] {
        let (redis, clock) = block_in_place(redis_with_false_clock);
        let (rows, attempts) = (Rows::on_postgres().await, Arc::new(Attempts::default()));
        let before = Process::start(&rows, &redis, &attempts);
        let first = before.requests(LIMIT, &attempts).await;
        until_word(&rows).await;
        before.end().await;
        block_in_place(|| move_clock(&clock, millis));
        let after = Process::start(&rows, &redis, &attempts);
        let granted = permit(&after.gate).await;
        let apart = granted.start_at.saturating_duration_since(first);
        assert!(apart >= WINDOW, "{LIMIT} requests and one more within {apart:?} after a clock step of {millis} ms");
        drop(granted);
        after.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_process_keeps_state_without_clock_step() {
    let redis = block_in_place(Redis::start);
    let (rows, attempts) = (Rows::on_postgres().await, Arc::new(Attempts::default()));
    let before = Process::start(&rows, &redis, &attempts);
    before.requests(LIMIT - 2, &attempts).await;
    until_word(&rows).await;
    before.end().await;
    let epoch = born(&redis);
    let after = Process::start(&rows, &redis, &attempts);
    after.requests(2, &attempts).await;
    assert_eq!(born(&redis), epoch, "the state was reset though the clock did not step");
    after.end().await;
}
