//! The overview with each source missing: its figures are then unknown or a lower bound, never zero.

use std::sync::Arc;

use serde_json::{Value, json};

use super::clears::{ClearTimeOverview, MissingSource};
use super::overview::{OverviewInput, overview};
use super::report::ProcessReport;
use super::workers::WorkerProcess;
use super::{ProviderReconciliation, by_provider};
use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::{LimitRow, ProviderRow};
use crate::limiter::LimitStatus;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Nothing,
    Queue,
    /// Jobs cannot be counted; the rest of the database answers.
    Counts,
    Database,
    Limiter,
    Reports,
}

/// 1,332 payments are recorded and 16,541 are in the queue alone.
fn evidence(missing: Missing) -> OverviewInput {
    let limit = LimitRow { name: "all".to_owned(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    let row = ProviderRow {
        name: "acme".to_owned(),
        url: "https://acme.example/".to_owned(),
        limits: vec![limit],
        ..ProviderRow::default()
    };
    let provider = Arc::new(row.validate(9).unwrap());
    let report = json!({
        "ready": true, "settings_version": 9,
        "lanes": {"acme": {"sent_10s": 950, "sent_total": 9_000, "throttled_total": 3, "in_flight": 2}},
    });
    let report = serde_json::from_value::<ProcessReport>(report).unwrap();
    let account = ProviderReconciliation {
        provider: "acme".to_owned(),
        delayed: 1_000,
        due: 300,
        active: 34,
        in_flight: 2,
        messages_least: 300,
        messages_most: 300,
        states: [("review", 2), ("dead", 1), ("succeeded", 9_000)].map(|(state, jobs)| (state.to_owned(), jobs)).into(),
        ..ProviderReconciliation::default()
    };
    let used = LimitStatus {
        name: "all".to_owned(),
        max_requests: 100,
        window: std::time::Duration::from_secs(1),
        capacity: 100,
        used: 87,
        shadow: false,
        would_have_refused: 0,
        would_have_waited: 0,
        retry_after: Some(std::time::Duration::ZERO),
        reset_after: std::time::Duration::ZERO,
    };
    let problem = |which: Missing| (missing == which).then(|| format!("{which:?}: gone"));
    let database = missing == Missing::Database;
    OverviewInput {
        at_ms: 1_800_000_000_000,
        providers: [(provider.name.clone(), provider)].into(),
        rows: vec![row],
        // Workers that were read last stay, although they are not current.
        workers: match missing {
            Missing::Reports => Vec::new(),
            _ => vec![WorkerProcess { id: "a".to_owned(), report: Some(report), ..WorkerProcess::default() }],
        },
        reconciliation: (!database && missing != Missing::Counts).then(|| by_provider([account])),
        depths: (missing != Missing::Queue).then(|| ("acme".to_owned(), 16_841)).into_iter().collect(),
        oldest_ms: (!database).then(|| [("acme".to_owned(), 1_799_999_990_000)].into()),
        limit_usage: (missing != Missing::Limiter)
            .then(|| (ProviderName::new("acme").unwrap(), vec![used]))
            .into_iter()
            .collect(),
        database_problem: problem(Missing::Database),
        backend_problems: problem(missing).filter(|_| !database && missing != Missing::Nothing).into_iter().collect(),
        ..OverviewInput::default()
    }
}

#[test]
fn a_missing_source_never_counts_as_zero() {
    let ledgers = ["backlog", "delayed", "active", "in_flight", "review", "dead", "succeeded", "declined", "unknown"];
    for (missing, waiting, unknown) in [
        (Missing::Nothing, json!([17_873, false]), vec![]),
        (Missing::Queue, json!([1_332, true]), vec!["queued", "unrecorded", "clears"]),
        (Missing::Counts, json!([16_841, true]), [&ledgers[..], &["unrecorded", "clears"]].concat()),
        (
            Missing::Database,
            json!([16_841, true]),
            [&ledgers[..], &["unrecorded", "clears", "rate_per_s", "refused_by_provider"]].concat(),
        ),
        (Missing::Limiter, json!([17_873, false]), vec!["used"]),
        (Missing::Reports, json!([17_873, false]), vec!["clears"]),
    ] {
        let picture = serde_json::to_value(overview(&evidence(missing))).unwrap();
        let acme = &picture["providers"][0];
        assert_eq!(json!([acme["waiting"], acme["waiting_is_at_least"]]), waiting, "{missing:?}");
        let figures = [&ledgers[..], &["queued", "unrecorded", "clears", "rate_per_s", "refused_by_provider", "used"]];
        for figure in figures.concat() {
            let value = match figure {
                "used" => &acme["limits"][0]["used"],
                // There is such a time.
                "clears" => &acme["clears"]["ms"],
                _ => &acme[figure],
            };
            assert_eq!(*value == Value::Null, unknown.contains(&figure), "{missing:?}: {figure} is {value}");
        }
        // The oldest known payment is shown as at least that old.
        let hidden = missing != Missing::Nothing && missing != Missing::Limiter && missing != Missing::Reports;
        assert!(acme["oldest_is_at_least"] == true || !hidden, "{missing:?}");
        let silent = matches!(missing, Missing::Nothing);
        assert_eq!(picture["warnings"].as_array().unwrap().is_empty(), silent, "{missing:?}: {}", picture["warnings"]);
        let state = match missing {
            Missing::Database => "backend_unavailable",
            Missing::Reports => "no_worker",
            _ => "running",
        };
        assert_eq!(acme["state"], state, "{missing:?}");
    }
}

/// A draining process no longer counts as a running lane; other workers count, or the state is `draining`.
#[test]
fn draining_worker_is_not_a_running_lane() {
    let mut seen = evidence(Missing::Nothing);
    let state = |seen: &OverviewInput| overview(seen).providers.remove(0).state.name();
    seen.workers[0].report.as_mut().unwrap().draining = true;
    assert_eq!(
        (state(&seen), overview(&seen).providers.remove(0).clears),
        ("draining", ClearTimeOverview::Unknown { missing: MissingSource::Worker })
    );
    let mut other = seen.workers[0].clone();
    other.report.as_mut().unwrap().draining = false;
    seen.workers.push(other);
    assert_eq!(state(&seen), "running");
}
