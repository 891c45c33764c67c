//! What an explanation stands on: one job, and everything that it may wait for, as they are at one instant.
//!
//! Refuses to fetch: `ops::explain` gathers these from the ledger, the settings, the limiter and the running process.

use std::sync::Arc;
use std::time::Duration;

use super::forecast::RecentUsage;
use crate::domain::clear_time::ClearTime;
use crate::domain::disposition::Resend;
use crate::domain::provider::Provider;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::EpochMs;

/// Everything that is known of one id.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The ledger's clock.
    pub now: EpochMs,
    pub id: String,
    /// `None`: the ledger has no such job.
    pub job: Option<JobFacts>,
    /// What its message says, where the ledger does not know it yet and the message was found.
    pub unrecorded: Option<JobFacts>,
    /// Where its message may be, if neither has it.
    pub message_search: MessageSearch,
    /// Messages with this id that can never be a job; newest first.
    pub rejected: Vec<Rejected>,
    pub row: RowFacts,
    pub lane: LaneFacts,
    pub claim: ClaimState,
    pub ahead: JobsAhead,
    pub limiter: LimiterFacts,
}

/// The lanes' queues, for a message that cannot be asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MessageSearch {
    #[default]
    NotAsked,
    /// Looked through: it is in none.
    Searched,
    /// The broker lets nobody look for a message; these hold some.
    MayHold(Vec<LaneQueue>),
}

/// One lane's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneQueue {
    pub provider: String,
    /// Messages ready in it.
    pub ready: u64,
    /// When everything that waits for its provider is cleared.
    pub clears: ClearTime,
}

/// A job as the ledger has it.
#[derive(Clone, Debug, Default)]
pub struct JobFacts {
    pub provider: String,
    pub state: String,
    pub reason: Option<String>,
    pub reference: Option<String>,
    pub created_at: EpochMs,
    pub updated_at: EpochMs,
    pub wake_at: EpochMs,
    pub not_before: Option<EpochMs>,
    pub expires_at: Option<EpochMs>,
    pub revived_at: Option<EpochMs>,
    pub first_sent_at: Option<EpochMs>,
    pub unknown_since: Option<EpochMs>,
    pub cost: u32,
    pub account: Option<String>,
    /// Attempts that count.
    pub attempts: u32,
    pub lookups: u32,
    pub resend: Resend,
    /// Workers lost in a row while they held it, none of which began a request.
    pub lost_holders: u32,
    pub requests: Vec<SentRequest>,
    /// The last time that it was put down.
    pub last_delay: Option<LastDelay>,
    /// When the event of its state was published; the inner `None`: not yet.
    pub event: Option<Option<EpochMs>>,
    /// Who changed it by hand last.
    pub manual_change: Option<ManualChange>,
}

/// One request that was, or may have been, sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentRequest {
    pub number: u32,
    pub began_at: EpochMs,
    pub ended_at: Option<EpochMs>,
    pub outcome: Option<String>,
}

/// Put down until later, out of all hands, before a request was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastDelay {
    pub reason: String,
    pub since: EpochMs,
    /// Of the request.
    pub request: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManualChange {
    pub operator: String,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub at: EpochMs,
    pub lane: String,
    pub reason: String,
    pub detail: String,
}

/// The provider's row, and what its quota allows.
#[derive(Clone, Debug, Default)]
pub struct RowFacts {
    /// As meant, or the last that could be; `None`: there is no row, or no good one.
    pub provider: Option<Arc<Provider>>,
    /// Why the row that is there now cannot be meant.
    pub problems: Vec<String>,
    /// `None`: not known in full.
    pub spec: Option<Arc<QuotaSpec>>,
}

/// What this process's lane does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LaneFacts {
    /// No process was asked.
    #[default]
    NotAsked,
    /// The process that was asked has none for this provider.
    Absent,
    Running,
    /// Takes no more; what is in hand goes on.
    IntakePaused {
        cause: String,
        ends_in: Duration,
    },
    /// Sends nothing either.
    Paused {
        cause: String,
        ends_in: Duration,
    },
    /// The breaker was open: one job at a time is sent.
    Probing {
        cause: String,
    },
}

