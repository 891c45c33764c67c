//! The backends that are unavailable, each once: one incident for operators, however many lanes and workers it concerns.
//!
//! Workers report since when a backend does not answer them. The process that answers adds what its own queries found:
//! while the database is unavailable, no report says so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::OverviewInput;
use super::report::{BackendStatus, problem_with_name};
use super::workers::WorkerProcess;
use crate::ledger::operator::DatabaseTime;

/// The backends, in the order in which they are shown.
const BACKENDS: [&str; 3] = ["database", "queue", "limiter"];

/// A backend that at least one live worker, or the process that answers, cannot use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct BackendOutage {
    /// `database`, `queue` or `limiter`.
    pub backend: String,
    /// `postgres`, `sqlite`, `rabbitmq`, `redis`, `redis_cluster`, `embedded`; `null`: no worker has reported it.
    pub kind: Option<String>,
    /// When it was first found unavailable. `null`: not known.
    pub since: Option<String>,
    pub problem: String,
    /// Live workers that report it as unavailable.
    pub workers: usize,
    /// Live workers that report it.
    pub of_workers: usize,
    /// No worker is known that can use it.
    pub everywhere: bool,
}

/// One entry for each backend that is unavailable.
pub fn outages(evidence: &OverviewInput) -> Vec<BackendOutage> {
    BACKENDS.into_iter().filter_map(|backend| outage(evidence, backend)).collect()
}

fn outage(evidence: &OverviewInput, backend: &str) -> Option<BackendOutage> {
    let live = evidence.workers.iter().filter(|worker| worker.is_live());
    let reported = live.filter_map(|worker: &WorkerProcess| worker.report.as_ref()?.backends.get(backend));
    let reported: Vec<&BackendStatus> = reported.collect();
    let failing: Vec<&&BackendStatus> = reported.iter().filter(|status| !status.ok).collect();
    let missing = evidence.missing.contains(&backend);
    if failing.is_empty() && !missing {
        return None;
    }
    let since_ms = failing
        .iter()
        .filter_map(|status| status.since_ms)
        .chain(found_since(&evidence.missing_since_ms, backend))
        .min();
    let problem = failing.iter().find_map(|status| status.problem.clone());
    let problem = problem.or_else(|| evidence.database_problem.clone().filter(|_| backend == "database"));
    let problem = problem.unwrap_or_else(|| "does not answer".to_owned());
    Some(BackendOutage {
        backend: backend.to_owned(),
        kind: reported.first().map(|status| status.kind.clone()).filter(|kind| !kind.is_empty()),
        since: since_ms.map(|since_ms| DatabaseTime(since_ms).to_string()),
        problem: problem_with_name(backend, &problem),
        workers: failing.len(),
        of_workers: reported.len(),
        // A database that does not answer has no current report of any worker.
        everywhere: failing.len() == reported.len() || (missing && backend == "database"),
    })
}

fn found_since(missing_since_ms: &BTreeMap<&'static str, i64>, backend: &str) -> Option<i64> {
    missing_since_ms.get(backend).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::report::ProcessReport;

    fn worker(limiter: Option<(bool, Option<i64>)>) -> WorkerProcess {
        let backend = |(ok, since_ms): (bool, Option<i64>)| BackendStatus {
            ok,
            kind: "redis".to_owned(),
            problem: (!ok).then(|| "connection refused".to_owned()),
            since_ms,
            ..BackendStatus::default()
        };
        let backends = limiter.map(|status| ("limiter".to_owned(), backend(status))).into_iter().collect();
        WorkerProcess {
            report: Some(ProcessReport { backends, ..ProcessReport::default() }),
            ..WorkerProcess::default()
        }
    }

    fn found(workers: Vec<WorkerProcess>, missing: &[(&'static str, i64)]) -> Vec<BackendOutage> {
        let missing_since_ms: BTreeMap<_, _> = missing.iter().copied().collect();
        let missing = missing_since_ms.keys().copied().collect();
        outages(&OverviewInput { workers, missing, missing_since_ms, ..OverviewInput::default() })
    }

    #[test]
    fn each_backend_is_one_outage_since_its_first_report() {
        assert_eq!(found(vec![worker(Some((true, None))), worker(None)], &[]), []);
        let workers = vec![worker(Some((false, Some(2_000)))), worker(Some((false, Some(1_000)))), worker(None)];
        let [redis] = &found(workers, &[("limiter", 3_000)])[..] else { panic!("one backend is unavailable") };
        assert_eq!((redis.backend.as_str(), redis.kind.as_deref()), ("limiter", Some("redis")));
        assert_eq!(redis.since.as_deref(), Some("1970-01-01T00:00:01.000Z"));
        assert_eq!(redis.problem, "limiter: connection refused");
        assert_eq!((redis.workers, redis.of_workers, redis.everywhere), (2, 2, true));
    }

    #[test]
    fn backend_that_one_worker_reaches_is_no_outage_everywhere() {
        let workers = vec![worker(Some((false, None))), worker(Some((true, None)))];
        let [redis] = &found(workers, &[])[..] else { panic!("one backend is unavailable") };
        assert_eq!((redis.workers, redis.of_workers, redis.everywhere, &redis.since), (1, 2, false, &None));
    }

    /// The last reports of the workers are from before the outage.
    #[test]
    fn unavailable_database_is_an_outage_that_no_report_names() {
        let both = found(vec![worker(Some((true, None)))], &[("queue", 7_000), ("database", 5_000)]);
        let names: Vec<(&str, bool)> = both.iter().map(|one| (one.backend.as_str(), one.everywhere)).collect();
        assert_eq!(names, [("database", true), ("queue", true)]);
        assert_eq!(both[0].since.as_deref(), Some("1970-01-01T00:00:05.000Z"));
    }
}
