//! The neighbours of one payment in the ledger: jobs ahead of it, active jobs, and rejected messages with its id.
//!
//! Counts the open jobs of a provider when an operator asks about one. It takes no lock, and workers do not call it.

use std::time::Duration;

use super::backlog::FlowStatus;
use super::operator::DatabaseTime;
use crate::domain::disposition::Resend;

/// The neighbours and the progress of a job, at one instant of the ledger's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerQueuePosition {
    pub now: DatabaseTime,
    /// Messages with this id that can never be a job; newest first, at most five.
    pub rejected: Vec<Rejection>,
    pub progress: JobProgress,
    /// Its place in the backlog of its lane, where no message brings it back; `None`: it is not there.
    pub backlog: Option<BacklogPosition>,
    /// Open jobs of the quota that are due earlier, or more urgent, and have no request in flight; jobs of the backlog are
    /// left out. For a job of the backlog: the jobs that are expected to be claimed before it, and the active ones.
    pub jobs_ahead: u64,
    /// The sum of their costs. For a job of the backlog, each costs 1.
    pub cost_ahead: u64,
    /// Jobs of the same provider that are due, have no lease and are not in the backlog: their messages are ready in the
    /// lane's queue.
    pub due: u64,
    /// Other active jobs of the quota without a request in flight.
    pub active: u64,
    /// Workers that have active jobs of the quota.
    pub workers: u32,
    /// Mean duration of a request: the last fifty of the last ten minutes.
    pub mean_request_time: Option<Duration>,
}

/// The place of a job in its flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BacklogPosition {
    pub flow: FlowStatus,
    /// Jobs of its flow that are claimed before it.
    pub before_in_flow: u64,
    /// Other jobs of its account that are expected to be sent before it: active ones of the quota without a request in
    /// flight, and those of more urgent flows.
    pub account_ahead: u64,
}

/// Fields that the job's details leave out and `jobs explain` needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Look-ups begun so far.
    pub lookups: u32,
    pub resend: Resend,
    /// Consecutive workers that were lost before they began a request.
    pub lost_holders: u32,
    /// When the last charge of unknown outcome began.
    pub unknown_since: Option<DatabaseTime>,
}

/// A message that never became a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub at: DatabaseTime,
    pub lane: String,
    pub reason: String,
    pub detail: String,
}
