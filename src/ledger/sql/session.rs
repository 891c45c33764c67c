//! Sessions of PostgreSQL: time limits of statements, and a connection's settings.
//!
//! A server whose machine lost power never answers, and the driver would wait as long as the kernel does. So each
//! statement has a limit on the server, and a slightly longer one here.
//!
//! Settings are set by statements, because poolers drop unknown start parameters, and then read back. In session mode a
//! pooler passes both on. In transaction mode it lends one server process to several connections, which then share
//! settings and locks. Such a pooler is rejected. See `docs/decisions/0028-query-plans-are-pinned.md`.

use std::io;
use std::time::Duration;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _};
use tokio::time::timeout;

use super::slots::ConnectionPurpose;
use crate::domain::backend_fault::BackendFault;

/// `statement_timeout`: set on the server, because a client-side timeout would cancel a transaction half-way.
pub const STATEMENT_MAX: Duration = Duration::from_secs(10);
/// Extra time for the response after a statement's own limit. Without it, a lost connection (power failure, expired
/// firewall state) would block for as long as the kernel waits: a quarter of an hour, or forever.
const RESPONSE_GRACE: Duration = Duration::from_secs(5);
/// Time limit of a poll: a polled value is used for three seconds, so the next one comes in time.
pub const URGENT_MAX: Duration = Duration::from_secs(1);

/// The server's response to one statement, in bounded time.
///
/// # Errors
/// Those of the statement; one of I/O when the server does not answer.
pub async fn with_statement_timeout<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    with_timeout_after(STATEMENT_MAX, statement).await
}

/// The response to a statement with this time limit.
pub async fn with_timeout_after<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    with_client_timeout(at_most.saturating_add(RESPONSE_GRACE), statement).await
}

/// The response within this time.
pub async fn with_client_timeout<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let silent = || {
        let words = format!("PostgreSQL did not answer within {} s", at_most.as_secs());
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words))
    };
    timeout(at_most, statement).await.unwrap_or_else(|_| Err(silent()))
}

/// A row that another transaction has locked must not delay the rest of its batch: those jobs are then written one by
/// one. A plan from when a table was small would read all of it forever. So: plan by index, whatever the statistics
/// say, and only once. Where rows are wanted in the order of an index, no other index is read and sorted. A plan that
/// looks expensive for this reason alone is not compiled: that takes a second each time.
const BATCH_SETTINGS: &str = "SET lock_timeout = '100ms'; SET enable_seqscan = off; SET enable_sort = off; \
                      SET enable_hashjoin = off; SET enable_mergejoin = off; SET plan_cache_mode = force_generic_plan; \
                      SET jit = off";
const DEFAULT_SETTINGS: &str = "SET lock_timeout = '5s'; RESET enable_seqscan; RESET enable_sort; RESET enable_hashjoin; \
                      RESET enable_mergejoin; RESET plan_cache_mode; RESET jit";
const IDLE_MAX: &str = "5s";

/// The server process behind a connection: its id, and when it was started. Two open connections have two of them,
/// unless a pooler lends one to both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerProcess {
    pid: i32,
    since: String,
    /// The server itself: when it was started, and whether it is a standby. A promoted standby is another server, too.
    pub server: String,
}

impl ServerProcess {
    /// A query that returns a row while the process runs a statement.
    pub fn works_sql(&self) -> String {
        let Self { pid, since, .. } = self;
        let since = since.replace('\'', "");
        format!("SELECT 1 FROM pg_stat_get_activity({pid}) WHERE backend_start::text = '{since}' AND state = 'active'")
    }
}

/// What the sessions of a pool may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionRights {
    All,
    /// Their statements end with their callers.
    ReadOnly,
}

/// A server process looks this often whether its client is still there, so that a closed connection ends its statement.
/// Not every operating system of a server has that; there, the statement's own limit ends it.
const READ_ONLY: &str = "SET default_transaction_read_only = on";
const WATCH_CLIENT: &str = "SET client_connection_check_interval = '500ms'";

/// Checks that the connection leads to a server that takes writes.
///
/// # Errors
/// As of a broken connection, if it does not.
pub async fn check_primary(connection: &mut PgConnection, rights: SessionRights) -> Result<(), sqlx::Error> {
    let reads_only = match rights {
        SessionRights::All => "SELECT current_setting('transaction_read_only')::boolean",
        // The session is read-only by itself.
        SessionRights::ReadOnly => "SELECT pg_is_in_recovery()",
    };
    match sqlx::query_scalar(reads_only).fetch_one(connection).await? {
        true => Err(sqlx::Error::Io(io::Error::other(BackendFault::ReadOnly))),
        false => Ok(()),
    }
}

/// Sets up a new connection for [`ConnectionPurpose::General`], and reads its settings back.
pub async fn establish(connection: &mut PgConnection, rights: SessionRights) -> Result<ServerProcess, sqlx::Error> {
    if rights == SessionRights::ReadOnly {
        sqlx::raw_sql(READ_ONLY).execute(&mut *connection).await?;
        sqlx::raw_sql(WATCH_CLIENT).execute(&mut *connection).await.ok();
    }
    let statement_max = format!("{}s", STATEMENT_MAX.as_secs());
    // A committed outcome must survive a crash of the server, whatever its default.
    let set = format!(
        "SET statement_timeout = '{statement_max}'; SET idle_in_transaction_session_timeout = '{IDLE_MAX}'; \
         SET synchronous_commit = on; SET lock_timeout = '5s'"
    );
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await?;
    let read = "SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'), \
                current_setting('synchronous_commit'), current_setting('lock_timeout'), pg_backend_pid(), \
                (SELECT backend_start::text FROM pg_stat_get_activity(pg_backend_pid())), \
                pg_postmaster_start_time()::text || CASE WHEN pg_is_in_recovery() THEN ' standby' ELSE '' END";
    let row = sqlx::raw_sql(read).fetch_one(connection).await?;
    let wanted = [statement_max.as_str(), IDLE_MAX, "on", "5s"];
    for (at, wanted) in wanted.into_iter().enumerate() {
        let held: String = row.try_get(at)?;
        if held != wanted {
            return Err(sqlx::Error::Configuration(
                format!(
                    "database.url: a setting of the session is not in effect ({held} instead of {wanted}). {POOLER}"
                )
                .into(),
            ));
        }
    }
    let since: Option<String> = row.try_get(5)?;
    Ok(ServerProcess { pid: row.try_get(4)?, since: since.unwrap_or_default(), server: row.try_get(6)? })
}

/// Sets up a connection for another purpose.
pub async fn set_up(connection: &mut PgConnection, purpose: ConnectionPurpose) -> Result<(), sqlx::Error> {
    let set = match purpose {
        ConnectionPurpose::Batches => BATCH_SETTINGS,
        ConnectionPurpose::General | ConnectionPurpose::Polls => DEFAULT_SETTINGS,
    };
    sqlx::raw_sql(set).execute(connection).await.map(drop)
}

const POOLER: &str = "A pooler in front of PostgreSQL must be in session mode (PgBouncer: pool_mode = session for this \
                      database): docs/deploying.md, \"Connections\"";

/// Error for a database behind such a pooler.
pub fn pooler_error() -> sqlx::Error {
    let text = format!(
        "database.url leads through a pooler in transaction or statement mode: it lends one server process to several \
         connections. {POOLER}"
    );
    sqlx::Error::Configuration(text.into())
}
