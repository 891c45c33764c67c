//! Limits over the API: a rehearsed change, a change for good, and one until an instant.

use std::time::Duration;

use serde_json::{Value, json};

use super::tests::{TestApi, acme};
use crate::ledger::fleet::WorkerReport;

#[tokio::test]
async fn limit_change_honours_dry_run() {
    let stand = TestApi::new().await;
    for id in ["a", "b", "c"] {
        stand.add_job(id, "x", "waiting").await;
    }
    let second = "/api/v1/providers/acme/limits/second";
    let minute = "/api/v1/providers/acme/limits/minute";
    let report = WorkerReport {
        id: "one".to_owned(),
        host: "pay-1".to_owned(),
        pid: 7,
        version: "0.1.0".to_owned(),
        uptime: Duration::from_secs(60),
        format: 1,
        body: json!({"ready": true, "lanes": {"acme": {"does": "running"}}}).to_string(),
    };
    stand.database.write_report(&report).await.unwrap();
    let clears_in = |ms: u64| json!({"kind": "clears_in", "ms": ms});
    // Three jobs wait, and leave their lane at what the limits allow in a second.
    let rehearsed = json!({"limit": "minute", "from": "600/1m", "to": "2/1m", "changed": false,
                           "clears": {"from": clears_in(20), "to": clears_in(60_000)}});
    let before = stand.database_content().await;
    let ask = json!({"rate": "2/1m", "dry_run": true, "because": "too fast"});
    // The ledger is counted every few seconds.
    // The instants depend on the clock.
    let without_instants = |(status, mut body): (u16, Value)| {
        let instants = body["clears_at"].take();
        let all = instants["from"].is_string() && instants["to"].is_string();
        body.as_object_mut().unwrap().retain(|name, _| rehearsed.get(name).is_some());
        (status, body, all)
    };
    let post = async |body: Value| without_instants(stand.post(minute, body).await);
    let counted = async { while post(ask.clone()).await != (200, rehearsed.clone(), true) {} };
    tokio::time::timeout(Duration::from_secs(60), counted).await.unwrap();
    assert_eq!(stand.post(second, json!({"rate": "100/1s"})).await.1["changed"], false, "the same again");
    assert_eq!(stand.database_content().await, before);
    let mut done = rehearsed.clone();
    done["changed"] = true.into();
    assert_eq!(post(json!({"rate": "2/1m", "because": "too fast"})).await, (200, done, true));
    let rows = stand.database.readable_rows(Some(&acme())).await.unwrap();
    assert_eq!((rows[0].limits[0].max_requests, rows[0].limits[0].window_ms), (2, 60_000));
    let audit: String = stand
        .query_one(
            "SELECT program || ', ' || os_user || ', ' || because || ', ' || table_name || ' ' || row_key \
             FROM settings_audit ORDER BY id DESC LIMIT 1",
        )
        .await;
    assert_eq!(audit, "sluicegate ops, alice@curl/8.5.0, too fast, provider_limits acme/minute");
    // A closed limit clears nothing. A change that would make the row invalid is rejected, in a dry run too.
    let closed = stand.post(second, json!({"rate": "0/1s", "dry_run": true})).await.1;
    assert_eq!(closed["clears"], json!({"from": clears_in(60_000), "to": {"kind": "never", "limit": "second"}}));
    // With a limit on each account the other limits give the least time.
    let each = "INSERT INTO provider_limits (provider, name, scope, max_requests, window_ms) \
                VALUES ('acme', 'each', 'account', 6, 60000)";
    sqlx::raw_sql(each).execute(&stand.database.sqlite_pool().unwrap()).await.unwrap();
    let least =
        |ms: u64| json!({"kind": "depends_on_accounts", "at_least_ms": ms, "limits": ["each"], "about_ms": null});
    for (limit, rate, to) in [("minute", "1/1m", least(120_000)), ("each", "0/1m", least(60_000))] {
        let path = format!("/api/v1/providers/acme/limits/{limit}");
        let result = stand.post(&path, json!({"rate": rate, "dry_run": true})).await.1;
        assert_eq!(result["clears"], json!({"from": least(60_000), "to": to}), "{limit}");
    }
    sqlx::raw_sql("UPDATE provider_limits SET algorithm = 'sliding_window' WHERE name = 'second'")
        .execute(&stand.database.sqlite_pool().unwrap())
        .await
        .unwrap();
    for dry_run in [true, false] {
        let (status, answer) = stand.post(second, json!({"rate": "5/500ms", "dry_run": dry_run})).await;
        assert!(status == 409 && answer["error"].as_str().unwrap().contains("window_ms"), "{status} {answer}");
    }
}

#[tokio::test]
async fn limit_is_changed_for_a_time() {
    let stand = TestApi::new().await;
    let minute = "/api/v1/providers/acme/limits/minute";
    let until = (jiff::Timestamp::now() + Duration::from_secs(3_600)).to_string();
    let rehearsed = stand.post(minute, json!({"rate": "900/1m", "until": until, "dry_run": true})).await.1;
    assert_eq!((&rehearsed["changed"], &rehearsed["returns"]["then"]), (&json!(false), &json!("600/1m")));
    let (status, set) = stand.post(minute, json!({"rate": "900/1m", "until": until})).await;
    assert_eq!((status, &set["changed"], &set["ended_return"]), (200, &json!(true), &Value::Null));
    let returns = set["returns"].clone();
    let (_, all) = stand.get("/api/v1/limits").await;
    let shown = &all["limits"][0];
    assert_eq!((&shown["until"], &shown["then"], &shown["rate"]), (&returns["until"], &returns["then"], &set["to"]));
    // An ordinary change ends the return, and its answer says so.
    let set = stand.post(minute, json!({"until": "none", "because": "for good"})).await.1;
    assert_eq!((&set["from"], &set["to"], &set["ended_return"]), (&json!("900/1m"), &json!("900/1m"), &returns));
    assert_eq!(stand.get("/api/v1/limits").await.1["limits"][0]["until"], Value::Null);
    for (body, status, words) in [
        (json!({"rate": "900/1m", "until": "6:00"}), 400, "`until`: `6:00` is not a time of day"),
        (json!({"rate": "800/1m", "until": "2020-01-01T00:00:00Z"}), 409, "is not in the future"),
        (json!({"rate": "900/1m", "until": "06:00"}), 409, "would go back to the same rate"),
        (json!({"until": "06:00"}), 400, "missing field `rate`"),
        (json!({"because": "why"}), 400, "missing field `rate`"),
    ] {
        let (found, answer) = stand.post(minute, body).await;
        let error = answer["error"].as_str().unwrap();
        assert!(found == status && error.contains(words), "{found} {error}");
    }
}
