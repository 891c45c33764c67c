//! PostgreSQL draws the sequence of an event before its commit, so events appear in another order.

use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres as Server, Transaction};

use super::*;

/// Open transactions, each of which has written the event of one payment.
struct Late {
    fixture: Fixture,
    pool: PgPool,
}

impl Late {
    async fn open(payments: &[&str]) -> Self {
        let fixture = Fixture::migrated(Kind::Postgres).await;
        for id in payments {
            let hold = fixture.take(&job(id)).await.lease;
            assert_eq!(fixture.database.release(&hold).await.unwrap(), FencedWrite::Applied);
        }
        let pool = PgPoolOptions::new().max_connections(4).connect(&fixture.url).await.unwrap();
        Self { fixture, pool }
    }

    async fn begin(&self) -> Transaction<'static, Server> {
        let mut transaction = self.pool.begin().await.unwrap();
        sqlx::raw_sql("SELECT pg_current_xact_id()").execute(&mut *transaction).await.unwrap();
        transaction
    }

    /// Ends a payment by SQL, with its event, in a transaction that stays open.
    async fn ends(&self, id: &str, transaction: &mut Transaction<'static, Server>) {
        let ending = AssertSqlSafe(format!("UPDATE jobs SET state = 'expired' WHERE id = '{id}'"));
        sqlx::raw_sql(ending).execute(&mut **transaction).await.unwrap();
    }

    async fn order(&self) -> Vec<String> {
        self.fixture.ordered_events().await.into_iter().map(|event| event.id).collect()
    }

    async fn gaps(&self) -> String {
        self.fixture.one("SELECT gaps FROM event_batches ORDER BY position DESC LIMIT 1").await
    }
}

/// A reader of all sequences above the last one would lose this event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_commit_gets_the_next_place() {
    let late = Late::open(&["a", "b", "c"]).await;
    let mut open = late.begin().await;
    late.ends("a", &mut open).await;
    late.fixture.finish_at_once("b2").await;
    assert_eq!(late.order().await, ["b2"]);
    // Whatever happens meanwhile, its gap is known.
    for number in 0..5 {
        late.fixture.finish_at_once(&format!("more-{number}")).await;
        late.fixture.place_events().await;
    }
    open.commit().await.unwrap();
    assert_eq!(late.order().await, ["b2", "more-0", "more-1", "more-2", "more-3", "more-4", "a"]);
    let mut order = None;
    late.fixture.database.place_events(&mut order).await.unwrap();
    late.fixture.database.place_events(&mut order).await.unwrap();
    assert_eq!(late.order().await.len(), 7, "each once");
}

/// The oldest transaction that a snapshot names is not always older than a gap's: with these two, it is that of the
/// gap. Only a transaction that begins after the look is certainly younger.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gap_is_kept_until_its_own_transaction_ends() {
    let late = Late::open(&["a", "b"]).await;
    let ledger = late.fixture.database.clone();
    let mut older = late.begin().await;
    let mut younger = late.begin().await;
    late.ends("a", &mut younger).await;
    late.ends("b", &mut older).await;
    older.commit().await.unwrap();
    let mut order = None;
    for _ in 0..3 {
        assert_eq!(ledger.place_events(&mut order).await.unwrap(), 1);
    }
    younger.commit().await.unwrap();
    assert_eq!(ledger.place_events(&mut order).await.unwrap(), 2);
    assert_eq!(late.order().await, ["b", "a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gap_of_a_rollback_is_forgotten() {
    let late = Late::open(&["a"]).await;
    let ledger = late.fixture.database.clone();
    let mut open = late.begin().await;
    late.ends("a", &mut open).await;
    late.fixture.finish_at_once("b").await;
    let mut order = None;
    ledger.place_events(&mut order).await.unwrap();
    assert_eq!(late.gaps().await, "{[1,2)}");
    open.rollback().await.unwrap();
    // Transactions of other tests are writers of the same server.
    let forgotten = async {
        for number in 0.. {
            late.fixture.finish_at_once(&format!("more-{number}")).await;
            ledger.place_events(&mut order).await.unwrap();
            if late.gaps().await == "{}" {
                return number + 2;
            }
        }
        0
    };
    let events = tokio::time::timeout(Duration::from_secs(60), forgotten).await.unwrap();
    assert_eq!(late.order().await.len(), events);
}

/// Two sequencers with the same order: the one that was frozen places nothing, whatever it has seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_sequencer_places_nothing() {
    let late = Late::open(&[]).await;
    let ledger = late.fixture.database.clone();
    late.fixture.finish_at_once("a").await;
    let mut frozen = None;
    ledger.place_events(&mut frozen).await.unwrap();
    let mut successor = None;
    late.fixture.finish_at_once("b").await;
    assert_eq!(ledger.place_events(&mut successor).await.unwrap(), 2);
    late.fixture.finish_at_once("c").await;
    // By its order, `b` and `c` follow.
    assert_eq!(ledger.place_events(&mut frozen).await.unwrap(), 1);
    assert_eq!(ledger.place_events(&mut frozen).await.unwrap(), 3, "it continues with the successor's order");
    assert_eq!(ledger.place_events(&mut successor).await.unwrap(), 2);
    assert_eq!(ledger.place_events(&mut successor).await.unwrap(), 3);
    assert_eq!(late.order().await, ["a", "b", "c"]);
}

