//! Clear time of a backlog: one estimate, used by every view.
//!
//! It is an estimate, not a promise: it assumes that no new job arrives. Invariant: a larger backlog never clears
//! sooner, and a higher limit never clears it later (held by `estimates_are_monotone`).

use std::time::Duration;

use super::provider::Provider;
use super::time::EpochMs;

mod pace;
#[cfg(test)]
mod tests;

/// Clear time of a backlog, or the reason why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClearTime {
    In(Duration),
    /// The named limit is 0. `None`: an account rule blocks every job that waits.
    Never {
        limit: Option<String>,
    },
    NotWhilePaused,
    NotWhileDisabled,
    NotWhileBreakerOpen,
    Unknown(MissingInput),
    /// The named limits count each account or reference separately, and the accounts of the waiting jobs are not known.
    DependsOnAccounts {
        at_least: Duration,
        limits: Vec<String>,
        /// At the rate of the last minutes, if that is known.
        about: Option<Duration>,
    },
}

/// Input that an estimate needs and does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingInput {
    /// No worker sends reports.
    Worker,
    /// The workers cannot reach a backend.
    Backend,
    /// The provider refuses our address, method or credential.
    Configuration,
    /// The broker does not report the length of the queue.
    Queue,
    /// The database does not report the waiting jobs.
    Ledger,
    /// The provider has no valid row.
    Row,
    /// A limit of requests in flight decides, and none was answered lately.
    ResponseTime,
}

impl MissingInput {
    /// Reason for people why the estimate is missing.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Worker => "no worker reports",
            Self::Backend => "a backend is unavailable",
            Self::Configuration => "its configuration is refused",
            Self::Queue => "the broker does not say what waits",
            Self::Ledger => "the database does not say what waits",
            Self::Row => "it has no valid row",
            Self::ResponseTime => "no response was timed yet, and a limit counts requests in flight",
        }
    }
}

/// State of the lane's sending, apart from limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendingState {
    /// Requests start after this time.
    StartsIn(Duration),
    Paused,
    Disabled,
    BreakerOpen,
    Unknown(MissingInput),
}

/// Jobs that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingJobs {
    /// Jobs of all providers that share the quota.
    pub jobs: u64,
    /// A source that did not answer: more jobs may wait.
    pub missing: Option<MissingInput>,
    /// Time until the last delayed job is due.
    pub last_due_in: Duration,
    /// All of them are delayed, and an account rule of the provider blocks them.
    pub blocked: bool,
}

/// Usage of one limit now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedCount {
    pub limit: String,
    pub count: u64,
}

/// Input of the estimate.
#[derive(Clone, Copy, Debug)]
pub struct ClearTimeInput<'a> {
    pub provider: &'a Provider,
    pub now: EpochMs,
    pub sending: SendingState,
    pub waiting: WaitingJobs,
    /// A limit that is not named counts as unused.
    pub used_counts: &'a [UsedCount],
    /// From a request's start to its response.
    pub hold: Duration,
    /// Live workers that run the lane.
    pub lanes: u32,
    /// Jobs per second over the last minutes.
    pub recent_rate: Option<f64>,
}

impl ClearTimeInput<'_> {
    /// Estimates when the backlog is cleared.
    pub fn clear_time(&self) -> ClearTime {
        let WaitingJobs { jobs, missing, last_due_in, blocked } = self.waiting;
        if jobs == 0 && missing.is_none() {
            return ClearTime::In(Duration::ZERO);
        }
        let starts_in = match self.sending {
            SendingState::StartsIn(starts_in) => starts_in,
            SendingState::Paused => return ClearTime::NotWhilePaused,
            SendingState::Disabled => return ClearTime::NotWhileDisabled,
            SendingState::BreakerOpen => return ClearTime::NotWhileBreakerOpen,
            SendingState::Unknown(missing) => return ClearTime::Unknown(missing),
        };
        if let Some(limit) = closed_limit(self.provider) {
            return ClearTime::Never { limit: Some(limit) };
        }
        if let Some(missing) = missing {
            return ClearTime::Unknown(missing);
        }
        if blocked {
            return ClearTime::Never { limit: None };
        }
        if self.hold.is_zero() && self.provider.in_flight_max().is_some() {
            return ClearTime::Unknown(MissingInput::ResponseTime);
        }
        let Some(sent_in) = pace::send_time(self, jobs) else { return ClearTime::Never { limit: None } };
        let clears_in = starts_in.saturating_add(sent_in).max(last_due_in);
        let limits = limits_by_account(self.provider);
        if limits.is_empty() {
            return ClearTime::In(clears_in);
        }
        let about = self.recent_rate.and_then(|rate| pace::time_at_rate(jobs, rate)).map(|about| about.max(clears_in));
        ClearTime::DependsOnAccounts { at_least: clears_in, limits, about }
    }
}

/// The name of a limit of 0 that applies to every charge.
fn closed_limit(provider: &Provider) -> Option<String> {
    let mut holding = provider.limits.iter().filter(|limit| limit.applies_to_every_charge());
    holding.find(|limit| provider.after_reserve(limit.rate.max_requests()) == 0).map(|limit| limit.name.clone())
}

/// Names of the limits that apply to charges and count each account or reference separately.
pub fn limits_by_account(provider: &Provider) -> Vec<String> {
    use super::limit::{AppliesTo, Scope};
    let holding = provider.limits.iter().filter(|limit| !limit.shadow && limit.applies_to != AppliesTo::Lookup);
    holding.filter(|limit| limit.scope != Scope::Provider).map(|limit| limit.name.clone()).collect()
}
