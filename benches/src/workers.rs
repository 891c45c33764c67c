//! The workers of a benchmark: one or several workers of production in this process.
//!
//! They are stopped and awaited at the end, or aborted when their owner is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::quantile;
use sluicegate::cli::CommandError;
use sluicegate::cli::connect::RunLock;
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::LedgerError;
use sluicegate::queue::message::CardNumbers;
use sluicegate::worker::meter::{Distribution, LaneCounts, Meter};
use sluicegate::worker::supervisor::{self, DrainReport, WorkerStatus};
use sluicegate::worker::{Backends, WorkerOptions, settings_sync, sweeper};

/// Drain timeout of the workers at the end.
const DRAIN: Duration = Duration::from_secs(15);
/// Longer than any benchmark.
const SCRUB_AFTER: Duration = Duration::from_secs(86_400);

#[derive(Default)]
pub struct BenchWorkers {
    stop: CancellationToken,
    running: JoinSet<Result<DrainReport, LedgerError>>,
    meters: Vec<Arc<Meter>>,
    locks: Vec<RunLock>,
}

impl BenchWorkers {
    pub(super) fn add(&mut self, owner: String, backends: Backends, lock: RunLock) {
        let options = WorkerOptions {
            owner,
            card_numbers: CardNumbers::Refuse,
            drain_timeout: DRAIN,
            settings_poll: settings_sync::POLL_INTERVAL,
            sweep_every: sweeper::SWEEP_INTERVAL,
            scrub_after: SCRUB_AFTER,
            scrub_review_after: None,
        };
        let (status, status_rx) = watch::channel(WorkerStatus::default());
        self.meters.push(Arc::clone(&status_rx.borrow().meter));
        self.running.spawn(supervisor::run(backends, options, self.stop.clone(), status));
        self.locks.push(lock);
    }

    fn counts(&self, provider: &ProviderName) -> Vec<LaneCounts> {
        self.meters.iter().filter_map(|meter| meter.find_lane(provider)).map(|lane| lane.counts()).collect()
    }

    /// Jobs in a final state, as the workers count them.
    pub fn finished(&self, provider: &ProviderName) -> u64 {
        let outcomes = self.counts(provider).into_iter().flat_map(|counts| counts.outcomes);
        outcomes.filter(|(state, _)| FinalState::from_name(state).is_some()).map(|(_, count)| count).sum()
    }

    /// Permits that were released unused, by reason.
    pub fn returned(&self, provider: &ProviderName) -> BTreeMap<&'static str, u64> {
        let mut returned = BTreeMap::new();
        for (reason, count) in self.counts(provider).into_iter().flat_map(|counts| counts.returned) {
            *returned.entry(reason).or_default() += count;
        }
        returned
    }

    /// Lateness of starts against the times of their permits: of all starts, and of those granted ahead of time.
    pub fn lateness(&self, provider: &ProviderName) -> (Distribution, Distribution) {
        let counts = self.counts(provider);
        let all = quantile::sum(counts.iter().map(|counts| counts.lateness.clone()));
        (all, quantile::sum(counts.into_iter().map(|counts| counts.lateness_ahead)))
    }

    /// # Errors
    /// When a worker has ended without being stopped.
    pub fn require_running(&mut self) -> Result<(), CommandError> {
        match self.running.try_join_next() {
            None => Ok(()),
            Some(ended) => {
                ended.map_err(failed)??;
                Err(CommandError::Failed("a worker has ended unexpectedly".to_owned()))
            }
        }
    }

    /// Stops all workers, and waits until active jobs are finished or requeued.
    pub async fn stop(mut self) -> Result<(), CommandError> {
        self.stop.cancel();
        while let Some(ended) = self.running.join_next().await {
            ended.map_err(failed)??;
        }
        Ok(())
    }
}

fn failed(error: tokio::task::JoinError) -> CommandError {
    CommandError::Failed(error.to_string())
}
