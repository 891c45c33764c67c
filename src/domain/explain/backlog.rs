//! The place of a job in the backlog of its lane, what blocks its flow, and its start there.
//!
//! The start is the latest of three: by the limits of the provider and the jobs before it, by its account's own limits
//! and the jobs of its account before it, and the end of the block. Where one of them cannot be known, there is no start.

use std::time::Duration;

use super::facts::{BacklogPlace, Facts, FlowBlock, JobFacts};
use super::forecast::{ForecastInput, forecast_start};
use super::format;
use super::limit::applies;
use super::pending::later;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::wait_reason::WaitReason;

/// Why no start is known while the provider tests an account.
const TESTED_FIRST: &str =
    "when the block ends, one payment of the account is sent, and its response decides about the others";
const NO_USAGE: &str = "the ledger did not report the recent requests";
const CLOSED: &str = "the limits, as they are now, never allow it";
/// Why no start is known where a limit of requests in flight decides.
pub(super) const IN_FLIGHT: &str = "nothing names the instant at which a request in flight ends";

/// An estimated start, and the limit that decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EstimatedStart {
    pub wait: Duration,
    pub limited_by: Option<String>,
}

/// Estimated start of a job of the backlog, given the one by the limits of the provider alone.
pub(super) fn start(
    facts: &Facts,
    job: &JobFacts,
    place: &BacklogPlace,
    by_provider: Option<EstimatedStart>,
    kind: CallKind,
) -> Result<EstimatedStart, &'static str> {
    let block = place.block.as_ref();
    match block.map(|block| &block.wait.reason) {
        Some(WaitReason::Misconfigured | WaitReason::RejectedStreak) => return Err(TESTED_FIRST),
        Some(WaitReason::AccountBlocked) => return Err("a rule of the provider blocks the account"),
        _ => {}
    }
    let (Some(spec), Some(_)) = (&facts.row.spec, &facts.limiter.recent_usage) else { return Err(NO_USAGE) };
    let by_provider = by_provider.ok_or(CLOSED)?;
    let by_account = by_account(facts, job, place, spec, kind)?;
    let by_block = block
        .map(|block| EstimatedStart { wait: block.left, limited_by: block.wait.reason.limit().map(str::to_owned) });
    let others = [by_account, by_block].into_iter().flatten();
    Ok(others.fold(by_provider, |latest, other| if other.wait > latest.wait { other } else { latest }))
}

/// Estimated start by the limits of its account; `Ok(None)`: no limit counts the account.
fn by_account(
    facts: &Facts,
    job: &JobFacts,
    place: &BacklogPlace,
    spec: &QuotaSpec,
    kind: CallKind,
) -> Result<Option<EstimatedStart>, &'static str> {
    let Some(own) = job.account.as_deref().and_then(|account| account_spec(spec, account, kind)) else {
        return Ok(None);
    };
    let usage = place.account_usage.as_ref().ok_or(NO_USAGE)?;
    let ahead = ForecastInput {
        cost_before: place.before_in_flow.saturating_add(place.account_ahead),
        cost: if kind == CallKind::Charge { job.cost } else { 1 },
        kind,
        jobs_per_second: None,
    };
    let start = forecast_start(&own, facts.now_micros(), usage, &ahead).ok_or(CLOSED)?;
    let limited_by = start.limited_by.map(|index| own.limit_name(index).to_owned());
    Ok(Some(EstimatedStart { wait: start.wait, limited_by }))
}

/// The limits that count each account, as the account has them, as a quota of their own; `None`: none counts it.
fn account_spec(spec: &QuotaSpec, account: &str, kind: CallKind) -> Option<QuotaSpec> {
    let subjects = spec.subjects(Some(account), None).ok()?;
    let own = subjects.first()?.limits.iter().filter(|own| !own.exempt);
    let limits: Vec<_> = own
        .filter_map(|own| Some(spec.limits.get(own.index)?.with_subject_limit(own)))
        .filter(|limit| !limit.shadow && applies(limit.applies_to, kind))
        .map(|mut limit| {
            limit.scope = Scope::Provider;
            limit
        })
        .collect();
    let none = limits.is_empty();
    (!none).then(|| QuotaSpec { limits, account_rules: Vec::new(), pacing: None, ..spec.clone() })
}

/// `the 17th of 230 waiting payments of account shop with priority 0`, and until when they are blocked.
pub(super) fn place_text(facts: &Facts, job: &JobFacts, place: &BacklogPlace) -> String {
    let account = match &job.account {
        Some(account) => format!("of account {account}"),
        None => "without an account".to_owned(),
    };
    let class = match place.priority {
        Some(priority) => format!("with priority {priority}"),
        None => "of unknown outcome".to_owned(),
    };
    // The count and the position are read one after the other.
    let position = place.before_in_flow.saturating_add(1);
    let text = match place.waiting_in_flow.max(position) {
        1 => format!("the only waiting payment {account} {class}"),
        waiting => format!("the {} of {waiting} waiting payments {account} {class}", format::ordinal(position)),
    };
    match &place.block {
        // A rule has no end: the block is one of several in a row.
        Some(block) if block.wait.reason == WaitReason::AccountBlocked => {
            format!("{text}, blocked while the rule exists")
        }
        Some(block) => format!("{text}, blocked until {}", until_text(facts, block)),
        None => text,
    }
}

fn until_text(facts: &Facts, block: &FlowBlock) -> String {
    format::instant(later(facts.now, block.left), facts.now)
}
