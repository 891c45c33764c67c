//! Bringing a database to this program's schema, and telling how far it is.
//!
//! Refuses to hold payments up: a table that is in use is waited for a second at a time. Refuses to wait for anything for
//! ever.

use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlitePool};

use super::LedgerError;
use super::database::{RUN_LOCK_KEY, SchemaState};
use super::migrations::{POSTGRES, SQLITE, built_concurrently, is_built_concurrently};
use super::sql::connections::Connections;
use super::sql::error::{from_postgres, lock_not_available};
use super::sql::sqlite;

/// The migrator's own table, <https://docs.rs/sqlx/0.9.0/sqlx/migrate/struct.Migrator.html>.
const MIGRATIONS_TABLE: &str = "_sqlx_migrations";

/// Key of the advisory lock of those who migrate, one after the other.
const MIGRATE_LOCK: i64 = RUN_LOCK_KEY + 1;
const MIGRATE_LOCK_POLL: Duration = Duration::from_millis(100);
const MIGRATE_LOCK_TRIES: u32 = 3_000;

/// How long a migration waits for a table at a time: whoever wants the table after it waits behind it. Payments pass in the
/// pauses; a reader of five minutes is waited for.
const TABLE_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const TABLE_LOCK_PAUSE: Duration = Duration::from_secs(4);
const TABLE_LOCK_TRIES: u32 = 60;
/// The same of an index that is built beside the payments: it waits for those transactions that were there before.
const CONCURRENT_INDEX_TIMEOUT: Duration = Duration::from_secs(300);

/// The migrator's advisory lock lets one process through at a time; the others find nothing left to do. Its connection is no
/// other's, neither here nor behind a pooler, so the lock ends with it at the latest.
pub async fn migrate_postgres(pool: &Connections) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| from_postgres(&error);
    let mut connection = pool.open_dedicated().await.map_err(away)?;
    let result = migrate_connection(&mut connection).await;
    connection.close().await.map_err(away)?;
    result
}

async fn migrate_connection(connection: &mut PgConnection) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| from_postgres(&error);
    let encoding: String =
        sqlx::query_scalar("SHOW server_encoding").fetch_one(&mut *connection).await.map_err(away)?;
    if encoding != "UTF8" {
        return Err(LedgerError::Refused(format!(
            "the database's encoding is {encoding}: create it with ENCODING 'UTF8'"
        )));
    }
    wait_for_migrate_lock(connection).await?;
    let migrated = migrate_locked(connection).await;
    let unlock = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(MIGRATE_LOCK);
    let unlocked: Result<bool, _> = unlock.fetch_one(&mut *connection).await;
    match (migrated, unlocked) {
        (Ok(()), Ok(true)) => Ok(()),
        (Ok(()), Ok(false)) => {
            let text = "the lock of the migration was lost meanwhile: see pg_locks, and migrate again";
            Err(LedgerError::Unavailable(text.to_owned()))
        }
        (Ok(()), Err(error)) => Err(away(error)),
        (Err(error), _) => Err(error),
    }
}

async fn migrate_locked(connection: &mut PgConnection) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| from_postgres(&error);
    // The pool's limit is for payments, and a migration may take long.
    sqlx::raw_sql("SET statement_timeout = 0").execute(&mut *connection).await.map_err(away)?;
    let mut tries = 1;
    loop {
        match try_migrations(connection).await {
            Err(MigrateError::ExecuteMigration(error, version))
                if lock_not_available(&error) && tries < TABLE_LOCK_TRIES && !is_built_concurrently(version) =>
            {
                tracing::warn!(
                    version,
                    "a table is in use: the migration tries again, so that payments pass meanwhile"
                );
                tokio::time::sleep(TABLE_LOCK_PAUSE).await;
                tries += 1;
            }
            result => return result.map_err(|error| migration_failed(error, from_postgres)),
        }
    }
}

/// Another process's migration is waited for, but not for ever. It is asked about and not waited for by a statement: an index
/// that is built beside the payments waits for every statement that has begun, and each would wait for the other.
async fn wait_for_migrate_lock(connection: &mut PgConnection) -> Result<(), LedgerError> {
    let ours = "SELECT pg_try_advisory_lock($1)";
    for _ in 0..MIGRATE_LOCK_TRIES {
        let ours: Result<bool, _> = sqlx::query_scalar(ours).bind(MIGRATE_LOCK).fetch_one(&mut *connection).await;
        if ours.map_err(|error| from_postgres(&error))? {
            return Ok(());
        }
        tokio::time::sleep(MIGRATE_LOCK_POLL).await;
    }
    Err(LedgerError::Unavailable(
        "another process has been migrating this database for minutes; see pg_stat_activity".to_owned(),
    ))
}

