//! Debian's PgBouncer between a worker and PostgreSQL: session mode works, every other pool mode is refused.

use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::database::SchemaState;
use sqlx::Connection;

use super::*;
use crate::support::pgbouncer::PgBouncer;

const ADVISORY_LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_mode_keeps_every_setting_and_no_lock() {
    let fixture = Fixture::empty(Kind::Postgres);
    let bouncer = PgBouncer::start("session", &fixture.url);
    let database = Database::open(&bouncer.url(&fixture.url), 4).unwrap();
    for _ in 0..2 {
        database.migrate().await.unwrap();
        // PgBouncer keeps the server connection that ran the migration.
        assert_eq!(fixture.one(ADVISORY_LOCKS).await, "0");
    }
    let Claim::Claimed(claimed) = database.claim(&job("p1"), hash(1), "worker-a").await.unwrap() else { panic!() };
    // The lock timeout of the session ends the wait for a row that another transaction holds.
    let mut other = sqlx::PgConnection::connect(&fixture.url).await.unwrap();
    let mut transaction = other.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM jobs FOR UPDATE").execute(&mut *transaction).await.unwrap();
    let error = database.release(&claimed.lease).await.unwrap_err();
    assert!(matches!(&error, LedgerError::Unavailable(text) if text.contains("55P03")), "{error:?}");
    transaction.rollback().await.unwrap();
    let settings = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = \
                    'client backend' AND pid <> pg_backend_pid() AND application_name = 'sluicegate'";
    assert_ne!(fixture.one(settings).await, "0", "no connection uses the pooler");
    database.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_pool_modes_are_refused_without_changes() {
    for mode in ["transaction", "statement"] {
        let fixture = Fixture::empty(Kind::Postgres);
        let bouncer = PgBouncer::start(mode, &fixture.url);
        let database = Database::open(&bouncer.url(&fixture.url), 4).unwrap();
        let is_refused = |error: LedgerError| {
            let names_fix = |text: &str| text.contains("database.url") && text.contains("pool_mode = session");
            assert!(matches!(&error, LedgerError::StatementFailed(text) if names_fix(text)), "{mode}: {error:?}");
        };
        is_refused(database.migrate().await.unwrap_err());
        assert_eq!(fixture.one(ADVISORY_LOCKS).await, "0", "{mode}");
        assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::NotMigrated, "{mode}");
        is_refused(database.ping().await.unwrap_err());
        is_refused(database.schema_state().await.unwrap_err());
    }
}
