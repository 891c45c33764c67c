//! What a provider does, in one word and its cause: from its row, and from what the lanes of all live workers say.
//!
//! Refuses to average: the gravest thing that any worker says is told, with how many workers say it. The order is that of
//! [`State`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::report::{LaneReport, LaneState, PauseCause, ProcessReport, ReportedPause, problem_with_name};
use super::workers::WorkerProcess;

/// A refusal that ends sooner is no state of the provider: a lane at its limit meets one in every window.
const LIMIT_WAIT_MIN_MS: u64 = 2_000;

/// The gravest first: what comes earlier hides what comes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProviderState {
    Disabled,
    Paused,
    /// One of its limits is 0.
    Closed,
    NoWorker,
    /// All workers that have its lane take no more and end.
    Draining,
    EngineAway,
    Misconfigured,
    BreakerOpen,
    Cold,
    PausedByProvider,
    Probing,
    WaitingForLimit,
    Running,
    Idle,
}

impl ProviderState {
    /// The name in JSON and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Paused => "paused",
            Self::Closed => "closed",
            Self::NoWorker => "no_worker",
            Self::Draining => "draining",
            Self::EngineAway => "engine_away",
            Self::Misconfigured => "misconfigured",
            Self::BreakerOpen => "breaker_open",
            Self::Cold => "cold",
            Self::PausedByProvider => "paused_by_provider",
            Self::Probing => "probing",
            Self::WaitingForLimit => "waiting_for_limit",
            Self::Running => "running",
            Self::Idle => "idle",
        }
    }
}

/// What a provider does, and why.
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

/// What is known of one provider, beside its lanes.
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    pub name: &'a str,
    /// `None`: the provider has jobs, and no row; or, where there are problems, one that cannot be read.
    pub row: Option<RowFlags>,
    /// Of a row that cannot be meant.
    pub problems: &'a [String],
    /// A row that can be meant is in force: this one, or the last good one.
    pub has_valid_row: bool,
    /// Who paused it, when and why; `None`: nobody knows.
    pub paused_by: Option<&'a str>,
    /// The limit of 0 that holds every charge, in words.
    pub closed_limit: Option<&'a str>,
    /// By name: `600/1m`.
    pub limits: &'a BTreeMap<String, String>,
    /// Jobs wait somewhere.
    pub waiting: bool,
    /// Why the database cannot be asked; then nobody knows what workers do.
    pub database_problem: Option<&'a str>,
}

/// What the row itself says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFlags {
    pub enabled: bool,
    pub paused: bool,
    pub version: i64,
}

pub fn provider_status(of: &StatusInput<'_>, workers: &[WorkerProcess]) -> ProviderStatus {
    match of.row {
        None if of.problems.is_empty() => {
            return ProviderStatus::with_cause(
                ProviderState::Disabled,
                "it has no row any more: nobody takes its jobs",
            );
        }
        Some(RowFlags { enabled: false, .. }) => {
            return ProviderStatus::with_cause(
                ProviderState::Disabled,
                "its row is disabled: its queue keeps collecting",
            );
        }
        Some(RowFlags { paused: true, .. }) => {
            let who = of.paused_by.unwrap_or("somebody paused it");
            return ProviderStatus::with_cause(ProviderState::Paused, format!("{who}: its queue keeps collecting"));
        }
        None | Some(_) => {}
    }
    if let Some(problem) = of.database_problem {
        return ProviderStatus::with_cause(ProviderState::EngineAway, format!("database: {problem}"));
    }
    if let Some(limit) = of.closed_limit {
        return ProviderStatus::with_cause(ProviderState::Closed, format!("limit {limit} is closed: nothing is sent"));
    }
    let live: Vec<&WorkerProcess> = workers.iter().filter(|worker| worker.is_live()).collect();
    if live.is_empty() {
        return ProviderStatus::with_cause(ProviderState::NoWorker, no_worker_text(workers));
    }
    if !of.has_valid_row {
        let problem = of.problems.first().map_or("its row cannot be meant", String::as_str);
        return ProviderStatus::with_cause(ProviderState::Misconfigured, format!("no lane: {problem}"));
    }
    let reports = live.iter().filter_map(|worker| worker.report.as_ref());
    let lanes = reports.clone().filter_map(|report| report.lanes.get(of.name).map(|lane| (report, lane)));
    // A lane whose process ends says nothing of those that stay.
    let (draining, staying): (Vec<_>, Vec<_>) = lanes.partition(|(report, _)| report.draining);
    if staying.is_empty() && !draining.is_empty() {
        return ProviderStatus::with_cause(
            ProviderState::Draining,
            "all of its workers drain: they finish what they have, and end",
        );
    }
    let lanes = staying.into_iter();
    // A worker that is cut off from an engine, or waits for a slow one, is warned of; where others go on, it says nothing of
    // the provider.
    let (cut_off, well): (Vec<_>, Vec<_>) = lanes.partition(|(report, lane)| lacks_backend(report, lane));
    let telling = if well.is_empty() { cut_off } else { well };
    let said: Vec<ProviderStatus> = telling.into_iter().map(|(report, lane)| lane_status(of, report, lane)).collect();
    if said.is_empty() {
        return status_without_lane(of, reports);
    }
    most_severe(&said)
}

