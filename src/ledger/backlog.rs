//! The backlog of a lane: jobs that wait in the ledger alone, the run queue of their flows, and a job's neighbours.
//!
//! A flow is one account's jobs of one class on one lane. A job in the backlog is due and no worker has it.
//! `Database::claim_backlog` gives it to a worker: classes strictly in their order, flows of a
//! class by start-time fair queueing, first in first out within a flow. A blocked flow is skipped, and its jobs are not
//! read. See `docs/decisions/0040-flows-and-backlog.md`.
//!
//! The neighbours of one payment, in the backlog or not, are jobs ahead of it, active jobs, and rejected messages with
//! its id. They are counted when an operator asks. That takes no lock, and workers do not call it.

use std::time::Duration;

use super::Claimed;
use super::operator::DatabaseTime;
use crate::domain::disposition::Resend;
use crate::domain::explain::{AccountHolder, Rejected};
use crate::domain::fair_order::FairClaim;
use crate::domain::job::{ContentHash, FlowClass, Identifier, InvalidMessage, Job, JobId};
use crate::domain::names::named_enum;
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::{Wait, WaitReason};

named_enum! {
    /// Why a flow is blocked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum BlockedReason {
        /// A limit of the account has no free slot.
        Limit = "limit",
        /// A row of `account_overrides` blocks the account.
        AccountBlocked = "account_blocked",
        /// The provider refuses address, method or credential of the account's requests.
        Misconfigured = "misconfigured",
        /// It rejected several payments of the account in a row.
        RejectedStreak = "rejected_streak",
    }
    /// Stable code of column `blocked_reason`.
    pub fn code(self);
}

impl BlockedReason {
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.code() == code)
    }
}

/// A block of a flow from now on. If a flow has a block that ends later, that one stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowBlock {
    /// Time until it ends, at most [`FlowBlock::WAIT_MAX`].
    pub wait: Duration,
    pub reason: BlockedReason,
    /// The name of the limit, where one is meant.
    pub limit: Option<String>,
}

impl FlowBlock {
    /// Ten years: `Database::unblock_flows` ends the block before.
    pub const WAIT_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);
}

/// Result of recording a job into the backlog.
#[derive(Clone, Debug, PartialEq)]
pub enum BacklogRecord {
    /// New. It is in the backlog if its wait is zero. Otherwise it sleeps for as long.
    Recorded { wait: Duration },
    /// Recorded before.
    Known,
    /// The same id with other content, or an idempotency key that another payment of this provider uses.
    Conflict(InvalidMessage),
}

/// A job whose worker is lost, or has lost it, as one look found it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LostJob {
    pub id: JobId,
    pub fence: i64,
    /// Of its last request; 0 for none.
    pub number: u32,
    /// Time from the beginning of a request that may be in flight until its response comes, or never.
    pub wire_time: Option<Duration>,
    /// The worker that looks has it, as the ledger says.
    pub is_own: bool,
}

/// How a job returns to the backlog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BacklogReturn<'a> {
    /// `None`: it waits for those before it, and for nothing else.
    pub reason: Option<&'a Wait>,
    /// `Database::claim_backlog` claimed it, so its flow's tag moved on by its cost, and moves back.
    pub came_from_backlog: bool,
    /// Blocks the job's flow in the same commit.
    pub block: Option<FlowBlock>,
}

/// A dispatcher's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BacklogClaimRequest<'a> {
    pub lane: &'a ProviderName,
    /// The claiming process.
    pub holder: &'a str,
    pub bounds: &'a FairClaim<Identifier>,
}

/// A job that a dispatcher claimed.
#[derive(Clone, Debug, PartialEq)]
pub struct BacklogJob {
    pub job: Job,
    /// Content hash from when the job was recorded.
    pub hash: ContentHash,
    pub class: FlowClass,
    pub claimed: Claimed,
}

/// Result of a dispatcher's claim.
#[derive(Clone, Debug, PartialEq)]
pub enum BacklogClaim {
    Claimed {
        /// In the order in which they are to be sent.
        jobs: Vec<BacklogJob>,
        /// Time until the next block of the lane ends; `None` when no flow is blocked.
        next_wake: Option<Duration>,
    },
    /// Another process claims from this lane at this moment. Its claim takes a few milliseconds.
    Busy,
}