/// File after file. Nobody waits behind an index that is built beside the payments, so that it may wait for longer.
async fn try_migrations(connection: &mut PgConnection) -> Result<(), MigrateError> {
    for (version, index) in built_concurrently() {
        wait_for_tables(connection, TABLE_LOCK_TIMEOUT).await?;
        POSTGRES.run_direct(Some(version - 1), connection, false).await?;
        wait_for_tables(connection, CONCURRENT_INDEX_TIMEOUT).await?;
        drop_invalid_index(connection, index).await.map_err(|error| MigrateError::ExecuteMigration(error, version))?;
        POSTGRES.run_direct(Some(version), connection, false).await?;
    }
    wait_for_tables(connection, TABLE_LOCK_TIMEOUT).await?;
    POSTGRES.run_direct(None, connection, false).await
}

async fn wait_for_tables(connection: &mut PgConnection, at_most: Duration) -> Result<(), MigrateError> {
    let limit = AssertSqlSafe(format!("SET lock_timeout = '{}ms'", at_most.as_millis()));
    sqlx::raw_sql(limit).execute(&mut *connection).await?;
    Ok(())
}

/// An index whose build was cut off is of no use, and in the way of the next try: it was built outside a transaction.
async fn drop_invalid_index(connection: &mut PgConnection, index: &str) -> Result<(), sqlx::Error> {
    let is_cut_off = "SELECT EXISTS (SELECT 1 FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid)";
    if sqlx::query_scalar(is_cut_off).bind(index).fetch_one(&mut *connection).await? {
        let drop = AssertSqlSafe(format!("DROP INDEX CONCURRENTLY {index}"));
        sqlx::raw_sql(drop).execute(&mut *connection).await?;
    }
    Ok(())
}

/// SQLite's migrator takes no lock, so the whole run is one transaction that holds the write lock from its first moment.
pub async fn migrate_sqlite(pool: &SqlitePool) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| sqlite::from_sqlite(&error);
    let mut connection = sqlite::acquire(pool).await.map_err(away)?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await.map_err(away)?;
    SQLITE
        .run_direct(None, &mut *transaction, false)
        .await
        .map_err(|error| migration_failed(error, sqlite::from_sqlite))?;
    transaction.commit().await.map_err(away)
}

fn migration_failed(error: MigrateError, meaning: fn(&sqlx::Error) -> LedgerError) -> LedgerError {
    match error {
        MigrateError::Execute(error) => meaning(&error),
        MigrateError::ExecuteMigration(error, version) => match meaning(&error) {
            LedgerError::Unavailable(text) if lock_not_available(&error) => LedgerError::Unavailable(format!(
                "migration {version}: {text}: a table has been in use for minutes. See pg_stat_activity for by whom, and \
                 migrate again"
            )),
            LedgerError::Unavailable(text) => LedgerError::Unavailable(text),
            other => LedgerError::Refused(format!("migration {version}: {other}")),
        },
        MigrateError::VersionMissing(version) => LedgerError::Refused(format!(
            "the database is at migration {version}, which this program does not know: use the newer program"
        )),
        other => LedgerError::Refused(other.to_string()),
    }
}

/// Where the database stands.
///
/// # Errors
/// When it cannot be asked, or a migration was changed after it was applied.
pub async fn schema_state<C: Migrate>(
    connection: &mut C,
    migrator: &Migrator,
    meaning: fn(&sqlx::Error) -> LedgerError,
) -> Result<SchemaState, LedgerError> {
    let applied = match connection.list_applied_migrations(MIGRATIONS_TABLE).await {
        Ok(applied) => applied,
        Err(error) => {
            return match migration_failed(error, meaning) {
                LedgerError::NotMigrated => Ok(SchemaState::NotMigrated),
                other => Err(other),
            };
        }
    };
    for migration in migrator.iter() {
        match applied.iter().find(|applied| applied.version == migration.version) {
            None => return Ok(SchemaState::NotMigrated),
            Some(applied) if applied.checksum != migration.checksum => {
                let error = MigrateError::VersionMismatch(migration.version);
                return Err(migration_failed(error, meaning));
            }
            Some(_) => {}
        }
    }
    let newer = applied.iter().any(|applied| !migrator.version_exists(applied.version));
    Ok(if newer { SchemaState::Newer } else { SchemaState::Current })
}
