//! Who is there: the rows of `worker_reports`, read and judged by their age.
//!
//! Refuses to believe a row that was not written anew for ten seconds: its process is lost, whatever the row says.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::report::{Engine, FORMAT, Report};
use crate::ledger::fleet::Reported;
use crate::ledger::operator::At;

/// A process that has not reported for longer is lost: five reports missed.
pub const SILENT_MAX: Duration = Duration::from_secs(10);

/// A row that is older is nobody's any more, whether or not somebody may delete it.
pub const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The processes of these rows, which were read so long ago; without those that ended as they should.
#[must_use]
pub fn present(rows: &[Reported], read: Duration) -> Vec<Worker> {
    let workers = rows.iter().map(|row| Worker { age: row.age + read, ..Worker::of(row) });
    let stopped = |worker: &Worker| worker.report.as_ref().is_some_and(|report| report.stopped);
    workers.filter(|worker| worker.age <= KEPT && !stopped(worker)).collect()
}

/// One process and what it said last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worker {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at_ms: i64,
    pub seen_at_ms: i64,
    pub age: Duration,
    /// `None`: written in a format that this program does not know.
    pub report: Option<Report>,
}

impl Worker {
    #[must_use]
    pub fn of(row: &Reported) -> Self {
        let readable = row.format == FORMAT;
        Self {
            id: row.id.clone(),
            host: row.host.clone(),
            pid: row.pid,
            version: row.version.clone(),
            started_at_ms: row.started_at_ms,
            seen_at_ms: row.reported_at_ms,
            age: row.age,
            report: readable.then(|| serde_json::from_str(&row.body).ok()).flatten(),
        }
    }

    #[must_use]
    pub fn is_live(&self) -> bool {
        self.age <= SILENT_MAX
    }

    /// `host:pid`, for people.
    #[must_use]
    pub fn place(&self) -> String {
        format!("{}:{}", self.host, self.pid)
    }

    fn state(&self) -> &'static str {
        match &self.report {
            _ if !self.is_live() => "lost",
            Some(Report { draining: true, .. }) => "draining",
            Some(Report { ready: false, .. }) => "starting",
            _ => "ready",
        }
    }
}

/// One process, as `/api/v1/workers` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WorkerLine {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at: String,
    pub seen_at: String,
    /// `ready`, `starting`, `draining`, `lost`.
    pub state: String,
    pub lanes: usize,
    pub in_hand: u64,
    pub in_flight: u64,
    pub engines: BTreeMap<String, Engine>,
    pub warnings: Vec<String>,
}

impl WorkerLine {
    #[must_use]
    pub fn of(worker: &Worker) -> Self {
        let report = worker.report.clone().unwrap_or_default();
        let mut warnings = report.warnings;
        if worker.report.is_none() {
            warnings.push("its report is in a format that this program does not read".to_owned());
        }
        if !worker.is_live() {
            warnings.push(format!("has not reported for {} s", worker.age.as_secs()));
        }
        let lanes = report.lanes.values();
        // What a lost process had is nobody's any more: leases and the broker give it back.
        let live = u64::from(worker.is_live());
        Self {
            id: worker.id.clone(),
            host: worker.host.clone(),
            pid: worker.pid,
            version: worker.version.clone(),
            started_at: At(worker.started_at_ms).to_string(),
            seen_at: At(worker.seen_at_ms).to_string(),
            state: worker.state().to_owned(),
            lanes: report.lanes.len(),
            in_hand: live * lanes.clone().map(|lane| lane.in_hand).sum::<u64>(),
            in_flight: live * lanes.map(|lane| lane.in_flight).sum::<u64>(),
            engines: report.engines,
            warnings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(age_s: u64, format: u32, body: &str) -> Reported {
        Reported {
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
    fn age_and_report_say_what_a_worker_is() {
        for (age_s, format, body, state, in_hand, warned) in [
            (1, 1, "{}", "starting", 0, false),
            (1, 1, r#"{"ready": true, "lanes": {"acme": {"in_hand": 3}}}"#, "ready", 3, false),
            (10, 1, r#"{"ready": true, "draining": true}"#, "draining", 0, false),
            (11, 1, r#"{"ready": true, "lanes": {"acme": {"in_hand": 3}}}"#, "lost", 0, true),
            (1, 2, r#"{"ready": "otherwise"}"#, "ready", 0, true),
            (1, 1, r#"{"ready": "otherwise"}"#, "ready", 0, true),
            // A later program's fields and words.
            (
                1,
                1,
                r#"{"ready": true, "new": 1, "lanes": {"a": {"does": "dancing", "in_hand": 1}}}"#,
                "ready",
                1,
                false,
            ),
        ] {
            let line = WorkerLine::of(&Worker::of(&row(age_s, format, body)));
            let told = (line.state.as_str(), line.in_hand, !line.warnings.is_empty());
            assert_eq!(told, (state, in_hand, warned), "{age_s} {format} {body}");
        }
        let rows = [row(1, 1, "{}"), row(1, 1, r#"{"stopped": true}"#), row(90_000, 1, "{}"), row(86_000, 1, "{}")];
        let ages: Vec<u64> = present(&rows, Duration::from_secs(2)).iter().map(|worker| worker.age.as_secs()).collect();
        assert_eq!(ages, [3, 86_002]);
        let line = WorkerLine::of(&Worker::of(&row(1, 1, "{}")));
        assert_eq!(
            (line.started_at.as_str(), line.seen_at.as_str()),
            ("2027-01-15T08:00:00.000Z", "2027-01-15T08:01:40.000Z")
        );
    }
}
