//! Lane holds, and the payments of which the database has lost a commit.
//!
//! See `docs/decisions/0054-the-database-went-back.md`.

use std::collections::BTreeMap;
use std::fmt;

use super::Claimed;
use super::operator::DatabaseTime;
use crate::domain::commit_memory::HoldCause;
use crate::domain::job::Job;
use crate::domain::provider::ProviderName;

/// The hold of a lane: it starts no charge until an operator releases it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneHold {
    pub provider: ProviderName,
    pub cause: HoldCause,
    pub since: DatabaseTime,
    /// What was found, in words.
    pub evidence: String,
}

impl fmt::Display for LaneHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cause, since, evidence, .. } = self;
        write!(f, "{} since {since}: {evidence}", cause.name())
    }
}

/// All holds, read with the heartbeat row of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldsAndHeartbeat {
    pub holds: BTreeMap<ProviderName, LaneHold>,
    /// When the worker's report was last written; `None`: there is no row.
    pub reported_at: Option<DatabaseTime>,
}

/// A payment that was claimed to be repaired.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimedForRepair {
    pub job: Job,
    pub claimed: Claimed,
}
