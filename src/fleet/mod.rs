//! All workers together: the report of each, and the overview that is computed from them, as `/api/v1/overview` and
//! `status --json` show it.
//!
//! Pure functions: `worker::heartbeat` writes the reports, and `ops` and `status` gather the data of databases and
//! stores. For the same [`OverviewInput`] [`overview`] is the same everywhere. A figure whose source did not answer is
//! `null`, and a warning says why.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::backlog::ProviderCounts;
pub use self::backlog::by_provider;
use self::cutoff::{CutoffOverview, cutoff};
use self::estimate::{QuotaCounts, clear_time};
use self::outages::{BackendOutage, outages};
use self::pace::{ClearTimeOverview, LimitOverview, MissingSource, PaceOverview, limits, reopens_at};
pub use self::provider_status::ProviderState;
use self::provider_status::provider_status;
use self::report::problem_with_name;
use self::workers::{WorkerProcess, has_live_lane};
use crate::domain::limit::Rate;
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::time::EpochMs;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::pause_of_all::PauseOfAll;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::rejected::{COUNTED_MAX, RejectedCount};
use crate::ledger::settings::InvalidRow;
use crate::ledger::throttled::{Throttling, ThrottlingByProvider};
use crate::ledger::upkeep::ProviderReconciliation;
use crate::limiter::LimitStatus;

pub mod backlog;
pub mod cutoff;
pub mod estimate;
pub mod history;
pub mod outages;
pub mod pace;
pub mod provider_status;
pub mod report;
pub mod workers;

/// Job counts by provider.
pub type ReconciliationByProvider = BTreeMap<String, ProviderReconciliation>;

/// Usage of the providers' limits by quota.
pub type UsageByQuota = BTreeMap<ProviderName, Vec<LimitStatus>>;

/// The gathered data; a source that did not answer is empty, and named in `missing`.
#[derive(Clone, Debug, Default)]
pub struct OverviewInput {
    /// Milliseconds since the Unix epoch.
    pub at_ms: i64,
    pub version: String,
    /// Identity of the process that answers; empty when none does.
    pub worker: String,
    /// Rows as they are in the database.
    pub rows: Vec<ProviderRow>,
    /// Valid rows; for an invalid one the last valid version.
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    pub invalid_rows: Vec<InvalidRow>,
    pub workers: Vec<WorkerProcess>,
    /// By provider; `None`: the ledger could not be counted.
    pub reconciliation: Option<ReconciliationByProvider>,
    /// When that was counted, in milliseconds since the Unix epoch.
    pub counted_at_ms: Option<i64>,
    /// The usage of the limits at that moment; a quota that did not answer in time is left out.
    pub usage_at_count: UsageByQuota,
    /// Requests per second over the last minutes in which jobs waited, by provider, if those are enough for an
    /// estimate.
    pub recent_per_s: BTreeMap<String, f64>,
    /// Requests in each [`crate::domain::clear_time::SENT_STEP`] until now, the last step first, by provider. It ends where
    /// they are not known.
    pub sent_before: BTreeMap<String, Vec<f64>>,
    /// The part of each of these steps, 0 to 1, in which the lanes had a backlog and nothing disturbed them.
    pub judged_before: BTreeMap<String, Vec<f64>>,
    /// Messages ready in a lane's queue when the jobs were counted; a queue that did not answer is left out.
    pub depths: BTreeMap<String, u64>,
    /// Payments that no worker has recorded, by the snapshots until now.
    pub unrecorded: BTreeMap<String, u64>,
    /// Time since which the oldest payment waits, in milliseconds since the Unix epoch; `None`: the ledger did not
    /// answer.
    pub oldest_ms: Option<BTreeMap<String, i64>>,
    /// Requests that the providers refused with 429; `None`: the ledger did not answer.
    pub throttling: Option<ThrottlingByProvider>,
    /// Open rejected messages; `None`: the ledger did not answer.
    pub rejected: Option<Vec<RejectedCount>>,
    /// Messages of a newer format that wait in the ledger, by lane; `None`: the ledger did not answer.
    pub held: Option<BTreeMap<String, u64>>,
    /// For each paused provider: who paused it, when and why, as text.
    pub paused_by: BTreeMap<String, String>,
    /// The pause of all providers that is in force.
    pub pause_of_all: Option<PauseOfAll>,
    pub limit_usage: UsageByQuota,
    pub database_problem: Option<String>,
    pub backend_problems: Vec<String>,
    /// Names of the sources that did not answer.
    pub missing: Vec<&'static str>,
    /// Since when each of them has not answered, in milliseconds since the Unix epoch.
    pub missing_since_ms: BTreeMap<&'static str, i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Overview {
    pub at: String,
    pub version: String,
    /// Identity of the process that answers.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub worker: String,
    pub providers: Vec<ProviderOverview>,
    /// One per provider. `null`: there is no recent count of the jobs.
    pub reconciliation: Option<Vec<ProviderReconciliation>>,
    /// When the ledger was counted last: a large ledger is not counted for every request. `null`: never.
    #[serde(default)]
    pub counted_at: Option<String>,
    /// Messages that could not be a job and await a decision. `null`: the ledger did not answer.
    #[serde(default)]
    pub rejected: Option<RejectedOverview>,
    /// The pause of all providers; absent unless one is in force.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pause_of_all: Option<PauseOfAll>,
    pub warnings: Vec<String>,
    /// `database`, `queue` and `limiter`, if they did not answer.
    #[serde(default)]
    pub missing: Vec<String>,
    /// The backends that are unavailable, for some or all workers.
    #[serde(default)]
    pub outages: Vec<BackendOutage>,
}

