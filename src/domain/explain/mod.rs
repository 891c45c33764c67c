//! Explanation of one job: the checks that it has passed, the one that blocks it, and its estimated start.
//!
//! Each sentence is based on one of the [`Facts`]: the job and everything that it may wait for, at one instant. This
//! module does not fetch them. `ops::explain` gathers them from the ledger, the settings, the limiter and the running
//! process. Each estimated start is put together in [`mod@outlook`], from the limiter's own state machine ([`forecast`]).
//! A backend that could not be asked is named as unknown. The operator's next step is named as the command to type.

use std::sync::Arc;
use std::time::Duration;

use self::forecast::{RecentUsage, current_usage};
use super::clear_time::ClearTime;
use super::disposition::Resend;
use super::format;
use super::provider::Provider;
use super::quota_spec::QuotaSpec;
use super::time::{EpochMs, Micros};
use super::wait_reason::{BlockReason, Wait, WaitReason};

mod by_state;
mod check;
pub mod forecast;
mod outlook;
#[cfg(test)]
mod tests;

pub use self::check::{BlockedAt, CHECKS, Explanation, JobCheck};
pub use self::outlook::{LimitWait, NextStart, NextStartInput};

/// Explains one job from its facts.
pub fn explain(facts: &Facts) -> Explanation {
    match (&facts.job, &facts.unrecorded) {
        (None, None) => unrecorded(facts),
        (None, Some(job)) => by_state::explain_waiting(facts, job),
        (Some(job), _) => match job.state.as_str() {
            "waiting" | "unknown" => by_state::explain_waiting(facts, job),
            "sending" => by_state::explain_in_flight(facts, job),
            _ => by_state::explain_finished(facts, job),
        },
    }
}

/// Explanation of an id that the ledger does not know.
fn unrecorded(facts: &Facts) -> Explanation {
    let id = &facts.id;
    let summary = match facts.rejected.first() {
        Some(rejected) => format!(
            "{id} on lane {} can never be a job ({}: {}), since {}; publish a corrected message",
            rejected.lane,
            rejected.reason,
            rejected.detail,
            facts.instant(rejected.at),
        ),
        None => format!("the ledger has no job {id}{}", where_message_may_be(facts)),
    };
    Explanation { state: "unrecorded".to_owned(), provider: None, summary, checks: Vec::new(), blocked_at: None }
}

/// The places where its message may be, as part of a sentence.
fn where_message_may_be(facts: &Facts) -> String {
    const LOST: &str =
        "it was never published, or its message was invalid and its id unreadable (`sluicegate rejected list`)";
    let lanes = match &facts.message_search {
        MessageSearch::NotAsked => {
            return format!(
                "; if it was published, its message waits in its lane's queue (`sluicegate status` shows how many do); \
                 otherwise {LOST}"
            );
        }
        MessageSearch::NoQueue => return ": it was never recorded".to_owned(),
        MessageSearch::MayHold(lanes) if lanes.is_empty() => {
            return format!(", and no lane's queue holds a message: {LOST}");
        }
        MessageSearch::MayHold(lanes) => lanes,
    };
    let lane = |lane: &LaneQueue| {
        let clears = clear_time_text(&lane.clears, facts.now);
        format!("{} ({}{clears})", lane.provider, format::count(lane.ready, "message"))
    };
    let lanes: Vec<String> = lanes.iter().map(lane).collect();
    format!("; if it was published, its message waits in the queue of {}; otherwise {LOST}", lanes.join(", or of "))
}

/// Clear time of a lane's backlog, as the end of a phrase about its messages; empty if it is not known.
fn clear_time_text(clears: &ClearTime, now: EpochMs) -> String {
    let then = |wait: Duration| format::clock(now.plus(wait), now);
    match clears {
        ClearTime::In(wait) => format!(", all sent by about {}", then(*wait)),
        ClearTime::DependsOnAccounts { at_least, .. } => format!(", all sent by {} at the earliest", then(*at_least)),
        ClearTime::Never { limit: Some(limit) } => format!(", nothing is sent: limit {limit} is 0"),
        ClearTime::Never { limit: None } => ", nothing is sent".to_owned(),
        ClearTime::NotWhileBlocked => ", all blocked by an account rule".to_owned(),
        ClearTime::NotWhileThrottled { .. } => ", the provider refuses requests with 429".to_owned(),
        ClearTime::NotWhilePaused => ", paused".to_owned(),
        ClearTime::NotWhileDisabled => ", disabled".to_owned(),
        ClearTime::NotWhileBreakerOpen => ", circuit breaker open".to_owned(),
        ClearTime::Unknown(_) => String::new(),
    }
}

