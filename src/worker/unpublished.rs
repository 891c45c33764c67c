//! The count of unpublished outcome events, which each worker reports, and which alerts and metrics show.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::WorkerContext;

/// Time between two counts.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// A count takes at most this part of the database's time.
const QUERY_TIME_DIVISOR: u32 = 20;

/// Counts until the drain.
pub async fn keep_counted(worker: WorkerContext, drained: CancellationToken) {
    let counting = async {
        loop {
            let began = Instant::now();
            match worker.backends.ledger.unpublished_events().await {
                Ok(unpublished) => worker.meter.set_unpublished(Some(unpublished)),
                Err(error) => {
                    tracing::debug!(%error, "failed to count unpublished outcome events");
                    worker.meter.set_unpublished(None);
                }
            }
            sleep(COUNT_INTERVAL.max(began.elapsed() * QUERY_TIME_DIVISOR)).await;
        }
    };
    drained.run_until_cancelled(counting).await.unwrap_or_default()
}
