//! The interface between the ledger's SQL and a database engine: values in, rows out, one statement or a transaction.
//!
//! Every call runs in a task that is awaited and never cancelled, but those of [`Engine::for_reads`]. In sqlx 0.9, a cancelled `begin` returns a connection
//! with an open transaction to the pool (<https://github.com/transact-rs/sqlx/issues/4385>).
//!
//! All writes of a batch need the same arguments in the same order, with the job's id first. Their arguments become
//! columns, and the returned rows are assigned to the writes again. Other writes cannot be batched.

use std::borrow::Cow;
use std::collections::HashMap;
use std::future::Future;
use std::mem::discriminant;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::dialect::{Dialect, JobWrite};
use super::hints::ChangeHints;
use super::result::SqlRow;
use crate::domain::job::{ContentHash, Identifier};
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_up;
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
    Text(Option<Arc<str>>),
    Bytes(Bytes),
}

/// Conversions to arguments, each with its kind.
macro_rules! values {
    ($($from:ty => $kind:ident($value:ident $(, $to:expr)?)),+ $(,)?) => {$(
        impl From<$from> for Value {
            fn from($value: $from) -> Self {
                Self::$kind(values!(@ $value $(, $to)?))
            }
        }
    )+};
    (@ $value:ident) => { $value };
    (@ $value:ident, $to:expr) => { $to };
}

values! {
    Option<i64> => Int(value),
    Option<f64> => Real(value),
    Option<bool> => Bool(value),
    Option<String> => Text(value, value.map(Arc::from)),
    Option<&str> => Text(value, value.map(Arc::from)),
    Option<&Arc<str>> => Text(value, value.cloned()),
    Option<&Identifier> => Text(value, value.map(Arc::from)),
    Option<&ProviderName> => Text(value, value.map(Arc::from)),
    i64 => Int(value, Some(value)),
    u32 => Int(value, Some(value.into())),
    bool => Bool(value, Some(value)),
    Option<Cow<'_, str>> => Text(value, value.as_deref().map(Arc::from)),
    String => Text(value, Some(value.into())),
    Cow<'_, str> => Text(value, Some(Arc::from(&*value))),
    &str => Text(value, Some(value.into())),
    &String => Text(value, Some(value.as_str().into())),
    &Arc<str> => Text(value, Some(Arc::clone(value))),
    &Identifier => Text(value, Some(value.into())),
    &ProviderName => Text(value, Some(value.into())),
    ContentHash => Bytes(value, Bytes::copy_from_slice(&value.0)),
    &[u8] => Bytes(value, Bytes::copy_from_slice(value)),
    &Bytes => Bytes(value, value.clone()),
    // Whole milliseconds, rounded up: a wait or a lease is never shorter than asked for.
    Duration => Int(value, Some(i64::try_from(millis_up(value)).unwrap_or(i64::MAX))),
}

impl From<Option<Duration>> for Value {
    fn from(value: Option<Duration>) -> Self {
        value.map_or(Self::Int(None), Self::from)
    }
}

/// The arguments of a statement, in their order.
macro_rules! args {
    ($($value:expr),* $(,)?) => {
        [$($crate::ledger::sql::engine::Value::from($value)),*]
    };
}
pub(crate) use args;

/// One statement of a transaction.
#[derive(Clone, Debug)]
pub struct Step {
    pub sql: Sql,
    pub args: Args,
    /// Roll everything back when this statement neither returns nor changes a row.
    pub must_affect: bool,
}

impl Step {
    pub fn new(sql: &Sql, args: Args) -> Self {
        Self { sql: sql.clone(), args, must_affect: false }
    }
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

    /// The same database for reads of people, on connections of their own, which are read-only. Such a read ends with its
    /// caller. `None`: it has no connection to spare.
    fn for_reads(&self) -> Option<Arc<dyn Engine>> {
        None
    }

    /// Hints of other processes; `None`: there are none, or this engine only reads.
    fn change_hints(&self) -> Option<ChangeHints> {
        None
    }
}

/// Runs database work to its end even if the caller is dropped, and answers the caller in bounded time.
pub async fn run_to_completion<T: Send + 'static, E: Into<LedgerError> + Send + 'static>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, LedgerError> {
    match tokio::time::timeout(WORK_TIMEOUT, tokio::spawn(work)).await {
        Ok(Ok(result)) => result.map_err(Into::into),
        Ok(Err(ended)) => Err(LedgerError::Unavailable(format!("the database task ended early: {ended}"))),
        Err(_) => Err(no_answer()),
    }
}

