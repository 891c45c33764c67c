//! A change of a limit's rate by an operator: for good, or until an instant at which the limit goes back by itself.
//!
//! A dry run shows what would change, with the clear time and the cut-off before and after. Both come from the estimator
//! of the overview, so the page needs none of its own. The later change wins: it ends a return that was planned.

use serde::Serialize;
use utoipa::ToSchema;

use super::change::{SettingsChangeError, TRIES_MAX, check_changed_row, no_limit_error, row_to_change, too_fast};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::fleet::OverviewInput;
use crate::fleet::cutoff::{CutoffOverview, cutoff};
use crate::fleet::estimate::clear_time;
use crate::fleet::pace::{ClearTimeOverview, MissingSource, reopens_at};
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::provider_row::{LimitReturn, LimitRow, ProviderRow};
use crate::ledger::settings::{LimitWrite, RawRate};
use crate::ops::until::Until;

/// The wanted rate of a limit.
#[derive(Clone, Debug)]
pub struct WantedLimit<'a> {
    pub provider: &'a ProviderName,
    pub limit: &'a str,
    /// `None`: the present rate stays.
    pub rate: Option<Rate>,
    pub until: Until,
}

/// A limit's rate and its provider's row, before and after the change.
#[derive(Clone, Debug, PartialEq)]
pub struct RateChange {
    pub rate_before: RawRate,
    pub rate_after: Rate,
    pub returns_before: Option<LimitReturn>,
    pub returns_after: Option<LimitReturn>,
    pub row_before: ProviderRow,
    pub row_after: ProviderRow,
}

impl RateChange {
    fn new(row: ProviderRow, wanted: &WantedLimit<'_>, now: EpochMs) -> Result<Self, SettingsChangeError> {
        let Some(place) = row.limits.iter().position(|row| row.name == wanted.limit) else {
            return Err(no_limit_error(&row, wanted.limit));
        };
        let before = &row.limits[place];
        let rate_before = RawRate::from(before);
        let invalid = |problem: String| SettingsChangeError::InvalidRow(vec![problem]);
        let rate_after = wanted.rate.map_or_else(|| rate_before.validate(), Ok).map_err(invalid)?;
        let until = wanted.until.instant_for(now, &row).map_err(|problem| invalid(problem.to_string()))?;
        let lasting = lasting_rate(before);
        if until.is_some() && lasting == rate_after.into() {
            return Err(SettingsChangeError::NothingToReturn { limit: wanted.limit.to_owned(), rate: lasting });
        }
        let RawRate { max_requests, window_ms } = lasting;
        let returns_after = until.map(|at| LimitReturn { until: DatabaseTime(at.0), max_requests, window_ms });
        let (returns_before, mut row_after) = (before.returns, row.clone());
        row_after.limits[place].set_rate(rate_after);
        row_after.limits[place].returns = returns_after;
        Ok(Self { rate_before, rate_after, returns_before, returns_after, row_before: row, row_after })
    }

    /// Whether the limit becomes another one.
    pub fn is_change(&self) -> bool {
        self.rate_before != self.rate_after.into() || self.returns_before != self.returns_after
    }

    /// A planned return that this change ends.
    pub fn ended_return(&self) -> Option<LimitReturn> {
        self.returns_before.filter(|before| Some(*before) != self.returns_after)
    }
}

/// The rate without an end: after a temporary one, the rate to which the limit would have gone back.
fn lasting_rate(limit: &LimitRow) -> RawRate {
    match limit.returns {
        Some(LimitReturn { max_requests, window_ms, .. }) => RawRate { max_requests, window_ms },
        None => RawRate::from(limit),
    }
}

/// Changes a limit; a dry run only returns what would change. The same rate and end again change nothing.
///
/// # Errors
/// [`SettingsChangeError`], also in a dry run.
pub async fn set_limit(
    ledger: &Database,
    wanted: &WantedLimit<'_>,
    dry_run: bool,
    by: Option<&Actor>,
) -> Result<RateChange, SettingsChangeError> {
    let WantedLimit { provider, limit, .. } = *wanted;
    let now = ledger.clock().await?;
    for _ in 0..TRIES_MAX {
        let (version, row) = row_to_change(ledger, provider).await?;
        let change = RateChange::new(row, wanted, now)?;
        check_changed_row(ledger, provider, &change.row_after).await?;
        if dry_run || !change.is_change() {
            return Ok(change);
        }
        let write = LimitWrite { provider, limit, rate: change.rate_after, returns: change.returns_after };
        if ledger.set_limit_at(version, &write, by).await? {
            return Ok(change);
        }
    }
    Err(too_fast())
}

/// The clear time of the backlog before and after the change.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClearTimeChange {
    pub from: ClearTimeOverview,
    pub to: ClearTimeOverview,
}

/// The instant at which the backlog is cleared, before and after the change; `null`: there is no estimate.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClearInstantChange {
    pub from: Option<String>,
    pub to: Option<String>,
}

/// The next cut-off before and after the change; `null`: the provider has none.
#[derive(Debug, Serialize, ToSchema)]
pub struct CutoffChange {
    pub from: Option<CutoffOverview>,
    pub to: Option<CutoffOverview>,
}

/// What a change does to the finish time.
#[derive(Debug, Serialize, ToSchema)]
pub struct FinishChange {
    pub clears: ClearTimeChange,
    pub clears_at: ClearInstantChange,
    pub cutoff: CutoffChange,
}

impl FinishChange {
    /// Estimates both from the same data, as the overview does. An end of the new rate is left out.
    pub fn new(input: &OverviewInput, change: &RateChange) -> Self {
        let (from, to) = (Finish::new(input, &change.row_before), Finish::new(input, &change.row_after));
        Self {
            clears: ClearTimeChange { from: from.clears, to: to.clears },
            clears_at: ClearInstantChange { from: from.clears_at, to: to.clears_at },
            cutoff: CutoffChange { from: from.cutoff, to: to.cutoff },
        }
    }
}

/// The finish time with one row.
struct Finish {
    clears: ClearTimeOverview,
    clears_at: Option<String>,
    cutoff: Option<CutoffOverview>,
}

impl Finish {
    fn new(input: &OverviewInput, row: &ProviderRow) -> Self {
        let Ok(provider) = row.validate(0) else {
            let clears = ClearTimeOverview::Unknown { missing: MissingSource::Row };
            return Self { clears, clears_at: None, cutoff: None };
        };
        let clears = ClearTimeOverview::with_row(clear_time(input, &provider), row);
        let clears_at = clears.ms().map(|ms| input.instant_in(ms));
        Self { clears, clears_at, cutoff: cutoff(input, &provider, reopens_at(row)) }
    }
}
