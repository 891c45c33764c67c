//! The database that `database.url` names: opening it, migrating it, and the lock for an embedded limiter.
//!
//! Only `sluicegate migrate` applies migrations; opening a database never does. A database is rejected if an applied
//! migration differs from this program's (`migrations/README.md`).
//!
//! PostgreSQL rejects connections beyond the lowest of its limits (the user's, the database's and the server's), whatever
//! `database.max_connections` says.

use std::sync::Arc;
use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection, Row as _, SqlitePool};
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use super::LedgerError;
use super::committed_writes::CommittedWrites;
use super::migrations::{POSTGRES, SQLITE, migrate_postgres, migrate_sqlite, schema_state};
use super::record_notices::RecordNewsSender;
use super::sql::batcher::Batchers;
use super::sql::connections::Connections;
use super::sql::engine::{Engine, run_to_completion};
use super::sql::postgres::PostgresEngine;
use super::sql::session::with_statement_timeout;
use super::sql::slots::ConnectionPurpose;
use super::sql::sqlite;
use super::sql::sqlite::SqliteEngine;
use crate::tls::Authorities;

pub use super::sql::connect_options::is_postgres_parameter;
pub use super::sql::hints::{ChangeHint, ChangeHints};
pub use super::sql::sequences::SequenceState;
pub use super::sql::sqlite::file_of as sqlite_file;

/// The database's schema compared with this program's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// Some migrations are missing, or all.
    NotMigrated,
    Current,
    /// A later program migrated it. By the rules of `migrations/README.md`, the program before that one still works.
    Newer,
}

#[derive(Clone)]
enum DatabasePool {
    Postgres(Connections),
    Sqlite(SqlitePool),
}

/// Key of the advisory lock: "sluice" in ASCII, so that no other program has the same key by chance.
pub(super) const RUN_LOCK_KEY: i64 = 0x736c_7569_6365;
/// A session that does not answer within this time has ended, even if no error arrived.
const PING_MAX: Duration = Duration::from_secs(3);

/// The right to run an embedded limiter beside a PostgreSQL database. It ends with its session, for whatever reason.
pub struct AdvisoryRunLock {
    pool: Connections,
    session: Arc<Mutex<Option<PgConnection>>>,
}

impl AdvisoryRunLock {
    /// Whether the lock is held. A session that has ended is replaced, unless another process has the lock by now.
    pub async fn is_held(&self) -> Result<bool, LedgerError> {
        let (pool, session) = (self.pool.clone(), Arc::clone(&self.session));
        run_to_completion(async move {
            let mut session = session.lock().await;
            if let Some(connection) = session.as_mut()
                && timeout(PING_MAX, connection.ping()).await.is_ok_and(|answer| answer.is_ok())
            {
                return Ok::<_, sqlx::Error>(true);
            }
            *session = None;
            *session = lock_in_session(&pool).await?;
            Ok(session.is_some())
        })
        .await
    }
}

/// An open database: the ledger and the settings in it.
#[derive(Clone)]
pub struct Database {
    pool: DatabasePool,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) batchers: Arc<Batchers>,
    pub(super) writes: Arc<CommittedWrites>,
    record_news: RecordNewsSender,
}

impl Database {
    /// Opens `sqlite://PATH`, `sqlite::memory:` or `postgres://…`. Connects at first use, so an unavailable database is
    /// an error of that use. `max_connections` is for PostgreSQL; SQLite has one.
    ///
    /// # Errors
    /// [`LedgerError::StatementFailed`], naming `database.url` and never quoting it.
    pub fn open(url: &str, max_connections: u32) -> Result<Self, LedgerError> {
        Self::open_with_authorities(url, max_connections, &Authorities::default())
    }

