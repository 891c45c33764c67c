//! A validated payment provider: how to call it, how fast, and what its responses mean.
//!
//! The row as an operator wrote it is in `ledger::provider_row`; only its validated form gets here. A provider without
//! an enabled limit cannot be built.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::backoff::BackoffPolicy;
use super::disposition::{LookupPolicy, RetryPolicy};
use super::echo::Echo;
use super::job::{Identifier, JobField};
use super::limit::{AccountRule, AppliesTo, Limit, Rule, Scope};
use super::lookup::{LookupConfig, WhenNotFound};

/// Longest time that a permit may be booked ahead of its start.
pub const BOOKING_HORIZON: Duration = Duration::from_millis(250);
/// Longest total time of one request that a row may set.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);
/// Longest send budget that a row may set: the time after its start at which a permit may still be used.
pub const SEND_BUDGET_MAX: Duration = Duration::from_secs(60);

/// Names that no provider can have, because our own queues have them.
pub const RESERVED_NAMES: [&str; 3] = ["invalid", "dead", "outcomes"];

/// `[a-z0-9][a-z0-9_-]{0,62}`: safe as a routing key, in a Redis key and as a metric label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProviderName(String);

impl ProviderName {
    pub fn new(text: impl Into<String>) -> Result<Self, String> {
        let text = text.into();
        let body = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-');
        let head = text.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if head && body && text.len() <= 63 {
            return Ok(Self(text));
        }
        Err(format!("`{text}` is not a name: use 1 to 63 of a-z 0-9 _ -, beginning with a letter or digit"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Lets maps by name be searched with any text.
impl Borrow<str> for ProviderName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ProviderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Handling of a job that is refused a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The worker keeps the job for the wait, up to `max_wait` from delivery.
    Blocking,
    /// The job is delayed in the broker for the wait.
    Requeue,
}

/// Jobs of a lane that are sent one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobOrder {
    /// None: each is sent as soon as limits and priorities let it.
    None,
    /// Those of one account, in the order in which they were recorded. The next one is sent when the one before is
    /// decided.
    Account,
}

/// Start of the window of a used slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRelease {
    /// With the response: proven for any latency.
    Response,
    /// With the start, plus an allowance for the variation of the transit time.
    Grant { transit_jitter: Duration },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pacing {
    Burst,
    Even,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreDown {
    Wait,
    Share { workers: u32 },
}

/// Shape of a request; `None` means the default of the contract.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestShape {
    pub method: Option<String>,
    pub key_header: Option<String>,
    pub form_encoded: bool,
    /// JSON text with placeholders like `${id}`; `None` is the default body.
    pub template: Option<String>,
    /// JSON pointer to the provider's reference in an accepted response; default `/id`.
    pub reference_pointer: Option<String>,
    /// `None`: only `Retry-After` names a wait.
    pub wait: Option<WaitField>,
    pub echo: Echo,
}

/// Place where a response without `Retry-After` names its wait: a throttled one, or, in its body, a busy one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitField {
    pub location: ResponseLocation,
    pub unit: WaitUnit,
}

/// Place of a value in a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseLocation {
    /// Compared without regard to case.
    Header(String),
    /// JSON pointer into the body. <https://www.rfc-editor.org/rfc/rfc6901>
    Body(String),
}

impl ResponseLocation {
    /// Whether this is `Retry-After` itself, which then has another unit than the standard's.
    pub fn is_retry_after(&self) -> bool {
        matches!(self, Self::Header(name) if name.eq_ignore_ascii_case("retry-after"))
    }
}

/// Unit of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitUnit {
    Seconds,
    Milliseconds,
    /// End of the wait, in seconds since 1970.
    EpochSeconds,
    /// End of the wait, in milliseconds since 1970.
    EpochMilliseconds,
}

impl WaitUnit {
    pub const ALL: [Self; 4] = [Self::Seconds, Self::Milliseconds, Self::EpochSeconds, Self::EpochMilliseconds];

    /// The name in the `request` column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
            Self::EpochSeconds => "epoch_s",
            Self::EpochMilliseconds => "epoch_ms",
        }
    }
}

/// Meaning that an operator gives an HTTP status, in place of the default table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusMeaning {
    Accepted,
    Declined,
    Misconfigured,
    Unknown,
    InProgress,
    Throttled,
    /// The provider locks or limits one object, and did nothing: only this payment waits.
    Busy,
    Unavailable,
    Review,
}

impl StatusMeaning {
    pub const ALL: [Self; 9] = [
        Self::Accepted,
        Self::Declined,
        Self::Misconfigured,
        Self::Unknown,
        Self::InProgress,
        Self::Throttled,
        Self::Busy,
        Self::Unavailable,
        Self::Review,
    ];

    /// The name in the `statuses` column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Declined => "declined",
            Self::Misconfigured => "misconfigured",
            Self::Unknown => "unknown",
            Self::InProgress => "in_progress",
            Self::Throttled => "throttled",
            Self::Busy => "busy",
            Self::Unavailable => "unavailable",
            Self::Review => "review",
        }
    }
}

/// One case of a status. It applies if all its conditions hold; the first case of a list that applies counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusCase {
    pub header: Option<HeaderCondition>,
    pub code: Option<CodeCondition>,
    pub means: StatusMeaning,
}

impl StatusCase {
    /// A case without conditions.
    pub fn always(means: StatusMeaning) -> Self {
        Self { header: None, code: None, means }
    }
}

/// The response has this header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderCondition {
    /// Compared without regard to case.
    pub name: String,
    /// The whole value, without regard to case; `None`: any value.
    pub value: Option<String>,
}

