//! Tests with one provider, one row, and workers' reports: every state with its cause, and which state hides which.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::fleet::by_provider;
use crate::fleet::cutoff::CutoffForecastOverview;
use crate::fleet::pace::MissingSource;
use crate::fleet::report::{
    LaneReport, LaneState, LaneStatus, PauseCause, ProcessReport, ReportedPause, WaitHistogram,
};
use crate::fleet::workers::{permit_waits, recent_decisions};
use crate::ledger::provider_row::{AccountRow, LimitReturn, LimitRow};
use crate::ledger::throttled::{Throttling, ThrottlingByProvider};

const SECOND: Duration = Duration::from_secs(1);

fn row() -> ProviderRow {
    let limit = |name: &str, max_requests, window_ms| LimitRow {
        name: name.to_owned(),
        max_requests,
        window_ms,
        ..LimitRow::default()
    };
    ProviderRow {
        name: "acme".to_owned(),
        url: "https://acme.example/".to_owned(),
        limits: vec![limit("per-second", 100, 1_000), limit("per-minute", 600, 60_000)],
        ..ProviderRow::default()
    }
}

fn worker(id: &str, lane: Value) -> WorkerProcess {
    let backend = json!({"ok": true, "kind": "redis", "rtt_ms": 0.5});
    let report = json!({
        "ready": true, "settings_version": 9, "lanes": {"acme": lane},
        "backends": {"database": backend, "queue": backend, "limiter": backend},
    });
    WorkerProcess {
        id: id.to_owned(),
        host: format!("host-{id}"),
        pid: 7,
        version: "0.1.0".to_owned(),
        age: SECOND,
        report: Some(serde_json::from_value::<ProcessReport>(report).unwrap()),
        ..WorkerProcess::default()
    }
}

fn account(delayed: u64, due: u64) -> ProviderReconciliation {
    let states = [("waiting", delayed + due), ("review", 2), ("dead", 1), ("succeeded", 1_000)];
    let states: BTreeMap<String, u64> = states.map(|(state, jobs)| (state.to_owned(), jobs)).into();
    ProviderReconciliation {
        provider: "acme".to_owned(),
        recorded: states.values().sum(),
        states,
        delayed,
        due,
        ..ProviderReconciliation::default()
    }
}

/// A provider with this row, these workers, and waiting jobs.
fn evidence(rows: Vec<ProviderRow>, workers: Vec<WorkerProcess>) -> OverviewInput {
    let valid = rows.iter().filter_map(|row| row.validate(9).ok());
    OverviewInput {
        at_ms: 1_800_000_000_000,
        providers: valid.map(|provider| (provider.name.clone(), Arc::new(provider))).collect(),
        rows,
        workers,
        reconciliation: Some(by_provider([account(3, 4)])),
        depths: ["acme", "bolt"].map(|name| (name.to_owned(), 0)).into(),
        ..OverviewInput::default()
    }
}

fn used(name: &str, max_requests: u32, used: u64) -> LimitStatus {
    LimitStatus {
        name: name.to_owned(),
        max_requests,
        window: SECOND,
        capacity: max_requests,
        used,
        shadow: false,
        would_have_refused: 0,
        would_have_waited: 0,
        retry_after: Some(Duration::ZERO),
        reset_after: Duration::ZERO,
        still_used: Vec::new(),
    }
}

fn status_of(evidence: &OverviewInput) -> (ProviderState, String, Option<u64>) {
    let one = overview(evidence).providers.remove(0);
    (one.state, one.cause.unwrap_or_default(), one.ends_in_ms)
}

fn pause(by: &str, words: &str, ends_in_ms: u64) -> Value {
    json!({"by": by, "limit": (by == "limit").then_some(words), "words": words, "ends_in_ms": ends_in_ms})
}

