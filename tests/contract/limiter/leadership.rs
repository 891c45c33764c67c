//! Leader election with real servers: two primaries at once, a replaced primary, no primary, and an unavailable
//! database. The rate is judged at the provider, as in [`super::saturation`].

use std::sync::atomic::{AtomicU32, Ordering};

use sluicegate::domain::clock_comparison::ClockAttestation;
use sluicegate::domain::provider::StoreDown;
use sluicegate::ledger::database::Database;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::leader_election::{LeadershipTiming, SHARE_HOLDER};
use sluicegate::limiter::leadership::LeaderGuardedLimiter;
use sluicegate::limiter::redis::client::RedisLimiter;
use tokio::task::block_in_place;
use tokio::time::{sleep, timeout};

use super::saturation::load::{Works, quota};
use super::saturation::switch::Switch;
use super::saturation::{TRAFFIC, judge};
use super::*;
use crate::support::postgres::Postgres;
use crate::support::redis::{Redis, RedisOptions};

const POLL: Duration = Duration::from_millis(100);
/// The timing of a real cluster, shortened.
pub const TIMING: LeadershipTiming = LeadershipTiming {
    share_after: Duration::from_millis(500),
    share_ends_after: Duration::from_millis(500),
    share_min_duration: Duration::from_secs(2),
    ..LeadershipTiming::with_poll_interval(POLL)
};

fn spec(store_down: StoreDown) -> QuotaSpec {
    QuotaSpec { store_down, handover: TIMING.handover(), ..quota() }
}

/// The leader rows of one test.
pub struct Rows {
    database: Database,
    ledger: Database,
}

impl Rows {
    async fn on(url: &str) -> Self {
        let database = Database::open(url, 8).unwrap();
        database.migrate().await.unwrap();
        Self { ledger: database.clone(), database }
    }

    pub async fn on_postgres() -> Self {
        static DATABASES: AtomicU32 = AtomicU32::new(0);
        let name = format!("authority_{}", DATABASES.fetch_add(1, Ordering::Relaxed));
        let url = block_in_place(|| Postgres::shared().create_database(&name));
        Self::on(&url).await
    }

    /// A process's limiter, with its own connections.
    pub fn limiter(&self, url: &str) -> Arc<dyn Limiter> {
        let store = Arc::new(RedisLimiter::new(url, "authority").unwrap());
        Arc::new(LeaderGuardedLimiter::new(store, Arc::new(self.ledger.clone()), TIMING))
    }

    /// Holder and term; an empty holder and term 0 if there is no row yet.
    async fn held(&self) -> (String, i64) {
        let quota = quota().quota;
        let rows = self.ledger.stored_leaders(std::slice::from_ref(&quota)).await.unwrap();
        rows.get(&quota).map_or((String::new(), 0), |row| (row.holder.clone(), row.term))
    }

    /// The clock attestation stored last.
    pub async fn word(&self) -> Option<ClockAttestation> {
        let quota = quota().quota;
        let rows = self.ledger.stored_leaders(std::slice::from_ref(&quota)).await.unwrap();
        rows.get(&quota).and_then(|row| row.attestation).map(|(word, _)| word)
    }

    async fn until(&self, what: &str, is_so: impl Fn(&str, i64) -> bool) {
        let so = async {
            loop {
                let (holder, term) = self.held().await;
                if is_so(&holder, term) {
                    return;
                }
                sleep(POLL / 5).await;
            }
        };
        assert!(timeout(30 * SECOND, so).await.is_ok(), "timed out waiting until {what}: {:?}", self.held().await);
    }

    /// Waits until the term has changed this many times.
    async fn until_passed_on(&self, times: u32) {
        let (mut last, mut changes) = (self.held().await.1, 0);
        let passed_on = async {
            while changes < times {
                sleep(POLL / 5).await;
                let (_, term) = self.held().await;
                changes += u32::from(term != last);
                last = term;
            }
        };
        assert!(
            timeout(30 * SECOND, passed_on).await.is_ok(),
            "the leader row did not change: {:?}",
            self.held().await
        );
    }
}

fn run_id(redis: &Redis) -> String {
    let info: String = block_in_place(|| redis.command("INFO server"));
    let id = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap();
    format!("redis:{}", id.trim())
}

/// A fail-over that leaves the old primary writable, with one process still connected to it.
#[tokio::test(flavor = "multi_thread")]
async fn two_writable_primaries_at_once() {
    let (first, second) = (Redis::start(), Redis::start());
    let rows = Rows::on_postgres().await;
    let mut switches = Vec::new();
    for _ in 0..3 {
        switches.push(Switch::to(first.port).await);
    }
    let mut next = switches.iter();
    let works = Works::start_with(spec(StoreDown::Wait), || rows.limiter(&next.next().unwrap().url()));
    works.flows(TRAFFIC).await;
    switches[0].turn_to(second.port);
    // Each becomes the holder in turn, and none for long enough.
    rows.until_passed_on(8).await;
    let before = works.requests();
    rows.until_passed_on(8).await;
    assert_eq!(works.requests(), before, "granted while the limiter leader was changing");
    switches[1].turn_to(second.port);
    switches[2].turn_to(second.port);
    works.flows(TRAFFIC).await;
    assert_eq!(rows.held().await.0, run_id(&second));
    judge(&works.end().await);
}

