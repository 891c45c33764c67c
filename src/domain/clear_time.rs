//! The time until a backlog is cleared: one estimate for every view of it.
//!
//! An estimate, not a promise: it takes the backlog as it is, and nothing new. Invariant: a larger backlog never clears
//! sooner, a higher limit never later (held by `estimates_are_monotone`).

use std::time::Duration;

use super::provider::Provider;
use super::time::EpochMs;

mod pace;
#[cfg(test)]
mod tests;

/// When a backlog is cleared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClearTime {
    In(Duration),
    /// The named limit is 0; `None`: an account rule blocks everything that waits.
    Never {
        limit: Option<String>,
    },
    NotWhilePaused,
    NotWhileDisabled,
    NotWhileBreakerOpen,
    Unknown(MissingInput),
    /// The named limits count each account or reference on its own, and it is not known whose jobs wait.
    DependsOnAccounts {
        at_least: Duration,
        limits: Vec<String>,
        /// At the rate of the last minutes, where that is known.
        about: Option<Duration>,
    },
}

/// What must be known for an estimate and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingInput {
    /// No worker reports.
    Worker,
    /// A backend is unavailable to the workers.
    Backend,
    /// The provider refuses the set-up.
    Configuration,
    /// The broker does not say what is in the queue.
    Queue,
    /// The database does not say what waits.
    Ledger,
    /// There is no valid row.
    Row,
}

impl MissingInput {
    /// As the reason why something is not known.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Worker => "no worker reports",
            Self::Backend => "a backend is unavailable",
            Self::Configuration => "its configuration is refused",
            Self::Queue => "the broker does not say what waits",
            Self::Ledger => "the database does not say what waits",
            Self::Row => "it has no valid row",
        }
    }
}

/// What holds the lane's requests, apart from limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendingState {
    /// Requests start from then on.
    StartsIn(Duration),
    Paused,
    Disabled,
    BreakerOpen,
    Unknown(MissingInput),
}

/// The jobs that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingJobs {
    /// Of all providers that share the quota.
    pub jobs: u64,
    /// A source that did not answer: there may be more.
    pub missing: Option<MissingInput>,
    /// When the last delayed job is due.
    pub last_due_in: Duration,
    /// All of them are delayed, and an account rule of the provider blocks.
    pub blocked: bool,
}

/// What a limit has used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedCount {
    pub limit: String,
    pub count: u64,
}

/// What the estimate takes into account.
#[derive(Clone, Copy, Debug)]
pub struct ClearTimeInput<'a> {
    pub provider: &'a Provider,
    pub now: EpochMs,
    pub sending: SendingState,
    pub waiting: WaitingJobs,
    /// A limit that is not named is taken to be unused.
    pub used_counts: &'a [UsedCount],
    /// From a request's start to its answer.
    pub hold: Duration,
    /// Live workers that have the lane.
    pub lanes: u32,
    /// Jobs per second over the last minutes.
    pub recent_rate: Option<f64>,
}

impl ClearTimeInput<'_> {
    /// The one estimate.
    #[must_use]
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

/// The limit of 0 that every charge meets.
fn closed_limit(provider: &Provider) -> Option<String> {
    let mut holding = provider.limits.iter().filter(|limit| limit.applies_to_every_charge());
    holding.find(|limit| provider.after_reserve(limit.rate.max_requests()) == 0).map(|limit| limit.name.clone())
}

/// Limits that hold charges back and count each account or reference on its own, by name.
#[must_use]
pub fn limits_by_account(provider: &Provider) -> Vec<String> {
    use super::limit::{AppliesTo, Scope};
    let holding = provider.limits.iter().filter(|limit| !limit.shadow && limit.applies_to != AppliesTo::Lookup);
    holding.filter(|limit| limit.scope != Scope::Provider).map(|limit| limit.name.clone()).collect()
}
