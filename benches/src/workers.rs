//! The workers of a benchmark: one or several workers of production in this process.
//!
//! They are stopped and awaited at the end, or aborted when their owner is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::quantile::{self, Distribution};
use sluicegate::app::RunLock;
use sluicegate::cli::CommandError;
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::LedgerError;
use sluicegate::queue::message::CardNumbers;
use sluicegate::worker::meter::{LaneMeter, Meter, ReturnReason};
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
            max_open_jobs: u32::MAX,
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

    fn lanes(&self, provider: &ProviderName) -> Vec<Arc<LaneMeter>> {
        self.meters.iter().filter_map(|meter| meter.find_lane(provider)).collect()
    }

    /// Jobs in a final state, as the workers count them.
    pub fn finished(&self, provider: &ProviderName) -> u64 {
        let of_lane = |lane: &Arc<LaneMeter>| FinalState::ALL.map(|state| lane.finished(state.name()).get());
        self.lanes(provider).iter().flat_map(of_lane).sum()
    }

    /// Permits that were released unused, by reason.
    pub fn returned(&self, provider: &ProviderName) -> BTreeMap<&'static str, u64> {
        let lanes = self.lanes(provider);
        let all = |why: ReturnReason| lanes.iter().map(|lane| lane.returned(why).get()).sum();
        ReturnReason::ALL.map(|why| (why.code(), all(why))).into()
    }

    /// Lateness of starts against the times of their permits: of all starts, and of those granted ahead of time.
    pub fn lateness(&self, provider: &ProviderName) -> (Distribution, Distribution) {
        // The part is read before the whole, so that it is never larger.
        let lateness: Vec<_> = self.lanes(provider).iter().map(|lane| lane.lateness()).collect();
        let ahead = quantile::sum(lateness.iter().map(|[_, ahead]| Distribution::read(ahead)));
        (quantile::sum(lateness.iter().map(|[all, _]| Distribution::read(all))), ahead)
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
