//! The face of the ledger for people: what became of one payment, what waits for a decision, and the decision.
//!
//! Refuses to decide for them and to send: a job that shall be sent again becomes `waiting`, and `worker::send_again`
//! publishes its message. Every verdict is compared with the job's state and fence, and audited; nothing here returns a
//! payload or the body of a request, only their size and digest.

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use super::queue_position::LedgerQueuePosition;
use super::{LedgerError, RecentUses, StateCount};
use crate::domain::job::{ContentHash, Identifier, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::Lookback;

/// Every state of the ledger, in the order of a job's way.
pub const STATES: [&str; 9] =
    ["waiting", "sending", "unknown", "review", "dead", "succeeded", "declined", "expired", "cancelled"];

/// Most jobs that one list returns.
pub const LIST_MAX: u32 = 1_000;

/// What a person says about one payment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobResolution {
    /// `review` → `succeeded`: it was charged, under this reference of the provider.
    Succeeded { reference: Option<String> },
    /// `review` → `declined`: it was not charged, and shall not be.
    Declined,
    /// `review` → `waiting`: it was surely not charged, and shall be. Same key, same frozen request.
    Resend,
    /// `waiting` → `cancelled`: it shall not be sent. A worker that has it in hand loses it.
    Cancel,
    /// `dead` → `waiting`: try again.
    Replay,
    /// `dead` → `cancelled`: it shall not be tried again.
    Discard,
}

impl JobResolution {
    /// The one state that it can be passed on.
    #[must_use]
    pub fn required_state(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } | Self::Declined | Self::Resend => "review",
            Self::Cancel => "waiting",
            Self::Replay | Self::Discard => "dead",
        }
    }

    /// What the job becomes.
    #[must_use]
    pub fn resulting_state(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Declined => "declined",
            Self::Resend | Self::Replay => "waiting",
            Self::Cancel | Self::Discard => "cancelled",
        }
    }

    /// Whether its message must be published afterwards.
    #[must_use]
    pub fn needs_resend(&self) -> bool {
        self.resulting_state() == "waiting"
    }

    /// What was done, for the job's reason and for refusals.
    #[must_use]
    pub fn past_participle(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } | Self::Declined => "settled",
            Self::Resend => "sent again",
            Self::Cancel => "cancelled",
            Self::Replay => "replayed",
            Self::Discard => "discarded",
        }
    }
}

/// Who passes a verdict or changes a setting, beside the database's own user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// `user@host`, as the operating system says; over the ops server `user@client`, as the client says.
    pub os_user: String,
    /// What it was done with; `None`: what the connection to the database says.
    pub program: Option<&'static str>,
    /// Why, in the person's words; also in the job's reason and its outcome event.
    pub reason: Option<String>,
}

/// Why a verdict was not passed. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolutionRefusal {
    #[error("the ledger has no such job")]
    NoSuchJob,
    #[error("it is `{state}`; only a job that is `{wanted}` can be {done}")]
    WrongState { state: String, wanted: &'static str, done: &'static str },
    #[error("an attempt of it has no end yet")]
    AttemptInProgress,
    #[error("its `expires_at` has passed: it would expire at once; publish a new payment")]
    Expired,
    #[error(
        "its request was emptied (`ledger.scrub_after_days`, `ledger.scrub_review_after_days` or `jobs erase`); publish a \
         new payment"
    )]
    Scrubbed,
    #[error("its provider's reference is that of payment {by}, which succeeded: one charge pays one payment")]
    ReferenceTaken { by: String },
    #[error("it is a payment of provider `{provider}`")]
    OtherProvider { provider: String },
    #[error("another payment of this provider has this id as its idempotency key")]
    KeyTaken,
    #[error("it changed in the meantime; look again")]
    Changed,
}

/// Which jobs to list; all that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFilter {
    /// One of [`STATES`].
    pub state: Option<&'static str>,
    pub provider: Option<ProviderName>,
    pub account: Option<Identifier>,
    pub id: Option<JobId>,
}

impl JobFilter {
    /// Whether all that is given, the id apart, holds for this job.
    #[must_use]
    pub fn matches(&self, job: &JobSummary) -> bool {
        self.state.is_none_or(|state| state == job.state)
            && self.provider.as_ref().is_none_or(|provider| provider.as_str() == job.provider)
            && self.account.as_ref().is_none_or(|account| Some(account.as_str()) == job.account.as_deref())
    }
}

