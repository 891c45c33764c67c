//! The interface between the ledger's SQL and a database engine: values in, rows out, one statement or a transaction.
//!
//! Every call runs in a task that is awaited and never cancelled. In sqlx 0.9, a cancelled `begin` returns a connection
//! with an open transaction to the pool (<https://github.com/transact-rs/sqlx/issues/4385>).
//!
//! All writes of a batch need the same arguments in the same order, with the job's id first. Their arguments become
//! columns, and the returned rows are assigned to the writes again. Other writes cannot be batched.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::dialect::{Dialect, JobWrite};
use super::result::SqlRow;
use super::session::SettingsHints;
use crate::ledger::LedgerError;

/// How long a caller waits for the database. It is longer than acquiring a connection plus the server's own statement
/// timeout, so it ends a wait only when the network loses responses. The task goes on.
pub const WORK_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a statement is repeated that the database rolled back (serialization failure, deadlock).
pub const RETRIES_MAX: u32 = 3;

/// A statement's text, rendered once for its dialect.
pub type Sql = Arc<str>;
/// `$1`, `$2`, … of a statement; statements of one transaction may share them.
pub type Args = Arc<[Value]>;

/// One argument. The type is known even for NULL, because PostgreSQL needs it.
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

/// The result of a job write for many jobs.
#[derive(Debug)]
pub enum Batch {
    /// In the order of the arguments: the row that each write returned, `None` where it found none.
    Committed(Vec<Option<SqlRow>>),
    /// All of it was certainly rolled back; one write may be the cause.
    RolledBack(LedgerError),
}