/// A block as the ledger has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedFlow {
    /// Time until it ends; zero when its instant has passed.
    pub left: Duration,
    pub reason: BlockedReason,
    pub limit: Option<String>,
}

impl BlockedFlow {
    /// What its jobs wait for.
    pub fn wait_reason(&self) -> WaitReason {
        match self.reason {
            BlockedReason::Limit => WaitReason::Limit(self.limit.clone().unwrap_or_default()),
            BlockedReason::AccountBlocked => WaitReason::AccountBlocked,
            BlockedReason::Misconfigured => WaitReason::Misconfigured,
            BlockedReason::RejectedStreak => WaitReason::RejectedStreak,
        }
    }

    /// The same with its text.
    pub fn wait(&self) -> Wait {
        match self.wait_reason() {
            reason @ WaitReason::Misconfigured => {
                Wait::with_detail(reason, "the provider refused address, method or credential of the account")
            }
            reason => reason.into(),
        }
    }
}

/// A flow with jobs in the backlog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowStatus {
    pub class: FlowClass,
    pub account: Option<Identifier>,
    /// Jobs in the backlog.
    pub waiting: u64,
    pub blocked: Option<BlockedFlow>,
}

impl FlowStatus {
    /// The block, unless its instant has passed.
    pub fn block(&self) -> Option<&BlockedFlow> {
        self.blocked.as_ref().filter(|blocked| !blocked.left.is_zero())
    }
}

/// A flow with its part of the lane, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowReport {
    pub status: FlowStatus,
    /// When its block ends, or ended.
    pub blocked_until: Option<DatabaseTime>,
    pub weight: u32,
    /// Sum of the weights of the flows of its class that have jobs and are not blocked.
    pub class_weight: u64,
}

impl FlowReport {
    /// Its share of what the lane sends of its class, by the weights; `None` while it is blocked.
    #[allow(clippy::cast_precision_loss, reason = "a share for people")]
    pub fn share(&self) -> Option<f64> {
        let shares = self.status.block().is_none() && self.class_weight >= u64::from(self.weight);
        shares.then(|| f64::from(self.weight) / self.class_weight as f64)
    }
}

/// The largest flows of a lane, with the sums over all of them, at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFlows {
    /// Those with most jobs first.
    pub largest: Vec<FlowReport>,
    /// Flows with jobs, those that are left out too.
    pub flows: u64,
    /// Their jobs.
    pub waiting: u64,
}

/// What a repair changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepairedFlows {
    /// Rows that were missing though jobs of the flow wait.
    pub recreated: u32,
    /// Rows whose count of waiting jobs was wrong.
    pub corrected: u32,
}

/// The neighbours and the progress of a job, at one instant of the ledger's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerQueuePosition {
    pub now: DatabaseTime,
    /// Messages with this id that can never be a job; newest first, at most five.
    pub rejected: Vec<Rejected>,
    pub progress: JobProgress,
    /// Its place in the backlog of its lane, where no message brings it back; `None`: it is not there.
    pub backlog: Option<BacklogPosition>,
    /// Open jobs of the quota that are due earlier, or more urgent, and have no request in flight; jobs of the backlog are
    /// left out. For a job of the backlog: the jobs that are expected to be claimed before it, and the active ones.
    pub jobs_ahead: u64,
    /// The sum of their costs. For a job of the backlog, those of other flows count as in [`BacklogPosition`].
    pub cost_ahead: u64,
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
    /// Jobs of its flow that are claimed already and have no request in flight: they wait, too, and before it.
    pub active_of_flow: u64,
    /// Jobs of its account in other flows that are expected to be sent before it: active ones of the quota without a
    /// request in flight, and those of more urgent flows.
    pub others_of_account: u64,
    /// Cost of all three. Jobs of other flows count with the mean cost of the last requests or, without any, of its own
    /// flow.
    pub account_cost_ahead: u64,
    /// The payment that its account waits for, if the lane keeps the order of accounts.
    pub account_holder: Option<AccountHolder>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_codes() {
        for reason in BlockedReason::ALL {
            assert_eq!(BlockedReason::from_code(reason.code()), Some(reason));
        }
        assert_eq!(BlockedReason::from_code("weather"), None);
    }
}
