//! The worker processes: the rows of `worker_reports`, with a state by their age.
//!
//! A process is lost when its row was not updated for ten seconds while the database could be written to. A lost
//! process is shown until it is replaced, and for ten minutes at most. Where no process is live, the last one is shown
//! for a day.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::report::{BackendStatus, LaneReport, ProcessReport, REPORT_FORMAT, ReportedDecision, WaitHistogram};
use crate::ledger::fleet::StoredReport;
use crate::ledger::operator::DatabaseTime;

/// A process that has not reported for longer is lost: five reports missed.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// A row that is older is deleted.
pub const ROW_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest time for which a lost process is shown beside live ones.
const LOST_SHOWN_MAX: Duration = Duration::from_secs(10 * 60);

/// Age at which most jobs of a lost process have returned to the backlog. Until then it may hold jobs, and is shown even
/// if it is replaced.
const JOBS_RETURNED_AFTER: Duration = Duration::from_secs(40);

/// A process reports within this time once the database can be written to again.
const HEARTBEAT_RESUMES_WITHIN: Duration = Duration::from_secs(4);

/// A time in which reports could be neither written nor read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    /// Time since it began.
    pub began: Duration,
    /// Time since it ended; `None`: it continues.
    pub ended: Option<Duration>,
}

impl Outage {
    /// The part of a row's age that is the worker's own silence.
    fn silence_of(self, age: Duration) -> Duration {
        let ended = self.ended.map_or(Duration::ZERO, |ended| ended.saturating_sub(HEARTBEAT_RESUMES_WITHIN));
        age.saturating_sub(self.began.min(age).saturating_sub(ended))
    }
}

/// The processes of these rows that are shown; `read` is the time since the rows were read.
pub fn visible_workers(rows: Vec<StoredReport>, read: Duration, outage: Option<Outage>) -> Vec<WorkerProcess> {
    let workers = rows.into_iter().map(|row| {
        let worker = WorkerProcess::from_row(row);
        let age = worker.age + read;
        WorkerProcess {
            age: outage.map_or(age, |outage| outage.silence_of(age)),
            report: worker.report.map(|report| report.aged(age)),
            ..worker
        }
    });
    let stopped = |worker: &WorkerProcess| worker.report.as_ref().is_some_and(|report| report.stopped);
    let all: Vec<WorkerProcess> = workers.filter(|worker| worker.age <= ROW_RETENTION && !stopped(worker)).collect();
    let (mut shown, mut lost): (Vec<WorkerProcess>, Vec<WorkerProcess>) =
        all.into_iter().partition(WorkerProcess::is_live);
    lost.sort_by_key(|worker| worker.age);
    let replaced = replaced(&shown, &lost);
    let none_is_live = shown.is_empty();
    let kept = lost.into_iter().zip(replaced).enumerate().filter(|(nth, (worker, replaced))| {
        let last = none_is_live && *nth == 0;
        last || (worker.age <= LOST_SHOWN_MAX && !(*replaced && worker.age > JOBS_RETURNED_AFTER))
    });
    shown.extend(kept.map(|(_, (worker, _))| worker));
    shown.sort_by(|a, b| a.id.cmp(&b.id));
    shown
}

/// For each lost process, whether another one has started on its host since; each new process replaces one.
fn replaced(live: &[WorkerProcess], lost: &[WorkerProcess]) -> Vec<bool> {
    let mut came: Vec<&WorkerProcess> = live.iter().collect();
    let replaces =
        |new: &WorkerProcess, old: &WorkerProcess| new.host == old.host && new.started_at_ms >= old.seen_at_ms;
    let each = lost.iter().map(|old| {
        let found = came.iter().position(|new| replaces(new, old));
        found.map(|at| came.swap_remove(at)).is_some()
    });
    each.collect()
}

/// One process and its last report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerProcess {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at_ms: i64,
    pub seen_at_ms: i64,
    pub age: Duration,
    /// `None`: the report has a format that this program does not know.
    pub report: Option<ProcessReport>,
}

impl WorkerProcess {
    pub fn from_row(row: StoredReport) -> Self {
        let StoredReport { id, host, pid, version, started_at_ms, reported_at_ms: seen_at_ms, age, format, body } = row;
        let report = (format == REPORT_FORMAT).then(|| serde_json::from_str(&body).ok()).flatten();
        Self { id, host, pid, version, started_at_ms, seen_at_ms, age, report }
    }

    pub fn is_live(&self) -> bool {
        self.age <= HEARTBEAT_TIMEOUT
    }

    /// `host:pid`, for people.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.pid)
    }

    fn state(&self) -> &'static str {
        match &self.report {
            _ if !self.is_live() => "lost",
            Some(ProcessReport { draining: true, .. }) => "draining",
            Some(ProcessReport { ready: false, .. }) => "starting",
            _ => "ready",
        }
    }
}

