//! The limits of a provider as the overview shows them: those in force, and how much of each is used.
//!
//! For an invalid row, the limits of the last valid row are in force and shown.

use serde::{Deserialize, Serialize};

use crate::domain::limit::Limit;
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
