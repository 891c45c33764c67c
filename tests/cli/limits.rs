//! `limits set --dry-run`: the old and the new rate, and the effect on the clear time.

use std::time::Duration;

use serde_json::json;
use sluicegate::ledger::fleet::WorkerReport;

use crate::jobs::Desk;

/// The estimates are those of the API, from the same data.
#[tokio::test]
async fn rehearsed_limit_shows_the_clear_time() {
    let desk = Desk::open().await;
    for id in ["a", "b", "c"] {
        desk.payment(id, "acme", "waiting").await;
    }
    let report = WorkerReport {
        id: "one".to_owned(),
        host: "pay-1".to_owned(),
        pid: 7,
        version: "0.1.0".to_owned(),
        uptime: Duration::from_secs(60),
        format: 1,
        body: json!({"ready": true, "lanes": {"acme": {"does": "running"}}}).to_string(),
    };
    desk.database.write_report(&report).await.unwrap();
    let set = ["limits", "set", "acme", "per-second", "1/1m", "--dry-run"];
    let clears_in = |ms: u64| json!({"kind": "clears_in", "ms": ms});
    let shown = desk.run(&[&set[..], &["--json"]].concat()).await.json();
    assert_eq!(shown["clears"], json!({"from": clears_in(20), "to": clears_in(120_000)}), "{shown}");
    assert_eq!((&shown["from"], &shown["to"], &shown["dry_run"]), (&json!("100/1s"), &json!("1/1m"), &json!(true)));
    let ran = desk.run(&set).await;
    assert_eq!(ran.out, "acme per-second: 100/1s → 1/1m\nclears in: 0.0 s → 2 min 0 s\n");
    assert!(ran.err.contains("dry run: nothing was changed"), "{}", ran.err);
    let limits = desk.run(&["limits", "list", "--json"]).await.json();
    assert_eq!(limits[0]["max_requests"], 100, "{limits}");
    let (refused, _) = desk.run(&["limits", "set", "acme", "per-year", "1/1m", "--dry-run"]).await.failure();
    assert!(refused.contains("has no limit `per-year`"), "{refused}");
}
