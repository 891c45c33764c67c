//! PostgreSQL faults: a killed server, terminated connections, locked rows, permanent errors, and a lost run lock.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LedgerError};
use sqlx::Connection;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_server_keeps_every_commit() {
    let cluster = Postgres::start();
    let database = Database::open(&cluster.create_database("faults"), 4).unwrap();
    database.migrate().await.unwrap();
    let ledger = database.clone();
    let Claim::Claimed(claimed) = ledger.claim(&job("p1"), hash(1), "worker-a").await.unwrap() else { panic!() };
    assert_eq!(ledger.begin_attempt(&claimed.lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    cluster.kill();
    let done = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
    let end = AttemptEnd { number: 1, outcome: "accepted", status: Some(200), detail: String::new(), counts: true };
    let settings = database.clone();
    let (ping, finish, version, state) = tokio::join!(
        ledger.ping(),
        ledger.finish_attempt(&claimed.lease, &end, &done),
        settings.settings_version(),
        database.schema_state()
    );
    let errors = [ping.unwrap_err(), finish.unwrap_err(), version.unwrap_err(), state.unwrap_err()];
    for error in errors {
        assert!(matches!(error, LedgerError::Unavailable(_)), "{error:?}");
    }
    cluster.restart();
    // Everything committed before the kill is still there, and the same pool connects again.
    let claim = ledger.claim(&job("p1"), hash(1), "worker-b").await.unwrap();
    assert_eq!(claim, Claim::NotOpen);
    assert_eq!(ledger.finish_attempt(&claimed.lease, &end, &done).await.unwrap(), FencedWrite::Applied);
    assert_eq!(ledger.place_events(&mut None).await.unwrap(), 1);
}

/// The connections that a crash has broken, and that no statement has used since, say nothing about how many the server
/// allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_grows_again_after_a_crash_of_the_server() {
    const READERS: usize = 12;
    /// More than a pool keeps that takes the server for short of connections.
    const OPEN_MIN: u64 = 5;
    let cluster = Postgres::start();
    let database = Database::open(&cluster.create_database("faults"), 16).unwrap();
    database.migrate().await.unwrap();
    // A connection for batches, which stays in the pool and is broken.
    database.claim(&job("p1"), hash(1), "worker-a").await.unwrap();
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let database = database.clone();
            tokio::spawn(async move {
                loop {
                    let _outcome = database.load_settings().await;
                }
            })
        })
        .collect();
    let open = || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sluicegate'";
        let counted = cluster.psql("faults").args(["-c", sql]).output().unwrap();
        String::from_utf8_lossy(&counted.stdout).trim().parse::<u64>().unwrap_or(0)
    };
    let grows = async || {
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if open() >= OPEN_MIN {
                return;
            }
        }
        panic!("{} connections are open after five seconds", open());
    };
    grows().await;
    cluster.kill();
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.restart();
    grows().await;
    readers.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_connection_is_replaced() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let one_connection = Database::open(&fixture.url, 1).unwrap();
    one_connection.ping().await.unwrap();
    let terminate = "DO $$ BEGIN PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
                     WHERE datname = current_database() AND pid <> pg_backend_pid(); END $$";
    fixture.sql(terminate).await.unwrap();
    // The dead connection is found by its use, or by the check after one second without use.
    if let Err(error) = one_connection.ping().await {
        assert!(matches!(error, LedgerError::Unavailable(_)), "{error:?}");
    }
    one_connection.ping().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_fails_with_lock_timeout() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let hold = fixture.take(&job("p1")).await.lease;
    let mut other = sqlx::PgConnection::connect(&fixture.url).await.unwrap();
    let mut transaction = other.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM jobs FOR UPDATE").execute(&mut *transaction).await.unwrap();
    let error = fixture.database.release(&hold).await.unwrap_err();
    assert!(matches!(&error, LedgerError::Unavailable(text) if text.contains("55P03")), "{error:?}");
    transaction.rollback().await.unwrap();
    assert_eq!(fixture.database.release(&hold).await.unwrap(), FencedWrite::Applied);
}

#[tokio::test]
async fn permanent_errors_are_refused() {
    let missing = Database::open(&Postgres::shared().url("no_such_database"), 1).unwrap();
    let error = missing.ping().await.unwrap_err();
    assert!(matches!(error, LedgerError::StatementFailed(_)), "{error:?}");
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}/absent/ledger.db", directory.path().display());
    let error = Database::open(&url, 1).unwrap().ping().await.unwrap_err();
    assert!(matches!(error, LedgerError::StatementFailed(_)), "{error:?}");
    for url in ["mysql://x/y", "", "postgres://u:secret@db:port/d", "sqlite://x?odd=1"] {
        match Database::open(url, 1) {
            Err(LedgerError::StatementFailed(text)) => {
                assert!(text.contains("database.url") && !text.contains("secret"), "{text}");
            }
            Err(other) => panic!("{url}: {other:?}"),
            Ok(_) => panic!("{url} was opened"),
        }
    }
}

/// The run lock belongs to a database session, which can end without the worker's doing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_lock_is_reacquired_unless_another_has_it() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let end_sessions = async || {
        let of_the_lock = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks \
                           WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database \
                               WHERE datname = current_database())";
        assert_eq!(fixture.one(of_the_lock).await, "1");
        let left = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        while fixture.one(left).await != "0" {
            tokio::task::yield_now().await;
        }
    };
    let other = Database::open(&fixture.url, 2).unwrap();
    let ours = fixture.database.try_run_lock().await.unwrap().unwrap();
    assert!(ours.is_held().await.unwrap());
    assert!(other.try_run_lock().await.unwrap().is_none());
    end_sessions().await;
    assert!(ours.is_held().await.unwrap(), "no other process has taken it");
    assert!(other.try_run_lock().await.unwrap().is_none());
    end_sessions().await;
    let theirs = other.try_run_lock().await.unwrap().unwrap();
    assert!(!ours.is_held().await.unwrap());
    assert!(theirs.is_held().await.unwrap());
    end_sessions().await;
    assert!(ours.is_held().await.unwrap());
    assert!(!theirs.is_held().await.unwrap());
}
