//! The state of a provider with its cause, from its row and from the lanes of all live workers.
//!
//! If the workers differ, the most severe state is shown, with the number of workers that report it. [`ProviderState`]
//! has the order.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::backlog::ProviderCounts;
use super::pace::{LimitOverview, limits};
use super::report::{LaneReport, LaneState, PauseCause, ProcessReport, ReportedPause, problem_with_name};
use super::workers::WorkerProcess;
use super::{OverviewInput, has_lane};
use crate::domain::format::count;
use crate::domain::limit::{Limit, Rule};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::unknown_limits;
use crate::ledger::throttled::Throttling;

/// A limit wait that ends sooner is no state of the provider: a lane at its limit has one in every window.
const LIMIT_WAIT_MIN_MS: u64 = 2_000;
/// Most blocked accounts that a cause names.
const ACCOUNTS_MAX: usize = 3;

/// The most severe state comes first: earlier states hide later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProviderState {
    Disabled,
    Paused,
    /// One of its limits is 0.
    Closed,
    NoWorker,
    /// All workers with its lane are draining.
    Draining,
    /// The ledger may lack payments that were charged: no charge starts until an operator releases the lane.
    Held,
    BackendUnavailable,
    Misconfigured,
    BreakerOpen,
    Cold,
    /// It refuses requests with 429 again and again: its own limit is lower than that of the row.
    Throttled,
    PausedByProvider,
    Probing,
    /// Rules block the accounts of all payments that wait.
    Blocked,
    WaitingForLimit,
    Running,
    Idle,
}

/// The name in JSON and tables.
impl fmt::Display for ProviderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The state of a provider, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderStatus {
    pub state: ProviderState,
    pub cause: Option<String>,
    pub ends_in_ms: Option<u64>,
}

impl ProviderStatus {
    fn new(state: ProviderState) -> Self {
        Self { state, cause: None, ends_in_ms: None }
    }

    fn with_cause(state: ProviderState, cause: impl Into<String>) -> Self {
        Self { state, cause: Some(cause.into()), ends_in_ms: None }
    }
}

/// What is known about one provider, apart from its lanes.
struct StatusInput<'a> {
    name: &'a str,
    /// Problems of the row, or of an invalid row that may hold limits of its quota.
    problems: Vec<String>,
    /// Version of the row in force; 0: there is no row.
    version: i64,
    limits: Vec<LimitOverview>,
    /// Whether jobs wait.
    waiting: bool,
}

/// The state of one provider. `unheld`: the state that it would have with a valid and enabled row, without a pause and
/// without a closed limit.
pub(super) fn provider_status(evidence: &OverviewInput, name: &str, unheld: bool) -> ProviderStatus {
    let (row, provider) = (evidence.row(name), evidence.providers.get(name));
    let input = StatusInput {
        name,
        problems: row_problems(evidence, name),
        version: row.and(provider).map_or(0, |provider| provider.version),
        limits: row.map(|row| limits(evidence, row)).unwrap_or_default(),
        waiting: ProviderCounts::new(evidence, name).waiting() > 0,
    };
    let held = match row {
        Some(row) => held_by_row(evidence, row, unheld),
        None => input.problems.is_empty().then(|| {
            let cause = "it has no row any more: no worker takes its jobs";
            ProviderStatus::with_cause(ProviderState::Disabled, cause)
        }),
    };
    held.unwrap_or_else(|| {
        let has_valid_row = unheld || provider.is_some() || has_lane(evidence, name);
        let status = status_of_workers(&input, &evidence.workers, has_valid_row);
        throttled_status(evidence, name, &status).or_else(|| blocked_status(evidence, name, &status)).unwrap_or(status)
    })
}