/// The rejected messages that are open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RejectedOverview {
    pub messages: u64,
    /// There are more than are counted.
    pub is_at_least: bool,
    /// By provider; those without any are left out.
    pub providers: BTreeMap<String, u64>,
}

impl From<&Vec<RejectedCount>> for RejectedOverview {
    fn from(counts: &Vec<RejectedCount>) -> Self {
        let messages: u64 = counts.iter().map(|count| count.messages).sum();
        let providers = counts.iter().map(|count| (count.provider.clone(), count.messages)).collect();
        Self { messages: messages.min(COUNTED_MAX), is_at_least: messages > COUNTED_MAX, providers }
    }
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
    /// Problems of its row.
    pub problems: Vec<String>,
    /// A row is in force: the current one or, while that is invalid, the last valid one. Without any nothing is sent.
    #[serde(default)]
    pub has_valid_row: bool,
    /// Limits in force: those of the last valid row, if the row is invalid.
    pub limits: Vec<LimitOverview>,
    /// Requests per second over the last ten seconds, of all workers. `null`: the workers' reports cannot be read.
    pub rate_per_s: Option<f64>,
    /// Mean rate of the slowest limit.
    pub limit_per_s: Option<f64>,
    /// How fast limits and egress rate let requests start. `null`: no row is in force.
    #[serde(default)]
    pub pace: Option<PaceOverview>,
    /// Payments without a request in flight: `queued`, `backlog`, `delayed`, and those of `active` that are not
    /// `in_flight`.
    pub waiting: u64,
    /// Ledger or queue did not answer: `waiting` counts what the other knows, and the missing part is `null`.
    #[serde(default)]
    pub waiting_is_at_least: bool,
    /// Due, and in the lane's queue. `null`: the queue does not answer.
    pub queued: Option<u64>,
    /// Payments of `queued` that no worker has recorded yet.
    #[serde(default)]
    pub unrecorded: Option<u64>,
    /// This and the following fields are counted in the ledger. `null`: it does not answer.
    pub delayed: Option<u64>,
    /// They wait for a limit in the ledger alone, without a message.
    #[serde(default)]
    pub backlog: Option<u64>,
    pub active: Option<u64>,
    pub in_flight: Option<u64>,
    pub oldest_waiting_at: Option<String>,
    /// The queue does not report the age of its messages, or a source is missing: an older payment may exist.
    #[serde(default)]
    pub oldest_is_at_least: bool,
    /// When the backlog is cleared.
    pub clears: ClearTimeOverview,
    /// The instant of that; `null` without an estimate.
    #[serde(default)]
    pub clears_at: Option<String>,
    /// The next cut-off; absent if the row has none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cutoff: Option<CutoffOverview>,
    /// When it would be cleared if the provider were resumed now; absent unless it is paused.
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
    /// Requests of the last hour that the provider refused with 429, by the ledger. `null`: it does not answer.
    pub refused_by_provider: Option<u64>,
    /// When the last of them was recorded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_refused_at: Option<String>,
    /// Mean cost of the waiting payments of its quota, at least 1.
    #[serde(skip)]
    pub cost_per_job: f64,
}

impl OverviewInput {
    fn row(&self, name: &str) -> Option<&ProviderRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    fn invalid_row(&self, name: &str) -> Option<&InvalidRow> {
        self.invalid_rows.iter().find(|bad| bad.provider == name)
    }

    /// The 429s of a provider; none while the ledger does not answer.
    fn throttling_of(&self, name: &str) -> Throttling {
        self.throttling.as_ref().and_then(|all| all.get(name)).copied().unwrap_or_default()
    }

    /// The instant that lies this far ahead.
    pub fn instant_in(&self, ms: u64) -> String {
        DatabaseTime(EpochMs(self.at_ms).plus(Duration::from_millis(ms)).min(EpochMs::LAST).0).to_string()
    }

