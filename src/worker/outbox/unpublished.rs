//! How many outcome events are not published, counted now and then for metrics and reports.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::worker::Worker;

/// How often they are counted.
const EVERY: Duration = Duration::from_secs(10);
/// A count takes at most this part of the database's time.
const SHARE: u32 = 20;

pub async fn keep_counted(worker: &Worker, drained: &CancellationToken) {
    let counting = async {
        loop {
            let began = Instant::now();
            match worker.engines.ledger.unpublished_outcomes().await {
                Ok(unpublished) => worker.meter.note_unpublished(Some(unpublished)),
                Err(error) => {
                    tracing::debug!(%error, "unpublished outcome events cannot be counted");
                    worker.meter.note_unpublished(None);
                }
            }
            sleep(EVERY.max(began.elapsed() * SHARE)).await;
        }
    };
    drained.run_until_cancelled(counting).await.unwrap_or_default()
}
