//! The seam between the ledger's SQL and a database: values in, rows out, several statements or none.
//!
//! Refuses to know what a statement is for. Every call runs in a task of its own that is awaited and never cancelled:
//! in sqlx 0.9 a `begin` that is cancelled hands a connection with an open transaction to the next borrower
//! (<https://github.com/transact-rs/sqlx/issues/4385>).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::dialect::{Dialect, JobWrite};
use super::row::SqlRow;
use crate::ledger::LedgerError;
use crate::ledger::settings::{NoHints, SettingsHints};

/// How long a caller waits for the database: longer than acquiring a connection and the server's own statement timeout
/// together, so it ends a wait only when the network swallows answers. The task behind it goes on.
pub const WORK_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a statement is repeated that the database itself rolled back (serialization failure, deadlock).
pub const RETRIES_MAX: u32 = 3;

/// A statement's text, rendered once for its dialect.
pub type Sql = Arc<str>;
/// `$1`, `$2`, … of a statement; statements of one transaction may share them.
pub type Args = Arc<[Value]>;

/// One argument. The type stays known when the value is NULL, because PostgreSQL wants to know it.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Int(Option<i64>),
    Real(Option<f64>),
    Bool(Option<bool>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Int(Some(value))
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Int(Some(value.into()))
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(Some(value))
    }
}

impl From<Option<bool>> for Value {
    fn from(value: Option<bool>) -> Self {
        Self::Bool(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(Some(value.to_owned()))
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(Some(value))
    }
}

impl From<Option<String>> for Value {
    fn from(value: Option<String>) -> Self {
        Self::Text(value)
    }
}

impl From<Option<&str>> for Value {
    fn from(value: Option<&str>) -> Self {
        Self::Text(value.map(str::to_owned))
    }
}

impl From<Option<i64>> for Value {
    fn from(value: Option<i64>) -> Self {
        Self::Int(value)
    }
}

impl From<Option<f64>> for Value {
    fn from(value: Option<f64>) -> Self {
        Self::Real(value)
    }
}

impl From<&[u8]> for Value {
    fn from(value: &[u8]) -> Self {
        Self::Bytes(value.to_vec())
    }
}

/// Whole milliseconds, rounded up: a wait or a lease is never shorter than asked for.
impl From<Duration> for Value {
    fn from(value: Duration) -> Self {
        Self::Int(Some(i64::try_from(crate::domain::time::millis_up(value)).unwrap_or(i64::MAX)))
    }
}

/// One statement of a transaction.
#[derive(Clone, Debug)]
pub struct Step {
    pub sql: Sql,
    pub args: Args,
    /// Roll everything back when this statement neither returns nor changes a row.
    pub must_affect: bool,
}

/// What became of one chain for many jobs.
#[derive(Debug)]
pub enum Batch {
    /// In the order of the arguments: what the write of each answered, `None` where it found nothing.
    Committed(Vec<Option<SqlRow>>),
    /// Surely rolled back, all of it; one of them may be at fault.
    RolledBack(LedgerError),
}

/// A database as the ledger uses it.
#[async_trait]
pub trait Engine: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// Runs one statement, committed by itself.
    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError>;

    /// The same for a statement that must not read whole tables for the rows that it names, whatever statistics say of them.
    async fn query_by_index(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        self.query(sql, args).await
    }

    /// The same for what every worker goes by from second to second, a row or two by key: nobody else's statements hold it up.
    async fn query_urgent(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        self.query(sql, args).await
    }

    /// Runs all statements in one transaction and returns the rows of each; `None` when a `must_affect` statement
    /// affected nothing and everything was rolled back.
    async fn atomically(&self, steps: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError>;

    /// The same where each statement may take so long. A caller waits no longer for it than for any other: it goes on alone.
    async fn atomically_within(
        &self,
        _at_most: Duration,
        steps: Vec<Step>,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        self.atomically(steps).await
    }

    /// Runs a chain for one job, and returns what it answers; `None` when its write found nothing.
    async fn execute_one(&self, chain: &JobWrite, args: &Args) -> Result<Option<SqlRow>, LedgerError> {
        let rows = self.atomically(chain.steps(args)).await?;
        Ok(rows.into_iter().flatten().flatten().next())
    }

    /// Runs a chain for many jobs, each at most once, in one transaction.
    ///
    /// # Errors
    /// Whether it was committed is unknown then.
    async fn execute_batch(&self, chain: &JobWrite, units: Vec<Args>) -> Result<Batch, LedgerError>;

    /// Hints that settings changed, where the database gives any.
    fn hints(&self) -> Box<dyn SettingsHints> {
        Box::new(NoHints)
    }
}

/// Runs database work to its end even if the caller is dropped, and answers the caller in bounded time.
pub async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = Result<T, LedgerError>> + Send + 'static,
) -> Result<T, LedgerError> {
    match tokio::time::timeout(WORK_TIMEOUT, tokio::spawn(work)).await {
        Ok(Ok(result)) => result,
        Ok(Err(ended)) => Err(LedgerError::Unavailable(format!("the database task ended early: {ended}"))),
        Err(_) => Err(LedgerError::Unavailable(format!("no answer within {} s", WORK_TIMEOUT.as_secs()))),
    }
}
