//! Interrupted and unrecorded migrations of PostgreSQL, and the file permissions of a new SQLite database.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use sluicegate::ledger::database::SchemaState;
use sqlx::migrate::Migrator;

use super::*;

/// A concurrent index build waits for payments that have begun, while later ones pass. The invalid index of an
/// interrupted build is dropped, and the build is repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_index_build_is_repeated() {
    let fixture = Fixture::empty(Kind::Postgres);
    let pool = fixture.postgres.clone().unwrap();
    // The next migration builds the index.
    Migrator::new(Path::new("migrations/postgres")).await.unwrap().run_to(20, &pool).await.unwrap();
    let mut writer = pool.begin().await.unwrap();
    sqlx::query("UPDATE jobs SET cost = 1").execute(&mut *writer).await.unwrap();
    let database = fixture.database.clone();
    let migration = tokio::spawn(async move { database.migrate().await });
    let ruins =
        "SELECT count(*) FROM pg_index WHERE NOT indisvalid AND indexrelid = to_regclass('jobs_parked_for_limits')";
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
    fixture.database.migrate().await.unwrap();
    assert_eq!(fixture.one(ruins).await, "0");
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Current);
}

/// The client was killed while it waited for the build, and the server finished the build.
#[tokio::test]
async fn unrecorded_finished_index_is_kept() {
    let fixture = Fixture::empty(Kind::Postgres);
    let pool = fixture.postgres.clone().unwrap();
    fixture.database.migrate().await.unwrap();
    let index = "SELECT CAST(to_regclass('jobs_waiting_for_limits')::oid AS text)";
    let built = fixture.one(index).await;
    fixture.sql("DELETE FROM _sqlx_migrations WHERE version = 52").await.unwrap();
    assert_ne!(fixture.database.schema_state().await.unwrap(), SchemaState::Current);
    fixture.database.migrate().await.unwrap();
    assert_eq!(
        (fixture.one(index).await, fixture.database.schema_state().await.unwrap()),
        (built, SchemaState::Current)
    );
    pool.close().await;
}

/// The file will hold payments, so only its owner may read it, whatever the umask.
#[tokio::test]
async fn sqlite_files_are_readable_by_owner_only() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("ledger.db").display());
    let database = Database::open(&url, 1).unwrap();
    database.migrate().await.unwrap();
    database.ledger().claim(&job("p1"), hash(1), "worker-a", LEASE).await.unwrap();
    let mut modes: Vec<(String, u32)> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().permissions().mode() & 0o777))
        .collect();
    modes.sort();
    let private = ["ledger.db", "ledger.db-shm", "ledger.db-wal"].map(|name| (name.to_owned(), 0o600));
    assert_eq!(modes, private);
}
