//! The copies of one job's message: which copy counts, and whether a waiting job needs one more.
//!
//! A message in a queue cannot be removed. So each published copy has a number. The job's row stores the newest number,
//! and the number of the copy that a delay queue holds until a known instant. An older copy is acknowledged without
//! effect. While a delay queue holds a copy that returns in time, no further copy is published. See
//! `docs/decisions/0003-number-message-copies.md`.

use crate::domain::provider::ProviderName;

/// A message of a job, as delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveredCopy {
    pub copy: i64,
    /// A worker had the message before and may have died between a commit and its publish. So this copy counts, and the
    /// row's data on later copies is not trusted.
    pub redelivered: bool,
    /// The job is claimed without this message: it stays in the lane's queue, and is enough for the job to return.
    pub stays_queued: bool,
}

impl DeliveredCopy {
    /// A copy that counts, whatever its number.
    pub const ALWAYS_CURRENT: Self = Self::delivered(i64::MAX, false);

    pub const fn delivered(copy: i64, redelivered: bool) -> Self {
        Self { copy, redelivered, stays_queued: false }
    }

    /// The newest copy of a job that is claimed from the ledger and not from a delivery.
    pub const fn queued(copy: i64) -> Self {
        Self { copy, redelivered: false, stays_queued: true }
    }
}

/// A worker that claims a job, and the message for which it does so.
#[derive(Clone, Copy, Debug)]
pub struct Claimant<'a> {
    pub owner: &'a str,
    pub delivered: DeliveredCopy,
}

/// How a waiting job returns, as its row says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReturnPlan {
    /// The newest copy's number.
    pub copy: i64,
    /// The sweeper publishes the message when the job is due: the copy in a delay queue would return later than that.
    pub unqueued: bool,
}

impl ReturnPlan {
    /// The number of the copy to publish now; `None` when the job returns without one.
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
    /// How the body begins, without sensitive text.
    pub head: String,
    pub stored: StoredMessage,
}

/// A rejected message as the ledger keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredMessage {
    pub body: Vec<u8>,
    /// As a JSON object.
    pub properties: String,
    /// It is not what came: it held sensitive text, or was longer. It can only be discarded.
    pub is_masked: bool,
}
