//! The state of a provider with its cause, from its row and from the lanes of all live workers.
//!
//! If the workers differ, the most severe state is shown, with the number of workers that report it. [`ProviderState`]
//! has the order.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::report::{LaneReport, LaneState, PauseCause, ProcessReport, ReportedPause, problem_with_name};
use super::workers::WorkerProcess;

/// A limit wait that ends sooner is no state of the provider: a lane at its limit has one in every window.
const LIMIT_WAIT_MIN_MS: u64 = 2_000;

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
    BackendUnavailable,
    Misconfigured,
    BreakerOpen,
    Cold,
    PausedByProvider,
    Probing,
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
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    pub name: &'a str,
    /// `None`: the provider has jobs and no row; or, if there are problems, a row that cannot be read.
    pub row: Option<RowFlags>,
    /// Problems of an invalid row.
    pub problems: &'a [String],
    /// Whether a valid row is in force: the current one, or the last valid one.
    pub has_valid_row: bool,
    /// Who paused it, when and why; `None`: unknown.
    pub paused_by: Option<&'a str>,
    /// The limit of 0 that stops every charge, as text.
    pub closed_limit: Option<&'a str>,
    /// By name: `600/1m`.
    pub limits: &'a BTreeMap<String, String>,
    /// Whether jobs wait.
    pub waiting: bool,
    /// Why the database does not answer; then the workers' states are unknown.
    pub database_problem: Option<&'a str>,
}

/// Flags of the row itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFlags {
    pub enabled: bool,
    pub paused: bool,
    pub version: i64,
}

/// The state of one provider.
pub fn provider_status(input: &StatusInput<'_>, workers: &[WorkerProcess]) -> ProviderStatus {
    match input.row {
        None if input.problems.is_empty() => {
            return ProviderStatus::with_cause(
                ProviderState::Disabled,
                "it has no row any more: no worker takes its jobs",
            );
        }
        Some(RowFlags { enabled: false, .. }) => {
            return ProviderStatus::with_cause(
                ProviderState::Disabled,
                "its row is disabled: its queue keeps collecting",
            );
        }
        Some(RowFlags { paused: true, .. }) => {
            let paused_by = input.paused_by.unwrap_or("an operator paused it");
            let cause = format!("{paused_by}: its queue keeps collecting");
            return ProviderStatus::with_cause(ProviderState::Paused, cause);
        }
        None | Some(_) => {}
    }
    if let Some(problem) = input.database_problem {
        return ProviderStatus::with_cause(ProviderState::BackendUnavailable, format!("database: {problem}"));
    }
    if let Some(limit) = input.closed_limit {
        return ProviderStatus::with_cause(ProviderState::Closed, format!("limit {limit}: nothing is sent"));
    }
    let live: Vec<&WorkerProcess> = workers.iter().filter(|worker| worker.is_live()).collect();
    if live.is_empty() {
        return ProviderStatus::with_cause(ProviderState::NoWorker, no_worker_text(workers));
    }
    if !input.has_valid_row {
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
    let version = input.row.map_or(0, |row| row.version);
    // A worker that uses this row and has no lane for it could not start one.
    let knows = |report: &ProcessReport| report.ready && !report.draining && report.settings_version >= version;
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
        ProviderStatus::new(if busy { ProviderState::Running } else { ProviderState::Idle })
    })
}

fn pause_status(input: &StatusInput<'_>, lane: &LaneReport, held: &ReportedPause) -> Option<ProviderStatus> {
    let state = match held.by {
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
    let long = held.ends_in_ms.is_some_and(|ms| ms >= LIMIT_WAIT_MIN_MS);
    let limit = held.limit.as_ref().and_then(|name| Some((name, input.limits.get(name)?)));
    let other = || held.limit.as_ref().unwrap_or(&held.words).clone();
    let cause = limit.map_or_else(other, |(name, rate)| format!("limit {name} ({rate}) is used up"));
    (waits && long).then_some(ProviderStatus { state, cause: Some(cause), ends_in_ms: held.ends_in_ms })
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
