//! PostgreSQL as the ledger's engine.
//!
//! Refuses to judge where the server is: `config` refuses plain text off this machine before anything is opened.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Column, Connection, Either, Executor, Postgres, Row as _, TypeInfo, ValueRef};

use super::columns::{Array, columns, in_order};
use super::connect_options::connect_options;
use super::connections::Connections;
use super::dialect::{Chain, Dialect};
use super::engine::{Args, Engine, Group, REPEATS_MAX, Sql, Step, Value, to_the_end};
use super::hints::PostgresHints;
use super::meaning::{lock_not_available, of_postgres, rolled_back, surely_undone};
use super::row::{Cell, Names, Row};
use super::session::{PROMPT_MAX, STATEMENT_MAX, answered, answered_within, spoken_within};
use super::slots::Purpose;
use crate::ledger::LedgerError;
use crate::ledger::settings::Hints;
use crate::tls::Authorities;

pub struct PostgresEngine {
    connections: Connections,
}

impl PostgresEngine {
    /// Makes the pool; connects with the first use.
    ///
    /// # Errors
    /// [`LedgerError::Refused`] when the URL cannot be meant or would send payments in plain text.
    pub fn open(url: &str, max_connections: u32, trusted: &Authorities) -> Result<Self, LedgerError> {
        Ok(Self { connections: Connections::new(max_connections, connect_options(url, trusted)?) })
    }

    #[must_use]
    pub fn connections(&self) -> &Connections {
        &self.connections
    }
}

#[async_trait]
impl Engine for PostgresEngine {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    async fn query(&self, sql: &Sql, args: Args) -> Result<Vec<Row>, LedgerError> {
        query(self.connections.clone(), Purpose::General, sql, args).await
    }

    async fn query_by_index(&self, sql: &Sql, args: Args) -> Result<Vec<Row>, LedgerError> {
        query(self.connections.clone(), Purpose::Groups, sql, args).await
    }

    /// A connection that says nothing is given up soon, so that the next poll has another. So is one to a server that was
    /// demoted: it would tell for ever what was true then.
    async fn query_promptly(&self, sql: &Sql, args: Args) -> Result<Vec<Row>, LedgerError> {
        let (pool, step) = (self.connections.clone(), Step { sql: sql.clone(), args, must_affect: false });
        to_the_end(async move {
            let rows = async {
                // A new connection may take longer than an answer: given up sooner, it would never be there.
                let mut session = pool.lend(Purpose::Polls).await?;
                let rows = spoken_within(PROMPT_MAX, of_a_primary(session.connection()?, &step)).await;
                session.end(rows)
            };
            rows.await.map_err(|error| of_postgres(&error))
        })
        .await
    }

    async fn atomically(&self, steps: Vec<Step>) -> Result<Option<Vec<Vec<Row>>>, LedgerError> {
        self.atomically_within(STATEMENT_MAX, steps).await
    }

    async fn atomically_within(
        &self,
        at_most: Duration,
        steps: Vec<Step>,
    ) -> Result<Option<Vec<Vec<Row>>>, LedgerError> {
        let pool = self.connections.clone();
        to_the_end(async move {
            let mut repeats = 0;
            loop {
                match transaction(&pool, Purpose::General, &steps, at_most).await {
                    Ok(rows) => return Ok(rows),
                    Err(error) if rolled_back(&error) && repeats < REPEATS_MAX => repeats += 1,
                    Err(error) => return Err(of_postgres(&error)),
                }
            }
        })
        .await
    }

    /// Planned as a group is; behind a row that somebody else holds it waits as long as any statement.
    async fn alone(&self, chain: &Chain, args: &Args) -> Result<Option<Row>, LedgerError> {
        let (pool, steps) = (self.connections.clone(), chain.steps(args));
        let rows = to_the_end(async move {
            match transaction(&pool, Purpose::Groups, &steps, STATEMENT_MAX).await {
                Ok(rows) => Ok(Some(rows)),
                Err(error) if rolled_back(&error) || lock_not_available(&error) => Ok(None),
                Err(error) => Err(of_postgres(&error)),
            }
        });
        let rows = match rows.await? {
            Some(rows) => rows,
            None => self.atomically(chain.steps(args)).await?,
        };
        Ok(rows.into_iter().flatten().flatten().next())
    }

    async fn group(&self, chain: &Chain, units: Vec<Args>) -> Result<Group, LedgerError> {
        let sql = units.first().and_then(|like| chain.for_many(like));
        let (Some(sql), Some(columns)) = (sql, columns(&units)) else {
            return Ok(Group::Undone(LedgerError::Refused("these writes are not alike".to_owned())));
        };
        let pool = self.connections.clone();
        to_the_end(async move {
            let rows = async {
                let mut session = pool.lend(Purpose::Groups).await?;
                let rows = answered(many(session.connection()?, sql, columns)).await;
                session.end(rows)
            };
            match rows.await {
                Ok(rows) => in_order(&units, rows).map(Group::Committed),
                Err(error) if surely_undone(&error) => Ok(Group::Undone(of_postgres(&error))),
                Err(error) => Err(of_postgres(&error)),
            }
        })
        .await
    }

    fn hints(&self) -> Box<dyn Hints> {
        Box::new(PostgresHints::new(self.connections.clone()))
    }
}

