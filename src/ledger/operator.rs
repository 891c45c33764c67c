//! The ledger for operators: one payment's details, the lists, and the decisions on jobs.
//!
//! It sends nothing: a job to be sent again becomes `waiting`, and its message is published by the caller. Every
//! decision is compared with the job's state and fencing token, and audited. Payloads and request bodies are never
//! returned, only their size and digest.

use jiff::Timestamp;
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::LedgerError;
use crate::domain::job::{ContentHash, Job, JobId};
pub use crate::domain::job_filter::{JobFilter, STATES};

/// Most jobs in one list.
pub const LIST_MAX: u32 = 1_000;

/// An operator's decision on one payment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobResolution {
    /// `review` → `succeeded`: it was charged.
    Succeeded(Charge),
    /// `review` → `declined`: it was not charged; do not retry.
    Declined,
    /// `review` → `waiting`: confirmed not charged; charge again. Same key, same frozen request.
    Resend,
    /// `waiting` → `cancelled`: it is not sent. A worker that has the job loses its lease.
    Cancel,
    /// `dead` → `waiting`: try again.
    Replay,
    /// `dead` → `cancelled`: it is not tried again.
    Discard,
}

/// The charge of a payment that an operator resolves as succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// The provider's reference.
    pub reference: Option<String>,
    /// ISO 4217 minor units; `None`: the payment's amount.
    pub amount: Option<i64>,
}

impl JobResolution {
    /// The state in which a job must be for this decision.
    pub fn required_state(&self) -> &'static str {
        match self {
            Self::Succeeded(_) | Self::Declined | Self::Resend => "review",
            Self::Cancel => "waiting",
            Self::Replay | Self::Discard => "dead",
        }
    }

    /// The job's state afterwards.
    pub fn resulting_state(&self) -> &'static str {
        match self {
            Self::Succeeded(_) => "succeeded",
            Self::Declined => "declined",
            Self::Resend | Self::Replay => "waiting",
            Self::Cancel | Self::Discard => "cancelled",
        }
    }

    /// Whether the job's message must be published afterwards.
    pub fn needs_resend(&self) -> bool {
        self.resulting_state() == "waiting"
    }

    /// The action as a past participle, for the job's reason and for refusals.
    pub fn past_participle(&self) -> &'static str {
        match self {
            Self::Succeeded(_) | Self::Declined => "resolved",
            Self::Resend => "sent again",
            Self::Cancel => "cancelled",
            Self::Replay => "replayed",
            Self::Discard => "discarded",
        }
    }
}

/// The author of a decision or of a settings change, besides the database's own user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// `user@host` from the operating system; over the ops server `user@client`, as the client says.
    pub os_user: String,
    /// The program; `None`: the one that the database connection names.
    pub program: Option<&'static str>,
    /// The operator's reason; stored in the job's reason and its outcome event too.
    pub reason: Option<String>,
}

/// Why a decision was not applied.
#[derive(Debug, thiserror::Error)]
pub enum ResolutionError {
    #[error(transparent)]
    Refused(#[from] ResolutionRefusal),
    /// Whether it was applied is unknown.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// The reason why a decision was rejected. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolutionRefusal {
    #[error("the ledger has no such job")]
    NoSuchJob,
    #[error("the job is `{state}`; only a job that is `{wanted}` can be {done}")]
    WrongState { state: String, wanted: &'static str, done: &'static str },
    #[error("the job has an attempt in progress: try again when it has ended")]
    AttemptInProgress,
    #[error("`expires_at` has passed, so the job would expire at once: publish a new payment")]
    Expired,
    #[error(
        "the job's request was emptied (`ledger.scrub_after_days`, `ledger.scrub_review_after_days` or `jobs erase`): \
         publish a new payment"
    )]
    Scrubbed,
    #[error("its provider's reference belongs to payment {by}, which succeeded: one charge pays one payment")]
    ReferenceTaken { by: String },
    #[error("the job belongs to provider `{provider}`")]
    OtherProvider { provider: String },
    #[error("another payment of this provider has this id as its idempotency key")]
    KeyTaken,
    #[error("the job changed in the meantime: look at it again")]
    Changed,
}

impl ResolutionRefusal {
    /// The code, for reports about many payments.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSuchJob => "no_such_job",
            Self::WrongState { .. } => "wrong_state",
            Self::AttemptInProgress => "attempt_in_progress",
            Self::Expired => "expired",
            Self::Scrubbed => "request_emptied",
            Self::ReferenceTaken { .. } => "reference_taken",
            Self::OtherProvider { .. } => "other_provider",
            Self::KeyTaken => "key_taken",
            Self::Changed => "changed",
        }
    }
}

/// A page of a list, newest first, as `jobs list --json` and the API show it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct JobPage {
    pub jobs: Vec<JobSummary>,
    /// Payments of this page that are left out, because a field of their row holds an invalid value.
    pub unreadable: Vec<UnreadableRow>,
    /// The next page begins after this id; `null` on the last.
    pub next: Option<String>,
    /// The page is not full: the search ended at payments of this time, and the next page goes on from there.
    pub searched_back_to: Option<DatabaseTime>,
}

/// Number and sums of the payments that a filter matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct JobTotals {
    /// There are too many payments to count: these are the totals of the newest ones.
    pub at_least: bool,
    pub jobs: u64,
    /// By currency, in alphabetical order.
    pub currencies: Vec<CurrencyTotal>,
}

