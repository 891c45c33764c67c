//! Opening the database that `database.url` names, and bringing it to this program's schema.
//!
//! Refuses to migrate by itself: `migrate` is a step that somebody chooses. Refuses a database whose migrations were
//! changed after they were applied.

use std::sync::Arc;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migrator};
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, SqlitePool};
use tokio::sync::Mutex;

use super::fleet::Fleet;
use super::migrations::{POSTGRES, SQLITE};
use super::operator::Operator;
use super::settings::Settings;
use super::sql::engine::{Engine, to_the_end};
use super::sql::meaning::{lock_not_available, of_postgres};
use super::sql::postgres::PostgresEngine;
pub use super::sql::sqlite::file_of as sqlite_file;
use super::sql::sqlite::{self, SqliteEngine};
use super::sql::{SqlLedger, SqlOperator, SqlSettings};
use super::upkeep::Upkeep;
use super::{Ledger, LedgerError};
use crate::tls::Authorities;

/// The migrator's own table, <https://docs.rs/sqlx/0.9.0/sqlx/migrate/struct.Migrator.html>.
const MIGRATIONS_TABLE: &str = "_sqlx_migrations";

/// Where a database stands against this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// Migrations are missing, or all of them.
    NotMigrated,
    Current,
    /// A later program migrated it. By the rules of `migrations/README.md` the program before that one still works.
    Newer,
}

#[derive(Clone)]
enum Pool {
    Postgres(PgPool),
    Sqlite(SqlitePool),
}

/// Key of the advisory lock: "sluice" in ASCII, so that nobody else's is the same by chance.
const RUN_LOCK: i64 = 0x736c_7569_6365;

/// How long a migration waits for a table at a time: whoever wants the table after it waits behind it. Payments pass in the
/// pauses; a reader of five minutes is waited for.
const LOCK_TRY: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_secs(4);
const LOCK_TRIES: u32 = 60;

/// The right to run embedded parts on a PostgreSQL database. Ends with its session, whoever ended that.
pub struct ExclusiveRun {
    pool: PgPool,
    session: Arc<Mutex<Option<PgConnection>>>,
}

impl ExclusiveRun {
    /// Whether it is held. A session that has ended is replaced, unless somebody else has the right by now.
    ///
    /// # Errors
    /// When the database cannot be asked.
    pub async fn is_held(&self) -> Result<bool, LedgerError> {
        let (pool, session) = (self.pool.clone(), Arc::clone(&self.session));
        to_the_end(async move {
            let mut session = session.lock().await;
            if let Some(connection) = session.as_mut()
                && connection.ping().await.is_ok()
            {
                return Ok(true);
            }
            *session = None;
            *session = run_session(&pool).await?;
            Ok(session.is_some())
        })
        .await
    }
}

/// An opened database: the ledger and the settings in it.
#[derive(Clone)]
pub struct Database {
    pool: Pool,
    ledger: Arc<SqlLedger>,
    settings: Arc<SqlSettings>,
    operator: Arc<SqlOperator>,
}

impl Database {
    /// Opens `sqlite://PATH`, `sqlite::memory:` or `postgres://…`. Connects with the first use, so a database that is
    /// away is an error of that use. `max_connections` is for PostgreSQL; SQLite has one.
    ///
    /// # Errors
    /// [`LedgerError::Refused`], naming `database.url` and never quoting it.
    pub fn open(url: &str, max_connections: u32) -> Result<Self, LedgerError> {
        Self::open_trusting(url, max_connections, &Authorities::default())
    }

