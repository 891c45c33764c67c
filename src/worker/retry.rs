//! Retries while a backend is unavailable: repeats an operation with growing pauses until it succeeds.
//!
//! It ends early on an error that a retry does not fix, and when its token fires, as at the end of a drain.

use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::domain::backoff::BackoffPolicy;
use crate::ledger::LedgerError;
use crate::queue::QueueError;

const BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(5) };

/// Errors after which the same operation may succeed later.
pub trait Transient: std::error::Error {
    fn is_transient(&self) -> bool;
}

impl Transient for LedgerError {
    fn is_transient(&self) -> bool {
        self.is_unavailable()
    }
}

impl Transient for QueueError {
    fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::NotConfirmed(_) | Self::Rejected(_) | Self::Unroutable(_))
    }
}

/// Why the retries ended without success.
#[derive(Debug, thiserror::Error)]
pub enum RetryEnded<E> {
    /// The token fired while the backend was unavailable.
    #[error("this process stops while the backend is unavailable")]
    Stopped,
    #[error("{0}")]
    Failed(E),
}

/// Repeats `operation` while its backend is unavailable. `what` names it in the log. Hundreds of jobs retry at the same
/// time, so the heartbeat alone says at `info` that a backend is available again.
///
/// # Errors
/// [`RetryEnded`] when the error is permanent, or `stop` fires first.
pub async fn retry_while_unavailable<T, E: Transient, F: Future<Output = Result<T, E>>>(
    what: &str,
    stop: &CancellationToken,
    mut operation: impl FnMut() -> F,
) -> Result<T, RetryEnded<E>> {
    let mut failed = 0;
    loop {
        let error = match operation().await {
            Ok(value) => {
                if failed > 0 {
                    tracing::debug!(what, after = failed, "succeeded again");
                }
                return Ok(value);
            }
            Err(error) if error.is_transient() => error,
            Err(error) => return Err(RetryEnded::Failed(error)),
        };
        failed += 1;
        if failed == 1 {
            tracing::warn!(what, %error, "backend unavailable, retrying");
        }
        tokio::select! {
            () = sleep(BACKOFF.delay(failed, rand::random())) => {}
            () = stop.cancelled() => return Err(RetryEnded::Stopped),
        }
    }
}