async fn query(pool: Connections, purpose: Purpose, sql: &Sql, args: Args) -> Result<Vec<Row>, LedgerError> {
    let step = Step { sql: sql.clone(), args, must_affect: false };
    to_the_end(async move {
        let mut repeats = 0;
        loop {
            match transaction_of_one(&pool, purpose, &step).await {
                Ok((rows, _)) => return Ok(rows),
                Err(error) if rolled_back(&error) && repeats < REPEATS_MAX => repeats += 1,
                Err(error) => return Err(of_postgres(&error)),
            }
        }
    })
    .await
}

/// # Errors
/// As of a connection that is of no more use, if the server only reads.
async fn of_a_primary(connection: &mut PgConnection, step: &Step) -> Result<Vec<Row>, sqlx::Error> {
    let (rows, _) = run(connection, step).await?;
    let reads_only = sqlx::query_scalar::<_, bool>("SELECT current_setting('transaction_read_only')::boolean");
    if reads_only.fetch_one(connection).await? {
        return Err(sqlx::Error::Io(std::io::Error::other("the server was demoted and only reads")));
    }
    Ok(rows)
}

/// Each statement may take so long.
async fn transaction(
    pool: &Connections,
    purpose: Purpose,
    steps: &[Step],
    at_most: Duration,
) -> Result<Option<Vec<Vec<Row>>>, sqlx::Error> {
    if let ([step], STATEMENT_MAX) = (steps, at_most) {
        let (rows, affected) = transaction_of_one(pool, purpose, step).await?;
        return Ok((affected || !step.must_affect).then(|| vec![rows]));
    }
    let mut session = pool.lend(purpose).await?;
    let rows = transaction_of_many(session.connection()?, steps, at_most).await;
    session.end(rows)
}

/// One statement is a transaction by itself.
async fn transaction_of_one(
    pool: &Connections,
    purpose: Purpose,
    step: &Step,
) -> Result<(Vec<Row>, bool), sqlx::Error> {
    let mut session = pool.lend(purpose).await?;
    let rows = answered(run(session.connection()?, step)).await;
    session.end(rows)
}

async fn transaction_of_many(
    connection: &mut PgConnection,
    steps: &[Step],
    at_most: Duration,
) -> Result<Option<Vec<Vec<Row>>>, sqlx::Error> {
    let mut transaction = answered(connection.begin()).await?;
    if at_most != STATEMENT_MAX {
        let limit = AssertSqlSafe(format!("SET LOCAL statement_timeout = '{}ms'", at_most.as_millis()));
        answered(sqlx::raw_sql(limit).execute(&mut *transaction)).await?;
    }
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let (rows, affected) = answered_within(at_most, run(&mut transaction, step)).await?;
        if step.must_affect && !affected {
            answered(transaction.rollback()).await?;
            return Ok(None);
        }
        all.push(rows);
    }
    answered(transaction.commit()).await?;
    Ok(Some(all))
}

async fn many(connection: &mut PgConnection, sql: Sql, columns: Vec<Array>) -> Result<Vec<Row>, sqlx::Error> {
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for column in columns {
        query = match column {
            Array::Ints(values) => query.bind(values),
            Array::Reals(values) => query.bind(values),
            Array::Bools(values) => query.bind(values),
            Array::Texts(values) => query.bind(values),
            Array::Bytes(values) => query.bind(values),
        };
    }
    let mut names = None;
    connection.fetch_all(query).await?.iter().map(|row| read(row, &mut names)).collect()
}

/// Rows, and whether any row was returned or changed.
async fn run(connection: &mut PgConnection, step: &Step) -> Result<(Vec<Row>, bool), sqlx::Error> {
    let mut query = sqlx::query(AssertSqlSafe(step.sql.clone()));
    for value in &*step.args {
        query = bind(query, value);
    }
    let mut answers = connection.fetch_many(query);
    let (mut rows, mut changed, mut names) = (Vec::new(), 0, None);
    while let Some(answer) = answers.try_next().await? {
        match answer {
            Either::Left(done) => changed += done.rows_affected(),
            Either::Right(row) => rows.push(read(&row, &mut names)?),
        }
    }
    let affected = changed > 0 || !rows.is_empty();
    Ok((rows, affected))
}

fn bind<'q>(query: Query<'q, Postgres, PgArguments>, value: &Value) -> Query<'q, Postgres, PgArguments> {
    match value {
        Value::Int(value) => query.bind(*value),
        Value::Real(value) => query.bind(*value),
        Value::Bool(value) => query.bind(*value),
        Value::Text(value) => query.bind(value.clone()),
        Value::Bytes(value) => query.bind(value.clone()),
    }
}

fn read(row: &PgRow, names: &mut Option<Names>) -> Result<Row, sqlx::Error> {
    let columns = || row.columns().iter().map(|column| column.name().to_owned()).collect();
    let names = names.get_or_insert_with(columns).clone();
    let cells = (0..row.len()).map(|at| cell(row, at)).collect::<Result<_, _>>()?;
    Ok(Row::new(names, cells))
}

fn cell(row: &PgRow, at: usize) -> Result<Cell, sqlx::Error> {
    let raw = row.try_get_raw(at)?;
    if raw.is_null() {
        return Ok(Cell::Null);
    }
    Ok(match raw.type_info().name() {
        "INT8" => Cell::Int(row.try_get(at)?),
        "INT4" => Cell::Int(row.try_get::<i32, _>(at)?.into()),
        "BOOL" => Cell::Bool(row.try_get(at)?),
        "FLOAT8" => Cell::Real(row.try_get(at)?),
        "BYTEA" => Cell::Bytes(row.try_get(at)?),
        _ => Cell::Text(row.try_get(at)?),
    })
}
