//! The PostgreSQL engine of the ledger: statements, transactions and batches over the connection pool.
//!
//! It does not check where the server is: `config` rejects plain text to other machines before anything is opened.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Either, Executor, Postgres, Row as _, TypeInfo, ValueRef};

use super::cells::SqlValue;
use super::connect_options::connect_options;
use super::connections::Connections;
use super::dialect::{Dialect, JobWrite};
use super::engine::{
    Args, Batch, Engine, RETRIES_MAX, Sql, Step, Value, are_alike, driver, rows_in_order, run_to_completion,
    run_while_awaited,
};
use super::hints::ChangeHints;
use super::result::{SqlRow, is_rolled_back_for_sure, lock_not_available, rolled_back};
use super::session::{
    STATEMENT_MAX, SessionRights, URGENT_MAX, check_primary, with_client_timeout, with_statement_timeout,
    with_timeout_after,
};
use super::slots::ConnectionPurpose;
use crate::ledger::LedgerError;
use crate::tls::Authorities;

pub struct PostgresEngine {
    connections: Connections,
}

impl PostgresEngine {
    /// Makes the pool; it connects at first use.
    ///
    /// # Errors
    /// [`LedgerError::StatementFailed`] when the URL is invalid or would send payments in plain text.
    pub fn open(url: &str, max_connections: u32, trusted: &Authorities) -> Result<Self, LedgerError> {
        Ok(Self { connections: Connections::new(max_connections, connect_options(url, trusted)?) })
    }

    pub fn connections(&self) -> &Connections {
        &self.connections
    }

    /// Runs work to its end, unless it can only read.
    async fn run<T: Send + 'static, E: Into<LedgerError> + Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, LedgerError> {
        match self.connections.rights() {
            SessionRights::All => run_to_completion(work).await,
            SessionRights::ReadOnly => run_while_awaited(work).await,
        }
    }

    /// Runs a transaction, again if the server rolled it back.
    async fn repeat(
        &self,
        purpose: ConnectionPurpose,
        steps: Vec<Step>,
        at_most: Duration,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        let pool = self.connections.clone();
        self.run(async move {
            let mut repeats = 0;
            loop {
                match transaction(&pool, purpose, &steps, at_most).await {
                    Err(error) if rolled_back(&error) && repeats < RETRIES_MAX => repeats += 1,
                    result => return result,
                }
            }
        })
        .await
    }

    /// Runs a transaction once, planned like a batch. `None`: it was rolled back, perhaps for a lock of another session.
    async fn try_by_index(&self, steps: Vec<Step>) -> Result<Option<Vec<SqlRow>>, LedgerError> {
        let pool = self.connections.clone();
        self.run(async move {
            match transaction(&pool, ConnectionPurpose::Batches, &steps, STATEMENT_MAX).await {
                Ok(rows) => Ok(Some(rows.into_iter().flatten().flatten().collect())),
                Err(error) if rolled_back(&error) || lock_not_available(&error) => Ok(None),
                Err(error) => Err(error),
            }
        })
        .await
    }
}

driver!(Postgres);

