//! The limits of a provider as the overview shows them: usage, pace, and the clear time of its backlog.
//!
//! For an invalid row, the limits of the last valid row are in force and shown. The pace is [`Pace`], which the workers
//! follow. [`super::estimate`] gathers what the clear time is estimated from.

use serde::{Deserialize, Serialize};

use super::{OverviewInput, UsageByQuota};
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::limit::Limit;
use crate::domain::pace::Pace;
use crate::domain::provider::Provider;
use crate::domain::time::millis_down;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::{LimitRow, ProviderRow, format_rate};
use crate::limiter::LimitStatus;

/// One limit, with its usage where it is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct LimitOverview {
    pub name: String,
    pub algorithm: String,
    pub max_requests: i64,
    /// `null` for a limit of requests in flight.
    pub window_ms: Option<i64>,
    pub scope: String,
    pub applies_to: String,
    pub shadow: bool,
    pub enabled: bool,
    /// Absent for a limit on accounts or references, for a disabled one, and where the limiter was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u64>,
    /// When the limit goes back by itself; absent: it stays.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub until: Option<String>,
    /// The rate from then on, in the limit grammar.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub then: Option<String>,
}

impl LimitOverview {
    /// The rate as `N/DURATION`, or `N at once`.
    pub fn rate_in_words(&self) -> String {
        format_rate(self.max_requests, self.window_ms)
    }
}

/// The limits of a row with their usage: as they are in the database or, of an invalid row, those that are in force.
pub(super) fn limits(evidence: &OverviewInput, row: &ProviderRow) -> Vec<LimitOverview> {
    let provider = evidence.providers.get(row.name.as_str());
    let limits: Vec<LimitOverview> = match provider.filter(|_| evidence.invalid_row(&row.name).is_some()) {
        Some(provider) => provider.limits.iter().map(LimitOverview::from).collect(),
        None => row.limits.iter().map(LimitOverview::from).collect(),
    };
    let with_use = |limit: LimitOverview| {
        let is_counted = limit.enabled && limit.scope == "provider";
        let used =
            provider.filter(|_| is_counted).and_then(|provider| usage_of(&evidence.limit_usage, provider, &limit.name));
        LimitOverview { used: used.map(|usage| usage.used), remaining: used.map(LimitStatus::remaining), ..limit }
    };
    limits.into_iter().map(with_use).collect()
}

impl From<&Limit> for LimitOverview {
    fn from(limit: &Limit) -> Self {
        Self {
            name: limit.name.clone(),
            algorithm: limit.algorithm.name().to_owned(),
            max_requests: i64::from(limit.rate.max_requests()),
            window_ms: limit.rate.window_ms(),
            scope: limit.scope.name().to_owned(),
            applies_to: limit.applies_to.name().to_owned(),
            shadow: limit.shadow,
            enabled: true,
            used: None,
            remaining: None,
            until: None,
            then: None,
        }
    }
}

impl From<&LimitRow> for LimitOverview {
    fn from(limit: &LimitRow) -> Self {
        Self {
            name: limit.name.clone(),
            algorithm: limit.algorithm.clone(),
            max_requests: limit.max_requests,
            window_ms: limit.given_window_ms(),
            scope: limit.scope.clone(),
            applies_to: limit.applies_to.clone(),
            shadow: limit.shadow,
            enabled: limit.enabled,
            used: None,
            remaining: None,
            until: limit.returns.map(|returns| returns.until.to_string()),
            then: limit.returns.map(|returns| returns.describe_rate()),
        }
    }
}

/// Usage of one limit. Where rows of one quota define the same name differently, the limiter counts them apart.
pub(super) fn usage_of<'a>(usage: &'a UsageByQuota, provider: &Provider, limit: &str) -> Option<&'a LimitStatus> {
    let used = usage.get(&provider.quota)?;
    let own = format!("{limit}@{}", provider.name);
    let find = |name: &str| used.iter().find(|used| used.name == name);
    find(&own).or_else(|| find(limit))
}

/// How fast the limits and the egress rate let requests start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PaceOverview {
    /// The pace as one line.
    pub text: String,
    /// Requests that the limits allow within one second, all processes together; `null`: no limit has a window.
    pub within_second: Option<u32>,
    /// The limit that decides this.
    pub within_second_limit: Option<String>,
    /// Requests per second over a long time, all processes together; `null`: no limit has a window.
    pub mean_per_s: Option<f64>,
    /// The limit that decides this.
    pub mean_limit: Option<String>,
    /// Requests that the limits allow in flight, all processes together; `null`: no limit counts them.
    pub in_flight: Option<u32>,
    /// The limit that decides this.
    pub in_flight_limit: Option<String>,
    /// Starts are spaced by the mean rate (`pacing = "even"`).
    pub is_even: bool,
    /// Jobs per second that each process lets out; `null`: the egress is not paced.
    pub egress_per_s: Option<f64>,
    /// The row has no `leak_per_second`.
    pub egress_is_default: bool,
    /// One limit decides the whole pace.
    pub is_plain: bool,
}