    /// The same, trusting these authorities of TLS besides the public ones, unless the URL names its own `sslrootcert`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_trusting(url: &str, max_connections: u32, trusted: &Authorities) -> Result<Self, LedgerError> {
        match url.split(':').next() {
            Some("postgres" | "postgresql") => {
                let engine = Arc::new(PostgresEngine::open(url, max_connections, trusted)?);
                let pool = Pool::Postgres(engine.pool().clone());
                Ok(Self::over(pool, &(engine as Arc<dyn Engine>)))
            }
            Some("sqlite") => {
                let engine = Arc::new(SqliteEngine::open(url)?);
                let pool = Pool::Sqlite(engine.pool().clone());
                Ok(Self::over(pool, &(engine as Arc<dyn Engine>)))
            }
            _ => Err(LedgerError::Refused(
                "database.url must begin with sqlite:// or postgres://, or be sqlite::memory:".to_owned(),
            )),
        }
    }

    fn over(pool: Pool, engine: &Arc<dyn Engine>) -> Self {
        Self {
            pool,
            ledger: Arc::new(SqlLedger::new(engine.clone())),
            settings: Arc::new(SqlSettings::new(engine.clone())),
            operator: Arc::new(SqlOperator::new(engine.clone())),
        }
    }

    #[must_use]
    pub fn ledger(&self) -> Arc<dyn Ledger> {
        self.ledger.clone()
    }

    #[must_use]
    pub fn upkeep(&self) -> Arc<dyn Upkeep> {
        self.ledger.clone()
    }

    #[must_use]
    pub fn fleet(&self) -> Arc<dyn Fleet> {
        self.ledger.clone()
    }

    #[must_use]
    pub fn settings(&self) -> Arc<dyn Settings> {
        self.settings.clone()
    }

    #[must_use]
    pub fn operator(&self) -> Arc<dyn Operator> {
        self.operator.clone()
    }

    /// SQLite's pool of one connection, for the embedded queue in the same file.
    #[must_use]
    pub fn sqlite_pool(&self) -> Option<SqlitePool> {
        match &self.pool {
            Pool::Sqlite(pool) => Some(pool.clone()),
            Pool::Postgres(_) => None,
        }
    }

    /// Applies what is missing. Safe to run twice and from several processes at once.
    ///
    /// # Errors
    /// [`LedgerError::Refused`] when the database is newer than this program, or an applied migration differs.
    pub async fn migrate(&self) -> Result<(), LedgerError> {
        let pool = self.pool.clone();
        // Never cancelled, like every transaction, but as long as it takes: a migration may rewrite a large table.
        let migration = tokio::spawn(async move {
            match pool {
                Pool::Postgres(pool) => migrate_postgres(&pool).await,
                Pool::Sqlite(pool) => migrate_sqlite(&pool).await,
            }
        });
        migration.await.map_err(|ended| LedgerError::Away(format!("the migration ended early: {ended}")))?
    }

    /// Compares the applied migrations with this program's.
    ///
    /// # Errors
    /// [`LedgerError::Refused`] when an applied migration differs from this program's.
    pub async fn schema_state(&self) -> Result<SchemaState, LedgerError> {
        let pool = self.pool.clone();
        to_the_end(async move {
            match pool {
                Pool::Postgres(pool) => {
                    let mut connection = pool.acquire().await.map_err(|error| of_postgres(&error))?;
                    schema_state(&mut *connection, &POSTGRES, of_postgres).await
                }
                Pool::Sqlite(pool) => {
                    let mut connection = sqlite::acquire(&pool).await.map_err(|error| sqlite::meaning(&error))?;
                    schema_state(&mut *connection, &SQLITE, sqlite::meaning).await
                }
            }
        })
        .await
    }

    /// Takes the one right to run embedded parts on a PostgreSQL database; `None` when somebody has it. SQLite's callers
    /// lock its file instead.
    ///
    /// # Errors
    /// When the database cannot be asked.
    pub async fn exclusive_run(&self) -> Result<Option<ExclusiveRun>, LedgerError> {
        let Pool::Postgres(pool) = &self.pool else { return Ok(None) };
        let pool = pool.clone();
        to_the_end(async move {
            let session = run_session(&pool).await?;
            Ok(session.map(|session| ExclusiveRun { pool, session: Arc::new(Mutex::new(Some(session))) }))
        })
        .await
    }

    /// Finishes what is under way and closes the connections. A database in memory is gone then.
    pub async fn close(&self) {
        match &self.pool {
            Pool::Postgres(pool) => pool.close().await,
            Pool::Sqlite(pool) => pool.close().await,
        }
    }
}