/// One process, as `/api/v1/workers` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WorkerOverview {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at: String,
    pub seen_at: String,
    /// `ready`, `starting`, `draining`, `lost`.
    pub state: String,
    pub lanes: usize,
    pub active: u64,
    pub in_flight: u64,
    pub backends: BTreeMap<String, BackendStatus>,
    pub warnings: Vec<String>,
}

impl WorkerOverview {
    pub fn new(worker: &WorkerProcess) -> Self {
        let report = worker.report.clone().unwrap_or_default();
        let mut warnings = report.warnings;
        if worker.report.is_none() {
            warnings.push("its report is in a format that this program does not read".to_owned());
        }
        if !worker.is_live() {
            warnings.push(format!("has not reported for {} s", worker.age.as_secs()));
        }
        let lanes = report.lanes.values();
        // A lost process holds no jobs any more: the broker requeues its messages, and others take its jobs.
        let live = u64::from(worker.is_live());
        Self {
            id: worker.id.clone(),
            host: worker.host.clone(),
            pid: worker.pid,
            version: worker.version.clone(),
            started_at: DatabaseTime(worker.started_at_ms).to_string(),
            seen_at: DatabaseTime(worker.seen_at_ms).to_string(),
            state: worker.state().to_owned(),
            lanes: report.lanes.len(),
            active: live * lanes.clone().map(|lane| lane.active).sum::<u64>(),
            in_flight: live * lanes.map(|lane| lane.in_flight).sum::<u64>(),
            backends: report.backends,
            warnings,
        }
    }
}

/// Most decisions that one provider's page shows.
const DECISIONS_MAX: usize = 50;

/// A decision and its worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DecisionOverview {
    pub at: String,
    pub worker: String,
    pub kind: String,
    pub reason: String,
    pub permits: u32,
}

/// The reports of one provider's lane, from each worker that has it.
/// Whether the process runs, and has a lane for the provider.
pub fn has_live_lane(worker: &WorkerProcess, name: &str) -> bool {
    worker.is_live() && worker.report.as_ref().is_some_and(|report| report.lanes.contains_key(name))
}

pub(super) fn lane_reports<'a>(
    workers: &'a [WorkerProcess],
    name: &str,
) -> impl Iterator<Item = (&'a WorkerProcess, &'a LaneReport)> {
    let lane = move |worker: &'a WorkerProcess| {
        let lane = worker.report.as_ref()?.lanes.get(name)?;
        Some((worker, lane))
    };
    workers.iter().filter_map(lane)
}

/// Waits for permits of a provider, over all workers. A histogram with other bounds cannot be added and is left out.
pub fn permit_waits(workers: &[WorkerProcess], name: &str) -> WaitHistogram {
    let mut sum = WaitHistogram::default();
    lane_reports(workers, name).filter(|(worker, _)| worker.is_live()).for_each(|(_, lane)| sum.add(&lane.waits));
    sum
}

