//! A validated payment provider: how to call it, how fast, what its responses mean, and how to look a payment up.
//!
//! The row as an operator wrote it is in `ledger::provider_row`; only its validated form gets here. A provider without
//! an enabled limit cannot be built.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::backoff::{BackoffPolicy, LookupPolicy, RetryPolicy};
use super::cutoff::Cutoff;
use super::expansion::{InvalidTemplate, RequestBuildError, RequestPart, UrlTemplate};
use super::job::{Job, JobField};
use super::limit::{AccountRule, Limit, Rule, Scope};
use super::names::Identifier;
pub use super::names::{ProviderName, RESERVED_NAMES};
use super::response::{Echo, StatusCase, SumFields, WaitField};
use super::sum::AmountRules;

/// Longest time that a permit may be booked ahead of its start.
pub const BOOKING_HORIZON: Duration = Duration::from_millis(250);
/// Longest total time of one request that a row may set.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);
/// Longest send budget that a row may set: the time after its start at which a permit may still be used.
pub const SEND_BUDGET_MAX: Duration = Duration::from_secs(60);

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
    /// Where an accepted response has the sum.
    pub sum: SumFields,
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
    /// How the provider counts money, and in which currencies.
    pub amounts: AmountRules,
    /// Until when the payments of a day should be sent. It delays no payment and rejects none.
    pub cutoff: Option<Cutoff>,
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

    /// The longest window of the account rules that are limits by themselves, because the row enforces no account limit
    /// whose numbers they could replace; `None`: there are no such rules.
    pub fn rule_limit_window(&self) -> Option<Duration> {
        if self.limits.iter().any(|limit| limit.scope == Scope::Account) {
            return None;
        }
        let own = self.account_rules.iter().filter(|rule| rule.limit.is_none());
        let windows = own.filter_map(|rule| match rule.rule {
            Rule::Limit(own) if !own.rate.is_at_once() => Some(own.rate.window()),
            Rule::Limit(_) | Rule::Exempt | Rule::Blocked | Rule::Refuse => None,
        });
        windows.max()
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
}

/// The validated `lookup` column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    pub url: LookupUrl,
    pub method: LookupMethod,
    /// JSON pointer to the value that tells the payment's state. <https://www.rfc-editor.org/rfc/rfc6901>
    pub state: String,
    pub accepted: Vec<String>,
    pub declined: Vec<String>,
    pub in_progress: Vec<String>,
    /// JSON pointer to the provider's reference.
    pub reference: String,
    pub sum: SumFields,
    pub echo: Echo,
    pub not_found: WhenNotFound,
    /// Time since the start of the last charge of unknown outcome; a payment that is still undecided then goes to
    /// review.
    pub give_up_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupMethod {
    Get,
    Post,
}

/// Next step if the provider does not know a payment that may have been charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenNotFound {
    Review,
    /// Sends the frozen request once more, with the same key.
    Resend,
}

/// Address of a look-up, which contains the payment's id: `https://api.example.com/charges?id=${job:id}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupUrl(UrlTemplate);

impl LookupUrl {
    /// Parses the placeholders. The caller validates the address by its [sample](Self::sample).
    pub fn parse(text: &str) -> Result<Self, InvalidTemplate> {
        let url = UrlTemplate::parse(text)?;
        if !url.names_payment() {
            return Err(InvalidTemplate::NamesNoPayment);
        }
        Ok(Self(url))
    }

    /// The address with `x` at every placeholder, to check its host.
    pub fn sample(&self) -> String {
        self.0.sample()
    }

    /// The address of the look-up for this job.
    pub fn for_job(&self, job: &Job) -> Result<String, RequestBuildError> {
        self.0.for_job(job, RequestPart::LookupUrl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_url_without_payment_field_is_rejected() {
        for url in ["", "https://x.example/charges", "https://x.example/${job:account}"] {
            assert_eq!(LookupUrl::parse(url), Err(InvalidTemplate::NamesNoPayment), "{url}");
        }
        assert!(LookupUrl::parse("https://x.example/${reference}").is_ok());
    }
}
