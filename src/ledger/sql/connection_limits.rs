//! PostgreSQL's limits on connections: the user's, the database's and the server's.
//!
//! The server rejects connections beyond the lowest of them, whatever `database.max_connections` says.

use sqlx::Row as _;
use sqlx::postgres::PgConnection;

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
