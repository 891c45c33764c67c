//! The next cut-off of a provider as the overview shows it: when it is, and what becomes of the backlog until then.
//!
//! [`crate::domain::clear_time`] forecasts, from the input of the clear time.

use serde::{Deserialize, Serialize};

use super::OverviewInput;
use super::backlog::ProviderCounts;
use super::estimate::{QuotaCounts, estimate};
use crate::domain::clear_time::{CutoffForecast, MissedCutoff};
use crate::domain::provider::Provider;
use crate::domain::time::{EpochMs, millis_down};
use crate::ledger::operator::DatabaseTime;

/// The next cut-off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CutoffOverview {
    /// As in the row: `18:00 Europe/Berlin`.
    pub rule: String,
    pub at: String,
    pub in_ms: u64,
    pub forecast: CutoffForecastOverview,
}

/// The backlog at the cut-off, if everything stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CutoffForecastOverview {
    /// The backlog is cleared before it.
    OnTime { spare_ms: u64 },
    Missed {
        /// Payments of this provider that are not sent and answered by then.
        payments: u64,
        /// More may miss it.
        is_at_least: bool,
        /// Payments per second from now on that would do, with all providers of the quota; `null`: no rate would.
        needed_per_s: Option<f64>,
    },
    /// There is no estimate: see `clears`.
    Unknown,
}

impl CutoffForecastOverview {
    /// Payments that miss the cut-off; `None`: there is no estimate.
    pub fn missed(&self) -> Option<u64> {
        match self {
            Self::OnTime { .. } => Some(0),
            Self::Missed { payments, .. } => Some(*payments),
            Self::Unknown => None,
        }
    }
}

/// The next cut-off with this row: the one in force, or a proposed one. `None`: the row has no cut-off. `reopens_at`: when
/// its closed limits go back by themselves.
pub fn cutoff(
    evidence: &OverviewInput,
    provider: &Provider,
    reopens_at: Option<DatabaseTime>,
) -> Option<CutoffOverview> {
    let rule = provider.cutoff.as_ref()?;
    let now = EpochMs(evidence.at_ms);
    let at = rule.next_after(now)?;
    let forecast = match estimate(evidence, provider, |input| input.at_cutoff(at)) {
        // What is sent from then on is not estimated.
        CutoffForecast::Missed(_) if reopens_at.is_some_and(|reopens_at| reopens_at.0 < at.0) => {
            CutoffForecastOverview::Unknown
        }
        CutoffForecast::OnTime { spare } => CutoffForecastOverview::OnTime { spare_ms: millis_down(spare) },
        CutoffForecast::Missed(missed) => CutoffForecastOverview::Missed {
            payments: own_share(evidence, provider, &missed),
            is_at_least: missed.is_at_least,
            needed_per_s: missed.rate_needed,
        },
        CutoffForecast::Unknown => CutoffForecastOverview::Unknown,
    };
    let in_ms = u64::try_from(at.0 - now.0).unwrap_or(0);
    Some(CutoffOverview { rule: rule.to_string(), at: DatabaseTime(at.0).to_string(), in_ms, forecast })
}

/// Payments of this provider among those that miss the cut-off. Providers of one quota have the same share of their
/// backlogs sent by then, as they share its limits.
fn own_share(evidence: &OverviewInput, provider: &Provider, missed: &MissedCutoff) -> u64 {
    let counts = QuotaCounts::new(evidence, provider);
    let (own, all) = (counts.own.waiting(), counts.sum(ProviderCounts::waiting));
    if own == all {
        return missed.jobs;
    }
    let share = u128::from(missed.jobs) * u128::from(own);
    u64::try_from(share.div_ceil(u128::from(all))).unwrap_or(u64::MAX).min(own)
}