/// Runs a read, which ends when its caller is dropped. Only for connections that write nothing: a cancelled `COMMIT` that
/// waits for its standby reports success.
pub async fn run_while_awaited<T, E: Into<LedgerError>>(
    read: impl Future<Output = Result<T, E>>,
) -> Result<T, LedgerError> {
    match tokio::time::timeout(WORK_TIMEOUT, read).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(no_answer()),
    }
}

fn no_answer() -> LedgerError {
    LedgerError::Unavailable(format!("no answer within {} s", WORK_TIMEOUT.as_secs()))
}

/// Whether all writes have the same number of arguments, of the same types.
pub fn are_alike(units: &[Args]) -> bool {
    units.windows(2).all(|pair| pair[0].iter().map(discriminant).eq(pair[1].iter().map(discriminant)))
}

/// What both drivers do in the same way, each with its own types.
macro_rules! driver {
    ($database:ty) => {
        /// Rows, and whether any row was returned or changed.
        async fn run(
            connection: &mut <$database as sqlx::Database>::Connection,
            step: &Step,
        ) -> Result<(Vec<SqlRow>, bool), sqlx::Error> {
            let mut query = sqlx::query::<$database>(AssertSqlSafe(step.sql.clone()));
            for value in &*step.args {
                query = match value {
                    Value::Int(value) => query.bind(*value),
                    Value::Real(value) => query.bind(*value),
                    Value::Bool(value) => query.bind(*value),
                    Value::Text(value) => query.bind(value.as_deref()),
                    Value::Bytes(value) => query.bind(&**value),
                };
            }
            let mut answers = connection.fetch_many(query);
            let mut rows = Vec::new();
            let mut changed = 0;
            while let Some(answer) = answers.try_next().await? {
                match answer {
                    Either::Left(done) => changed += done.rows_affected(),
                    Either::Right(row) => rows.push(row.into()),
                }
            }
            let affected = changed > 0 || !rows.is_empty();
            Ok((rows, affected))
        }
    };
}
pub(crate) use driver;

/// The job's id: the first argument of its write.
pub fn job_of(args: &Args) -> Option<&Arc<str>> {
    match args.first() {
        Some(Value::Text(id)) => id.as_ref(),
        _ => None,
    }
}

/// The row of each write, by its column `id`; `None` for a write without a row.
///
/// # Errors
/// [`LedgerError::Corrupt`] when a row has no `id`.
pub fn rows_in_order(units: &[Args], rows: Vec<SqlRow>) -> Result<Vec<Option<SqlRow>>, LedgerError> {
    let places: HashMap<&str, usize> = (0..).zip(units).filter_map(|(at, unit)| Some((&**job_of(unit)?, at))).collect();
    let mut ordered: Vec<Option<SqlRow>> = units.iter().map(|_| None).collect();
    for row in rows {
        if let Some(at) = places.get(row.text("id")?) {
            ordered[*at] = Some(row);
        }
    }
    Ok(ordered)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sqlx::{Connection as _, SqliteConnection};

    use super::*;

    #[test]
    fn unlike_requests_are_not_batched() {
        let first: Args = Arc::from(["a".into(), 1_i64.into()]);
        assert!(are_alike(&[Arc::clone(&first), Arc::from(["b".into(), Value::Int(None)])]));
        let others: [Args; 2] = [Arc::from(["b".into()]), Arc::from(["b".into(), "1".into()])];
        for other in others {
            assert!(!are_alike(&[Arc::clone(&first), other]));
        }
    }

    #[tokio::test]
    async fn each_request_gets_its_own_row() {
        let mut database = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        let returned = sqlx::raw_sql("SELECT 'c' AS id UNION ALL SELECT 'a'");
        let returned = returned.fetch_all(&mut database).await.unwrap().into_iter().map(SqlRow::from).collect();
        let units: [Args; 3] = [Arc::from(["a".into()]), Arc::from(["b".into()]), Arc::from(["c".into()])];
        let rows = rows_in_order(&units, returned).unwrap();
        let ids: Vec<_> = rows.iter().map(|row| row.as_ref().map(|row| row.text("id").unwrap())).collect();
        assert_eq!(ids, [Some("a"), None, Some("c")]);
        let unnamed = sqlx::raw_sql("SELECT 'a' AS name").fetch_all(&mut database).await.unwrap();
        assert!(rows_in_order(&units, unnamed.into_iter().map(SqlRow::from).collect()).is_err());
    }
}