/// While the provider refuses requests again and again: with the wait that it asked for, if one is in force.
fn throttled_status(evidence: &OverviewInput, name: &str, status: &ProviderStatus) -> Option<ProviderStatus> {
    let Throttling { requests, keep_coming, is_repeated, passed_per_s, .. } = evidence.throttling_of(name);
    let sends = matches!(
        status.state,
        ProviderState::PausedByProvider | ProviderState::WaitingForLimit | ProviderState::Running
    );
    if !(sends && keep_coming && is_repeated) {
        return None;
    }
    let requests = count(requests, "request");
    let passed = passed_per_s.map(|per_s| format!("; {per_s}/s get through")).unwrap_or_default();
    let cause =
        format!("the provider refused {requests} with 429 in the last hour{passed}: it allows less than its row");
    Some(ProviderStatus { cause: Some(cause), state: ProviderState::Throttled, ..status.clone() })
}

/// While rules block the accounts of all payments that wait.
fn blocked_status(evidence: &OverviewInput, name: &str, status: &ProviderStatus) -> Option<ProviderStatus> {
    let sends = matches!(status.state, ProviderState::WaitingForLimit | ProviderState::Running | ProviderState::Idle);
    let provider = evidence.providers.get(name).filter(|_| sends)?;
    let counts = ProviderCounts::new(evidence, name);
    let blocked = counts.reconciliation.as_ref().map_or(0, |account| account.account_blocked);
    if blocked == 0 || !counts.is_blocked(provider) {
        return None;
    }
    let rules = provider.account_rules.iter().filter(|rule| rule.rule == Rule::Blocked);
    let names: Vec<&str> = rules.map(|rule| rule.account.as_str()).collect();
    let more = names.len().saturating_sub(ACCOUNTS_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let names = names.iter().take(ACCOUNTS_MAX).copied().collect::<Vec<_>>().join(", ");
    let cause = format!("a rule blocks the account of each waiting payment (blocked: {names}{more})");
    Some(ProviderStatus::with_cause(ProviderState::Blocked, cause))
}

fn row_problems(evidence: &OverviewInput, name: &str) -> Vec<String> {
    let Some(bad) = evidence.invalid_row(name) else {
        let quota =
            evidence.providers.get(name).filter(|_| evidence.row(name).is_some()).map(|provider| &provider.quota);
        let is_kept = |other: &str| evidence.providers.contains_key(other);
        return quota.map_or_else(Vec::new, |quota| unknown_limits(&evidence.invalid_rows, quota, is_kept));
    };
    bad.problems.clone()
}

/// The state of a provider whose row holds its jobs, whatever the workers report, or whose workers are unknown.
fn held_by_row(evidence: &OverviewInput, row: &ProviderRow, unheld: bool) -> Option<ProviderStatus> {
    let provider = evidence.providers.get(row.name.as_str());
    if !unheld && !row.enabled {
        let cause = "its row is disabled: its queue keeps collecting";
        return Some(ProviderStatus::with_cause(ProviderState::Disabled, cause));
    }
    if !unheld && (row.paused || provider.is_some_and(|provider| provider.paused)) {
        let paused_by = evidence.paused_by.get(&row.name).map_or("an operator paused it", String::as_str);
        let cause = format!("{paused_by}: its payments are recorded and wait");
        return Some(ProviderStatus::with_cause(ProviderState::Paused, cause));
    }
    if let Some(problem) = &evidence.database_problem {
        return Some(ProviderStatus::with_cause(
            ProviderState::BackendUnavailable,
            problem_with_name("database", problem),
        ));
    }
    let closed = |limit: &&Limit| limit.applies_to_every_charge() && limit.rate.max_requests() == 0;
    let closed = provider.filter(|_| !unheld)?.limits.iter().find(closed)?;
    let returns = row.limits.iter().find(|limit| limit.name == closed.name).and_then(|limit| limit.returns);
    let until = returns.map(|returns| format!(" {returns}")).unwrap_or_default();
    let cause = format!("limit \"{}\" is {}{until}: nothing is sent", closed.name, closed.rate);
    Some(ProviderStatus::with_cause(ProviderState::Closed, cause))
}

/// The state by the workers' reports. `has_valid_row`: a valid row is in force, the current one or the last valid one.
fn status_of_workers(input: &StatusInput<'_>, workers: &[WorkerProcess], has_valid_row: bool) -> ProviderStatus {
    let live: Vec<&WorkerProcess> = workers.iter().filter(|worker| worker.is_live()).collect();
    if live.is_empty() {
        return ProviderStatus::with_cause(ProviderState::NoWorker, no_worker_text(workers));
    }
    if !has_valid_row {
        let problem = input.problems.first().map_or("its row is invalid", String::as_str);
        return ProviderStatus::with_cause(ProviderState::Misconfigured, format!("no lane: {problem}"));
    }
    let reports = live.iter().filter_map(|worker| worker.report.as_ref());
    let lanes = reports.clone().filter_map(|report| report.lanes.get(input.name).map(|lane| (report, lane)));
    // A draining lane says nothing about those that stay.
    let (draining, staying): (Vec<_>, Vec<_>) = lanes.partition(|(report, _)| report.draining);
    if staying.is_empty() && !draining.is_empty() {
        return ProviderStatus::with_cause(
            ProviderState::Draining,
            "all of its workers are draining: they finish their active jobs and exit",
        );
    }
    let lanes = staying.into_iter();
    // A worker that is cut off from a backend, or waits for a slow one, has its own warning. While others work, it says
    // nothing about the provider.
    let (cut_off, well): (Vec<_>, Vec<_>) = lanes.partition(|(report, lane)| lacks_backend(report, lane));
    let relevant = if well.is_empty() { cut_off } else { well };
    let statuses: Vec<ProviderStatus> =
        relevant.into_iter().map(|(report, lane)| lane_status(input, report, lane)).collect();
    if statuses.is_empty() {
        return status_without_lane(input, reports);
    }
    most_severe(&statuses)
}

fn no_worker_text(workers: &[WorkerProcess]) -> String {
    let last = workers.iter().min_by_key(|worker| worker.age);
    match last {
        None => "no `sluicegate run` reports: nothing is sent".to_owned(),
        Some(worker) => {
            let (address, silent_s) = (worker.address(), worker.age.as_secs());
            format!("no worker reports; the last was {address}, {silent_s} s ago: nothing is sent")
        }
    }
}

/// State of a provider for which live workers have no lane.
fn status_without_lane<'a>(
    input: &StatusInput<'_>,
    mut reports: impl Iterator<Item = &'a ProcessReport>,
) -> ProviderStatus {
    // A worker that uses this row and has no lane for it could not start one.
    let knows = |report: &ProcessReport| report.ready && !report.draining && report.settings_version >= input.version;
    let known = reports.any(knows);
    if let Some(problem) = input.problems.first().filter(|_| known) {
        return ProviderStatus::with_cause(ProviderState::Misconfigured, format!("no lane: {problem}"));
    }
    if known {
        return ProviderStatus::with_cause(
            ProviderState::Misconfigured,
            "no worker could start its lane: see the workers' logs",
        );
    }
    ProviderStatus::with_cause(ProviderState::NoWorker, "workers are starting or stopping, or loading settings")
}

