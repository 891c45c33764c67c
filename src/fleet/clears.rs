//! When a provider's backlog is cleared, as the overview, the API and `explain` show it: gathered evidence turned into the
//! conditions of [`crate::domain::clear_time`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counted::Counted;
use super::overview::{Evidence, told};
use super::standing::{Standing, State};
use crate::domain::clear_time::{ClearTime, Conditions, Flow, Missing, Used, Waiting};
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;
use crate::domain::time::EpochMs;
use crate::limiter::LimitUse;

/// When what waits is cleared. An estimate: it knows nothing of what comes in meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Clears {
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
        missing: Source,
    },
    /// These limits count each account or reference on its own, and it is not known whose payments wait.
    DependsOnAccounts {
        at_least_ms: u64,
        limits: Vec<String>,
        /// At the rate of the last minutes.
        about_ms: Option<u64>,
    },
}

/// What is missing for an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Worker,
    Backend,
    Configuration,
    Queue,
    Ledger,
    Row,
}

impl From<Missing> for Source {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::Worker => Self::Worker,
            Missing::Backend => Self::Backend,
            Missing::Configuration => Self::Configuration,
            Missing::Queue => Self::Queue,
            Missing::Ledger => Self::Ledger,
            Missing::Row => Self::Row,
        }
    }
}

impl From<ClearTime> for Clears {
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

/// When the backlog of this provider is cleared, if this is its row: the one that counts, or one that is considered.
#[must_use]
pub fn clear_time(evidence: &Evidence, provider: &Provider) -> ClearTime {
    let name = provider.name.as_str();
    let counted = Counted::of(evidence, name);
    let standing = evidence.rows.iter().any(|row| row.name == name).then(|| told(evidence, name, true));
    let flow = match &standing {
        _ if !provider.enabled => Flow::Disabled,
        _ if provider.paused => Flow::Paused,
        None => Flow::Unknown(Missing::Row),
        Some(standing) => flow(standing),
    };
    let since_count = match &standing {
        // The backlog was counted some seconds ago, in a large ledger longer, and the lanes have sent since.
        Some(Standing { state: State::Running, .. }) => since_count(evidence),
        _ => Duration::ZERO,
    };
    conditions(evidence, provider, &counted, flow).later_by(since_count)
}

/// Age of the count of the backlog.
fn since_count(evidence: &Evidence) -> Duration {
    let age_ms = evidence.counted_at_ms.map_or(0, |counted_at_ms| evidence.at_ms - counted_at_ms);
    Duration::from_millis(u64::try_from(age_ms).unwrap_or(0))
}

fn conditions(evidence: &Evidence, provider: &Provider, counted: &Counted<'_>, flow: Flow) -> ClearTime {
    let used = evidence.used.get(&provider.quota).map(Vec::as_slice).unwrap_or_default();
    Conditions {
        provider,
        now: EpochMs(evidence.at_ms),
        flow,
        waiting: waiting(evidence, provider, counted),
        used: &provider.limits.iter().filter_map(|limit| used_of(&limit.name, provider, used)).collect::<Vec<_>>(),
        hold: counted.hold(provider),
        lanes: counted.lanes,
        recent_rate: evidence.lately_per_s.get(provider.name.as_str()).copied(),
    }
    .clear_time()
}

/// Where rows of one quota mean something else by a name, the limiter counts them apart.
fn used_of(limit: &str, provider: &Provider, used: &[LimitUse]) -> Option<Used> {
    let own = format!("{limit}@{}", provider.name);
    let find = |name: &str| used.iter().find(|used| used.name == name);
    find(&own).or_else(|| find(limit)).map(|used| Used { limit: limit.to_owned(), count: used.used })
}

fn flow(told: &Standing) -> Flow {
    match told.state {
        State::Disabled => Flow::Disabled,
        State::Paused => Flow::Paused,
        State::NoWorker | State::Draining => Flow::Unknown(Missing::Worker),
        State::EngineAway => Flow::Unknown(Missing::Backend),
        State::Misconfigured => Flow::Unknown(Missing::Configuration),
        State::BreakerOpen | State::Probing => Flow::BreakerOpen,
        State::Cold | State::PausedByProvider => Flow::After(Duration::from_millis(told.ends_in_ms.unwrap_or(0))),
        // What a limit does is the estimate's own matter.
        State::Closed | State::WaitingForLimit | State::Running | State::Idle => Flow::After(Duration::ZERO),
    }
}

/// Those that share a quota share what it lets out, so their backlogs are one.
fn waiting(evidence: &Evidence, provider: &Provider, counted: &Counted<'_>) -> Waiting {
    let others =
        evidence.providers.values().filter(|other| other.quota == provider.quota && other.name != provider.name);
    let others = others.filter(|other| other.enabled && !other.paused);
    let theirs: u64 = others.map(|other| Counted::of(evidence, other.name.as_str()).waiting()).sum();
    let own = counted.waiting();
    let blocks = provider.account_rules.iter().any(|rule| rule.rule == Rule::Blocked);
    let parked_for_ms = counted.account.as_ref().and_then(|account| account.parked_for_ms).unwrap_or(0);
    Waiting {
        jobs: if own == 0 { 0 } else { own + theirs },
        missing: counted.missing(),
        last_due_in: Duration::from_millis(parked_for_ms),
        // What a rule blocks is parked again and again, until the rule is gone.
        blocked: blocks && counted.only_parked(),
    }
}
