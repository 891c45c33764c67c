//! The clear time of a provider's backlog, as the overview, the API and `explain` show it.
//!
//! This module turns the gathered input into the input of [`crate::domain::clear_time`], which estimates.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::overview::{OverviewInput, status_of_row};
use super::provider_counts::{ProviderCounts, RATE_WINDOW};
use super::provider_status::{ProviderState, ProviderStatus};
use crate::domain::clear_time::{ClearTime, ClearTimeInput, MissingInput, SendingState, UsedCount, WaitingJobs};
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;
use crate::domain::time::EpochMs;
use crate::limiter::LimitStatus;

/// When the backlog is cleared. An estimate: it does not know which payments arrive meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ClearTimeOverview {
    ClearsIn {
        ms: u64,
    },
    /// The named limit is 0; `null`: an account rule blocks everything that waits.
    Never {
        limit: Option<String>,
    },
    NotWhilePaused,
    NotWhileDisabled,
    NotWhileBreakerOpen,
    Unknown {
        missing: MissingSource,
    },
    /// These limits count each account or reference separately, and it is unknown whose payments wait.
    DependsOnAccounts {
        at_least_ms: u64,
        limits: Vec<String>,
        /// At the rate of the last minutes.
        about_ms: Option<u64>,
    },
}

/// The source that is missing for an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MissingSource {
    Worker,
    Backend,
    Configuration,
    Queue,
    Ledger,
    Row,
    ResponseTime,
}

impl From<MissingInput> for MissingSource {
    fn from(missing: MissingInput) -> Self {
        match missing {
            MissingInput::Worker => Self::Worker,
            MissingInput::Backend => Self::Backend,
            MissingInput::Configuration => Self::Configuration,
            MissingInput::Queue => Self::Queue,
            MissingInput::Ledger => Self::Ledger,
            MissingInput::Row => Self::Row,
            MissingInput::ResponseTime => Self::ResponseTime,
        }
    }
}