/// Everything that is known about one id.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The ledger's clock.
    pub now: EpochMs,
    pub id: String,
    /// `None`: the ledger has no such job.
    pub job: Option<JobFacts>,
    /// What is known of it, if a worker holds its message and the ledger does not have the job yet.
    pub unrecorded: Option<JobFacts>,
    /// Queues that may hold its message, if both are `None`.
    pub message_search: MessageSearch,
    /// Messages with this id that can never be a job; newest first.
    pub rejected: Vec<Rejected>,
    pub row: RowFacts,
    pub lane: LaneFacts,
    pub claim: ClaimState,
    pub ahead: JobsAhead,
    /// Its place in the backlog of its lane, where no message brings it back; `None`: it is not there.
    pub backlog: Option<BacklogPlace>,
    /// Why the lane's queue does not answer.
    pub queue_problem: Option<String>,
    pub limiter: LimiterFacts,
}

/// Where the message of a job may be that the ledger does not have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum MessageSearch {
    #[default]
    NotAsked,
    /// There is no broker: a payment is in the ledger, or nowhere.
    NoQueue,
    /// A broker offers no search. These queues hold messages.
    MayHold(Vec<LaneQueue>),
}

/// One lane's queue.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneQueue {
    pub provider: String,
    /// Ready messages in the queue.
    pub ready: u64,
    /// Clear time of everything that waits for the provider.
    pub clears: ClearTime,
}

/// A job as recorded in the ledger.
#[derive(Clone, Debug, Default)]
pub struct JobFacts {
    pub provider: String,
    pub state: String,
    /// Why it waits or ended, as a sentence.
    pub reason: Option<String>,
    /// Why it waits, as data.
    pub wait_reason: Option<WaitReason>,
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
    /// Minor units of ISO 4217.
    pub amount: i64,
    /// `None`: the message cannot be read.
    pub currency: Option<String>,
    pub account: Option<String>,
    /// Attempts that count.
    pub attempts: u32,
    pub lookups: u32,
    pub resend: Resend,
    /// Workers lost in a row while they held its lease and had begun no request.
    pub lost_holders: u32,
    pub requests: Vec<SentRequest>,
    /// The last delay of the job.
    pub last_delay: Option<LastDelay>,
    /// Whether the event of its state is published; `None`: its state has none, it was deleted, or there is
    /// no broker.
    pub is_event_published: Option<bool>,
    /// The last change by an operator.
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

/// A delay before a request was sent; no worker held the job meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastDelay {
    pub reason: Wait,
    pub since: EpochMs,
    /// Number of the request that followed.
    pub request: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManualChange {
    pub operator: String,
    pub reason: Option<String>,
    /// It brought the job to its present state; then the job's reason quotes this one.
    pub is_decisive: bool,
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
    /// The validated row, or the last valid one; `None`: there is no row, or none was ever valid.
    pub provider: Option<Arc<Provider>>,
    /// Problems of the current row, if it is invalid.
    pub problems: Vec<String>,
    /// `None`: not fully known.
    pub spec: Option<Arc<QuotaSpec>>,
}

/// State of this process's lane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LaneFacts {
    /// No process was asked.
    #[default]
    NotAsked,
    /// The process that was asked has no lane for this provider.
    Absent,
    Running,
    /// Claims no more jobs; active jobs continue.
    ClaimsPaused {
        cause: Wait,
        ends_in: Duration,
    },
    /// Sends nothing.
    Paused {
        cause: Wait,
        ends_in: Duration,
    },
    /// Starts no charge until an operator releases it.
    Held {
        cause: Wait,
    },
    /// The circuit breaker is open: one job at a time is sent.
    Probing {
        cause: String,
    },
}

/// Which worker holds the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClaimState {
    #[default]
    Unclaimed,
    /// Held by a worker that was not asked.
    OtherWorker { worker: String },
    /// Held by the worker that was asked, in its leaky bucket.
    AwaitingEgress { worker: String, position: EgressPosition },
    /// Held by the worker that was asked, in the gate's wait queue or between two steps.
    AskedWorker { worker: String, position: Option<GatePosition> },
}

/// A job's position in the leaky bucket of its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressPosition {
    /// Jobs ahead in the bucket and in the gate's wait queue.
    pub before: u64,
    pub cost_before: u64,
    /// Time from now until it leaves the bucket.
    pub leaves_in: Duration,
}

/// A job's position in the gate's wait queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatePosition {
    pub before: u64,
    pub cost_before: u64,
    pub refused: Option<PermitRefusal>,
    /// A limit of its own account, reference or kind of call refused it.
    pub by_own_limit: bool,
}

