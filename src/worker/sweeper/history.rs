//! The upkeep of the history: folds samples of ten seconds into those of five minutes, and deletes what is too old.
//!
//! A fine sample is deleted long after it was folded, so the sums of its counts are kept. See `src/fleet/history.rs`
//! for what samples and runs mean.

use std::time::Duration;

use super::SweepError;
use crate::fleet::history::fold_until;
use crate::ledger::database::Database;
use crate::ledger::history::{COARSE_RETENTION, SampleStep};

/// Time between two folds, in the whole cluster.
const FOLD_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// Providers of one statement. It reads up to a day of their samples, if none was folded for so long.
const PROVIDERS: usize = 50;

/// Folds and deletes, if this worker gets the duty.
pub(super) async fn keep_history(ledger: &Database) -> Result<(), SweepError> {
    if !ledger.lease_duty("history", FOLD_INTERVAL).await? {
        return Ok(());
    }
    let until_ms = fold_until(&ledger.history_clock().await?);
    for providers in ledger.sampled_providers().await?.chunks(PROVIDERS) {
        let folded = ledger.fold_history(providers, until_ms).await?;
        tracing::debug!(folded, "samples of the history folded");
        for step in [SampleStep::Fine, SampleStep::Coarse] {
            ledger.forget_samples(providers, step, step.retention()).await?;
        }
    }
    Ok(ledger.forget_runs_and_marks(COARSE_RETENTION).await?)
}