/// A batch after one that the database has lost would leave places without events, and no reader would pass them.
#[tokio::test]
async fn sequencer_of_a_lost_order_places_nothing() {
    let late = Late::open(&[]).await;
    let ledger = late.fixture.database.clone();
    let mut order = None;
    for id in ["a", "b"] {
        late.fixture.finish_at_once(id).await;
        ledger.place_events(&mut order).await.unwrap();
    }
    late.fixture.sql("DELETE FROM event_batches WHERE position = 2").await.unwrap();
    late.fixture.sql("DELETE FROM events WHERE job_id = 'b'").await.unwrap();
    late.fixture.finish_at_once("c").await;
    ledger.place_events(&mut order).await.unwrap();
    let batches = late.fixture.one("SELECT count(*) FROM event_batches").await;
    assert_eq!(batches, "1", "its order follows a batch that is lost");
    assert_eq!(ledger.place_events(&mut order).await.unwrap(), 2, "it continues with the order that the ledger has");
    assert_eq!(late.order().await, ["a", "c"]);
}

/// Several sequencers, and writers that commit in any order: each event has one place, and those of a payment keep
/// their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_sequencers_make_one_order() {
    const WRITERS: usize = 4;
    const EVENTS: i64 = 60;
    let late = Late::open(&["a"]).await;
    late.fixture.finish_at_once("p0").await;
    let write = async |writer: usize| {
        for n in 2..2 + EVENTS {
            let mut open = late.begin().await;
            let event = format!(
                "INSERT INTO events (job_id, n, provider, state, attempts, at) \
                 VALUES ('w{writer}', {n}, 'stripe', 'expired', 0, now())"
            );
            sqlx::raw_sql(AssertSqlSafe(event)).execute(&mut *open).await.unwrap();
            // Of each three transactions, one is rolled back, and one commits after a later one of another writer.
            match n % 3 {
                0 => open.rollback().await.unwrap(),
                1 => {
                    tokio::task::yield_now().await;
                    open.commit().await.unwrap();
                }
                _ => open.commit().await.unwrap(),
            }
        }
    };
    let sequence = async || {
        let mut order = None;
        for _ in 0..100 {
            late.fixture.database.place_events(&mut order).await.unwrap();
        }
    };
    let writers = futures_util::future::join_all((0..WRITERS).map(write));
    tokio::join!(writers, sequence(), sequence());
    let events = late.fixture.ordered_events().await;
    let committed: usize = late.fixture.one("SELECT count(*) FROM events").await.parse().unwrap();
    assert_eq!(events.len(), committed);
    assert_eq!(events.iter().map(|event| event.sequence).collect::<BTreeSet<_>>().len(), committed);
    for writer in 0..WRITERS {
        let numbers: Vec<u32> =
            events.iter().filter(|event| event.id == format!("w{writer}")).map(|event| event.n).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
    }
}

/// Otherwise a gap could be forgotten before its transaction is known as a writer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_is_never_the_first_write() {
    let late = Late::open(&["waits", "by-sql", "decided"]).await;
    let fixture = &late.fixture;
    let rule = "ALTER TABLE events ADD CONSTRAINT writes_before CHECK (pg_current_xact_id_if_assigned() IS NOT NULL)";
    fixture.sql(rule).await.unwrap();
    let first = "INSERT INTO events (job_id, n, provider, state, attempts, at) VALUES ('x', 1, 'x', 'dead', 0, now())";
    fixture.finish_at_once("transition").await;
    // Some numbers of a sequence are logged, and are the first write then.
    let mut refused = 0;
    for _ in 0..3 {
        refused += u32::from(fixture.sql(first).await.is_err_and(|error| error.contains("writes_before")));
    }
    assert!(refused > 0, "the rule sees no first write");
    let hold = fixture.take(&job("request")).await.lease;
    let begin_result = fixture.database.begin_attempt(&hold, &request("request"), AT_ONCE).await.unwrap();
    assert_eq!(begin_result, BeginResult::Attempt(1));
    let end = AttemptEnd { number: 1, outcome: "accepted", status: None, detail: String::new(), counts: true };
    let done = JobState::Final { state: FinalState::Declined, reason: "no".to_owned(), reference: None };
    assert_eq!(fixture.database.finish_attempt(&hold, &end, &done).await.unwrap(), FencedWrite::Applied);
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id = 'by-sql'").await.unwrap();
    settled(fixture.database.resolve_job(&id("decided"), &JobResolution::Cancel, None, &by()).await).unwrap();
    fixture.sql("SELECT jobs_cancel_ahead('ahead', 'stripe', 'because')").await.unwrap();
    fixture.finish_at_once("waits").await;
    let old = Job { expires_at: Some(sluicegate::domain::time::EpochMs(1)), ..job("old") };
    let hold = fixture.take(&old).await.lease;
    assert_eq!(fixture.database.release(&hold).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.database.expire("late", 10).await.unwrap(), 1);
    assert_eq!(fixture.one("SELECT count(*) FROM events WHERE job_id <> 'x'").await, "7");
}