/// A page of a list, as `jobs list --json` and the API show it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct JobPage {
    pub jobs: Vec<JobSummary>,
    /// Payments of this page that are left out, because a field of their row holds what it never should.
    pub unreadable: Vec<UnreadableRow>,
    /// The next page begins behind this id; `null` on the last.
    pub next: Option<String>,
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct UnreadableRow {
    pub id: String,
    /// Which field, and why; never what it holds.
    pub problem: String,
}

impl UnreadableRow {
    #[must_use]
    pub fn new(id: String, error: &LedgerError) -> Self {
        let problem = match error {
            LedgerError::Corrupt(problem) => problem.clone(),
            other => other.to_string(),
        };
        Self { id, problem }
    }
}

impl std::fmt::Display for UnreadableRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the row of payment {} cannot be read: {}; repair it by SQL", self.id, self.problem)
    }
}

/// A job as a list shows it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct JobSummary {
    pub id: String,
    pub provider: String,
    pub state: String,
    /// Minor units.
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    pub attempts: u32,
    pub wake_at: DatabaseTime,
    pub reason: Option<String>,
    pub provider_reference: Option<String>,
    pub created_at: DatabaseTime,
    pub updated_at: DatabaseTime,
}

/// Bytes that are not shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Digest {
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// What the first attempt froze, without its body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RequestSummary {
    pub method: String,
    /// Without the values of its parameters: `https://pay.example/charges?sig=…`.
    pub url: String,
    pub content_type: String,
    pub body: Digest,
}

/// One payment's whole story.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct JobDetails {
    #[serde(flatten)]
    pub line: JobSummary,
    pub idempotency_key: String,
    pub reference: Option<String>,
    pub cost: u32,
    pub priority: u32,
    pub not_before: Option<DatabaseTime>,
    pub expires_at: Option<DatabaseTime>,
    /// Some attempt's outcome is unknown, and nobody has taken that back.
    pub maybe_charged: bool,
    /// The worker that has it in hand, and until when unless it renews.
    pub lease_owner: Option<String>,
    pub lease_until: Option<DatabaseTime>,
    pub first_sent_at: Option<DatabaseTime>,
    pub revived_at: Option<DatabaseTime>,
    pub payload: Option<Digest>,
    pub request: Option<RequestSummary>,
    /// The last time that it was put down; `null`: it never was.
    pub waited: Option<WaitDetails>,
    /// By number.
    #[serde(rename = "requests")]
    pub attempts: Vec<AttemptSummary>,
    /// Oldest first.
    pub events: Vec<EventSummary>,
    /// Oldest first.
    pub audit: Vec<AuditEntry>,
}

/// For what a payment was put down, out of all hands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct WaitDetails {
    /// As its `reason` was meanwhile.
    pub reason: String,
    /// When it was put down for this first, before this request.
    pub since: DatabaseTime,
    /// Until when it was put down last.
    pub until: DatabaseTime,
    /// The number of the request that it waited to send.
    pub request: u32,
}

/// One request that was, or may have been, sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AttemptSummary {
    pub number: u32,
    pub began_at: DatabaseTime,
    pub ended_at: Option<DatabaseTime>,
    pub outcome: Option<String>,
    pub status: Option<i64>,
    pub detail: Option<String>,
    pub counted: Option<bool>,
}

/// One event on `payments.outcomes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct EventSummary {
    pub state: String,
    pub at: DatabaseTime,
    pub published_at: Option<DatabaseTime>,
}

/// One change by somebody who is no worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AuditEntry {
    pub at: DatabaseTime,
    /// The database's user.
    pub who: String,
    pub os_user: Option<String>,
    pub program: Option<String>,
    pub old_state: String,
    pub new_state: Option<String>,
    pub cleared_maybe_charged: bool,
    /// The state stays; account, references, payload, request and texts were erased.
    pub erased: bool,
    pub because: Option<String>,
}