/// Two primaries from the start: half of the processes see only the one, half only the other.
#[tokio::test(flavor = "multi_thread")]
async fn processes_that_begin_on_different_primaries() {
    let (first, second) = (Redis::start(), Redis::start());
    let rows = Rows::on_postgres().await;
    let (one, another) = (Switch::to(first.port).await, Switch::to(second.port).await);
    let mut next = [&one, &another, &another].into_iter();
    let works = Works::start_with(spec(StoreDown::Wait), || rows.limiter(&next.next().unwrap().url()));
    rows.until_passed_on(8).await;
    assert_eq!(works.requests(), 0);
    one.turn_to(second.port);
    works.flows(2 * TRAFFIC).await;
    judge(&works.end().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_replaced_by_another() {
    let (first, second) = (Redis::start(), Redis::start());
    let rows = Rows::on_postgres().await;
    let switch = Switch::to(first.port).await;
    let works = Works::start_with(spec(StoreDown::Wait), || rows.limiter(&switch.url()));
    works.flows(TRAFFIC).await;
    let (holder, term) = rows.held().await;
    assert_eq!(holder, run_id(&first));
    switch.turn_to(second.port);
    works.flows(TRAFFIC).await;
    let after = rows.held().await;
    assert_eq!(after.0, run_id(&second));
    assert!(after.1 > term);
    judge(&works.end().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_grant_shares_while_store_is_down() {
    let redis = Redis::start_with(RedisOptions { is_forgetful: true, ..RedisOptions::default() });
    let rows = Rows::on_postgres().await;
    let works = Works::start_with(spec(StoreDown::Share { workers: 3 }), || rows.limiter(&redis.url()));
    works.flows(TRAFFIC).await;
    block_in_place(|| redis.kill());
    rows.until("the processes share the limits", |holder, _| holder == SHARE_HOLDER).await;
    works.flows(TRAFFIC).await;
    assert_eq!(rows.held().await.0, SHARE_HOLDER);
    block_in_place(|| redis.restart());
    let back = run_id(&redis);
    rows.until("the store is the leader again", |holder, _| holder == back).await;
    works.flows(TRAFFIC).await;
    judge(&works.end().await);
}

/// Only the leader row says which limiter may grant. While the database is unavailable, no permit is granted.
#[tokio::test(flavor = "multi_thread")]
async fn unavailable_database_stops_grants() {
    let (redis, postgres) = (Redis::start(), block_in_place(Postgres::start));
    let rows = Rows::on(&block_in_place(|| postgres.create_database("authority"))).await;
    let works = Works::start_with(spec(StoreDown::Wait), || rows.limiter(&redis.url()));
    works.flows(TRAFFIC).await;
    let held = rows.held().await;
    block_in_place(|| postgres.kill());
    works.all_say("the leader row cannot be read").await;
    // Permits granted before may still start.
    sleep(BOOKING_HORIZON + quota().send_budget + quota().hold_max).await;
    let before = works.requests();
    sleep(SECOND).await;
    assert_eq!(works.requests(), before, "granted while the leader row could not be read");
    block_in_place(|| postgres.restart());
    works.flows(TRAFFIC).await;
    assert_eq!(rows.held().await, held, "no other limiter became leader meanwhile");
    judge(&works.end().await);
    rows.database.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_down_wait_never_shares() {
    let redis = Redis::start();
    let rows = Rows::on("sqlite::memory:").await;
    let works = Works::start_with(spec(StoreDown::Wait), || rows.limiter(&redis.url()));
    works.flows(TRAFFIC).await;
    let held = rows.held().await;
    block_in_place(|| redis.kill());
    works.all_say("127.0.0.1").await;
    // Far longer than `share_after`.
    sleep(6 * TIMING.share_after).await;
    assert_eq!(rows.held().await, held);
    block_in_place(|| redis.restart());
    works.flows(TRAFFIC).await;
    let after = rows.held().await;
    assert_eq!(after.0, run_id(&redis));
    judge(&works.end().await);
}

/// Without a rebuild, a lost state stays cold until no other process can be granted anything, plus a window and a hold.
#[tokio::test]
async fn cold_start_waits_for_unaware_processes() {
    let redis: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&Redis::shared().url(), "handover").unwrap());
    let embedded: Arc<dyn Limiter> = Arc::new(EmbeddedLimiter::new());
    for limiter in [redis, embedded] {
        for handover in [Duration::ZERO, Duration::from_millis(3_050)] {
            let quota = ProviderName::new(format!("handover-{}", handover.as_millis())).unwrap();
            let spec = QuotaSpec { quota, handover, ..spec(StoreDown::Wait) };
            let cold = refused(&Caller::new(&limiter, spec.clone()).call(&[]).await);
            let before = handover + BOOKING_HORIZON + spec.hold_max;
            let wait_us = u64::try_from(before.as_micros()).unwrap() + padded_us(&spec, 0);
            assert_eq!((cold.reason, cold.wait_us), (RefusalReason::Cold, wait_us));
        }
    }
}
