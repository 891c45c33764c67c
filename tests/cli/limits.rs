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

/// `limits list` and `provider show` say until when, and an ordinary change ends the return.
#[tokio::test]
async fn limit_is_set_until_an_instant() {
    let desk = Desk::open().await;
    desk.sql("UPDATE providers SET cutoff = '18:00 Europe/Berlin' WHERE name = 'acme'").await;
    let set = ["limits", "set", "acme", "per-second", "200/1s"];
    let rehearsed = desk.run(&[&set[..], &["--until", "06:00", "--dry-run", "--json"]].concat()).await.json();
    assert_eq!((&rehearsed["then"], &rehearsed["ended_return"]), (&json!("100/1s"), &json!(null)), "{rehearsed}");
    assert_eq!(rehearsed["cutoff"]["to"]["rule"], "18:00 Europe/Berlin", "{rehearsed}");
    assert!(rehearsed["clears_at"]["to"].is_string(), "nothing waits: {rehearsed}");
    let until = rehearsed["until"].as_str().unwrap();
    // In the zone of the cut-off: an hour or two before 06:00 UTC.
    assert!(until.ends_with("T05:00:00.000Z") || until.ends_with("T04:00:00.000Z"), "{until}");
    let out = desk.run(&[&set[..], &["--until", "06:00"]].concat()).await.out;
    assert_eq!(out, format!("acme per-second: 100/1s → 200/1s until {until}, then back to 100/1s\n"));
    let limits = desk.run(&["limits", "list", "--json"]).await.json();
    assert_eq!((&limits[0]["until"], &limits[0]["then"]), (&json!(until), &json!("100/1s")), "{limits}");
    assert_eq!((&limits[1]["until"], &limits[1]["then"]), (&json!(null), &json!(null)), "{limits}");
    let list = desk.run(&["limits", "list"]).await.out;
    assert!(list.contains("until") && list.contains(until) && list.contains("100/1s"), "{list}");
    let shown = desk.run(&["provider", "show", "acme"]).await.out;
    assert!(shown.contains(&format!("# limit per-second: 200/1s until {until}, then back to 100/1s")), "{shown}");
    // The file has the present rate alone.
    assert!(!shown.contains("until_at") && shown.contains("max_requests = 200"), "{shown}");
    let ended = desk.run(&["limits", "set", "acme", "per-second", "--until", "none"]).await;
    assert_eq!(ended.out, "acme per-second: 200/1s → 200/1s\n");
    assert!(ended.err.contains(&format!("no longer goes back to 100/1s at {until}")), "{}", ended.err);
    let history = desk.run(&["limits", "history", "acme", "--json"]).await.json();
    let what = history["changes"][0]["what"].as_str().unwrap();
    assert_eq!(what, format!("limit per-second: no longer goes back to 100/1s at {until}"));
    for (more, words) in [
        (&["--until", "06:00"][..], "RATE is missing"),
        (&["300/1s", "--until", "2020-01-01T00:00:00Z"], "is not in the future"),
        (&["200/1s", "--until", "06:00"], "would go back to the same rate, 200/1s"),
    ] {
        let (refused, _) = desk.run(&[&set[..4], more].concat()).await.failure();
        assert!(refused.contains(words), "{more:?}: {refused}");
    }
}

/// A provider that allows 10 per second, asked 12 times in the first 120 ms of each second. Half of its 429s came on
/// connections that were used before, so the outcome of their requests is unknown.
#[tokio::test]
async fn repeated_429s_suggest_a_limit() {
    let desk = Desk::open().await;
    desk.payment("a", "acme", "waiting").await;
    let hint = async || desk.run(&["provider", "show", "acme", "--json"]).await.json()["throttling"].take();
    assert_eq!(hint().await, json!(null));
    desk.sql(
        "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, status, counted) \
         WITH RECURSIVE sent(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM sent WHERE n < 239), \
             clock AS (SELECT CAST(strftime('%s', 'now') AS INTEGER) * 1000 - 60000 AS start) \
         SELECT 'a', n + 1, 'acme', start + n / 12 * 1000 + n % 12 * 10, start + n / 12 * 1000 + n % 12 * 10 + 30, \
             CASE WHEN n % 12 < 10 THEN 'accepted' WHEN n % 12 = 10 THEN 'throttled' ELSE 'unknown' END, \
             CASE WHEN n % 12 < 10 THEN 200 ELSE 429 END, 1 \
         FROM sent, clock",
    )
    .await;
    let shown = hint().await;
    let text = "40 × 429 in the last hour; the largest window without one was 10/1s";
    assert_eq!((&shown["text"], &shown["limit"]), (&json!(text), &json!("per-second")), "{shown}");
    assert_eq!((&shown["max_requests"], &shown["window_ms"]), (&json!(10), &json!(1_000)));
    let shown = desk.run(&["provider", "show", "acme"]).await.out;
    assert!(shown.contains(&format!("# 429s: {text}")), "{shown}");
    let checked = desk.run(&["check", "--json"]).await;
    assert!(checked.out.contains(text), "{}", checked.out);
    assert!(checked.out.contains("sluicegate limits set acme per-second 10/1s"), "{}", checked.out);
    // A limit that allows no more needs no change.
    desk.run(&["limits", "set", "acme", "per-second", "10/1s"]).await;
    assert_eq!(hint().await["limit"], json!(null));
}
