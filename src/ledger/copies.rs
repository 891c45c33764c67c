//! Copies of one job's message: which of them counts, and whether a job that waits needs one more.
//!
//! A message that lies in a queue cannot be taken back. So each copy that we publish has a number, and the job's row
//! has the newest one, and the one that a delay queue holds until a known instant. An older copy is acknowledged without
//! effect, and while a delay queue holds a copy that comes back in time, no further one is published.

use crate::domain::provider::ProviderName;

/// A message of a job, as it was delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveredCopy {
    pub copy: i64,
    /// A worker had it before and may have died between a commit and its publish: what the row says of copies in queues
    /// is not trusted, and this copy counts.
    pub redelivered: bool,
    /// Its job is taken up without it: it stays in the lane's queue, and is enough for the job to come back.
    pub stays_queued: bool,
}

impl DeliveredCopy {
    /// A copy that counts, whatever its number is.
    pub const ALWAYS_CURRENT: Self = Self::delivered(i64::MAX, false);

    #[must_use]
    pub const fn delivered(copy: i64, redelivered: bool) -> Self {
        Self { copy, redelivered, stays_queued: false }
    }

    /// The newest copy of a job that is taken up by the ledger's word.
    #[must_use]
    pub const fn queued(copy: i64) -> Self {
        Self { copy, redelivered: false, stays_queued: true }
    }
}

/// A worker that claims a job, and the message that it does so for.
#[derive(Clone, Copy, Debug)]
pub struct Claimant<'a> {
    pub owner: &'a str,
    pub delivered: DeliveredCopy,
}

/// How a job comes back that waits, as its row says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReturnPlan {
    /// The newest copy's number.
    pub copy: i64,
    /// The sweeper publishes its message when it is due: a copy in a delay queue would come back later than that.
    pub unqueued: bool,
}

impl ReturnPlan {
    /// The number of the copy that is to be published now; `None` when the job comes back without one.
    #[must_use]
    pub fn copy_to_publish(self, newest_before: i64) -> Option<i64> {
        (!self.unqueued && self.copy > newest_before).then_some(self.copy)
    }
}

/// A message that never became a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMessage {
    pub lane: ProviderName,
    pub job_id: Option<String>,
    pub reason: &'static str,
    pub detail: String,
    pub body_sha256: [u8; 32],
    pub body_bytes: usize,
}
