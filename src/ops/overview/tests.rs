//! Tests of the overview with embedded backends and without a worker: the test writes the workers' reports itself.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::domain::job::ContentHash;
use crate::domain::job::tests::job;
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::PauseCause;
use crate::fleet::{OverviewInput, overview};
use crate::ledger::database::Database;
use crate::ledger::fleet::WorkerReport;
use crate::ledger::provider_row::{LimitRow, ProviderRow};
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::{LimitStatus, Limiter, LimiterError};
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::supervisor::WorkerStatus;

pub fn test_collector(
    database: &Database,
    progress: watch::Receiver<WorkerStatus>,
    limiter: Arc<dyn Limiter>,
) -> Arc<OverviewCollector> {
    Arc::new(OverviewCollector::new(OverviewSources {
        worker_status: progress,
        ledger: database.clone(),
        reads: database.clone(),
        queue: None,
        limiter,
        worker: "this-one".to_owned(),
        version: "0.1.0".to_owned(),
    }))
}

pub fn row(name: &str) -> ProviderRow {
    let limit = LimitRow { name: "all".to_owned(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    ProviderRow {
        name: name.to_owned(),
        url: "https://pay.example/".to_owned(),
        limits: vec![limit],
        ..ProviderRow::default()
    }
}

pub fn report(id: &str, rate_10s: u64, at_ms: i64) -> WorkerReport {
    let lane = json!({
        "does": "running", "active": 3, "in_flight": 2, "sent_total": 500, "sent_10s": rate_10s,
        "waits": {"bounds_ms": [1, 2], "counts": [5, 1, 0]},
        "decisions": [{"at_ms": at_ms, "kind": "granted", "reason": "room", "permits": 7}],
    });
    let backend = json!({"ok": true, "kind": "sqlite", "rtt_ms": 0.4});
    let body =
        json!({"ready": true, "settings_version": 9, "lanes": {"acme": lane}, "backends": {"database": backend}});
    WorkerReport {
        id: id.to_owned(),
        host: "pay-1".to_owned(),
        pid: 7,
        version: "0.1.0".to_owned(),
        uptime: Duration::from_secs(60),
        format: 1,
        body: body.to_string(),
    }
}

#[tokio::test]
async fn reports_of_all_workers_are_merged() {
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    database.apply_settings(&[row("acme")], false).await.unwrap();
    for (id, rate_10s, at_ms) in [("one", 300, 1_000), ("two", 100, 2_000)] {
        database.write_report(&report(id, rate_10s, at_ms)).await.unwrap();
    }
    let known = LoadedSettings::default().with_snapshot(database.load_settings().await.unwrap());
    let progress = WorkerStatus { settings: Arc::new(known), ..WorkerStatus::default() };
    let (_progress, progress) = watch::channel(progress);
    let collector = test_collector(&database, progress, Arc::new(EmbeddedLimiter::new()));
    let stop = tokio_util::sync::CancellationToken::new();
    let running = tokio::spawn({
        let (collector, stop) = (collector.clone(), stop.clone());
        async move { collector.run(stop).await }
    });

    let overview = serde_json::to_value(collector.overview().await.as_ref()).unwrap();
    assert_eq!((&overview["worker"], &overview["warnings"]), (&json!("this-one"), &json!([])));
    let acme = &overview["providers"][0];
    for (field, wanted) in [
        ("name", json!("acme")),
        ("state", json!("running")),
        ("rate_per_s", json!(40.0)),
        ("limit_per_s", json!(100.0)),
        // Counted in the ledger: what workers report of them comes late.
        ("active", json!(0)),
        ("in_flight", json!(0)),
        ("waiting", json!(0)),
        ("waiting_is_at_least", json!(false)),
        ("queued", json!(0)),
        ("refused_by_provider", json!(0)),
        ("oldest_waiting_at", Value::Null),
    ] {
        assert_eq!(acme[field], wanted, "{field}: {acme}");
    }
    assert_eq!((&acme["limits"][0]["used"], &acme["limits"][0]["remaining"]), (&json!(0), &json!(100)));

    let input = collector.input().await;
    assert_eq!(permit_waits(&input.workers, "acme").counts, [10, 2, 0]);
    let at_count = &input.usage_at_count[&ProviderName::new("acme").unwrap()];
    assert_eq!((at_count.len(), at_count[0].max_requests), (1, 100), "the limiter was asked beside the count");
    let last = recent_decisions(&input.workers, "acme");
    let whose: Vec<&str> = last.iter().map(|decision| decision.worker.as_str()).collect();
    assert_eq!(whose, ["two", "one"]);
    // The first point exists after the first sample.
    while collector.history("acme", 60).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let point = collector.history("acme", 60).pop().unwrap();
    assert_eq!((point.limit_per_s, point.waiting, point.throttled), (Some(100.0), Some(0), false));
    stop.cancel();
    running.await.unwrap();
}

/// A payment is recorded while the limiter is asked.
struct RecordsWhenAsked(Database, EmbeddedLimiter);

#[async_trait]
impl Limiter for RecordsWhenAsked {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        self.1.run_id(quota).await
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        self.1.call(spec, call).await
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        self.0.record_backlog(&job("one"), ContentHash::UNSEEN, Duration::ZERO).await.unwrap();
        self.1.peek(spec, subject).await
    }
}

/// The other way round, a payment that gets its permit in between would count as waiting and as a used slot.
#[tokio::test]
async fn jobs_are_counted_after_the_used_slots() {
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    database.apply_settings(&[row("acme")], false).await.unwrap();
    let known = LoadedSettings::default().with_snapshot(database.load_settings().await.unwrap());
    let progress = WorkerStatus { settings: Arc::new(known), ..WorkerStatus::default() };
    let (_progress, progress) = watch::channel(progress);
    let limiter = RecordsWhenAsked(database.clone(), EmbeddedLimiter::new());
    let collector = test_collector(&database, progress, Arc::new(limiter));
    let counted = collector.query_jobs().await.unwrap();
    assert_eq!(counted.reconciliations.iter().map(|account| account.recorded).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn snapshot_is_one_point_of_the_history() {
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    database.apply_settings(&[row("acme")], false).await.unwrap();
    let (_progress, progress) = watch::channel(WorkerStatus::default());
    let collector = test_collector(&database, progress, Arc::new(EmbeddedLimiter::new()));

    // On a busy machine a point is recorded as soon as a reader's snapshot is there, and the next one within the time
    // for which a snapshot is recent.
    let shown = collector.snapshot().await.overview.at.clone();
    collector.record_point().await;
    while DatabaseTime(collector::unix_ms()).to_string() <= shown {
        tokio::task::yield_now().await;
    }
    collector.record_point().await;
    let at: Vec<String> = collector.history("acme", 900).into_iter().map(|point| point.at).collect();
    assert_eq!((at.len(), &at[0]), (2, &shown), "{at:?}");
    assert!(at[0] < at[1], "the snapshot is not recorded twice: {at:?}");
}

#[tokio::test]
async fn paused_lane_shows_cause_and_end() {
    let lanes: BTreeMap<_, Arc<LaneControl>> =
        ["acme", "bolt", "crate"].into_iter().map(|name| (ProviderName::new(name).unwrap(), Arc::default())).collect();
    let pauses = |name: &str| &lanes[&ProviderName::new(name).unwrap()];
    pauses("bolt").pause_claims(Duration::from_secs(600), PauseCause::Limit, Wait::for_limit("all"));
    pauses("crate").pause_claims(Duration::from_secs(900), PauseCause::Limit, Wait::for_limit("all"));
    pauses("crate").pause_sending(
        Duration::from_secs(600),
        PauseCause::Breaker,
        Wait::with_detail(WaitReason::CircuitOpen, "no answer in time"),
    );
    let mut overviews = serde_json::to_value(lane_overviews(&lanes)).unwrap();
    for resting in [1, 2] {
        let ends_in_ms = overviews[resting]["ends_in_ms"].take().as_u64().unwrap();
        assert!((500_000..=600_000).contains(&ends_in_ms), "{ends_in_ms}");
    }
    let wanted = json!([
        {"provider": "acme", "state": "running"},
        {"provider": "bolt", "state": "resting", "cause": "waits for limit all", "ends_in_ms": null},
        {"provider": "crate", "state": "stopped", "cause": "the provider is down: no answer in time",
         "ends_in_ms": null},
    ]);
    assert_eq!(overviews, wanted);
}

fn overview_of(last_refused_at: Option<&str>, names: &[&str]) -> Overview {
    let row = |name: &&str| ProviderRow { name: (*name).to_owned(), ..ProviderRow::default() };
    let mut overview = overview(&OverviewInput { rows: names.iter().map(row).collect(), ..OverviewInput::default() });
    overview.providers.iter_mut().for_each(|provider| provider.last_refused_at = last_refused_at.map(str::to_owned));
    overview
}

#[test]
fn history_is_bounded_and_marks_new_429s() {
    let mut history = OverviewHistory::default();
    for last in [Some("10:00:05"), Some("10:00:05"), Some("10:00:07"), None, Some("10:00:07"), Some("10:00:09")] {
        history.record(&overview_of(last, &["acme", "bolt"]));
    }
    let throttled: Vec<bool> = history.last_points("acme", 9).iter().map(|point| point.throttled).collect();
    assert_eq!(throttled, [false, false, true, false, false, true]);
    assert_eq!(history.last_points("acme", 2).len(), 2);
    for _ in 0..500 {
        history.record(&overview_of(None, &["acme"]));
    }
    assert_eq!((history.last_points("acme", 9_999).len(), history.last_points("bolt", 9).len()), (POINTS_MAX, 0));
}

/// A point each two seconds for half a minute, and before that a gap.
#[test]
fn sent_requests_are_read_back_until_a_gap() {
    let mut history = OverviewHistory::default();
    let mut enter = |at_s: i64, rate_per_s| {
        let mut overview = overview_of(None, &["acme"]);
        overview.at = DatabaseTime(at_s * 1_000).to_string();
        overview.providers[0].rate_per_s = rate_per_s;
        history.record(&overview);
    };
    enter(10, Some(9.0));
    (16..=46).step_by(2).for_each(|at_s| enter(at_s, Some(if at_s > 34 { 2.0 } else { 1.0 })));
    assert_eq!(history.sent_before(47_000)["acme"], [20.0, 20.0, 10.0, 10.0]);
    assert!(history.sent_before(60_000)["acme"].is_empty(), "the last point is too old");
}

#[test]
fn recent_rate_needs_one_minute_of_backlog() {
    let mut history = OverviewHistory::default();
    let mut enter = |points: usize, waiting, rate_per_s| {
        let mut overview = overview_of(None, &["acme"]);
        (overview.providers[0].waiting, overview.providers[0].rate_per_s) = (waiting, Some(rate_per_s));
        overview.providers[0].waiting_is_at_least = false;
        (0..points).for_each(|_| history.record(&overview));
        history.recent_per_s().get("acme").copied()
    };
    assert_eq!(enter(100, 0, 9.0), None);
    assert_eq!(enter(RECENT_POINTS_MIN - 1, 5, 0.0), None);
    // One burst, and nothing for the rest of the minute.
    assert_eq!(enter(1, 5, 3.0), Some(0.1));
    assert_eq!(enter(1, 0, 3.0), None, "nothing waits any more");
    assert_eq!(enter(2 * RECENT_POINTS_MAX, 5, 2.0), Some(2.0));
}
