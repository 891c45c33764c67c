//! The warnings of the overview, as text: what an operator should look at.
//!
//! A source that did not answer is always among them.

use super::overview::{OverviewInput, has_valid_row};
use super::report::problem_with_name;

/// Most workers that one warning names.
const ADDRESSES_MAX: usize = 3;

/// The warnings, one line each.
pub(super) fn warnings(evidence: &OverviewInput) -> Vec<String> {
    let mut warnings = evidence.backend_problems.clone();
    warnings.extend(evidence.database_problem.iter().map(|problem| format!("database: {problem}")));
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
    warnings
}

/// One line for each problem with a backend, however many workers report it.
fn unavailable_backends(evidence: &OverviewInput) -> Vec<String> {
    let mut by_problem: Vec<(String, Vec<String>)> = Vec::new();
    let live = evidence.workers.iter().filter(|worker| worker.is_live());
    for (worker, report) in live.filter_map(|worker| Some((worker, worker.report.as_ref()?))) {
        for (name, backend) in report.backends.iter().filter(|(_, backend)| !backend.ok) {
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
