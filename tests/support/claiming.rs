//! Claims of one payment by its id, whichever payments are in the backlog, and returns of all at once: what many tests
//! begin with.

use std::time::Duration;

use sluicegate::domain::job::{ContentHash, FlowKey, InvalidMessage, Job};
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::backlog::BacklogRecord;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::{Claimed, LeaseToken, LedgerError};

#[derive(Clone, Debug, PartialEq)]
pub enum Claim {
    Claimed(Box<Claimed>),
    /// Finished, or another worker has it.
    NotOpen,
    Conflict(InvalidMessage),
}

/// Jobs that have returned to the backlog without a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReturnedJobs {
    /// The flow of each.
    pub flows: Vec<FlowKey>,
    /// Jobs whose worker was lost.
    pub lost: usize,
}

/// Most lost jobs that are read at once.
const ALL: u32 = 10_000;

pub trait ClaimById {
    /// Records the job if it is new, takes it from a worker that is lost, and claims it for a living one.
    async fn claim(&self, job: &Job, hash: ContentHash, holder: &str) -> Result<Claim, LedgerError>;

    /// Returns the lane's jobs that are due, at most this many, and those of lost workers, without a wait for responses.
    async fn return_now(&self, lane: &ProviderName, at_most: u32) -> Result<ReturnedJobs, LedgerError>;
}

impl ClaimById for Database {
    async fn claim(&self, job: &Job, hash: ContentHash, holder: &str) -> Result<Claim, LedgerError> {
        // One that other claims of this worker delay is there already.
        drop(self.write_beat(holder, 0).await);
        if let BacklogRecord::Conflict(conflict) = self.record_backlog(job, hash, Duration::ZERO).await? {
            return Ok(Claim::Conflict(conflict));
        }
        let mut lost = self.lost_jobs(&job.provider, None, ALL).await?;
        lost.retain(|lost| lost.id == job.id);
        self.take_away(&lost, None).await?;
        let above = LeaseToken { id: job.id.clone(), fence: 0 };
        let claim = self.claim_for_repair(&above, holder, None).await?;
        Ok(claim.map_or(Claim::NotOpen, |claim| Claim::Claimed(Box::new(claim.claimed))))
    }

    async fn return_now(&self, lane: &ProviderName, at_most: u32) -> Result<ReturnedJobs, LedgerError> {
        let mut flows = self.wake_due(lane, at_most).await?;
        let lost = self.take_away(&self.lost_jobs(lane, None, ALL).await?, None).await?;
        let count = lost.len();
        flows.extend(lost);
        Ok(ReturnedJobs { flows, lost: count })
    }
}
