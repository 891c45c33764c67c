//! Tests on every route: no response contains a hidden character of a hostile text, and no repeated key is accepted.

use super::tests::TestApi;
use crate::domain::printable::is_hidden;
use crate::ops::openapi_tests::{example_address, routes};
use crate::ops::tests::client;

#[path = "../../../tests/support/hostile.rs"]
mod hostile;

/// Needs a limiter that knows the providers; this test's limiter does not.
const ROUTES_WITHOUT_DATA: [&str; 2] = ["/api/v1/limits/{provider}", "/api/v1/limits/{provider}/backlog"];

#[tokio::test]
async fn no_route_shows_hidden_characters() {
    let stand = TestApi::new().await;
    for (id, state) in [("pay-1", "dead"), ("pay-2", "review"), ("pay-3", "waiting")] {
        stand.add_job(id, "x", state).await;
    }
    let bolt = "INSERT INTO providers (name, url) VALUES ('bolt', 'https://pay.example/'); \
        INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('bolt', 'all', 1, 1000)";
    let pool = stand.database.sqlite_pool().unwrap();
    sqlx::raw_sql(bolt).execute(&pool).await.unwrap();
    hostile::fill(&pool, hostile::HOSTILE).await;
    let mut hostile_answers = 0;
    for path in routes().await.iter().filter(|path| !path.starts_with("/assets/") && !path.starts_with("/{")) {
        for address in [example_address(path), path.replace("{name}", "bolt").replace("{id}", "pay-2")] {
            let answer = client().get(format!("{}{address}", stand.address)).send().await.unwrap();
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            let hidden: Vec<char> = text.chars().filter(|c| is_hidden(*c) && *c != '\n').collect();
            assert!(hidden.is_empty(), "{address}: {hidden:?}: {text}");
            assert!(!text.contains(hostile::SIGNATURE), "{address}: {text}");
            hostile_answers += usize::from(text.contains("\\u202e"));
            let exists = address == example_address(path) && !ROUTES_WITHOUT_DATA.contains(&path.as_str());
            assert!(!exists || status < 400 || matches!(status, 405 | 503), "{address}: {status} {text}");
        }
    }
    assert!(hostile_answers >= 6, "hostile texts were in only {hostile_answers} answers");
    let refused = client().post(format!("{}/api/v1/jobs/pay-1/resolve", stand.address));
    let refused = refused.json(&serde_json::json!({ "as": hostile::HOSTILE })).send().await.unwrap();
    let text = refused.text().await.unwrap();
    assert!(text.contains("\\u202e") && !text.chars().any(is_hidden), "{text}");
}

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