    /// The other providers that use the limits of this one's quota now.
    fn others_of_quota(&self, provider: &Provider) -> impl Iterator<Item = &Provider> {
        let (quota, name) = (provider.quota.clone(), provider.name.clone());
        let others = self.providers.values().filter(move |other| other.quota == quota && other.name != name);
        others.filter(|other| other.enabled && !other.paused).map(AsRef::as_ref)
    }
}

/// Computes the overview.
pub fn overview(evidence: &OverviewInput) -> Overview {
    let accounts = || evidence.reconciliation.iter().flatten();
    let mut unread: BTreeSet<&str> = accounts().map(|(provider, _)| provider.as_str()).collect();
    unread.extend(evidence.invalid_rows.iter().map(|bad| bad.provider.as_str()));
    unread.retain(|name| evidence.row(name).is_none());
    let names = evidence.rows.iter().map(|row| row.name.as_str()).chain(unread);
    Overview {
        at: DatabaseTime(evidence.at_ms).to_string(),
        version: evidence.version.clone(),
        worker: evidence.worker.clone(),
        providers: names.map(|name| provider_overview(evidence, name)).collect(),
        reconciliation: evidence.reconciliation.as_ref().map(|accounts| accounts.values().cloned().collect()),
        counted_at: evidence.counted_at_ms.map(|at_ms| DatabaseTime(at_ms).to_string()),
        rejected: evidence.rejected.as_ref().map(RejectedOverview::from),
        pause_of_all: evidence.pause_of_all.clone(),
        warnings: warnings(evidence),
        missing: evidence.missing.iter().map(|source| (*source).to_owned()).collect(),
        outages: outages(evidence),
    }
}

/// Whether workers use a row of the provider. A valid row that no worker can call, and that no valid one precedes, is
/// unused.
fn has_valid_row(evidence: &OverviewInput, name: &str) -> bool {
    let has_reports = evidence.workers.iter().any(WorkerProcess::is_live);
    // A command knows no last valid row, and a worker that has a lane uses one.
    if has_reports { has_lane(evidence, name) } else { evidence.providers.contains_key(name) }
}

/// Whether a live worker has a lane for the provider.
fn has_lane(evidence: &OverviewInput, name: &str) -> bool {
    evidence.workers.iter().any(|worker| has_live_lane(worker, name))
}

/// A provider; its row may be deleted or unreadable.
fn provider_overview(evidence: &OverviewInput, name: &str) -> ProviderOverview {
    let (row, bad) = (evidence.row(name), evidence.invalid_row(name));
    let provider = evidence.providers.get(name).filter(|_| row.is_some()).map(AsRef::as_ref);
    let status = provider_status(evidence, name, false);
    let paused = row.is_some_and(|row| row.paused) || provider.is_some_and(|provider| provider.paused);
    let enabled = row.map(|row| row.enabled).or(bad.map(|bad| bad.enabled)).unwrap_or_default();
    let quota = row.map_or_else(|| bad.map(|bad| bad.quota.clone()), |row| row.quota.clone());
    let with_pause = |paused: bool| provider.map(|provider| Provider { enabled, paused, ..provider.clone() });
    let clears_if = |paused: bool| Some(ClearTimeOverview::with_row(clear_time(evidence, &with_pause(paused)?), row?));
    let clears = clears_if(paused).unwrap_or(ClearTimeOverview::Unknown { missing: MissingSource::Row });
    let oldest = evidence.oldest_ms.as_ref().and_then(|oldest| oldest.get(name));
    let throttling = evidence.throttling_of(name);
    let counted = ProviderCounts::new(evidence, name);
    let (account, backlog) = (counted.reconciliation.as_deref(), counted.backlog);
    let in_state = |state: &str| account.map(|account| account.in_state(state));
    let hidden = backlog.unrecorded.is_none_or(|unrecorded| unrecorded > 0);
    ProviderOverview {
        name: name.to_owned(),
        quota: quota.unwrap_or_else(|| name.to_owned()),
        enabled,
        paused,
        mode: row.map(|row| row.mode.clone()).unwrap_or_default(),
        version: provider.map_or(0, |provider| provider.version),
        state: status.state,
        cause: status.cause,
        ends_in_ms: status.ends_in_ms,
        problems: bad.map(|bad| bad.problems.clone()).unwrap_or_default(),
        has_valid_row: (row.is_some() || bad.is_some()) && has_valid_row(evidence, name),
        limits: row.map(|row| limits(evidence, row)).unwrap_or_default(),
        rate_per_s: counted.rate_per_s(),
        limit_per_s: provider.and_then(Provider::tightest_rate).map(Rate::per_second),
        pace: provider.and_then(|provider| PaceOverview::new(provider, evidence.providers.values().map(AsRef::as_ref))),
        waiting: backlog.waiting,
        waiting_is_at_least: backlog.is_lower_bound,
        queued: backlog.queued,
        unrecorded: backlog.unrecorded,
        delayed: account.map(|account| account.delayed),
        backlog: account.map(|account| account.backlog),
        active: account.map(|account| account.active),
        in_flight: account.map(|account| account.in_flight),
        oldest_waiting_at: oldest.filter(|at| **at <= evidence.at_ms).map(|at| DatabaseTime(*at).to_string()),
        oldest_is_at_least: hidden || backlog.is_lower_bound || evidence.oldest_ms.is_none(),
        clears_at: clears.ms().map(|ms| evidence.instant_in(ms)),
        clears,
        cutoff: with_pause(paused).and_then(|provider| cutoff(evidence, &provider, row.and_then(reopens_at))),
        clears_if_resumed: clears_if(false).filter(|_| paused),
        review: in_state("review"),
        dead: in_state("dead"),
        succeeded: in_state("succeeded"),
        declined: in_state("declined"),
        expired: in_state("expired"),
        cancelled: in_state("cancelled"),
        unknown: in_state("unknown"),
        sending: in_state("sending"),
        refused_by_provider: evidence.throttling.as_ref().map(|_| throttling.requests),
        last_refused_at: (throttling.requests > 0).then(|| DatabaseTime(throttling.last_at_ms).to_string()),
        cost_per_job: provider.map_or(1.0, |provider| QuotaCounts::new(evidence, provider).cost_per_job()),
    }
}

