//! The settings of a PostgreSQL connection: setting them, and checking that they are in effect.
//!
//! They are set by statements, because poolers drop unknown start parameters, and then read back. In session mode a
//! pooler passes both on. In transaction mode it lends one server process to several connections, which then share
//! settings and locks. Such a pooler is rejected. See `docs/decisions/0028-query-plans-are-pinned.md`.

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _};

use super::session::STATEMENT_MAX;
use super::slots::ConnectionPurpose;

/// A row that another transaction has locked must not delay the rest of its batch: those jobs are then written one by
/// one. A plan from when a table was small would read all of it forever. So: plan by index, whatever the statistics
/// say, and only once. A plan that looks expensive for this reason alone is not compiled: that takes a second each time.
const BATCH_SETTINGS: &str = "SET lock_timeout = '100ms'; SET enable_seqscan = off; SET enable_hashjoin = off; \
                      SET enable_mergejoin = off; SET plan_cache_mode = force_generic_plan; SET jit = off";
const DEFAULT_SETTINGS: &str = "SET lock_timeout = '5s'; RESET enable_seqscan; RESET enable_hashjoin; RESET enable_mergejoin; \
                      RESET plan_cache_mode; RESET jit";
const IDLE_MAX: &str = "5s";

/// The server process behind a connection: its id, and when it was started.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerProcess {
    pid: i32,
    since: String,
}

/// Sets up a new connection for [`ConnectionPurpose::General`], and reads its settings back.
pub async fn establish(connection: &mut PgConnection) -> Result<ServerProcess, sqlx::Error> {
    let statement_max = format!("{}s", STATEMENT_MAX.as_secs());
    // A committed outcome must survive a crash of the server, whatever its default.
    let set = format!(
        "SET statement_timeout = '{statement_max}'; SET idle_in_transaction_session_timeout = '{IDLE_MAX}'; \
         SET synchronous_commit = on; SET lock_timeout = '5s'"
    );
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await?;
    let read = "SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'), \
                current_setting('synchronous_commit'), current_setting('lock_timeout'), pg_backend_pid(), \
                (SELECT backend_start::text FROM pg_stat_get_activity(pg_backend_pid()))";
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
    Ok(ServerProcess { pid: row.try_get(4)?, since: since.unwrap_or_default() })
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

/// Whether two connections that are open at the same time have one server process.
pub fn is_shared(one: &ServerProcess, other: &ServerProcess) -> bool {
    one == other
}

/// Error for a database behind such a pooler.
pub fn pooler_error() -> sqlx::Error {
    let text = format!(
        "database.url leads through a pooler in transaction or statement mode: it lends one server process to several \
         connections. {POOLER}"
    );
    sqlx::Error::Configuration(text.into())
}