/// Number and sum of the payments in one currency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CurrencyTotal {
    pub currency: String,
    pub jobs: u64,
    /// Minor units.
    pub amount: i64,
}

/// Why a list cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JobSearchError {
    /// The page is to begin after a payment that does not exist.
    #[error("`after`: the ledger has no payment `{0}`: use `next` of the page before")]
    UnknownCursor(JobId),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct UnreadableRow {
    pub id: String,
    /// The field and what is wrong; never the value.
    pub problem: String,
}

impl UnreadableRow {
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

/// A job as lists show it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct JobSummary {
    pub id: String,
    pub provider: String,
    pub state: String,
    /// Minor units.
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// The object that it concerns, such as an invoice.
    pub reference: Option<String>,
    pub attempts: u32,
    pub wake_at: DatabaseTime,
    /// Why it waits, or why it ended, as a sentence. For a wait it is made of `wait_reason`, `wait_limit` and free text.
    pub reason: Option<String>,
    /// Code of the reason for which it waits; `null` for a job that waits for nothing named, or has ended.
    pub wait_reason: Option<String>,
    /// The limit that the code names.
    pub wait_limit: Option<String>,
    pub provider_reference: Option<String>,
    /// Minor units, where another sum than `amount` was charged.
    pub charged_amount: Option<i64>,
    pub created_at: DatabaseTime,
    pub updated_at: DatabaseTime,
}

/// Size and digest of bytes that are not shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Digest {
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// The frozen request of the first attempt, without its body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RequestSummary {
    pub method: String,
    /// The URL without the values of its parameters: `https://pay.example/charges?sig=…`.
    pub url: String,
    pub content_type: String,
    pub body: Digest,
}

/// All details of one payment.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct JobDetails {
    #[serde(flatten)]
    pub line: JobSummary,
    pub idempotency_key: String,
    pub cost: u32,
    pub priority: u32,
    pub not_before: Option<DatabaseTime>,
    pub expires_at: Option<DatabaseTime>,
    /// Some attempt's outcome is unknown, and no decision has cleared that.
    pub maybe_charged: bool,
    /// The worker that has the job.
    pub holder: Option<String>,
    /// Until when the response to the running request may come.
    pub response_by: Option<DatabaseTime>,
    pub first_sent_at: Option<DatabaseTime>,
    pub revived_at: Option<DatabaseTime>,
    pub payload: Option<Digest>,
    pub request: Option<RequestSummary>,
    /// The last time that the job was delayed; `null`: never.
    pub waited: Option<WaitDetails>,
    /// By number.
    #[serde(rename = "requests")]
    pub attempts: Vec<AttemptSummary>,
    /// Oldest first.
    pub events: Vec<EventSummary>,
    /// Oldest first.
    pub audit: Vec<AuditEntry>,
}

impl JobDetails {
    /// As a deployment shows it that has a broker, or has none: then no event is published.
    #[must_use]
    pub fn seen_with(mut self, has_broker: bool) -> Self {
        if !has_broker {
            self.events.iter_mut().for_each(|event| event.published = None);
        }
        self
    }
}

/// A delay: why and until when a payment waited without a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct WaitDetails {
    /// The reason of the wait as a sentence, for a payment that still waits.
    pub reason: String,
    /// The same in the past tense, for a payment that was sent since.
    pub past_reason: String,
    /// The code of the reason.
    pub wait_reason: String,
    /// The limit that the code names.
    pub wait_limit: Option<String>,
    /// Free text of the wait, such as the provider's error.
    pub wait_detail: Option<String>,
    /// When it was first delayed for this reason before this request.
    pub since: DatabaseTime,
    /// The `wake_at` of the last delay.
    pub until: DatabaseTime,
    /// The number of the request that it waited to send.
    pub request: u32,
}

/// One request that was sent, or may have been.
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
    /// Whether the broker has confirmed it; absent if there is no broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<bool>,
}

/// One change that no worker made.
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
    /// The amount that the operator gave, in minor units.
    pub charged_amount: Option<i64>,
    /// The state stays; account, references, payload, request and texts were erased.
    pub erased: bool,
    pub because: Option<String>,
}

/// Counts of an account's personal data in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ErasureCounts {
    /// More rows exist than were counted: the counts are lower bounds.
    pub at_least: bool,
    /// Finished payments whose outcome event is published: `erase` erases these.
    pub finished: u64,
    /// Payments that may still be sent.
    pub open: u64,
    pub review: u64,
    /// Finished payments whose outcome event is not published yet.
    pub unpublished: u64,
    /// Requests that keep account and reference, because a limit may count them.
    pub requests: u64,
    /// When the last of those requests stops counting.
    pub requests_until: Option<DatabaseTime>,
    /// Rows of `account_overrides` that name the account.
    pub rules: u64,
}

/// The result of one call to erase.
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
            // RFC 3339 cannot write this year.
            Err(_) => write!(f, "{} ms", self.0),
        }
    }
}

impl Serialize for DatabaseTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A job in the form of its message, to be published once more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReloadedJob {
    pub job: Job,
    pub hash: ContentHash,
    /// For `Database::resolve_job`: the decision applies to the job as it was read.
    pub fence: i64,
}

/// A past job's arrival, for rehearsals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastArrival {
    pub created_at: DatabaseTime,
    pub expires_at: Option<DatabaseTime>,
    pub account: Option<String>,
    pub cost: u32,
    pub priority: u32,
}
