//! The limits of a provider as the overview shows them: those in force, how much of each is used, and their pace.
//!
//! For an invalid row, the limits of the last valid row are in force and shown. The pace is [`Pace`], which the workers
//! follow.

use serde::{Deserialize, Serialize};

use crate::domain::limit::Limit;
use crate::domain::pace::Pace;
use crate::domain::provider::Provider;
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
}

impl LimitOverview {
    /// The rate as `N/DURATION`, or `N at once`.
    pub fn rate_in_words(&self) -> String {
        format_rate(self.max_requests, self.window_ms)
    }
}

/// The limits of a row that is in force.
pub(super) fn valid_limits(provider: &Provider) -> Vec<LimitOverview> {
    let line = |limit: &Limit| LimitOverview {
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
    };
    provider.limits.iter().map(line).collect()
}

/// The limits of a row as it is in the database.
fn raw_limits(row: &ProviderRow) -> Vec<LimitOverview> {
    let line = |limit: &LimitRow| LimitOverview {
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
    };
    row.limits.iter().map(line).collect()
}

/// The limits with their usage.
pub(super) fn limits_with_usage(
    row: &ProviderRow,
    in_force: Option<Vec<LimitOverview>>,
    used: &[LimitStatus],
) -> Vec<LimitOverview> {
    let with_use = |limit: LimitOverview| {
        // Where rows of one quota define the same name differently, the limiter counts them apart.
        let own = format!("{}@{}", limit.name, row.name);
        let find = |name: &str| used.iter().find(|usage| usage.name == name);
        let counts = find(&own).or_else(|| find(&limit.name)).filter(|_| limit.enabled && limit.scope == "provider");
        LimitOverview { used: counts.map(|usage| usage.used), remaining: counts.map(LimitStatus::remaining), ..limit }
    };
    in_force.unwrap_or_else(|| raw_limits(row)).into_iter().map(with_use).collect()
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
            mean_per_s: pace.rate.as_ref().map(|rate| rate.over_time.mean_per_second),
            mean_limit: pace.rate.map(|rate| rate.over_time.name),
            in_flight: pace.in_flight.as_ref().map(|limit| limit.max_requests),
            in_flight_limit: pace.in_flight.map(|limit| limit.name),
            is_even: pace.is_even,
            egress_per_s: row.is_paced().then_some(pace.egress_per_second),
            egress_is_default: pace.egress_is_default,
        })
    }
}
