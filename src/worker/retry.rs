//! Waiting for an engine to come back: the same operation again, with growing pauses, until it works or must be given up.
//!
//! Refuses to repeat what trying again will not mend, and refuses to outlive the drain.

use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::domain::backoff::BackoffPolicy;
use crate::ledger::LedgerError;
use crate::queue::QueueError;

const BACKOFF: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(5) };

/// Whether the same operation may succeed later.
pub trait Transient: std::error::Error {
    fn is_transient(&self) -> bool;
}

impl Transient for LedgerError {
    fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

impl Transient for QueueError {
    fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::NotConfirmed(_) | Self::Rejected(_) | Self::Unroutable(_))
    }
}

/// Why an operation was given up.
#[derive(Debug)]
pub enum RetryEnded<E> {
    /// The token fired while the engine was away.
    Stopped,
    Failed(E),
}

/// Repeats `operation` while its engine is away. `what` names it in the log, once per outage.
///
/// # Errors
/// [`GivenUp`] when the error will not pass, or `stop` fires first.
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
                    tracing::info!(what, after = failed, "works again");
                }
                return Ok(value);
            }
            Err(error) if error.is_transient() => error,
            Err(error) => return Err(RetryEnded::Failed(error)),
        };
        failed += 1;
        if failed == 1 {
            tracing::warn!(what, %error, "engine away, waiting for it");
        }
        tokio::select! {
            () = sleep(BACKOFF.delay(failed, rand::random())) => {}
            () = stop.cancelled() => return Err(RetryEnded::Stopped),
        }
    }
}
