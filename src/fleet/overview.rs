//! The overview: everything that is known of all providers, as `/api/v1/overview` and `status --json` show it.
//!
//! Refuses to leave a number out in silence: what could not be asked is `null`, and a warning says why. Pure: the same
//! [`Evidence`] gives the same picture.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ProviderReconciliation;
use super::clears::{ClearTimeOverview, clear_time};
pub use super::limits::LimitOverview;
use super::limits::{limits_with_usage, valid_limits};
use super::provider_counts::ProviderCounts;
use super::provider_status::{ProviderState, ProviderStatus, RowFlags, StatusInput, provider_status};
use super::recent::lane_reports;
use super::warnings::warnings;
use super::workers::WorkerProcess;
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::limit::{Limit, Rate};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::InvalidRow;
use crate::limiter::LimitStatus;

/// Jobs by provider.
pub type ReconciliationByProvider = BTreeMap<String, ProviderReconciliation>;

/// What was gathered; a source that could not be asked is empty, and in `away`.
#[derive(Clone, Debug, Default)]
pub struct OverviewInput {
    /// Milliseconds since the Unix epoch.
    pub at_ms: i64,
    pub version: String,
    /// The process that answers; empty when none does.
    pub worker: String,
    /// As written.
    pub rows: Vec<ProviderRow>,
    /// As meant; for a bad row the last good one.
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub invalid_rows: Vec<InvalidRow>,
    pub workers: Vec<WorkerProcess>,
    /// By provider; `None`: the ledger could not be counted.
    pub reconciliation: Option<ReconciliationByProvider>,
    /// When that was counted, in milliseconds since the Unix epoch.
    pub counted_at_ms: Option<i64>,
    /// Requests per second over the last minutes in which jobs waited, by provider, where that is long enough to say.
    pub recent_per_s: BTreeMap<String, f64>,
    /// Messages ready in a lane's queue, when `accounts` were counted; a queue that did not answer is left out.
    pub depths: BTreeMap<String, u64>,
    /// Payments that no worker has recorded, as the snapshots until this one tell.
    pub unrecorded: BTreeMap<String, u64>,
    /// Since when the oldest payment waits, in milliseconds since the Unix epoch; `None`: the ledger did not say.
    pub oldest_ms: Option<BTreeMap<String, i64>>,
    /// The queue says since when its messages wait, so `oldest_ms` covers them.
    pub queue_reports_ages: bool,
    /// By provider that is paused: who paused it, when and why, in words.
    pub paused_by: BTreeMap<String, String>,
    /// By quota.
    pub limit_usage: BTreeMap<ProviderName, Vec<LimitStatus>>,
    pub database_problem: Option<String>,
    pub backend_problems: Vec<String>,
    /// Names of the sources that did not answer.
    pub missing: Vec<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Overview {
    pub at: String,
    pub version: String,
    /// The process that answers.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub worker: String,
    pub providers: Vec<ProviderOverview>,
    pub conservation: Vec<ProviderReconciliation>,
    /// When the ledger's payments were counted last: a large ledger is not counted at every look. `null`: not at all.
    #[serde(default)]
    pub counted_at: Option<String>,
    pub warnings: Vec<String>,
    /// `database`, `queue` and `limiter`, as far as they did not answer.
    #[serde(default)]
    pub missing: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ProviderOverview {
    pub name: String,
    pub quota: String,
    pub enabled: bool,
    pub paused: bool,
    pub mode: String,
    pub version: i64,
    pub state: ProviderState,
    pub cause: Option<String>,
    pub ends_in_ms: Option<u64>,
    /// What is wrong with its row.
    pub problems: Vec<String>,
    /// A row counts: the written one or, while that is bad, the last good one. Without any nothing is sent.
    #[serde(default)]
    pub has_good_row: bool,
    /// Those in force: of a bad row, the last good one's.
    pub limits: Vec<LimitOverview>,
    /// Requests begun in the last ten seconds, over ten; all workers. `null`: the workers' reports cannot be read.
    pub rate_per_s: Option<f64>,
    pub limit_per_s: Option<f64>,
    /// Payments without a request in flight: `queued`, `parked`, and those of `in_hand` that are not `in_flight`.
    pub waiting: u64,
    /// Ledger or queue did not answer: `waiting` is what the other knows, and its missing part is `null`.
    #[serde(default)]
    pub waiting_is_at_least: bool,
    /// Due, and in the lane's queue. `null`: the queue does not answer.
    pub queued: Option<u64>,
    /// Those of `queued` that no worker has taken yet, so that no ledger knows them.
    #[serde(default)]
    pub unrecorded: Option<u64>,
    /// This and what follows is counted in the ledger. `null`: it does not answer.
    pub parked: Option<u64>,
    pub in_hand: Option<u64>,
    pub in_flight: Option<u64>,
    pub oldest_waiting_at: Option<String>,
    /// The queue does not tell the age of its messages, or a source is missing: there may be an older one.
    #[serde(default)]
    pub oldest_is_at_least: bool,
    /// When what waits is cleared.
    pub clears: ClearTimeOverview,
    /// The same if it were resumed now; absent unless it is paused.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub clears_if_resumed: Option<ClearTimeOverview>,
    pub review: Option<u64>,
    pub dead: Option<u64>,
    pub succeeded: Option<u64>,
    pub declined: Option<u64>,
    pub expired: Option<u64>,
    pub cancelled: Option<u64>,
    pub unknown: Option<u64>,
    pub sending: Option<u64>,
    /// 429s to permits that we gave, since the processes started. `null`: the workers' reports cannot be read.
    pub refused_by_provider: Option<u64>,
}

/// The whole picture.
#[must_use]
pub fn overview(evidence: &OverviewInput) -> Overview {
    let mut providers: Vec<ProviderOverview> = evidence.rows.iter().map(|row| with_row(evidence, row)).collect();
    let accounts = || evidence.reconciliation.iter().flatten();
    let read: BTreeSet<&str> = evidence.rows.iter().map(|row| row.name.as_str()).collect();
    let mut unread: BTreeSet<&str> = accounts().map(|(provider, _)| provider.as_str()).collect();
    unread.extend(evidence.invalid_rows.iter().map(|bad| bad.provider.as_str()));
    providers.extend(unread.difference(&read).map(|name| without_row(evidence, name)));
    Overview {
        at: DatabaseTime(evidence.at_ms).to_string(),
        version: evidence.version.clone(),
        worker: evidence.worker.clone(),
        providers,
        conservation: accounts().map(|(_, account)| account.clone()).collect(),
        counted_at: evidence.counted_at_ms.map(|at_ms| DatabaseTime(at_ms).to_string()),
        warnings: warnings(evidence),
        missing: evidence.missing.iter().map(|source| (*source).to_owned()).collect(),
    }
}

fn with_row(evidence: &OverviewInput, row: &ProviderRow) -> ProviderOverview {
    let meant = evidence.providers.get(row.name.as_str());
    let bad = evidence.invalid_rows.iter().find(|bad| bad.provider == row.name);
    let counted = ProviderCounts::new(evidence, &row.name);
    let version = meant.map_or(0, |provider| provider.version);
    let used = meant.and_then(|provider| evidence.limit_usage.get(&provider.quota));
    let good = meant.filter(|_| bad.is_some()).map(|provider| valid_limits(provider));
    let limits = limits_with_usage(row, good, used.map(Vec::as_slice).unwrap_or_default());
    let problems = bad.map_or(&[][..], |bad| &bad.problems[..]);
    let paused = row.paused || meant.is_some_and(|provider| provider.paused);
    let clears_if = |paused: bool| {
        meant.map(|provider| {
            clear_time(evidence, &Provider { enabled: row.enabled, paused, ..provider.as_ref().clone() })
        })
    };
    let clears = clears_if(paused).unwrap_or(ClearTime::Unknown(MissingInput::Row));
    ProviderOverview {
        quota: row.quota.clone().unwrap_or_else(|| row.name.clone()),
        enabled: row.enabled,
        paused,
        mode: row.mode.clone(),
        version,
        problems: problems.to_vec(),
        has_good_row: has_valid_row(evidence, &row.name),
        limits,
        limit_per_s: meant.and_then(|provider| provider.tightest_rate()).map(Rate::per_second),
        clears: clears.into(),
        clears_if_resumed: clears_if(false).filter(|_| paused).map(ClearTimeOverview::from),
        ..counts(&row.name, &counted, status_of_row(evidence, &row.name, false))
    }
}

/// What a provider with a row does. `unheld`: what it would do if its row were valid, enabled, not
/// paused and without a closed limit.
pub(super) fn status_of_row(evidence: &OverviewInput, name: &str, unheld: bool) -> ProviderStatus {
    let row = evidence.rows.iter().find(|row| row.name == name);
    let meant = evidence.providers.get(name);
    let bad = evidence.invalid_rows.iter().find(|bad| bad.provider == name);
    let used =
        meant.and_then(|provider| evidence.limit_usage.get(&provider.quota)).map(Vec::as_slice).unwrap_or_default();
    let good = meant.filter(|_| bad.is_some()).map(|provider| valid_limits(provider));
    let limits = row.map(|row| limits_with_usage(row, good, used)).unwrap_or_default();
    let in_words: BTreeMap<String, String> =
        limits.iter().map(|limit| (limit.name.clone(), limit.rate_in_words())).collect();
    let closed = meant.and_then(|provider| {
        let closed = |limit: &&Limit| limit.applies_to_every_charge() && limit.rate.max_requests() == 0;
        provider.limits.iter().find(closed).map(|limit| format!("{} ({})", limit.name, limit.rate))
    });
    let version = meant.map_or(0, |provider| provider.version);
    let paused = |row: &ProviderRow| row.paused || meant.is_some_and(|provider| provider.paused);
    let says = |row: &ProviderRow| RowFlags { enabled: unheld || row.enabled, paused: !unheld && paused(row), version };
    let subject = StatusInput {
        name,
        row: row.map(says),
        problems: bad.map_or(&[][..], |bad| &bad.problems[..]),
        has_valid_row: unheld || meant.is_some(),
        paused_by: evidence.paused_by.get(name).map(String::as_str),
        closed_limit: closed.as_deref().filter(|_| !unheld),
        limits: &in_words,
        waiting: ProviderCounts::new(evidence, name).waiting() > 0,
        database_problem: evidence.database_problem.as_deref(),
    };
    provider_status(&subject, &evidence.workers)
}

/// Whether workers go by a row of it. One that can be meant and that no worker could ever call has no good one before it.
pub(super) fn has_valid_row(evidence: &OverviewInput, name: &str) -> bool {
    let nobody_says = !evidence.workers.iter().any(WorkerProcess::is_live);
    let used = nobody_says || lane_reports(&evidence.workers, name).any(|(worker, _)| worker.is_live());
    used && evidence.providers.contains_key(name)
}

/// It has none any more; or what stands in it cannot be read.
fn without_row(evidence: &OverviewInput, name: &str) -> ProviderOverview {
    let (counted, limits) = (ProviderCounts::new(evidence, name), BTreeMap::new());
    let bad = evidence.invalid_rows.iter().find(|bad| bad.provider == name);
    let subject = StatusInput {
        name,
        row: None,
        problems: bad.map_or(&[][..], |bad| &bad.problems[..]),
        has_valid_row: evidence.providers.contains_key(name),
        paused_by: None,
        closed_limit: None,
        limits: &limits,
        waiting: counted.waiting() > 0,
        database_problem: None,
    };
    let told = counts(name, &counted, provider_status(&subject, &evidence.workers));
    match bad {
        None => told,
        Some(bad) => ProviderOverview {
            quota: bad.quota.clone(),
            enabled: bad.enabled,
            problems: bad.problems.clone(),
            has_good_row: has_valid_row(evidence, name),
            ..told
        },
    }
}

/// What does not depend on a row.
fn counts(name: &str, counted: &ProviderCounts<'_>, told: ProviderStatus) -> ProviderOverview {
    let evidence = counted.input;
    let oldest =
        evidence.oldest_ms.as_ref().and_then(|oldest| oldest.get(name)).filter(|at_ms| **at_ms <= evidence.at_ms);
    let refused = lane_reports(&evidence.workers, name).map(|(_, lane)| lane.throttled_total).sum();
    let account = counted.reconciliation.as_deref();
    let backlog = counted.backlog;
    let hidden = backlog.unrecorded.is_none_or(|unrecorded| unrecorded > 0) && !evidence.queue_reports_ages;
    ProviderOverview {
        name: name.to_owned(),
        quota: name.to_owned(),
        enabled: false,
        paused: false,
        mode: String::new(),
        version: 0,
        state: told.state,
        cause: told.cause,
        ends_in_ms: told.ends_in_ms,
        problems: Vec::new(),
        has_good_row: false,
        limits: Vec::new(),
        rate_per_s: counted.rate_per_s(),
        limit_per_s: None,
        waiting: backlog.waiting,
        waiting_is_at_least: backlog.is_lower_bound,
        queued: backlog.queued,
        unrecorded: backlog.unrecorded,
        parked: account.map(|account| account.parked),
        in_hand: account.map(|account| account.in_hand),
        in_flight: account.map(|account| account.in_flight),
        oldest_waiting_at: oldest.map(|at_ms| DatabaseTime(*at_ms).to_string()),
        oldest_is_at_least: hidden || backlog.is_lower_bound || evidence.oldest_ms.is_none(),
        clears: ClearTime::Unknown(MissingInput::Row).into(),
        clears_if_resumed: None,
        review: counted.in_state("review"),
        dead: counted.in_state("dead"),
        succeeded: counted.in_state("succeeded"),
        declined: counted.in_state("declined"),
        expired: counted.in_state("expired"),
        cancelled: counted.in_state("cancelled"),
        unknown: counted.in_state("unknown"),
        sending: counted.in_state("sending"),
        refused_by_provider: evidence.database_problem.is_none().then_some(refused),
    }
}

#[cfg(test)]
#[path = "overview_tests.rs"]
mod tests;
