//! The ledger: the state of every payment, its lease, and the limiter's leader rows, as [`database::Database`] has them.
//!
//! The ledger stores decisions and makes none: `domain::disposition` decides. Times are the database's own. Every write
//! on an active job names its [`LeaseToken`]. A write with a stale token changes nothing and returns
//! [`FencedWrite::Stale`]. See `docs/decisions/0001-ledger-is-the-source-of-truth.md`.

use std::time::Duration;

use crate::domain::backend_fault::BackendFault;
use crate::domain::disposition::Resend;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::outcome::{FinalState, PartialCharge};
use crate::domain::permit_protocol::CostByKind;
use crate::domain::wait_reason::Wait;
use crate::provider::FrozenRequest;

pub mod backlog;
pub mod committed_writes;
pub mod database;
pub mod decision_batches;
pub mod decision_input;
pub mod events;
pub mod fleet;
pub mod held;
pub mod history;
pub mod job_filter_input;
pub mod lane_holds;
mod migrations;
pub mod operator;
pub mod pause_of_all;
pub mod provider_row;
pub mod record_notices;
pub mod rejected;
pub mod settings;
mod sql;
pub mod throttled;
pub mod upkeep;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The database cannot be reached, or did not answer in time. It is unknown whether a write happened.
    #[error("database unavailable: {0}")]
    Unavailable(String),
    /// The database answers, and commits nothing. It is unknown whether a write happened.
    #[error(transparent)]
    CannotWrite(#[from] BackendFault),
    #[error("schema missing or outdated: run `sluicegate migrate`")]
    NotMigrated,
    /// A statement or a setting failed for a reason that a retry does not fix.
    #[error("database error: {0}")]
    StatementFailed(String),
    /// A row holds an invalid value.
    #[error("unreadable row: {0}")]
    Corrupt(String),
}

impl LedgerError {
    /// The cause is the database as a whole, and not this statement or its user's rights.
    pub fn is_outage(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::CannotWrite(_))
    }

    /// The database is unavailable, and the same operation may succeed later.
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::CannotWrite(fault) => *fault != BackendFault::FileReadOnly,
            _ => false,
        }
    }
}

/// The right to write on one job. A claim grants it; it is void once the row's fencing token is higher.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub id: JobId,
    pub fence: i64,
}

/// Whether a write under a lease was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum FencedWrite {
    Applied,
    /// Another process holds the lease: stop, send nothing, do not acknowledge.
    Stale,
}

/// A claimed job with its history.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    pub lease: LeaseToken,
    pub attempts: u32,
    /// Consecutive workers that were lost before they began a request, the last one included.
    pub lost_holders: u32,
    /// An earlier attempt may have charged (state was `sending` or `unknown`).
    pub maybe_charged: bool,
    /// Time since the job could first be processed: since it was recorded, its `not_before`, or its last replay.
    pub age: Duration,
    /// Time until `expires_at`, by the database's clock; zero when it has passed.
    pub expires_in: Option<Duration>,
    /// Number of the last request that was begun, charge or look-up; 0 for none.
    pub last_attempt: u32,
    /// Look-ups begun so far.
    pub lookups: u32,
    pub resend: Resend,
    /// Time since the last charge began that has an unknown outcome, or that was in flight when its worker was lost.
    pub unknown_age: Option<Duration>,
    /// The frozen request of the first attempt, and the time since the first request began that may have been sent.
    /// That time is zero when every request so far certainly stayed unsent.
    pub frozen_request: Option<(FrozenRequest, Duration)>,
}

impl Claimed {
    /// A job that has just been recorded, and is due.
    pub fn new_job(lease: LeaseToken) -> Self {
        Self {
            lease,
            attempts: 0,
            lost_holders: 0,
            maybe_charged: false,
            age: Duration::ZERO,
            expires_in: None,
            last_attempt: 0,
            lookups: 0,
            resend: Resend::Never,
            unknown_age: None,
            frozen_request: None,
        }
    }
}

/// The times of a request that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTiming {
    /// Its response comes within this time, or never: until then the job stays with its worker, also if that is lost.
    pub response_within: Duration,
    /// How long the write may wait for others to be committed with.
    pub max_batch_delay: Duration,
}

impl RequestTiming {
    /// A write that waits for no others.
    pub fn immediate(response_within: Duration) -> Self {
        Self { response_within, max_batch_delay: Duration::ZERO }
    }
}

/// A job that is not recorded yet, with the request of its first attempt.
#[derive(Clone, Copy, Debug)]
pub struct NewJobAttempt<'a> {
    pub job: &'a Job,
    pub hash: ContentHash,
    /// The caller's fencing token, random: no other lease of this job has it.
    pub lease: &'a LeaseToken,
    pub holder: &'a str,
    pub timing: RequestTiming,
    pub request: &'a FrozenRequest,
}

/// Result of beginning an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum BeginResult {
    /// Committed; a charge is `sending` now. Charges and look-ups are numbered together, from 1 per job.
    Attempt(u32),
    Stale,
}

/// The result of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptEnd {
    pub number: u32,
    /// Stable code for the `outcome` column: accepted, declined, throttled, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    pub counts: bool,
}

/// The result of one look-up. It does not count as an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupEnd {
    pub number: u32,
    /// Stable code for the `outcome` column: accepted, not_found, unknown, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    /// The frozen request may be sent once more.
    pub grants_resend: bool,
}

/// The state of a job after a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Due again after the wait; the lease is released.
    Waiting {
        wait: Duration,
        reason: Wait,
    },
    /// Like `Waiting`, with an unknown outcome.
    Unknown {
        wait: Duration,
        reason: Wait,
    },
    Final {
        state: FinalState,
        reason: String,
        reference: Option<String>,
    },
    /// Succeeded with a smaller sum.
    SucceededInPart(PartialCharge),
}

impl JobState {
    /// How long the job waits; `None` when it is final.
    pub fn wait(&self) -> Option<Duration> {
        match self {
            Self::Waiting { wait, .. } | Self::Unknown { wait, .. } => Some(*wait),
            Self::Final { .. } | Self::SucceededInPart(_) => None,
        }
    }
}

/// Number of jobs of one provider in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCount {
    pub provider: String,
    pub state: String,
    pub jobs: i64,
}

/// Requests that may still count at a quota's provider, by the database's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUses {
    /// Time since the end of each ended request, with its cost; youngest first. Requests that ended close together are
    /// one entry with the age of the youngest: an age is never more than the true one.
    pub ended: Vec<(Duration, CostByKind)>,
    /// Cost of requests that may be in flight now: no end is recorded, or no response arrived and the provider may
    /// count late.
    pub open: CostByKind,
}
