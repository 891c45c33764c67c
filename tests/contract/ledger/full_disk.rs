//! SQLite after an error that ended its transaction (a full disk, an I/O error), and with a reader that holds its
//! write-ahead log.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};
use sqlx::Connection as _;
use sqlx::sqlite::SqliteConnection;

use super::*;

/// `RAISE(ROLLBACK)` ends the transaction, as SQLite itself does after an I/O error.
const ENDS_TRANSACTIONS: &str =
    "CREATE TRIGGER ends_jobs BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ROLLBACK, 'disk I/O error'); END";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_is_replaced_after_an_error_that_ended_its_transaction() {
    let fixture = Fixture::migrated(Kind::SqliteFile).await;
    let ledger = &fixture.database;
    let [one, two] = [fixture.take(&job("p1")).await.lease, fixture.take(&job("p2")).await.lease];
    for (lease, id) in [(&one, "p1"), (&two, "p2")] {
        assert_eq!(ledger.begin_attempt(lease, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    }
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    let delay = Duration::from_millis(5);
    let finish = || async {
        let each = [&one, &two].map(|lease| ledger.finish_attempt_batched(lease, &end, &done, delay));
        futures_util::future::join_all(each).await
    };
    fixture.sql(ENDS_TRANSACTIONS).await.unwrap();
    for result in finish().await {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("disk I/O error"), "{error}");
    }
    fixture.sql("DROP TRIGGER ends_jobs").await.unwrap();
    for result in finish().await {
        assert_eq!(result.unwrap().0, FencedWrite::Applied);
    }
    assert_eq!(fixture.one("SELECT count(*) FROM events").await, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_that_holds_the_log_is_found() {
    let fixture = Fixture::migrated(Kind::SqliteFile).await;
    let grow = "INSERT INTO filler VALUES (randomblob(40000000))";
    fixture.sql("CREATE TABLE filler (x BLOB)").await.unwrap();
    let mut reader = SqliteConnection::connect(&fixture.url).await.unwrap();
    let mut reading = reader.begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM filler").execute(&mut *reading).await.unwrap();
    fixture.sql(grow).await.unwrap();
    let held = fixture.database.checkpoint_held_wal().await.unwrap();
    assert!(held.is_some_and(|bytes| bytes > 40_000_000), "{held:?}");
    reading.rollback().await.unwrap();
    // It is checkpointed, and then cut at the next write.
    assert_eq!(fixture.database.checkpoint_held_wal().await.unwrap(), None);
    fixture.sql("DELETE FROM filler WHERE false; INSERT INTO filler VALUES (x'00')").await.unwrap();
    let wal = std::fs::metadata(format!("{}-wal", fixture.url.trim_start_matches("sqlite://"))).unwrap().len();
    assert!(wal <= 32 << 20, "{wal} bytes");
}