/// A session of its own that has the right; `None` when somebody else's has it.
async fn run_session(pool: &PgPool) -> Result<Option<PgConnection>, LedgerError> {
    let away = |error: sqlx::Error| of_postgres(&error);
    let mut connection = pool.acquire().await.map_err(away)?.detach();
    let ours: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)")
        .bind(RUN_LOCK)
        .fetch_one(&mut connection)
        .await
        .map_err(away)?;
    Ok(ours.then_some(connection))
}

/// The migrator's advisory lock lets one process through at a time; the others find nothing left to do.
async fn migrate_postgres(pool: &PgPool) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| of_postgres(&error);
    let mut connection: PoolConnection<sqlx::Postgres> = pool.acquire().await.map_err(away)?;
    let result = migrate_connection(&mut connection).await;
    // Its limits were changed, and after an error the session may still hold the advisory lock: out of the pool with it.
    connection.close().await.map_err(away)?;
    result
}

async fn migrate_connection(connection: &mut PgConnection) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| of_postgres(&error);
    let encoding: String =
        sqlx::query_scalar("SHOW server_encoding").fetch_one(&mut *connection).await.map_err(away)?;
    if encoding != "UTF8" {
        return Err(LedgerError::Refused(format!(
            "the database's encoding is {encoding}: create it with ENCODING 'UTF8'"
        )));
    }
    // The pool's limits are for payments. A migration may take long; another process's is waited for, but not for ever.
    let patient = "SET statement_timeout = 0; SET lock_timeout = '5min'";
    sqlx::raw_sql(patient).execute(&mut *connection).await.map_err(away)?;
    // The migrator takes the same lock once more, which a session that has it may.
    connection.lock().await.map_err(|error| migration_failed(error, of_postgres))?;
    let brief = AssertSqlSafe(format!("SET lock_timeout = '{}ms'", LOCK_TRY.as_millis()));
    sqlx::raw_sql(brief).execute(&mut *connection).await.map_err(away)?;
    for _ in 1..LOCK_TRIES {
        match POSTGRES.run_direct(None, &mut *connection, false).await {
            Err(MigrateError::ExecuteMigration(error, version)) if lock_not_available(&error) => {
                tracing::warn!(
                    version,
                    "a table is in use: the migration tries again, so that payments pass meanwhile"
                );
                tokio::time::sleep(LOCK_PAUSE).await;
            }
            result => return result.map_err(|error| migration_failed(error, of_postgres)),
        }
    }
    POSTGRES.run_direct(None, connection, false).await.map_err(|error| migration_failed(error, of_postgres))
}

/// SQLite's migrator takes no lock, so the whole run is one transaction that holds the write lock from its first moment.
async fn migrate_sqlite(pool: &SqlitePool) -> Result<(), LedgerError> {
    let away = |error: sqlx::Error| sqlite::meaning(&error);
    let mut connection = sqlite::acquire(pool).await.map_err(away)?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await.map_err(away)?;
    SQLITE
        .run_direct(None, &mut *transaction, false)
        .await
        .map_err(|error| migration_failed(error, sqlite::meaning))?;
    transaction.commit().await.map_err(away)
}

fn migration_failed(error: MigrateError, meaning: fn(&sqlx::Error) -> LedgerError) -> LedgerError {
    match error {
        MigrateError::Execute(error) => meaning(&error),
        MigrateError::ExecuteMigration(error, version) => match meaning(&error) {
            LedgerError::Away(text) if lock_not_available(&error) => LedgerError::Away(format!(
                "migration {version}: {text}: a table has been in use for minutes. See pg_stat_activity for by whom, and \
                 migrate again"
            )),
            LedgerError::Away(text) => LedgerError::Away(text),
            other => LedgerError::Refused(format!("migration {version}: {other}")),
        },
        MigrateError::VersionMissing(version) => LedgerError::Refused(format!(
            "the database is at migration {version}, which this program does not know: use the newer program"
        )),
        other => LedgerError::Refused(other.to_string()),
    }
}

async fn schema_state<C: Migrate>(
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
