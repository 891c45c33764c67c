//! The SQLite engine of the ledger: one file, or memory, and exactly one connection. Only reads of people have another.
//!
//! With one connection, statements wait in the pool instead of failing with "database is locked", and a database in
//! memory exists as long as the pool.

use std::fs::File;
use std::future::ready;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Either, Executor, Row as _, Sqlite, TypeInfo, ValueRef};

use super::cells::SqlValue;
use super::dialect::{Dialect, JobWrite};
use super::engine::{Args, Batch, Engine, Sql, Step, Value, driver, run_to_completion};
use super::hints::ChangeHints;
use super::result::{SQLITE_BUSY, SqlRow, primary_code};
use crate::ledger::LedgerError;

mod reads;

pub use reads::READ_MAX;
use reads::SqliteReads;

/// How long a statement waits for the one connection. Longer than PostgreSQL's limit, because a queue here means a slow
/// disk, not an outage.
pub const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a statement waits for another process's write. Commands are short; only a migration holds the lock longer.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const REOPEN_PAUSE: Duration = Duration::from_millis(20);
/// Size to which the write-ahead log is cut after a checkpoint, `journal_size_limit`. It is larger only while a reader
/// keeps checkpoints from reaching its end.
pub const WAL_BYTES_MAX: u64 = 32 << 20;

/// The file that a URL names, parsed like the driver does: the file that is found, locked and opened must be the same.
/// `None` is a database in memory.
///
/// # Errors
/// [`LedgerError::StatementFailed`] when the URL is invalid.
pub fn file_of(url: &str) -> Result<Option<PathBuf>, LedgerError> {
    let options = options_of(url)?;
    let (file, parameters) = url.split_once('?').unwrap_or((url, ""));
    let mode = parameters.split('&').filter_map(|parameter| parameter.strip_prefix("mode=")).next_back();
    let in_memory = file.ends_with(":memory:") || mode == Some("memory");
    Ok((!in_memory).then(|| options.get_filename().to_owned()))
}

fn options_of(url: &str) -> Result<SqliteConnectOptions, LedgerError> {
    SqliteConnectOptions::from_str(url).map_err(|error| LedgerError::StatementFailed(format!("database.url: {error}")))
}

/// Creates a file that only its owner can read, if it does not exist. SQLite creates its other files with the same mode
/// (<https://www.sqlite.org/src/file/src/os_unix.c>, `findCreateFileMode`).
fn make_private(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

pub struct SqliteEngine {
    pool: SqlitePool,
    /// A database in memory has one connection.
    in_memory: bool,
}

impl SqliteEngine {
    /// Makes the pool; opens the file at first use. A missing file is created for its owner alone: it will hold
    /// payloads and requests.
    ///
    /// # Errors
    /// [`LedgerError::StatementFailed`] when the URL is invalid.
    pub fn open(url: &str) -> Result<Self, LedgerError> {
        // A read-only file is not created; if creating fails, the driver reports why.
        let file = file_of(url)?;
        let in_memory = file.is_none();
        if let Some(path) = file.filter(|_| !url.contains("mode=ro")) {
            make_private(&path).ok();
        }
        let options = options_of(url)?
            .create_if_missing(true)
            // Readers of other processes (commands, backups) never block the worker.
            .journal_mode(SqliteJournalMode::Wal)
            // NORMAL would lose the last commits at a power failure: an attempt that was sent must not vanish.
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .foreign_keys(true)
            // What was emptied or deleted is overwritten, and not only given up as free.
            .pragma("secure_delete", "ON")
            .pragma("journal_size_limit", WAL_BYTES_MAX.to_string())
            .disable_statement_logging();
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // Waiting for the one connection is normal and not worth a log line.
            .acquire_slow_threshold(ACQUIRE_TIMEOUT)
            // A file has no network that could have dropped it, and closing would end a database in memory.
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            // After an error that ended its transaction (full disk, I/O error), or a failed rollback, the driver believes
            // that the transaction is still open, and no other one can begin. Such a connection is closed.
            .before_acquire(|connection, _| Box::pin(ready(Ok(!connection.is_in_transaction()))))
            .connect_lazy_with(options);
        Ok(Self { pool, in_memory })
    }

    pub fn pool(&self) -> &SqlitePool {
        &self.pool
    }
}

#[async_trait]
impl Engine for SqliteEngine {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        let (pool, step) = (self.pool.clone(), Step::new(sql, args));
        run_to_completion(async move { Ok::<_, sqlx::Error>(run(&mut *acquire(&pool).await?, &step).await?.0) }).await
    }

    async fn atomically(&self, steps: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        let pool = self.pool.clone();
        run_to_completion(async move { transaction(&pool, &steps).await }).await
    }

    fn for_reads(&self) -> Option<Arc<dyn Engine>> {
        let options = self.pool.connect_options().as_ref().clone();
        (!self.in_memory).then(|| Arc::new(SqliteReads::new(options)) as Arc<dyn Engine>)
    }

    fn change_hints(&self) -> Option<ChangeHints> {
        (!self.in_memory).then(|| ChangeHints::sqlite(self.pool.clone()))
    }

    /// One statement after the other: the file's sync is the main cost, and there is one for all.
    async fn execute_batch(&self, write: &JobWrite, units: Vec<Args>) -> Result<Batch, LedgerError> {
        let pool = self.pool.clone();
        let units: Vec<Vec<Step>> = units.iter().map(|args| write.steps(args)).collect();
        run_to_completion(async move { execute_all(&pool, &units).await }).await
    }
}

