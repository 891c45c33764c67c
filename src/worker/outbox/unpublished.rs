//! The count of unpublished outcome events, taken every ten seconds for metrics and reports.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::worker::WorkerContext;

/// Time between two counts.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// A count takes at most this part of the database's time.
const QUERY_TIME_DIVISOR: u32 = 20;

pub async fn keep_counted(worker: &WorkerContext, drained: &CancellationToken) {
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