impl PaceOverview {
    /// The pace of a row among all rows; `None`: no limit applies to every charge.
    pub fn new<'a>(row: &'a Provider, rows: impl IntoIterator<Item = &'a Provider>) -> Option<Self> {
        let pace = Pace::new(row, rows)?;
        Some(Self {
            text: pace.to_string(),
            is_plain: pace.is_plain(),
            within_second: pace.rate.as_ref().map(|rate| rate.within_second),
            within_second_limit: pace.rate.as_ref().map(|rate| rate.at_once.name.clone()),
            mean_per_s: pace.rate.as_ref().map(|rate| rate.mean_per_second),
            mean_limit: pace.rate.map(|rate| rate.over_time.name),
            in_flight: pace.in_flight.as_ref().map(|limit| limit.max_requests),
            in_flight_limit: pace.in_flight.map(|limit| limit.name),
            is_even: pace.is_even,
            egress_per_s: row.is_paced().then_some(pace.egress_per_second),
            egress_is_default: pace.egress_is_default,
        })
    }
}

/// When the backlog is cleared. An estimate: it does not know which payments arrive meanwhile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ClearTimeOverview {
    ClearsIn {
        ms: u64,
    },
    /// The named limit is 0; `null`: the lanes send nothing.
    Never {
        limit: Option<String>,
    },
    /// The named limit is 0 until this instant, and then goes back by itself.
    NotBefore {
        limit: String,
        at: String,
    },
    /// Rules block the accounts of everything that waits.
    NotWhileBlocked,
    /// The provider refuses requests with 429: its own limit decides, and it is not known.
    NotWhileThrottled {
        /// Payments per second that got through lately, over at least ten pauses and a minute; `null`: not known yet.
        passed_per_s: Option<f64>,
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

impl ClearTimeOverview {
    /// The best estimate in milliseconds, where there is one: where limits count each account separately, that at the
    /// rate of the last minutes, or else the least time.
    pub fn ms(&self) -> Option<u64> {
        match self {
            Self::ClearsIn { ms } => Some(*ms),
            Self::DependsOnAccounts { at_least_ms, about_ms, .. } => Some(about_ms.unwrap_or(*at_least_ms)),
            Self::Never { .. }
            | Self::NotBefore { .. }
            | Self::NotWhileBlocked
            | Self::NotWhileThrottled { .. }
            | Self::NotWhilePaused
            | Self::NotWhileDisabled
            | Self::NotWhileBreakerOpen
            | Self::Unknown { .. } => None,
        }
    }
}

/// When the closed limits of a row go back by themselves; `None`: none is closed, or one of them stays so.
pub fn reopens_at(row: &ProviderRow) -> Option<DatabaseTime> {
    let closed = row.limits.iter().filter(|limit| limit.enabled && !limit.shadow && limit.max_requests == 0);
    let ends = closed.map(|limit| limit.returns.filter(|returns| returns.max_requests > 0).map(|back| back.until));
    ends.collect::<Option<Vec<_>>>()?.into_iter().max_by_key(|until| until.0)
}

impl ClearTimeOverview {
    /// The estimate with this row.
    pub fn with_row(clear_time: ClearTime, row: &ProviderRow) -> Self {
        match (clear_time, reopens_at(row)) {
            (ClearTime::Never { limit: Some(limit) }, Some(at)) => Self::NotBefore { limit, at: at.to_string() },
            (clear_time, _) => clear_time.into(),
        }
    }
}

impl From<ClearTime> for ClearTimeOverview {
    fn from(clear_time: ClearTime) -> Self {
        match clear_time {
            ClearTime::In(clears_in) => Self::ClearsIn { ms: millis_down(clears_in) },
            ClearTime::Never { limit } => Self::Never { limit },
            ClearTime::NotWhileBlocked => Self::NotWhileBlocked,
            ClearTime::NotWhileThrottled { passed_per_s } => Self::NotWhileThrottled { passed_per_s },
            ClearTime::NotWhilePaused => Self::NotWhilePaused,
            ClearTime::NotWhileDisabled => Self::NotWhileDisabled,
            ClearTime::NotWhileBreakerOpen => Self::NotWhileBreakerOpen,
            ClearTime::Unknown(missing) => Self::Unknown { missing: missing.into() },
            ClearTime::DependsOnAccounts { at_least, limits, about } => {
                Self::DependsOnAccounts { at_least_ms: millis_down(at_least), limits, about_ms: about.map(millis_down) }
            }
        }
    }
}