/// The response body is JSON and holds this code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeCondition {
    /// Text, or the digits of a number.
    pub code: String,
    /// JSON pointer to the code or to a list that holds it; `None`: the usual places of codes.
    pub pointer: Option<String>,
}

/// One provider with its limits: everything that a lane needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Provider {
    pub name: ProviderName,
    /// Rows of one quota share its provider-scoped limits.
    pub quota: ProviderName,
    pub enabled: bool,
    pub paused: bool,
    pub url: String,
    pub mode: Mode,
    pub slot_release: SlotRelease,
    pub pacing: Pacing,
    /// Percentage kept back for other users of the same provider account, 0–99.
    pub reserve_percent: u8,
    pub store_down: StoreDown,
    /// Longest total time of one request.
    pub timeout: Duration,
    /// Time after its start at which a permit may still be used.
    pub send_budget: Duration,
    /// Longest time that a connection takes new requests. The next connection resolves the host again.
    pub connection_max_age: Duration,
    /// `None`: the default of [`Self::reuses_connections`].
    pub reuse_connections: Option<bool>,
    pub workers: u32,
    pub bucket_capacity: u32,
    /// Egress rate of one process, in jobs per second. `None`: the default of [`Self::egress_per_second`].
    pub leak_per_second: Option<f64>,
    /// Longest wait in the worker, counted from delivery.
    pub max_wait: Duration,
    pub max_attempts: u32,
    pub max_age: Duration,
    pub backoff: BackoffPolicy,
    /// `None`: the provider does not deduplicate.
    pub idempotency_retention: Option<Duration>,
    /// Values may hold `${env:NAME}`, `${file:PATH}`, `${job:account}`.
    pub headers: BTreeMap<String, String>,
    pub request: RequestShape,
    /// Cases per status, in place of the default table; if no case applies, the default holds.
    pub statuses: BTreeMap<u16, Vec<StatusCase>>,
    /// Look-up of an outcome at the provider; `None`: it has none.
    pub lookup: Option<LookupConfig>,
    /// Fields that a message must have to be a job of this provider.
    pub require: BTreeSet<JobField>,
    pub order: JobOrder,
    /// When an operator ended the waits that the provider had named, in epoch milliseconds; 0: never.
    pub resumed_at: u64,
    /// Settings version, from one sequence over all tables; larger is newer.
    pub version: i64,
    /// Enabled limits; at least one of them [applies to every charge](Limit::applies_to_every_charge).
    pub limits: Vec<Limit>,
    /// Rules of single accounts, in place of the limits of scope account.
    pub account_rules: Vec<AccountRule>,
}

impl Provider {
    /// H of the theorem: the provider counts a request no later than this after its start.
    pub fn hold_max(&self) -> Duration {
        self.send_budget + self.timeout
    }

    /// Whether a charge may use a connection that was used before.
    ///
    /// The default is yes only if the provider deduplicates. A server may close an idle connection just when a charge
    /// is sent on it. A refusal such as a 429 may be a copy of an earlier response, unless it repeats the fields of
    /// `echo`. The outcome is unknown in both cases, which costs a look-up or a manual review.
    pub fn reuses_connections(&self) -> bool {
        self.reuse_connections.unwrap_or(self.idempotency_retention.is_some())
    }

    /// Whether limits or rules count by this field, so that a job without it passes them uncounted. Shadow limits do
    /// not matter, because they hold no job.
    pub fn counts_by(&self, field: JobField) -> bool {
        let (scope, has_rules) = match field {
            JobField::Account => (Scope::Account, !self.account_rules.is_empty()),
            JobField::Reference => (Scope::Reference, false),
        };
        has_rules || self.limits.iter().any(|limit| limit.scope == scope && !limit.shadow)
    }

    /// Whether a rule refuses the jobs of this account.
    pub fn refuses_account(&self, account: Option<&str>) -> bool {
        let mut rules = self.account_rules.iter().filter(|rule| rule.rule == Rule::Refuse);
        account.is_some_and(|account| rules.any(|rule| rule.account == account))
    }

    /// Whether a job of this account is sent only after the ones before it are decided.
    pub fn keeps_order_of(&self, account: Option<&Identifier>) -> bool {
        self.order == JobOrder::Account && account.is_some()
    }

    /// Requests that remain after [`Self::reserve_percent`], rounded down.
    pub fn after_reserve(&self, requests: u32) -> u32 {
        let percent = 100 - u64::from(self.reserve_percent.min(100));
        u32::try_from(u64::from(requests) * percent / 100).unwrap_or(0)
    }

    /// The burst that remains after [`Self::reserve_percent`]; a bucket never shrinks to nothing.
    pub fn burst_after_reserve(&self, burst: u32) -> u32 {
        self.after_reserve(burst).max(1)
    }

    /// The provider's settings that the decision tables need.
    pub fn retry_policy(&self) -> RetryPolicy {
        RetryPolicy {
            max_attempts: self.max_attempts,
            max_age: self.max_age,
            backoff: self.backoff,
            idempotency_retention: self.idempotency_retention,
            lookup: self.lookup.as_ref().map(|lookup| LookupPolicy {
                give_up_after: lookup.give_up_after,
                resend_if_not_found: lookup.not_found == WhenNotFound::Resend,
            }),
        }
    }

    /// Whether a limit may stop every charge and no look-up.
    pub fn limits_charges_alone(&self) -> bool {
        self.limits.iter().any(|limit| limit.applies_to_every_charge() && limit.applies_to == AppliesTo::Charge)
    }
}
