//! Tests with repeated keys in a body and repeated parameters in an address: the request is rejected on every route.

use super::tests::TestApi;
use crate::ops::tests::client;

/// A proxy may have read the other value.
#[tokio::test]
async fn a_repeated_key_changes_nothing_on_any_route() {
    let stand = TestApi::new().await;
    stand.add_job("pay-1", "x", "review").await;
    stand.add_job("pay-2", "x", "dead").await;
    let before = stand.database_content().await;
    for (path, body, key) in [
        ("providers/acme/limits/second", r#"{"rate": "1/1s", "rate": "900/1s"}"#, "rate"),
        ("providers/acme/limits/second", r#"{"rate": "900/1s", "dry_run": true, "dry_run": false}"#, "dry_run"),
        ("providers/acme/limits/second", r#"{"rate": "900/1s", "because": {"a": 1, "a": 2}}"#, "because"),
        ("providers/acme/pause", r#"{"because": "a", "because": "b"}"#, "because"),
        ("providers/acme/resume", r#"{"because": "a", "because": "a"}"#, "because"),
        ("jobs/pay-1/resolve", r#"{"as": "declined", "as": "succeeded"}"#, "as"),
        ("jobs/pay-1/resolve", r#"{"as": "declined", "\u0061s": "succeeded"}"#, "as"),
        ("jobs/pay-1/cancel", r#"{"because": "a", "because": "b"}"#, "because"),
        ("dlq/pay-2/replay", r#"{"because": "a", "because": "b"}"#, "because"),
        ("dlq/pay-2/discard", r#"{"because": "a", "because": "b"}"#, "because"),
    ] {
        let request = client().post(format!("{}/api/v1/{path}", stand.address));
        let answer = request.header("content-type", "application/json").body(body).send().await.unwrap();
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        assert!(status == 400 && text.contains(&format!("`{key}`")), "{path} {body}: {status} {text}");
    }
    for query in ["limit=5&limit=6", "provider=acme&provider=bolt", "state=dead&state=review"] {
        let answer = client().get(format!("{}/api/v1/jobs?{query}", stand.address)).send().await.unwrap();
        assert_eq!(answer.status(), 400, "{query}");
    }
    assert_eq!(stand.database_content().await, before);
}