#[test]
fn each_lane_report_maps_to_a_state() {
    let down = "the provider is down: no answer in time";
    for (lane, state, cause, ends_in_ms) in [
        (json!({}), ProviderState::Running, "", None),
        (
            json!({"pause": pause("setup", "provider answered 401", 30_000)}),
            ProviderState::Misconfigured,
            "provider answered 401",
            Some(30_000),
        ),
        (
            json!({"does": "stopped", "pause": pause("breaker", down, 4_000)}),
            ProviderState::BreakerOpen,
            down,
            Some(4_000),
        ),
        (json!({"gate": pause("cold", "lost its state", 7_000)}), ProviderState::Cold, "lost its state", Some(7_000)),
        (
            json!({"pause": pause("provider", "asked for a pause", 900)}),
            ProviderState::PausedByProvider,
            "asked for a pause",
            Some(900),
        ),
        (
            json!({"does": "probing", "pause": {"by": "breaker", "words": down}}),
            ProviderState::Probing,
            "testing the provider with one payment at a time; the provider is down: no answer in time",
            None,
        ),
        (json!({"gate": pause("backend", "no Redis", 900)}), ProviderState::BackendUnavailable, "no Redis", None),
        (
            json!({"gate": pause("limit", "per-minute", 12_400)}),
            ProviderState::WaitingForLimit,
            "limit per-minute (600/1m) is used up",
            Some(12_400),
        ),
        (
            json!({"pause": pause("limit", "even pacing", 12_400)}),
            ProviderState::WaitingForLimit,
            "even pacing",
            Some(12_400),
        ),
        // Every lane at its limit waits for a moment.
        (json!({"gate": pause("limit", "per-second", 900)}), ProviderState::Running, "", None),
        (json!({"pause": pause("other", "newer settings are being loaded", 900)}), ProviderState::Running, "", None),
        (json!({"pause": pause("a later program's code", "who knows", 900)}), ProviderState::Running, "", None),
    ] {
        let shown = status_of(&evidence(vec![row()], vec![worker("a", lane.clone())]));
        assert_eq!(shown, (state, cause.to_owned(), ends_in_ms), "{lane}");
    }
    let mut idle = evidence(vec![row()], vec![worker("a", json!({"gate": pause("limit", "per-minute", 12_400)}))]);
    idle.reconciliation = Some(by_provider([account(0, 0)]));
    assert_eq!(status_of(&idle), (ProviderState::Idle, String::new(), None));
}

