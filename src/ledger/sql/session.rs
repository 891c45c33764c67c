//! Time limits of statements to PostgreSQL, on the server and in the client.
//!
//! A server whose machine lost power never answers, and the driver would wait as long as the kernel does. So each
//! statement has a limit on the server, and a slightly longer one here.

use std::io;
use std::time::Duration;

use tokio::time::timeout;

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