fn lacks_backend(report: &ProcessReport, lane: &LaneReport) -> bool {
    report.backends.values().any(|backend| !backend.ok) || lane.pauses().any(|pause| pause.by == PauseCause::Backend)
}

fn lane_status(input: &StatusInput<'_>, report: &ProcessReport, lane: &LaneReport) -> ProviderStatus {
    for name in ["queue", "limiter", "database"] {
        if let Some(backend) = report.backends.get(name).filter(|backend| !backend.ok) {
            let problem = backend.problem.as_deref().unwrap_or("does not answer");
            return ProviderStatus::with_cause(ProviderState::BackendUnavailable, problem_with_name(name, problem));
        }
    }
    let is_probing = lane.status.does == LaneState::Probing;
    let probing = is_probing.then(|| {
        let cause = lane.status.pause.as_ref().map_or("the provider was down", |pause| pause.words.as_str());
        ProviderStatus::with_cause(
            ProviderState::Probing,
            format!("testing the provider with one payment at a time; {cause}"),
        )
    });
    // A probing lane reports the breaker as its pause; its cause is in the text already.
    let held = lane.pauses().filter(|pause| !(is_probing && pause.by == PauseCause::Breaker));
    let statuses = held.filter_map(|held| pause_status(input, lane, held)).chain(probing);
    statuses.min_by_key(|status| status.state).unwrap_or_else(|| {
        let busy = input.waiting || lane.active > 0 || lane.sent_10s > 0;
        let state = if busy { ProviderState::Running } else { ProviderState::Idle };
        let aside = || lane.refused.as_ref().or_else(|| lane.costly.as_ref().filter(|costly| is_long(costly)));
        match aside().filter(|_| input.waiting) {
            Some(aside) => ProviderStatus { state, cause: Some(aside.words.clone()), ends_in_ms: aside.ends_in_ms },
            // The lane takes and sends payments, and publishes nothing.
            None => {
                ProviderStatus { cause: queue_problem(report).or_else(|| full(lane)), ..ProviderStatus::new(state) }
            }
        }
    })
}