/// Most workers that one warning names.
const ADDRESSES_MAX: usize = 3;

/// The warnings, one line each: what an operator should look at. A source that did not answer is always among them.
fn warnings(evidence: &OverviewInput) -> Vec<String> {
    let mut warnings = evidence.backend_problems.clone();
    warnings.extend(evidence.database_problem.iter().map(|problem| problem_with_name("database", problem)));
    for bad in &evidence.invalid_rows {
        let kept = has_valid_row(evidence, &bad.provider);
        let consequence = if kept { "the last valid row stays in force" } else { "nothing is sent" };
        let problem = bad.problems.first().map_or("the row is invalid", String::as_str);
        warnings.push(format!("row of {} is invalid, {consequence}: {problem}", bad.provider));
    }
    warnings.extend(unavailable_backends(evidence));
    for worker in &evidence.workers {
        let address = worker.address();
        match &worker.report {
            _ if !worker.is_live() => {
                let silent_s = worker.age.as_secs();
                warnings.push(format!("worker {address} is lost: it has not reported for {silent_s} s"));
            }
            None => warnings.push(format!("worker {address} reports in a format that this program does not read")),
            Some(report) => {
                warnings.extend(report.warnings.iter().map(|warning| format!("worker {address}: {warning}")));
            }
        }
    }
    let live = evidence.workers.iter().filter(|worker| worker.is_live());
    let mut versions: Vec<&str> = live.map(|worker| worker.version.as_str()).collect();
    versions.sort_unstable();
    versions.dedup();
    if versions.len() > 1 {
        warnings.push(format!("workers run different versions: {}", versions.join(", ")));
    }
    let held: Vec<String> =
        evidence.held.iter().flatten().map(|(lane, messages)| format!("{lane} {messages}")).collect();
    if !held.is_empty() {
        warnings.push(format!("messages of a newer format wait for a newer worker: {}", held.join(", ")));
    }
    warnings
}

/// One line for each problem with a backend, also with one that can be used, however many workers report it.
fn unavailable_backends(evidence: &OverviewInput) -> Vec<String> {
    let mut by_problem: Vec<(String, Vec<String>)> = Vec::new();
    let live = evidence.workers.iter().filter(|worker| worker.is_live());
    for (worker, report) in live.filter_map(|worker| Some((worker, worker.report.as_ref()?))) {
        for (name, backend) in report.backends.iter().filter(|(_, backend)| !backend.ok || backend.problem.is_some()) {
            let problem = problem_with_name(name, backend.problem.as_deref().unwrap_or("does not answer"));
            match by_problem.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, addresses)) => addresses.push(worker.address()),
                None => by_problem.push((problem, vec![worker.address()])),
            }
        }
    }
    let line = |(problem, addresses): (String, Vec<String>)| match addresses.as_slice() {
        [only] => format!("worker {only}: {problem}"),
        few if few.len() <= ADDRESSES_MAX => format!("workers {}: {problem}", few.join(", ")),
        many => format!("{} workers: {problem}", many.len()),
    };
    by_problem.into_iter().map(line).collect()
}

#[cfg(test)]
#[path = "overview_tests.rs"]
mod tests;