/// The last decisions of all workers, newest first.
pub fn recent_decisions(workers: &[WorkerProcess], name: &str) -> Vec<DecisionOverview> {
    let all = lane_reports(workers, name)
        .flat_map(|(worker, lane)| lane.decisions.iter().map(move |decision| (worker, decision)));
    let mut all: Vec<(&WorkerProcess, &ReportedDecision)> = all.collect();
    all.sort_by_key(|(_, decision)| std::cmp::Reverse(decision.at_ms));
    let line = |(worker, decision): (&WorkerProcess, &ReportedDecision)| DecisionOverview {
        at: DatabaseTime(decision.at_ms).to_string(),
        worker: worker.id.clone(),
        kind: decision.kind.clone(),
        reason: decision.reason.clone(),
        permits: decision.permits,
    };
    all.into_iter().take(DECISIONS_MAX).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(age_s: u64, format: u32, body: &str) -> StoredReport {
        StoredReport {
            id: "w".to_owned(),
            host: "pay-1".to_owned(),
            pid: 7,
            version: "0.1.0".to_owned(),
            started_at_ms: 1_800_000_000_000,
            reported_at_ms: 1_800_000_100_000,
            age: Duration::from_secs(age_s),
            format,
            body: body.to_owned(),
        }
    }

    #[test]
    fn worker_state_follows_age_and_report() {
        for (age_s, format, body, state, active, warned) in [
            (1, 1, "{}", "starting", 0, false),
            (1, 1, r#"{"ready": true, "lanes": {"acme": {"active": 3}}}"#, "ready", 3, false),
            (10, 1, r#"{"ready": true, "draining": true}"#, "draining", 0, false),
            (11, 1, r#"{"ready": true, "lanes": {"acme": {"active": 3}}}"#, "lost", 0, true),
            (1, 2, r#"{"ready": "otherwise"}"#, "ready", 0, true),
            (1, 1, r#"{"ready": "otherwise"}"#, "ready", 0, true),
            // Fields and codes of a later program.
            (1, 1, r#"{"ready": true, "new": 1, "lanes": {"a": {"does": "dancing", "active": 1}}}"#, "ready", 1, false),
        ] {
            let line = WorkerOverview::new(&WorkerProcess::from_row(row(age_s, format, body)));
            let shown = (line.state.as_str(), line.active, !line.warnings.is_empty());
            assert_eq!(shown, (state, active, warned), "{age_s} {format} {body}");
        }
        let rows = [row(1, 1, "{}"), row(1, 1, r#"{"stopped": true}"#), row(90_000, 1, "{}"), row(86_000, 1, "{}")];
        let ages = |rows: &[StoredReport]| -> Vec<u64> {
            visible_workers(rows.to_vec(), Duration::from_secs(2), None)
                .iter()
                .map(|worker| worker.age.as_secs())
                .collect()
        };
        assert_eq!(ages(&rows), [3]);
        // Where none is live, the last one is shown for a day.
        assert_eq!(ages(&rows[1..]), [86_002]);
        let line = WorkerOverview::new(&WorkerProcess::from_row(row(1, 1, "{}")));
        assert_eq!(
            (line.started_at.as_str(), line.seen_at.as_str()),
            ("2027-01-15T08:00:00.000Z", "2027-01-15T08:01:40.000Z")
        );
    }

    /// A report is read up to two seconds after it was written, and shown for another second.
    #[test]
    fn pauses_of_older_reports_end_sooner() {
        let body =
            r#"{"lanes": {"acme": {"pause": {"by": "breaker", "ends_in_ms": 4000}, "gate": {"ends_in_ms": 2500}}}}"#;
        let shown = visible_workers(vec![row(2, 1, body)], Duration::from_secs(1), None);
        let lane = &shown[0].report.as_ref().unwrap().lanes["acme"];
        let ends = |pause: &Option<crate::fleet::report::ReportedPause>| pause.as_ref().unwrap().ends_in_ms;
        assert_eq!((ends(&lane.status.pause), ends(&lane.gate)), (Some(1_000), None));
    }

    fn named(id: &str, host: &str, started_s: i64, age_s: u64) -> StoredReport {
        let now_s = 1_800_000_000;
        let age_ms = i64::try_from(age_s).unwrap() * 1_000;
        StoredReport {
            id: id.to_owned(),
            host: host.to_owned(),
            started_at_ms: (now_s - started_s) * 1_000,
            reported_at_ms: now_s * 1_000 - age_ms,
            ..row(age_s, 1, r#"{"ready": true}"#)
        }
    }

    #[test]
    fn lost_process_is_listed_until_replaced() {
        let shown = |rows: &[StoredReport]| -> Vec<String> {
            visible_workers(rows.to_vec(), Duration::ZERO, None).into_iter().map(|worker| worker.id).collect()
        };
        let beside = named("beside", "pay-1", 9_000, 1);
        for (lost_for_s, came_s, host, kept) in [
            (30, None, "pay-1", true),
            (599, None, "pay-1", true),
            (601, None, "pay-1", false),
            // It may still hold jobs.
            (39, Some(20), "pay-1", true),
            (60, Some(50), "pay-1", false),
            // A process that started earlier, or on another host, is no replacement.
            (60, Some(70), "pay-1", true),
            (60, Some(50), "pay-2", true),
        ] {
            let came = came_s.map(|came_s| named("new", host, came_s, 1));
            let rows: Vec<StoredReport> =
                [beside.clone(), named("old", "pay-1", 9_000, lost_for_s)].into_iter().chain(came).collect();
            assert_eq!(shown(&rows).contains(&"old".to_owned()), kept, "lost for {lost_for_s} s, {came_s:?} at {host}");
        }
        // A new process replaces one.
        let two = [named("a", "pay-1", 900, 60), named("b", "pay-1", 900, 61), named("new", "pay-1", 50, 1)];
        assert_eq!(shown(&two), ["b", "new"]);
    }

    #[test]
    fn database_outage_loses_no_worker() {
        let seconds = Duration::from_secs;
        for (age_s, began_s, ended_s, live) in [
            // The outage continues: the last report came just before it, or long before.
            (62, 60, None, true),
            (90, 60, None, false),
            // It has ended, and no process had the time to report.
            (63, 61, Some(1), true),
            (63, 61, Some(3), true),
            // The others have reported since.
            (80, 61, Some(18), false),
            (1, 61, Some(18), true),
        ] {
            let outage = Outage { began: seconds(began_s), ended: ended_s.map(seconds) };
            let workers = visible_workers(vec![named("a", "pay-1", 900, age_s)], Duration::ZERO, Some(outage));
            assert_eq!(workers[0].is_live(), live, "{age_s} s, {outage:?}");
        }
    }
}