#[test]
fn row_and_backends_override_lane_reports() {
    let cold = || vec![worker("a", json!({"gate": pause("cold", "lost its state", 7_000)}))];
    let with = |change: fn(&mut OverviewInput)| {
        let mut evidence = evidence(vec![row()], cold());
        change(&mut evidence);
        status_of(&evidence)
    };
    type Case = (fn(&mut OverviewInput), ProviderState, &'static str);
    let cases: [Case; 10] = [
        (|_| (), ProviderState::Cold, "lost its state"),
        (
            |e| e.workers[0].report.as_mut().unwrap().backends.get_mut("queue").unwrap().ok = false,
            ProviderState::BackendUnavailable,
            "queue: does not answer",
        ),
        (|e| e.database_problem = Some("gone".to_owned()), ProviderState::BackendUnavailable, "database: gone"),
        (
            |e| e.workers[0].age = SECOND * 11,
            ProviderState::NoWorker,
            "no worker reports; the last was host-a:7, 11 s ago: nothing is sent",
        ),
        (|e| e.workers.clear(), ProviderState::NoWorker, "no `sluicegate run` reports: nothing is sent"),
        (
            |e| e.workers[0].report.as_mut().unwrap().lanes.clear(),
            ProviderState::Misconfigured,
            "no worker could start its lane: see the workers' logs",
        ),
        (
            |e| {
                let report = e.workers[0].report.as_mut().unwrap();
                report.lanes.clear();
                report.ready = false;
            },
            ProviderState::NoWorker,
            "workers are starting or stopping, or loading settings",
        ),
        (
            |e| e.rows[0].paused = true,
            ProviderState::Paused,
            "an operator paused it: its payments are recorded and wait",
        ),
        (
            |e| {
                e.rows[0].paused = true;
                e.rows[0].enabled = false;
            },
            ProviderState::Disabled,
            "its row is disabled: its queue keeps collecting",
        ),
        (|e| e.rows.clear(), ProviderState::Disabled, "it has no row any more: no worker takes its jobs"),
    ];
    for (change, state, cause) in cases {
        let (found, why, _) = with(change);
        assert_eq!((found, why.as_str()), (state, cause));
    }
}

/// Without a last valid row nothing is sent. With one, its state is shown, and the problems of the new one.
#[test]
fn invalid_row_shows_the_row_in_force() {
    let cold = || vec![worker("a", json!({"gate": pause("cold", "lost its state", 7_000)}))];
    let bad = InvalidRow {
        provider: "acme".to_owned(),
        quota: "acme".to_owned(),
        enabled: true,
        paused: false,
        problems: vec!["limit per-second: window_ms is 0".to_owned()],
    };
    let mut without = evidence(vec![row()], cold());
    without.workers[0].report.as_mut().unwrap().lanes.clear();
    (without.invalid_rows, without.providers) = (vec![bad.clone()], BTreeMap::new());
    assert_eq!(
        status_of(&without),
        (ProviderState::Misconfigured, "no lane: limit per-second: window_ms is 0".to_owned(), None)
    );
    let mut with = evidence(vec![row()], cold());
    with.invalid_rows = vec![bad];
    let picture = overview(&with);
    assert_eq!((picture.providers[0].state, picture.providers[0].problems.len()), (ProviderState::Cold, 1));
    assert_eq!(
        picture.warnings,
        ["row of acme is invalid, the last valid row stays in force: limit per-second: window_ms is 0"]
    );
    // A valid row that no worker can call.
    for worker in &mut with.workers {
        worker.report.as_mut().unwrap().lanes.clear();
    }
    assert_eq!(
        status_of(&with),
        (ProviderState::Misconfigured, "no lane: limit per-second: window_ms is 0".to_owned(), None)
    );
    assert_eq!(overview(&with).warnings, ["row of acme is invalid, nothing is sent: limit per-second: window_ms is 0"]);
}

#[test]
fn held_messages_are_a_warning() {
    let mut input = evidence(vec![row()], vec![worker("a", json!({}))]);
    assert_eq!(overview(&input).warnings, [""; 0]);
    input.held = Some([("acme".to_owned(), 12), ("bolt".to_owned(), 1)].into());
    let expected = "messages of a newer format wait for a newer worker: acme 12, bolt 1";
    assert_eq!(overview(&input).warnings, [expected]);
}

/// A row that the database accepts and no program can read.
#[test]
fn unreadable_row_hides_no_other() {
    let problem = "column `statuses` is not a JSON object";
    let bad = InvalidRow {
        provider: "bolt".to_owned(),
        quota: "shared".to_owned(),
        enabled: true,
        paused: false,
        problems: vec![problem.to_owned()],
    };
    let running = worker("one", json!({"does": "running", "active": 1}));
    let seen = overview(&OverviewInput { invalid_rows: vec![bad], ..evidence(vec![row()], vec![running]) });
    let [acme, bolt] = seen.providers.as_slice() else { panic!("{:?}", seen.providers) };
    assert_eq!((acme.name.as_str(), acme.state), ("acme", ProviderState::Running));
    assert_eq!((bolt.name.as_str(), bolt.quota.as_str(), bolt.enabled), ("bolt", "shared", true));
    assert_eq!((bolt.state, bolt.cause.clone()), (ProviderState::Misconfigured, Some(format!("no lane: {problem}"))));
    assert_eq!(bolt.problems, [problem]);
}

#[test]
fn most_severe_state_is_shown_with_its_count() {
    let lane = |by: &str, ends_in_ms| json!({"pause": pause(by, by, ends_in_ms)});
    // In the order in which they hide each other.
    let most_severe_first = ["setup", "breaker", "cold", "provider", "limit", "other"];
    for pair in most_severe_first.windows(2) {
        let workers = |a: &str, b: &str| vec![worker("a", lane(a, 9_000)), worker("b", lane(b, 8_000))];
        let alone = status_of(&evidence(vec![row()], vec![worker("a", lane(pair[0], 9_000))]));
        for both in [workers(pair[0], pair[1]), workers(pair[1], pair[0])] {
            let (state, cause, _) = status_of(&evidence(vec![row()], both));
            assert_eq!((state, cause), (alone.0, format!("{} (reported by 1 of 2 workers)", alone.1)), "{pair:?}");
        }
    }
    let both = vec![worker("a", lane("cold", 9_000)), worker("b", lane("cold", 8_000))];
    assert_eq!(status_of(&evidence(vec![row()], both)), (ProviderState::Cold, "cold".to_owned(), Some(8_000)));
    let mut lost = vec![worker("a", lane("setup", 9_000)), worker("b", json!({}))];
    lost[0].age = SECOND * 60;
    let picture = overview(&evidence(vec![row()], lost));
    assert_eq!(picture.providers[0].state, ProviderState::Running);
    assert_eq!(picture.warnings, ["worker host-a:7 is lost: it has not reported for 60 s"]);
    // Of a lane's pause and its gate's block, the more severe counts.
    let lane = json!({"pause": pause("limit", "per-minute", 9_000), "gate": pause("cold", "lost", 8_000)});
    assert_eq!(status_of(&evidence(vec![row()], vec![worker("a", lane)])).0, ProviderState::Cold);
    assert_eq!(serde_json::from_value::<PauseCause>(json!("of a later program")).unwrap(), PauseCause::Other);
}

#[test]
fn overview_sums_workers_ledger_and_queue() {
    let lane =
        |active: u64, sent_10s: u64| json!({"active": active, "in_flight": 1, "sent_total": 999, "sent_10s": sent_10s});
    let mut both = evidence(vec![row()], vec![worker("a", lane(5, 60)), worker("b", lane(4, 40))]);
    both.depths.insert("acme".to_owned(), 11_000);
    let counted = both.reconciliation.as_mut().unwrap().get_mut("acme").unwrap();
    (counted.active, counted.in_flight) = (9, 2);
    both.oldest_ms = Some([("acme".to_owned(), 1_799_999_990_000)].into());
    let quota = ProviderName::new("acme").unwrap();
    both.limit_usage.insert(quota, vec![used("per-second", 100, 87), used("per-minute", 600, 601)]);
    both.throttling = Some([("acme".to_owned(), Throttling { requests: 4, ..Throttling::default() })].into());
    let picture = overview(&both);
    let one = &picture.providers[0];
    // 11,000 are not recorded, 3 sleep, 4 are due, and 7 are active and not in flight.
    assert_eq!((one.waiting, one.queued, one.delayed), (11_014, Some(11_000), Some(3)));
    assert_eq!((one.active, one.in_flight, one.refused_by_provider), (Some(9), Some(2), Some(4)));
    assert_eq!((one.rate_per_s, one.limit_per_s), (Some(10.0), Some(10.0)));
    assert_eq!((one.review, one.dead, one.succeeded), (Some(2), Some(1), Some(1_000)));
    assert_eq!(one.oldest_waiting_at.as_deref(), Some("2027-01-15T07:59:50.000Z"));
    let remaining: Vec<_> = one.limits.iter().map(|limit| (limit.used, limit.remaining)).collect();
    assert_eq!(remaining, [(Some(87), Some(13)), (Some(601), Some(0))]);
    // 11,010 through 600 per minute that are all used, and each request takes a fifth of a second.
    let clears_in_s = estimates::ms(&one.clears) / 1_000;
    assert!((1_080..=1_110).contains(&clears_in_s), "{clears_in_s} s");
    // Due jobs whose messages the queue does not show still wait.
    both.depths.insert("acme".to_owned(), 1);
    assert_eq!(overview(&both).providers[0].waiting, 15);
    both.rows[0].paused = true;
    let paused = overview(&both).providers.remove(0);
    assert_eq!(paused.clears, ClearTimeOverview::NotWhilePaused);
    assert!(
        matches!(paused.clears_if_resumed, Some(ClearTimeOverview::ClearsIn { ms: 1.. })),
        "{:?}",
        paused.clears_if_resumed
    );
    // No worker reports.
    let one = overview(&evidence(vec![row()], Vec::new())).providers.remove(0);
    assert_eq!((one.waiting, one.limits[0].used), (7, None));
    assert_eq!(one.clears, ClearTimeOverview::Unknown { missing: MissingSource::Worker });
}

#[test]
fn unavailable_backend_is_named_once() {
    let mut one = worker("a", json!({}));
    let limiter = one.report.as_mut().unwrap().backends.get_mut("limiter").unwrap();
    (limiter.ok, limiter.problem) = (false, Some("limiter store unavailable: no answer in time".to_owned()));
    let picture = overview(&evidence(vec![row()], vec![one]));
    assert_eq!(picture.providers[0].cause.as_deref(), Some("limiter store unavailable: no answer in time"));
    assert_eq!(picture.warnings, ["worker host-a:7: limiter store unavailable: no answer in time"]);
}

#[test]
fn overview_merges_waits_and_decisions() {
    let lane = |counts: [u64; 3], at_ms: [i64; 30]| {
        let line = |at_ms| json!({"at_ms": at_ms, "kind": "granted", "reason": "room", "permits": 1});
        let decisions: Vec<Value> = at_ms.map(line).to_vec();
        json!({"waits": {"bounds_ms": [1, 2], "counts": counts}, "decisions": decisions})
    };
    let even: [i64; 30] = std::array::from_fn(|at| 2 * (30 - i64::try_from(at).unwrap()));
    let workers = [worker("a", lane([1, 2, 3], even)), worker("b", lane([10, 0, 1], even.map(|at| at - 1)))];
    assert_eq!(permit_waits(&workers, "acme").counts, [11, 2, 4]);
    let lines = recent_decisions(&workers, "acme");
    assert_eq!((lines.len(), lines[0].worker.as_str(), lines[1].worker.as_str()), (50, "a", "b"));
    assert!(lines.windows(2).all(|pair| pair[0].at >= pair[1].at));
    let mut other = permit_waits(&workers[..1], "acme");
    other.add(&WaitHistogram { bounds_ms: vec![5], counts: vec![7, 7] });
    assert_eq!(other.counts, [1, 2, 3], "other bounds cannot be added");
    assert!(recent_decisions(&workers, "bolt").is_empty() && permit_waits(&workers, "bolt").counts.is_empty());
}

#[test]
fn version_mismatch_and_unreadable_report_warn() {
    let mut workers = vec![worker("a", json!({})), worker("b", json!({})), worker("c", json!({}))];
    workers[1].version = "0.2.0".to_owned();
    workers[2].report = None;
    let picture = overview(&evidence(vec![row()], workers));
    assert_eq!(
        picture.warnings,
        [
            "worker host-c:7 reports in a format that this program does not read",
            "workers run different versions: 0.1.0, 0.2.0"
        ]
    );
    assert_eq!(picture.reconciliation.map(|accounts| accounts.len()), Some(1));
}

#[test]
fn closed_limit_is_a_state() {
    let mut closed = row();
    closed.limits[0].max_requests = 0;
    for active in [0, 1] {
        let mut one = evidence(vec![closed.clone()], vec![worker("a", json!({"active": active}))]);
        one.reconciliation = Some(by_provider([ProviderReconciliation { active, ..account(0, 1 - active) }]));
        let shown = overview(&one).providers.remove(0);
        let cause = "limit \"per-second\" is 0/1s: nothing is sent";
        assert_eq!((shown.state, shown.cause.as_deref()), (ProviderState::Closed, Some(cause)));
        assert_eq!(
            (shown.waiting, shown.clears),
            (1, ClearTimeOverview::Never { limit: Some("per-second".to_owned()) })
        );
    }
}

#[test]
fn invalid_row_shows_limits_in_force() {
    let mut bad = evidence(vec![row()], vec![worker("a", json!({}))]);
    bad.rows[0].limits[0].max_requests = -3;
    bad.rows[0].limits[1].enabled = false;
    let problems = vec!["limit per-second: max_requests is -3".to_owned()];
    bad.invalid_rows = vec![InvalidRow {
        provider: "acme".to_owned(),
        quota: "acme".to_owned(),
        enabled: true,
        paused: false,
        problems,
    }];
    let shown = overview(&bad).providers.remove(0);
    let limits: Vec<_> =
        shown.limits.iter().map(|limit| (limit.name.as_str(), limit.max_requests, limit.enabled)).collect();
    assert_eq!(limits, [("per-second", 100, true), ("per-minute", 600, true)]);
}

#[test]
fn pausing_operator_is_named() {
    let mut paused = evidence(vec![ProviderRow { paused: true, ..row() }], vec![worker("a", json!({}))]);
    let who = "alice@host paused it at 2027-01-15T08:00:00.000Z (they asked)".to_owned();
    paused.paused_by.insert("acme".to_owned(), who.clone());
    assert_eq!(status_of(&paused), (ProviderState::Paused, format!("{who}: its payments are recorded and wait"), None));
}

#[path = "estimates_tests.rs"]
mod estimates;