    /// Opens the database like [`Self::open`]. Trusts these TLS authorities besides the public ones, unless the URL
    /// names its own `sslrootcert`.
    pub fn open_with_authorities(url: &str, max_connections: u32, trusted: &Authorities) -> Result<Self, LedgerError> {
        match url.split(':').next() {
            Some("postgres" | "postgresql") => {
                let engine = Arc::new(PostgresEngine::open(url, max_connections, trusted)?);
                let pool = DatabasePool::Postgres(engine.connections().clone());
                Ok(Self::with_engine(pool, engine))
            }
            Some("sqlite") => {
                let engine = Arc::new(SqliteEngine::open(url)?);
                let pool = DatabasePool::Sqlite(engine.pool().clone());
                Ok(Self::with_engine(pool, engine))
            }
            _ => Err(LedgerError::StatementFailed(
                "database.url must begin with sqlite:// or postgres://, or be sqlite::memory:".to_owned(),
            )),
        }
    }

    fn with_engine(pool: DatabasePool, engine: Arc<dyn Engine>) -> Self {
        Self {
            pool,
            engine,
            batchers: Arc::default(),
            writes: Arc::default(),
            record_news: RecordNewsSender::default(),
        }
    }

    /// The same database for reads of people: on connections of their own, so that they hold up no payment, and each ends
    /// with its caller. The connections are taken from `max_connections`, so it is called once. A small bound, and a
    /// database in memory, have none to spare; then these reads share the others.
    pub fn for_reads(&self) -> Self {
        match self.engine.for_reads() {
            Some(engine) => Self { engine, ..self.clone() },
            None => self.clone(),
        }
    }

    /// SQLite's pool of one connection, for statements of tests.
    pub fn sqlite_pool(&self) -> Option<SqlitePool> {
        match &self.pool {
            DatabasePool::Sqlite(pool) => Some(pool.clone()),
            DatabasePool::Postgres(_) => None,
        }
    }

    /// How often a connection of this process led to another server than the one before; `None` for SQLite.
    pub fn server_changes(&self) -> Option<watch::Receiver<u64>> {
        match &self.pool {
            DatabasePool::Postgres(pool) => Some(pool.server_changes()),
            DatabasePool::Sqlite(_) => None,
        }
    }

    /// When this process last committed a write.
    pub fn committed_writes(&self) -> &CommittedWrites {
        &self.writes
    }

    /// News of payments that were recorded by another door than the lanes of this process.
    pub fn record_news(&self) -> &RecordNewsSender {
        &self.record_news
    }

    /// Checkpoints SQLite's write-ahead log. Returns its length in bytes if a reader keeps it too long; `None` for
    /// PostgreSQL.
    pub async fn checkpoint_held_wal(&self) -> Result<Option<u64>, LedgerError> {
        let DatabasePool::Sqlite(pool) = &self.pool else { return Ok(None) };
        let pool = pool.clone();
        run_to_completion(async move { sqlite::checkpoint_held_wal(&pool).await }).await
    }

    /// Applies missing migrations. Safe to run twice and from several processes at once.
    ///
    /// # Errors
    /// [`LedgerError::StatementFailed`] when the database is newer than this program, or an applied migration differs.
    pub async fn migrate(&self) -> Result<(), LedgerError> {
        match self.pool {
            DatabasePool::Postgres(_) => self.migrate_by(&POSTGRES).await,
            DatabasePool::Sqlite(_) => self.migrate_by(&SQLITE).await,
        }
    }

    /// Applies missing migrations like [`Self::migrate`], but those of a later program.
    pub async fn migrate_by(&self, migrator: &'static Migrator) -> Result<(), LedgerError> {
        let pool = self.pool.clone();
        // Like every transaction, a migration is never cancelled. It has no time limit, because it may rewrite a large
        // table.
        let migration = tokio::spawn(async move {
            match pool {
                DatabasePool::Postgres(pool) => migrate_postgres(&pool, migrator).await,
                DatabasePool::Sqlite(pool) => migrate_sqlite(&pool, migrator).await,
            }
        });
        migration.await.map_err(|ended| LedgerError::Unavailable(format!("the migration ended early: {ended}")))?
    }

