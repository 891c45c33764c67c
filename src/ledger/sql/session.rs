//! A session with PostgreSQL, lent by the pool for one piece of work.
//!
//! Refuses to wait for ever: neither for a server's answer, nor while a session goes back into the pool.

use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{Connection, Postgres};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::meaning::is_of_no_more_use;

/// A caller that gets no connection in this time is told that the database is away.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection that was idle longer is asked for a sign of life before use; a busy one costs no extra round trip.
const PING_AFTER_IDLE: Duration = Duration::from_secs(1);

/// `statement_timeout`: set on the server, because a client-side timeout would cancel a transaction half-way.
pub const STATEMENT_MAX: Duration = Duration::from_secs(10);
/// A server that is there has answered when a statement has had all its time and this. One that is not may never tell (its
/// machine lost power, a box on the way has forgotten the connection), and the driver would wait for as long as the kernel
/// does: a quarter of an hour, or for ever.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long a poll waits for its answer: what was polled is gone by for three seconds, so another one comes in time.
pub const PROMPT_MAX: Duration = Duration::from_secs(1);
/// The pool asks each connection that comes back for a sign of life, and counts it as in use until it has one. Without an end
/// to that, each that falls silent just then would be missing from the pool for ever.
const RETURN_MAX: Duration = Duration::from_secs(3);

/// A pool that connects with its first use.
pub fn pool(max_connections: u32, options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // Replaced by the hook below.
        .test_before_acquire(false)
        .before_acquire(|connection, metadata| {
            Box::pin(async move {
                if metadata.idle_for > PING_AFTER_IDLE {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(options)
}

/// What the server answers to one statement, in bounded time.
///
/// # Errors
/// Those of the statement; one of I/O when the server says nothing.
pub async fn answered<T>(statement: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    answered_within(STATEMENT_MAX, statement).await
}

/// The same of a statement that may take so long.
///
/// # Errors
/// As [`answered`].
pub async fn answered_within<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    spoken_within(at_most.saturating_add(SILENCE_MAX), statement).await
}

/// What it says in this time.
///
/// # Errors
/// As [`answered`].
pub async fn spoken_within<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let silent = || {
        let words = format!("the server has said nothing for {} s", at_most.as_secs());
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words))
    };
    timeout(at_most, statement).await.unwrap_or_else(|_| Err(silent()))
}

pub struct Session {
    connection: PoolConnection<Postgres>,
    is_good: bool,
}

impl Session {
    /// # Errors
    /// When there is none in time.
    pub async fn of(pool: &PgPool) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: pool.acquire().await?, is_good: true })
    }

    /// Ends the work with what came of it. A connection to a server that is silent, or that was demoted and only reads, is not
    /// used again: the database may be elsewhere by now.
    ///
    /// # Errors
    /// The result's.
    pub fn end<T>(mut self, result: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        self.is_good = !result.as_ref().is_err_and(is_of_no_more_use);
        result
    }
}

impl Deref for Session {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        match Handle::try_current() {
            Ok(runtime) if self.is_good => drop(runtime.spawn(timeout(RETURN_MAX, self.connection.return_to_pool()))),
            _ => self.connection.close_on_drop(),
        }
    }
}
