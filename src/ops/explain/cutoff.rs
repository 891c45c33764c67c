//! The cut-off in an explanation: whether a waiting payment is sent before its provider's next cut-off.
//!
//! The payment's own estimated start decides. Without one, the forecast for all payments of its provider decides, if all
//! of them are in time or none is. A payment that is scheduled for later than the cut-off does not miss it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ExplainedBlock, FactSources};
use crate::domain::clear_time::ClearTime;
use crate::domain::explain::{Facts, JobFacts};
use crate::fleet::cutoff::{CutoffForecastOverview, cutoff};
use crate::fleet::estimate::clear_time;
use crate::fleet::pace::reopens_at;
use crate::ledger::operator::DatabaseTime;

/// The next cut-off of a waiting payment's provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedCutoff {
    /// As in the provider's row: `18:00 Europe/Berlin`.
    pub rule: String,
    pub at: String,
    /// As things are, its request starts after the cut-off.
    pub is_missed: bool,
}

/// States of a payment that is yet to be sent.
const WAITING: [&str; 2] = ["waiting", "unknown"];

/// Whether nothing is sent, as things are.
fn is_stopped(clears: &ClearTime) -> bool {
    match clears {
        ClearTime::Never { limit } => limit.is_some(),
        ClearTime::NotWhilePaused | ClearTime::NotWhileDisabled | ClearTime::NotWhileBreakerOpen => true,
        ClearTime::NotWhileBlocked | ClearTime::NotWhileThrottled { .. } => false,
        ClearTime::In(_) | ClearTime::Unknown(_) | ClearTime::DependsOnAccounts { .. } => false,
    }
}

/// `None`: the payment does not wait, there is no cut-off, or it is not known whether the payment misses it.
pub async fn explained_cutoff(
    sources: &FactSources<'_>,
    facts: &Facts,
    blocked_at: Option<&ExplainedBlock>,
) -> Option<ExplainedCutoff> {
    let job: &JobFacts = facts.job.as_ref().or(facts.unrecorded.as_ref())?;
    let provider = facts.row.provider.as_ref().filter(|_| WAITING.contains(&job.state.as_str()))?;
    let rule = provider.cutoff.as_ref()?;
    let at = rule.next_after(facts.now)?;
    if job.not_before.is_some_and(|not_before| not_before >= at) {
        return None;
    }
    let starts_in = blocked_at.and_then(|block| block.starts_in_ms).map(Duration::from_millis);
    let is_missed = match starts_in {
        Some(starts_in) => facts.now.plus(starts_in) >= at,
        None => {
            let input = sources.collector?.input().await;
            let row = input.rows.iter().find(|row| row.name == provider.name.as_str());
            match cutoff(&input, provider, row.and_then(reopens_at))?.forecast {
                CutoffForecastOverview::OnTime { .. } => false,
                CutoffForecastOverview::Missed { needed_per_s: None, .. } => true,
                CutoffForecastOverview::Missed { .. } if is_stopped(&clear_time(&input, provider)) => true,
                CutoffForecastOverview::Missed { .. } | CutoffForecastOverview::Unknown => return None,
            }
        }
    };
    Some(ExplainedCutoff { rule: rule.to_string(), at: DatabaseTime(at.0).to_string(), is_missed })
}