/// What an account has in the ledger that says whose payments they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ErasureCounts {
    /// There are more than were counted: these are lower bounds.
    pub at_least: bool,
    /// Payments that have ended, and whose outcome was told: erasing takes these.
    pub ended: u64,
    /// Payments that may still be sent.
    pub open: u64,
    pub review: u64,
    /// Payments that have ended, and whose outcome event is not published yet.
    pub untold: u64,
    /// Requests that keep account and reference, because a limit may count them.
    pub requests: u64,
    /// Until the last of those counts no more.
    pub requests_until: Option<DatabaseTime>,
    /// Rows of `account_overrides` that name it.
    pub rules: u64,
}

/// What one call has erased.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErasureResult {
    pub jobs: u64,
    /// Requests that lost account and reference.
    pub requests: u64,
}

/// Milliseconds since the Unix epoch by the database's clock; written as RFC 3339.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, format = DateTime)]
pub struct DatabaseTime(pub i64);

impl std::fmt::Display for DatabaseTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Timestamp::from_millisecond(self.0) {
            Ok(at) => write!(f, "{at:.3}"),
            // A year that RFC 3339 cannot write.
            Err(_) => write!(f, "{} ms", self.0),
        }
    }
}

impl Serialize for DatabaseTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A job as its message said it, to be published once more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReloadedJob {
    pub job: Job,
    pub hash: ContentHash,
    /// For [`Operator::decide`]: what was seen is what is decided on.
    pub fence: i64,
    /// Number of the newest copy of its message.
    pub copy: i64,
}

/// A job as it came, for rehearsals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastArrival {
    pub created_at: DatabaseTime,
    pub expires_at: Option<DatabaseTime>,
    pub account: Option<String>,
    pub cost: u32,
    pub priority: u32,
}

#[async_trait]
pub trait Operator: Send + Sync {
    /// `None`: the ledger has no such job.
    async fn show(&self, id: &JobId) -> Result<Option<JobDetails>, LedgerError>;

    /// What stands around a job, whether the ledger has it or not. `sharing`: the providers of its quota.
    async fn queue_position(&self, id: &JobId, sharing: &[ProviderName]) -> Result<LedgerQueuePosition, LedgerError>;

    /// As [`super::Ledger::recent_uses`].
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError>;

    /// Jobs by id, beginning behind `after`; at most `at_most`, and never more than [`LIST_MAX`]. Those of a provider, when
    /// nothing else is given, by idempotency key.
    async fn list(&self, filter: &JobFilter, after: Option<&JobId>, at_most: u32) -> Result<JobPage, LedgerError>;

    /// Jobs of a provider that the ledger first saw from `from` until before `to`, in any order; at most `at_most` of them.
    async fn arrivals(
        &self,
        provider: &ProviderName,
        from: DatabaseTime,
        to: DatabaseTime,
        at_most: usize,
    ) -> Result<Vec<PastArrival>, LedgerError>;

    /// Jobs of a state, by provider, without reading the others.
    async fn job_counts(&self, state: &str) -> Result<Vec<StateCount>, LedgerError>;

    /// What is needed to send a job again, if this verdict could be passed on it now.
    async fn reload(
        &self,
        id: &JobId,
        verdict: &JobResolution,
    ) -> Result<Result<ReloadedJob, ResolutionRefusal>, LedgerError>;

    /// Passes a verdict: the job in its new state, its audit row and, if the state is final, its outcome event, all or
    /// nothing. `seen_fence` demands that nobody took the job since it was recalled.
    async fn resolve(
        &self,
        id: &JobId,
        verdict: &JobResolution,
        seen_fence: Option<i64>,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError>;

    /// What an account has in the ledger.
    async fn erasure_counts(&self, account: &Identifier) -> Result<ErasureCounts, LedgerError>;

    /// Erases account, references, payload, request and texts of at most so many of its payments that have ended. Each is
    /// audited. Id, idempotency key, hash and amount stay.
    async fn erase(&self, account: &Identifier, at_most: u32, by: &Actor) -> Result<ErasureResult, LedgerError>;

    /// Cancels a payment of this provider, whether its message has come or not. For one that has not, a row is kept that
    /// every message with this id is compared with, whatever it says: it is acknowledged, and nothing is sent.
    async fn precancel(
        &self,
        id: &JobId,
        provider: &ProviderName,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError>;
}
