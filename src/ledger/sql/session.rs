//! How long a statement to PostgreSQL is waited for.
//!
//! A server whose machine lost power never answers, and the driver would wait for as long as the kernel does. So each statement
//! has a limit on the server, and a slightly longer one here.

use std::io;
use std::time::Duration;

use tokio::time::timeout;

/// `statement_timeout`: set on the server, because a client-side timeout would cancel a transaction half-way.
pub const STATEMENT_MAX: Duration = Duration::from_secs(10);
/// A server that is there has answered when a statement has had all its time and this. One that is not may never tell (its
/// machine lost power, a box on the way has forgotten the connection), and the driver would wait for as long as the kernel
/// does: a quarter of an hour, or for ever.
const RESPONSE_GRACE: Duration = Duration::from_secs(5);
/// How long a poll waits for its answer: what was polled is gone by for three seconds, so another one comes in time.
pub const URGENT_MAX: Duration = Duration::from_secs(1);

/// What the server answers to one statement, in bounded time.
///
/// # Errors
/// Those of the statement; one of I/O when the server says nothing.
pub async fn with_statement_timeout<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    with_timeout_after(STATEMENT_MAX, statement).await
}

/// The same of a statement that may take so long.
///
/// # Errors
/// As [`answered`].
pub async fn with_timeout_after<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    with_client_timeout(at_most.saturating_add(RESPONSE_GRACE), statement).await
}

/// What it says in this time.
///
/// # Errors
/// As [`answered`].
pub async fn with_client_timeout<T>(
    at_most: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let silent = || {
        let words = format!("the server has said nothing for {} s", at_most.as_secs());
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, words))
    };
    timeout(at_most, statement).await.unwrap_or_else(|_| Err(silent()))
}