impl From<ClearTime> for ClearTimeOverview {
    fn from(clear_time: ClearTime) -> Self {
        match clear_time {
            ClearTime::In(clears_in) => Self::ClearsIn { ms: ms(clears_in) },
            ClearTime::Never { limit } => Self::Never { limit },
            ClearTime::NotWhilePaused => Self::NotWhilePaused,
            ClearTime::NotWhileDisabled => Self::NotWhileDisabled,
            ClearTime::NotWhileBreakerOpen => Self::NotWhileBreakerOpen,
            ClearTime::Unknown(missing) => Self::Unknown { missing: missing.into() },
            ClearTime::DependsOnAccounts { at_least, limits, about } => {
                Self::DependsOnAccounts { at_least_ms: ms(at_least), limits, about_ms: about.map(ms) }
            }
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Clear time of this provider's backlog with this row: the one in force, or a proposed one.
pub fn clear_time(evidence: &OverviewInput, provider: &Provider) -> ClearTime {
    let name = provider.name.as_str();
    let counted = ProviderCounts::new(evidence, name);
    let status = evidence.rows.iter().any(|row| row.name == name).then(|| status_of_row(evidence, name, true));
    let flow = match &status {
        _ if !provider.enabled => SendingState::Disabled,
        _ if provider.paused => SendingState::Paused,
        None => SendingState::Unknown(MissingInput::Row),
        Some(status) => flow(status),
    };
    // The backlog was counted some seconds ago, or longer for a large ledger, and the lanes have sent since.
    let sending_for = match &status {
        Some(ProviderStatus { state: ProviderState::Running, .. }) => count_age(evidence),
        _ => count_age(evidence).min(RATE_WINDOW),
    };
    conditions(evidence, provider, &counted, flow, sending_for)
}

/// Age of the backlog count.
fn count_age(evidence: &OverviewInput) -> Duration {
    let age_ms = evidence.counted_at_ms.map_or(0, |counted_at_ms| evidence.at_ms - counted_at_ms);
    Duration::from_millis(u64::try_from(age_ms).unwrap_or(0))
}

fn conditions(
    evidence: &OverviewInput,
    provider: &Provider,
    counted: &ProviderCounts<'_>,
    flow: SendingState,
    sending_for: Duration,
) -> ClearTime {
    let used = evidence.limit_usage.get(&provider.quota).map(Vec::as_slice).unwrap_or_default();
    ClearTimeInput {
        provider,
        now: EpochMs(evidence.at_ms),
        sending: flow,
        waiting: waiting(evidence, provider, counted, sending_for),
        used_counts: &provider
            .limits
            .iter()
            .filter_map(|limit| usage_of(&limit.name, provider, used))
            .collect::<Vec<_>>(),
        hold: counted.hold(provider),
        lanes: counted.lanes,
        recent_rate: evidence.recent_per_s.get(provider.name.as_str()).copied(),
    }
    .clear_time()
}

/// Count of one limit. Where rows of one quota define the same name differently, the limiter counts them apart.
fn usage_of(limit: &str, provider: &Provider, used: &[LimitStatus]) -> Option<UsedCount> {
    let own = format!("{limit}@{}", provider.name);
    let find = |name: &str| used.iter().find(|used| used.name == name);
    find(&own).or_else(|| find(limit)).map(|used| UsedCount { limit: limit.to_owned(), count: used.used })
}

fn flow(status: &ProviderStatus) -> SendingState {
    match status.state {
        ProviderState::Disabled => SendingState::Disabled,
        ProviderState::Paused => SendingState::Paused,
        ProviderState::NoWorker | ProviderState::Draining => SendingState::Unknown(MissingInput::Worker),
        ProviderState::BackendUnavailable => SendingState::Unknown(MissingInput::Backend),
        ProviderState::Misconfigured => SendingState::Unknown(MissingInput::Configuration),
        ProviderState::BreakerOpen | ProviderState::Probing => SendingState::BreakerOpen,
        ProviderState::Cold | ProviderState::PausedByProvider => {
            SendingState::StartsIn(Duration::from_millis(status.ends_in_ms.unwrap_or(0)))
        }
        // The estimate itself covers limits.
        ProviderState::Closed | ProviderState::WaitingForLimit | ProviderState::Running | ProviderState::Idle => {
            SendingState::StartsIn(Duration::ZERO)
        }
    }
}

/// Waiting jobs. Providers of one quota share its limits, so their backlogs are added. At most half of the backlog
/// counts as sent since the count, because new jobs have come too.
fn waiting(
    evidence: &OverviewInput,
    provider: &Provider,
    counted: &ProviderCounts<'_>,
    sending_for: Duration,
) -> WaitingJobs {
    let others =
        evidence.providers.values().filter(|other| other.quota == provider.quota && other.name != provider.name);
    let others = others.filter(|other| other.enabled && !other.paused);
    let others: Vec<_> = others.map(|other| ProviderCounts::new(evidence, other.name.as_str())).collect();
    let own = counted.waiting();
    let jobs = own + others.iter().map(ProviderCounts::waiting).sum::<u64>();
    let sent =
        counted.sent_within(sending_for) + others.iter().map(|other| other.sent_within(sending_for)).sum::<u64>();
    let blocks = provider.account_rules.iter().any(|rule| rule.rule == Rule::Blocked);
    let delayed_for_ms = counted.reconciliation.as_ref().and_then(|account| account.delayed_for_ms).unwrap_or(0);
    WaitingJobs {
        jobs: if own == 0 { 0 } else { jobs - sent.min(jobs / 2) },
        missing: counted.missing(),
        last_due_in: Duration::from_millis(delayed_for_ms),
        // A job that an account rule blocks waits in the backlog, or is delayed again and again, until the rule is
        // removed.
        blocked: blocks && counted.only_delayed_or_blocked(),
    }
}
