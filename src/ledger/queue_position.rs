//! What stands around one payment in the ledger: those that go before it, who works on them, and what never became a job.
//!
//! Refuses to lock and to be on a worker's path: it counts the open jobs of a provider, for a person who asks about one.

use std::time::Duration;

use super::operator::DatabaseTime;
use crate::domain::disposition::Resend;

/// What the ledger knows beside a job's own story, at one instant of its clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerQueuePosition {
    pub now: DatabaseTime,
    /// Messages with this id that can never be a job; newest first, at most five.
    pub rejected: Vec<Rejection>,
    pub progress: JobProgress,
    /// Open jobs of the quota that are due earlier, or more urgent, and have no request on the wire.
    pub jobs_ahead: u64,
    /// The sum of their costs.
    pub cost_ahead: u64,
    /// Jobs of the same provider that are due and in nobody's hand: their messages are ready in the lane's queue.
    pub due: u64,
    /// Open jobs of the quota that some worker has in hand and that have no request on the wire, without this one.
    pub active: u64,
    /// Workers that have jobs of the quota in hand.
    pub workers: u32,
    /// From a request's beginning to its end, the mean of the last fifty of the last ten minutes.
    pub mean_request_time: Option<Duration>,
}

/// What its story leaves out, and a decision asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Look-ups begun so far.
    pub lookups: u32,
    pub resend: Resend,
    /// Workers lost in a row while they held it, none of which began a request.
    pub lost_holders: u32,
    /// When the last charge of unknown outcome was begun.
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
