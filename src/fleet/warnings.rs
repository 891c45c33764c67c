//! What somebody should look at, in words: the warnings of the overview.
//!
//! Refuses to stay silent about what could not be asked.

use super::overview::{OverviewInput, has_valid_row};
use super::report::problem_with_name;

/// One line each.
pub(super) fn warnings(evidence: &OverviewInput) -> Vec<String> {
    let mut warnings = evidence.backend_problems.clone();
    warnings.extend(evidence.database_problem.iter().map(|problem| format!("database: {problem}")));
    for bad in &evidence.invalid_rows {
        let kept = has_valid_row(evidence, &bad.provider);
        let what = if kept { "the last good one counts" } else { "nothing is sent" };
        let problem = bad.problems.first().map_or("it cannot be meant", String::as_str);
        warnings.push(format!("row of {} is bad, and {what}: {problem}", bad.provider));
    }
    for worker in &evidence.workers {
        let place = worker.address();
        match &worker.report {
            _ if !worker.is_live() => {
                let silent_s = worker.age.as_secs();
                warnings.push(format!("worker {place} is lost: it has not reported for {silent_s} s"));
            }
            None => warnings.push(format!("worker {place} reports in a format that this program does not read")),
            Some(report) => {
                let away = report.engines.iter().filter(|(_, engine)| !engine.ok);
                warnings.extend(away.map(|(name, engine)| {
                    let problem = engine.problem.as_deref().unwrap_or("does not answer");
                    format!("worker {place}: {}", problem_with_name(name, problem))
                }));
                warnings.extend(report.warnings.iter().map(|warning| format!("worker {place}: {warning}")));
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
    warnings
}
