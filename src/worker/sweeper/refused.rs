//! The end of jobs in the backlog whose account a rule refuses.
//!
//! A worker declines such a job when it takes it. A lane that is paused or at its limit takes few, and a rule that
//! refuses an account must answer: so the sweeper declines those that wait in the backlog.

use super::{BATCH, RoundRobin, SweepError};
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// Batch after batch; the next sweep continues where this one ends.
pub async fn decline(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let refuses = |row: &Provider| row.account_rules.iter().any(|rule| rule.rule == Rule::Refuse);
    let refusing = known.providers.iter().filter(|(_, row)| refuses(row)).map(|(lane, _)| lane);
    let mut lanes = RoundRobin::new(worker, refusing);
    while let Some((lane, batches)) = lanes.next().await {
        let declined = worker.backends.ledger.decline_refused(lane, BATCH).await?;
        lanes.requeue(lane, batches, declined);
        if declined > 0 {
            worker.outbox.notify_unleased();
            tracing::info!(provider = %lane, declined, "declined waiting jobs of refused accounts");
        }
    }
    Ok(())
}