/// What a queue that answers does not do.
fn queue_problem(report: &ProcessReport) -> Option<String> {
    report.backends.get("queue").and_then(|queue| queue.problem.clone())
}

/// Why the lane takes no more messages.
fn full(lane: &LaneReport) -> Option<String> {
    let pause = lane.status.pause.as_ref().filter(|_| lane.status.does == LaneState::Full)?;
    Some(pause.words.clone())
}

fn pause_status(input: &StatusInput<'_>, lane: &LaneReport, held: &ReportedPause) -> Option<ProviderStatus> {
    let state = match held.by {
        PauseCause::Held => ProviderState::Held,
        PauseCause::Backend => ProviderState::BackendUnavailable,
        PauseCause::Setup => ProviderState::Misconfigured,
        PauseCause::Breaker => ProviderState::BreakerOpen,
        PauseCause::Cold => ProviderState::Cold,
        PauseCause::Provider => ProviderState::PausedByProvider,
        PauseCause::Limit => ProviderState::WaitingForLimit,
        PauseCause::Other => return None,
    };
    if state != ProviderState::WaitingForLimit {
        // A backend's end is not known: the time is only that of the next try.
        let ends_in_ms = held.ends_in_ms.filter(|_| state != ProviderState::BackendUnavailable);
        return Some(ProviderStatus { state, cause: Some(held.words.clone()), ends_in_ms });
    }
    let waits = lane.gate_waiting > 0 || input.waiting;
    let limit = held.limit.as_ref().and_then(|name| input.limits.iter().find(|limit| limit.name == *name));
    let other = || held.limit.as_ref().unwrap_or(&held.words).clone();
    let cause =
        limit.map_or_else(other, |limit| format!("limit {} ({}) is used up", limit.name, limit.rate_in_words()));
    (waits && is_long(held)).then_some(ProviderStatus { state, cause: Some(cause), ends_in_ms: held.ends_in_ms })
}

/// Whether a wait for a limit is worth a word: limits are waited for in every window.
fn is_long(held: &ReportedPause) -> bool {
    held.ends_in_ms.is_some_and(|ms| ms >= LIMIT_WAIT_MIN_MS)
}

fn most_severe(statuses: &[ProviderStatus]) -> ProviderStatus {
    let Some(state) = statuses.iter().map(|status| status.state).min() else {
        return ProviderStatus::new(ProviderState::NoWorker);
    };
    // If one lane is idle while another runs, the provider runs.
    let alike: Vec<&ProviderStatus> = statuses.iter().filter(|status| status.state == state).collect();
    let ends_in_ms = alike.iter().filter_map(|status| status.ends_in_ms).min();
    let cause = alike.iter().find_map(|status| status.cause.clone());
    let cause = cause.map(|cause| match alike.len() == statuses.len() {
        true => cause,
        false => format!("{cause} (reported by {} of {} workers)", alike.len(), statuses.len()),
    });
    ProviderStatus { state, cause, ends_in_ms }
}