/// A database as the ledger uses it.
#[async_trait]
pub trait Engine: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// Runs one statement, committed by itself.
    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError>;

    /// Runs a statement that must find its rows by an index, whatever the statistics say.
    async fn query_by_index(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        self.query(sql, args).await
    }

    /// Runs a statement like [`Engine::query_by_index`]; `None` when it was rolled back because another session has one of
    /// its locks for longer than a batch takes.
    async fn query_unless_locked(&self, sql: &Sql, args: Args) -> Result<Option<Vec<SqlRow>>, LedgerError> {
        self.query_by_index(sql, args).await.map(Some)
    }

    /// Runs a statement that every worker polls each second, a row or two by key: other statements do not delay it.
    async fn query_urgent(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        self.query(sql, args).await
    }

    /// Runs all statements in one transaction and returns the rows of each; `None` when a `must_affect` statement
    /// affected nothing and everything was rolled back.
    async fn atomically(&self, steps: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError>;

    /// Like [`Engine::atomically`], with this time limit for each statement. The caller's own wait is bounded as ever;
    /// after that, the transaction goes on in the background.
    async fn atomically_within(
        &self,
        _at_most: Duration,
        steps: Vec<Step>,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        self.atomically(steps).await
    }

    /// Runs a job write for one job and returns its row; `None` when the write found none.
    async fn execute_one(&self, write: &JobWrite, args: &Args) -> Result<Option<SqlRow>, LedgerError> {
        let rows = self.atomically(write.steps(args)).await?;
        Ok(rows.into_iter().flatten().flatten().next())
    }

    /// Runs a job write for many jobs, each at most once, in one transaction.
    ///
    /// # Errors
    /// Then it is unknown whether the transaction was committed.
    async fn execute_batch(&self, write: &JobWrite, units: Vec<Args>) -> Result<Batch, LedgerError>;

    /// Hints that settings changed, if the database sends any.
    fn settings_hints(&self) -> Option<SettingsHints> {
        None
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

/// One argument of all writes.
#[derive(Debug, PartialEq)]
pub enum Array {
    Ints(Vec<Option<i64>>),
    Reals(Vec<Option<f64>>),
    Bools(Vec<Option<bool>>),
    Texts(Vec<Option<String>>),
    Bytes(Vec<Vec<u8>>),
}

impl Array {
    fn starting_with(value: &Value, room: usize) -> Self {
        match value {
            Value::Int(_) => Self::Ints(Vec::with_capacity(room)),
            Value::Real(_) => Self::Reals(Vec::with_capacity(room)),
            Value::Bool(_) => Self::Bools(Vec::with_capacity(room)),
            Value::Text(_) => Self::Texts(Vec::with_capacity(room)),
            Value::Bytes(_) => Self::Bytes(Vec::with_capacity(room)),
        }
    }

    /// `None` for a value of another type: a shorter column would be filled up with NULLs.
    fn push(&mut self, value: &Value) -> Option<()> {
        match (self, value) {
            (Self::Ints(column), Value::Int(value)) => column.push(*value),
            (Self::Reals(column), Value::Real(value)) => column.push(*value),
            (Self::Bools(column), Value::Bool(value)) => column.push(*value),
            (Self::Texts(column), Value::Text(value)) => column.push(value.clone()),
            (Self::Bytes(column), Value::Bytes(value)) => column.push(value.clone()),
            _ => return None,
        }
        Some(())
    }
}

/// The columns; `None` when the writes differ in their arguments.
pub fn columns(units: &[Args]) -> Option<Vec<Array>> {
    let like = units.first()?;
    let mut columns: Vec<Array> = like.iter().map(|value| Array::starting_with(value, units.len())).collect();
    for unit in units {
        if unit.len() != columns.len() {
            return None;
        }
        for (column, value) in columns.iter_mut().zip(&**unit) {
            column.push(value)?;
        }
    }
    Some(columns)
}

/// The job's id: the first argument of its write.
pub fn job_of(args: &Args) -> Option<&str> {
    match args.first() {
        Some(Value::Text(id)) => id.as_deref(),
        _ => None,
    }
}

/// The row of each write, by its column `id`; `None` for a write without a row.
///
/// # Errors
/// [`LedgerError::Corrupt`] when a row has no `id`.
pub fn rows_in_order(units: &[Args], rows: Vec<SqlRow>) -> Result<Vec<Option<SqlRow>>, LedgerError> {
    let mut by_job = HashMap::with_capacity(rows.len());
    for row in rows {
        by_job.insert(row.text("id")?, row);
    }
    Ok(units.iter().map(|unit| by_job.remove(job_of(unit)?)).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::ledger::sql::result::SqlValue;

    use super::*;

    #[test]
    fn requests_become_column_arrays() {
        let units: [Args; 2] = [
            Arc::from(["a".into(), 1_i64.into(), true.into()]),
            Arc::from(["b".into(), Value::Int(None), false.into()]),
        ];
        let expected = vec![
            Array::Texts(vec![Some("a".to_owned()), Some("b".to_owned())]),
            Array::Ints(vec![Some(1), None]),
            Array::Bools(vec![Some(true), Some(false)]),
        ];
        assert_eq!(columns(&units), Some(expected));
    }

    #[test]
    fn unlike_requests_are_not_batched() {
        let alike: Args = Arc::from(["a".into(), 1_i64.into()]);
        let other: [Args; 2] = [Arc::from(["b".into()]), Arc::from(["b".into(), "1".into()])];
        for other in other {
            assert_eq!(columns(&[alike.clone(), other]), None);
        }
        assert_eq!(columns(&[]), None);
    }

    #[test]
    fn each_request_gets_its_own_row() {
        let row = |id: &str| SqlRow::new(Arc::from(["id".to_owned()]), vec![SqlValue::Text(id.to_owned())]);
        let units: [Args; 3] = [Arc::from(["a".into()]), Arc::from(["b".into()]), Arc::from(["c".into()])];
        let rows = rows_in_order(&units, vec![row("c"), row("a")]).unwrap();
        assert_eq!(rows, [Some(row("a")), None, Some(row("c"))]);
        assert!(rows_in_order(&units, vec![SqlRow::new(Arc::from([]), Vec::new())]).is_err());
    }
}
