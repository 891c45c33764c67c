//! Reads of people on a second connection, which is read-only: they hold up no payment. A read ends with its caller, and
//! after [`READ_MAX`] in any case.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};
use tokio::time::Instant;

use super::{ACQUIRE_TIMEOUT, acquire, run};
use crate::ledger::LedgerError;
use crate::ledger::sql::dialect::{Dialect, JobWrite};
use crate::ledger::sql::engine::{Args, Batch, Engine, Sql, Step, run_while_awaited};
use crate::ledger::sql::result::SqlRow;

/// Longest time of one read.
pub const READ_MAX: Duration = Duration::from_secs(10);
/// Instructions of SQLite's virtual machine between two looks at the limit, about a tenth of a millisecond.
const LOOK_EVERY: i32 = 10_000;

pub struct SqliteReads {
    pool: SqlitePool,
    /// When the running read is interrupted.
    until: Arc<Mutex<Instant>>,
}

/// A read that runs. Dropped, it is interrupted.
struct RunningRead<'a>(&'a Mutex<Instant>);

impl Drop for RunningRead<'_> {
    fn drop(&mut self) {
        *self.0.lock() = Instant::now();
    }
}

impl SqliteReads {
    /// Opens the file at the first read.
    pub fn new(options: SqliteConnectOptions) -> Self {
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .acquire_slow_threshold(ACQUIRE_TIMEOUT)
            .test_before_acquire(false)
            .connect_lazy_with(options.read_only(true).create_if_missing(false));
        Self { pool, until: Arc::new(Mutex::new(Instant::now())) }
    }

    async fn read(&self, step: &Step) -> Result<Vec<SqlRow>, sqlx::Error> {
        let mut connection = acquire(&self.pool).await?;
        let running = {
            // Waits until a read that was interrupted has ended: the limit is the next one's from here.
            let mut handle = connection.lock_handle().await?;
            *self.until.lock() = Instant::now() + READ_MAX;
            let until = Arc::clone(&self.until);
            handle.set_progress_handler(LOOK_EVERY, move || Instant::now() < *until.lock());
            RunningRead(&self.until)
        };
        let rows = run(&mut connection, step).await;
        drop(running);
        Ok(rows?.0)
    }
}

#[async_trait]
impl Engine for SqliteReads {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        run_while_awaited(self.read(&Step::new(sql, args))).await
    }

    async fn atomically(&self, _: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        Err(only_reads())
    }

    async fn execute_batch(&self, _: &JobWrite, _: Vec<Args>) -> Result<Batch, LedgerError> {
        Err(only_reads())
    }
}

fn only_reads() -> LedgerError {
    LedgerError::StatementFailed("a write on the connection for reads".to_owned())
}
