//! Claims of one payment by its id, whichever payments are in the backlog: what many tests begin with.

use std::time::Duration;

use sluicegate::domain::job::{ContentHash, InvalidMessage, Job};
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

pub trait ClaimById {
    /// Records the job if it is new, takes it from a worker whose lease has ended, and claims it.
    async fn claim(&self, job: &Job, hash: ContentHash, owner: &str, lease: Duration) -> Result<Claim, LedgerError>;
}

impl ClaimById for Database {
    async fn claim(&self, job: &Job, hash: ContentHash, owner: &str, lease: Duration) -> Result<Claim, LedgerError> {
        if let BacklogRecord::Conflict(conflict) = self.record_backlog(job, hash, Duration::ZERO).await? {
            return Ok(Claim::Conflict(conflict));
        }
        self.return_due(&job.provider, Duration::ZERO, 1_000, &|other| *other != job.id).await?;
        let above = LeaseToken { id: job.id.clone(), fence: 0 };
        let claim = self.claim_for_repair(&above, owner, lease).await?;
        Ok(claim.map_or(Claim::NotOpen, |claim| Claim::Claimed(Box::new(claim.claimed))))
    }
}