/// In whose hand the job is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClaimState {
    #[default]
    Unclaimed,
    /// Of a worker that was not asked.
    OtherWorker { worker: String },
    /// Of the worker that was asked, in its leaky bucket.
    AwaitingEgress { worker: String, position: EgressPosition },
    /// Of the worker that was asked, in its gate's line or between two steps.
    AskedWorker { worker: String, position: Option<GatePosition> },
}

/// Where a job waits for the steady outflow of its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressPosition {
    /// In the bucket, and in the gate's line behind it.
    pub before: u64,
    /// Until the outflow lets it go, from now.
    pub leaves_in: Duration,
}

/// Where a job stands in its gate's line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatePosition {
    pub before: u64,
    pub cost_before: u64,
    pub refused: Option<PermitRefusal>,
    /// By what counts its own account, reference or kind of call.
    pub by_own_limit: bool,
}

/// Why nobody passes a gate, or one job does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRefusal {
    pub reason: PermitRefusalReason,
    /// From now.
    pub wait: Duration,
    /// Whether a permit starts exactly then.
    pub exact: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PermitRefusalReason {
    Limit(String),
    Cold,
    NeedsHistory,
    /// The provider named a wait.
    Paused,
    StoreUnavailable(String),
    StaleSettings,
    Oversized,
    Blocked,
    Stopping,
}

/// Who is served before it, by the ledger and the lane's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct JobsAhead {
    /// Open jobs that are due earlier or more urgent, and messages in the lane's queue that the ledger does not know yet.
    pub jobs: u64,
    pub cost: u64,
    /// Open jobs of the quota that some worker has in hand and that have no request on the wire.
    pub active: u64,
    /// Messages ready in the lane's queue; `None`: the broker did not say.
    pub ready: Option<u64>,
    /// Workers that let jobs out, at least one.
    pub workers: u32,
}

/// What the limiter says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimiterFacts {
    /// Why it cannot be asked.
    pub unavailable: Option<String>,
    /// By limit: uses that count now, and how many may. Empty where nobody could be asked.
    pub uses: Vec<LimitUtilisation>,
    /// Why this process's gate stands for everybody.
    pub block: Option<PermitRefusal>,
    /// What the ledger knows of the quota's use; `None`: it cannot say.
    pub recent_usage: Option<RecentUsage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUtilisation {
    pub name: String,
    pub used: u64,
    pub capacity: u64,
}

impl Facts {
    /// What a limit has used: as the limiter says, else as the ledger does.
    #[must_use]
    pub fn used(&self, limit: &str) -> Option<u64> {
        let told = self.limiter.uses.iter().find(|it| it.name == limit).map(|it| it.used);
        told.or_else(|| {
            let (spec, past) = (self.row.spec.as_ref()?, self.limiter.recent_usage.as_ref()?);
            let uses = super::forecast::current_usage(spec, self.now_micros(), past);
            uses.into_iter().find(|(index, _)| spec.limit_name(*index) == limit).map(|(_, used)| used)
        })
    }

    /// The ledger's clock in the limiter's unit.
    #[must_use]
    pub fn now_micros(&self) -> crate::domain::time::Micros {
        crate::domain::time::Micros(u64::try_from(self.now.0).unwrap_or(0).saturating_mul(1_000))
    }

    /// From now to an instant; zero when it has passed.
    #[must_use]
    pub fn until(&self, at: EpochMs) -> Duration {
        Duration::from_millis(u64::try_from(at.0.saturating_sub(self.now.0)).unwrap_or(0))
    }

    /// From an instant to now; zero when it lies ahead.
    #[must_use]
    pub fn since(&self, at: EpochMs) -> Duration {
        Duration::from_millis(u64::try_from(self.now.0.saturating_sub(at.0)).unwrap_or(0))
    }
}