driver!(Sqlite);

async fn execute_all(pool: &SqlitePool, units: &[Vec<Step>]) -> Result<Batch, sqlx::Error> {
    let mut connection = acquire(pool).await?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let mut rows = Vec::with_capacity(units.len());
    for steps in units {
        match execute_steps(&mut transaction, steps).await {
            Ok(row) => rows.push(row),
            // Without its transaction, nothing of the batch is committed, whether SQLite has rolled it back already, the
            // rollback succeeds, or the connection is closed.
            Err(error) => return Ok(Batch::RolledBack(error.into())),
        }
    }
    transaction.commit().await?;
    Ok(Batch::Committed(rows))
}

/// If the first statement finds no row, nothing was written that would have to be undone.
async fn execute_steps(connection: &mut SqliteConnection, steps: &[Step]) -> Result<Option<SqlRow>, sqlx::Error> {
    let mut first = None;
    for step in steps {
        let (rows, affected) = run(connection, step).await?;
        if step.must_affect && !affected {
            return Ok(None);
        }
        first = first.or_else(|| rows.into_iter().next());
    }
    Ok(first)
}

/// A connection, opened if need be. While several processes open one new file, SQLite refuses the switch to WAL as busy
/// without the busy handler (<https://www.sqlite.org/wal.html#activating_and_configuring_wal_mode>). So opening is
/// tried again here.
pub async fn acquire(pool: &SqlitePool) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
    let mut tries_left = BUSY_TIMEOUT.as_millis() / REOPEN_PAUSE.as_millis();
    loop {
        match pool.acquire().await {
            Err(error) if tries_left > 0 && primary_code(&error) == Some(SQLITE_BUSY) => {
                tries_left -= 1;
                tokio::time::sleep(REOPEN_PAUSE).await;
            }
            result => return result,
        }
    }
}

async fn transaction(pool: &SqlitePool, steps: &[Step]) -> Result<Option<Vec<Vec<SqlRow>>>, sqlx::Error> {
    // IMMEDIATE: a transaction that reads first and writes later cannot wait for the write lock, it fails.
    let mut connection = acquire(pool).await?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let (rows, affected) = run(&mut transaction, step).await?;
        if step.must_affect && !affected {
            transaction.rollback().await?;
            return Ok(None);
        }
        all.push(rows);
    }
    transaction.commit().await?;
    Ok(Some(all))
}

/// Checkpoints the write-ahead log as far as readers allow. Returns its length in bytes if a reader keeps it longer than
/// [`WAL_BYTES_MAX`].
pub async fn checkpoint_held_wal(pool: &SqlitePool) -> Result<Option<u64>, sqlx::Error> {
    let mut wal = pool.connect_options().get_filename().as_os_str().to_owned();
    wal.push("-wal");
    let Some(bytes) = std::fs::metadata(&wal).ok().map(|wal| wal.len()).filter(|bytes| *bytes > WAL_BYTES_MAX) else {
        return Ok(None);
    };
    let row = sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").fetch_one(&mut *acquire(pool).await?).await?;
    let [frames, checkpointed] = [row.try_get::<i64, _>(1)?, row.try_get(2)?];
    Ok((checkpointed < frames).then_some(bytes))
}

/// Read with the stored value's own type, because the columns of an expression have none.
pub fn cell(row: &SqliteRow, at: usize) -> Result<SqlValue<'_>, sqlx::Error> {
    let raw = row.try_get_raw(at)?;
    // A NULL has the column's declared type.
    if raw.is_null() {
        return Ok(SqlValue::Null);
    }
    Ok(match raw.type_info().name() {
        "REAL" => SqlValue::Real(row.try_get_unchecked(at)?),
        "TEXT" => SqlValue::Text(row.try_get_unchecked(at)?),
        "BLOB" => SqlValue::Bytes(row.try_get_unchecked(at)?),
        _ => SqlValue::Int(row.try_get_unchecked(at)?),
    })
}