#[async_trait]
impl Engine for PostgresEngine {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        let rows = self.repeat(ConnectionPurpose::General, vec![Step::new(sql, args)], STATEMENT_MAX).await?;
        Ok(rows.into_iter().flatten().flatten().collect())
    }

    async fn query_by_index(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        let rows = self.repeat(ConnectionPurpose::Batches, vec![Step::new(sql, args)], STATEMENT_MAX).await?;
        Ok(rows.into_iter().flatten().flatten().collect())
    }

    async fn query_unless_locked(&self, sql: &Sql, args: Args) -> Result<Option<Vec<SqlRow>>, LedgerError> {
        self.try_by_index(vec![Step::new(sql, args)]).await
    }

    /// A silent connection is dropped soon, so that the next poll has another. So is one to a demoted server: it would
    /// return outdated rows forever.
    async fn query_urgent(&self, sql: &Sql, args: Args) -> Result<Vec<SqlRow>, LedgerError> {
        let (pool, step) = (self.connections.clone(), Step::new(sql, args));
        let rights = pool.rights();
        self.run(async move {
            // A new connection may take longer than a response: with the shorter limit, it would never be opened.
            let mut session = pool.lend(ConnectionPurpose::Polls).await?;
            let rows = with_client_timeout(URGENT_MAX, query_primary(session.connection()?, &step, rights)).await;
            session.end(rows)
        })
        .await
    }

    async fn atomically(&self, steps: Vec<Step>) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        self.atomically_within(STATEMENT_MAX, steps).await
    }

    async fn atomically_within(
        &self,
        at_most: Duration,
        steps: Vec<Step>,
    ) -> Result<Option<Vec<Vec<SqlRow>>>, LedgerError> {
        self.repeat(ConnectionPurpose::General, steps, at_most).await
    }

    /// Planned like a batch. Behind a row lock, it waits as long as any statement.
    async fn execute_one(&self, write: &JobWrite, args: &Args) -> Result<Option<SqlRow>, LedgerError> {
        if let Some(rows) = self.try_by_index(write.steps(args)).await? {
            return Ok(rows.into_iter().next());
        }
        let rows = self.atomically(write.steps(args)).await?;
        Ok(rows.into_iter().flatten().flatten().next())
    }

    async fn execute_batch(&self, write: &JobWrite, units: Vec<Args>) -> Result<Batch, LedgerError> {
        let sql = units.first().filter(|_| are_alike(&units)).and_then(|like| write.batch_sql(like));
        let Some(sql) = sql else {
            return Ok(Batch::RolledBack(LedgerError::StatementFailed(
                "the writes of a batch differ in their arguments".to_owned(),
            )));
        };
        let pool = self.connections.clone();
        self.run(async move {
            let rows = async {
                let mut session = pool.lend(ConnectionPurpose::Batches).await?;
                let rows = with_statement_timeout(run_batch(session.connection()?, sql, &units)).await;
                session.end(rows)
            };
            match rows.await {
                Ok(rows) => rows_in_order(&units, rows).map(Batch::Committed),
                Err(error) if is_rolled_back_for_sure(&error) => Ok(Batch::RolledBack(error.into())),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    fn for_reads(&self) -> Option<Arc<dyn Engine>> {
        let connections = self.connections.split_off_reads()?;
        Some(Arc::new(Self { connections }))
    }

    fn change_hints(&self) -> Option<ChangeHints> {
        Some(ChangeHints::postgres(self.connections.clone()))
    }
}

/// Runs a statement on the primary.
///
/// # Errors
/// As of a broken connection, if the server is read-only.
async fn query_primary(
    connection: &mut PgConnection,
    step: &Step,
    rights: SessionRights,
) -> Result<Vec<SqlRow>, sqlx::Error> {
    let (rows, _) = run(connection, step).await?;
    check_primary(connection, rights).await?;
    Ok(rows)
}

/// Runs a transaction with this time limit for each statement.
async fn transaction(
    pool: &Connections,
    purpose: ConnectionPurpose,
    steps: &[Step],
    at_most: Duration,
) -> Result<Option<Vec<Vec<SqlRow>>>, sqlx::Error> {
    if let ([step], STATEMENT_MAX) = (steps, at_most) {
        let (rows, affected) = run_single_statement(pool, purpose, step).await?;
        return Ok((affected || !step.must_affect).then(|| vec![rows]));
    }
    let mut session = pool.lend(purpose).await?;
    let rows = run_statements(session.connection()?, steps, at_most).await;
    session.end(rows)
}

/// Runs one statement, which is a transaction by itself.
async fn run_single_statement(
    pool: &Connections,
    purpose: ConnectionPurpose,
    step: &Step,
) -> Result<(Vec<SqlRow>, bool), sqlx::Error> {
    let mut session = pool.lend(purpose).await?;
    let connection = session.connection()?;
    let rows = with_statement_timeout(run(connection, step)).await;
    if matches!(rows, Err(sqlx::Error::Database(_))) {
        // The server reports an error before it releases the statement's locks, which the next statement may meet. What
        // the ping finds does not matter: the error is the statement's.
        let _is_ready = with_statement_timeout(connection.ping()).await;
    }
    session.end(rows)
}

async fn run_statements(
    connection: &mut PgConnection,
    steps: &[Step],
    at_most: Duration,
) -> Result<Option<Vec<Vec<SqlRow>>>, sqlx::Error> {
    let mut transaction = with_statement_timeout(connection.begin()).await?;
    if at_most != STATEMENT_MAX {
        let limit = AssertSqlSafe(format!("SET LOCAL statement_timeout = '{}ms'", at_most.as_millis()));
        with_statement_timeout(sqlx::raw_sql(limit).execute(&mut *transaction)).await?;
    }
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let (rows, affected) = with_timeout_after(at_most, run(&mut transaction, step)).await?;
        if step.must_affect && !affected {
            with_statement_timeout(transaction.rollback()).await.map_err(not_rolled_back)?;
            return Ok(None);
        }
        all.push(rows);
    }
    with_statement_timeout(transaction.commit()).await?;
    Ok(Some(all))
}

/// Error after which the connection is closed: the server has not acknowledged the rollback.
fn not_rolled_back(error: sqlx::Error) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(format!("PostgreSQL did not acknowledge a rollback: {error}")))
}

/// Runs one statement for many writes, whose arguments are alike: an array for each argument.
async fn run_batch(connection: &mut PgConnection, sql: Sql, units: &[Args]) -> Result<Vec<SqlRow>, sqlx::Error> {
    macro_rules! array {
        ($at:ident, $kind:ident) => {
            array!($at, $kind, |value| value)
        };
        ($at:ident, $kind:ident, $read:expr) => {
            units
                .iter()
                .filter_map(|unit| if let Value::$kind(value) = &unit[$at] { Some(value) } else { None })
                .map($read)
                .collect::<Vec<_>>()
        };
    }
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for (at, like) in units.iter().take(1).flat_map(|unit| unit.iter().enumerate()) {
        query = match like {
            Value::Int(_) => query.bind(array!(at, Int)),
            Value::Real(_) => query.bind(array!(at, Real)),
            Value::Bool(_) => query.bind(array!(at, Bool)),
            Value::Bytes(_) => query.bind(array!(at, Bytes, |value| &**value)),
            Value::Text(_) => query.bind(array!(at, Text, Option::as_deref)),
        };
    }
    Ok(connection.fetch_all(query).await?.into_iter().map(SqlRow::from).collect())
}

/// One cell of a row, as it was sent.
pub fn cell(row: &PgRow, at: usize) -> Result<SqlValue<'_>, sqlx::Error> {
    let raw = row.try_get_raw(at)?;
    if raw.is_null() {
        return Ok(SqlValue::Null);
    }
    Ok(match raw.type_info().name() {
        "INT8" => SqlValue::Int(row.try_get(at)?),
        "INT4" => SqlValue::Int(row.try_get::<i32, _>(at)?.into()),
        "BOOL" => SqlValue::Bool(row.try_get(at)?),
        "FLOAT8" => SqlValue::Real(row.try_get(at)?),
        "BYTEA" => SqlValue::Bytes(row.try_get(at)?),
        _ => SqlValue::Text(row.try_get(at)?),
    })
}
