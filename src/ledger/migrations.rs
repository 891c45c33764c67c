//! The schema's migrations, compiled into the program, their application, and the comparison with a database's schema.
//!
//! sqlx's macro is not used: with it, every build would compile sqlx and both of its drivers a second time, for the
//! compiler.
//!
//! Payments go on during a migration. It waits for a table for one second at a time, because every later reader queues
//! behind it. All waits are bounded.

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlSafeStr as _, SqlitePool};

use super::LedgerError;
use super::database::{RUN_LOCK_KEY, SchemaState};
use super::sql::connections::Connections;
use super::sql::result::lock_not_available;
use super::sql::sqlite;

/// The names and texts of one directory's files.
macro_rules! files {
    ($directory:literal: $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../migrations/", $directory, "/", $name, ".sql")))),+]
    };
}

pub static POSTGRES: LazyLock<Migrator> = LazyLock::new(|| {
    migrator(files!["postgres":
        "0001_settings",
        "0002_ledger",
        "0003_limiter",
        "0004_operators",
        "0005_workers",
        "0007_cutoff",
        "0008_history",
        "0009_jobs_by_time",
        "0010_rejected_messages",
        "0011_jobs_by_state_and_time",
        "0012_jobs_by_account_and_time",
        "0013_jobs_by_reference",
        "0014_replaced_indexes",
        "0015_decision_batches",
        "0016_pauses_of_all",
        "0017_events",
        "0018_temporary_limits",
        "0019_lane_holds",
        "0020_held_messages",
    ])
});

pub static SQLITE: LazyLock<Migrator> = LazyLock::new(|| {
    migrator(files!["sqlite":
        "0001_settings",
        "0002_ledger",
        "0003_limiter",
        "0004_operators",
        "0005_workers",
        "0007_cutoff",
        "0008_history",
        "0009_jobs_by_time",
        "0010_rejected_messages",
        "0015_decision_batches",
        "0016_pauses_of_all",
        "0017_events",
        "0018_temporary_limits",
        "0019_lane_holds",
        "0020_held_messages",
    ])
});

