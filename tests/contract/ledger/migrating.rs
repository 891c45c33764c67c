//! Migrations of a later program on PostgreSQL: interrupted, unrecorded and waiting ones. And the file permissions of a
//! new SQLite database.

use std::os::unix::fs::PermissionsExt as _;

use sluicegate::ledger::database::Database;
use sluicegate::ledger::database::SchemaState;
use sqlx::migrate::Migrator;

use super::*;

const INDEX: &str = "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_amount ON jobs (amount);";

/// The PostgreSQL migrations of a later program: this one's, and one more.
async fn later_program(sql: &str) -> &'static Migrator {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir("migrations/postgres").unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(folder.path().join("9001_later.sql"), sql).unwrap();
    // The migrations of a program live as long as it does.
    Box::leak(Box::new(Migrator::new(folder.path()).await.unwrap()))
}

/// A concurrent index build waits for payments that have begun, while later ones pass. The invalid index of an
/// interrupted build is dropped, and the build is repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_index_build_is_repeated() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let later = later_program(INDEX).await;
    let pool = fixture.postgres.clone().unwrap();
    let mut writer = pool.begin().await.unwrap();
    sqlx::query("UPDATE jobs SET cost = 1").execute(&mut *writer).await.unwrap();
    let database = fixture.database.clone();
    let migration = tokio::spawn(async move { database.migrate_by(later).await });
    let ruins = "SELECT count(*) FROM pg_index WHERE NOT indisvalid AND indexrelid = to_regclass('jobs_by_amount')";
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%CONCURRENTLY%'";
    while fixture.one(ruins).await == "0" || fixture.one(waiting).await == "0" {
        assert!(!migration.is_finished(), "the build did not wait for the open transaction");
        tokio::task::yield_now().await;
    }
    fixture.sql("SET lock_timeout = '1s'; UPDATE jobs SET cost = 1").await.unwrap();
    fixture
        .sql("SELECT pg_cancel_backend(pid) FROM pg_stat_progress_create_index WHERE datname = current_database()")
        .await
        .unwrap();
    migration.await.unwrap().unwrap_err();
    assert_eq!(fixture.one(ruins).await, "1");
    writer.rollback().await.unwrap();
    fixture.database.migrate_by(later).await.unwrap();
    let built = "SELECT count(*) FROM pg_index WHERE indisvalid AND indexrelid = to_regclass('jobs_by_amount')";
    assert_eq!((fixture.one(ruins).await, fixture.one(built).await), ("0".to_owned(), "1".to_owned()));
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Newer);
}

/// The client was killed while it waited for the build, and the server finished the build.
#[tokio::test]
async fn unrecorded_finished_index_is_kept() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let later = later_program(INDEX).await;
    fixture.database.migrate_by(later).await.unwrap();
    let index = "SELECT CAST(to_regclass('jobs_by_amount')::oid AS text)";
    let built = fixture.one(index).await;
    fixture.sql("DELETE FROM _sqlx_migrations WHERE version = 9001").await.unwrap();
    fixture.database.migrate_by(later).await.unwrap();
    let recorded = fixture.one("SELECT count(*) FROM _sqlx_migrations WHERE version = 9001").await;
    assert_eq!((fixture.one(index).await, recorded.as_str()), (built, "1"));
}

/// A migration that waits for a long reader would block every later statement behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_migration_does_not_block_payments() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let later = later_program("ALTER TABLE jobs ADD COLUMN colour text;").await;
    let pool = fixture.postgres.clone().unwrap();
    let mut reader = pool.begin().await.unwrap();
    sqlx::query("SELECT FROM jobs").execute(&mut *reader).await.unwrap();
    let database = fixture.database.clone();
    let migration = tokio::spawn(async move { database.migrate_by(later).await });
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock' \
                   AND relation = 'jobs'::regclass";
    while fixture.one(waiting).await == "0" {
        tokio::task::yield_now().await;
    }
    // The wait is longer than a payment may wait, and the reader still reads.
    fixture.sql("SET statement_timeout = '30s'; UPDATE jobs SET cost = 1").await.unwrap();
    assert!(!migration.is_finished());
    reader.rollback().await.unwrap();
    migration.await.unwrap().unwrap();
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Newer);
}

/// The file will hold payments, so only its owner may read it, whatever the umask.
#[tokio::test]
async fn sqlite_files_are_readable_by_owner_only() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("ledger.db").display());
    let database = Database::open(&url, 1).unwrap();
    database.migrate().await.unwrap();
    database.claim(&job("p1"), hash(1), "worker-a").await.unwrap();
    let mut modes: Vec<(String, u32)> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().permissions().mode() & 0o777))
        .collect();
    modes.sort();
    let private = ["ledger.db", "ledger.db-shm", "ledger.db-wal"].map(|name| (name.to_owned(), 0o600));
    assert_eq!(modes, private);
}