    /// Compares the applied migrations with this program's.
    ///
    /// # Errors
    /// [`LedgerError::StatementFailed`] when an applied migration differs from this program's.
    pub async fn schema_state(&self) -> Result<SchemaState, LedgerError> {
        let pool = self.pool.clone();
        run_to_completion(async move {
            match pool {
                DatabasePool::Postgres(pool) => {
                    let mut session = pool.lend(ConnectionPurpose::General).await?;
                    let connection = session.connection()?;
                    let state = with_statement_timeout(async { Ok(schema_state(connection, &POSTGRES).await) }).await;
                    session.end(state)?
                }
                DatabasePool::Sqlite(pool) => schema_state(&mut *sqlite::acquire(&pool).await?, &SQLITE).await,
            }
        })
        .await
    }

    /// The number of connections that PostgreSQL allows this user; `None` for SQLite.
    pub async fn connection_limits(&self) -> Result<Option<ConnectionLimits>, LedgerError> {
        let DatabasePool::Postgres(pool) = &self.pool else { return Ok(None) };
        let pool = pool.clone();
        run_to_completion(async move {
            let mut session = pool.lend(ConnectionPurpose::General).await?;
            let limits = with_statement_timeout(connection_limits(session.connection()?)).await;
            session.end(limits).map(Some)
        })
        .await
    }

    /// Takes the lock for an embedded limiter beside a PostgreSQL database; `None` when another process has it. For SQLite,
    /// callers lock the file instead.
    pub async fn try_run_lock(&self) -> Result<Option<AdvisoryRunLock>, LedgerError> {
        let DatabasePool::Postgres(pool) = &self.pool else { return Ok(None) };
        let pool = pool.clone();
        run_to_completion(async move {
            let session = lock_in_session(&pool).await?;
            Ok::<_, sqlx::Error>(
                session.map(|session| AdvisoryRunLock { pool, session: Arc::new(Mutex::new(Some(session))) }),
            )
        })
        .await
    }

    /// Finishes running work and closes the connections. A database in memory is lost then.
    pub async fn close(&self) {
        match &self.pool {
            DatabasePool::Postgres(pool) => pool.close().await,
            DatabasePool::Sqlite(pool) => pool.close().await,
        }
    }
}

/// A separate session that holds the lock; `None` when another session holds it.
async fn lock_in_session(pool: &Connections) -> Result<Option<PgConnection>, sqlx::Error> {
    let mut connection = pool.open_dedicated().await?;
    let ours = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(RUN_LOCK_KEY).fetch_one(&mut connection);
    let ours: bool = with_statement_timeout(ours).await?;
    Ok(ours.then_some(connection))
}

/// How the database compares texts, where that is not byte by byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextOrder {
    pub foreign: Vec<ForeignCollation>,
    pub changed: Vec<ChangedCollation>,
}

/// A column, an index or a domain of the schema with another collation than the migrations give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignCollation {
    pub name: String,
    pub collation: String,
}

/// A collation of PostgreSQL with another version than its indexes were built with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedCollation {
    pub name: String,
    pub built: String,
    pub present: String,
}

/// Limits on connections; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub role: Option<u32>,
    pub database: Option<u32>,
    /// Without connections that are reserved for superusers.
    pub server: u32,
}

/// Asks the server. A superuser has no effective limit.
pub async fn connection_limits(connection: &mut PgConnection) -> Result<ConnectionLimits, sqlx::Error> {
    let sql = "SELECT (SELECT rolconnlimit FROM pg_roles WHERE rolname = session_user AND NOT rolsuper), \
               (SELECT datconnlimit FROM pg_database, pg_roles \
                WHERE datname = current_database() AND rolname = session_user AND NOT rolsuper), \
               current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int";
    let row = sqlx::query(sql).fetch_one(connection).await?;
    // -1 means no limit.
    let limit = |at: usize| {
        Ok::<_, sqlx::Error>(row.try_get::<Option<i32>, _>(at)?.and_then(|limit| u32::try_from(limit).ok()))
    };
    let server: i32 = row.try_get(2)?;
    Ok(ConnectionLimits { role: limit(0)?, database: limit(1)?, server: u32::try_from(server).unwrap_or(0) })
}
