//! Tests with hostile texts in the database: no response of any route contains a hidden character.

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