/// Builds the migrator as sqlx does from a directory: number, description and text of each file.
fn migrator(files: &[(&'static str, &'static str)]) -> Migrator {
    let migration = |(name, sql): &(&'static str, &'static str)| {
        let (number, words) = name.split_once('_').unwrap_or((name, ""));
        Migration::new(
            number.parse().unwrap_or(0),
            Cow::Owned(words.replace('_', " ")),
            MigrationType::Simple,
            sql.into_sql_str(),
            sql.starts_with("-- no-transaction"),
        )
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// The names of all tables and domains that the files create.
pub fn created_names(migrator: &Migrator) -> Vec<&str> {
    let created = |words| {
        let texts = migrator.iter().flat_map(move |migration| migration.sql.as_str().split(words).skip(1));
        texts.filter_map(|text| text.split_whitespace().next())
    };
    created("CREATE TABLE ").chain(created("CREATE DOMAIN ")).collect()
}

/// If an earlier run built the index but did not record the migration, the index exists already.
const CONCURRENTLY: &str = "CREATE INDEX CONCURRENTLY IF NOT EXISTS ";

/// The indexes that PostgreSQL builds concurrently with payments, with the numbers of their files.
pub fn built_concurrently(migrator: &Migrator) -> impl Iterator<Item = (i64, &str)> {
    migrator.iter().filter(|migration| migration.no_tx).filter_map(|migration| {
        let (_, after) = migration.sql.as_str().split_once(CONCURRENTLY)?;
        Some((migration.version, after.split_whitespace().next()?))
    })
}

/// Whether this file builds an index concurrently.
pub fn is_built_concurrently(migrator: &Migrator, version: i64) -> bool {
    built_concurrently(migrator).any(|(built, _)| built == version)
}

/// The migrator's own table, <https://docs.rs/sqlx/0.9.0/sqlx/migrate/struct.Migrator.html>.
const MIGRATIONS_TABLE: &str = "_sqlx_migrations";

/// Key of the advisory lock that lets one process migrate at a time.
const MIGRATE_LOCK: i64 = RUN_LOCK_KEY + 1;
const MIGRATE_LOCK_POLL: Duration = Duration::from_millis(100);
const MIGRATE_LOCK_TRIES: u32 = 3_000;

/// How long a migration waits for a table at a time: later users of the table queue behind it. Payments pass in the
/// pauses. The sum of all tries outlasts a reader of five minutes.
const TABLE_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const TABLE_LOCK_PAUSE: Duration = Duration::from_secs(4);
const TABLE_LOCK_TRIES: u32 = 60;
/// Lock timeout of an index that is built concurrently: the build waits for all transactions that began before it.
const CONCURRENT_INDEX_TIMEOUT: Duration = Duration::from_secs(300);

/// An advisory lock lets one process migrate at a time; the others then find nothing left to do. The lock's connection
/// is shared with no other use, neither here nor behind a pooler. So the lock ends with the connection at the latest.
pub async fn migrate_postgres(pool: &Connections, migrator: &Migrator) -> Result<(), LedgerError> {
    let mut connection = pool.open_dedicated().await?;
    let result = migrate_connection(&mut connection, migrator).await;
    connection.close().await?;
    result
}

async fn migrate_connection(connection: &mut PgConnection, migrator: &Migrator) -> Result<(), LedgerError> {
    let encoding: String = sqlx::query_scalar("SHOW server_encoding").fetch_one(&mut *connection).await?;
    if encoding != "UTF8" {
        return Err(LedgerError::StatementFailed(format!(
            "the database's encoding is {encoding}: create it with ENCODING 'UTF8'"
        )));
    }
    wait_for_migrate_lock(connection).await?;
    let migrated = migrate_locked(connection, migrator).await;
    let unlock = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(MIGRATE_LOCK);
    let unlocked: Result<bool, _> = unlock.fetch_one(&mut *connection).await;
    match (migrated, unlocked) {
        (Ok(()), Ok(true)) => Ok(()),
        (Ok(()), Ok(false)) => {
            let text = "the migration lost its advisory lock: see pg_locks, then run `sluicegate migrate` again";
            Err(LedgerError::Unavailable(text.to_owned()))
        }
        (Ok(()), Err(error)) => Err(error.into()),
        (Err(error), _) => Err(error),
    }
}

async fn migrate_locked(connection: &mut PgConnection, migrator: &Migrator) -> Result<(), LedgerError> {
    // The pool's statement timeout is for payments, and a migration may take long.
    sqlx::raw_sql("SET statement_timeout = 0").execute(&mut *connection).await?;
    let mut tries = 1;
    loop {
        match try_migrations(connection, migrator).await {
            Err(MigrateError::ExecuteMigration(error, version))
                if lock_not_available(&error)
                    && tries < TABLE_LOCK_TRIES
                    && !is_built_concurrently(migrator, version) =>
            {
                tracing::warn!(version, "a table is in use; the migration lets payments pass, then retries");
                tokio::time::sleep(TABLE_LOCK_PAUSE).await;
                tries += 1;
            }
            result => return result.map_err(migration_failed),
        }
    }
}

/// Waits for another process's migration, for a limited time. It polls, because a waiting statement would cause a
/// deadlock: a concurrent index build waits for every statement that has begun.
async fn wait_for_migrate_lock(connection: &mut PgConnection) -> Result<(), LedgerError> {
    let ours = "SELECT pg_try_advisory_lock($1)";
    for _ in 0..MIGRATE_LOCK_TRIES {
        let ours: Result<bool, _> = sqlx::query_scalar(ours).bind(MIGRATE_LOCK).fetch_one(&mut *connection).await;
        if ours? {
            return Ok(());
        }
        tokio::time::sleep(MIGRATE_LOCK_POLL).await;
    }
    Err(LedgerError::Unavailable(
        "another process has been migrating this database for minutes: see pg_stat_activity".to_owned(),
    ))
}

/// Runs file after file. A concurrent index build blocks no one, so it may wait longer.
async fn try_migrations(connection: &mut PgConnection, migrator: &Migrator) -> Result<(), MigrateError> {
    for (version, index) in built_concurrently(migrator) {
        wait_for_tables(connection, TABLE_LOCK_TIMEOUT).await?;
        migrator.run_direct(Some(version - 1), connection, false).await?;
        wait_for_tables(connection, CONCURRENT_INDEX_TIMEOUT).await?;
        drop_invalid_index(connection, index).await.map_err(|error| MigrateError::ExecuteMigration(error, version))?;
        migrator.run_direct(Some(version), connection, false).await?;
    }
    wait_for_tables(connection, TABLE_LOCK_TIMEOUT).await?;
    migrator.run_direct(None, connection, false).await
}

async fn wait_for_tables(connection: &mut PgConnection, at_most: Duration) -> Result<(), MigrateError> {
    let limit = AssertSqlSafe(format!("SET lock_timeout = '{}ms'", at_most.as_millis()));
    sqlx::raw_sql(limit).execute(&mut *connection).await?;
    Ok(())
}

/// Drops an index whose build was interrupted. It is built outside a transaction, so the remains would fail the next
/// try.
async fn drop_invalid_index(connection: &mut PgConnection, index: &str) -> Result<(), sqlx::Error> {
    let is_cut_off = "SELECT EXISTS (SELECT 1 FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid)";
    if sqlx::query_scalar(is_cut_off).bind(index).fetch_one(&mut *connection).await? {
        let drop = AssertSqlSafe(format!("DROP INDEX CONCURRENTLY {index}"));
        sqlx::raw_sql(drop).execute(&mut *connection).await?;
    }
    Ok(())
}

/// SQLite's migrator takes no lock. So the whole run is one transaction that holds the write lock from its start.
pub async fn migrate_sqlite(pool: &SqlitePool, migrator: &Migrator) -> Result<(), LedgerError> {
    let mut connection = sqlite::acquire(pool).await?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    migrator.run_direct(None, &mut *transaction, false).await.map_err(migration_failed)?;
    Ok(transaction.commit().await?)
}

fn migration_failed(error: MigrateError) -> LedgerError {
    match error {
        MigrateError::Execute(error) => error.into(),
        MigrateError::ExecuteMigration(error, version) => match LedgerError::from(&error) {
            LedgerError::Unavailable(text) if lock_not_available(&error) => LedgerError::Unavailable(format!(
                "migration {version}: {text}: a table has been in use for minutes. See pg_stat_activity for its user, \
                 then run `sluicegate migrate` again"
            )),
            error if error.is_unavailable() => error,
            other => LedgerError::StatementFailed(format!("migration {version}: {other}")),
        },
        MigrateError::VersionMissing(version) => LedgerError::StatementFailed(format!(
            "the database is at migration {version}, which this program does not know: use a newer version of it"
        )),
        other => LedgerError::StatementFailed(other.to_string()),
    }
}

/// Compares the applied migrations with this program's.
///
/// # Errors
/// When the database cannot be asked, or a migration was changed after it was applied.
pub async fn schema_state<C: Migrate>(connection: &mut C, migrator: &Migrator) -> Result<SchemaState, LedgerError> {
    let applied = match connection.list_applied_migrations(MIGRATIONS_TABLE).await {
        Ok(applied) => applied,
        Err(error) => {
            return match migration_failed(error) {
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
                return Err(migration_failed(error));
            }
            Some(_) => {}
        }
    }
    let newer = applied.iter().any(|applied| !migrator.version_exists(applied.version));
    Ok(if newer { SchemaState::Newer } else { SchemaState::Current })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Rules of `migrations/README.md` that these migrations break.
    fn broken_rules(migrator: &Migrator) -> Vec<String> {
        let mut broken = Vec::new();
        for migration in migrator.iter() {
            let (number, sql) = (migration.version, migration.sql.as_str());
            // PostgreSQL runs several statements in one transaction, and no index can be built concurrently inside one.
            let is_alone = is_built_concurrently(migrator, number) && sql.matches(';').count() == 1;
            if migration.no_tx && !is_alone {
                broken.push(format!("{number}: a file without transaction builds one index and does nothing else"));
            }
            // Or payments wait while other tables are read from end to end.
            let mut written = sql.split("UPDATE ").skip(1).filter_map(|rest| rest.split_whitespace().next());
            if sql.contains("ALTER TABLE jobs DISABLE TRIGGER") && written.any(|table| table != "jobs") {
                broken.push(format!("{number}: a file that disables a trigger of jobs writes no other table"));
            }
        }
        broken
    }

    #[test]
    fn long_locks_are_avoided() {
        assert_eq!(broken_rules(&POSTGRES), Vec::<String>::new());
        assert!(SQLITE.iter().all(|migration| !migration.no_tx), "SQLite's run is one transaction");
        let index = "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON jobs (state);";
        let good = "ALTER TABLE jobs DISABLE TRIGGER a; UPDATE jobs SET cost = 1; ALTER TABLE jobs ENABLE TRIGGER a;";
        let good = migrator(&[("0006_index", index), ("0007_trigger", good)]);
        assert_eq!(broken_rules(&good), Vec::<String>::new());
        assert_eq!(built_concurrently(&good).collect::<Vec<_>>(), [(6, "i")]);
        for bad in [
            "-- no-transaction\nCREATE INDEX CONCURRENTLY i ON jobs (state);",
            "-- no-transaction\nUPDATE jobs SET cost = 1;",
            "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON jobs (state); SELECT 1;",
            "ALTER TABLE jobs DISABLE TRIGGER a; UPDATE attempts SET detail = '';",
        ] {
            assert_eq!(broken_rules(&migrator(&[("0006_bad", bad)])).len(), 1, "{bad}");
        }
    }

    #[tokio::test]
    async fn embedded_migrations_match_the_files() {
        for (kind, ours) in [("postgres", &POSTGRES), ("sqlite", &SQLITE)] {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(kind);
            let read = Migrator::new(directory).await.unwrap();
            let summaries = |migrator: &Migrator| -> Vec<(i64, String, bool, Vec<u8>)> {
                let summary = |migration: &Migration| {
                    (migration.version, migration.description.to_string(), migration.no_tx, migration.checksum.to_vec())
                };
                migrator.iter().map(summary).collect()
            };
            assert_eq!(summaries(ours), summaries(&read), "{kind}");
        }
    }
}