/// Reason and wait of a gate that grants no permit, to all jobs or to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRefusal {
    pub reason: BlockReason,
    /// Measured from now.
    pub wait: Duration,
    /// Whether a permit starts exactly then.
    pub exact: bool,
}

/// Jobs that are served before this one, by the ledger and the lane's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct JobsAhead {
    /// Open jobs that are due earlier or more urgent, and messages in the lane's queue that the ledger does not have
    /// yet.
    pub jobs: u64,
    pub cost: u64,
    /// Active jobs of the quota that have no request in flight.
    pub active: u64,
    /// Ready messages in the lane's queue; `None`: the broker did not report them.
    pub ready: Option<u64>,
    /// Workers that send jobs of the quota.
    pub workers: u32,
}

/// The cost of some of these jobs, as if all of them had the same.
pub fn cost_of_part(part: u64, jobs: u64, cost: u64) -> u64 {
    let of_part = (u128::from(cost) * u128::from(part.min(jobs))).checked_div(jobs.into());
    of_part.and_then(|cost| u64::try_from(cost).ok()).unwrap_or(cost)
}

/// A job's place among the jobs of its flow: those of its account and its priority that wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BacklogPlace {
    /// `None`: its outcome is unknown.
    pub priority: Option<u8>,
    /// Jobs of its flow before it, those that a worker has claimed and not sent among them.
    pub before_in_flow: u64,
    /// Jobs of its flow, those and this one included.
    pub waiting_in_flow: u64,
    /// Jobs of its account in other flows that are expected to be sent before it: active ones, and more urgent ones.
    pub account_ahead: u64,
    /// Cost of both: of those before it in its flow, and of the other ones.
    pub account_cost_ahead: u64,
    /// The payment that its account waits for, if the lane keeps the order of accounts.
    pub account_holder: Option<AccountHolder>,
    pub block: Option<FlowBlock>,
    /// Recent usage of its account by the ledger; `None`: not known.
    pub account_usage: Option<RecentUsage>,
}

/// A payment that the next one of its account waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountHolder {
    pub id: String,
    pub state: String,
}

/// A block of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowBlock {
    pub wait: Wait,
    /// Time from now until it ends.
    pub left: Duration,
}

/// Reports of the limiter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimiterFacts {
    /// Reason why the limiter cannot be asked.
    pub unavailable: Option<String>,
    /// Usage and capacity of each limit. Empty if the limiter could not be asked.
    pub uses: Vec<LimitUtilisation>,
    /// Block of this process's gate, for all jobs.
    pub block: Option<PermitRefusal>,
    /// Recent usage of the quota by the ledger; `None`: not known.
    pub recent_usage: Option<RecentUsage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUtilisation {
    pub name: String,
    pub used: u64,
    pub capacity: u64,
}

impl Facts {
    /// Usage of a limit, as the limiter reports it, else by the ledger.
    pub fn used(&self, limit: &str) -> Option<u64> {
        let reported = self.limiter.uses.iter().find(|usage| usage.name == limit).map(|usage| usage.used);
        reported.or_else(|| {
            let (spec, past) = (self.row.spec.as_ref()?, self.limiter.recent_usage.as_ref()?);
            let uses = current_usage(spec, self.now_micros(), past);
            uses.into_iter().find(|(index, _)| spec.limit_name(*index) == limit).map(|(_, used)| used)
        })
    }

    /// The ledger's clock in the limiter's unit.
    pub fn now_micros(&self) -> Micros {
        Micros(u64::try_from(self.now.0).unwrap_or(0).saturating_mul(1_000))
    }

    /// Time from now to an instant; zero if it has passed.
    pub fn until(&self, at: EpochMs) -> Duration {
        Duration::from_millis(u64::try_from(at.0.saturating_sub(self.now.0)).unwrap_or(0))
    }

    /// Time from an instant to now; zero if it lies ahead.
    pub fn since(&self, at: EpochMs) -> Duration {
        Duration::from_millis(u64::try_from(self.now.0.saturating_sub(at.0)).unwrap_or(0))
    }

    /// Whether the job sleeps until its wake time. In the backlog, what blocks its flow counts instead.
    pub fn is_delayed(&self, job: &JobFacts) -> bool {
        self.claim == ClaimState::Unclaimed && self.backlog.is_none() && job.wake_at > self.now
    }

    /// `14:03:21 UTC (in 12.4 s)`.
    pub fn instant(&self, at: EpochMs) -> String {
        format::instant(at, self.now)
    }

    pub fn instant_in(&self, wait: Duration) -> String {
        self.instant(self.now.plus(wait))
    }
}