fn no_worker_text(workers: &[WorkerProcess]) -> String {
    let last = workers.iter().min_by_key(|worker| worker.age);
    match last {
        None => "no `sluicegate run` reports: nothing is sent".to_owned(),
        Some(worker) => {
            let (place, silent_s) = (worker.address(), worker.age.as_secs());
            format!("no worker reports; the last was {place}, {silent_s} s ago: nothing is sent")
        }
    }
}

/// Workers are there, and none has a lane for it.
fn status_without_lane<'a>(
    of: &StatusInput<'_>,
    mut reports: impl Iterator<Item = &'a ProcessReport>,
) -> ProviderStatus {
    let version = of.row.map_or(0, |row| row.version);
    // One that goes by this row and still has no lane could not make one.
    let knows = |report: &ProcessReport| report.ready && !report.draining && report.settings_version >= version;
    let known = reports.any(knows);
    if let Some(problem) = of.problems.first().filter(|_| known) {
        return ProviderStatus::with_cause(ProviderState::Misconfigured, format!("no lane: {problem}"));
    }
    if known {
        return ProviderStatus::with_cause(
            ProviderState::Misconfigured,
            "no worker can make a lane of its row: its log says why",
        );
    }
    ProviderStatus::with_cause(
        ProviderState::NoWorker,
        "its lane begins or ends: the workers start, drain or load settings",
    )
}

fn lacks_backend(report: &ProcessReport, lane: &LaneReport) -> bool {
    let held = [lane.pause.as_ref(), lane.gate.as_ref()].into_iter().flatten();
    report.engines.values().any(|engine| !engine.ok) || held.into_iter().any(|held| held.by == PauseCause::Engine)
}

fn lane_status(of: &StatusInput<'_>, report: &ProcessReport, lane: &LaneReport) -> ProviderStatus {
    for name in ["queue", "limiter", "database"] {
        if let Some(engine) = report.engines.get(name).filter(|engine| !engine.ok) {
            let problem = engine.problem.as_deref().unwrap_or("does not answer");
            return ProviderStatus::with_cause(ProviderState::EngineAway, problem_with_name(name, problem));
        }
    }
    let held = [lane.pause.as_ref(), lane.gate.as_ref()].into_iter().flatten();
    let probing = (lane.does == LaneState::Probing).then(|| {
        let cause = lane.pause.as_ref().map_or("the provider was down", |pause| pause.words.as_str());
        ProviderStatus::with_cause(
            ProviderState::Probing,
            format!("one job at a time finds out whether it is up again; {cause}"),
        )
    });
    // A lane that probes names what it found as its pause; that is told already.
    let held = held.filter(|held| !(lane.does == LaneState::Probing && held.by == PauseCause::Breaker));
    let gravest = held.filter_map(|held| pause_status(of, lane, held)).chain(probing).min_by_key(|said| said.state);
    gravest.unwrap_or_else(|| {
        let busy = of.waiting || lane.in_hand > 0 || lane.sent_10s > 0;
        ProviderStatus::new(if busy { ProviderState::Running } else { ProviderState::Idle })
    })
}

fn pause_status(of: &StatusInput<'_>, lane: &LaneReport, held: &ReportedPause) -> Option<ProviderStatus> {
    let state = match held.by {
        PauseCause::Engine => ProviderState::EngineAway,
        PauseCause::Setup => ProviderState::Misconfigured,
        PauseCause::Breaker => ProviderState::BreakerOpen,
        PauseCause::Cold => ProviderState::Cold,
        PauseCause::Provider => ProviderState::PausedByProvider,
        PauseCause::Limit => ProviderState::WaitingForLimit,
        PauseCause::Other => return None,
    };
    if state != ProviderState::WaitingForLimit {
        return Some(ProviderStatus { state, cause: Some(held.words.clone()), ends_in_ms: held.ends_in_ms });
    }
    let waits = lane.gate_waiting > 0 || of.waiting;
    let long = held.ends_in_ms.is_some_and(|ms| ms >= LIMIT_WAIT_MIN_MS);
    let cause = match of.limits.get(&held.words) {
        Some(rate) => format!("limit {} ({rate}) is used up", held.words),
        None => held.words.clone(),
    };
    (waits && long).then_some(ProviderStatus { state, cause: Some(cause), ends_in_ms: held.ends_in_ms })
}

fn most_severe(said: &[ProviderStatus]) -> ProviderStatus {
    let Some(state) = said.iter().map(|standing| standing.state).min() else {
        return ProviderStatus::new(ProviderState::NoWorker);
    };
    // One lane that is idle while another runs is a lane that runs.
    let alike: Vec<&ProviderStatus> = said.iter().filter(|standing| standing.state == state).collect();
    let ends_in_ms = alike.iter().filter_map(|standing| standing.ends_in_ms).min();
    let cause = alike.iter().find_map(|standing| standing.cause.clone());
    let cause = cause.map(|cause| match alike.len() == said.len() {
        true => cause,
        false => format!("{cause} (so say {} of {} workers)", alike.len(), said.len()),
    });
    ProviderStatus { state, cause, ends_in_ms }
}
